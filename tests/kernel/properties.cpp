// SPDX-License-Identifier: MIT
// What must hold whatever the numbers: NaN that stays where it is, inputs that overlap, and gradients that are
// derivatives.
#include "bounds.h"

using namespace attention;

constexpr unsigned seed = 77;

// Keys of the second document hold NaN: queries of the others must not notice, its own must all say so.
TEST(nan_stays_with_those_who_see_it) {
    const Case c{"block_diagonal(64)", 1, 2, 1, 192, 192, 16, 16};
    const Inputs clean = make_inputs(c, Dtype::bf16, seed);
    Inputs dirty = clean;
    for (int64_t column = 0; column < 16; ++column) dirty.k[size_t(100 * 16 + column)] = not_a_number;
    for (const Rows& rows : cpu_rows(false)) {
        if (!is_tested(rows)) continue;
        check::context = rows.forward.name;
        const Results want = run_rows(c, rows, clean, 2), got = run_rows(c, rows, dirty, 2);
        bool others_equal = true, own_nan = true;
        for (size_t i = 0; i < got.out.size(); ++i) {
            const bool own = i / 16 % 192 / 64 == 1;
            if (own)
                own_nan &= std::isnan(got.out[i]);
            else
                others_equal &= got.out[i] == want.out[i] && got.dq[i] == want.dq[i];
        }
        CHECK(others_equal);
        CHECK(own_nan);
    }
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
        run_pass(pass, spattn::view(pass), f);
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
