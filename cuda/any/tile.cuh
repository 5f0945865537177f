// SPDX-License-Identifier: MIT
// A CTA at work on the rows of one tile: which tokens they are, and step after step the tokens of the other axis that
// the layout lists for them, in whatever order the layout has.
//
// A step is `width` places of the other axis: a part of a large block, or several small blocks side by side. Each
// thread finds out which of its 4 x 4 pairs are kept; steps that keep no pair of any thread are left out.
#pragma once

#include <algorithm>
#include <bit>

#include "any/mask_order.h"
#include "any/product.cuh"
#include "runtime/device.h"
#include "tile/fragment.h"

namespace spattn::any {

// ---- layouts ----
constexpr int32_t absent_block = -2;

__device__ inline int64_t home_place(const AxisView& axis, int32_t block, int64_t token) {
    return token % axis.modulus * axis.residue_tiles * block + token / axis.modulus;
}

// The tokens of a tile: tile_at() of layout/view.h, for devices.
struct TileTokens {
    const int32_t* listed;  // null for a home
    int32_t first, stride, count;

    __device__ int32_t at(int32_t place) const {
        if (listed) return listed[place];
        return place < count ? first + place * stride : no_token;
    }
};
__device__ inline TileTokens tokens_of(const AxisView& axis, int32_t block, int64_t seq, int32_t tile) {
    if (tile < axis.listed) return {axis.tokens + int64_t(tile) * block, 0, 0, block};
    const uint32_t home = uint32_t(tile - axis.listed), tiles = uint32_t(axis.residue_tiles);
    const uint32_t modulus = uint32_t(axis.modulus), residue = modulus == 1 ? 0 : home / tiles;
    const int64_t first = residue + int64_t(home - residue * tiles) * block * modulus;
    if (first >= seq) return {nullptr, 0, 0, 0};
    const uint32_t left = uint32_t(seq - first);
    const uint32_t count = modulus == 1 ? left : (left - 1) / modulus + 1;
    return {nullptr, int32_t(first), int32_t(modulus), int32_t(min(count, uint32_t(block)))};
}

// The token at a place of a tile, or no_token.
__device__ inline int32_t token_at(const AxisView& axis, int32_t block, int64_t seq, int32_t tile, int32_t place) {
    return tokens_of(axis, block, seq, tile).at(place);
}

// The tokens that are written from a tile's places: those that are away are written where they are listed.
struct OwnTokens {
    TileTokens tokens;
    const uint64_t* away;  // bits of the tile's places, or null

    __device__ int32_t at(int32_t place) const {
        return away && (away[place / 64] >> (place % 64) & 1) ? no_token : tokens.at(place);
    }
};
__device__ inline OwnTokens own_tokens_of(const AxisView& axis, int32_t block, int64_t seq, int32_t tile) {
    const bool may_be_away = tile >= axis.listed && axis.away;
    const int64_t words = (block + 63) / 64;
    return {tokens_of(axis, block, seq, tile), may_be_away ? axis.away + (tile - axis.listed) * words : nullptr};
}
__device__ inline int32_t own_token_at(const AxisView& axis, int32_t block, int64_t seq, int32_t tile, int32_t place) {
    return own_tokens_of(axis, block, seq, tile).at(place);
}

// The queries of a tile whose tokens are consecutive.
__device__ inline QuerySpan span_of(const LayoutView& layout, int batch, int tile) {
    if (layout.spans) return layout.spans[batch * layout.by_query.rows + tile];
    const int first = tile * layout.block_q;
    return {first, first, min(first + layout.block_q, int(layout.seq_q))};
}

__device__ inline int query_at(const QuerySpan& span, int place) {
    const int query = span.first + place;
    return query >= span.begin && query < span.end ? query : no_token;
}

// Whose a row of a tile is, where heads share tiles.
struct TileRows {
    int bits;  // 2^bits heads

    explicit TileRows(const TasksView& tasks) : bits(std::countr_zero(unsigned(tasks.tile_heads))) {}
    __device__ int place(int row) const { return row >> bits; }
    __device__ int head(int row) const { return row & ((1 << bits) - 1); }  // counted from the task's
};

// Tiles that only repeat tokens, which are written from their homes.
__device__ inline int32_t repeating_tiles(const AxisView& axis) { return axis.away ? 0 : axis.listed; }

// Blocks [skip, skip + take) of a list. What lies beyond these runs is left in both, for the runs of another head.
struct ListWalk {
    const Run *run, *end;
    int32_t skip, take, block, mask;

