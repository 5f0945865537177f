// SPDX-License-Identifier: MIT
// cuda/ptx/shared.cuh for the emulator.
#pragma once

#include <cstdint>

namespace spattn::ptx {

template <class T>
inline T* dynamic_shared() {
    return reinterpret_cast<T*>(emulator::here->cta->dynamic_shared());
}
template <class T>
inline T* swizzled_shared() {
    return dynamic_shared<T>();
}

template <class T, int Count>
inline void load_shared(T (&x)[Count], uint32_t from) {
    if (from % sizeof x) emulator::here->cta->fail("ld.shared of an address that is no multiple of its size");
    std::memcpy(x, emulator::here->cta->shared(from, sizeof x), sizeof x);
}
template <class T>
inline void put_shared(uint32_t to, const T& x) {
    if (to % sizeof x) emulator::here->cta->fail("st.shared of an address that is no multiple of its size");
    std::memcpy(emulator::here->cta->shared(to, sizeof x), &x, sizeof x);
}
inline void store_shared(uint32_t to, float x) { put_shared(to, x); }
inline void store_shared(uint32_t to, uint32_t word) { put_shared(to, word); }
inline void store_shared(uint32_t to, float x, float y) { put_shared(to, float2{x, y}); }
inline void store_shared(uint32_t to, const uint32_t (&words)[4]) { put_shared(to, words); }

}  // namespace spattn::ptx
