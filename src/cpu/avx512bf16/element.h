// SPDX-License-Identifier: MIT
// The elements of tiles: bf16. CPUs with AMX have these instructions, too.
#pragma once

#include "cpu/avx512/vec.h"
#include "cpu/generic/elements.h"

namespace spattn::cpu {
namespace {

using Element = Bf16;
constexpr short element_exponent = 0x7f80;  // all ones in infinities and NaN

// Numbers to elements, to nearest, ties to even; NaN stays NaN, and denormals become zero. Lanes of a first.
inline __m512i narrow(Vec a, Vec b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

// Elements of a and b side by side; ties away from zero. The conversion, with a permutation after it, costs more:
// exponentials beside products of AMX take 0.92 of the time with this. NaN stays NaN but with all digits set, which
// callers' numbers never have here (usual_nan).
inline __m512i narrow_pairs(Vec a, Vec b) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i x = _mm512_add_epi32(_mm512_castps_si512(a), half);
    const __m512i y = _mm512_add_epi32(_mm512_castps_si512(b), half);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y);
}

// The same as from_real() makes them: ties to even, denormals stay, NaN is quiet.
inline __m512i narrow_pairs_to_even(Vec a, Vec b) {
    const auto rounded = [](Vec value) {  // in the upper half
        const __m512i x = _mm512_castps_si512(value);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
        const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        return _mm512_mask_or_epi32(sum, is_nan, x, _mm512_set1_epi32(0x400000));
    };
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rounded(a), 16), rounded(b));
}

}  // namespace
}  // namespace spattn::cpu
