// SPDX-License-Identifier: MIT
// Token lists, made by the plan or brought by the call, and the tiles of heads that work on one list together.
#pragma once

#include "cpu/generic/operand.h"
#include "cpu/generic/walk.h"

namespace spattn::cpu {
namespace {

inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

struct Keys {
    const int32_t* at;
    int64_t count;
};

inline bool same_lists(const CallArgs& args, int64_t head, int64_t other) {
    const int32_t* kind_of_head =
        args.problem->call_lists.at_run_time() ? args.layout.kind_of_head : args.tokens.kind_of_head;
    return !kind_of_head || kind_of_head[head] == kind_of_head[other];
}

// Whether the heads of every group share their lists.
inline bool groups_share(const CallArgs& args) {
    const Problem& p = *args.problem;
    for (int64_t head = 0; head < p.batch * p.heads_q; ++head)
        if (!same_lists(args, head, head - head % p.group())) return false;
    return true;
}

// What else a listed key must satisfy: bits of a layout, row-major. Without a layout, nothing.
struct KnownPart {
    const LayoutView& layout;
    const bool is_all;
    Slice runs{};
    int32_t row_in_block = 0;
    int32_t column = -1, mask = 0;  // the block of keys that was asked for last
    bool is_listed = false;

    KnownPart(const LayoutView& l, int64_t head, int64_t row) : layout(l), is_all(!l.kind_of_head) {
        if (is_all) return;
        runs = slice_of(l.by_query, l.kind_of_head[head], int32_t(row / l.block_q));
        row_in_block = int32_t(row % l.block_q);
    }

    bool keeps(int64_t key) {
        if (is_all) return true;
        if (const int32_t block = int32_t(key / layout.block_k); block != column) find(block);
        if (!is_listed || mask == full_block) return is_listed;
        const int64_t bit = int64_t(row_in_block) * layout.block_k + key % layout.block_k;
        return mask_bits(layout, mask)[bit / 64] >> (bit % 64) & 1;
    }

    // Runs are sorted and disjoint: the last that starts at or before the block.
    void find(int32_t block) {
        int32_t low = runs.begin, high = runs.end;
        while (low < high) {
            const int32_t middle = low + (high - low) / 2;
            layout.by_query.runs[middle].first <= block ? low = middle + 1 : high = middle;
        }
        column = block;
        is_listed = low > runs.begin;
        if (!is_listed) return;
        const Run& run = layout.by_query.runs[low - 1];
        is_listed = block < run.first + run.count;
        mask = run.mask;
    }
};

// head counts over the batch. scratch [listed.tokens()] is written only where the call brings the lists.
inline Keys read_keys(const CallArgs& args, int64_t head, int64_t row, int32_t* scratch) {
    const Problem& p = *args.problem;
    if (!p.call_lists.at_run_time()) {
        const int64_t* begin = args.tokens.begin + args.tokens.kind_of_head[head] * args.tokens.rows + row;
        return {args.tokens.keys + begin[0], begin[1] - begin[0]};
    }
    const int64_t batch = head / p.heads_q, head_kv = head % p.heads_q / p.group(), list = row / p.call_lists.block_q;
    const int64_t entries = args.call_lists.count(batch, list, head_kv, p.call_lists.most);
    KnownPart known(args.layout, head, row);
    int64_t count = 0;
    for (int64_t i = 0; i < entries; ++i) {
        const int64_t block = args.call_lists.indices.at(batch, list, head_kv, i);
        if (block < 0 || block > (p.seq_k - 1) / p.call_lists.block_k) continue;
        const int64_t first = block * p.call_lists.block_k, rest = p.seq_k - first;
        for (int64_t key = first; key < first + (rest < p.call_lists.block_k ? rest : p.call_lists.block_k); ++key)
            if (known.keeps(key)) scratch[count++] = int32_t(key);
    }
    return {scratch, count};
}

// ---- tiles of heads -----------------------------------------------------------------------------------------------

constexpr int most_heads = 64;  // of a tile whose heads or dims lie in vector lanes
constexpr int gather_chunk = 64;  // keys that are gathered at once

// Query heads [head, head + heads) of one query row: all share one list and one kv head.
struct HeadTile {
    int64_t batch, head_kv, head, row;
    int heads, index;  // index: of the tile in its group
};

// A group's heads in tiles that share a list, or one by one.
struct Tiling {
    int64_t group;
    int most;  // heads of a tile
    bool shared;

    Tiling(const CallArgs& args, int most_heads)
        : group(args.problem->group()), most(most_heads), shared(groups_share(args)) {}
    int64_t tiles() const { return shared ? (group + most - 1) / most : group; }
    int first(int64_t tile) const { return int(shared ? tile * most : tile); }
    int heads(int64_t tile) const { return shared ? least(most, group - tile * most) : 1; }

    // Tile n of rows [first_row, first_row + rows) of kv heads from `plane` on, which count over the batch.
    HeadTile at(const Problem& p, int64_t plane, int64_t first_row, int64_t rows, int64_t n) const {
        const int64_t tile = n % tiles(), row = n / tiles() % rows, head_kv = plane + n / tiles() / rows;
        return {head_kv / p.heads_kv, head_kv % p.heads_kv, head_kv % p.heads_kv * group + first(tile), first_row + row,
                heads(tile), int(tile)};
    }
};

// The same tensor with heads where rows were: a tile of heads is then a tile of rows.
inline TensorView heads_as_rows(TensorView x) {
    const int64_t head = x.head;
    x.head = x.row, x.row = head;
    return x;
}
inline Place place_of(const HeadTile& t) { return {{t.head, 1, t.heads, nullptr}, t.batch, t.row, all_rows, all_rows}; }

// Listed keys as a tile of rows: at most gather_chunk of them.
inline Place place_of(const HeadTile& t, const int32_t* keys, int count) {
    return {{0, 0, count, keys}, t.batch, t.head_kv, all_rows, 0};
}

}  // namespace
}  // namespace spattn::cpu
