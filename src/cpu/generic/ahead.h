// SPDX-License-Identifier: MIT
#pragma once

#include "cpu/generic/gemm.h"
#include "cpu/generic/prefetch.h"

namespace spattn::cpu {
namespace {

// What is read or written soon is brought into L2 beside the products at hand, some lines a call, and where nothing of
// it is left, what comes later. Half a tile is whole calls.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    const char *later = nullptr, *later_end = nullptr;

    SPATTN_INLINE void operator()() {
        constexpr int lines = 8;
        const bool is_later = at == end;
        if (is_later && later == later_end) return;
        const char* first = is_later ? later : at;
#pragma GCC unroll 8
        for (int i = 0; i < lines; ++i) prefetch_far(first + i * line_bytes);
        (is_later ? later : at) += lines * line_bytes;
    }
};

}  // namespace
}  // namespace spattn::cpu
