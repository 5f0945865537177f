// SPDX-License-Identifier: MIT
// Plain CUDA over lists of keys, backward; the same bits in every call.
#pragma once

#include "any/block_backward.h"
#include "any/gather_lists.h"
#include "core/math.h"
#include "plan/kernel.h"

namespace spattn::any {

template <Dtype D>
struct GatherBackward {
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

// What a call lays out in its workspace: rows as BackwardSpace has them, then the lists by key. Block b of plane p is
// named by lists begin[p][b] .. begin[p][b + 1] of the plane's part of `lists`, which is as long as its own lists are.
template <class Real>
struct GatherSpace {
    Real *lse, *delta;  // [batch, heads_q, seq_q]
    int64_t* begin;     // [planes][blocks + 1]
    int32_t* lists;     // [entries]

    static size_t begin_bytes(const ListSizes& sizes) {
        return size_t(sizes.planes) * size_t(sizes.blocks + 1) * sizeof(int64_t);
    }
    static size_t bytes(const Problem& p, const ListSizes& sizes) {
        return row_bytes(p) + begin_bytes(sizes) + size_t(sizes.entries) * sizeof(int32_t);
    }
    static GatherSpace at(void* memory, const Problem& p, const ListSizes& sizes) {
        const auto rows = BackwardSpace<Real>::at(memory, p, {}, {});
        char* const begin = static_cast<char*>(memory) + row_bytes(p);
        return {rows.lse, rows.delta, reinterpret_cast<int64_t*>(begin),
                reinterpret_cast<int32_t*>(begin + begin_bytes(sizes))};
    }

private:
    static size_t row_bytes(const Problem& p) {
        return size_t(round_up(int64_t(BackwardSpace<Real>::bytes(p, {}, {}, {})), 16));
    }
};

}  // namespace spattn::any
