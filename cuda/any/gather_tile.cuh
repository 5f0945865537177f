// SPDX-License-Identifier: MIT
// Which query rows a tile of the kernels has that gather listed keys for tensor cores: 64 of them, or as many as a CTA
// has room for.
#pragma once

#include <cstdint>

#include "any/gather_lists.cuh"

namespace spattn::any {

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

// How many blocks of keys its list has.
__device__ inline int count_blocks(const GatherLists& lists, const GatherTask& task) {
    const KeyList keys = lists.list_of_head(task.batch, task.head_kv * lists.group, task.query / lists.sizes.block_q);
    return (keys.count * lists.sizes.block_k + gather_tile - 1) / gather_tile;
}

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
