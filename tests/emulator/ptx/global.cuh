// SPDX-License-Identifier: MIT
// cuda/ptx/global.cuh for the emulator.
#pragma once

#include <cstdint>
#include <cstring>

namespace spattn::ptx {

inline void check_global(const void* at, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(at) % bytes)
        emulator::here->cta->fail("words at an address that is no multiple of their size");
}
template <class T, int Count>
inline void store_global(void* to, const T (&x)[Count]) {
    check_global(to, sizeof x);
    std::memcpy(to, x, sizeof x);
}
template <class T>
inline void load_global(T (&x)[4], const void* from) {
    check_global(from, sizeof x);
    std::memcpy(x, from, sizeof x);
}

inline unsigned count(unsigned* counter) { return atomicAdd(counter, 1u); }

}  // namespace spattn::ptx
