// SPDX-License-Identifier: MIT
// Tiles of tokens in any order, on their way into swizzled panels: homes of residue classes as boxes of a tensor map
// whose rows are a class, listed tiles row by row.
#pragma once

#include "any/divisor.h"
#include "any/element.cuh"
#include "any/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "runtime/tensor_map.h"
#include "tile/dtype.cuh"

namespace spattn::sm90 {

constexpr int tile_copiers = 128;                  // threads that call load_rows together
constexpr int tile_arrivals = tile_copiers + 1;    // that the barrier of such a tile counts: the first has two

// What the leader of a CTA's producers says, for all of them: a warp, or more, which exchange it through `words` in
// turns.
template <int Producers>
__device__ __forceinline__ unsigned tell_producers(unsigned word, bool is_leader, int32_t (&words)[2], int& turn,
                                                   int barrier) {
    if constexpr (Producers == 32) return __shfl_sync(~0u, word, 0);
    if (is_leader) words[turn] = int(word);
    ptx::named_barrier_sync(barrier, Producers);  // said; and what was said two turns before is read
    word = unsigned(words[turn]);
    turn ^= 1;
    return word;
}

// The tiles of each residue class of an axis, in what a kernel was launched with.
template <class Params>
__device__ __forceinline__ const any::Divisor& residue_tiles_of(const Params& params, bool of_queries) {
    return of_queries ? params.query_residue_tiles : params.key_residue_tiles;
}

// An axis of a layout, and one operand along it.
struct TileSource {
    const runtime::ResidueMaps& maps;
    const TensorView& view;
    const AxisView& axis;
    const any::Divisor& residue_tiles;  // the axis's
    int64_t seq;
    int block, columns;  // tokens a tile; of the operand
};

// The arrivals of a warp of copiers that copies nothing itself. Each warp has to arrive, whoever loads the tile: one
// that fell behind by a turn of the ring would take the next turn's phase for its own, and wait for ever.
__device__ __forceinline__ void arrive_for_warp(uint64_t* bar) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(bar, 32);
}
// Those of all copiers to a barrier that no tile comes to.
__device__ __forceinline__ void arrive_without_tile(uint64_t* bar) {
    arrive_for_warp(bar);
    if (threadIdx.x % tile_copiers == 0) ptx::mbarrier_arrive(bar);
}

// Where a home's tokens stand: in which residue class, and how many of the class before them.
struct HomePlace {
    int residue, first;

    __device__ __forceinline__ HomePlace(const AxisView& axis, const any::Divisor& residue_tiles, int block, int tile) {
        const int home = tile - axis.listed;
        residue = home / residue_tiles;
        first = (home - residue * residue_tiles) * block;
    }
    // The token at a place of the home, or a number that is at least seq.
    __device__ __forceinline__ int token_at(const AxisView& axis, int64_t seq, int place) const {
        return int(min(residue + int64_t(first + place) * axis.modulus, seq));
    }
    // The tensor map of the class, and which of that map's classes it is.
    __device__ __forceinline__ bool is_longer(const runtime::ResidueMaps& maps) const {
        return residue < maps.longer_classes;
    }
    __device__ __forceinline__ const CUtensorMap* map(const runtime::ResidueMaps& maps) const {
        return is_longer(maps) ? &maps.longer : &maps.shorter;
    }
    __device__ __forceinline__ int in_map(const runtime::ResidueMaps& maps) const {
        return residue - (is_longer(maps) ? 0 : maps.longer_classes);
    }
};

// Rows of a home, from place `begin` on, as `Panels` boxes of 64 columns; for one thread to call.
template <int Panels, int PanelBytes>
__device__ __forceinline__ void send_home(const runtime::ResidueMaps& maps, const HomePlace& at, int begin, int entry,
                                          int head, uint8_t* to, uint64_t* bar) {
    for (int panel = 0; panel < Panels; ++panel)
        ptx::tma_load_5d(to + panel * PanelBytes, at.map(maps), 64 * panel, head, at.in_map(maps), at.first + begin,
                         entry, bar);
}

// Columns of a panel, whose rows are of 128 bytes as a line of the cache is, and of the 16 of them that a lane moves.
template <class Element>
constexpr int line_columns = 128 / int(sizeof(Element));
template <class Element>
constexpr int chunk_columns = 16 / int(sizeof(Element));

