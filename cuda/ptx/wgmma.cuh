// SPDX-License-Identifier: MIT
// The asynchronous matrix instructions of a warpgroup: d[64, n] += a[64, 16] b[16, n], bf16 or fp16 in, fp32 out; of
// float8 with 32 for 16.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cstdint>

#include "ptx/matrix_element.cuh"
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

// wgmma_wait<0> in other words: two branches that begin with the same wait would be merged, and the one wait then moves
// up over arithmetic that should run while the wgmmas do.
__device__ __forceinline__ void wgmma_wait_all() {
    asm volatile("wgmma.wait_group.sync.aligned 0; // all" ::: "memory");
}

// Low word of the descriptor of a tile whose rows are 128 bytes, swizzled as the copy engine writes them; its base is a
// multiple of 1024. `panel` is the bytes from one 64-column panel to the next: read only where the instruction's n
// columns run along the rows (transposed b). Steps along the tile add bytes / 16. The shuffle tells the compiler that
// the word is one for the warp: descriptors live in uniform registers. The high word is the same for all such tiles:
// groups of 8 rows follow each other, swizzle of 128 bytes.
__device__ __forceinline__ uint32_t wgmma_descriptor(const void* shared, uint32_t panel) {
    return __shfl_sync(~0u, (shared_address(shared) & 0x3FFFF) >> 4 | (panel >> 4) << 16, 0);
}
constexpr uint32_t descriptor_high = 1024 >> 4 | 1u << 30;

// clang-format off
#define SPATTN_WGMMA_LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SPATTN_WGMMA_LIST32 SPATTN_WGMMA_LIST16 "," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SPATTN_WGMMA_LIST48 SPATTN_WGMMA_LIST32 "," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SPATTN_WGMMA_LIST64 SPATTN_WGMMA_LIST48 "," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SPATTN_WGMMA_LIST96 SPATTN_WGMMA_LIST64 "," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SPATTN_WGMMA_LIST128 SPATTN_WGMMA_LIST96 "," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SPATTN_WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SPATTN_WGMMA_SIXTEEN(i) \
    SPATTN_WGMMA_FOUR(i), SPATTN_WGMMA_FOUR(i + 4), SPATTN_WGMMA_FOUR(i + 8), SPATTN_WGMMA_FOUR(i + 12)
#define SPATTN_WGMMA_D16 SPATTN_WGMMA_SIXTEEN(0)
#define SPATTN_WGMMA_D32 SPATTN_WGMMA_D16, SPATTN_WGMMA_SIXTEEN(16)
#define SPATTN_WGMMA_D48 SPATTN_WGMMA_D32, SPATTN_WGMMA_SIXTEEN(32)
#define SPATTN_WGMMA_D64 SPATTN_WGMMA_D48, SPATTN_WGMMA_SIXTEEN(48)
#define SPATTN_WGMMA_D96 SPATTN_WGMMA_D64, SPATTN_WGMMA_SIXTEEN(64), SPATTN_WGMMA_SIXTEEN(80)
#define SPATTN_WGMMA_D128 SPATTN_WGMMA_D96, SPATTN_WGMMA_SIXTEEN(96), SPATTN_WGMMA_SIXTEEN(112)

// The products of one n and element. Both operands in shared memory: with columns along k; or both transposed, stored
// [k][64] and [k][n]; or b alone. Or a in registers, and b either way. accumulate 0: d starts from zero, whatever it
// holds. The numbers are those of the operands that follow the accumulators in the text: assembler texts cannot count.
#define SPATTN_WGMMA_SHARED(name, transposed_a, transposed_b, n, accumulators, element, o0, o1, o2, o3) \
    __device__ __forceinline__ void name(float (&d)[accumulators], uint32_t a, uint32_t b, int accumulate, \
                                         ElementTag<MatrixElement::element>) { \
        asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %" #o2 ", 0;\n" \
                     "mov.b64 a, {%" #o0 ", %" #o3 "}; mov.b64 b, {%" #o1 ", %" #o3 "};\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #element "." #element \
                     " {" SPATTN_WGMMA_LIST##accumulators "}, a, b, p, 1, 1, " #transposed_a ", " #transposed_b ";}" \
                     : SPATTN_WGMMA_D##accumulators \
                     : "r"(a), "r"(b), "r"(accumulate), "n"(descriptor_high)); \
    }
