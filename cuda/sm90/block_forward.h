// SPDX-License-Identifier: MIT
// What the host may know of the sm90 block forward kernels.
#pragma once

#include "core/math.h"
#include "plan/call.h"

namespace spattn::sm90 {

// How many places of listed tiles stand packed while a call runs (packed_keys.cuh). A token of several lists does not.
inline int64_t packed_places(const LayoutView& layout) {
    return layout.keys.away ? int64_t(layout.keys.listed) * layout.block_k : 0;
}

// A box lands at a whole number of the tile's swizzled groups of 8 rows.
constexpr int least_key_stretch = 8;
// Whether keys come as boxes of consecutive tokens: whole blocks, or the stretches of listed ones.
inline bool come_in_boxes(const AxisView& keys) {
    return keys.listed ? keys.stretch >= least_key_stretch : is_consecutive(keys);
}

// Whether queries mostly have no more than half of the 64 rows of a tile, of which each query has so many: a float8 cache
// is read by forward_float8.cuh then. Sequences that share a call's queries may have more than their number on average.
inline bool has_few_rows(const Problem& p, int tile_heads) {
    return ceil_div(p.seq_q, p.ragged ? p.sequences() : 1) * tile_heads <= 32;
}

// What a workspace holds: partial results of split rows first, at its start; then a counter and, for each task and warp
// that works on it, a note that some of its rows must be repaired (block_forward.cuh); and packed keys.
struct BlockForwardSpace {
    size_t counter, notes, packed, bytes;  // offsets, and the whole

    // ctas: those that share a tile.
    BlockForwardSpace(const Problem& problem, const LayoutView& layout, const TasksView& tasks, int ctas);
};

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns. Blocks of BlockQ queries and BlockK
// keys.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct BlockForward {
    // CTAs an SM. Of those of one warpgroup there are two: one makes probabilities under the other's products.
    static constexpr int ctas = BlockQ == 64 ? 2 : 1;
    // CTAs that share a tile: a thread has registers for 256 columns of out.
    static constexpr int tile_ctas = HeadDim > 256 ? 2 : 1;
    // Whether tokens may stand in any order. Keys of 192 columns leave that to the row of 256, blocks of 192 queries to
    // those of 128, and tiles that CTAs share to the kernels of older GPUs.
    static constexpr bool any_order =
        HeadDim != 192 && BlockQ != 192 && (BlockK == 64 || BlockQ == 128) && tile_ctas == 1;
    // Whether it works on pieces of a pass. Sums of 256 columns leave no registers for what is handed on, nor do those
    // of 128 beside scores of 128 keys.
    static constexpr bool has_pieces = any_order && (HeadDim == 64 || (HeadDim == 128 && BlockK == 64));
    // Whether it reads float8 caches. Larger tiles would leave no room for what they are widened from.
    static constexpr bool float8_cache = HeadDim <= 128 && BlockQ == 64 && BlockK == 64;
    static void run(const ForwardArgs& args);  // joins the parts of split rows, too
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
