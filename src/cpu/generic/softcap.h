// SPDX-License-Identifier: MIT
// Capped scores: s = softcap tanh(y), y = scale q k / softcap, and their slope 1 - tanh^2, from one exponential:
//
//     u = e^(2y) - 1 = 2^z - 1,  z = 2 log2(e) y         tanh = u / (u + 2)         slope = 4 (u + 1) / (u + 2)^2
//
// u is made as 2^n (2^f - 1) + (2^n - 1) with n = round(z): near 0, n is 0 and u has the relative precision of the
// series, so that tanh has it too. Three ulp of tanh in all.
#pragma once

#include "plan/call.h"
#include "cpu/generic/log2.h"
#include "cpu/generic/verbs.h"

namespace spattn::cpu {
namespace {

// What a pass multiplies products by to get z, and tanh by to get scores in units of log2.
struct SoftcapFactors {
    Real in, out;
};
inline SoftcapFactors softcap_factors(const Problem& p) {
    return {Real(2 * log2_e * p.scale / p.softcap), Real(p.softcap * log2_e)};
}

// 2^f - 1 on [-1/2, 1/2].
inline Vec exp2_minus_1(Vec f) {
    constexpr int last = int(sizeof exp2_minus_1_terms / sizeof *exp2_minus_1_terms) - 1;
    Vec sum = set1(exp2_minus_1_terms[last]);
#pragma GCC unroll 16
    for (int i = last - 1; i >= 0; --i) sum = fma(f, sum, set1(exp2_minus_1_terms[i]));
    return f * sum;
}

struct Capped {
    Vec tanh, slope;
};

// Beyond |z| = 60, tanh is 1 to the last bit of a double and the slope below 2^-57: there z stays, and no power
// overflows. NaN stays NaN. Adding 1.5 units of the last integer place rounds to an integer.
inline Capped capped_tanh(Vec z) {
    const Vec limit = set1(60.f), two = set1(2.f), shift = set1(Real(sizeof(Real) == 4 ? 0x1.8p23 : 0x1.8p52));
    z = max(set1(-60.f), z);
    z = set1(0.f) - max(set1(0.f) - limit, set1(0.f) - z);
    const Vec n = (z + shift) - shift, power = exp2(n), part = exp2_minus_1(z - n);
    const Vec u = fma(power, part, power - set1(1.f)), inverse = set1(1.f) / (u + two);
    return {u * inverse, set1(4.f) * fma(power, part, power) * inverse * inverse};
}

// A tile of z becomes scores in units of log2. count is a multiple of lanes.
inline void cap_scores(Real* s, int64_t count, Real out) {
    for (int64_t i = 0; i < count; i += lanes) store(s + i, capped_tanh(load(s + i)).tanh * set1(out));
}

}  // namespace
}  // namespace spattn::cpu
