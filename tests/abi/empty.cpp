// SPDX-License-Identifier: MIT
// Batches without an entry, a query or a key, as frameworks make them: plans are made, runs write what there is to
// write, and the data of tensors without elements may be NULL.
#include "abi/abi.h"

using namespace abi;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

struct Sizes {
    int64_t batch, seq_q, seq_k;
};
constexpr Sizes empty_sizes[] = {{0, 5, 7}, {2, 0, 7}, {2, 5, 0}, {0, 0, 0}, {2, 0, 0}, {0, 0, 7}};

struct Option {
    const char* name;
    uint32_t flags;
    spattn_enum axes;
    spattn_dtype dtype;
};
const Option options[] = {
    {"plain", 0, SPATTN_BHSD, f32},
    {"bshd", 0, SPATTN_BSHD, f32},
    {"packed", 0, SPATTN_THD, f32},
    {"reference", SPATTN_PLAN_REFERENCE, SPATTN_BHSD, f32},
    {"float64", 0, SPATTN_BHSD, f64},
    {"bfloat16", 0, SPATTN_BHSD, bf16},
    {"float8", 0, SPATTN_BHSD, float8},
    {"packed float8", 0, SPATTN_THD, float8},
    {"sinks and values in keys of float8", SPATTN_PLAN_SINK_LOGITS | SPATTN_PLAN_VALUE_IN_KEY, SPATTN_BSHD, float8},
    {"sinks", SPATTN_PLAN_SINK_LOGITS, SPATTN_BHSD, f32},
    {"sinks in float64", SPATTN_PLAN_SINK_LOGITS, SPATTN_BHSD, f64},
    {"values in keys", SPATTN_PLAN_VALUE_IN_KEY, SPATTN_BHSD, f32},
};

bool is_float8(const spattn_problem& p) { return p.dtype.code == SPATTN_FLOAT8_E4M3FN; }

spattn_problem make_empty(const Sizes& sizes, const Option& option) {
    auto problem = make_problem();
    problem.flags |= option.flags;
    problem.axes = option.axes;
    problem.dtype = option.dtype;
    problem.batch = option.axes == SPATTN_THD ? 1 : sizes.batch;
    problem.seq_q = sizes.seq_q;
    problem.seq_k = sizes.seq_k;
    return problem;
}

bool is_empty(const spattn_problem& p) { return p.batch == 0 || p.seq_q == 0 || p.seq_k == 0; }

// A tensor that has no memory where it has no element.
struct Operand : Tensor {
    Operand(std::vector<int64_t> sizes, spattn_dtype dtype) : Tensor(std::move(sizes), dtype) {
        if (bytes == 0) view.data = nullptr;
    }
    bool is_zero() const { return std::all_of(data, data + bytes, [](unsigned char byte) { return byte == 0; }); }
    bool is_everywhere(float value) const {
        const auto* floats = reinterpret_cast<const float*>(data);
        return std::all_of(floats, floats + bytes / 4, [&](float x) { return x == value; });
    }
};

std::vector<int64_t> matrix_shape(const spattn_problem& p, int64_t heads, int64_t seq, int64_t dim) {
    if (p.axes == SPATTN_THD) return {seq, heads, dim};
    if (p.axes == SPATTN_BSHD) return {p.batch, seq, heads, dim};
    return {p.batch, heads, seq, dim};
}
// As k or q, without head_dim.
std::vector<int64_t> scales_shape(const spattn_problem& p, int64_t heads, int64_t seq) {
    auto shape = matrix_shape(p, heads, seq, 1);
    shape.pop_back();
    return shape;
}
std::vector<int64_t> rows_shape(const spattn_problem& p) {
    if (p.axes == SPATTN_THD) return {p.heads_q, p.seq_q};
    return {p.batch, p.heads_q, p.seq_q};
}

struct Scratch {
    Scratch(const spattn_plan* plan, spattn_enum op) {
        size_t align = 1;
        succeed(spattn_plan_workspace(plan, op, &bytes, &align), "workspace");
        memory.assign(bytes + align, 0xff);  // NaN wherever something is read that nobody wrote
        start = memory.data() + (align - reinterpret_cast<uintptr_t>(memory.data()) % align) % align;
    }
    size_t bytes = 0;
    std::vector<unsigned char> memory;
    unsigned char* start;
};

