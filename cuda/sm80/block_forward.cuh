// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - m),  out = sum(p v) / sum(p),  lse = scale m + log(sum(p))
//
// over the blocks that a layout lists for each query block, in any order of tokens: rows are copied by token, so that
// residue classes and listed tiles cost what consecutive ones do, but for their cache lines.
//
//   grid      a CTA has BlockQ rows of a task's query block, and 64 keys a step; two CTAs an SM hide each other's waits
//   columns   of v and out above 256 are another CTA's, which makes the same scores: registers have no room for more
//             sums. The two stand side by side in the grid, and share k in L2
//   a step    v is on its way while s is made, the next k while p and p v are: one tile of each suffices
//
//               copy     | v0      | k1      | v1      | k2
//               products | q k0    | p0 v0   | q k1    | p1 v1
//
//             Rows of 1,024 bytes come in panels, four of k and as many of v, or two of a part of it, which take turns in
//             the same two tiles: with q they have room where a CTA has 99 KiB, and twice on an SM of Hopper
//   warps     four, of 16 or 32 rows: the more rows, the fewer times k and v are read from shared memory. Scores, p and
//             out stay in registers; p is the a operand of p v as it stands, and a masked block costs a thread a word
//             for each 16 rows (tile/fragment.h)
//   softmax   as on Hopper: relative to the maximum found last, made once more where that was not good enough
//             (tile/softmax.cuh)
//   out       leaves through shared memory, four columns a lane (SumTile)
//   float32   through TF32, by the same steps: tiles have chunks of half as many elements. Where a plan lets them, q is
//             rounded once, where it lies; k, v and p in registers, to nearest, two instructions a word. Each is then off
//             by up to 2^-11 of itself. Elsewhere all are split in registers, two instructions a word, and a product is
//             three (sm80/tile.cuh). Sums, the row state and repairs are float32
//   float8    of caches: what k and v stand for is made by the threads that bring them, which wait for them first
//   isolation out is p v, and 0 * NaN is NaN: rows whose sums are not finite are made again by their warp from kept
//             pairs alone
//
// What binds: two warps a scheduler hide their waits and exponentials from the tensor unit by half. Measured (H200,
// bf16, head_dim 128, L2 cold, TFLOP/s on kept pairs, 2026-11, GEMM 8192^3 792 in the same run): full_16k 337,
// dilated_16k 53, longnet_128k 185, strided_16k 62; head_dim 512, 8 heads on 4, causal_16k 188 (153 with all columns of k
// at once, and a CTA an SM), where plain kernels reach 12. No older GPU was tried.
// TF32, 16 heads: full_4k 109, window1k_16k 102, at head_dim 64 130 and 104. Split: 61 and 55, at head_dim 64 59 and 51,
// where plain float32 kernels reach 17, and torch's memory-efficient attention 45 on full_4k in an earlier run; at
// head_dim 256 TF32 112 and 96, split 50 and 44, plain ones 19. With numbers rounded to nearest before what is left of them
// is taken, four instructions a word, split ones take 1.25 times as long.
#pragma once

#include <cmath>

#include "any/partials.h"
#include "any/row_end.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"
#include "sm80/block_forward.h"
#include "sm80/tile.cuh"
#include "sm80/turing.h"
#include "tile/softmax.cuh"

