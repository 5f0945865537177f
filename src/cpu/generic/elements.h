// SPDX-License-Identifier: MIT
// Elements of tensors, one at a time and by the vector, as the floats that generic/ computes with.
#pragma once

#include "cpu/generic/f16.h"
#ifndef SPATTN_CPU_VERBS  // of floats: read alone, those of any CPU
#include "cpu/scalar/vec.h"
#endif

namespace spattn::cpu {
namespace {

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

inline float to_real(float x) { return x; }
inline float to_real(Bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
}
inline float to_real(F16 x) { return widen_f16(x.bits); }
inline Vec load_wide(const float* x) { return load(x); }
inline Vec load_wide(const Bf16* x) { return load_bf16(&x->bits); }
inline Vec load_wide(const F16* x) { return load_f16(&x->bits); }

// As float16, whose exponent has a bit more and another bias: 2^8 is between them. Instructions that widen float16 know
// denormals, whatever a thread does with those of floats.
inline Vec load_float8(const uint8_t* x) {
    uint16_t halves[lanes];
    for (int i = 0; i < lanes; ++i) {
        const uint16_t size = x[i] & 0x7f, sign = uint16_t((x[i] & 0x80) << 8);
        halves[i] = uint16_t(sign | (size == 0x7f ? 0x7e00 : size << 7));
    }
    return load_f16(halves) * set1(256.f);
}

inline void from_real(float x, float& out) { out = x; }
// To nearest, ties to even. NaN stays NaN: a carry out of its mantissa would make it an infinity.
inline void from_real(float x, Bf16& out) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}
inline void from_real(float x, F16& out) { out.bits = narrow_f16(x); }

// The compiler makes vectors of the loop that serves all elements (operand.h) by itself, but not of these conversions.
inline void store_row(const float* in, int columns, float factor, F16* out, int64_t stride) {
    int c = 0;
    if (stride == 1)
        for (; c + lanes <= columns; c += lanes) store_f16(&out[c].bits, load(in + c) * set1(factor));
    for (; c < columns; ++c) from_real(in[c] * factor, out[c * stride]);
}

}  // namespace
}  // namespace spattn::cpu
