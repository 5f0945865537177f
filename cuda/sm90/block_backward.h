// SPDX-License-Identifier: MIT
// What the host may know of the sm90 block backward kernels.
#pragma once

#include "any/block_backward.h"
#include "plan/call.h"

namespace spattn::sm90 {

// What a workspace holds: at its start what any's kernels leave (any/block_backward.h), then notes for each task and
// warp that works on it (block_backward.cuh), counters, what is known of each sum of dq (sums_in_order.cuh), and these
// sums, a tile for each block of queries.
struct BlockBackwardSpace {
    size_t notes, counter, turns, dq, bytes;  // offsets, and the whole

    BlockBackwardSpace(const Problem& problem, const LayoutView& layout, const TasksView& by_key,
                       const TasksView& by_query, int head_dim);
};

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns. Blocks of BlockQ queries and BlockK
// keys. Masks hold tiles of keys, which these kernels read, and then tiles of queries for the kernels that views go to
// which TMA refuses (tile/fragment.h). args.tasks go by key, args.second_tasks by query.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct BlockBackward {
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