namespace spattn::sm80 {

// ---- configuration ----
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits, bool IsFloat8>
struct ForwardConfig {
    static constexpr Dtype dtype = D;
    static constexpr bool is_float8 = IsFloat8;  // k and v, of a cache
    using Element = typename tile::Element<D>::type;
    static constexpr bool is_float32 = D == Dtype::f32, splits = Splits;
    static constexpr int element_bytes = sizeof(Element);
    using Rows = ElementRows<D>;
    using Kernel = BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>;
    using KeyColumns = typename Kernel::KeyColumns;
    using ValueColumns = typename Kernel::ValueColumns;
    static constexpr int column_parts = ValueColumns::parts, part_columns = ValueColumns::of_part;
    using QueryTile = SharedTile<HeadDim, HeadDim, element_bytes>;
    using QueryPanel = SharedTile<KeyColumns::panel, HeadDim, element_bytes>;
    using KeyTile = SharedTile<KeyColumns::panel, KeyColumns::panel, element_bytes>;
    using ValueTile = SharedTile<ValueColumns::panel, ValueColumns::panel, element_bytes>;
    // What a step brings: panels of k, then of v. Two tiles have them by turns.
    static constexpr int key_panels = KeyColumns::panels, units = key_panels + ValueColumns::part_panels;
    static constexpr int head_dim = HeadDim, block_q = BlockQ;
    static constexpr int warp_rows = BlockQ / warps, groups = warp_rows / 16;
    static_assert(groups <= 2, "bits of odd rows fill one word");
    static constexpr int q_bytes = QueryTile::bytes(BlockQ);
    static constexpr int k_bytes = KeyTile::bytes(step_tokens), v_bytes = ValueTile::bytes(step_tokens);
    static_assert(units == 2 || (units % 2 == 0 && k_bytes == v_bytes), "any panel fits either tile");
    static constexpr int shared_bytes = Kernel::shared_bytes;
    static_assert(shared_bytes == q_bytes + k_bytes + v_bytes, "what the host was told");
    static_assert(shared_bytes >= BlockQ * SumTile<part_columns>::row_bytes, "sums take the place of all tiles");
    static_assert(column_parts == 1 || part_columns == any::Shape<float>::most_columns,
                  "pieces of a pattern have a state for each part of so many columns");
    // An SM; more would leave too few registers, of which p takes twice as many in float32.
    static constexpr int ctas = groups * HeadDimV <= (splits ? 0 : is_float32 ? 64 : 128) ? 3 : 2;
};

struct ForwardParams {
    TensorView q, k, v, k_scales, v_scales;
    LayoutView layout;
    TasksView tasks;
    any::ForwardOutputs to;
    any::Partials<float> parts;
    any::TileRows tile;
    int heads_q, group, head_dim, head_dim_v, row_parts, column_parts;
    bool q_is_wide, k_is_wide, v_is_wide;
    bool has_quads;           // four columns of out are one aligned word
    float scale, scale_log2;  // from what stands for scores to their natural units, and to powers of two
    bool has_cap;             // scores become tanh(into_cap s) first
    float into_cap;
};

// Which of a tile's rows, and of their columns of out, are whose.
template <class C>
struct Place {
    Task task;
    int batch, head, kind, first_row;  // head: the first of the tile's; first_row: of the CTA, in the tile
    int column_part;
    any::TileRows tile;

    __device__ Place(const ForwardParams& params, unsigned index)
        : Place(params, index / column_parts(params), int(index % column_parts(params))) {}
    __device__ Place(const ForwardParams& params, unsigned row_index, int column_part)
        : task(params.tasks.tasks[row_index / unsigned(params.row_parts)]),
          batch(task.head / params.heads_q),
          head(task.head - batch * params.heads_q),
          kind(params.layout.kind_of_head[task.head]),
          first_row(int(row_index % unsigned(params.row_parts)) * C::block_q),
          column_part(column_part),
          tile(params.tile) {}
    __device__ static unsigned column_parts(const ForwardParams& params) {
        return C::column_parts == 1 ? 1 : unsigned(params.column_parts);
    }
    __device__ int first_column() const { return C::column_parts == 1 ? 0 : column_part * C::part_columns; }
    // k or v from a column on.
    __device__ static TensorView from_column(TensorView x, int column) {
        x.data = static_cast<char*>(x.data) + (C::is_float8 ? 1 : C::element_bytes) * column * x.column;
        return x;
    }
    // v from the part's first column on, and how many columns it has from there.
    __device__ TensorView values(const ForwardParams& params) const { return from_column(params.v, first_column()); }
    __device__ int value_columns(const ForwardParams& params) const { return params.head_dim_v - first_column(); }
    __device__ int head_kv(const ForwardParams& params) const { return head / params.group; }
    // The token that a row of the CTA writes, and its head.
    __device__ int token_of(const LayoutView& layout, int row) const {
        return any::own_token_at(layout.queries, layout.block_q, layout.seq_q, task.row, tile.place(first_row + row));
    }
    __device__ int head_of(int row) const { return head + tile.head(first_row + row); }
};

// ---- repair: one warp makes a row from the pairs that it keeps, and from nothing else ----
template <class C>
struct Repair {
    using Element = typename C::Element;
    using Sums = SumTile<C::part_columns>;
    static constexpr int columns = C::head_dim / 32, columns_v = C::part_columns / 32;  // a lane's, 32 apart

