// SPDX-License-Identifier: MIT
// Clusters: CTAs that run at the same time and reach each other's shared memory, whose addresses name the CTA, too.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

// This CTA's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all CTAs of the cluster: what they did in shared memory before is seen after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where CTA `rank` of the cluster has what this one has at `shared`.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    return address;
}

// An arrival at a barrier of any CTA. It comes after products that were waited for, but orders neither what this thread
// wrote nor its loads from shared memory.
__device__ __forceinline__ void cluster_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// The same, once `loaded` has come, and with it what the warp loaded before. Arrivals at other CTAs go another way than
// loads: one overtook a load that stood behind additions to global memory, and the other CTA wrote over what was to be
// loaded (H200, one of 80 calls of 14 ms). The address waits for the value by a term that is 0 for every float,
// which compilers do not find out. An arrival that releases to the cluster would wait for the additions, too.
__device__ __forceinline__ void cluster_arrive_after(uint32_t bar, float loaded) {
    uint32_t zero;
    asm volatile("{.reg .f32 x; abs.f32 x, %1; mul.f32 x, x, 0f00000000; min.f32 x, x, 0f00000000; mov.b32 %0, x;}"
                 : "=r"(zero)
                 : "f"(loaded));
    cluster_arrive(bar + zero);
}

// Four floats to another CTA, at a multiple of 16 bytes; they count as 16 bytes at its barrier when they are there.
__device__ __forceinline__ void cluster_store(uint32_t to, const float (&x)[4], uint32_t bar) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(bar)
        : "memory");
}

// Shared memory to that of another CTA, by the copy engine; addresses and size are multiples of 16 bytes. Its barrier
// counts the bytes when they are there.
__device__ __forceinline__ void cluster_copy(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "r"(from), "r"(bytes), "r"(bar)
        : "memory");
}

}  // namespace spattn::ptx
