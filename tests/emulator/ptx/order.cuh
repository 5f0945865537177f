// SPDX-License-Identifier: MIT
// cuda/ptx/order.cuh for the emulator.
#pragma once

#include <cstdint>

namespace spattn::ptx {

inline int32_t load_acquire(const int32_t* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline int32_t load_relaxed(const int32_t* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
inline void store_release(int32_t* to, int32_t x) { __atomic_store_n(to, x, __ATOMIC_RELEASE); }
inline void pause() { emulator::here->cta->pause(); }
inline void fence_async_global() {}

}  // namespace spattn::ptx