    const ForwardParams& params;
    const Place<C> place;                           // a copy: a reference would keep the CTA's sums in memory, too
    const int row, token, lane = threadIdx.x % 32;  // row: in the CTA
    float q[columns], out[columns_v] = {}, m = -INFINITY, l = 0;

    __device__ Repair(const ForwardParams& params, const Place<C>& place, int row)
        : params(params), place(place), row(row), token(place.token_of(params.layout, row)) {}

    // Its sums go to the row of that tile, their maximum and the sum of p stay in m and l.
    __device__ __noinline__ void run(uint32_t sums) {
        if (token == no_token) return;
        const auto* from = any::row_of<Element>(params.q, place.batch, place.head_of(row), token);
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            q[i] = column < params.head_dim ? any::to_real(from[column * params.q.column]) : 0;
        }
        const LayoutView& layout = params.layout;
        ReverseWalk walk(layout.by_query, place.kind, place.task);
        while (walk.next()) block(walk.block, walk.mask);
        for (int i = 0; i < columns_v; ++i) ptx::store_shared(Sums::at(sums, row, lane + 32 * i), out[i]);
    }

    __device__ void block(int block, int mask) {
        const LayoutView& layout = params.layout;
        const any::TileTokens tokens = any::tokens_of(layout.keys, layout.block_k, layout.seq_k, block);
        const uint64_t* words = layout.masks + int64_t(mask) * layout.mask_words;
        for (int base = 0; base < layout.block_k; base += 32) {
            const int bit = tile::fragment_bit(place.first_row + row, base + lane, layout.block_k);
            const bool kept = mask == full_block || (words[bit / 64] >> (bit % 64) & 1);
            for (unsigned keys = __ballot_sync(~0u, kept); keys; keys &= keys - 1)
                pair(tokens.at(base + __ffs(int(keys)) - 1));
        }
    }

    __device__ void pair(int64_t key) {
        if (isnan(l)) return;  // by its own keys: nothing can change it
        const int head_kv = place.head_kv(params);
        const auto k_rows = any::key_rows<C::dtype, C::is_float8>(params.k, params.k_scales, place.batch, head_kv);
        const TensorView values = place.values(params);
        const auto v_rows = any::key_rows<C::dtype, C::is_float8>(values, params.v_scales, place.batch, head_kv);
        const auto *const k = k_rows.at(key), *const v = v_rows.at(key);
        const float k_scale = k_rows.scale(key), v_scale = v_rows.scale(key);
        float s = 0;
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            if (column < params.head_dim) s = fmaf(q[i], any::to_real(k[column * params.k.column]) * k_scale, s);
        }
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        if (params.has_cap) s = tile::cap(s, params.into_cap);
        const float highest = fmaxf(m, s);
        const float factor = m == highest ? 1 : ptx::exp2_approx((m - highest) * params.scale_log2);
        const float p = s == -INFINITY ? 0 : ptx::exp2_approx((s - highest) * params.scale_log2);
        m = highest, l = fmaf(l, factor, p);
        for (int i = 0; i < columns_v; ++i) {
            const int column = lane + 32 * i;
            if (column < place.value_columns(params))
                out[i] = fmaf(p, any::to_real(v[column * params.v.column]) * v_scale, out[i] * factor);
        }
    }
};

