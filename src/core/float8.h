// SPDX-License-Identifier: MIT
// float8_e4m3fn by bits, for hosts and devices: a sign, 4 bits of exponent whose bias is 7, 3 of mantissa. No infinity;
// all ones is NaN. https://arxiv.org/abs/2209.05433
#pragma once

#include <math.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define SPATTN_FLOAT8 __host__ __device__ inline
#else
#define SPATTN_FLOAT8 inline
#endif

namespace spattn {
// Each unit has its own: code of an arch may not serve others (src/README.md).
namespace {

constexpr float most_float8 = 448;

// Exponents differ by 120. On a device, multiplying by 2^120 serves denormals, too; a thread of a host may be one that
// takes denormal floats for 0, as XLA's do, and so those are integers there.
SPATTN_FLOAT8 float widen_float8(uint8_t x) {
    const uint32_t size = x & 0x7f, sign = uint32_t(x & 0x80) << 24;
#if defined(__CUDA_ARCH__)
    const uint32_t bits = sign | (size == 0x7f ? 0x7fc00000u : size << 20);
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value * 0x1p120f;
#else
    const float denormal = float(int32_t(size)) * 0x1p-9f;
    uint32_t bits;
    __builtin_memcpy(&bits, &denormal, sizeof bits);
    bits = sign | (size < 8 ? bits : size == 0x7f ? 0x7fc00000u : (size << 20) + (120u << 23));
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

// To nearest, ties to even; what is larger than 448 becomes 448. NaN stays NaN and loses its sign, which a GPU's
// arithmetic does not keep, so that all devices write the same bytes.
SPATTN_FLOAT8 uint8_t narrow_float8(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7f;
    if (size >= 0x43e00000) return uint8_t(sign | 0x7e);  // 448
    if (size >= 121u << 23) return uint8_t(sign | (size + 0x7ffff + (size >> 20 & 1) - (120u << 23)) >> 20);
    // Denormal: the unit of the last place of floats from 2^14 to 2^15 is 2^-9, as it is here, so adding 2^14 rounds.
    const float shifted = (sign ? -x : x) + 0x1p14f;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    return uint8_t(sign | (bits - 0x46800000));
}

// The scale of a row whose largest magnitude is this: that becomes the largest number. 1 where it is 0 or not finite.
SPATTN_FLOAT8 float scale_for(float largest) {
    constexpr float least = 0x1p-126f;  // a denormal scale would divide by less than it says where these are flushed
    if (!(largest > 0 && largest < HUGE_VALF)) return 1;
    const float scale = largest / most_float8;
    return scale < least ? least : scale;
}

}  // namespace
}  // namespace spattn
