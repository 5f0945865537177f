// SPDX-License-Identifier: MIT
// A warp at work on one row, a query or a key, and on the tokens of the other axis that lists name for it: 32 places of
// a list at a time, of which those that have a token are a tile.
//
//     dots   products[token] = own . row of the token     lanes that share a token have neighbouring columns
//     add    sums[column] += weight[token] row[column]    as many tokens at once as the columns leave lanes for
//
// Rows of tokens come from where they lie; what a list does not name is not read, so that it cannot matter. Each verb
// ends where all lanes have done with what it read and wrote.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "any/element.cuh"
#include "any/gather_lists.cuh"
#include "runtime/device.h"

namespace spattn::any {

// ---- shared memory ----
template <class Real>
struct alignas(16) GatherTile {
    Real products[2][32];
    int32_t tokens[32];
};

// A warp has a tile and then vectors, each of whole `padded` columns: its own rows and its sums.
__host__ __device__ constexpr int64_t padded(int64_t columns) { return (columns + 3) / 4 * 4; }

struct GatherShape {
    int warps;  // of a CTA
    unsigned warp_bytes;

    static constexpr size_t most_bytes = 96 * 1024;  // of a CTA, where it may have so much
    unsigned threads() const { return unsigned(warps) * 32; }
    size_t bytes() const { return size_t(warps) * warp_bytes; }
};
constexpr int most_gather_warps = 4;
// CTAs of an SM, at least. The compiler spills some registers for 8, and lists of 0.2 % of 16K keys still took 8 % longer
// forward with 6, and 2 % backward.
constexpr int gather_ctas = 8;

inline size_t most_gather_bytes(int32_t device) {
    return std::min(GatherShape::most_bytes, size_t(runtime::shared_bytes(device)));
}

// As many warps as fit, at least one. columns: of all vectors of a warp, padded.
template <class Real>
GatherShape gather_shape(int32_t device, int64_t columns) {
    static_assert(sizeof(GatherTile<Real>) + 4 * largest_head_dim * sizeof(Real) <= least_shared_bytes,
                  "a warp with a key, its value and their sums fits anywhere");
    const size_t bytes = sizeof(GatherTile<Real>) + size_t(columns) * sizeof(Real);
    int warps = most_gather_warps;
    while (bytes * size_t(warps) > most_gather_bytes(device)) warps /= 2;
    return {warps, unsigned(bytes)};
}

// Warps that share a query row: all of a CTA where there are too few rows to keep the GPU busy with one each.
inline int share_of_row(int64_t rows, const GatherShape& shape) { return rows < 8192 ? shape.warps : 1; }

// Whether each instruction may read 16 bytes of these operands' rows, `wide` columns, or but one.
template <Dtype D>
constexpr int wide = 16 / sizeof(ElementOf<D>);
template <Dtype D>
bool reads_wide(const Problem& p, std::initializer_list<TensorView> operands) {
    bool is_wide = p.head_dim % wide<D> == 0 && p.head_dim_v % wide<D> == 0;
    for (const TensorView& x : operands)
        is_wide &= x.column == 1 && (x.batch | x.head | x.row) % wide<D> == 0 && uintptr_t(x.data) % 16 == 0;
    return is_wide;
}

// ---- a warp ----
template <Dtype D, int Width>
struct GatherWarp {
    using T = ElementOf<D>;
    using Real = RealOf<D>;
    template <class Element>
    struct alignas(Width * sizeof(Element)) Columns {
        Element x[Width];
    };
    struct alignas(Width == 1 ? sizeof(Real) : 16) Reals {
        Real x[Width];
    };
    static constexpr int ahead = 4;  // rows of a lane that are on their way at once

    const unsigned bytes;                // of shared memory that a warp has
    const int lane, warp, share, first;  // share: warps that work on the row; first: of them, in the CTA
    GatherTile<Real>& tile;
    int count = 0;  // of the tile's tokens

    __device__ GatherWarp(void* memory, unsigned bytes, int share)
        : bytes(bytes), lane(int(threadIdx.x) % 32), warp(int(threadIdx.x) / 32), share(share),
          first(warp / share * share),
          tile(*reinterpret_cast<GatherTile<Real>*>(static_cast<char*>(memory) + unsigned(warp) * bytes)) {}

    __device__ Real* vectors() const { return reinterpret_cast<Real*>(&tile + 1); }
    __device__ int turn() const { return warp - first; }          // of this warp among those of the row
    __device__ int thread() const { return turn() * 32 + lane; }  // likewise
    // What warp `turn` of the row has where this one has x.
    __device__ Real& theirs(Real& x, int turn) const {
        return *reinterpret_cast<Real*>(reinterpret_cast<char*>(&x) + (first + turn - warp) * int(bytes));
    }

    __device__ void load(const TensorView& x, const T* row, int columns, Real* to) const {
        for (int c = lane; c < columns; c += 32) to[c] = to_real(row[c * x.column]);
        __syncwarp();
    }
    __device__ void clear(Real* sums, int columns) const {
        for (int c = lane; c < columns; c += 32) sums[c] = 0;
        __syncwarp();
    }

    // The tile becomes the tokens that lanes bring, in their order. False where none does.
    __device__ bool take(int token) {
        const unsigned there = __ballot_sync(~0u, token != no_token);
        if (token != no_token) tile.tokens[__popc(there & ((1u << lane) - 1))] = token;
        count = __popc(there);
        __syncwarp();
        return count > 0;
    }

    // Lanes that read a row of so many columns at once: a power of two.
    __device__ static int lanes_of(int columns) { return min(32, 1 << (32 - __clz((columns - 1) / Width))); }
    template <class Rows>
    __device__ static auto read(const Rows& rows, const typename Rows::Element* row, int column) {
        return *reinterpret_cast<const Columns<typename Rows::Element>*>(row + column * rows.column);
    }

