// SPDX-License-Identifier: MIT
// Global memory, 16 bytes a thread. The compiler may make four stores of 4 bytes of one through a pointer to 16, each
// of which touches as many sectors.
#pragma once

#include <cstdint>

namespace spattn::ptx {

__device__ __forceinline__ void store_global(void* to, const uint32_t (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

}  // namespace spattn::ptx
