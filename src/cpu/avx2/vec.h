// SPDX-License-Identifier: MIT
// The verbs of generic/ on eight floats.
#pragma once
#define SPATTN_CPU_VERBS  // see generic/verbs.h

#include <immintrin.h>
#include <stdint.h>

#include "cpu/generic/exp2.h"

namespace spattn::cpu {
namespace {

using Vec = __m256;
using Bits = __m256;  // all ones or all zeros in each lane
using Real = float;  // what generic/ computes in
constexpr int lanes = 8;
// 6 x 2 accumulators, 2 of a B row and one broadcast fill 15 of 16 registers; 8 loads feed 12 FMAs.
constexpr int tile_m = 6, tile_n = 2;
// Terms that a turn of the loop adds. Two hardware threads that share a core share its six instructions a clock: a turn
// of one term has 24 for its 12 FMAs, which take 6 clocks alone, a turn of four 21 a term.
// Tried and dropped (Zen 3): tiles of 3 x 4 and 4 x 3, and rows of B as memory operands, 18 and 17 instructions a term:
// no faster, for loads bind then.
constexpr int tile_k = 4;
constexpr bool fetches_ahead = true;  // generic/beside.h

// For cost.h: flops of products, clocks a vector of softmax.
constexpr double flops_per_clock = 30, softmax_clocks = 11;

inline Vec load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* x, Vec v) { _mm256_storeu_ps(x, v); }
inline void stream(float* x, Vec v) { _mm256_stream_ps(x, v); }  // past the caches; x is aligned
inline void end_streams() { _mm_sfence(); }                      // before others read what was streamed
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// GCC takes other forms of the instruction in a loop of several terms, which write to a factor: sums move from register
// to register then, and to memory.
inline void add_product(Vec& sum, Vec a, Vec b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline Bits above(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }  // false where either is NaN
inline bool any(Bits bits) { return _mm256_movemask_ps(bits) != 0; }

// `lanes` mask bits that start at bit `first`, a multiple of `lanes`.
inline Bits bits_at(const uint64_t* mask, int first) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i all = _mm256_set1_epi32(int(mask[first / 64] >> (first % 64)));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, each), each));
}
inline Vec select(Bits bits, Vec a, Vec b) { return _mm256_blendv_ps(b, a, bits); }  // a where the bit is set

// 2^x within 2.1 ulp; below 2^-126 it is 0, NaN stays, 128 and more give inf.
inline Vec exp2(Vec x) {
    const Vec tiny = _mm256_cmp_ps(x, set1(-126.f), _CMP_LT_OQ);
    x = _mm256_min_ps(set1(128.f), _mm256_max_ps(set1(-126.f), x));
    const Vec n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const Vec f = x - n;
    Vec p = fma(f, set1(exp2_c5), set1(exp2_c4));
    p = fma(f, p, set1(exp2_c3));
    p = fma(f, p, set1(exp2_c2));
    p = fma(f, p, set1(exp2_c1));
    return _mm256_andnot_ps(tiny, fma(f, p, set1(1.f)) * _mm256_castsi256_ps(power));
}

inline Vec load_bf16(const uint16_t* x) {
    const __m128i half = _mm_loadu_si128((const __m128i*)x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Vec load_f16(const uint16_t* x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x)); }
inline void store_f16(uint16_t* x, Vec v) {  // to nearest, ties to even
    _mm_storeu_si128((__m128i*)x, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
}  // namespace spattn::cpu
