// SPDX-License-Identifier: MIT
// Words in global memory by which CTAs wait for each other.
#pragma once

#include <cstdint>

namespace spattn::ptx {

// What was written before the store, by this thread or seen by it, is seen by who loads what it stored.
__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
    int32_t x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
// The same without that order, to look at again and again: to acquire empties the caches of the processor.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* from) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ void store_release(int32_t* to, int32_t x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Between two looks at such a word: others may go on.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 20;" ::: "memory"); }

// Ordinary accesses to global memory of this thread, and what they have seen, before its async ones.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace spattn::ptx
