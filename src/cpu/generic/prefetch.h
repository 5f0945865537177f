// SPDX-License-Identifier: MIT
// Asking for memory early.
#pragma once

#include <stdint.h>

namespace spattn::cpu {
namespace {

constexpr int line_bytes = 64;

// The asm keeps GCC from taking a function that only prefetches for one that does nothing, and its calls for dead code
// (https://gcc.gnu.org/PR109985).
inline void prefetch(const void* at) {
    __builtin_prefetch(at);
    asm volatile("");
}
inline void prefetch_far(const void* at) {  // into L2
    __builtin_prefetch(at, 0, 2);
    asm volatile("");
}
inline void prefetch_row(const void* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += line_bytes) prefetch((const char*)row + at);
}

}  // namespace
}  // namespace spattn::cpu
