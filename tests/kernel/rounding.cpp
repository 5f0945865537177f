// SPDX-License-Identifier: MIT
// Rows that multiply bf16 by bf16 lose no more than rounding must: dense attention in double that rounds what such a
// product reads (p, ds) and what is stored, correctly, sets the measure.
#include "bounds.h"

using namespace attention;

constexpr unsigned seed = 5;

static double to_bf16(double x) { return round_to(Dtype::bf16, x); }

// Causal attention of one head, in double; `round` is applied to p, ds and results.
template <class Round>
static Results dense(const Case& c, const Inputs& in, Round round) {
    const Problem p = problem_of(c, Dtype::bf16);
    const int64_t n = p.seq_q, d = p.head_dim;
    Results r;
    r.out.resize(size_t(n * d));
    r.dq = r.dk = r.dv = r.out;
    Values probability(size_t(n * n)), lse(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
        double top = -1e300, sum = 0;
        Values s(size_t(i + 1));
        for (int64_t j = 0; j <= i; ++j) {
            for (int64_t x = 0; x < d; ++x) s[size_t(j)] += p.scale * in.q[size_t(i * d + x)] * in.k[size_t(j * d + x)];
            top = std::max(top, s[size_t(j)]);
        }
        for (int64_t j = 0; j <= i; ++j) sum += std::exp(s[size_t(j)] - top);
        lse[size_t(i)] = top + std::log(sum);
        for (int64_t x = 0; x < d; ++x) {
            double out = 0;
            for (int64_t j = 0; j <= i; ++j) out += round(std::exp(s[size_t(j)] - top)) * in.v[size_t(j * d + x)];
            r.out[size_t(i * d + x)] = round(out / sum);
        }
        for (int64_t j = 0; j <= i; ++j) probability[size_t(i * n + j)] = std::exp(s[size_t(j)] - lse[size_t(i)]);
    }
    for (int64_t i = 0; i < n; ++i) {
        double delta = in.dlse.empty() ? 0 : -in.dlse[size_t(i)];
        for (int64_t x = 0; x < d; ++x) delta += in.dout[size_t(i * d + x)] * r.out[size_t(i * d + x)];
        for (int64_t j = 0; j <= i; ++j) {
            double dp = 0;
            for (int64_t x = 0; x < d; ++x) dp += in.dout[size_t(i * d + x)] * in.v[size_t(j * d + x)];
            const double exact = probability[size_t(i * n + j)], ds = round(exact * (dp - delta));
            for (int64_t x = 0; x < d; ++x) {
                r.dv[size_t(j * d + x)] += round(exact) * in.dout[size_t(i * d + x)];
                r.dk[size_t(j * d + x)] += p.scale * ds * in.q[size_t(i * d + x)];
                r.dq[size_t(i * d + x)] += p.scale * ds * in.k[size_t(j * d + x)];
            }
        }
    }
    for (Values* x : {&r.dq, &r.dk, &r.dv})
        for (double& value : *x) value = round(value);
    return r;
}

static double error(const Values& got, const Values& want) {
    double sum = 0;
    for (size_t i = 0; i < want.size(); ++i) sum += (got[i] - want[i]) * (got[i] - want[i]);
    return std::sqrt(sum / double(want.size()));
}

TEST(products_of_bf16_lose_what_rounding_must) {
    const Case c{"causal", 1, 1, 1, 300, 300, 64, 64};
    const Inputs in = make_inputs(c, Dtype::bf16, seed);
    const Results truth = dense(c, in, [](double x) { return x; }), rounded = dense(c, in, to_bf16);
    bool has_rows = false;
    for (const Rows& rows : cpu_rows(false)) {
        if (!multiplies_bf16(rows.forward)) continue;
        has_rows = true;
        if (!is_tested(rows)) {
            check::skip(text(rows.forward.name, ": not on this machine"));
            continue;
        }
        check::context = rows.forward.name;
        const Results got = run_rows(c, rows, in, 2);
        for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv}) {
            const double measure = error(rounded.*member, truth.*member);
            CHECK(measure > 1e-5);
            CHECK(error(got.*member, truth.*member) < 2 * measure);
        }
    }
    if (!has_rows) check::skip("this build has no rows that multiply bf16 by bf16");
}
