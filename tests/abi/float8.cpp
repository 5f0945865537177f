// SPDX-License-Identifier: MIT
// Operands of float8: every row of kernels gives the same bits as for the bfloat16 that they stand for; what a plan
// says of them; and what is refused.
#include <algorithm>
#include <bit>
#include <sstream>
#include <string>

#include "abi/abi.h"

using namespace abi;

namespace {

constexpr int64_t batch = 2, seq_q = 37, seq_k = 70, dim = 24, dim_v = 16;
constexpr uint32_t in_key = SPATTN_PLAN_VALUE_IN_KEY;

enum class Scales { none, of_rows, of_heads, one };
constexpr const char* scales_names[] = {"no scales", "scales of rows", "scales of heads", "one scale"};

spattn_problem float8_problem(spattn_enum axes, uint32_t flags = 0) {
    auto p = sized<spattn_problem>();
    p.flags = flags, p.axes = axes, p.dtype = float8;
    p.batch = axes == SPATTN_THD ? 1 : batch, p.heads_q = 4, p.heads_kv = 2, p.seq_q = seq_q, p.seq_k = seq_k;
    p.head_dim = dim, p.head_dim_v = dim_v;
    return p;
}

std::vector<int64_t> shape_of(const spattn_problem& p, int64_t heads, int64_t seq, int64_t columns) {
    if (p.axes == SPATTN_THD) return {seq, heads, columns};
    if (p.axes == SPATTN_BSHD) return {p.batch, seq, heads, columns};
    return {p.batch, heads, seq, columns};
}
std::vector<int64_t> lse_shape(const spattn_problem& p) {
    if (p.axes == SPATTN_THD) return {p.heads_q, p.seq_q};
    return {p.batch, p.heads_q, p.seq_q};
}

// Codes of all numbers, their scales, and the elements of bfloat16 that they stand for, each rounded once: scales have
// 20 digits, so that floats hold the products.
struct Operand {
    Tensor codes, scales, elements;

    Operand(const spattn_problem& p, int64_t heads, int64_t seq, int64_t columns, Scales kind, uint32_t seed)
        : codes(shape_of(p, heads, seq, columns), float8), scales(rows_of(codes.shape), f32),
          elements(codes.shape, bf16) {
        const auto draw = [&](uint32_t count) {
            seed = seed * 1664525u + 1013904223u;
            return (seed >> 8) % count;
        };
        float* const all = scales.as<float>();
        for (int64_t row = 0; row < int64_t(scales.bytes / sizeof(float)); ++row) {
            const float scale = std::ldexp(float((1 << 19) + draw(1 << 19)), -28);
            all[row] = draw(2) ? -scale : scale;
        }
        const size_t head_axis = p.axes == SPATTN_THD ? 1 : p.axes == SPATTN_BSHD ? 2 : 1;
        for (size_t axis = 0; axis < scales.strides.size(); ++axis)
            if (kind == Scales::one || (kind == Scales::of_heads && axis != head_axis)) scales.strides[axis] = 0;
        if (kind == Scales::of_heads) scales.strides[head_axis] = 1;
        for (int64_t row = 0; row < int64_t(codes.bytes) / columns; ++row)
            for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
                codes.data[i] = static_cast<unsigned char>(draw(127) | draw(2) << 7);
                const double size = float8_size(codes.data[i] & 0x7f);
                const double scale = kind == Scales::none ? 1 : double(all[place(row)]);
                const float product = float(scale * (codes.data[i] & 0x80 ? -size : size));
                const uint32_t bits = std::bit_cast<uint32_t>(product);
                elements.as<uint16_t>()[i] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            }
    }

private:
    static std::vector<int64_t> rows_of(std::vector<int64_t> shape) {
        shape.pop_back();
        return shape;
    }
    // Where the scale of a row lies, of rows in the order of memory.
    int64_t place(int64_t row) const {
        int64_t at = 0;
        for (size_t axis = scales.shape.size(); axis-- > 0; row /= scales.shape[axis])
            at += row % scales.shape[axis] * scales.strides[axis];
        return at;
    }
};