    // Places beyond the tile's tokens repeat the last, and are not written.
    template <class Rows>
    __device__ void dots(const Real* own, const Rows& rows, int columns, Real* products) const {
        using Element = typename Rows::Element;
        const int lanes = lanes_of(columns), teams = 32 / lanes, member = lane % lanes, team = lane / lanes;
        for (int base = 0; base < count; base += ahead * teams) {
            const Element* row[ahead];
            float scale[ahead];
            Real sum[ahead] = {};
#pragma unroll
            for (int n = 0; n < ahead; ++n) {
                const int token = tile.tokens[min(base + n * teams + team, count - 1)];
                row[n] = rows.at(token), scale[n] = rows.scale(token);
            }
            for (int c = member * Width; c < columns; c += lanes * Width) {
                Columns<Element> there[ahead];
#pragma unroll
                for (int n = 0; n < ahead; ++n) there[n] = read(rows, row[n], c);
                const Reals here = *reinterpret_cast<const Reals*>(own + c);
#pragma unroll
                for (int n = 0; n < ahead; ++n)
#pragma unroll
                    for (int i = 0; i < Width; ++i)
                        sum[n] = fma(here.x[i], Real(to_real(there[n].x[i])) * scale[n], sum[n]);
            }
#pragma unroll
            for (int n = 0; n < ahead; ++n) {
                for (int m = lanes / 2; m; m /= 2) sum[n] += __shfl_xor_sync(~0u, sum[n], m);
                const int at = base + n * teams + team;
                if (member == 0 && at < count) products[at] = sum[n];
            }
        }
        __syncwarp();
    }

    // sums = factor * sums + weights . rows of the tile's tokens, which are added up before they meet the others (tile.cuh
    // says why). Teams take tokens in turn and add up in one order.
    template <class Rows>
    __device__ void add(const Real* weights, const Rows& rows, int columns, Real factor, Real* sums) const {
        using Element = typename Rows::Element;
        const int lanes = lanes_of(columns), teams = 32 / lanes, member = lane % lanes, team = lane / lanes;
        for (int start = 0; start < columns; start += lanes * Width) {
            const int column = start + member * Width;
            const bool inside = column < columns;  // lanes outside add up column 0 in vain
            Reals& to = *reinterpret_cast<Reals*>(sums + column);
            Reals sum{};
            for (int base = 0; base < count; base += ahead * teams) {
                Columns<Element> there[ahead];
                float scale[ahead];
#pragma unroll
                for (int n = 0; n < ahead; ++n) {
                    const int token = tile.tokens[min(base + n * teams + team, count - 1)];
                    there[n] = read(rows, rows.at(token), inside ? column : 0), scale[n] = rows.scale(token);
                }
#pragma unroll
                for (int n = 0; n < ahead; ++n) {
                    const int at = base + n * teams + team;
                    if (at >= count) continue;
#pragma unroll
                    for (int i = 0; i < Width; ++i)
                        sum.x[i] = fma(weights[at], Real(to_real(there[n].x[i])) * scale[n], sum.x[i]);
                }
            }
            for (int m = lanes; m < 32; m *= 2)
#pragma unroll
                for (int i = 0; i < Width; ++i) sum.x[i] += __shfl_xor_sync(~0u, sum.x[i], m);
            if (inside && team == 0)
#pragma unroll
                for (int i = 0; i < Width; ++i) to.x[i] = fma(to.x[i], factor, sum.x[i]);
        }
        __syncwarp();
    }
};

// ---- a query row ----
// Rows are numbered so that heads of a group follow each other: they mostly gather the same keys.
template <Dtype D, int Width>
struct GatherRow : GatherWarp<D, Width> {
    using Base = GatherWarp<D, Width>;
    using Base::lane, Base::share;

    const GatherLists& lists;
    bool is_there;  // the last CTA may have warps beyond the last row, which write nothing
    int batch, head_kv, head, token;
    KeyList keys;
    int64_t place, places;  // of the list: a row has fewer than 2^31
    ListEntry coming;       // of this lane's next place, loaded before it is asked for

    __device__ GatherRow(const GatherLists& lists, void* memory, unsigned bytes, int share, int64_t rows)
        : Base(memory, bytes, share), lists(lists) {
        const int64_t at = (int64_t(blockIdx.x) * (blockDim.x / 32) + Base::first) / share;
        const int64_t row = min(at, rows - 1), in_kv = row / lists.group;
        is_there = row == at;
        token = int(in_kv % lists.seq_q);
        head_kv = int(in_kv / lists.seq_q % lists.heads_kv);
        batch = int(in_kv / lists.seq_q / lists.heads_kv);
        head = head_kv * lists.group + int(row % lists.group);
        keys = lists.list(lists.plane_of(batch, head), token / lists.sizes.block_q);
        place = Base::turn() * 32;
        places = is_there ? int64_t(keys.count) * lists.sizes.block_k : 0;
        look_ahead();
    }

    // The next tile of this warp that has a key.
    __device__ bool next() {
        while (place < places) {
            const int64_t at = place + lane, head_in_all = int64_t(batch) * lists.heads_q + head;
            const int key = at < places ? lists.key_at(keys, coming, int(at), head_in_all, token) : no_token;
            place += 32 * share;
            look_ahead();
            if (Base::take(key)) return true;
        }
        return false;
    }

private:
    __device__ void look_ahead() {
        if (place + lane < places) coming = lists.entry_at(keys, int(place) + lane);
    }
};

}  // namespace spattn::any
