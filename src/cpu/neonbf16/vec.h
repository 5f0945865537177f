// SPDX-License-Identifier: MIT
// The verbs of generic/ on sixteen floats in four registers: panels have as many lanes.
#pragma once
#define SPATTN_CPU_VERBS  // see generic/verbs.h

#include <arm_neon.h>
#include <stdint.h>

#include "cpu/neon/exp2_four.h"

namespace spattn::cpu {
namespace {

struct Vec {
    float32x4_t part[4];
};
struct Bits {  // all ones or all zeros in each lane
    uint32x4_t part[4];
};
using Real = float;  // what generic/ computes in
constexpr int lanes = 16;
constexpr int tile_m = 5, tile_n = 1, tile_k = 1;  // as many registers as the tile of neon/vec.h
constexpr bool fetches_ahead = false;  // was not timed here

// For cost.h: flops of products, clocks a vector of softmax. Estimates, as those of neon/vec.h.
constexpr double flops_per_clock = 14, softmax_clocks = 48;

// f of each part of the operands.
template <class Result = Vec, class F, class... Operands>
inline Result each_part(F f, const Operands&... x) {
    Result y;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) y.part[i] = f(x.part[i]...);
    return y;
}

inline Vec operator+(Vec a, Vec b) { return each_part([](auto x, auto y) { return vaddq_f32(x, y); }, a, b); }
inline Vec operator-(Vec a, Vec b) { return each_part([](auto x, auto y) { return vsubq_f32(x, y); }, a, b); }
inline Vec operator*(Vec a, Vec b) { return each_part([](auto x, auto y) { return vmulq_f32(x, y); }, a, b); }
inline Vec operator/(Vec a, Vec b) { return each_part([](auto x, auto y) { return vdivq_f32(x, y); }, a, b); }

inline Vec load(const float* x) {
    return {{vld1q_f32(x), vld1q_f32(x + 4), vld1q_f32(x + 8), vld1q_f32(x + 12)}};
}
inline void store(float* x, Vec v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) vst1q_f32(x + 4 * i, v.part[i]);
}
inline void stream(float* x, Vec v) { store(x, v); }
inline void end_streams() {}
inline Vec set1(float x) {
    const float32x4_t part = vdupq_n_f32(x);
    return {{part, part, part, part}};
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return each_part([](auto x, auto y, auto z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
inline void add_product(Vec& sum, Vec a, Vec b) { sum = fma(a, b, sum); }
inline Vec select(Bits bits, Vec a, Vec b) {  // a where set
    return each_part([](auto bit, auto x, auto y) { return vbslq_f32(bit, x, y); }, bits, a, b);
}
inline Bits above(Vec a, Vec b) {  // false where either is NaN
    return each_part<Bits>([](auto x, auto y) { return vcgtq_f32(x, y); }, a, b);
}
inline Vec max(Vec a, Vec b) { return select(above(a, b), a, b); }  // b where either is NaN
inline bool any(Bits bits) {
    const uint32x4_t low = vorrq_u32(bits.part[0], bits.part[1]), high = vorrq_u32(bits.part[2], bits.part[3]);
    return vmaxvq_u32(vorrq_u32(low, high)) != 0;
}

// `lanes` mask bits that start at bit `first`, a multiple of `lanes`.
inline Bits bits_at(const uint64_t* mask, int first) {
    const uint32x4_t each = {1, 2, 4, 8}, all = vdupq_n_u32(uint32_t(mask[first / 64] >> (first % 64)));
    return {{vtstq_u32(all, each), vtstq_u32(all, vshlq_n_u32(each, 4)), vtstq_u32(all, vshlq_n_u32(each, 8)),
             vtstq_u32(all, vshlq_n_u32(each, 12))}};
}

inline Vec exp2(Vec x) {
    return each_part([](auto part) { return exp2_four(part); }, x);
}

// The forms of generic/sums.h for such vectors.
inline Vec pair_sums(Vec a, Vec b) {
    return each_part([](auto x, auto y) { return vpaddq_f32(x, y); }, a, b);
}
inline void store_folded(Vec x, float* out) {
    vst1q_f32(out, vaddq_f32(vaddq_f32(x.part[0], x.part[2]), vaddq_f32(x.part[1], x.part[3])));
}

inline Vec load_bf16(const uint16_t* x) {
    Vec y;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) y.part[i] = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(x + 4 * i)), 16));
    return y;
}
inline Vec load_f16(const uint16_t* x) {
    Vec y;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) y.part[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i)));
    return y;
}
inline void store_f16(uint16_t* x, Vec v) {  // to nearest even
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) vst1_u16(x + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v.part[i])));
}

}  // namespace
}  // namespace spattn::cpu
