// SPDX-License-Identifier: MIT
// The elements of tiles: fp16, by the conversions that every CPU with AVX-512 has.
#pragma once

#include "cpu/avx512/vec.h"
#include "cpu/generic/elements.h"

namespace spattn::cpu {
namespace {

using Element = F16;
constexpr short element_exponent = 0x7c00;  // all ones in infinities and NaN

// Numbers to elements, to nearest, ties to even; NaN stays NaN. Lanes of a first.
inline __m512i narrow(Vec a, Vec b) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256i low = _mm512_cvtps_ph(a, nearest), high = _mm512_cvtps_ph(b, nearest);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Elements of a and b side by side.
inline __m512i narrow_pairs(Vec a, Vec b) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i x = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, nearest));
    const __m512i y = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(b, nearest));
    return _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}
inline __m512i narrow_pairs_to_even(Vec a, Vec b) { return narrow_pairs(a, b); }

}  // namespace
}  // namespace spattn::cpu
