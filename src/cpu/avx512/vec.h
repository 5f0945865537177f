// SPDX-License-Identifier: MIT
// The verbs of generic/ on sixteen floats. Opmask registers take mask bits straight from a layout's words.
#pragma once
#define SPATTN_CPU_VERBS  // see generic/verbs.h

// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#include <stdint.h>

#include "cpu/generic/exp2.h"

namespace spattn::cpu {
namespace {

using Vec = __m512;
using Bits = __mmask16;
using Real = float;  // what generic/ computes in
constexpr int lanes = 16;
// 6 x 4 accumulators, 4 of a B row and one broadcast fill 29 of 32 registers; 10 loads feed 24 FMAs.
constexpr int tile_m = 6, tile_n = 4, tile_k = 1;
constexpr bool fetches_ahead = false;  // was not timed here

// For cost.h: flops of products, clocks a vector of softmax. One 512-bit FMA a clock: CPUs with two units are faster in
// products alone.
constexpr double flops_per_clock = 32, softmax_clocks = 15;

inline Vec load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Vec v) { _mm512_storeu_ps(x, v); }
inline void stream(float* x, Vec v) { _mm512_stream_ps(x, v); }  // past the caches; x is aligned
inline void end_streams() { _mm_sfence(); }                      // before others read what was streamed
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline void add_product(Vec& sum, Vec a, Vec b) { sum = fma(a, b, sum); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline Bits above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }  // false where either is NaN
inline bool any(Bits bits) { return bits != 0; }

// `lanes` mask bits that start at bit `first`, a multiple of `lanes`.
inline Bits bits_at(const uint64_t* mask, int first) { return Bits(mask[first / 64] >> (first % 64)); }
inline Vec select(Bits bits, Vec a, Vec b) { return _mm512_mask_blend_ps(bits, b, a); }  // a where the bit is set

// 2^x within 2.6 ulp; below 2^-126 it is 0, NaN stays. An Intel core takes 117 ns and not 3 for a vector of which
// scalef makes one denormal or one 0, as it would of every key that a mask leaves out.
inline Vec exp2(Vec x) {
    const Bits normal = _mm512_cmp_ps_mask(x, set1(-126.f), _CMP_NLT_UQ);
    const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // scalef scales by the floor of x
    Vec p = fma(f, set1(exp2_up_terms[4]), set1(exp2_up_terms[3]));
    p = fma(f, p, set1(exp2_up_terms[2]));
    p = fma(f, p, set1(exp2_up_terms[1]));
    p = fma(f, p, set1(exp2_up_terms[0]));
    return _mm512_maskz_scalef_ps(normal, fma(f, p, set1(1.f)), x);
}

inline Vec load_bf16(const uint16_t* x) {
    const __m256i half = _mm256_loadu_si256((const __m256i*)x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vec load_f16(const uint16_t* x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)); }
inline void store_f16(uint16_t* x, Vec v) {  // to nearest, ties to even
    _mm256_storeu_si256((__m256i*)x, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
}  // namespace spattn::cpu
