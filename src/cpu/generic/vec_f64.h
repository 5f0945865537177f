// SPDX-License-Identifier: MIT
// The verbs of generic/ on doubles, for every arch: the compiler's own vectors, as wide as the arch's registers.
// Written once, without intrinsics: rows of doubles are there to be right, and + and * compile to what these would.
#pragma once
#define SPATTN_CPU_VERBS  // see generic/verbs.h

#include <stdint.h>

#include "core/float8.h"

namespace spattn::cpu {
namespace {

using Real = double;
#if defined(__AVX512F__)
constexpr int lanes = 8, tile_m = 6, tile_n = 4, tile_k = 1;
#elif defined(__AVX2__)
constexpr int lanes = 4, tile_m = 6, tile_n = 2, tile_k = 4;
#elif defined(__aarch64__)
constexpr int lanes = 2, tile_m = 6, tile_n = 4, tile_k = 1;
#else
constexpr int lanes = 2, tile_m = 4, tile_n = 2, tile_k = 1;
#endif
constexpr bool fetches_ahead = tile_k > 1;  // as float rows do: on AVX2
typedef double Vec __attribute__((vector_size(8 * lanes)));
typedef int64_t Bits __attribute__((vector_size(8 * lanes)));  // all ones or all zeros in each lane

// For cost.h: flops of products, clocks a vector of softmax. Without FMA a product and its sum are two instructions:
// dense blocks and heads in lanes take twice as long as with it, for each lane (Sapphire Rapids).
#if defined(__FMA__) || defined(__aarch64__)
constexpr double flops_per_clock = 2.0 * lanes;
#else
constexpr double flops_per_clock = 1.0 * lanes;
#endif
constexpr double softmax_clocks = 24;

inline Vec load(const double* x) {
    Vec v;
    __builtin_memcpy(&v, x, sizeof v);
    return v;
}
inline void store(double* x, Vec v) { __builtin_memcpy(x, &v, sizeof v); }
inline void stream(double* x, Vec v) { store(x, v); }
inline void end_streams() {}
inline Vec set1(double x) { return x - Vec{}; }  // x - 0 is x, whatever its sign
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline void add_product(Vec& sum, Vec a, Vec b) { sum = fma(a, b, sum); }
inline Vec select(Bits bits, Vec a, Vec b) { return (Vec)((bits & (Bits)a) | (~bits & (Bits)b)); }  // a where set
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN
inline Bits above(Vec a, Vec b) { return a > b; }  // false where either is NaN
inline bool any(Bits bits) {
    int64_t set = 0;
    for (int i = 0; i < lanes; ++i) set |= bits[i];
    return set != 0;
}

// `lanes` mask bits that start at bit `first`, a multiple of `lanes`.
inline Bits bits_at(const uint64_t* mask, int first) {
    static const int64_t powers[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    Bits each;
    __builtin_memcpy(&each, powers, sizeof each);
    return ((int64_t(mask[first / 64] >> (first % 64)) - Bits{}) & each) == each;
}

// 2^f - 1 = f (t0 + f (t1 + ...)) on [-1/2, 1/2]: minimax relative to 2^f - 1, 5e-17 (Remez's exchange).
constexpr double exp2_minus_1_terms[] = {
    0x1.62e42fefa39efp-1,  0x1.ebfbdff82c5a2p-3,  0x1.c6b08d704a392p-5,  0x1.3b2ab6fb9fe0cp-7,
    0x1.5d87fe77e7c1ap-10, 0x1.43091310ce47fp-13, 0x1.ffcc00b3b7501p-17, 0x1.62bfc064080dcp-20,
    0x1.b51adf8c3b641p-24, 0x1.e62a866266b64p-28, 0x1.fa5b8674f8119p-32};

// 2^x within 2 ulp; below 2^-1022 it is 0, NaN stays, 1024 and more give inf. Adding 1.5 * 2^52 rounds to an integer
// and leaves it in the low bits.
inline Vec exp2(Vec x) {
    const Bits tiny = x < set1(-1022);
    x = max(set1(-1022), x);
    x = x > set1(1024) ? set1(1024) : x;
    const Vec shift = set1(0x1.8p52), shifted = x + shift, f = x - (shifted - shift);
    const Bits power = (((Bits)shifted - (Bits)shift) + 1023) << 52;
    Vec p = set1(exp2_minus_1_terms[10]);
#pragma GCC unroll 16
    for (int i = 9; i >= 0; --i) p = fma(f, p, set1(exp2_minus_1_terms[i]));
    return (Vec)((Bits)(fma(f, p, set1(1)) * (Vec)power) & ~tiny);
}

inline double to_real(double x) { return x; }
inline Vec load_wide(const double* x) { return load(x); }
inline Vec load_float8(const uint8_t* x) {
    double wide[lanes];
    for (int i = 0; i < lanes; ++i) wide[i] = widen_float8(x[i]);
    return load(wide);
}
inline void from_real(double x, double& out) { out = x; }

}  // namespace
}  // namespace spattn::cpu