// A call of float8, or of the elements that its operands stand for.
struct Call {
    Operand q, k, v;
    Tensor out, lse, max_logits, sinks, dout, dlse, dq, dk, dv, dsinks;
    spattn_forward_args args = sized<spattn_forward_args>();
    spattn_backward_args gradients = sized<spattn_backward_args>();
    std::vector<unsigned char> memory;

    Call(const spattn_problem& p, Scales of_q, Scales of_k, Scales of_v)
        : q(p, p.heads_q, p.seq_q, p.head_dim, of_q, 1), k(p, p.heads_kv, p.seq_k, p.head_dim, of_k, 2),
          v(p, p.heads_kv, p.seq_k, p.head_dim_v, of_v, 3),
          out(shape_of(p, p.heads_q, p.seq_q, p.head_dim_v), bf16), lse(lse_shape(p), f32), max_logits(lse.shape, f32),
          sinks({p.heads_q}, f32), dout(out.shape, bf16), dlse(lse.shape, f32), dq(q.codes.shape, bf16),
          dk(k.codes.shape, bf16), dv(v.codes.shape, bf16), dsinks(sinks.shape, f32) {
        const bool is_float8 = p.dtype.code == SPATTN_FLOAT8_E4M3FN, has_v = !(p.flags & in_key);
        sinks.fill(4), dout.fill(5), dlse.fill(6);
        args.q = is_float8 ? &q.codes.view : &q.elements.view, args.k = is_float8 ? &k.codes.view : &k.elements.view;
        if (has_v) args.v = is_float8 ? &v.codes.view : &v.elements.view;
        args.out = &out.view, args.lse = &lse.view, args.max_logits = &max_logits.view;
        if (p.flags & SPATTN_PLAN_SINK_LOGITS) args.sink_logits = &sinks.view;
        if (is_float8 && of_q != Scales::none) args.q_scales = &q.scales.view;
        if (is_float8 && of_k != Scales::none) args.k_scales = &k.scales.view;
        if (is_float8 && of_v != Scales::none && has_v) args.v_scales = &v.scales.view;
        gradients.dout = &dout.view, gradients.dlse = &dlse.view, gradients.dq = &dq.view, gradients.dk = &dk.view;
        if (has_v) gradients.dv = &dv.view;
        if (p.flags & SPATTN_PLAN_SINK_LOGITS) gradients.dsink_logits = &dsinks.view;
    }
    // Scratch begins as NaN. Where a plan's row writes no largest logits, there are none.
    void run(const spattn_plan* plan) {
        bring_workspace(plan);
        spattn_status status = spattn_forward(plan, &args);
        if (status == SPATTN_E_UNSUPPORTED) args.max_logits = nullptr, status = spattn_forward(plan, &args);
        succeed(status, "forward");
    }
    // Behind a forward, of the same operands.
    void run_back(const spattn_plan* plan) {
        bring_gradients(plan);
        succeed(spattn_backward(plan, &gradients), "backward");
    }
    void bring_workspace(const spattn_plan* plan) { bring_workspace(plan, SPATTN_OP_FORWARD, args); }
    void bring_gradients(const spattn_plan* plan) {
        bring_workspace(plan, SPATTN_OP_BACKWARD, gradients);
        spattn_backward_args& b = gradients;
        b.q = args.q, b.k = args.k, b.v = args.v, b.out = args.out, b.lse = args.lse;
        b.sink_logits = args.sink_logits, b.indices = args.indices;
        b.q_scales = args.q_scales, b.k_scales = args.k_scales, b.v_scales = args.v_scales;
    }

private:
    template <class Args>
    void bring_workspace(const spattn_plan* plan, spattn_enum op, Args& to) {
        size_t bytes = 0, align = 1;
        succeed(spattn_plan_workspace(plan, op, &bytes, &align), "workspace");
        memory.assign(bytes + align, 0xff);
        to.workspace = memory.data() + (align - reinterpret_cast<uintptr_t>(memory.data()) % align) % align;
        to.workspace_bytes = bytes;
    }
};

