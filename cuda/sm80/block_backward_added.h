// SPDX-License-Identifier: MIT
// What the host may know of the sm80 block backward that adds dq in memory.
#pragma once

#include "plan/call.h"
#include "sm80/block_backward.h"

namespace spattn::sm80 {

// What a workspace holds: at its start what any's kernels leave (any/block_backward.h), then sums of dq, a tile for each
// 64 queries.
struct BlockBackwardAddedSpace {
    size_t sums, bytes;  // offset, and the whole

    BlockBackwardAddedSpace(const Problem& problem, const LayoutView& layout, const TasksView& by_key,
                            const TasksView& by_query, int head_dim);
};

// As BlockBackward, of 16-bit elements. args.second_tasks are whole rows, and all of these are dq's.
template <Dtype D, int HeadDim, int HeadDimV, int Block>
struct BlockBackwardAdded {
    // A CTA is roomy where an SM has room for two that have q of the next step beside that of this one. Elsewhere q is
    // fetched when its place is free.
    static constexpr int first_tiles(bool is_roomy) { return is_roomy || HeadDim <= 64 ? 2 : 1; }
    static constexpr int shared_bytes(bool is_roomy) {
        const int tiles = first_tiles(is_roomy), columns = (1 + tiles) * HeadDim + 2 * HeadDimV;
        return 64 * (2 * (columns + 64) + tiles * 2 * 4);  // k, v, q, dout and ds; lse and delta
    }
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