// ---- the CTA ----
template <class C>
struct Forward {
    using Sums = SumTile<C::part_columns>;

    const ForwardParams& params;
    const Place<C> place;
    const uint32_t q_tile, tiles, sums;  // shared addresses; sums take all tiles' place in the end
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * C::warp_rows;
    float out[C::groups][C::part_columns / 2];
    static constexpr int p_words = 32 / tile::operand_values<C::dtype>;
    tile::RowState rows[C::groups];

    __device__ Forward(const ForwardParams& params, uint32_t shared)
        : params(params),
          place(params, blockIdx.x),
          q_tile(shared),
          tiles(shared + C::q_bytes),
          sums(shared) {}

    __device__ __forceinline__ void run() {
        if (place.task.part != whole_row && place.task.take == 0) return;  // of no row: another task may have that part
        const LayoutView& layout = params.layout;
        const int parts = layout.block_k / step_tokens;
        ReverseWalk walk(layout.by_query, place.kind, place.task);
        bool more = walk.next();
        int part = 0;  // of a block that is larger than a step
        any::TileTokens tokens = any::tokens_of(layout.keys, layout.block_k, layout.seq_k, walk.block);
        if (more) {
            load_q();
            load(0, tokens, walk.block, part);
        }
        ptx::cp_async_commit();
        if (more) load(1, tokens, walk.block, part);
        ptx::cp_async_commit();
        clear(out);
        bool fresh = true;
        if constexpr (C::is_float32 && !C::splits) {
            ptx::cp_async_wait<1>();
            round_own_chunks<C::block_q, typename C::QueryTile>(q_tile);
        }
        while (more) {
            uint32_t words[C::groups], p[C::groups][p_words][4];
            const bool is_masked = walk.mask != full_block;
            float s[C::groups][32];
            clear(s);
#pragma unroll
            for (int unit = 0; unit < C::units; ++unit) {
                if (unit == C::units - 1 && ++part == parts) {
                    part = 0;
                    more = walk.next();
                    tokens = any::tokens_of(layout.keys, layout.block_k, layout.seq_k, walk.block);
                }
                // The second unit of the first step is on its way, behind the first.
                const bool is_ahead = unit == 0 && fresh;
                is_ahead ? ptx::cp_async_wait<1>() : ptx::cp_async_wait<0>();
                __syncthreads();  // the unit is there, and everyone is done with the one before
                if (unit == 0 && is_masked) read_mask(walk.mask, part, parts, words);
                if (more && !is_ahead) load((unit + 1) % C::units, tokens, walk.block, part);
                ptx::cp_async_commit();
                if (unit < C::key_panels) {
                    add_row_products<C::dtype, typename C::QueryPanel, typename C::KeyTile, C::splits>(
                        q_tile + unit * C::KeyTile::row_bytes, warp_row, tile_of(unit), s);
                    continue;
                }
                if (unit == C::key_panels) {
#pragma unroll
                    for (int g = 0; g < C::groups; ++g) make_probabilities(g, s[g], is_masked, words[g], fresh, p[g]);
                    fresh = false;
                }
                const int column = (unit - C::key_panels) * C::ValueTile::columns;
                if constexpr (C::is_float32)
                    FloatProduct<typename C::ValueTile, C::splits>(tile_of(unit)).add(p, out, column);
                else
                    add_product<C::dtype, typename C::ValueTile>(p, tile_of(unit), out, column);
            }
        }
        finish();
    }

