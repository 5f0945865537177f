// SPDX-License-Identifier: MIT
// The bulk tensor copy engine: boxes between a tensor map and shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Parts of the box outside the tensor arrive as zeros and count as bytes.
__device__ __forceinline__ void tma_load_4d(void* shared, const CUtensorMap* map, int x, int y, int z, int w,
                                            uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5}], "
        "[%6];" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(bar))
        : "memory");
}

__device__ __forceinline__ void tma_load_5d(void* shared, const CUtensorMap* map, int x, int y, int z, int w, int u,
                                            uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5, %6}], "
        "[%7];" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u), "r"(shared_address(bar))
        : "memory");
}

// Parts of the box outside the tensor are not written.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, int x, int y, int z, int w, const void* shared) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(shared))
                 : "memory");
}

__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, int x, int y, int z, int w, int u,
                                             const void* shared) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
        "r"(x), "r"(y), "r"(z), "r"(w), "r"(u), "r"(shared_address(shared))
        : "memory");
}

// Loads floats to shared memory. Both addresses and the size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(float* shared, const float* from, uint32_t bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(from), "r"(bytes), "r"(shared_address(bar))
                 : "memory");
}

// Stores floats from shared memory. Both addresses and the size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_store(float* to, const float* shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(shared)),
                 "r"(bytes)
                 : "memory");
}

// Adds floats in shared memory to those in global memory. Both addresses and the size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_add(float* to, const float* shared, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until the stores this thread committed have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Until they have written.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Ordinary shared-memory accesses of this thread before async ones (copies, wgmma) after the next barrier.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace spattn::ptx
