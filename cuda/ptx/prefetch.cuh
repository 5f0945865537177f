// SPDX-License-Identifier: MIT
// What will be read soon, brought into a cache.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch
#pragma once

#include <cstddef>
#include <cstdint>

namespace spattn::ptx {

// Brings what lies there into L2, but for less than 16 bytes at either end.
__device__ __forceinline__ void prefetch_l2(const void* from, size_t bytes) {
    const size_t first = (reinterpret_cast<size_t>(from) + 15) & ~size_t(15);
    const size_t end = (reinterpret_cast<size_t>(from) + bytes) & ~size_t(15);
    if (first < end)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(uint32_t(end - first)) : "memory");
}

// Brings the sector of an address there.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

}  // namespace spattn::ptx
