// SPDX-License-Identifier: MIT
// Additions to global memory that return nothing.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
#pragma once

#include <cstdint>

namespace spattn::ptx {

// Four floats at a multiple of 16 bytes; each is added atomically, the four together are not.
__device__ __forceinline__ void add_global(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

__device__ __forceinline__ void add_global(float* to, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void add_global(uint64_t* to, uint64_t x) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

}  // namespace spattn::ptx
