// SPDX-License-Identifier: MIT
// cuda/ptx/reduce.cuh for the emulator.
#pragma once

#include <cstdint>

namespace spattn::ptx {

inline void add_global(float* to, float x) { atomicAdd(to, x); }
inline void add_global(uint64_t* to, uint64_t x) { atomicAdd(to, x); }
inline void add_global(float* to, float a, float b, float c, float d) {
    if (reinterpret_cast<uintptr_t>(to) % 16)
        emulator::here->cta->fail("red.v4 of an address that is no multiple of 16");
    add_global(to, a), add_global(to + 1, b), add_global(to + 2, c), add_global(to + 3, d);
}

}  // namespace spattn::ptx