// The columns of a tensor from `first` on.
template <class Element>
__device__ __forceinline__ TensorView from_column(TensorView view, int first) {
    view.data = static_cast<Element*>(view.data) + first;
    return view;
}

// Who stands at the places of some rows of a tile, as a warp that copies them knows it: a lane has every 32nd.
template <int MostRows>
struct WarpTokens {
    static constexpr int group_rows = MostRows < 32 ? MostRows : 32, groups = MostRows / group_rows;
    static_assert(MostRows % group_rows == 0 && group_rows % 8 == 0, "a panel's rows are swizzled by eights");
    int of_group[groups];

    WarpTokens() = default;
    // The rows are as many, from place `begin` on. Where `live` has no bit there is no token, either.
    __device__ __forceinline__ WarpTokens(const any::TileTokens& tokens, int begin, int rows, const uint64_t* live) {
        int lane = int(threadIdx.x % 32);
        ptx::make_here(lane);
#pragma unroll  // all at once: each would wait for memory otherwise
        for (int group = 0; group < groups; ++group) {
            const int row = group_rows * group + lane, place = begin + row;
            const bool is_alive = lane < group_rows && row < rows && (!live || live[place / 64] >> (place % 64) & 1);
            of_group[group] = is_alive ? tokens.at(place) : no_token;
        }
    }
};

// `rows` rows of a tile by token, for one warp to begin: 8 lanes a row of a panel. Where there is no token, and beyond
// the last column, zeros come. Other warps keep the scheduler busy, and a copier waits five cycles or more for each
// instruction: so what changes from row to row is a token, and what is added to addresses as constants.
template <int Panels, class Element, int MostRows>
__device__ __forceinline__ void copy_tokens(const TileSource& from, WarpTokens<MostRows> tokens, int rows, int entry,
                                            int head, uint32_t to, uint32_t panel_bytes) {
    constexpr int group_rows = WarpTokens<MostRows>::group_rows, pass_rows = 4;
    int lane = int(threadIdx.x % 32);
    ptx::make_here(lane);
    const int first_row = lane / 8, chunk = lane % 8;
    const int columns = from.columns - chunk_columns<Element> * chunk;  // from this lane's of the first panel on
    const auto* const source = reinterpret_cast<const char*>(any::row_of<Element>(from.view, entry, head, 0)) + 16 * chunk;
    const uint64_t row_bytes = uint64_t(from.view.row) * sizeof(Element);
    uint32_t low = uint32_t(row_bytes), high = uint32_t(row_bytes >> 32);
    ptx::make_here(low), ptx::make_here(high);  // else the compiler multiplies elements, and then by their size
    uint32_t even = to + first_row * 128 + ((chunk ^ first_row) << 4);  // where rows 0 to 3 of eight begin
#pragma unroll 1  // groups move up instead, so that their copies' code stands once
    for (int row = 0; row < rows; row += group_rows, even += group_rows * 128) {
        const uint32_t odd = even ^ 4 << 4;  // where rows 4 to 7 of eight begin, as the swizzle goes
#pragma unroll
        for (int pass = 0; pass < group_rows; pass += pass_rows) {
            const int token = __shfl_sync(~0u, tokens.of_group[0], pass + first_row);
            const uint32_t index = uint32_t(max(token, 0));
            const char* const of_row = source + (uint64_t(index) * low + (uint64_t(index * high) << 32));
            const uint32_t at = (pass & 4 ? odd : even) + pass * 128;
#pragma unroll
            for (int panel = 0; panel < Panels; ++panel) {
                const bool is_there = token != no_token && line_columns<Element> * panel < columns;
                ptx::cp_async_16(at + panel * panel_bytes, of_row + 128 * panel, is_there ? 16 : 0);
            }
        }
#pragma unroll
        for (int group = 1; group < WarpTokens<MostRows>::groups; ++group)
            tokens.of_group[group - 1] = tokens.of_group[group];
    }
}

