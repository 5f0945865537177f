// SPDX-License-Identifier: MIT
// The asynchronous matrix instructions of a warpgroup: d[64, 128] += a[64, 16] b[16, 128], bf16 in, fp32 out.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace spattn::ptx {

// Before the first wgmma of a group, after any ordinary write of its registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `Pending` committed groups are in flight.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// wgmma_wait<0> in other words: two branches that begin with the same wait would be merged, and the one wait then
// moves up
// over arithmetic that should run while the wgmmas do.
__device__ __forceinline__ void wgmma_wait_all() {
    asm volatile("wgmma.wait_group.sync.aligned 0; // all" ::: "memory");
}

// Low word of the descriptor of a tile whose rows are 128 bytes, swizzled as the copy engine writes them; its base is a
// multiple of 1024. `panel` is the bytes from one 64-column panel to the next: read only where the instruction's 128
// columns run along the rows (transposed b). Steps along the tile add bytes / 16. The shuffle tells the compiler that
// the
// word is one for the warp: descriptors live in uniform registers. The high word is the same for all such
// tiles: groups of 8 rows follow each other, swizzle of 128 bytes.
__device__ __forceinline__ uint32_t wgmma_descriptor(const void* shared, uint32_t panel) {
    return __shfl_sync(~0u, (shared_address(shared) & 0x3FFFF) >> 4 | (panel >> 4) << 16, 0);
}
constexpr uint32_t descriptor_high = 1024 >> 4 | 1u << 30;

// clang-format off
#define SPATTN_WGMMA_ACCUMULATORS \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define SPATTN_WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SPATTN_WGMMA_D16(i) SPATTN_WGMMA_D4(i), SPATTN_WGMMA_D4(i + 4), SPATTN_WGMMA_D4(i + 8), SPATTN_WGMMA_D4(i + 12)
#define SPATTN_WGMMA_D64 SPATTN_WGMMA_D16(0), SPATTN_WGMMA_D16(16), SPATTN_WGMMA_D16(32), SPATTN_WGMMA_D16(48)
// clang-format on

// Both operands in shared memory, a and b with columns along k. accumulate 0: d starts from zero, whatever it holds.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], uint32_t a, uint32_t b, int accumulate) {
    asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0;\n"
                 "mov.b64 a, {%64, %67}; mov.b64 b, {%65, %67};\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SPATTN_WGMMA_ACCUMULATORS
                 ", a, b, p, 1, 1, 0, 0;}"
                 : SPATTN_WGMMA_D64
                 : "r"(a), "r"(b), "r"(accumulate), "n"(descriptor_high));
}

// a in registers, b stored [k][128] (transposed).
__device__ __forceinline__ void wgmma_m64n128k16_transposed(float (&d)[64], const uint32_t (&a)[4], uint32_t b,
                                                            int accumulate) {
    asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %69, 0; mov.b64 b, {%68, %70};\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SPATTN_WGMMA_ACCUMULATORS
                 ", {%64, %65, %66, %67}, b, p, 1, 1, 1;}"
                 : SPATTN_WGMMA_D64
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(descriptor_high));
}

#undef SPATTN_WGMMA_ACCUMULATORS
#undef SPATTN_WGMMA_D4
#undef SPATTN_WGMMA_D16
#undef SPATTN_WGMMA_D64

}  // namespace spattn::ptx
