// SPDX-License-Identifier: MIT
// Shared memory by 32-bit addresses.
#pragma once

#include <cstdint>

namespace spattn::ptx {

__device__ __forceinline__ void load_shared(float (&x)[2], uint32_t from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

}  // namespace spattn::ptx
