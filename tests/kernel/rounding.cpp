// SPDX-License-Identifier: MIT
// Rows that multiply 16-bit elements lose no more than rounding must: dense attention in double that rounds what such a
// product reads (p, ds) and what is stored, correctly, sets the measure. And fp16 ends early, which nobody may notice.
// Rows of float32 lose little in long sums of equal terms, whose roundings all go one way, forward and backward.
#include "bounds.h"

using namespace attention;

constexpr unsigned seed = 5;

// As many significant bits as the dtype has, whatever the exponent.
static double to_significant(Dtype dtype, double x) {
    int exponent;
    const double fraction = std::frexp(x, &exponent), unit = std::ldexp(1, dtype == Dtype::f16 ? -11 : -8);
    return std::ldexp(std::nearbyint(fraction / unit) * unit, exponent);
}

// Causal attention of one head, in double; `round` is applied to p and ds, `store` to results.
template <class Round, class Store>
static Results dense(const Case& c, const Inputs& in, Round round, Store store) {
    const Problem p = problem_of(c, Dtype::f64);
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
            r.out[size_t(i * d + x)] = store(out / sum);
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
        for (double& value : *x) value = store(value);
    return r;
}

static double error(const Values& got, const Values& want) {
    double sum = 0;
    for (size_t i = 0; i < want.size(); ++i) sum += (got[i] - want[i]) * (got[i] - want[i]);
    return std::sqrt(sum / double(want.size()));
}

template <class Body>
static void each_row_of_elements(Dtype dtype, Body body) {
    bool has_rows = false;
    for (const Rows& rows : cpu_rows(false)) {
        if (!multiplies_elements(rows.forward) || rows.forward.dtype != dtype) continue;
        has_rows = true;
        check::context = rows.forward.name;
        if (is_tested(rows))
            body(rows);
        else
            check::skip(text(rows.forward.name, ": not on this machine"));
    }
    if (!has_rows) check::skip("this build has no rows that multiply 16-bit elements of this dtype");
}

static void multiply(Values& x, double factor, Dtype dtype, size_t first = 0, size_t end = ~size_t(0)) {
    for (size_t i = first; i < std::min(end, x.size()); ++i) x[i] = round_to(dtype, x[i] * factor);
}

static void check_rounding(Dtype dtype, const Case& c, const Inputs& in) {
    const auto keep = [](double x) { return x; };
    const auto round = [=](double x) { return to_significant(dtype, x); };
    const auto store = [=](double x) { return round_to(dtype, x); };
    const Results truth = dense(c, in, keep, keep), rounded = dense(c, in, round, store);
    each_row_of_elements(dtype, [&](const Rows& rows) {
        const Results got = run_rows(c, rows, in, 2);
        for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv}) {
            const double measure = error(rounded.*member, truth.*member);
            CHECK(measure > 1e-9);
            CHECK(error(got.*member, truth.*member) < 2 * measure);
        }
    });
}

TEST(products_of_elements_lose_what_rounding_must) {
    const Case c{"causal", 1, 1, 1, 300, 300, 64, 64};
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) check_rounding(dtype, c, make_inputs(c, dtype, seed));
}

// Gradients of scores of 2^-16, which would be denormals of fp16. A scale of 512 makes gradients of q and k large.
TEST(small_gradients_lose_what_rounding_must) {
    const Case c{"causal", 1, 1, 1, 300, 300, 64, 64, Axes::bhsd, 512.};
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
        Inputs in = make_inputs(c, dtype, seed);
        multiply(in.q, 1. / 64, dtype), multiply(in.k, 1. / 64, dtype);
        multiply(in.dout, 0x1p-12, dtype), multiply(in.dlse, 0x1p-12, Dtype::f32);
        check_rounding(dtype, c, in);
    }
}

static Values part_of(const Values& x, size_t first, size_t end) {
    return {x.begin() + int64_t(first), x.begin() + int64_t(end)};
}

// Probabilities of 2^-19 of every second key, which would be denormals of fp16, with values of 60,000, and gradients of
// out that bring them back.
TEST(probabilities_far_below_1_count) {
    constexpr int64_t seq = 128, columns = 16;
    for (const char* const pattern : {"full", "runtime_tokens(200)"}) {
        const Case c{pattern, 1, 1, 1, seq, seq, columns, columns};
        Inputs in = make_inputs(c, Dtype::f16, seed);
        for (int64_t i = 0; i < seq * columns; ++i) {
            const bool is_far = i / columns % 2, is_first = i % columns == 0;
            if (is_first) in.q[size_t(i)] = 4, in.k[size_t(i)] = is_far ? -9 : 0;  // scale is 1/4
            if (is_far) in.v[size_t(i)] = in.v[size_t(i)] > 0 ? 60000 : -60000;
        }
        multiply(in.dout, 1000, Dtype::f16);
        const Results want = run_rows(c, reference_rows(Dtype::f64), in, 2);
        each_row_of_elements(Dtype::f16, [&](const Rows& rows) {
            if (!takes(rows, c)) return;
            const Results got = run_rows(c, rows, in, 2);
            check_close("out", got.out, want.out, bound_of(rows, "out"), 1);
            for (size_t key = 1; key < size_t(seq); key += 2) {
                const auto of_key = [&](const Values& x) { return part_of(x, key * columns, (key + 1) * columns); };
                check_close("dv of a key", of_key(got.dv), of_key(want.dv), bound_of(rows, "gradient"), 1);
            }
        });
    }
}

