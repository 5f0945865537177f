// SPDX-License-Identifier: MIT
// Patterns whose lists come with each call: where they may stand, what is refused, and the operands they ask for.
// Values inside of keys, and the largest logits.
#include "abi/abi.h"

using namespace abi;

namespace {

Pattern runtime_tokens(int64_t most_tokens) {
    spattn_pattern* result = nullptr;
    succeed(spattn_pattern_runtime_tokens(most_tokens, &result), "runtime_tokens");
    return Pattern(result);
}

spattn_problem lists_problem(uint32_t flags = SPATTN_PLAN_REFERENCE) {
    auto problem = make_problem();
    problem.flags |= flags;
    return problem;
}

// A pass of make_problem() with lists of 5 keys, all operands good.
template <class Args>
struct CallWithLists {
    CallWithLists(const spattn_problem& p, const spattn_plan* plan, int32_t op)
        : q({p.batch, p.heads_q, p.seq_q, p.head_dim}, f32), k({p.batch, p.heads_kv, p.seq_k, p.head_dim}, f32),
          v({p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, f32), out({p.batch, p.heads_q, p.seq_q, p.head_dim_v}, f32),
          lse({p.batch, p.heads_q, p.seq_q}, f32), more(lse.shape, f32), dout(out.shape, f32), dq(q.shape, f32),
          dk(k.shape, f32), dv(v.shape, f32), indices({p.batch, p.seq_q, p.heads_kv, 5}, i32),
          counts({p.batch, p.seq_q, p.heads_kv}, i64) {
        for (Tensor* t : {&q, &k, &v, &out, &lse, &dout}) t->fill(uint32_t(t->bytes));
        for (size_t i = 0; i < indices.bytes / 4; ++i) indices.as<int32_t>()[i] = int32_t(i * 7 % 41) - 1;
        for (size_t i = 0; i < counts.bytes / 8; ++i) counts.as<int64_t>()[i] = int64_t(i % 7);
        args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.lse = &lse.view;
        args.indices = &indices.view, args.index_counts = &counts.view;
        if constexpr (std::is_same_v<Args, spattn_forward_args>) {
            args.max_logits = &more.view;
        } else {
            args.dout = &dout.view, args.dlse = &more.view;
            args.dq = &dq.view, args.dk = &dk.view, args.dv = &dv.view;
            more.fill(9);
        }
        size_t bytes = 0, align = 1;
        succeed(spattn_plan_workspace(plan, op, &bytes, &align), "workspace");
        scratch.assign(bytes + align, 0);
        args.workspace = scratch.data() + (align - reinterpret_cast<uintptr_t>(scratch.data()) % align) % align;
        args.workspace_bytes = bytes;
    }
    spattn_status run(const spattn_plan* plan) const {
        if constexpr (std::is_same_v<Args, spattn_forward_args>) return spattn_forward(plan, &args);
        else return spattn_backward(plan, &args);
    }

    Tensor q, k, v, out, lse, more, dout, dq, dk, dv, indices, counts;
    Args args = sized<Args>();
    std::vector<unsigned char> scratch;
};

template <class Args>
void check_list_operands(const char* function, int32_t op) {
    const Context context = make_context();
    const Pattern pattern = runtime_tokens(5);
    const spattn_problem problem = lists_problem();
    const Plan plan = make_plan(context.get(), pattern.get(), problem);
    using Run = CallWithLists<Args>;
    const auto demand_failure = [&](const std::string& what, const std::function<void(Run&)>& spoil,
                                    spattn_status status, const char* argument) {
        Run run(problem, plan.get(), op);
        spoil(run);
        demand(what, function, run.run(plan.get()), status, argument);
    };
    demand_failure("no indices", [](Run& r) { r.args.indices = nullptr; }, SPATTN_E_NULL, "indices");
    demand_failure("float indices", [](Run& r) { r.indices.view.dtype = f32; }, SPATTN_E_DTYPE, "indices");
    const char* output = op == SPATTN_OP_FORWARD ? "out" : "dq";
    Tensor Run::* first = op == SPATTN_OP_FORWARD ? &Run::out : &Run::dq;
    demand_failure("indices under an output",
                   [&](Run& r) { r.indices.view.data = (r.*first).data; }, SPATTN_E_LAYOUT, output);

    Run good(problem, plan.get(), op), uncounted(problem, plan.get(), op);
    succeed(good.run(plan.get()), "with counts");
    uncounted.args.index_counts = nullptr;
    succeed(uncounted.run(plan.get()), "without counts");
    CHECK((good.*first).content() != (uncounted.*first).content());

    const Plan analytic = make_plan(context.get(), parse("causal").get(), problem);
    Run misplaced(problem, analytic.get(), op);
    demand("indices for causal", function, misplaced.run(analytic.get()), SPATTN_E_STATE, "indices");
    misplaced.args.indices = nullptr;
    demand("counts for causal", function, misplaced.run(analytic.get()), SPATTN_E_STATE, "index_counts");
    misplaced.args.index_counts = nullptr;
    succeed(misplaced.run(analytic.get()), "neither for causal");
}

template <class Args>
void check_value_in_key(const char* function, int32_t op) {
    const Context context = make_context();
    const spattn_problem problem = lists_problem(SPATTN_PLAN_VALUE_IN_KEY);
    const Plan plan = make_plan(context.get(), parse("causal").get(), problem);
    CallWithLists<Args> run(problem, plan.get(), op);
    run.args.indices = run.args.index_counts = nullptr;
    demand("v is given", function, run.run(plan.get()), SPATTN_E_STATE, "v");
    run.args.v = nullptr;
    if constexpr (std::is_same_v<Args, spattn_backward_args>) {
        demand("dv is given", function, run.run(plan.get()), SPATTN_E_STATE, "dv");
        run.args.dv = nullptr;
    }
    succeed(run.run(plan.get()), "values in keys");
}

}  // namespace

TEST(lists_stand_alone_or_once_under_and) {
    for (const char* text : {"runtime_tokens(8)", "runtime_blocks(64,64,8)", "causal & runtime_tokens(8)",
                             "rows([0,4], 8, runtime_tokens(8))",
                             "rows([0,4], 8, rows([3,9,0,2], 9, causal & runtime_blocks(4,4,2))) & sink(3)",
                             "(window(9,0) | sink(4)) & (runtime_blocks(1,64,3) & documents(0,9))"}) {
        const Pattern pattern = parse(text);
        check::context = text;
        CHECK_EQ(spattn_pattern_equal(pattern.get(), parse(text).get()), 1);
    }
    const char* message = "accepted: such a pattern alone, or one of them under & with others";
    for (const char* text :
         {"causal | runtime_tokens(8)", "runtime_tokens(8) - causal", "causal - runtime_tokens(8)",
          "runtime_tokens(8) & runtime_tokens(8)", "transpose(runtime_tokens(8))",
          "per_head([0,0], runtime_tokens(8))", "per_batch([0], runtime_tokens(8) & causal)",
          "per_document([0,4], [0,4], runtime_tokens(8))", "rows([0,4], 8, causal | runtime_tokens(8))",
          "rows([0,4], 8, runtime_tokens(8)) & runtime_tokens(8)", "rows([0,4], 8, runtime_tokens(8)) - causal",
          "columns([0,4], 8, runtime_tokens(8))"}) {
        spattn_pattern* result = nullptr;
        demand(text, "spattn_pattern_parse", spattn_pattern_parse(text, &result), SPATTN_E_FORMAT, "text");
        CHECK(std::string(spattn_last_error_text()).find(message) != std::string::npos);
    }
    const Pattern lists = runtime_tokens(8);
    const spattn_pattern* both[] = {lists.get(), lists.get()};
    spattn_pattern* result = nullptr;
    demand("of two", "spattn_pattern_union", spattn_pattern_union(both, 2, &result), SPATTN_E_UNSUPPORTED, "parts[0]");
    demand("taken away", "spattn_pattern_difference", spattn_pattern_difference(parse("causal").get(), lists.get(), &result),
           SPATTN_E_UNSUPPORTED, "b");
    CHECK(std::string(spattn_last_error_text()).find(message) != std::string::npos);
}

TEST(texts_and_bytes_come_back) {
    for (const char* text : {"runtime_tokens(2048)", "causal & runtime_blocks(16,64,8)",
                             "rows([0,4], 8, causal & runtime_tokens(8))"}) {
        const Pattern pattern = parse(text);
        size_t needed = 0;
        char buffer[64];
        succeed(spattn_pattern_print(pattern.get(), buffer, sizeof buffer, &needed), "print");
        CHECK_EQ(std::string(buffer), text);
        std::vector<char> bytes(256);
        succeed(spattn_pattern_save(pattern.get(), bytes.data(), bytes.size(), &needed), "save");
        spattn_pattern* loaded = nullptr;
        succeed(spattn_pattern_load(bytes.data(), needed, &loaded), "load");
        CHECK_EQ(spattn_pattern_equal(pattern.get(), Pattern(loaded).get()), 1);
    }
}

TEST(questions_have_no_answer) {
    const spattn_extent extent = make_extent(8, 8);
    for (const char* text :
         {"runtime_tokens(4)", "causal & runtime_blocks(4,4,1)", "rows([0,8], 9, runtime_tokens(4))"}) {
        const Pattern p = parse(text);
        auto stats = sized<spattn_stats>();
        int32_t keeps = 0;
        int64_t nnz = 0;
        Tensor mask({1, 1, 8, 8}, u8), image({4, 4}, f32);
        const auto refused = [&](const char* function, spattn_status status) {
            demand(text, function, status, SPATTN_E_UNSUPPORTED, "pattern");
        };
        refused("spattn_pattern_stats", spattn_pattern_stats(p.get(), &extent, &stats));
        refused("spattn_pattern_keeps", spattn_pattern_keeps(p.get(), &extent, 0, 0, 0, 0, &keeps));
        refused("spattn_pattern_to_mask", spattn_pattern_to_mask(p.get(), &extent, &mask.view));
        refused("spattn_pattern_to_image", spattn_pattern_to_image(p.get(), &extent, 0, &image.view));
        refused("spattn_pattern_to_csr", spattn_pattern_to_csr(p.get(), &extent, 0, nullptr, nullptr, &nnz));
        CHECK(mask.is_poison() && image.is_poison());
    }
}

TEST(forward_lists) { check_list_operands<spattn_forward_args>("spattn_forward", SPATTN_OP_FORWARD); }
TEST(backward_lists) { check_list_operands<spattn_backward_args>("spattn_backward", SPATTN_OP_BACKWARD); }
TEST(forward_value_in_key) { check_value_in_key<spattn_forward_args>("spattn_forward", SPATTN_OP_FORWARD); }
TEST(backward_value_in_key) { check_value_in_key<spattn_backward_args>("spattn_backward", SPATTN_OP_BACKWARD); }

namespace {

// out, dq, dk and dv of a pattern with lists of 5 keys.
std::vector<float> results_with_lists(const char* text, uint32_t flags) {
    const Context context = make_context();
    const spattn_problem problem = lists_problem(flags);
    const Plan plan = make_plan(context.get(), parse(text).get(), problem);
    CallWithLists<spattn_forward_args> forward(problem, plan.get(), SPATTN_OP_FORWARD);
    succeed(forward.run(plan.get()), text);
    CallWithLists<spattn_backward_args> backward(problem, plan.get(), SPATTN_OP_BACKWARD);
    backward.args.out = &forward.out.view, backward.args.lse = &forward.lse.view;
    succeed(backward.run(plan.get()), text);
    std::vector<float> results;
    for (Tensor* t : {&forward.out, &backward.dq, &backward.dk, &backward.dv})
        results.insert(results.end(), t->as<float>(), t->as<float>() + t->bytes / sizeof(float));
    return results;
}

}  // namespace

// The lists are those of the extent's own rows: it is the same to take them under rows as beside them.
TEST(lists_under_rows) {
    const std::pair<const char*, const char*> cases[] = {
        {"rows([4,44],48,runtime_tokens(5))", "runtime_tokens(5)"},
        {"rows([28,48,0,20],48,causal & runtime_tokens(5))", "rows([28,48,0,20],48,causal) & runtime_tokens(5)"},
        {"rows([28,48,0,20],48,runtime_tokens(5)) & window(30,0)", "runtime_tokens(5) & window(30,0)"}};
    for (const auto& [under, beside] : cases) {
        check::context = under;
        const std::vector<float> got = results_with_lists(under, 0);
        const std::vector<float> reference = results_with_lists(under, SPATTN_PLAN_REFERENCE);
        CHECK(got == results_with_lists(beside, 0));
        CHECK(reference == results_with_lists(beside, SPATTN_PLAN_REFERENCE));
        bool is_near = true;
        for (size_t i = 0; i < got.size(); ++i) is_near &= std::abs(got[i] - reference[i]) < 1e-5;
        CHECK(is_near);
    }
}

TEST(values_that_do_not_fit_in_keys) {
    const Context context = make_context();
    auto problem = lists_problem(SPATTN_PLAN_VALUE_IN_KEY);
    problem.head_dim_v = problem.head_dim + 1;
    spattn_plan* result = nullptr;
    demand("head_dim_v above head_dim", "spattn_plan_create",
           spattn_plan_create(context.get(), parse("causal").get(), &problem, nullptr, &result), SPATTN_E_RANGE,
           "problem.head_dim_v");
}

TEST(plans_say_where_lists_come_from) {
    const Context context = make_context();
    const spattn_problem problem = lists_problem();
    const Plan plan = make_plan(context.get(), runtime_tokens(5).get(), problem);
    auto stats = sized<spattn_stats>();
    succeed(spattn_plan_stats(plan.get(), &stats), "stats");
    CHECK_EQ(stats.pairs, double(problem.batch * problem.heads_q * problem.seq_q * 5));  // as if all were full
    CHECK_EQ(stats.row_max, int64_t(5));
}

// The largest of s, in every row; without a key, -infinity.
TEST(max_logits_are_the_largest) {
    auto problem = make_problem();
    problem.flags = 0;
    problem.batch = problem.heads_q = problem.heads_kv = 1;
    const Context context = make_context();
    const Plan plan = make_plan(context.get(), parse("causal - sink(3)").get(), problem);
    CallWithLists<spattn_forward_args> run(problem, plan.get(), SPATTN_OP_FORWARD);
    run.args.indices = run.args.index_counts = nullptr;
    succeed(run.run(plan.get()), "max_logits");
    for (int64_t row = 0; row < problem.seq_q; ++row) {
        double top = -INFINITY;
        for (int64_t key = 3; key <= row; ++key) {
            double s = 0;
            const float* q = run.q.as<float>() + row * problem.head_dim;
            const float* k = run.k.as<float>() + key * problem.head_dim;
            for (int64_t c = 0; c < problem.head_dim; ++c) s += double(q[c]) * k[c];
            top = std::max(top, s / std::sqrt(double(problem.head_dim)));
        }
        const double got = run.more.as<float>()[row];
        CHECK(got == top || std::abs(got - top) < 1e-5);
    }
}