    __device__ bool next() {
        while (run != end && skip >= run->count) skip -= run++->count;
        if (run == end || take == 0) return false;
        block = run->first + skip++;
        mask = run->mask;
        --take;
        return true;
    }
};

// ---- shared memory ----
template <class Real>
struct alignas(16) Shared {
    using S = Shape<Real>;
    Real left[S::most_rows * S::stride];  // rows of the CTA: an operand, then probabilities or their gradients
    Real right[S::width * S::stride];     // rows of the step's tokens
    int32_t own[S::most_rows];            // token of each row; no_token where none is written
    int32_t place[S::most_rows];          // its place in the tile whose list is walked, or -1
    int32_t tokens[S::width];             // of the step
    int32_t mask[S::most_blocks];         // of each block of the step, or absent_block
    uint32_t flags[S::most_threads / 32];

    // Which of the step's tokens a row sees, in the padding of its row.
    __device__ unsigned long long& seen(int row) {
        return *reinterpret_cast<unsigned long long*>(left + row * S::stride + S::width);
    }
    __device__ Real* sums() { return reinterpret_cast<Real*>(this + 1); }  // [rows][columns], as many as fit
};

// `columns` of sums a row, in all.
template <class Real>
constexpr size_t shared_bytes(int rows, int64_t columns) {
    return sizeof(Shared<Real>) + size_t(rows) * size_t(columns) * sizeof(Real);
}

// Rows of a CTA: those of a block, but fewer where the device has no room for `columns` of sums of each.
template <class Real>
int rows_for(int32_t device, int block, int64_t columns) {
    constexpr int least = 16;
    static_assert(shared_bytes<Real>(least, Shape<Real>::most_columns) <= least_shared_bytes, "rows that fit anywhere");
    int rows = std::min(block, Shape<Real>::most_rows);
    while (rows > least && shared_bytes<Real>(rows, columns) > size_t(runtime::shared_bytes(device))) rows /= 2;
    return rows;
}

// What no launch on the device has more of.
template <class Real>
size_t most_shared_bytes(int32_t device) {
    using S = Shape<Real>;
    return std::min(shared_bytes<Real>(S::most_rows, S::most_columns), size_t(runtime::shared_bytes(device)));
}

// Columns a CTA has room for, of so many: whole chunks, at most as many as fit.
template <class Real>
constexpr int room_for(int64_t columns, int sums = 1) {
    constexpr int width = Shape<Real>::width;
    const int64_t most = Shape<Real>::most_columns / sums, needed = divide_up(columns, width) * width;
    return int(needed < most ? needed : most);
}

// ---- the CTA ----
// ByKey: rows are keys, and the lists' tokens are queries.
template <Dtype D, bool ByKey>
struct Tile {
    using T = ElementOf<D>;
    using Real = RealOf<D>;
    using S = Shape<Real>;

    const LayoutView& layout;
    const MaskOrder order;
    Shared<Real>& shared;
    const Spot at;
    ListWalk walk{};
    int part = 0;       // of a block that is larger than a step
    uint32_t kept = 0;  // bit 4 i + j: pair (i, j) of this thread

    __device__ Tile(const LayoutView& layout, MaskOrder order, Shared<Real>& shared)
        : layout(layout), order(order), shared(shared), at(make_spot<Real>(int(blockDim.x) / S::across * S::pairs)) {}

    __device__ const AxisView& own_axis() const { return ByKey ? layout.keys : layout.queries; }
    __device__ const AxisView& axis() const { return ByKey ? layout.queries : layout.keys; }
    __device__ int own_block() const { return ByKey ? layout.block_k : layout.block_q; }
    __device__ int block() const { return ByKey ? layout.block_q : layout.block_k; }
    __device__ int64_t own_seq() const { return ByKey ? layout.seq_k : layout.seq_q; }
    __device__ int64_t seq() const { return ByKey ? layout.seq_q : layout.seq_k; }
    __device__ const ListsView& lists() const { return ByKey ? layout.by_key : layout.by_query; }

    // The rows are those of a tile, from place `first` on.
    __device__ void take_rows(int tile, int first) {
        for (int row = threadIdx.x; row < at.rows; row += blockDim.x) {
            shared.place[row] = first + row;
            shared.own[row] = own_token_at(own_axis(), own_block(), own_seq(), tile, first + row);
        }
        __syncthreads();
    }

    __device__ void open(int head_kind, int tile, int skip, int take) {
        const Slice slice = lists().slices[int64_t(head_kind) * lists().rows + tile];
        walk = {lists().runs + slice.begin, lists().runs + slice.end, skip, take, 0, 0};
        part = 0;
    }

    // The next step that keeps a pair. All threads have done with the step before.
    __device__ bool next() {
        for (;;) {
            const int parts = block() / S::width;
            if (part > 0 && part < parts) {
                place_block(0, true);
            } else {
                part = 0;
                if (!walk.next()) return false;
                place_block(0, true);
                bool more = true;
                for (int n = 1; n < S::width / block(); ++n) {
                    more = more && walk.next();
                    place_block(n, more);
                }
            }
            __syncthreads();  // all see the step's tokens and masks
            find_kept();
            ++part;
            if (__syncthreads_or(kept != 0)) return true;
        }
    }

