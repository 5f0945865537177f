// SPDX-License-Identifier: MIT
// What crosses the seam into kernels: plain pointers, host or device, no container. C++17-clean.
#pragma once

#include <cstdint>

namespace spattn {

// Consecutive blocks [first, first + count) of a row that share one mask: runs keep a causal row at two entries however
// long it is.
struct Run {
    int32_t first, count, mask;  // mask: full_block, or the id of a bit mask
};
constexpr int32_t full_block = -1;

// Runs of a row, sorted by `first`, disjoint, maximal. Rows with equal runs share one slice.
struct Slice {
    int32_t begin, end;  // runs [begin, end) of ListsView::runs
};

// Row r of class c is slices[c * rows + r].
struct ListsView {
    const Slice* slices;  // [classes * rows]
    const Run* runs;
    int32_t rows;         // blocks along the axis the lists are indexed by
};

// Bits of rows that see a key (or keys that are seen): tiles with dead rows must not let what those hold (NaN) leak.
struct LiveView {
    const int32_t* set_of;    // [classes * rows] index of a set, or all_live
    const uint64_t* sets;     // [sets][words] bit i: row i of the block is alive
    int32_t words;            // 64-bit words a set
};
constexpr int32_t all_live = -1;

// A compiled pattern. Heads and batch entries that see the same keys belong to one class and share lists.
struct LayoutView {
    int32_t block_q, block_k;    // tokens
    int64_t seq_q, seq_k;        // tokens
    ListsView by_query;          // for each query block its key blocks
    ListsView by_key;            // the same blocks, for each key block its query blocks
    const int32_t* class_of;     // [batch * heads_q]
    int32_t classes;
    // Bits of partly allowed blocks in the order of the kernel row that the layout was made for. Rows and keys beyond
    // the sequence ends are 0 in every mask, and a block that sticks out is never full.
    const uint64_t* masks;       // [num_masks][mask_words]
    int32_t mask_words, num_masks;
    LiveView live_queries, live_keys;
};

// Part of the work of a pass: blocks [skip, skip + take) of one row's list, counted in blocks, for one (batch, head).
struct Task {
    int32_t head;  // forward: batch * heads_q + head; backward by key: batch * heads_kv + head
    int32_t row;   // block row of the list
    int32_t skip, take;
    int32_t part;  // whole_row, or the slot of this partial result in the workspace
};
constexpr int32_t whole_row = -1;

// Partial results [first_part, first_part + parts) belong to one row and are combined in that order.
struct Join {
    int32_t head, row, first_part, parts;
};

// Work order w is tasks [begin[w], begin[w+1]), run in this order by one worker; orders are longest first.
struct TasksView {
    const Task* tasks;
    const int32_t* begin;  // [orders + 1]
    int32_t orders;
    const Join* joins;
    int32_t num_joins, num_parts, num_tasks;
};

}  // namespace spattn
