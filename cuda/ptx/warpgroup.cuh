// SPDX-License-Identifier: MIT
// Registers and barriers of warpgroups.
#pragma once

#include <cstdint>

namespace spattn::ptx {

// Both need __launch_bounds__ with a minimum of blocks, or the compiler ignores them.
template <int Count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same, and whether any of them says yes.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool yes) {
    uint32_t any;
    asm volatile(
        "{.reg .pred p, q; setp.ne.u32 q, %3, 0; bar.red.or.pred p, %1, %2, q; selp.u32 %0, 1, 0, p;}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(uint32_t(yes))
        : "memory");
    return any;
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace spattn::ptx
