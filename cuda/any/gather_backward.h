// SPDX-License-Identifier: MIT
// Plain CUDA over lists of keys, backward; the same bits in every call.
#pragma once

#include "any/block_backward.h"
#include "any/gather_lists.h"
#include "core/math.h"
#include "plan/call.h"

namespace spattn::any {

template <Dtype D>
struct GatherBackward {
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

// What a call lays out in its workspace: rows as BackwardSpace has them, then the lists by key.
template <class Real>
struct GatherSpace {
    Real *lse, *delta;  // [batch, heads_q, seq_q]
    ListsByKey by_key;

    static size_t bytes(const Problem& p, const ListSizes& sizes) { return row_bytes(p) + ListsByKey::bytes(sizes); }
    static GatherSpace at(void* memory, const Problem& p, const ListSizes& sizes) {
        const auto rows = BackwardSpace<Real>::at(memory, p, {}, {});
        return {rows.lse, rows.delta, ListsByKey(static_cast<char*>(memory) + row_bytes(p), sizes)};
    }

private:
    static size_t row_bytes(const Problem& p) {
        return size_t(round_up(int64_t(BackwardSpace<Real>::bytes(p, {}, {}, {})), 16));
    }
};

}  // namespace spattn::any
