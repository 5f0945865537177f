// SPDX-License-Identifier: MIT
// What becomes of float16 elements on their way through a row: every value is read as what it is, and results are
// rounded to nearest, ties to even, with denormals and infinities.
#include "attention.h"
#include "core/float8.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

using namespace attention;

namespace {

// Makes this thread take denormal floats for 0, and write 0 for them, as XLA's threads do and torch's can be made to.
class Flushed {
public:
#if defined(__SSE2__)
    Flushed() { _mm_setcsr(before_ | 0x8040); }
    ~Flushed() { _mm_setcsr(before_); }

private:
    const unsigned before_ = _mm_getcsr();
#endif
};

// One query on one key sees p = 1, so out is v, and dv the sum of the dout of the queries.
Results run_one_key(const Rows& rows, int64_t heads, int64_t seq_q, int64_t columns, const Values& v,
                    const Values& dout) {
    const Case c{"full", 1, heads, heads, seq_q, 1, 1, columns, Axes::bhsd, 0., aligned_end, false};
    const Values per_query(size_t(heads * seq_q)), per_head(static_cast<size_t>(heads));
    Inputs in{per_query, per_head, v, dout, per_query, per_head};
    return run_rows(c, rows, in, 2);
}

bool equal_or_nan(double a, double b) { return a == b || (a != a && b != b); }  // -0 becomes 0 + -0

template <class Body>
void each_f16_row(Body body) {
    for (const bool reference : {false, true})
        for (const Rows& rows : cpu_rows(reference))
            if (rows.forward.dtype == Dtype::f16 && is_tested(rows)) {
                check::context = rows.forward.name;
                body(rows);
            }
}

}  // namespace

// Each infinity and NaN has a head of its own: the others must not meet it in a product.
TEST(every_float16_passes_unchanged) {
    Values v;
    for (uint32_t bits = 0; bits < 65536; ++bits) v.push_back(widen(F16{uint16_t(bits)}));
    each_f16_row([&](const Rows& rows) {
        for (const int64_t columns : {1024, 37}) {
            const int64_t heads = 65536 / columns;
            const Values some(v.begin(), v.begin() + heads * columns);
            const Results got = run_one_key(rows, heads, 1, columns, some, Values(some.size()));
            long wrong = 0;
            for (size_t i = 0; i < some.size(); ++i) wrong += !equal_or_nan(got.out[i], some[i]);
            CHECK_EQ(wrong, 0);
        }
    });
}

TEST(denormals_are_read_where_denormal_floats_are_none) {
    Values v;
    for (uint32_t bits = 0; bits < 1024; ++bits) v.push_back(widen(F16{uint16_t(bits)}));
    each_f16_row([&](const Rows& rows) {
        const Case c{"full", 1, 1, 1, 1, 1, 1, 1024, Axes::bhsd, 0., aligned_end, false};
        const Values one(1);
        const Inputs in{one, one, v, Values(v.size()), one, one};
        const Flushed flushed;
        const Results got = run_rows(c, rows, in, 1);
        long wrong = 0;
        for (size_t i = 0; i < v.size(); ++i) wrong += got.out[i] != v[i];
        CHECK_EQ(wrong, 0);
    });
    for (int bits = 0; bits < 256; ++bits) {
        const int size = bits & 0x7f, mantissa = size % 8, exponent = size / 8;
        const double wide = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
        const Flushed flushed;
        const float found = spattn::widen_float8(uint8_t(bits));
        CHECK(size == 0x7f ? found != found : found == float(bits & 0x80 ? -wide : wide));
    }
}

// Sums of two float16 that a float holds exactly: ties, denormals and sums beyond 65504 are among them.
TEST(float16_results_are_rounded_to_nearest_even) {
    constexpr int64_t heads = 64, columns = 515;
    std::mt19937 random(1916);
    Values dout(heads * 2 * columns), v(heads * columns, 1.), want;
    const auto draw = [&](uint16_t low, uint16_t high) {
        const uint16_t size = uint16_t(low + random() % (high - low));
        return widen(F16{uint16_t(size | (random() % 2 << 15))});
    };
    long ties = 0, denormals = 0, infinities = 0;
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < columns; ++c) {
            const uint16_t exponent = uint16_t(random() % 31 << 10);
            const double a = draw(exponent, exponent + 1024),
                         b = draw(exponent < 11 << 10 ? 0 : exponent - (11 << 10), exponent + 1024);
            dout[size_t(2 * h * columns + c)] = a, dout[size_t((2 * h + 1) * columns + c)] = b;
            const double sum = round_to<F16>(a + b), other = 2 * (a + b) - sum;
            want.push_back(sum);
            ties += std::isfinite(sum) && sum != other && round_to<F16>(other) == other;
            denormals += sum != 0 && std::abs(sum) < 0x1p-14;
            infinities += std::isinf(sum);
        }
    check::context = text(ties, " ties, ", denormals, " denormals, ", infinities, " infinities");
    CHECK(ties > 100 && denormals > 100 && infinities > 10);
    each_f16_row([&](const Rows& rows) {
        const Results got = run_one_key(rows, heads, 2, columns, v, dout);
        long wrong = 0;
        for (size_t i = 0; i < want.size(); ++i) wrong += !(got.dv[i] == want[i]);
        CHECK_EQ(wrong, 0);
    });
}
