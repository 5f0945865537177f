// SPDX-License-Identifier: MIT
// How gather_forward.cuh reads listed rows of a float8 cache.
//
// Bytes are copied to where their elements will lie: 16 of them to the first half of the 32 bytes that they become. The
// lane that copied them writes these, so that it waits for nobody else, and while it does bytes of the next tiles are on
// their way. A tile holds elements times the scales of their rows, rounded as a cache of such elements has them:
// consumers see no difference.
//
// Where tiles come in twos that have a list in common, two CTAs of a cluster have one each, and widen half of the keys'
// rows for both: the copy engine sends elements to the other CTA. To share what is widened is an idea of FlashMLA,
// https://github.com/deepseek-ai/FlashMLA.
//
// Measured (H200, lists of 2,048, 128 heads of 576/512, pages of 64): 128 sequences decode in 219 us, from bf16 in 152;
// 2,048 queries of a prompt take 3.10 ms and 2.02, so a block 5,400 cycles and 3,500. Where each CTA widens all rows it is
// 10 to 12 % more. Then a block took as long without copies of bytes, and 5,200 cycles without widening: neither binds
// alone, but that a lane waits for what it copied. 64 sequences of NSA's lists, of which keys and values stand apart
// and three units are on their way, take 60 us, from bf16 50.
//
// Tried and dropped. Elements sent by the lanes that make them, by st.async: 237 us where 212 were reached. Values alone
// shared: 248. Values asked for before keys of the next block: 246. Scales loaded by the lanes that need them, which wait
// for that behind all copies: NSA's lists 68 where 60 were reached. In one CTA, decoding in 237 us: two units on their way
// (266, for values are then widened after the products of the block before); a loop of two such pieces instead of all of
// them unrolled (274). A fence by who widens, beside that of who reads: 255 where 249 were reached. Operations on bits and
// products of bf16 pairs instead of conversions: 121 cycles for 16 bytes instead of 80.
#pragma once

#include "any/element.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/float8_stages.cuh"
#include "sm90/gather_rows.cuh"
#include "tile/dtype.cuh"

namespace spattn::sm90 {

constexpr int float8_row_lanes = 4;  // of 16 columns of a panel each
template <int Ctas>
using Float8Walk = ListWalk<float8_row_lanes, Ctas>;

// Where this lane's bytes of its row i lie in a panel of a tile, and the first half of what they become; the other half
// is 16 bytes away. Eight lanes with neighbouring numbers have two rows, whose chunks lie in other banks.
template <class Walk>
__device__ __forceinline__ uint32_t float8_place(int i) {
    const int row = CopyWarp::first_row() + Walk::own_row(i);
    return row * 128 + ((2 * (CopyWarp::lane() % float8_row_lanes) ^ row % 8) << 4);
}

// As copy_rows: panels of 64 columns, from `first` on, of listed rows. A row's scale comes with them, to where the other
// half of the first panel's elements will be.
template <int Panels, class Walk>
__device__ __forceinline__ void copy_float8_rows(const int (&keys)[Walk::own_rows], const any::Float8Rows& rows,
                                                 int columns, int first, const void* tile) {
    const int column = 64 * first + 16 * (CopyWarp::lane() % float8_row_lanes);
    const int panels = (columns - column + 63) / 64;  // in which this lane's 16 columns exist
#pragma unroll
    for (int i = 0; i < Walk::own_rows; ++i) {
        const bool is_there = keys[i] != no_token;
        const any::Float8* const from = rows.at(is_there ? keys[i] : 0) + (panels > 0 ? column : 0);
        const uint32_t to = ptx::shared_address(tile) + float8_place<Walk>(i);
        const float* const scale = rows.scales ? rows.scales + (is_there ? keys[i] * rows.scale_row : 0) : &no_scale;
        ptx::cp_async_4(to ^ 16, scale, is_there ? 4 : 0);
#pragma unroll
        for (int panel = 0; panel < Panels; ++panel) {
            const bool has_columns = is_there && panel < panels;
            ptx::cp_async_16(to + panel * gather_panel_bytes, from + (has_columns ? 64 * panel : 0),
                             has_columns ? 16 : 0);
        }
    }
}

// Eight bytes of two words as elements.
template <Dtype D>
__device__ __forceinline__ void widen_eight(uint32_t low, uint32_t high, float scale, uint32_t (&words)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const uint32_t wide = ptx::widen_float8_pair(uint16_t((n < 2 ? low : high) >> 16 * (n % 2)));
        words[n] = tile::pack<D>(tile::unpack<Dtype::f16>(wide, 0) * scale, tile::unpack<Dtype::f16>(wide, 1) * scale);
    }
}

