// SPDX-License-Identifier: MIT
// Sums of dq in memory, a tile for each block of queries, and what says when they may be added to or read.
#pragma once

#include "layout/view.h"

namespace spattn::sm90 {

// Counts of a call, all 0 at first.
struct SumsProgress {
    unsigned next_task;      // NextTask
    int32_t listed, taken;   // complete strips, by a counter and by finishers
};

struct QuerySums {
    float* tiles;   // [batch, heads_q, blocks of queries][tile as the threads hold it]
    int32_t* turns;  // in order: of each tile the block of keys whose part is added next, 0 at first
    // As they come (sums_as_they_come.cuh):
    int32_t* left;           // of each strip, parts that will come
    int32_t* complete;       // a list of strips without any, each plus 1, with places for each finisher beyond
    int finishers;
    SumsProgress* progress;
};

__device__ __forceinline__ Slice keys_of(const LayoutView& layout, int plane, int block) {
    const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[plane];
    return layout.by_query.slices[list * layout.by_query.rows + block];
}
__device__ __forceinline__ bool has_blocks(const LayoutView& layout, int plane, int block) {
    const Slice slice = keys_of(layout, plane, block);
    return slice.begin < slice.end;
}

}  // namespace spattn::sm90