void check_runs(const spattn_plan* plan, const spattn_problem& p) {
    const bool has_sinks = p.flags & SPATTN_PLAN_SINK_LOGITS, in_key = p.flags & SPATTN_PLAN_VALUE_IN_KEY;
    const spattn_dtype out_dtype = is_float8(p) ? bf16 : p.dtype;
    Operand q(matrix_shape(p, p.heads_q, p.seq_q, p.head_dim), p.dtype), dq(q.shape, out_dtype);
    Operand k(matrix_shape(p, p.heads_kv, p.seq_k, p.head_dim), p.dtype), dk(k.shape, out_dtype);
    Operand v(matrix_shape(p, p.heads_kv, p.seq_k, p.head_dim_v), p.dtype), dv(v.shape, out_dtype);
    Operand out(matrix_shape(p, p.heads_q, p.seq_q, p.head_dim_v), out_dtype), dout(out.shape, out_dtype);
    Operand q_scales(scales_shape(p, p.heads_q, p.seq_q), f32), k_scales(scales_shape(p, p.heads_kv, p.seq_k), f32);
    Operand lse(rows_shape(p), f32), max_logits(lse.shape, f32), dlse(lse.shape, f32);
    Operand sinks({p.heads_q}, f32), dsinks(sinks.shape, f32);
    std::fill_n(sinks.as<float>(), p.heads_q, 90.f);  // exp(90) overflows float32
    std::fill_n(dlse.as<float>(), dlse.bytes / 4, 0.5f);

    const Scratch forward(plan, SPATTN_OP_FORWARD);
    auto args = sized<spattn_forward_args>();
    args.q = &q.view, args.k = &k.view, args.v = in_key ? nullptr : &v.view;
    args.out = &out.view, args.lse = &lse.view, args.max_logits = &max_logits.view;
    args.sink_logits = has_sinks ? &sinks.view : nullptr;
    if (is_float8(p)) {
        args.q_scales = &q_scales.view, args.k_scales = &k_scales.view;
        args.v_scales = in_key ? nullptr : &k_scales.view;
    }
    args.workspace = forward.start, args.workspace_bytes = forward.bytes;
    succeed(spattn_forward(plan, &args), "forward");
    CHECK(out.is_zero());
    CHECK(lse.is_everywhere(has_sinks ? 90.f : -infinity));
    CHECK(max_logits.is_everywhere(-infinity));

    const Scratch backward(plan, SPATTN_OP_BACKWARD);
    auto gradients = sized<spattn_backward_args>();
    gradients.q = &q.view, gradients.k = &k.view, gradients.v = args.v;
    gradients.out = &out.view, gradients.lse = &lse.view, gradients.dout = &dout.view, gradients.dlse = &dlse.view;
    gradients.dq = &dq.view, gradients.dk = &dk.view, gradients.dv = in_key ? nullptr : &dv.view;
    gradients.q_scales = args.q_scales, gradients.k_scales = args.k_scales, gradients.v_scales = args.v_scales;
    gradients.sink_logits = args.sink_logits, gradients.dsink_logits = has_sinks ? &dsinks.view : nullptr;
    gradients.workspace = backward.start, gradients.workspace_bytes = backward.bytes;
    succeed(spattn_backward(plan, &gradients), "backward");
    CHECK(dq.is_zero());
    CHECK(dk.is_zero());
    CHECK(in_key || dv.is_zero());
    // Each row that is there has lse = z, so its dlse arrives at z.
    if (has_sinks) CHECK(dsinks.is_everywhere(0.5f * float(p.batch * p.seq_q)));
}

