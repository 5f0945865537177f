// SPDX-License-Identifier: MIT
// How many lists of keys a problem has, and how large they are: what workspaces and grids follow from.
#pragma once

#include <algorithm>

#include "any/shape.h"
#include "core/math.h"
#include "plan/kernel.h"

namespace spattn::any {

// A list belongs to block_q query rows and names blocks of block_k keys: single ones where the plan made the lists. A
// plane is what has lists of its own: a kind of heads, or of a call's lists each kv head of each batch entry.
struct ListSizes {
    int64_t planes, lists, blocks;  // lists: of a plane; blocks: of keys
    int64_t entries;                // of all lists, at most
    int64_t most;                   // entries of a call's list; 0 where the plan made the lists
    int block_q, block_k;

    // Blocks end where the sequence does: one that is longer is all of it.
    static ListSizes of(const Problem& p, const TokenListsView& tokens) {
        const ListShape& shape = p.call_lists;
        if (!shape.at_run_time()) return {tokens.head_kinds, p.seq_q, p.seq_k, tokens.listed, 0, 1, 1};
        const int64_t block_q = std::min(shape.block_q, p.seq_q), block_k = std::min(shape.block_k, p.seq_k);
        const int64_t planes = p.batch * p.heads_kv, lists = divide_up(p.seq_q, block_q);
        const int64_t entries = planes * lists * shape.most;
        return {planes, lists, divide_up(p.seq_k, block_k), entries, shape.most, int(block_q), int(block_k)};
    }
};

constexpr int gather_tile = 64;  // query rows of a tile

// Query rows that share a list: the heads of a group, for one query or for all queries of a list. They are numbered
// query by query, and tiles take so many of them at a time.
struct ListRows {
    int queries, group, tiles;  // of a list; a known part of the pattern sees each query apart, and then queries is 1
    int units;                  // such sets of rows, of each kv head of each batch entry
    int64_t tasks;              // tiles of all of them: fewer than 2^31 where the kernels run

    // known: the layout of what else a listed key must satisfy, if there is such a part.
    static ListRows of(const Problem& p, const ListSizes& sizes, const LayoutView& known, int tile = gather_tile) {
        const int64_t queries = known.kind_of_head ? 1 : sizes.block_q;
        const int64_t tiles = divide_up(queries * p.group(), tile);
        const int64_t units = divide_up(p.seq_q, queries);
        return {int(queries), int(p.group()), int(tiles), int(units), p.batch * p.heads_kv * units * tiles};
    }
};

}  // namespace spattn::any
