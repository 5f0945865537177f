// SPDX-License-Identifier: MIT
// Shared-memory barriers that count arrivals and bytes. A fresh barrier lets waits for phase 1 pass and holds those for
// phase 0; a phase ends when all arrivals and all announced bytes are in.
#pragma once

#include <cstdint>

namespace spattn::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads makes them visible to the other threads.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// So many arrivals.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar, uint32_t arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// One arrival, and `bytes` that copies will bring within this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* bar, uint32_t phase) {
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(bar)), "r"(phase)
                 : "memory");
    return done;
}

// Whether the phase has ended, told at once: a try may wait a while.
__device__ __forceinline__ bool mbarrier_test(uint64_t* bar, uint32_t phase) {
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(bar)), "r"(phase)
                 : "memory");
    return done;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t phase) {
    while (!mbarrier_try_wait(bar, phase)) {
    }
}

}  // namespace spattn::ptx