#define SPATTN_WGMMA_REGISTERS(name, transposed_b, n, accumulators, element, o0, o1, o2, o3, o4, o5, o6) \
    __device__ __forceinline__ void name(float (&d)[accumulators], const uint32_t (&a)[4], uint32_t b, int accumulate, \
                                         ElementTag<MatrixElement::element>) { \
        asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %" #o5 ", 0; mov.b64 b, {%" #o4 ", %" #o6 "};\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #element "." #element \
                     " {" SPATTN_WGMMA_LIST##accumulators "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, b, p, 1, 1, " \
                     #transposed_b ";}" \
                     : SPATTN_WGMMA_D##accumulators \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(descriptor_high)); \
    }
// Operands of float8 both lie in shared memory, with columns along k: there is no other way.
#define SPATTN_WGMMA_FLOAT8(n, accumulators, o0, o1, o2, o3) \
    __device__ __forceinline__ void wgmma(float (&d)[accumulators], uint32_t a, uint32_t b, int accumulate, \
                                          ElementTag<MatrixElement::e4m3>) { \
        asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %" #o2 ", 0;\n" \
                     "mov.b64 a, {%" #o0 ", %" #o3 "}; mov.b64 b, {%" #o1 ", %" #o3 "};\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3" \
                     " {" SPATTN_WGMMA_LIST##accumulators "}, a, b, p, 1, 1;}" \
                     : SPATTN_WGMMA_D##accumulators \
                     : "r"(a), "r"(b), "r"(accumulate), "n"(descriptor_high)); \
    }
#define SPATTN_WGMMA(n, accumulators, element, o0, o1, o2, o3, o4, o5, o6) \
    SPATTN_WGMMA_SHARED(wgmma, 0, 0, n, accumulators, element, o0, o1, o2, o3) \
    SPATTN_WGMMA_SHARED(wgmma_transposed, 1, 1, n, accumulators, element, o0, o1, o2, o3) \
    SPATTN_WGMMA_SHARED(wgmma_transposed_b, 0, 1, n, accumulators, element, o0, o1, o2, o3) \
    SPATTN_WGMMA_REGISTERS(wgmma, 0, n, accumulators, element, o0, o1, o2, o3, o4, o5, o6) \
    SPATTN_WGMMA_REGISTERS(wgmma_transposed, 1, n, accumulators, element, o0, o1, o2, o3, o4, o5, o6)
// clang-format on

SPATTN_WGMMA(32, 16, bf16, 16, 17, 18, 19, 20, 21, 22)
SPATTN_WGMMA(32, 16, f16, 16, 17, 18, 19, 20, 21, 22)
SPATTN_WGMMA(64, 32, bf16, 32, 33, 34, 35, 36, 37, 38)
SPATTN_WGMMA(64, 32, f16, 32, 33, 34, 35, 36, 37, 38)
SPATTN_WGMMA(96, 48, bf16, 48, 49, 50, 51, 52, 53, 54)
SPATTN_WGMMA(128, 64, bf16, 64, 65, 66, 67, 68, 69, 70)
SPATTN_WGMMA(128, 64, f16, 64, 65, 66, 67, 68, 69, 70)
SPATTN_WGMMA(192, 96, bf16, 96, 97, 98, 99, 100, 101, 102)
SPATTN_WGMMA(192, 96, f16, 96, 97, 98, 99, 100, 101, 102)
SPATTN_WGMMA(256, 128, bf16, 128, 129, 130, 131, 132, 133, 134)
SPATTN_WGMMA(256, 128, f16, 128, 129, 130, 131, 132, 133, 134)
SPATTN_WGMMA_FLOAT8(64, 32, 32, 33, 34, 35)
SPATTN_WGMMA_FLOAT8(128, 64, 64, 65, 66, 67)

#undef SPATTN_WGMMA
#undef SPATTN_WGMMA_FLOAT8
#undef SPATTN_WGMMA_SHARED
#undef SPATTN_WGMMA_REGISTERS
#undef SPATTN_WGMMA_LIST16
#undef SPATTN_WGMMA_LIST32
#undef SPATTN_WGMMA_LIST48
#undef SPATTN_WGMMA_LIST64
#undef SPATTN_WGMMA_LIST96
#undef SPATTN_WGMMA_LIST128
#undef SPATTN_WGMMA_FOUR
#undef SPATTN_WGMMA_SIXTEEN
#undef SPATTN_WGMMA_D16
#undef SPATTN_WGMMA_D32
#undef SPATTN_WGMMA_D48
#undef SPATTN_WGMMA_D64
#undef SPATTN_WGMMA_D96
#undef SPATTN_WGMMA_D128

}  // namespace spattn::ptx