void check_plan(const spattn_plan* plan, const spattn_problem& p) {
    auto stats = sized<spattn_stats>();
    succeed(spattn_plan_stats(plan, &stats), "stats");
    CHECK_EQ(stats.pairs, 0.);
    CHECK_EQ(stats.density, 0.);
    CHECK_EQ(stats.rows_empty, p.batch * p.heads_q * p.seq_q);
    CHECK_EQ(stats.row_max, 0);
    const std::string text = explain(plan);
    CHECK(text.find("queries " + std::to_string(p.seq_q) + ", keys " + std::to_string(p.seq_k)) != std::string::npos);
    CHECK(text.find("pattern     causal") != std::string::npos);
    CHECK(spattn_plan_kernel(plan, SPATTN_OP_BACKWARD) != nullptr);
}

}  // namespace

TEST(runs_write_zeros) {
    const Context context = make_context();
    const Pattern pattern = parse("causal | sink(2)");
    for (const Option& option : options)
        for (const Sizes& sizes : empty_sizes) {
            const auto problem = make_empty(sizes, option);
            if (!is_empty(problem)) continue;
            check::context = std::string(option.name) + ", batch " + std::to_string(problem.batch) + ", queries " +
                             std::to_string(problem.seq_q) + ", keys " + std::to_string(problem.seq_k);
            const Plan plan = make_plan(context.get(), pattern.get(), problem);
            if (!plan) continue;
            check_plan(plan.get(), problem);
            check_runs(plan.get(), problem);
        }
}

TEST(lists_of_a_run_may_be_empty_too) {
    const Context context = make_context();
    const Pattern pattern = parse("runtime_tokens(3) & causal");
    for (const Sizes& sizes : empty_sizes) {
        auto problem = make_empty(sizes, options[0]);
        problem.flags = 0;
        const Plan plan = make_plan(context.get(), pattern.get(), problem);
        Operand q({problem.batch, problem.heads_q, problem.seq_q, problem.head_dim}, f32),
            k({problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim}, f32),
            v({problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim_v}, f32),
            out({problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v}, f32),
            lists({problem.batch, problem.seq_q, problem.heads_kv, 3}, i32);
        std::fill_n(lists.as<int32_t>(), lists.bytes / 4, 0);
        const Scratch scratch(plan.get(), SPATTN_OP_FORWARD);
        auto args = sized<spattn_forward_args>();
        args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view;
        args.workspace = scratch.start, args.workspace_bytes = scratch.bytes;
        demand("no lists", "spattn_forward", spattn_forward(plan.get(), &args), SPATTN_E_NULL, "indices");
        args.indices = &lists.view;
        succeed(spattn_forward(plan.get(), &args), "forward");
        CHECK(out.is_zero());
    }
}

TEST(a_tensor_with_elements_needs_data) {
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    const auto problem = make_empty({2, 5, 0}, options[0]);
    const Plan plan = make_plan(context.get(), pattern.get(), problem);
    Operand q({2, problem.heads_q, 5, problem.head_dim}, f32), k({2, problem.heads_kv, 0, problem.head_dim}, f32),
        v({2, problem.heads_kv, 0, problem.head_dim_v}, f32), out({2, problem.heads_q, 5, problem.head_dim_v}, f32);
    const Scratch scratch(plan.get(), SPATTN_OP_FORWARD);
    auto args = sized<spattn_forward_args>();
    args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view;
    args.workspace = scratch.start, args.workspace_bytes = scratch.bytes;
    out.view.data = nullptr;
    demand("out NULL", "spattn_forward", spattn_forward(plan.get(), &args), SPATTN_E_NULL, "out");
    out.view.data = out.data;
    args.workspace_bytes -= 1;
    demand("workspace short", "spattn_forward", spattn_forward(plan.get(), &args), SPATTN_E_WORKSPACE,
           "workspace_bytes");
}

TEST(patterns_of_other_sizes_are_refused) {
    const Context context = make_context();
    const auto problem = make_empty({0, 5, 7}, options[0]);
    const Pattern pattern = parse("per_batch([0,0], causal)");
    const auto call = [&](auto r) { return spattn_plan_create(context.get(), pattern.get(), &problem, nullptr, r); };
    demand_no_handle<spattn_plan>("spattn_plan_create", {{"of two entries", call, SPATTN_E_SHAPE, "pattern"}});
}