void demand_same_bits(const Call& got, const Call& want) {
    CHECK(!got.out.is_poison());
    CHECK(got.out.content() == want.out.content());
    CHECK(got.lse.content() == want.lse.content());
    CHECK(got.max_logits.content() == want.max_logits.content());
}
void demand_same_gradients(const Call& got, const Call& want) {
    CHECK(!got.dq.is_poison() && !got.dk.is_poison());
    CHECK(got.dq.content() == want.dq.content());
    CHECK(got.dk.content() == want.dk.content());
    CHECK(got.dv.content() == want.dv.content());
    CHECK(got.dsinks.content() == want.dsinks.content());
}

// Makes a plan of so pinned a row; none where the row does not take the problem.
Plan try_plan(const Context& context, const std::string& pattern, const spattn_problem& p, const std::string& row) {
    spattn_plan* made = nullptr;
    setenv("SPATTN_FORCE_KERNEL", row.c_str(), 1);
    const auto status = spattn_plan_create(context.get(), parse(pattern.c_str()).get(), &p, nullptr, &made);
    unsetenv("SPATTN_FORCE_KERNEL");
    if (status != SPATTN_E_NO_KERNEL) succeed(status, "plan");
    return Plan(made);
}

bool is_for_gpus(const std::string& name) { return name.rfind("sm", 0) == 0 || name.rfind("any", 0) == 0; }

std::vector<std::string> cpu_rows() {
    std::vector<std::string> names;
    for (int32_t n = 0; n < spattn_kernel_count(); ++n) {
        const std::string name = spattn_kernel_name(n);
        const bool is_wanted = name.find("_bf16") != name.npos;
        if (is_wanted && !is_for_gpus(name) && spattn_kernel_runs_here(n)) names.push_back(name);
    }
    return names;
}

// The lines of a plan's text that say which tiles there are. Copies have a cost, so that a plan of float8 may choose
// other ones, whose sums have another order.
std::string tiles_of(const spattn_plan* plan) {
    std::istringstream text(explain(plan));
    std::string lines;
    for (std::string line; std::getline(text, line);)
        if (line.rfind("  order ", 0) == 0 || line.rfind("  blocks ", 0) == 0) lines += line + "\n";
    return lines;
}

// Heads of a group, as a row whose tiles share them asks.
int64_t group_of(const std::string& row) {
    const size_t at = row.rfind("_heads");
    return at != row.npos && at + 6 < row.size() ? std::stoll(row.substr(at + 6)) : 2;
}

struct Case {
    const char* pattern;
    spattn_enum axes;
    uint32_t flags;
    double softcap;
    Scales of_q, of_k, of_v;
};
const Case cases[] = {
    {"full", SPATTN_BHSD, 0, 0, Scales::of_rows, Scales::of_rows, Scales::of_rows},
    {"causal & window(20,0) | sink(3)", SPATTN_BSHD, 0, 0, Scales::of_heads, Scales::one, Scales::none},
    {"dilated(9,9,3)", SPATTN_THD, 0, 30, Scales::one, Scales::of_rows, Scales::of_heads},
    {"strided(5)", SPATTN_THD, 0, 0, Scales::none, Scales::of_heads, Scales::of_rows},
    {"full", SPATTN_BSHD, SPATTN_PLAN_SINK_LOGITS, 0, Scales::of_rows, Scales::none, Scales::one},
    {"window(30,30)", SPATTN_BHSD, in_key, 0, Scales::of_rows, Scales::of_rows, Scales::none},
};

}  // namespace