    __device__ __forceinline__ void load_q() {
        const LayoutView& layout = params.layout;
        const typename C::Rows q(params.q, place.batch, place.head, params.head_dim, params.q_is_wide);
        const auto tokens = any::tokens_of(layout.queries, layout.block_q, layout.seq_q, place.task.row);
        if (place.tile.bits == 0)
            load_rows<C::block_q, typename C::QueryTile>(q_tile, q, {tokens, place.first_row});
        else
            load_rows_of_heads(q_tile, q, params.q.head, tokens, place.tile, place.first_row);
    }
    // Once a task, element by element. Static, and all by value: `this` would keep the sums in memory.
    __device__ __noinline__ static void load_rows_of_heads(uint32_t to, typename C::Rows q, int64_t head_stride,
                                                           any::TileTokens tokens, any::TileRows tile, int first_row) {
        constexpr int chunks = C::QueryTile::chunks;
        const char* const first = q.data;
        for (int at = threadIdx.x; at < C::block_q * chunks; at += threads) {
            const int row = at / chunks, chunk = at % chunks, in_tile = first_row + row;
            q.data = first + C::element_bytes * tile.head(in_tile) * head_stride;
            copy_chunk(C::QueryTile::at(to, row, chunk), q, tokens.at(tile.place(in_tile)), q.in_chunk * chunk);
        }
    }
    __device__ __forceinline__ uint32_t tile_of(int unit) const { return tiles + unit % 2 * C::k_bytes; }
    // A unit of a step of these tokens, part of that block.
    __device__ __forceinline__ void load(int unit, const any::TileTokens& tokens, int block, int part) {
        TokenRange range{tokens, part * step_tokens};
        if (unit < C::key_panels) {
            load_panel<typename C::KeyTile>(tile_of(unit), params.k, params.k_scales, unit * C::KeyTile::columns,
                                            params.head_dim, params.k_is_wide, range);
            return;
        }
        // Rows of v that no query sees are 0: what they hold would reach every row, which would all need a repair.
        const LiveView& live = params.layout.live_keys;
        const int set = live.set_of ? live.set_of[place.kind * params.layout.by_key.rows + block] : all_live;
        if (set != all_live) range.live = live.sets[set * live.words + part];
        const int first = place.first_column() + (unit - C::key_panels) * C::ValueTile::columns;
        load_panel<typename C::ValueTile>(tile_of(unit), params.v, params.v_scales, first, params.head_dim_v,
                                          params.v_is_wide, range);
    }
    // Columns of k or v from `first` on.
    template <class Tile>
    __device__ __forceinline__ void load_panel(uint32_t to, const TensorView& x, const TensorView& scales, int first,
                                               int columns, bool is_wide, const TokenRange& range) {
        const int head_kv = place.head_kv(params);
        const TensorView from = Place<C>::from_column(x, first);
        if constexpr (C::is_float8)
            load_float8_rows<C::dtype, step_tokens, Tile>(to, {from, scales, place.batch, head_kv}, columns - first,
                                                          is_wide, range);
        else
            load_rows<step_tokens, Tile>(to, typename C::Rows(from, place.batch, head_kv, columns - first, is_wide),
                                         range);
    }

    // A thread's 32 bits of a step for each 16 rows.
    __device__ __forceinline__ void read_mask(int mask, int part, int parts, uint32_t (&words)[C::groups]) const {
        const auto* all =
            reinterpret_cast<const uint32_t*>(params.layout.masks + int64_t(mask) * params.layout.mask_words);
#pragma unroll
        for (int g = 0; g < C::groups; ++g)
            words[g] = __ldg(all + ((place.first_row + warp_row) / 16 + g) * 32 * parts + lane * parts + part);
    }

    __device__ __forceinline__ void make_probabilities(int g, float (&s)[32], bool is_masked, uint32_t word, bool fresh,
                                                       uint32_t (&p)[p_words][4]) {
        if (params.has_cap) tile::cap(s, params.into_cap);
        if (is_masked) tile::mask(s, word);
        float factor[2];
        // Who asks for the largest score gets it by following the maximum in each block.
        const bool follows = fresh || params.to.max_logits.data;
        if (tile::softmax<C::dtype>(s, rows[g], params.scale_log2, follows, p, factor) && !fresh)
            tile::scale_rows(out[g], factor[0], factor[1]);
    }

