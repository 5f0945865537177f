// SPDX-License-Identifier: MIT
// Copies from global to shared memory that pass no register. A thread's copies end in the order of its commits. Turing
// has none: there they pass registers, and have ended when they return.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace spattn::ptx {

#if __CUDA_ARCH__ >= 800
// Whether `bytes` below may be less than 16, and not 0.
constexpr bool copies_parts_of_16 = true;

// The first `bytes` of 16 from an address that is a multiple of 16; the others become 0, and are not read.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
                 : "memory");
}
// The same of 4, from a multiple of 4.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `Pending` of this thread's groups are in flight.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
#else  // Turing
constexpr bool copies_parts_of_16 = false;

// `bytes` is 0 or 16. Without a branch, and with the name of the memory that is loaded from, the assembler moves loads
// of several copies before the first store.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* from, int bytes) {
    uint32_t words[4] = {};
    asm volatile("{.reg .pred p; setp.eq.s32 p, %5, 16; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
                 : "l"(from), "r"(bytes));
    store_shared(shared, words);
}
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* from, int bytes) {
    store_shared(shared, bytes == 4 ? *static_cast<const uint32_t*>(from) : 0u);
}
__device__ __forceinline__ void cp_async_commit() {}
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {}
#endif

// This thread's arrival, once all copies it has begun have landed. The barrier counts it as any other.
__device__ __forceinline__ void cp_async_arrive(uint64_t* bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Until all copies of this thread have landed.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace spattn::ptx
