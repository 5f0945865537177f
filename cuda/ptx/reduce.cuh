// SPDX-License-Identifier: MIT
// Additions to global memory that return nothing.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
#pragma once

#include <cstdint>

namespace spattn::ptx {

// What createpolicy.fractional.L2::evict_last.b64 makes for all of an access: L2 makes room with other lines first.
// https://github.com/NVIDIA/cutlass (CacheHintSm90) has the same number.
inline constexpr uint64_t l2_evict_last = 0x14F0000000000000;

// Four floats at a multiple of 16 bytes; each is added atomically, the four together are not. They stay in L2, where
// they will be added to again, while what is read once passes through it.
__device__ __forceinline__ void add_global(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(a),
                 "f"(b), "f"(c), "f"(d), "l"(l2_evict_last)
                 : "memory");
}

__device__ __forceinline__ void add_global(float* to, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void add_global(uint64_t* to, uint64_t x) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

}  // namespace spattn::ptx
