// SPDX-License-Identifier: MIT
// cuda/ptx/convert.cuh for the emulator.
#pragma once

#include <cfloat>
#include <cstdint>

#include "core/float8.h"

namespace spattn::ptx {

inline float without_denormals(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

inline float exp2_approx(float x) { return without_denormals(exp2f(x)); }
inline float log2_approx(float x) { return log2f(without_denormals(x)); }
inline float reciprocal_approx(float x) { return without_denormals(1 / without_denormals(x)); }

inline uint32_t pack_bf16(float low, float high) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) | uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(high)))
                                                                << 16;
}
inline uint32_t pack_f16(float low, float high) {
    return __half_as_ushort(__float2half_rn(low)) | uint32_t(__half_as_ushort(__float2half_rn(high))) << 16;
}

inline uint32_t widen_float8_pair(uint16_t pair) {
    return pack_f16(widen_float8(uint8_t(pair)), widen_float8(uint8_t(pair >> 8)));
}

inline uint32_t largest_of_warp(uint32_t x) { return __reduce_max_sync(~0u, x); }

inline void minus_infinity_unless(float& x, bool keep) {
    if (!keep) x = -INFINITY;
}
inline void zero_unless(float& x, bool keep) {
    if (!keep) x = 0;
}

inline void replace(uint32_t& word, uint32_t by, uint32_t) { word = by; }
inline void make_here(uint32_t&) {}
inline void make_here(int&) {}
inline void make_here(float&, float&) {}

// Lane l has the address of row l % 8 of matrix l / 8, and two neighbours of row l / 4 of each.
inline void store_matrix_x4(uint32_t shared, uint32_t q0, uint32_t q1, uint32_t q2, uint32_t q3) {
    struct Store {
        uint8_t* row;
        uint32_t words[4];
    } mine{emulator::here->cta->shared(shared, 16), {q0, q1, q2, q3}};
    emulator::here->cta->meet(&mine, [](void* const(&all)[emulator::warp_threads]) {
        for (int lane = 0; lane < 32; ++lane)
            for (int m = 0; m < 4; ++m)
                std::memcpy(static_cast<Store*>(all[8 * m + lane / 4])->row + 4 * (lane % 4),
                            &static_cast<Store*>(all[lane])->words[m], 4);
    });
}

}  // namespace spattn::ptx
