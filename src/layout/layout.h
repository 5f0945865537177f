// SPDX-License-Identifier: MIT
// A compiled pattern, which owns what a LayoutView points to.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/view.h"
#include "pattern/pattern.h"

namespace spattn {

// The lists of one direction, for all kinds of heads; rows with equal runs share a slice.
//
// No two rows of a causal layout end at the same block, but up to the diagonal many are alike. Where lists have stems,
// a row has the first so many runs of a list that it shares with others, its stem, and then those of its own slice. So
// the landmarks of a million tokens are stored once, and not once for each row:
//
//     causal landmarks    . n . . . . . .     stem  -               own  1: n
//                         . m . . . . . .           1: m                 -
//                         . m . n . . . .           1: m                 3: n
//                         . m . m . . . .           1: m, 3: m           -
struct Lists {
    int32_t rows = 0;            // of each kind
    std::vector<Slice> slices;   // [head_kinds * rows]
    std::vector<Slice> stems;    // the same, or empty: only build_stem_lists() makes them
    std::vector<Run> runs;
};

struct Live {
    std::vector<int32_t> set_of;  // [head_kinds * rows]
    std::vector<uint64_t> sets;   // [sets * words]
    int32_t words = 0;
};

// Owns what AxisView points to.
struct Axis {
    int32_t modulus = 1, residue_tiles = 0;
    std::vector<int32_t> tokens;   // [listed * block]
    std::vector<uint64_t> away;    // [(tiles - listed) * words of a block], or empty
};

struct Layout {
    Extent extent;
    int32_t block_q = 0, block_k = 0;
    Axis queries, keys;
    int32_t head_kinds = 0;
    std::vector<int32_t> kind_of_head;  // [batch * heads]
    Lists by_query, by_key;
    std::vector<uint64_t> masks;    // row-major bits, [num_masks * mask_words]; bit r * block_k + k of a mask
    int32_t mask_words = 0, num_masks = 0;
    Live live_queries, live_keys;

    bool is_ordered() const;  // some block is not simply consecutive tokens
    size_t bytes() const;     // of all arrays
};

// Compiles the pattern. Blocks are exact: a full one keeps every pair, and every block in a list keeps at least one.
Layout build_layout(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k);

LayoutView view(const Layout& layout);

// Exact counts of a layout over all heads and batch entries.
struct Counts {
    double pairs = 0, visited = 0;
    int64_t blocks_full = 0, blocks_partial = 0, blocks_empty = 0;
    int64_t row_min = 0, row_max = 0, rows_empty = 0;  // of query rows
};
Counts count(const Layout& layout);
// Counts layouts that share no pair as if they were one. Each brings its own blocks.
Counts count(const std::vector<const Layout*>& pieces);

// Heads and batch entries of each kind.
std::vector<int64_t> count_heads(const Layout& layout);

// Makes the by_key lists from the by_query lists (or back), in O(runs).
Lists transpose_lists(const Lists& lists, int32_t head_kinds, int32_t other_rows);

}  // namespace spattn
