// SPDX-License-Identifier: MIT
// Registers and barriers of warpgroups, and who leads a warp.
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

// True for one thread of a warp, always the same, all of whose threads ask. The compiler then knows that what follows is
// one thread's: around each copy by the copy engine it makes a loop over threads otherwise.
__device__ __forceinline__ bool elect() {
    uint32_t is_leader;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}" : "=r"(is_leader));
    return is_leader;
}

}  // namespace spattn::ptx