    // ---- the end of the rows ----
    // Lane r has row r of its warp.
    __device__ __forceinline__ void finish() {
        constexpr float unlift = tile::unlift<C::dtype>;
        any::RowState<float> state{-INFINITY, 0, -INFINITY};
        unsigned odd = 0;  // bits of rows that are not finite
#pragma unroll
        for (int g = 0; g < C::groups; ++g) {
            const float l[2] = {tile::quad_sum(rows[g].l[0]), tile::quad_sum(rows[g].l[1])};
            float is_nan[2];
            tile::find_not_finite(out[g], is_nan);
            is_nan[0] = fmaf(l[0], 0.f, is_nan[0]), is_nan[1] = fmaf(l[1], 0.f, is_nan[1]);
            if (!__all_sync(~0u, is_nan[0] == 0 && is_nan[1] == 0))
                odd |= tile::rows_with(!(is_nan[0] == 0), !(is_nan[1] == 0)) << 16 * g;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float m = __shfl_sync(~0u, rows[g].m[h], 4 * (lane % 8)) * params.scale;
                const float sum = __shfl_sync(~0u, l[h], 4 * (lane % 8)) * unlift;
                if (lane / 8 == 2 * g + h) state = {m, sum, m};
            }
        }
        __syncthreads();  // everyone is done with the tiles, where sums are staged
        if constexpr (C::is_float32)
            Sums::template stage_float<C::groups>(sums, warp_row, out);
        else
            Sums::template stage<C::groups>(sums, warp_row, out, unlift);
        __syncwarp();  // a row's sums are there before its repair overwrites them
#pragma unroll 1
        for (unsigned bits = odd; bits; bits &= bits - 1) {
            const int row = __ffs(int(bits)) - 1;
            Repair<C> repair(params, place, warp_row + row);
            repair.run(sums);
            const float m = repair.m * params.scale;
            if (lane == row) state = {m, repair.l, m};
        }
        __syncwarp();  // all sums of the warp's rows are there
        place.task.part == whole_row ? write_rows(state) : write_part(state);
    }

    __device__ __forceinline__ void write_rows(any::RowState<float> state) const {
        const int own = warp_row + lane % C::warp_rows, head = place.head_of(own);
        const int token = lane < C::warp_rows ? place.token_of(params.layout, own) : no_token;
        any::RowEnd<C::dtype> end(params.to, place.batch, head, max(token, 0));
        if (token != no_token) end.take_on(state, place.column_part);
        end.finish(state);
        if (token != no_token) end.write_state(state, place.column_part);
        each_row([&](int row) {
            const int to = __shfl_sync(~0u, token, row), of = __shfl_sync(~0u, head, row);
            const float mine = __shfl_sync(~0u, end.mine, row), share = __shfl_sync(~0u, end.share, row);
            if (to == no_token) return;
            each_quad(row, mine, [&](int column, float(&x)[4]) { write(of, to, share, column, x); });
        });
    }

    __device__ __forceinline__ void write(int head, int token, float share, int column, float (&x)[4]) const {
        const any::ForwardOutputs& to = params.to;
        const int left = params.head_dim_v - column;
        float* const sums = to.sums<float>(to.row(place.batch, head, token)) + column;
        if (!to.piece.is_first) add_from(x, sums, share, params.has_quads, left);
        if (!to.piece.is_last)
            write_floats(x, sums, params.has_quads, left);
        else
            write_elements<C::dtype>(
                x, any::row_of<typename C::Element>(to.out, place.batch, head, token) + column * to.out.column,
                to.out.column, params.has_quads, left);
    }

    // A part of a row.
    __device__ __forceinline__ void write_part(const any::RowState<float>& state) const {
        const size_t tile_rows = size_t(params.layout.block_q) << place.tile.bits;
        const size_t first = size_t(place.task.part) * tile_rows + place.first_row + warp_row;
        const float factor = state.l == 0 ? 0 : 1 / state.l;
        if (lane < C::warp_rows && place.column_part == 0) {
            params.parts.lse[first + lane] = state.l == 0 ? -INFINITY : state.m + logf(state.l);
            params.parts.top[first + lane] = state.top;
        }
        each_row([&](int row) {
            float* const to = params.parts.out + (first + row) * params.head_dim_v;
            each_quad(row, __shfl_sync(~0u, factor, row), [&](int column, float(&x)[4]) {
                write_floats(x, to + column, params.head_dim_v % 4 == 0, params.head_dim_v - column);
            });
        });
    }

    template <class Body>
    __device__ __forceinline__ static void each_row(Body body) {
#pragma unroll 1
        for (int row = 0; row < C::warp_rows; ++row) body(row);
    }
    // body(first column of out, sums times the factor) for a lane's fours of columns of a row. Where a row saw nothing
    // the factor is 0, and so are its sums.
    template <class Body>
    __device__ __forceinline__ void each_quad(int row, float factor, Body body) const {
#pragma unroll
        for (int column = 4 * lane; column < C::part_columns; column += 128) {
            if (column >= place.value_columns(params)) continue;
            float x[4];
            ptx::load_shared(x, Sums::at(sums, warp_row + row, column));
            x[0] *= factor, x[1] *= factor, x[2] *= factor, x[3] *= factor;
            body(place.first_column() + column, x);
        }
    }
};

