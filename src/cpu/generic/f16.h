// SPDX-License-Identifier: MIT
// float16 by bits, for CPUs and single elements that no instruction serves: the bits that instructions give.
#pragma once

#include <stdint.h>

namespace spattn::cpu {
namespace {

constexpr uint32_t float_infinity = 0x7f800000;

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// Exponents differ by 112. Denormals are integers: as denormal floats they would be 0 on a thread that takes these for 0.
// What held the largest exponent is infinite or NaN.
inline float widen_f16(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, size = uint32_t(x & 0x7fff) << 13;
    if (size >= 31u << 23) return float_of(sign | float_infinity | size | (size > 31u << 23 ? 0x400000 : 0));
    if (size < 1u << 23) return float(int32_t(size >> 13)) * (sign ? -0x1p-24f : 0x1p-24f);
    return float_of(sign | (size + (112u << 23)));
}

// To nearest, ties to even; 65520 and more become infinite. NaN stays NaN, made quiet.
inline uint16_t narrow_f16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > float_infinity) return uint16_t(sign | 0x7e00 | (size >> 13 & 0x1ff));
    if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (size >= 113u << 23) return uint16_t(sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13);
    // Denormal: the unit of the last place of numbers from 0.5 to 1 is 2^-24, as it is here, so adding 0.5 rounds.
    const float shifted = float_of(size) + 0.5f;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    return uint16_t(sign | (bits - 0x3f000000));
}

}  // namespace
}  // namespace spattn::cpu
