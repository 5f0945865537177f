// SPDX-License-Identifier: MIT
// Elements of tensors, one at a time and by the vector, as the floats that generic/ computes with.
#pragma once

namespace spattn::cpu {
namespace {

struct Bf16 {
    uint16_t bits;
};

inline float to_real(float x) { return x; }
inline float to_real(Bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
}
inline Vec load_wide(const float* x) { return load(x); }
inline Vec load_wide(const Bf16* x) { return load_bf16(&x->bits); }

inline void from_real(float x, float& out) { out = x; }
// To nearest, ties to even. NaN stays NaN: a carry out of its mantissa would make it an infinity.
inline void from_real(float x, Bf16& out) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

}  // namespace
}  // namespace spattn::cpu
