// SPDX-License-Identifier: MIT
// Which query rows share a list of keys, and so tiles.
#pragma once

#include "any/shape.h"
#include "plan/call_lists.h"

namespace spattn::any {

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
