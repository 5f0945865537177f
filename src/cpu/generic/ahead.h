// SPDX-License-Identifier: MIT
#pragma once

#include "cpu/generic/gemm.h"
#include "cpu/generic/prefetch.h"

namespace spattn::cpu {
namespace {

// What later products read is brought into L2 beside those at hand, some lines a call. Half a tile is whole calls.
struct Ahead {
    const char *at = nullptr, *end = nullptr;

    SPATTN_INLINE void operator()() {
        constexpr int lines = 8;
        if (at == end) return;
#pragma GCC unroll 8
        for (int i = 0; i < lines; ++i) prefetch_far(at + i * line_bytes);
        at += lines * line_bytes;
    }
};

}  // namespace
}  // namespace spattn::cpu
