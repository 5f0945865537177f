// SPDX-License-Identifier: MIT
// Copies of 16 bytes from any address, which end in swizzled tiles: rows that lie wherever a list says.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

// 16 bytes; or, where `bytes` is 0, as many zeros: then nothing is read, and the address may be any.
__device__ __forceinline__ void copy_16(uint32_t shared, const void* global, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// This thread's arrival, once all copies it has begun have landed. The barrier counts it as any other.
__device__ __forceinline__ void arrive_after_copies(uint64_t* bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

// Until all copies of this thread have landed.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace spattn::ptx
