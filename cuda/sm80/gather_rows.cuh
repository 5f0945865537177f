// SPDX-License-Identifier: MIT
// What kernels over lists share: which keys a tile's rows list, and how listed rows of an operand come into tiles.
#pragma once

#include "any/gather_tile.cuh"
#include "sm80/tile.cuh"
#include "tile/fragment.h"

namespace spattn::sm80 {

// Which keys of a step there are, a bit each.
struct ThereBits {
    uint32_t words[2];

    __device__ __forceinline__ bool all() const { return (words[0] & words[1]) == ~0u; }
    // Whether there is the key of this thread's value i of a tile of scores.
    __device__ __forceinline__ bool has(int i) const {
        const int column = tile::fragment_column(0, i);
        return words[column / 32] >> 2 * (threadIdx.x % 4) & (1u << column % 32);
    }
};

// The keys of some steps, which take turns at the slots.
template <int Step, int Slots>
struct StepKeys {
    int32_t key[Slots][Step];  // or no_token
    ThereBits bits[Slots];     // those beyond the step are set

    __device__ const int32_t* keys(int step) const { return key[step % Slots]; }
    __device__ ThereBits there(int step) const { return bits[step % Slots]; }
};

// The list of a tile's rows, or some of its blocks.
struct TileList {
    const any::GatherLists& lists;
    static constexpr int all = int(unsigned(-1) / 2 / any::gather_tile);  // blocks
    const int64_t head, row, query;  // row: of a known part of the pattern, heads over the batch
    const any::KeyList list;
    const int first, places;

    __device__ TileList(const any::GatherLists& lists, const any::GatherTask& task, int first = 0, int end = all)
        : lists(lists),
          head(int64_t(task.head_kv) * lists.group),
          row(task.batch * int64_t(lists.heads_q) + head),
          query(task.query),
          list(lists.list_of_head(task.batch, int(head), task.query / lists.sizes.block_q)),
          first(first * any::gather_tile),
          places(min(list.count * lists.sizes.block_k, end * any::gather_tile)) {}

    __device__ int steps(int keys) const { return (places - first + keys - 1) / keys; }

    // By as many threads as a step has keys, and 32 at least, of whole warps. Beyond the list no key is there.
    template <int Step, int Slots>
    __device__ __forceinline__ void find(StepKeys<Step, Slots>& to, int step, int thread) const {
        const int place = first + step * Step + thread, slot = step % Slots;
        const bool is_place = thread < Step && place < places;
        const int key = is_place ? lists.key_at(list, place, row, query) : no_token;
        if (thread < Step) to.key[slot][thread] = key;
        const uint32_t there = __ballot_sync(~0u, key != no_token || thread >= Step);
        if (thread % 32 == 0) to.bits[slot].words[thread / 32] = there;
        if (Step <= 32 && thread == 0) to.bits[slot].words[1] = ~0u;
    }
};

// One row of an operand, or none, which becomes zeros.
struct SourceRow {
    const uint16_t* columns;
    bool is_there;
};

// Rows from(row) into a tile, 0 beyond the last column. Complete with the group that the caller commits, for wide rows;
// others at once.
template <int RowCount, class Tile, int Threads, class From>
__device__ __forceinline__ void load_gathered(uint32_t to, int columns, int64_t column, bool is_wide, From from) {
    constexpr int chunks = RowCount * Tile::chunks;
#pragma unroll 2
    for (int i = 0; i < (chunks + Threads - 1) / Threads; ++i) {
        const int at = int(threadIdx.x) + i * Threads, row = at / Tile::chunks, chunk = at % Tile::chunks;
        if (chunks % Threads != 0 && at >= chunks) break;
        const SourceRow source = from(row);
        const int left = source.is_there ? columns - 8 * chunk : 0;  // columns from this chunk on
        if (is_wide) {
            ptx::cp_async_16(Tile::at(to, row, chunk), source.columns + (left > 0 ? 8 * chunk : 0),
                             min(max(2 * left, 0), 16));
        } else {
            uint32_t words[4] = {};
#pragma unroll
            for (int n = 0; n < 8; ++n)
                if (n < left) words[n / 2] |= uint32_t(source.columns[(8 * chunk + n) * column]) << 16 * (n % 2);
            ptx::store_shared(Tile::at(to, row, chunk), words);
        }
    }
}

// A task's query rows of an operand. Rows beyond the last become zeros, and so does what they would add to dk and dv.
template <int RowCount, class Tile, int Threads>
__device__ __forceinline__ void load_queries(uint32_t to, const TensorView& x, int columns, bool is_wide,
                                             const any::ListRows& rows, const any::GatherLists& lists,
                                             const any::GatherTask& task) {
    const auto from = [&](int row) {
        const any::TileRow at(rows, lists, task, row);
        return SourceRow{any::row_of<uint16_t>(x, task.batch, at.head, at.query), at.is_there};
    };
    load_gathered<RowCount, Tile, Threads>(to, columns, x.column, is_wide, from);
}

// Listed rows of a kv head, as many as a step has.
template <int Step, class Tile, int Threads>
__device__ __forceinline__ void load_listed(uint32_t to, const TensorView& x, int columns, bool is_wide,
                                            const any::GatherTask& task, const int32_t* keys) {
    const auto* const first = any::row_of<uint16_t>(x, task.batch, task.head_kv, 0);
    const auto from = [&](int row) {
        return SourceRow{first + max(keys[row], 0) * x.row, keys[row] != no_token};
    };
    load_gathered<Step, Tile, Threads>(to, columns, x.column, is_wide, from);
}

// The same of a float8 cache, through registers: they are there when this returns.
template <Dtype D, int Step, class Tile, int Threads>
__device__ __forceinline__ void load_listed_float8(uint32_t to, const any::Float8Rows& rows, int columns, bool together,
                                                   const int32_t* keys) {
    constexpr int chunks = Step * Tile::chunks, ahead = 4;
#pragma unroll 1
    for (int first = int(threadIdx.x); first < chunks; first += ahead * Threads) {
        uint32_t read[ahead][2];
        float scale[ahead];
#pragma unroll
        for (int n = 0; n < ahead; ++n) {
            const int at = first + n * Threads, chunk = at % Tile::chunks, left = columns - 8 * chunk;
            if (at >= chunks) break;
            const int key = keys[at / Tile::chunks];
            const auto* const row = rows.at(max(key, 0)) + (left > 0 ? 8 * chunk * rows.column : 0);
            read_float8<8>(row, rows.column, key == no_token ? 0 : left, together, read[n]);
            scale[n] = key == no_token ? 1 : rows.scale(key);
        }
#pragma unroll
        for (int n = 0; n < ahead; ++n) {
            const int at = first + n * Threads;
            if (at >= chunks) break;
            uint32_t words[4];
            widen_chunk<D>(read[n], scale[n], words);
            ptx::store_shared(Tile::at(to, at / Tile::chunks, at % Tile::chunks), words);
        }
    }
}

}  // namespace spattn::sm80
