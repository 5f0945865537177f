// SPDX-License-Identifier: MIT
// The verbs of generic/ on four floats, for AArch64.
#pragma once
#define SPATTN_CPU_VERBS  // see generic/verbs.h

#include <arm_neon.h>
#include <stdint.h>

#include "cpu/neon/exp2_four.h"

namespace spattn::cpu {
namespace {

using Vec = float32x4_t;
using Bits = uint32x4_t;  // all ones or all zeros in each lane
using Real = float;       // what generic/ computes in
constexpr int lanes = 4;
// 5 x 4 accumulators, 4 of a B row and 5 floats of A, which compilers fetch ahead, fill 29 of 32 registers: with 6 x 4
// GCC spills two accumulators. 9 loads feed 20 FMAs; rows of 16 and of 64 floats are whole strips of 4 vectors.
constexpr int tile_m = 5, tile_n = 4, tile_k = 1;
constexpr bool fetches_ahead = false;  // was not timed here

// For cost.h: flops of products, clocks a vector of softmax. Estimates, not measured on silicon: 7/8 of what two FMA
// units can do, and the two dozen vector instructions of softmax, two a clock.
constexpr double flops_per_clock = 14, softmax_clocks = 12;

inline Vec load(const float* x) { return vld1q_f32(x); }
inline void store(float* x, Vec v) { vst1q_f32(x, v); }
inline void stream(float* x, Vec v) { store(x, v); }
inline void end_streams() {}
inline Vec set1(float x) { return vdupq_n_f32(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline void add_product(Vec& sum, Vec a, Vec b) { sum = fma(a, b, sum); }
inline Vec select(Bits bits, Vec a, Vec b) { return vbslq_f32(bits, a, b); }  // a where set
inline Bits above(Vec a, Vec b) { return vcgtq_f32(a, b); }  // false where either is NaN
// b where either is NaN, which neither FMAX (NaN) nor FMAXNM (the number) gives.
inline Vec max(Vec a, Vec b) { return select(above(a, b), a, b); }
inline bool any(Bits bits) { return vmaxvq_u32(bits) != 0; }

// `lanes` mask bits that start at bit `first`, a multiple of `lanes`.
inline Bits bits_at(const uint64_t* mask, int first) {
    const Bits each = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(uint32_t(mask[first / 64] >> (first % 64))), each);
}

inline Vec exp2(Vec x) { return exp2_four(x); }

inline Vec load_bf16(const uint16_t* x) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(x)), 16));
}
inline Vec load_f16(const uint16_t* x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
inline void store_f16(uint16_t* x, Vec v) { vst1_u16(x, vreinterpret_u16_f16(vcvt_f16_f32(v))); }  // to nearest even

}  // namespace
}  // namespace spattn::cpu