// ---- kernel ----
template <class C>
__global__ void __launch_bounds__(threads, C::ctas) block_forward_kernel(const __grid_constant__ ForwardParams params) {
    if constexpr (!is_turing || runs_on_turing<C::dtype, C::shared_bytes>)
        Forward<C>(params, ptx::shared_address(ptx::swizzled_shared<uint8_t>())).run();
}

// ---- launch ----
template <class C>
void launch_forward(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    ForwardParams params{.tile = any::TileRows(args.tasks)};
    params.q = args.q, params.k = args.k, params.v = args.v;
    params.k_scales = args.k_scales, params.v_scales = args.v_scales;
    params.layout = args.layout;
    params.tasks = args.tasks;
    params.to = any::make_outputs<float>(args);
    params.parts = any::Partials<float>::at(args.workspace, p, args.layout, args.tasks);
    params.heads_q = int(p.heads_q), params.group = int(p.group());
    params.head_dim = int(p.head_dim), params.head_dim_v = int(p.head_dim_v);
    params.row_parts = args.layout.block_q * args.tasks.tile_heads / C::block_q;
    const auto key_is_wide = [](const TensorView& x, int columns) {
        return C::is_float8 ? any::reads_together(x, columns, C::Rows::in_chunk) : is_wide(x, C::element_bytes);
    };
    params.q_is_wide = is_wide(args.q, C::element_bytes);
    params.k_is_wide = key_is_wide(args.k, params.head_dim), params.v_is_wide = key_is_wide(args.v, params.head_dim_v);
    params.has_quads = has_quads(args.out, C::element_bytes) && p.head_dim_v % 4 == 0;
    const double scale = p.softcap != 0 ? p.softcap : p.scale;
    params.scale = float(scale), params.scale_log2 = float(scale * M_LOG2E);
    params.has_cap = p.softcap != 0;
    params.into_cap = params.has_cap ? float(p.scale / p.softcap) : 0;
    params.column_parts = any::column_parts<float>(p.head_dim_v);
    const unsigned ctas = unsigned(args.tasks.num_tasks) * unsigned(params.row_parts * params.column_parts);
    runtime::launch(block_forward_kernel<C>, {ctas, unsigned(threads), size_t(C::shared_bytes)}, args.stream, params);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::run(const ForwardArgs& args) {
    if (args.problem->float8_cache)
        launch_forward<ForwardConfig<D, HeadDim, HeadDimV, BlockQ, Splits, true>>(args);
    else
        launch_forward<ForwardConfig<D, HeadDim, HeadDimV, BlockQ, Splits, false>>(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_forward_kernel<ForwardConfig<D, HeadDim, HeadDimV, BlockQ, Splits, false>>, shared_bytes);
    runtime::prepare(block_forward_kernel<ForwardConfig<D, HeadDim, HeadDimV, BlockQ, Splits, true>>, shared_bytes);
}

}  // namespace spattn::sm80
