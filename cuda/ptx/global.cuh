// SPDX-License-Identifier: MIT
// Global memory: several words a thread, of which the compiler may make as many stores of 4 bytes, each of which touches
// as many sectors; and counters.
#pragma once

#include <cstdint>

namespace spattn::ptx {

__device__ __forceinline__ void store_global(void* to, const uint32_t (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}
__device__ __forceinline__ void store_global(void* to, const uint32_t (&words)[2]) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
}
__device__ __forceinline__ void store_global(float* to, const float (&x)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
__device__ __forceinline__ void load_global(uint32_t (&words)[4], const void* from) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
}
__device__ __forceinline__ void load_global(float (&x)[4], const float* from) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "l"(from)
                 : "memory");
}

// The next number of a counter, from 0 on and below 2^31. Not an addition of 1: of that the compiler makes one for all
// threads of a warp that are there, and waits for its result at once.
__device__ __forceinline__ unsigned count(unsigned* counter) {
    unsigned number;
    asm volatile("atom.global.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(number) : "l"(counter) : "memory");
    return number;
}

}  // namespace spattn::ptx