TEST(every_row_gives_what_the_products_give) {
    const Context context = make_context();
    for (const std::string& row : cpu_rows()) {
        const bool is_backward = row.find("backward") != row.npos;
        int served = 0;
        for (const Case& c : cases)
            for (const int64_t queries : {seq_q, int64_t(1)}) {
                check::context = row + ", " + c.pattern + ", " + std::to_string(queries) + " queries, " +
                                 scales_names[int(c.of_q)] + ", " + scales_names[int(c.of_k)] + ", " +
                                 scales_names[int(c.of_v)];
                auto p = float8_problem(c.axes, c.flags);
                p.softcap = c.softcap, p.seq_q = queries, p.heads_q = 2 * group_of(row);
                if (row.rfind("reference", 0) == 0) p.flags |= SPATTN_PLAN_REFERENCE;
                if (is_backward) p.flags |= SPATTN_PLAN_BACKWARD;
                const Plan plan = try_plan(context, c.pattern, p, row);
                Call got(p, c.of_q, c.of_k, c.of_v);
                p.dtype = bf16;
                const Plan right = try_plan(context, c.pattern, p, row);
                CHECK_EQ(plan != nullptr, right != nullptr);
                if (!plan || !right || tiles_of(plan.get()) != tiles_of(right.get())) continue;
                const spattn_enum op = is_backward ? SPATTN_OP_BACKWARD : SPATTN_OP_FORWARD;
                CHECK_EQ(std::string(spattn_plan_kernel(plan.get(), op)), row);
                Call want(p, c.of_q, c.of_k, c.of_v);
                got.run(plan.get()), want.run(right.get());
                demand_same_bits(got, want);
                if (is_backward) got.run_back(plan.get()), want.run_back(right.get()), demand_same_gradients(got, want);
                ++served;
            }
        check::context = row;
        CHECK(served > 0);
    }
}