// Rows of tile `tile` of an operand, from place `begin` on, in Panels panels; for all copiers to call. live: bits of
// the tile's tokens that are alive, or null where all are; others become zeros.
template <int Rows, int Panels, class Element>
__device__ __forceinline__ void load_rows(const TileSource& from, int tile, int begin, int entry, int head,
                                          const uint64_t* live, uint8_t* to, uint64_t* bar) {
    if (tile < from.axis.listed || live) {
        constexpr int rows = Rows / (tile_copiers / 32);  // of a warp
        const int first = rows * (int(threadIdx.x) % tile_copiers / 32);
        const WarpTokens<rows> tokens(any::tokens_of(from.axis, from.block, from.seq, tile), begin + first, rows, live);
        copy_tokens<Panels, Element>(from, tokens, rows, entry, head, ptx::shared_address(to) + first * 128, Rows * 128);
        ptx::cp_async_arrive(bar);
        if (threadIdx.x % tile_copiers == 0) ptx::mbarrier_arrive(bar);
        return;
    }
    arrive_for_warp(bar);
    if (threadIdx.x % tile_copiers) return;
    ptx::mbarrier_arrive_expect(bar, Panels * Rows * 128);
    const HomePlace at(from.axis, from.residue_tiles, from.block, tile);
    send_home<Panels, Rows * 128>(from.maps, at, begin, entry, head, to, bar);
}

// Zeros into the rows of a tile's own tokens, by `Warps` warps, of which this is number `warp`. Columns are a multiple
// of 8.
template <int Rows, int Warps, class Element>
__device__ __forceinline__ void clear_tokens(const any::OwnTokens& own, const TensorView& view, int entry, int head,
                                             int columns, int warp) {
    int lane = int(threadIdx.x % 32);
    ptx::make_here(lane);
    const int first = 8 * (lane % 8);
    auto* const rows = any::row_of<Element>(view, entry, head, 0);
    for (int row = 4 * warp + lane / 8; row < Rows; row += 4 * Warps) {
        const int token = own.at(row);
        for (int column = first; token != no_token && column < columns; column += 64)
            ptx::store_global(rows + token * view.row + column, {0, 0, 0, 0});
    }
}

// Eight columns of a row for which a piece of the pattern has nothing: the first piece hands on zeros, and the last one
// writes what it was handed, times `factor`, and what stands at `also`, if anything does. Those between change nothing.
template <Dtype D>
__device__ __forceinline__ void pass_on(const PieceView& piece, float* sums, any::ElementOf<D>* to, float factor,
                                        const float* also = nullptr) {
    if (piece.is_first) {
        const float zeros[4] = {};
        ptx::store_global(sums, zeros);
        ptx::store_global(sums + 4, zeros);
        return;
    }
    uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float4 x = reinterpret_cast<const float4*>(sums)[half], y = {0, 0, 0, 0};
        if (also) y = reinterpret_cast<const float4*>(also)[half];
        words[2 * half] = any::pack_anywhere<D>(x.x * factor + y.x, x.y * factor + y.y);
        words[2 * half + 1] = any::pack_anywhere<D>(x.z * factor + y.z, x.w * factor + y.w);
    }
    ptx::store_global(to, {words[0], words[1], words[2], words[3]});
}

// 16 rows of a swizzled tile in shared memory, whose panels are `panel_bytes` apart, to where their tokens stand; for
// one warp to call. tokens: of a lane's rows lane / 4 and lane / 4 + 8, no_token where a row is not wanted.
template <int Panels, class Element>
__device__ __forceinline__ void write_rows(uint32_t from, uint32_t panel_bytes, const TensorView& view, int entry,
                                           int head, const int (&tokens)[2], int columns) {
    constexpr int chunks = 8 * Panels;  // of 16 bytes, a row
    int lane = int(threadIdx.x % 32);
    ptx::make_here(lane);  // places are found here, and fill no registers in a caller's loop
    auto* const rows = any::row_of<Element>(view, entry, head, 0);
    for (int pass = 0; pass < chunks / 2; ++pass) {
        const int at = 32 * pass + lane, row = at / chunks, chunk = at % chunks;
        const int low = __shfl_sync(~0u, tokens[0], 4 * (row % 8)), high = __shfl_sync(~0u, tokens[1], 4 * (row % 8));
        const int token = row < 8 ? low : high;
        if (token == no_token || chunk_columns<Element> * chunk >= columns) continue;
        uint32_t x[4];
        ptx::load_shared(x, from + chunk / 8 * panel_bytes + row * 128 + ((chunk ^ row) % 8 << 4));
        ptx::store_global(rows + token * view.row + chunk_columns<Element> * chunk, x);
    }
}

}  // namespace spattn::sm90
