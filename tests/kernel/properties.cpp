// SPDX-License-Identifier: MIT
// What must hold whatever the numbers: dirt that stays where it is, inputs that overlap, and gradients that are
// derivatives.
#include "isolation.h"

#include <set>

using namespace attention;

constexpr unsigned seed = 77;

// Some results can tell that dirt reached them, and some cannot: else nothing is proved.
static void demand_both_kinds(const Told& told) {
    CHECK(told.queries > 0 && told.queries < told.all_queries);
    CHECK(told.keys > 0 && told.keys < told.all_keys);
}

// Rows of five keys at random.
static std::string scattered(int64_t rows, int64_t keys) {
    std::mt19937 random(seed);
    std::string begin = "0", columns;
    for (int64_t row = 0; row < rows; ++row) {
        std::set<int64_t> listed;
        while (listed.size() < 5) listed.insert(int64_t(random() % uint64_t(keys)));
        for (const int64_t key : listed) columns += text(columns.empty() ? "" : ",", key);
        begin += text(',', 5 * (row + 1));
    }
    return text("csr([", begin, "],[", columns, "],", keys, ')');
}

TEST(what_a_query_does_not_see_cannot_change_its_result) {
    const std::string random_keys = scattered(300, 320);
    const Case cases[] = {
        // pattern, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v
        {"documents(0,200,256)", 1, 4, 2, 256, 256, 16, 12},
        {"documents(0,10,31,32,90)", 2, 2, 2, 100, 100, 20, 20, Axes::bshd},
        {"causal", 1, 2, 1, 150, 200, 32, 16, Axes::gaps},
        {"window(20,5)", 1, 4, 1, 200, 200, 16, 16},
        {"causal & (sink(4) | window(20,0))", 1, 2, 2, 193, 193, 64, 64},
        {"bigbird(16,3,1,2,7)", 1, 2, 1, 160, 160, 16, 16},
        {"per_head([0,1,1,2], causal, window(9,0), sink(1))", 1, 4, 2, 80, 80, 16, 16},
        {random_keys.c_str(), 1, 2, 1, 300, 320, 12, 12},
        // In orders of their own: residue classes, packed keys, listed tiles; and in pieces.
        {"causal & dilated(300,0,5)", 1, 4, 2, 643, 643, 20, 20, Axes::bshd},
        {"strided(9) - window(3,3)", 2, 2, 1, 200, 310, 16, 20, Axes::gaps},
        {"window(9,9) | global_tokens(3,200,201,450)", 1, 2, 1, 600, 600, 16, 12, Axes::lines},
        {"causal & (block_diagonal(64) | landmark(64,1))", 1, 4, 2, 400, 400, 16, 16, Axes::bshd},
        {"logsparse", 1, 2, 1, 500, 500, 12, 12},
        {"causal & (window(13,0) | strided(12))", 1, 4, 2, 401, 401, 20, 12, Axes::bshd},
        {"window(5,0) | strided(16) | global_tokens(3,200,201,350)", 1, 2, 1, 400, 400, 16, 12},
        // Parts of a row and of a column that are joined.
        {"documents(0,1500,3100)", 1, 2, 1, 40, 3100, 8, 8, Axes::bhsd, own_scale, 1480},
        {"sink(1) | window(3,0)", 1, 1, 1, 1100, 1100, 4, 4},
        {"documents(0,100,200)", 1, 2, 1, 200, 200, 16, 16, Axes::bhsd, own_scale, aligned_end, true, false, 2., true},
        {"causal & (window(4,0) | strided(11))", 2, 2, 1, 200, 180, 24, 16, Axes::bshd, own_scale, aligned_end, true,
         true, 0., true},
        {"documents(0,30,70)", 1, 2, 1, 70, 70, 16, 16, Axes::bhsd, own_scale, aligned_end, true, false, 0., true},
        {"runtime_tokens(40) & causal", 2, 18, 2, 25, 40, 16, 8},
        {"runtime_blocks(16,8,4)", 1, 4, 4, 50, 70, 16, 16},
    };
    unsigned draw = seed;
    Told told;  // by each case; where few pairs of case and row are tried, by all of them
    for (const Case& c : cases) {
        if (check::every() == 1) told = {};
        for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::f64, Dtype::bf16}) {
            const Inputs in = make_inputs(c, dtype, seed);
            for (const Rows& rows : cpu_rows(false, FewQueries::included)) {
                if (rows.forward.dtype != dtype || !is_tested(rows) || !takes(rows, c)) continue;
                // Half of the pairs of case and row, which ones by chance: the truth of each takes its time.
                if (std::minstd_rand(++draw)() % 64 >= 32 / check::every()) continue;
                check::context = text(rows.forward.name, " ", describe(c), " draw ", draw);
                check_isolation(c, rows, in, run_rows(c, rows, in, 2), draw_soiling(draw), told);
            }
        }
        check::context = describe(c);
        if (check::every() == 1) demand_both_kinds(told);
    }
    demand_both_kinds(told);
}

