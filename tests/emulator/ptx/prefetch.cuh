// SPDX-License-Identifier: MIT
// cuda/ptx/prefetch.cuh for the emulator, which has no caches.
#pragma once

#include <cstddef>

namespace spattn::ptx {

inline void prefetch_l2(const void*, size_t) {}
inline void prefetch_l2(const void*) {}

}  // namespace spattn::ptx