    // Block n of the step.
    __device__ void place_block(int n, bool is_there) {
        const int size = min(block(), S::width), place = int(threadIdx.x) - n * size;
        if (place >= 0 && place < size)
            shared.tokens[threadIdx.x] =
                is_there ? token_at(axis(), block(), seq(), walk.block, part * S::width + place) : no_token;
        if (threadIdx.x == 0) shared.mask[n] = is_there ? walk.mask : absent_block;
    }

    __device__ bool keeps(int mask, int own, int other) const {
        const int query = ByKey ? other : own, key = ByKey ? own : other;
        const int bit = order == MaskOrder::rows ? query * layout.block_k + key
                                                 : tile::key_fragment_bit(query, key, layout.block_k);
        return layout.masks[int64_t(mask) * layout.mask_words + bit / 64] >> (bit % 64) & 1;
    }

    __device__ void find_kept() {
        const int size = min(block(), S::width);
        kept = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int token = token_of<Real>(at.x, j), mask = shared.mask[token / size];
            if (mask == absent_block) continue;
            const int place = part * S::width + token % size;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own = shared.place[at.row(i)];
                if (own >= 0 && (mask == full_block || keeps(mask, own, place))) kept |= 1u << (4 * i + j);
            }
        }
    }

    __device__ bool is_kept(int i, int j) const { return kept >> (4 * i + j) & 1; }

    // s[row][token] of operands with `columns` columns.
    template <class Own, class Other>
    __device__ void dots(const Own& own, const Other& other, int columns, Real (&s)[4][4]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = 0;
        for (int first = 0; first < columns; first += S::width) {
            stage(own, shared.own, at.rows, first, columns, shared.left);
            stage(other, shared.tokens, S::width, first, columns, shared.right);
            __syncthreads();  // both are there
            dot(at, shared.left, shared.right, min(S::width, columns - first), s);
            __syncthreads();  // both may be overwritten
        }
    }

    // Gives `left` to a factor of the next product. Whoever read it before has passed a barrier since.
    __device__ void share(const Real (&p)[4][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) shared.left[at.row(i) * S::stride + token_of<Real>(at.x, j)] = p[i][j];
    }

    // sums = factor * sums + left . columns [first, last) of the step's tokens, which are added up before they meet the
    // others: one by one, each would round the sum of all, and where terms are equal all to the same side.
    template <class Other>
    __device__ void add(const Other& other, int first, int last, const Real (&factor)[4], Real* sums, int ld) {
        bool has_seen = false;
        for (int c = 0; first + c < last; c += S::width) {
            const bool is_odd = stage(other, shared.tokens, S::width, first + c, last, shared.right);
            // Both factors are there. Numbers that are not finite must not reach rows that do not see their token.
            const bool selects = __syncthreads_or(is_odd);
            if (selects && !has_seen) share_seen();
            has_seen |= selects;
            Real sum[4][4] = {};
            const auto seen = [&](int row) { return shared.seen(row); };
            selects ? accumulate<true>(at, shared.left, shared.right, seen, sum)
                    : accumulate<false>(at, shared.left, shared.right, seen, sum);
            each_vector(c, sums, ld, [&](int i, int j, Vec<Real>& at_sums) {
#pragma unroll
                for (int e = 0; e < S::lanes; ++e) at_sums.x[e] = fma(at_sums.x[e], factor[i], sum[i][j + e]);
            });
            __syncthreads();  // right may be overwritten, and after the last chunk left, too
        }
    }

    // body(i, j, sums of this thread's pairs (i, j) and those that follow in one vector)
    template <class Body>
    __device__ __forceinline__ void each_vector(int c, Real* sums, int ld, Body body) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; j += S::lanes)
                body(i, j, *reinterpret_cast<Vec<Real>*>(sums + at.row(i) * ld + c + column_of<Real>(at.x, j)));
    }

    __device__ void share_seen() {
        for (int row = threadIdx.x; row < at.rows; row += blockDim.x) shared.seen(row) = 0;
        __syncthreads();  // before bits are set
#pragma unroll
        for (int n = 0; n < 16; ++n)
            if (is_kept(n / 4, n % 4)) atomicOr(&shared.seen(at.row(n / 4)), 1ull << token_of<Real>(at.x, n % 4));
        __syncthreads();  // before they are read
    }

    __device__ void clear(Real* sums, int count) {
        for (int i = threadIdx.x; i < count; i += blockDim.x) sums[i] = 0;
        __syncthreads();
    }
};

}  // namespace spattn::any
