// SPDX-License-Identifier: MIT
// Instructions on the eight tile registers of AMX, a function each. GCC's intrinsics do not say that they touch memory,
// so these do. tests/emulator has functions of the same names for processors without such registers.
#pragma once

#include "cpu/generic/elements.h"

namespace spattn::cpu {
namespace {

// Whole tiles in each register. They become zero, and may be used until they are released.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline void load_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int t>
inline void load_tile(const void* at, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(t) : "memory");
}
template <int t>
inline void store_tile(void* at, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(row_bytes), "i"(t) : "memory");
}
template <int t>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(t));
}

// c += a b, of elements T: TDPBF16PS or TDPFP16PS. Assemblers older than binutils 2.40 do not know the latter, so these
// are its bytes: VEX.128.F2.0F38.W0 5C /r, with b in vvvv.
template <class T, int c, int a, int b>
inline void multiply_tiles() {
    if constexpr (__is_same(T, Bf16))
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
    else
        asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"((~b & 15) << 3 | 3), "i"(0xc0 | c << 3 | a));
}

}  // namespace
}  // namespace spattn::cpu
