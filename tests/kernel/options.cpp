// SPDX-License-Identifier: MIT
// Softcap and learned sinks where each shows by itself: on one key, lse is the capped score and dq its slope; a sink of
// -infinity is none; sinks far above and below the scores.
#include <bit>

#include "bounds.h"

using namespace attention;

namespace {

constexpr unsigned seed = 4711;

template <class Body>
void each_row(Dtype dtype, Body body) {
    for (const bool reference : {false, true})
        for (const Rows& rows : cpu_rows(reference))
            if (rows.forward.dtype == dtype && is_tested(rows)) {
                check::context = rows.forward.name;
                body(rows);
            }
}

// With q = x, k = 1 and dout = 0: lse = softcap tanh(x / softcap), dq = slope times dlse.
Results run_one_key(const Rows& rows, const Values& x, double softcap, Values dlse) {
    const int64_t count = int64_t(x.size());
    const Case c{"full", 1, 1, 1, count, 1, 1, 1, Axes::bhsd, 1., aligned_end, true, false, softcap};
    const Inputs in{x, {1}, {1}, Values(x.size()), std::move(dlse), {0}};
    return run_rows(c, rows, in, 2);
}

}  // namespace

TEST(capped_scores_are_precise_at_every_size) {
    Values x;
    for (double size = 1e-30; size < 1e6; size *= 1.009)
        for (const double sign : {-1., 1.}) x.push_back(round_to<float>(sign * size));
    constexpr double unit = 0x1p-23;
    for (const double softcap : {1., 30.})
        each_row(Dtype::f32, [&](const Rows& rows) {
            const Results got = run_one_key(rows, x, softcap, Values(x.size(), 1.));
            double worst = 0, worst_slope = 0;
            for (size_t i = 0; i < x.size(); ++i) {
                const double want = softcap * std::tanh(x[i] / softcap), cosh = std::cosh(x[i] / softcap);
                worst = std::max(worst, std::abs(got.lse[i] - want) / std::abs(want));
                const double slope = 1 / (cosh * cosh), error = std::abs(got.dq[i] - slope);
                // p = exp(s - lse) carries the error of s; below 1e-10 the slope is as good as 0.
                worst_slope = std::max(worst_slope, error / (slope + 1e-10) / (1 + std::abs(want)));
            }
            check::context += text(" softcap ", softcap, ": ", worst / unit, " and ", worst_slope / unit, " units");
            CHECK(worst < 4 * unit);
            CHECK(worst_slope < 60 * unit);
        });
}

// Also one whose digits are all set, which a carry of rounding would make a zero.
TEST(gradients_of_lse_that_are_nan_show) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
        for (const uint64_t bits : {0x7ff8000000000000u, 0x7fffffffffffffffu, 0xffffffffffffffffu})
            each_row(dtype, [&](const Rows& rows) {
                Values dlse(40, 1.);
                dlse[7] = std::bit_cast<double>(bits);
                const Results got = run_one_key(rows, Values(40, 1.), 0., dlse);
                for (size_t i = 0; i < got.dq.size(); ++i) CHECK_EQ(std::isnan(got.dq[i]), i == 7);
                CHECK(std::isnan(got.dk[0]));
            });
}

TEST(a_sink_of_minus_infinity_is_none) {
    Case c{"causal & window(9,0) - sink(3)", 2, 2, 1, 70, 70, 16, 16};
    const Inputs plain = make_inputs(c, Dtype::f32, seed);
    c.has_sinks = true;
    Inputs with = plain;
    with.sinks.assign(2, -std::numeric_limits<double>::infinity());
    each_row(Dtype::f32, [&](const Rows& rows) {
        const Results got = run_rows(c, rows, with, 2);
        c.has_sinks = false;
        const Results want = run_rows(c, rows, plain, 2);
        c.has_sinks = true;
        const auto same = same_bits;
        CHECK(same(got.out, want.out) && same(got.lse, want.lse));
        CHECK(same(got.dq, want.dq) && same(got.dk, want.dk) && same(got.dv, want.dv));
        CHECK(same(got.dsinks, {0, 0}));
    });
}

// A sink far above the scores takes all of the row, one far below nothing.
TEST(sinks_of_any_size) {
    const Case c{"causal", 1, 4, 2, 100, 60, 16, 16, Axes::bhsd, own_scale, aligned_end, true, false, 0., true};
    Inputs in = make_inputs(c, Dtype::f32, seed);
    in.sinks = {-1e30, -200, 200, 1e30};
    const Results want = run_rows(c, reference_rows(Dtype::f32), in, 2);
    const auto check = [&](const Rows& rows) {
        const Results got = run_rows(c, rows, in, 2);
        const Bound loose{Dtype::f32, "", 1e-5, 1e-5, 0.9999};
        check_close("out", got.out, want.out, loose, 1);
        check_close("lse", got.lse, want.lse, loose, 1);
        check_close("dq", got.dq, want.dq, loose, 1);
        check_close("dv", got.dv, want.dv, loose, 1);
        check_close("dsinks", got.dsinks, want.dsinks, loose, 1);
        for (size_t i = 200 * 16; i < got.out.size(); ++i) CHECK_EQ(std::abs(got.out[i]) < 1e-30, true);
    };
    each_row(Dtype::f32, check);
    each_row(Dtype::f64, check);
}
