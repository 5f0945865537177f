// SPDX-License-Identifier: MIT
// The verbs of generic/ for any CPU: four floats in the compiler's own vector type, which becomes whatever registers
// the target has, or single floats.
#pragma once
#define SPATTN_CPU_VERBS  // see generic/verbs.h

#include <stdint.h>

#include "cpu/generic/exp2.h"
#include "cpu/generic/f16.h"

namespace spattn::cpu {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Bits __attribute__((vector_size(16)));  // all ones or all zeros in each lane
using Real = float;  // what generic/ computes in
constexpr int lanes = 4;
// 4 x 2 accumulators leave room in 16 registers for the products that a multiply without FMA needs.
constexpr int tile_m = 4, tile_n = 2, tile_k = 1;
constexpr bool fetches_ahead = false;  // was not timed here

// For cost.h: flops of products, clocks a vector of softmax. A product and its sum are two instructions: Zen 4, which
// has pipes for either, makes 10 flops, Sapphire Rapids 5.
constexpr double flops_per_clock = 6, softmax_clocks = 14;

inline Vec load(const float* x) {
    Vec v;
    __builtin_memcpy(&v, x, sizeof v);
    return v;
}
inline void store(float* x, Vec v) { __builtin_memcpy(x, &v, sizeof v); }
inline void stream(float* x, Vec v) { store(x, v); }
inline void end_streams() {}
inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline void add_product(Vec& sum, Vec a, Vec b) { sum = fma(a, b, sum); }
inline Vec select(Bits bits, Vec a, Vec b) { return (Vec)((bits & (Bits)a) | (~bits & (Bits)b)); }  // a where set
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }  // b where either is NaN
inline Bits above(Vec a, Vec b) { return a > b; }  // false where either is NaN
inline bool any(Bits bits) { return (bits[0] | bits[1] | bits[2] | bits[3]) != 0; }

// `lanes` mask bits that start at bit `first`, a multiple of `lanes`.
inline Bits bits_at(const uint64_t* mask, int first) {
    const int32_t all = int32_t(mask[first / 64] >> (first % 64));
    const Bits each = {1, 2, 4, 8};
    return (Bits{all, all, all, all} & each) == each;
}

// 2^x within 2.3 ulp; below 2^-126 it is 0, NaN stays, 128 and more give inf. Adding 1.5 * 2^23 rounds to an integer
// and leaves it in the low bits.
inline Vec exp2(Vec x) {
    const Bits tiny = x < set1(-126.f);
    x = max(set1(-126.f), x);
    x = select(x > set1(128.f), set1(128.f), x);
    const Vec shift = set1(12582912.f), shifted = x + shift, f = x - (shifted - shift);
    const Bits power = (((Bits)shifted - (Bits)shift) + 127) << 23;
    Vec p = fma(f, set1(exp2_c5), set1(exp2_c4));
    p = fma(f, p, set1(exp2_c3));
    p = fma(f, p, set1(exp2_c2));
    p = fma(f, p, set1(exp2_c1));
    return (Vec)((Bits)(fma(f, p, set1(1.f)) * (Vec)power) & ~tiny);
}

inline Vec load_bf16(const uint16_t* x) {
    const Bits wide = {x[0], x[1], x[2], x[3]};
    return (Vec)(wide << 16);
}
inline Vec load_f16(const uint16_t* x) {
    return Vec{widen_f16(x[0]), widen_f16(x[1]), widen_f16(x[2]), widen_f16(x[3])};
}
inline void store_f16(uint16_t* x, Vec v) {  // to nearest, ties to even
    for (int i = 0; i < lanes; ++i) x[i] = narrow_f16(v[i]);
}

}  // namespace
}  // namespace spattn::cpu
