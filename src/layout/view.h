// SPDX-License-Identifier: MIT
// What crosses the seam into kernels: plain pointers, host or device, no container. C++17-clean.
#pragma once

#include <cstdint>

namespace spattn {

// Consecutive blocks [first, first + count) of a row that share one mask. With runs, a causal row has two entries
// however long it is.
struct Run {
    int32_t first, count, mask;  // mask: full_block, or the id of a bit mask
};
constexpr int32_t full_block = -1;

// The runs of one row. Those of a plan are sorted by `first`, disjoint, and as long as they can be, and rows with equal
// runs share one slice. Those that a call's lists make (plan/call_lists.h) stand in the order of the lists, and a block
// as often as it is listed: kernels rely on no order.
struct Slice {
    int32_t begin, end;  // runs [begin, end) of ListsView::runs
};

// Row r of kind c is slices[c * rows + r].
struct ListsView {
    const Slice* slices;  // [head_kinds * rows]
    const Run* runs;
    int32_t rows;         // blocks along the axis the lists are indexed by
    int32_t num_runs;
};

// Which tokens of each block are alive: queries that see a key, or keys that a query sees. A kernel that loads a whole
// block must not let what dead tokens hold (perhaps NaN) reach a result.
struct LiveView {
    const int32_t* set_of;    // [head_kinds * rows] index of a set, or all_live; null: all that have a token are alive
    const uint64_t* sets;     // [sets][words] bit i: token i of the block is alive
    int32_t words;            // 64-bit words a set
};
constexpr int32_t all_live = -1;

// One axis of a layout, cut into tiles of block_q or block_k tokens; the lists call a tile a block. Tiles [0, listed)
// are listed: they name their tokens. The tiles after them are homes: every token stands in exactly one home. Homes
// follow the residue classes of `modulus`, one after the other; with modulus 1 they are blocks of consecutive
// tokens.
//
//     listed 1, modulus 2, block 4, 12 tokens      tile 0: 3 7 - -    1: 0 2 4 6    2: 8 10    3: 1 3 5 7    4: 9 11
//
// A token of a listed tile thus stands in two tiles, which is fine where a pass only reads it. Where a pass writes one
// result for each token of an axis (queries forward, keys backward), a token is listed at most once and is then `away`
// from home: no mask keeps a pair for it there.
struct AxisView {
    int32_t listed;
    const int32_t* tokens;    // [listed][block]; no_token fills a tile up
    int32_t modulus;
    int32_t residue_tiles;    // tiles a residue class has, the same for all: some may be short or empty
    const uint64_t* away;     // [tiles - listed][words of a block] bit i: token i of this home is away; null: none is
    int32_t stretch;          // not 0: tokens of listed tiles follow each other, so many at a time, or are all no_token
};
constexpr int32_t no_token = -1;
static constexpr bool is_consecutive(const AxisView& axis) { return axis.listed == 0 && axis.modulus == 1; }

// The tokens of one tile. A home has first + i * stride for i < count; a listed tile has tokens[i], where count is the
// block's size and no_token may be among them. `tokens` is null for a home.
struct TileView {
    int64_t first, stride;
    int32_t count;
    const int32_t* tokens;
};

// Static, for objects of several archs must not share a weak copy.
static constexpr TileView tile_at(const AxisView& axis, int32_t block, int64_t seq, int32_t tile) {
    if (tile < axis.listed) return {0, 0, block, axis.tokens + int64_t(tile) * block};
    const int32_t home = tile - axis.listed;
    const int64_t residue = home / axis.residue_tiles;
    const int64_t first = residue + int64_t(home % axis.residue_tiles) * block * axis.modulus;
    const int64_t left = first < seq ? (seq - first + axis.modulus - 1) / axis.modulus : 0;
    return {first, axis.modulus, left < block ? int32_t(left) : block, nullptr};
}

// The place of a token in the homes, where home h has places [h * block, (h + 1) * block).
static constexpr int64_t home_of(const AxisView& axis, int32_t block, int64_t token) {
    return token % axis.modulus * axis.residue_tiles * block + token / axis.modulus;
}

// The axis whose tiles a walk over a layout owns: it goes through that axis' lists, and what it writes belongs to one of
// its tiles.
enum class Owner { queries, keys };

// The queries [begin, end) of a tile; `first`, which may be another's or below 0, is that of its first place. Where it
// has none, begin and end are the same, and perhaps no place of it.
struct QuerySpan {
    int32_t first, begin, end;
};

// A compiled pattern. Heads and batch entries that see the same keys are of one kind and share lists.
struct LayoutView {
    int32_t block_q, block_k;     // tokens
    int64_t seq_q, seq_k;         // tokens
    AxisView queries, keys;       // which tokens stand in which block
    ListsView by_query;           // for each query block its key blocks
    ListsView by_key;             // the same blocks, for each key block its query blocks
    const int32_t* kind_of_head;  // [batch * heads_q]
    int32_t head_kinds;
    // Bits of partly allowed blocks, as the chosen kernel row wants them (Kernel::permute). Places without a token
    // (beyond the sequence ends, no_token) are 0 in every mask, and a block that has such a place is never full.
    const uint64_t* masks;       // [num_masks][mask_words]
    int32_t mask_words, num_masks;
    LiveView live_queries, live_keys;
    // Forward, where tokens of queries are consecutive, of rows that take them (Kernel::takes_spans): which queries each
    // tile has, [batch][by_query.rows]. Null: as many as there is room for, one tile after the other.
    const QuerySpan* spans = nullptr;
};

// A share of a pass's work: of the blocks that one row lists for one (batch, head), those from number `skip` on, `take`
// of them.
struct Task {
    int32_t head;  // forward: batch * heads_q + head; backward by key: batch * heads_kv + head
    int32_t row;   // block row of the list
    int32_t skip, take;
    int32_t part;  // whole_row, or the slot of this partial result in the workspace: without blocks, of no row
};
constexpr int32_t whole_row = -1;

// A row that several tasks share: its partial results [first_part, first_part + parts) are combined in that order.
struct Join {
    int32_t head, row, first_part, parts;
};
constexpr int32_t no_join = -1;  // in place of parts: of no row

// Tasks of keys may go over the queries in rounds, for sums of a round's queries alone to be kept: its tasks meet these
// query rows and no others. skip and take count the blocks that a task's row has there.
struct Round {
    int32_t first_row, end_row;
    int32_t first_queue, end_queue;
    int32_t first_join, end_join;
};

// Queue w is tasks [begin[w], begin[w+1]), run in this order by one worker; those of a round are longest first.
struct TasksView {
    const Task* tasks;
    const int32_t* begin;  // [queues + 1]
    int32_t queues;
    const Join* joins;
    int32_t num_joins, num_parts, num_tasks;  // num_parts: of a round, which leaves none to the next
    // Query heads of a group that share a tile, a power of two: each token of the tile has a row of every head, one
    // after the other. A task names the first of its heads.
    int32_t tile_heads = 1;
    const Round* rounds = nullptr;
    int32_t num_rounds = 0;  // 0: one, of all rows
};

}  // namespace spattn
