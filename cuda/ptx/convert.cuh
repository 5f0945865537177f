// SPDX-License-Identifier: MIT
// Single instructions on values.
#pragma once

#include <cstdint>

namespace spattn::ptx {

// 2^x to 2^-22; 0 at -infinity. Volatile keeps it before the waits that are written after it.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x) to 2^-22, -infinity at 0; 1 / x to 2^-23. No branches for what is denormal: 0 counts for it.
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two bf16 in a word, `low` in its low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Two fp16 in a word.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    uint32_t word;
#if __CUDA_ARCH__ < 800  // Turing: one by one
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %2; cvt.rn.f16.f32 h, %1; mov.b32 %0, {l, h};}"
        : "=r"(word)
        : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

// Two float8_e4m3fn as the two fp16 that they are, in a word.
__device__ __forceinline__ uint32_t widen_float8_pair(uint16_t pair) {
    uint32_t word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(pair));
    return word;
}

// The largest of what all lanes of the warp have, from Ampere on.
__device__ __forceinline__ uint32_t largest_of_warp(uint32_t x) {
    uint32_t largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(largest) : "r"(x));
    return largest;
}

// -infinity unless keep. A predicated move, which has a pipe of its own: selects and compares share one with max and
// cost 2.5 times as much (200 against 80 cycles for a 64 x 128 tile beside its row maximum, two warpgroups, H200).
__device__ __forceinline__ void minus_infinity_unless(float& x, bool keep) {
    if (!keep) asm volatile("mov.b32 %0, 0fFF800000;" : "+f"(x));
}

// 0 unless keep, whatever x is.
__device__ __forceinline__ void zero_unless(float& x, bool keep) {
    if (!keep) asm volatile("mov.b32 %0, 0;" : "+f"(x));
}

// The compiler makes values where this stands, not where they are used.
__device__ __forceinline__ void make_here(uint32_t& word) { asm volatile("" : "+r"(word)); }
__device__ __forceinline__ void make_here(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void make_here(float& x, float& y) { asm volatile("" : "+f"(x), "+f"(y)); }

// word = by, where `selector` is 0x3210, which the compiler must not know. It sees that the old word is read, and does
// not give both one register: matrix products read the old one until they are waited for, which it does not count.
__device__ __forceinline__ void replace(uint32_t& word, uint32_t by, uint32_t selector) {
    asm volatile("prmt.b32 %0, %1, %0, %2;" : "+r"(word) : "r"(by), "r"(selector));
}

// Four 8 x 8 matrices of 16-bit values, one address a lane.
__device__ __forceinline__ void store_matrix_x4(uint32_t shared, uint32_t q0, uint32_t q1, uint32_t q2, uint32_t q3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(q0), "r"(q1),
                 "r"(q2), "r"(q3)
                 : "memory");
}

}  // namespace spattn::ptx