// What this lane copied to a tile's panels, which has landed, times what its rows are scaled by.
template <Dtype D, int Panels, class Walk>
__device__ __forceinline__ void widen_own_float8(const uint8_t* tile) {
    constexpr int ahead = Panels % 2 ? 1 : 2;  // panels whose reads are together: no read passes a write
#pragma unroll
    for (int i = 0; i < Walk::own_rows; ++i) {
        const uint32_t place = float8_place<Walk>(i), at = ptx::shared_address(tile) + place;
        const float scale = *reinterpret_cast<const float*>(tile + (place ^ 16));
#pragma unroll
        for (int panel = 0; panel < Panels; panel += ahead) {
            uint32_t bytes[ahead][4];
#pragma unroll
            for (int n = 0; n < ahead; ++n) ptx::load_shared(bytes[n], at + (panel + n) * gather_panel_bytes);
#pragma unroll
            for (int n = 0; n < 2 * ahead; ++n) {
                uint32_t words[4];
                widen_eight<D>(bytes[n / 2][n % 2 * 2], bytes[n / 2][n % 2 * 2 + 1], scale, words);
                ptx::store_shared((at ^ n % 2 << 4) + (panel + n / 2) * gather_panel_bytes, words);
            }
        }
    }
}

// Units are what is asked for at once: keys of a block, and then its values. One becomes elements when the next `lag` of
// them have been asked for. Where values are columns of keys that is one: the ring of those values has two tiles.
template <class C>
struct GatherWidener {
    using Walk = Float8Walk<C::ctas>;
    static constexpr int lag = C::float8_lag;
    static_assert(lag == 1 || lag == 3, "when keys have been asked for, values become elements, and the other way round");

    typename C::Shared& shared;
    Cursor<C::stages> first{};
    Cursor<C::second_stages> second{};
    Cursor<C::p_stages> third{};
    int on_their_way = 0;

    // Keys were asked for, or values.
    __device__ __forceinline__ void begin_keys() {
        begin();
        if (on_their_way > lag) widen_values<lag>();
    }
    __device__ __forceinline__ void begin_values() {
        begin();
        if (on_their_way > lag) widen_keys<lag>();
    }

    // Ends all units, the last of which has values: no other comes that would let them become elements.
    __device__ __forceinline__ void finish() {
        if constexpr (lag == 3) {
            if (on_their_way > 2) widen_values<2>();
            if (on_their_way > 1) widen_keys<1>();
        }
        if (on_their_way > 0) widen_values<0>();
    }

private:
    __device__ __forceinline__ void begin() {
        ptx::cp_async_commit();
        ++on_their_way;
    }

    // The oldest unit, after which `Younger` others are on their way.
    template <int Younger>
    __device__ __forceinline__ void widen_keys() {
        ptx::cp_async_wait<Younger>();
        widen<C::first_panels>(shared.first.tiles, shared.first_bars, first);
        if constexpr (C::value_in_key) widen<1>(shared.third.tiles, shared.third_bars, third);
        --on_their_way;
    }
    template <int Younger>
    __device__ __forceinline__ void widen_values() {
        ptx::cp_async_wait<Younger>();
        widen<C::second_panels>(shared.second.tiles, shared.second_bars, second);
        --on_their_way;
    }
    // Who waits for the tile fences.
    template <int Panels, class Tiles, class Barriers, class At>
    __device__ __forceinline__ static void widen(Tiles& tiles, Barriers& barriers, At& at) {
        uint64_t* const full = &barriers.full[at.index];
        widen_own_float8<C::dtype, Panels, Walk>(tiles[at.index][0]);
        if constexpr (C::ctas > 1)
            send<Panels>(tiles[at.index][0], full);
        else
            ptx::mbarrier_arrive(full);
        at.advance();
    }

    // The warp's own rows to the same tile of the other CTA, a panel a lane; as many will come from there.
    template <int Panels>
    __device__ __forceinline__ static void send(const uint8_t* tile, uint64_t* full) {
        constexpr uint32_t bytes = Walk::rows_at_once * Walk::own_rows * 128;  // of a panel
        ptx::fence_async_shared();
        __syncwarp();  // all lanes' elements are there
        const uint32_t other = ptx::cluster_rank() ^ 1;
        if (CopyWarp::lane() < Panels) {
            const int first = CopyWarp::first_row() + Walk::rows_at_once * Walk::own_rows * int(ptx::cluster_rank());
            const uint8_t* const from = tile + CopyWarp::lane() * gather_panel_bytes + first * 128;
            ptx::cluster_copy(ptx::cluster_address(from, other), ptx::shared_address(from), bytes,
                              ptx::cluster_address(full, other));
        }
        ptx::mbarrier_arrive_expect(full, Panels * bytes / 32);  // a lane's share
    }
};

}  // namespace spattn::sm90
