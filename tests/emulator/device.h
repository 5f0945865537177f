// SPDX-License-Identifier: MIT
// What nvcc knows of itself: qualifiers, where a thread is, operations of warps and blocks, intrinsics. Read in front
// of every source of the CUDA backend that is compiled for the emulator.
#pragma once

#define __shared__ thread_local  // a CTA runs on one thread of the host
#define __grid_constant__

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

#include <bit>
#include <cstring>
#include <type_traits>

#include "emulator/cta.h"

#undef __launch_bounds__
#undef __noinline__
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))

#define threadIdx (::emulator::here->index)
#define blockIdx (::emulator::here->cta->block())
#define blockDim (::emulator::here->cta->grid().threads)
#define gridDim (::emulator::here->cta->grid().blocks)

namespace emulator {

template <class T>
struct Exchange {
    T value;
    int other;  // lane
    T result;
};

// Each lane's `value`, read by the lanes that name it.
template <class T>
T exchange(T value, int other) {
    Exchange<T> mine{value, other, value};
    here->cta->meet(&mine, [](void* const(&all)[warp_threads]) {
        for (void* lane : all)
            if (auto* const one = static_cast<Exchange<T>*>(lane))
                if (one->other >= 0 && one->other < warp_threads && all[one->other])
                    one->result = static_cast<Exchange<T>*>(all[one->other])->value;
    });
    return mine.result;
}

inline uint32_t ballot(bool yes) {
    Exchange<uint32_t> mine{yes, 0, 0};
    here->cta->meet(&mine, [](void* const(&all)[warp_threads]) {
        uint32_t votes = 0;
        for (int i = 0; i < warp_threads; ++i)
            if (all[i]) votes |= static_cast<Exchange<uint32_t>*>(all[i])->value << i;
        for (void* lane : all)
            if (lane) static_cast<Exchange<uint32_t>*>(lane)->result = votes;
    });
    return mine.result;
}

}  // namespace emulator

// ---- warps: kernels name all lanes ----
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {  // of the neighbours, so many, that this lane is among
    return emulator::exchange(value, (emulator::here->lane & ~(width - 1)) | (lane & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
    return emulator::exchange(value, emulator::here->lane ^ lanes);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned lanes) {
    return emulator::exchange(value, emulator::here->lane - int(lanes));
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    for (int lanes = 16; lanes; lanes /= 2) value = std::max(value, __shfl_xor_sync(~0u, value, lanes));
    return value;
}
inline unsigned __ballot_sync(unsigned, bool yes) { return emulator::ballot(yes); }
inline bool __all_sync(unsigned, bool yes) { return !emulator::ballot(!yes); }
inline bool __any_sync(unsigned, bool yes) { return emulator::ballot(yes); }
inline void __syncwarp(unsigned = ~0u) {
    emulator::here->cta->meet(nullptr, [](void* const(&)[emulator::warp_threads]) {});
}

// ---- blocks ----
inline void __syncthreads() { emulator::here->cta->sync(0, 0, false); }
inline int __syncthreads_or(int yes) { return emulator::here->cta->sync(0, 0, yes); }

// ---- memory ----
template <class T>
T __ldg(const T* from) {
    return *from;
}
template <class T>
T __ldcs(const T* from) {
    return *from;
}
template <class T>
void __stcs(T* to, T x) {
    *to = x;
}
// Blocks run on several threads of the host.
template <class T, class U>
T atomicAdd(T* to, U x) {
    if constexpr (std::is_integral_v<T>) {
        return __atomic_fetch_add(to, T(x), __ATOMIC_RELAXED);
    } else {
        T before, after;
        __atomic_load(to, &before, __ATOMIC_RELAXED);
        do after = before + T(x);
        while (!__atomic_compare_exchange(to, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return before;
    }
}
template <class T, class U>
T atomicOr(T* to, U x) {
    return __atomic_fetch_or(to, T(x), __ATOMIC_RELAXED);
}

// ---- values ----
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
// To the nearest; what is too large is the largest, and NaN 0, as the chip has it.
inline int __float2int_rn(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? INT32_MAX : x <= -2147483648.0f ? INT32_MIN : int(nearbyintf(x));
}
// Bytes of b and a, by number: four bits of the selector each.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    const unsigned low = (a & 0xFFFF) > (b & 0xFFFF) ? a : b, high = (a >> 16) > (b >> 16) ? a : b;
    return (high & 0xFFFF0000) | (low & 0xFFFF);
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}
