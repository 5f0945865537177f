// SPDX-License-Identifier: MIT
// Which query rows a tile of the kernels has that gather listed keys for tensor cores: 64 of them, or as many as a CTA
// has room for.
#pragma once

#include <cstdint>

#include "any/gather_lists.cuh"
#include "core/math.h"

namespace spattn::any {

constexpr int gather_tile = 64;  // rows

// Query rows that share a list: the heads of a group, for one query or for all queries of a list. They are numbered
// query by query, and tiles take so many of them at a time.
struct ListRows {
    int queries, group, tiles;  // of a list; a known part of the pattern sees each query apart, and then queries is 1
    int units;                  // such sets of rows, of each kv head of each batch entry
    int64_t tasks;              // tiles of all of them: fewer than 2^31 where the kernels run

    static ListRows of(const Problem& p, const GatherLists& lists, int tile = gather_tile) {
        const int64_t queries = lists.known.kind_of_head ? 1 : lists.sizes.block_q;
        const int64_t tiles = divide_up(queries * p.group(), tile);
        const int64_t units = divide_up(p.seq_q, queries);
        return {int(queries), int(p.group()), int(tiles), int(units), p.batch * p.heads_kv * units * tiles};
    }
};

// A tile's rows and its list. Tiles of a list follow each other, so that they gather the same keys at the same time.
struct GatherTask {
    int32_t batch, head_kv, query, first, blocks;  // first: row of the list's; blocks: of keys, 0 until counted

    template <int Tile = gather_tile>
    __device__ static GatherTask at(const ListRows& rows, const GatherLists& lists, int index) {
        const int unit = index / rows.tiles, plane = unit / rows.units;
        return {plane / lists.heads_kv, plane % lists.heads_kv, unit % rows.units * rows.queries,
                index % rows.tiles * Tile, 0};
    }
};

// One row of a tile: a query and its head. Rows beyond the last repeat it, and are not written.
struct TileRow {
    int64_t query;
    int head;
    bool is_there;

    __device__ TileRow(const ListRows& rows, const GatherLists& lists, const GatherTask& task, int in_tile) {
        const int last = int(min(int64_t(rows.queries), lists.seq_q - task.query)) * rows.group - 1;
        const int row = task.first + in_tile, at = min(row, last);
        query = task.query + at / rows.group;
        head = task.head_kv * rows.group + at % rows.group;
        is_there = row <= last;
    }
};

}  // namespace spattn::any
