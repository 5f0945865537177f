// SPDX-License-Identifier: MIT
// Shared memory: what a launch asked for, and by 32-bit addresses.
#pragma once

#include <cstdint>

namespace spattn::ptx {

// What a launch asked for, at a multiple of 16 bytes; and of 1024, as tiles want it whose places follow from addresses.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<T*>(memory);
}
template <class T>
__device__ __forceinline__ T* swizzled_shared() {
    extern __shared__ __align__(1024) uint8_t swizzled_memory[];
    return reinterpret_cast<T*>(swizzled_memory);
}

__device__ __forceinline__ void load_shared(float (&x)[2], uint32_t from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(float (&x)[4], uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t (&words)[4], uint32_t from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

}  // namespace spattn::ptx
