// SPDX-License-Identifier: MIT
// What gather kernels share: which keys a tile's rows list, and how listed rows of an operand come into swizzled tiles.
#pragma once

#include <cstdint>

#include "any/element.cuh"
#include "any/gather_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "sm90/gather_forward.h"
#include "sm90/pipeline.cuh"

namespace spattn::sm90 {

using any::gather_tile, any::GatherTask, any::ListRows, any::TileRow;

constexpr int gather_panel_bytes = gather_tile * 128;  // 64 columns of a tile's rows
constexpr int gather_producers = 128;                  // threads that copy listed rows

// A warp of the producers has 16 rows of a tile and copies them, 8 lanes a row, or 4 where elements are bytes.
struct CopyWarp {
    __device__ static int lane() { return int(threadIdx.x) % 32; }
    __device__ static int first_row() { return int(threadIdx.x) / 32 % 4 * 16; }
};

// Keys of one list, 64 at a time. Entries are loaded a block ahead, those of the first block when the walk begins: L2
// takes as long to answer as a block's rows take to be copied. RowLanes: how many copy a row. Ctas: of a cluster, each of
// which copies as many of a warp's rows.
template <int RowLanes = 8, int Ctas = 1>
struct ListWalk : CopyWarp {
    static constexpr int ctas = Ctas, rows_at_once = 32 / RowLanes, own_rows = 16 / rows_at_once / Ctas;
    const any::GatherLists& lists;
    const void* entries;
    int places, place;  // of the list; which of them this lane stands for in the next block
    int batch, head_kv, query;
    any::ListEntry coming;  // of that place
    int keys[own_rows];     // of the rows that this lane copies

    __device__ explicit ListWalk(const any::GatherLists& lists) : lists(lists) {}

    // Returns how many blocks the task's list has. The keys that were taken last stay.
    __device__ __forceinline__ int begin(const GatherTask& task) {
        batch = task.batch, head_kv = task.head_kv, query = task.query;
        const any::KeyList list = lists.list_of_head(batch, head_kv * lists.group, query / lists.sizes.block_q);
        entries = list.entries, places = list.count * lists.sizes.block_k, place = first_row() + lane() % 16;
        look_ahead();
        return (places + gather_tile - 1) / gather_tile;
    }

    // The walk keeps to some blocks of a list that has just begun.
    __device__ __forceinline__ void keep(int first, int end) {
        places = min(places, end * gather_tile), place += first * gather_tile;
        look_ahead();
    }

    // The keys of the next block. Returns a bit for each of the warp's 16 that there is.
    __device__ __forceinline__ uint32_t take() {
        int key = no_token;
        if (place < places)
            key = lists.key_at(list(), coming, place, batch * int64_t(lists.heads_q) + head_kv * lists.group, query);
        place += gather_tile;
        look_ahead();
#pragma unroll
        for (int i = 0; i < own_rows; ++i) keys[i] = __shfl_sync(~0u, key, own_row(i));
        return __ballot_sync(~0u, key != no_token) & 0xFFFF;
    }

    // Which of its warp's rows this lane copies as its i-th.
    __device__ __forceinline__ static int own_row(int i) {
        const int share = Ctas > 1 ? int(ptx::cluster_rank()) : 0;
        return rows_at_once * (own_rows * share + i) + lane() / RowLanes;
    }

private:
    // What the parameters say is asked again: producers have few registers.
    __device__ any::KeyList list() const {
        const bool at_run_time = lists.sizes.most > 0;
        return {entries, at_run_time && lists.call.indices.is_wide, at_run_time ? lists.call.indices.entry : 1, 0};
    }
    __device__ __forceinline__ void look_ahead() {
        if (place < places) coming = lists.entry_at(list(), place);
    }
};

// A row of an operand that comes into a tile; one that is not there becomes zeros.
template <class Element>
struct SourceRow {
    const Element* columns;
    bool is_there;
};

// Panels of 64 columns, from `first` on, of rows of one operand into a tile: row(i) is the i-th of the four rows that
// this lane copies. Columns from `columns` on become zeros. PanelBytes: from one panel of the tile to the next.
template <int Panels, int PanelBytes = gather_panel_bytes, class Row>
__device__ __forceinline__ void copy_tile(Row row, int columns, int first, const void* tile) {
    const int chunk = CopyWarp::lane() % 8, row_of_four = CopyWarp::lane() / 8;
    const uint32_t to =
        ptx::shared_address(tile) + (CopyWarp::first_row() + row_of_four) * 128 + ((chunk ^ row_of_four) << 4);
    const auto copy = [&](int i, int panels) {
        const auto source = row(i);
        const auto* const from = source.columns + 64 * first + 8 * chunk;
        const uint32_t at = (to + i * 512) ^ (i % 2 * 64);  // rows of i and i + 2 are 8 apart: the same swizzle
#pragma unroll
        for (int panel = 0; panel < Panels; ++panel)
            ptx::cp_async_16(at + panel * PanelBytes, from + 64 * panel,
                             source.is_there && panel < panels ? 16 : 0);
    };
    if (columns >= 64 * (first + Panels)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) copy(i, Panels);
    } else {
        const int panels = (columns - 8 * chunk + 63) / 64 - first;  // in which this lane's 8 columns exist
#pragma unroll
        for (int i = 0; i < 4; ++i) copy(i, panels);
    }
}

// The same of keys: those of the four rows that this lane copies.
template <int Panels, class Element>
__device__ __forceinline__ void copy_rows(const int (&keys)[4], const Element* rows, int64_t stride, int columns,
                                          int first, const void* tile) {
    const auto row = [&](int i) { return SourceRow<Element>{rows + keys[i] * stride, keys[i] != no_token}; };
    copy_tile<Panels>(row, columns, first, tile);
}

// Whether there is the key of a thread's value i of a tile of scores; `keys` has a bit for each key of the tile.
__device__ __forceinline__ bool has_key(const uint32_t (&keys)[2], int thread, int i) {
    const int column = tile::fragment_column(0, i);
    return keys[column / 32] >> 2 * (thread % 4) & (1u << column % 32);
}

}  // namespace spattn::sm90