// Gradients of scores beyond 65504 in the first head of each group, whose results are far below, beside ordinary ones.
TEST(gradients_of_scores_may_go_beyond_fp16) {
    const Case cases[] = {
        {"causal", 1, 4, 2, 150, 150, 64, 64},
        {"window(50,0)", 1, 2, 1, 190, 190, 20, 40, Axes::bshd},
        {"window(9,9) | global_tokens(3,200,201,450)", 1, 2, 1, 500, 500, 16, 16},  // queries in two tiles
        {"full", 1, 2, 1, 30, 70, 64, 64, Axes::bhsd, own_scale, aligned_end, true, false, 5., true},
        {"runtime_tokens(40)", 1, 6, 2, 20, 90, 64, 64, Axes::bshd},
        {"runtime_tokens(40) & causal", 1, 70, 1, 20, 90, 40, 24, Axes::bhsd, 1e-3, aligned_end, true, true},
    };
    for (const Case& c : cases) {
        Inputs in = make_inputs(c, Dtype::f16, seed);
        const Problem p = problem_of(c, Dtype::f16);
        const size_t rows_of_head = size_t(p.seq_q), head_q = rows_of_head * size_t(p.head_dim),
                     head_out = rows_of_head * size_t(p.head_dim_v);
        multiply(in.q, 1. / 64, Dtype::f16), multiply(in.k, 1. / 64, Dtype::f16);
        if (!c.value_in_key) multiply(in.v, 8, Dtype::f16);
        for (int64_t head = 0; head < p.heads_q; head += p.group())
            multiply(in.dout, 15000, Dtype::f16, size_t(head) * head_out, size_t(head + 1) * head_out);
        const Results want = run_rows(c, reference_rows(Dtype::f64), in, 2);
        for (const double x : want.dq) CHECK(!std::isinf(x));
        each_row_of_elements(Dtype::f16, [&](const Rows& rows) {
            if (!takes(rows, c)) return;
            check::context = text(rows.forward.name, " ", describe(c));
            const Results got = run_rows(c, rows, in, 2);
            check_results(c, rows, got, want);
            for (size_t head = 0; head < size_t(p.heads_q); ++head) {
                const auto of_head = [&](const Values& x) { return part_of(x, head * head_q, (head + 1) * head_q); };
                check_close("dq of a head", of_head(got.dq), of_head(want.dq), bound_of(rows, "gradient"), 1);
            }
        });
    }
}

// Queries of zeros weigh all keys alike, and where the loss is a sum of `out` over heads and queries, a key's dv has an
// equal term from each of them: 4096 here. Added one by one, each rounds a sum of half of them on average, and all of a
// stretch round to the same side. Rows add up 16 of them at least before these meet the others: 16 roundings of a small
// sum, then 256 of the large one, which lose (16 + 256) / 2 units at most, and p a few.
TEST(heads_with_equal_gradients_lose_little) {
    constexpr int64_t columns = 16;
    const Case c{"full", 1, 64, 1, 64, 3, columns, columns};
    Inputs in = make_inputs(c, Dtype::f32, seed);
    std::fill(in.q.begin(), in.q.end(), 0.);
    for (size_t i = columns; i < in.dout.size(); ++i) in.dout[i] = in.dout[i - columns];
    const Results want = run_rows(c, reference_rows(Dtype::f64), in, 2);
    for (const Rows& rows : cpu_rows(false)) {
        if (rows.forward.dtype != Dtype::f32 || !is_tested(rows) || !takes(rows, c)) continue;
        check::context = rows.backward.name;
        check_close("dv", run_rows(c, rows, in, 2).dv, want.dv, {Dtype::f32, "dv", 0, 144 * 0x1p-24, 0.9999999}, 1);
    }
}

// A mean of equal values adds 16,384 equal terms. Rows add up 64 to 256 of them before these meet the others, and so
// lose (256 + 64) / 2 units at most; one by one, terms would lose thousands.
TEST(long_lists_of_equal_values_lose_little) {
    for (const int64_t heads : {1, 4}) {
        const Case c{"full", 1, heads, 1, 1, 16384, 16, 16};
        Inputs in = make_inputs(c, Dtype::f32, seed);
        std::fill(in.q.begin(), in.q.end(), 0.);
        std::fill(in.v.begin(), in.v.end(), double(0.1F));
        const Results want = run_rows(c, reference_rows(Dtype::f64), in, 2);
        for (const Rows& rows : cpu_rows(false, FewQueries::included)) {
            if (rows.forward.dtype != Dtype::f32 || !is_tested(rows) || !takes(rows, c)) continue;
            check::context = rows.forward.name;
            check_close("out", run_rows(c, rows, in, 2).out, want.out, {Dtype::f32, "out", 0, 160 * 0x1p-24, 0.9999999}, 1);
        }
    }
}