// Where the library chooses: in pieces, or lists that a call brings.
TEST(calls_of_many_tokens_and_of_lists) {
    const Context context = make_context();
    for (const char* pattern : {"causal & (window(64,0) | strided(64))", "runtime_tokens(9) & causal"}) {
        check::context = pattern;
        auto p = float8_problem(SPATTN_BSHD, SPATTN_PLAN_BACKWARD);
        const bool is_listed = *pattern == 'r';
        p.batch = p.heads_kv = 1, p.heads_q = 2, p.seq_q = p.seq_k = is_listed ? 200 : 4096;
        const Plan plan = make_plan(context.get(), parse(pattern).get(), p);
        Call got(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
        p.dtype = bf16;
        const Plan right = make_plan(context.get(), parse(pattern).get(), p);
        CHECK_EQ(std::string(spattn_plan_kernel(plan.get(), SPATTN_OP_FORWARD)),
                 spattn_plan_kernel(right.get(), SPATTN_OP_FORWARD));
        CHECK_EQ(explain(plan.get()).find("piece") != std::string::npos, !is_listed);
        Call want(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
        Tensor lists({1, p.seq_q, 1, 9}, i32);
        for (size_t i = 0; i < lists.bytes / sizeof(int32_t); ++i) lists.as<int32_t>()[i] = int32_t(i * 37 % 211) - 5;
        if (is_listed) got.args.indices = want.args.indices = &lists.view;
        got.run(plan.get()), want.run(right.get());
        demand_same_bits(got, want);
        got.run_back(plan.get()), want.run_back(right.get());
        demand_same_gradients(got, want);
    }
}

TEST(threads_change_no_bits) {
    const auto p = float8_problem(SPATTN_BHSD);
    std::vector<unsigned char> first;
    for (const int32_t threads : {1, 3}) {
        const Context context = make_context(threads, -1);
        const Plan plan = make_plan(context.get(), parse("causal").get(), p);
        Call call(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
        call.run(plan.get());
        if (threads == 1) first = call.out.content();
        CHECK(call.out.content() == first);
    }
}

// Codes and scales that no query sees, and those of queries that see nothing.
TEST(what_nobody_sees_may_be_anything) {
    const Context context = make_context();
    for (const uint32_t flags : {0u, in_key, uint32_t(SPATTN_PLAN_REFERENCE)}) {
        auto p = float8_problem(SPATTN_BHSD, flags | SPATTN_PLAN_Q_OFFSET | SPATTN_PLAN_BACKWARD);
        p.q_offset = -3;  // the first queries see nothing, the last keys are seen by nobody
        const Plan plan = make_plan(context.get(), parse("causal").get(), p);
        Call plain(p, Scales::of_rows, Scales::of_rows, Scales::of_rows), spoilt(p, Scales::of_rows, Scales::of_rows,
                                                                                Scales::of_rows);
        for (int64_t plane = 0; plane < batch * p.heads_q; ++plane)
            for (int64_t row = 0; row < 3; ++row) {
                std::fill_n(spoilt.q.codes.data + (plane * seq_q + row) * dim, dim, static_cast<unsigned char>(0x7f));
                spoilt.q.scales.as<float>()[plane * seq_q + row] = std::nanf("");
            }
        for (int64_t plane = 0; plane < batch * p.heads_kv; ++plane)
            for (int64_t row = seq_q - 3; row < seq_k; ++row) {
                const int64_t at = plane * seq_k + row;
                std::fill_n(spoilt.k.codes.data + at * dim, dim, static_cast<unsigned char>(row % 2 ? 0xff : 0x7e));
                std::fill_n(spoilt.v.codes.data + at * dim_v, dim_v, static_cast<unsigned char>(row % 2 ? 0x7e : 0xff));
                spoilt.k.scales.as<float>()[at] = row % 3 ? HUGE_VALF : 3e38f;
                spoilt.v.scales.as<float>()[at] = row % 3 ? -HUGE_VALF : std::nanf("");
            }
        plain.run(plan.get()), spoilt.run(plan.get());
        demand_same_bits(spoilt, plain);
        plain.run_back(plan.get()), spoilt.run_back(plan.get());
        demand_same_gradients(spoilt, plain);
    }
}

TEST(a_plan_says_what_it_is_of) {
    const Context context = make_context(2, 8);  // with a cache of plans
    const Pattern pattern = parse("causal");
    auto p = float8_problem(SPATTN_BHSD, SPATTN_PLAN_BACKWARD);
    p.dtype = bf16;
    const Plan plain = make_plan(context.get(), pattern.get(), p);
    p.dtype = float8;
    const Plan plan = make_plan(context.get(), pattern.get(), p), again = make_plan(context.get(), pattern.get(), p);
    CHECK(explain(plan.get()).find(", bf16 from float8_e4m3fn, scale ") != std::string::npos);
    CHECK(explain(plain.get()).find("float8") == std::string::npos);
    CHECK_EQ(explain(again.get()), explain(plan.get()));
    Call call(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
    call.run(again.get());

    // The copies of all operands, behind what each pass's row needs.
    const std::string text = explain(plan.get()), copies = "  copies    q, k and v as bf16, once a call\n";
    const size_t first = text.find(copies), backward = text.find("backward  ");
    CHECK(first < backward && text.find(copies, backward) != text.npos);
    for (const spattn_enum op : {SPATTN_OP_FORWARD, SPATTN_OP_BACKWARD}) {
        size_t with = 0, without = 0, align = 0;
        succeed(spattn_plan_workspace(plan.get(), op, &with, &align), "workspace");
        succeed(spattn_plan_workspace(plain.get(), op, &without, &align), "workspace");
        CHECK(with >= without + 2 * size_t(batch * (4 * seq_q * dim + 2 * seq_k * (dim + dim_v))));
    }

    auto stats = sized<spattn_stats>(), of_plain = sized<spattn_stats>();
    succeed(spattn_plan_stats(plan.get(), &stats), "stats");
    succeed(spattn_plan_stats(plain.get(), &of_plain), "stats");
    CHECK_EQ(stats.pairs, of_plain.pairs);
    CHECK_EQ(stats.flops_forward, of_plain.flops_forward);
    const double rows_q = batch * 4 * seq_q, rows_k = batch * 2 * seq_k;
    CHECK_EQ(stats.bytes_forward, rows_q * (dim + 2 * dim_v + 4) + rows_k * (dim + dim_v + 8) + 4 * rows_q);
    CHECK_EQ(stats.flops_backward, of_plain.flops_backward);
    CHECK_EQ(stats.bytes_backward,
             rows_q * (3 * dim + 4 * dim_v + 4) + rows_k * (3 * (dim + dim_v) + 8) + 4 * rows_q);
}

// ---- what is refused ----

TEST(problems_of_float8_that_are_refused) {
    const Context context = make_context();
    const Pattern pattern = parse("causal");
    const auto demand_refused = [&](const char* what, const spattn_problem& p, spattn_status status,
                                    const char* argument) {
        const auto call = [&](auto r) { return spattn_plan_create(context.get(), pattern.get(), &p, nullptr, r); };
        demand_no_handle<spattn_plan>("spattn_plan_create", {{what, call, status, argument}});
    };
    const auto plain = [](uint32_t flags = 0) { return float8_problem(SPATTN_BHSD, flags); };
    demand_refused("queries on a cache", plain(SPATTN_PLAN_STARTS), SPATTN_E_UNSUPPORTED, "problem.dtype");
    auto p = plain(SPATTN_PLAN_STARTS);
    p.page_size = 10, p.cache_dtype = float8;
    demand_refused("queries on a cache of float8", p, SPATTN_E_UNSUPPORTED, "problem.dtype");
    p = plain(), p.cache_dtype = float8;
    demand_refused("a cache_dtype without a cache", p, SPATTN_E_DTYPE, "problem.cache_dtype");
    for (const spattn_dtype wrong : {spattn_dtype{SPATTN_FLOAT8_E4M3FN, 8, 2}, {SPATTN_FLOAT8_E4M3FN, 8, 0},
                                     {SPATTN_FLOAT8_E4M3FN, 16, 1}, {11, 8, 1}, u8}) {
        p = plain(), p.dtype = wrong;
        demand_refused("another dtype", p, SPATTN_E_DTYPE, "problem.dtype");
    }

    p = plain(SPATTN_PLAN_STARTS);
    Tensor row({batch, 2, 1, dim}, bf16), rows({batch, 2, seq_k, dim}, bf16), starts({batch}, i32);
    auto append = sized<spattn_cache_append_args>();
    append.k_new = append.v_new = &row.view, append.k = append.v = &rows.view, append.starts = &starts.view;
    demand("new rows of float8", "spattn_cache_append", spattn_cache_append(context.get(), &p, &append),
           SPATTN_E_UNSUPPORTED, "problem.dtype");
}

TEST(operands_of_float8_that_are_refused) {
    const Context context = make_context();
    for (const spattn_enum axes : {SPATTN_BSHD, SPATTN_BHSD, SPATTN_THD}) {
        const auto p = float8_problem(axes, SPATTN_PLAN_BACKWARD);
        const Plan plan = make_plan(context.get(), parse("causal").get(), p);
        const auto demand_refused_back = [&](const std::string& what, const std::function<void(Call&)>& spoil,
                                             spattn_status status, const std::string& argument) {
            Call call(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
            call.bring_gradients(plan.get());
            spoil(call);
            demand("axes " + std::to_string(axes) + ", " + what, "spattn_backward",
                   spattn_backward(plan.get(), &call.gradients), status, argument);
            CHECK(call.dq.is_poison() && call.dk.is_poison() && call.dv.is_poison());
        };
        const auto demand_refused_ahead = [&](const std::string& what, const std::function<void(Call&)>& spoil,
                                              spattn_status status, const std::string& argument) {
            Call call(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
            call.bring_workspace(plan.get());
            spoil(call);
            demand("axes " + std::to_string(axes) + ", " + what, "spattn_forward",
                   spattn_forward(plan.get(), &call.args), status, argument);
            CHECK(call.out.is_poison() && call.lse.is_poison() && call.max_logits.is_poison());
        };
        const auto demand_refused = [&](const std::string& what, const std::function<void(Call&)>& spoil,
                                        spattn_status status, const std::string& argument) {
            demand_refused_ahead(what, spoil, status, argument), demand_refused_back(what, spoil, status, argument);
        };
        demand_refused("a dtype of out of bytes", [](Call& c) { c.out.view.dtype = float8; }, SPATTN_E_DTYPE, "out");
        demand_refused("an lse of bfloat16", [](Call& c) { c.lse.view.dtype = bf16; }, SPATTN_E_DTYPE, "lse");
        demand_refused_ahead("one byte of workspace less", [](Call& c) { --c.args.workspace_bytes; },
                             SPATTN_E_WORKSPACE, "workspace_bytes");
        demand_refused_back("one byte of workspace less", [](Call& c) { --c.gradients.workspace_bytes; },
                            SPATTN_E_WORKSPACE, "workspace_bytes");
        demand_refused_back("a gradient of bytes", [](Call& c) { c.dk.view.dtype = float8; }, SPATTN_E_DTYPE, "dk");
        demand_refused_back("bytes for dout", [](Call& c) { c.dout.view.dtype = float8; }, SPATTN_E_DTYPE, "dout");
        const std::pair<const char*, Operand Call::*> operands[] = {{"q", &Call::q}, {"k", &Call::k}, {"v", &Call::v}};
        for (const auto& [name, operand] : operands) {
            const std::string scales = std::string(name) + "_scales";
            const auto codes_of = [operand = operand](Call& c) -> Tensor& { return (c.*operand).codes; };
            const auto scales_of = [operand = operand](Call& c) -> Tensor& { return (c.*operand).scales; };
            for (const spattn_dtype other : {bf16, u8, f32})
                demand_refused("another dtype", [&](Call& c) { codes_of(c).view.dtype = other; }, SPATTN_E_DTYPE, name);
            for (const spattn_dtype other : {bf16, f64, float8})
                demand_refused("scales of another dtype", [&](Call& c) { scales_of(c).view.dtype = other; },
                               SPATTN_E_DTYPE, scales);
            const size_t axes_of_scales = axes == SPATTN_THD ? 2 : 3;
            for (size_t axis = 0; axis < axes_of_scales; ++axis) {
                for (const int64_t by : {-1, 1})
                    demand_refused("scales of another size", [&](Call& c) { scales_of(c).shape[axis] += by; },
                                   SPATTN_E_SHAPE, scales);
                demand_refused("scales backwards", [&](Call& c) { scales_of(c).strides[axis] = -1; }, SPATTN_E_LAYOUT,
                               scales);
            }
            demand_refused("scales of elements",
                           [&](Call& c) { scales_of(c).view = codes_of(c).view, scales_of(c).view.dtype = f32; },
                           SPATTN_E_SHAPE, scales);
            demand_refused("scales of an axis less", [&](Call& c) { --scales_of(c).view.ndim; }, SPATTN_E_SHAPE,
                           scales);
            demand_refused("scales of nothing", [&](Call& c) { scales_of(c).view.data = nullptr; }, SPATTN_E_NULL,
                           scales);
            demand_refused("scales between floats", [&](Call& c) { scales_of(c).view.byte_offset = 2; },
                           SPATTN_E_LAYOUT, scales);
            demand_refused("scales of a GPU", [&](Call& c) { scales_of(c).view.device = {SPATTN_CUDA, 0}; },
                           SPATTN_E_DEVICE, scales);
            demand_refused_ahead("scales under out", [&](Call& c) { scales_of(c).view.data = c.out.data; },
                                 SPATTN_E_LAYOUT, "out");
            demand_refused_ahead("scales under lse", [&](Call& c) { scales_of(c).view.data = c.lse.data; },
                                 SPATTN_E_LAYOUT, "lse");
            demand_refused_ahead("scales under the workspace",
                                 [&](Call& c) { scales_of(c).view.data = c.args.workspace; }, SPATTN_E_LAYOUT,
                                 "workspace");
            demand_refused_back("scales under dk", [&](Call& c) { scales_of(c).view.data = c.dk.data; },
                                SPATTN_E_LAYOUT, "dk");
            demand_refused_back("scales under the workspace",
                                [&](Call& c) { scales_of(c).view.data = c.gradients.workspace; }, SPATTN_E_LAYOUT,
                                "workspace");
        }
    }
}

TEST(scales_that_do_not_go_with_a_plan) {
    const Context context = make_context();
    auto p = float8_problem(SPATTN_BHSD, in_key | SPATTN_PLAN_BACKWARD);
    const Plan of_keys = make_plan(context.get(), parse("causal").get(), p);
    Call call(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
    call.bring_workspace(of_keys.get());
    call.args.v_scales = &call.v.scales.view;
    demand("scales of values in keys", "spattn_forward", spattn_forward(of_keys.get(), &call.args), SPATTN_E_STATE,
           "v_scales");
    call.bring_gradients(of_keys.get());
    demand("scales of values in keys", "spattn_backward", spattn_backward(of_keys.get(), &call.gradients),
           SPATTN_E_STATE, "v_scales");

    p = float8_problem(SPATTN_BHSD, SPATTN_PLAN_BACKWARD), p.dtype = bf16;
    const Plan plain = make_plan(context.get(), parse("causal").get(), p);
    const std::pair<const char*, const spattn_tensor* spattn_forward_args::*> fields[] = {
        {"q_scales", &spattn_forward_args::q_scales},
        {"k_scales", &spattn_forward_args::k_scales},
        {"v_scales", &spattn_forward_args::v_scales}};
    for (const auto& [name, field] : fields) {
        Call wrong(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
        wrong.bring_workspace(plain.get());
        wrong.args.*field = &wrong.q.scales.view;
        demand("scales of bfloat16", "spattn_forward", spattn_forward(plain.get(), &wrong.args), SPATTN_E_STATE, name);
        wrong.bring_gradients(plain.get());
        demand("scales of bfloat16", "spattn_backward", spattn_backward(plain.get(), &wrong.gradients), SPATTN_E_STATE,
               name);
        CHECK(wrong.out.is_poison() && wrong.dq.is_poison());
    }
    Call bytes(p, Scales::none, Scales::none, Scales::none);
    bytes.bring_workspace(plain.get());
    bytes.args.q = &bytes.q.codes.view;
    demand("bytes for a plan of bfloat16", "spattn_forward", spattn_forward(plain.get(), &bytes.args), SPATTN_E_DTYPE,
           "q");

    // A cache of float8 has queries of more digits.
    p.flags = SPATTN_PLAN_STARTS, p.cache_dtype = float8;
    const Plan cache = make_plan(context.get(), parse("causal").get(), p);
    Tensor starts({batch}, i32);
    std::fill_n(starts.as<int32_t>(), batch, 0);
    Call on_cache(p, Scales::of_rows, Scales::of_rows, Scales::of_rows);
    on_cache.bring_workspace(cache.get());
    on_cache.args.k = &on_cache.k.codes.view, on_cache.args.v = &on_cache.v.codes.view;
    on_cache.args.starts = &starts.view, on_cache.args.q_scales = &on_cache.q.scales.view;
    demand("scales of queries on a cache", "spattn_forward", spattn_forward(cache.get(), &on_cache.args),
           SPATTN_E_STATE, "q_scales");
}

// Programs that were built before have no such field, and what lies beyond their struct is not read.
TEST(older_args_have_no_scales_of_queries) {
    const Context context = make_context();
    const auto p = float8_problem(SPATTN_BHSD);
    const Plan plan = make_plan(context.get(), parse("causal").get(), p);
    Call without(p, Scales::none, Scales::of_rows, Scales::of_rows), older(p, Scales::none, Scales::of_rows,
                                                                          Scales::of_rows);
    without.run(plan.get());
    older.args.q_scales = &older.lse.view;  // an output, which no input may overlap
    older.args.struct_size = uint32_t(offsetof(spattn_forward_args, q_scales));
    older.run(plan.get());
    demand_same_bits(older, without);
}

TEST(older_args_of_a_backward_have_no_scales) {
    const Context context = make_context();
    const auto p = float8_problem(SPATTN_BHSD, SPATTN_PLAN_BACKWARD);
    const Plan plan = make_plan(context.get(), parse("causal").get(), p);
    Call without(p, Scales::none, Scales::none, Scales::none), older(p, Scales::none, Scales::none, Scales::none);
    without.run(plan.get()), older.run(plan.get());
    without.run_back(plan.get());
    older.bring_gradients(plan.get());
    older.gradients.q_scales = &older.dq.view;  // an output, which no input may overlap
    older.gradients.struct_size = uint32_t(offsetof(spattn_backward_args, q_scales));
    succeed(spattn_backward(plan.get(), &older.gradients), "backward");
    demand_same_gradients(older, without);
}
