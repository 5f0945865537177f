// SPDX-License-Identifier: MIT
// cuda/ptx/global.cuh for the emulator.
#pragma once

#include <cstdint>
#include <cstring>

namespace spattn::ptx {

inline void store_global(void* to, const uint32_t (&words)[4]) {
    if (reinterpret_cast<uintptr_t>(to) % 16) emulator::here->cta->fail("16 bytes at an address that is no multiple");
    std::memcpy(to, words, sizeof words);
}

}  // namespace spattn::ptx
