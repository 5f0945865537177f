// SPDX-License-Identifier: MIT
// What the host may know of the sm90 kernels that make each gradient apart.
#pragma once

#include "any/block_backward.h"
#include "plan/call.h"

namespace spattn::sm90 {

// What a workspace holds: at its start what any's kernels leave (any/block_backward.h), then a counter for each kernel,
// and notes for each task and warp that works on it.
struct BlockBackwardApartSpace {
    size_t counters, notes, bytes;  // offsets, and the whole

    // ctas: those that share a tile.
    BlockBackwardApartSpace(const Problem& problem, const LayoutView& layout, const TasksView& by_key,
                            const TasksView& by_query, int ctas);
};

constexpr int joined_head_dim = 128;  // up to which one walk makes dk and dv

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns. Blocks of BlockQ queries and BlockK
// keys; masks hold tiles of keys, then tiles of queries, then which quarters of a block have kept pairs
// (tile/fragment.h). args.tasks go by key, args.second_tasks by query.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct BlockBackwardApart {
    static constexpr bool joins_dk_dv = HeadDim <= joined_head_dim;
    // CTAs that share a tile: a thread has registers for 256 columns of a sum. They want tokens in their order, and whole
    // passes.
    static constexpr int tile_ctas = HeadDim > 256 ? 2 : 1;
    static constexpr bool any_order = tile_ctas == 1;
    static constexpr int mask_words = 2 * BlockQ * BlockK / 64 + 1;  // 64-bit words of a mask
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