// Inputs may overlap: V is a view of K, as in multi-query latent attention.
TEST(values_may_be_a_view_of_keys) {
    const Case c{"causal", 1, 1, 1, 70, 70, 32, 32};
    Inputs in = make_inputs(c, Dtype::f32, seed);
    in.v = in.k;
    const Results want = run_rows(c, reference_rows(Dtype::f32), in, 1);
    const PatternRef pattern = parse_pattern(c.pattern);
    const Problem p = problem_of(c, Dtype::f32);
    for (const Rows& rows : cpu_rows(false)) {
        if (!is_tested(rows) || rows.forward.dtype != Dtype::f32) continue;
        check::context = rows.forward.name;
        Tensor<float> q(Axes::bhsd, 1, 1, 70, 32), k(Axes::bhsd, 1, 1, 70, 32), out(Axes::bhsd, 1, 1, 70, 32);
        q.set(in.q), k.set(in.k);
        const Attention<float> planned(c, rows, 1);
        const PassPlan& pass = planned.plan().forward;
        const auto threads = make_thread_pool(1);
        const PatternRows token_rows(*pattern, p);
        Workspace workspace(pass.workspace);
        ForwardArgs f{};
        f.problem = &p, f.rows = &token_rows;
        f.parallel = threads.get(), f.workspace = workspace.start();
        f.q = q.view(), f.k = k.view(), f.v = k.view(), f.out = out.view();
        run_pass(cpu_backend(), pass, spattn::view(pass), f);
        check_close("out", out.values(), want.out, bound_of(Dtype::f32, "out"), 1);
    }
}

// The reference's gradients are the derivatives of L = sum(dout out) + sum(dlse lse), by central differences.
static void check_gradients(const Case& c) {
    const Rows rows = reference_rows(Dtype::f64);
    Inputs in = make_inputs(c, Dtype::f64, seed);
    const Results gradients = run_rows(c, rows, in, 1);
    const auto loss = [&] {
        const Results r = run_rows(c, rows, in, 1);
        double sum = 0;
        for (size_t i = 0; i < r.out.size(); ++i) sum += r.out[i] == 0 ? 0 : in.dout[i] * r.out[i];  // NaN: empty row
        for (size_t i = 0; i < r.lse.size(); ++i) sum += std::isinf(r.lse[i]) ? 0 : in.dlse[i] * r.lse[i];
        return sum;
    };
    const auto check_derivative = [&](Values& x, const Values& gradient, const char* name) {
        for (size_t i = 0; i < gradient.size(); ++i) {
            const double kept = x[i];
            if (std::isnan(kept)) {
                CHECK_EQ(gradient[i], 0.);  // unseen
                continue;
            }
            const double step = 1. / 4096;  // lse is float32
            x[i] = kept + step;
            const double above = loss();
            x[i] = kept - step;
            const double below = loss(), slope = (above - below) / (2 * step);
            x[i] = kept;
            check::context = text(describe(c), " ", name, "[", i, "] ", gradient[i], " against ", slope);
            CHECK(std::abs(slope - gradient[i]) < 1e-3 * (1 + std::abs(slope)));
        }
    };
    check_derivative(in.q, gradients.dq, "dq");
    check_derivative(in.k, gradients.dk, "dk");
    if (!c.value_in_key) check_derivative(in.v, gradients.dv, "dv");
    check_derivative(in.sinks, gradients.dsinks, "dsinks");
}

TEST(reference_gradients_are_derivatives) {
    const char* const pattern = "per_head([0,1], causal, window(2,1))";
    check_gradients({pattern, 1, 2, 1, 5, 7, 3, 4});
    check_gradients({pattern, 1, 2, 1, 5, 7, 3, 4, Axes::bhsd, own_scale, aligned_end, true, false, 1.});
    check_gradients({pattern, 2, 2, 1, 5, 7, 3, 4, Axes::bhsd, own_scale, aligned_end, true, false, 0., true});
    // With empty rows.
    check_gradients({pattern, 1, 2, 1, 7, 4, 3, 4, Axes::bhsd, -1., aligned_end, true, false, 2., true});
    check_gradients({"runtime_tokens(6) & window(3,2)", 1, 2, 1, 5, 7, 3, 4});
    check_gradients({"runtime_blocks(2,3,2)", 1, 2, 1, 5, 7, 5, 4, Axes::bhsd, 0.4, aligned_end, true, true});
}
