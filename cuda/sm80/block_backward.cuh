// SPDX-License-Identifier: MIT
//
//     by key     sT = k qT,  pT = exp2(scale_log2 sT - lse),  dv += pT dout;  dpT = v doutT,  dk += dsT q
//     by query   s and dp once more,  dq += ds k
//
// over the blocks of a layout, in any order of tokens. Each sum has one owner and one order, so that bits are the same
// in every call, for seven products where sums of dq in memory would need five; with head_dim above 128 registers hold
// one sum, and dk and dv are made by a walk each.
//
//   grid      a CTA owns 64 tokens of a task's block, keys or queries, 16 a warp, and meets 64 of the other axis a
//             step, or 32 where registers or shared memory have no room for more. Own tokens are the rows of all
//             products: p and ds are a operands as they stand
//   columns   of a sum above 256 are another CTA's, which makes the same p or ds: registers have no room for more. Own
//             rows of 1,024 bytes leave an SM of Hopper room for one CTA, but for that of dv. Where shared memory has none
//             rows come a panel of 256 bytes at a time, own ones beside those of the step, and again in each step:
//             products read one while the next is on its way
//   copies    by token (sm80/tile.cuh). The second operand of a step, v or dout, is free after the sum of p, and is
//             fetched under the sum of ds; the first has two tiles where there is room
//   isolation p and ds are 0 where a pair is not kept, but 0 * NaN is NaN: rows whose sums are not finite are made
//             again by their warp from kept pairs alone
//   repeated  layouts may list queries in tiles beside their homes. The walk by query of such is the plain one of `any`
//
// Measured (H200, bf16, head_dim 128, L2 cold, TFLOP/s of 10 pairs d, whatever is made twice, 2026-11): full_16k 192,
// dilated_16k 35, longnet_128k 115, strided_16k 40. Own tiles of 16 rows a warp read shared memory twice as often as
// those of 32 would. float32 by TF32, 16 heads: full_4k 80, window1k_16k 71, at head_dim 64 79 and 68; split (as of
// sm80/block_forward.cuh): 41 and 38, at head_dim 64 43 and 39, where plain float32 kernels reach 13, and torch's
// memory-efficient attention 37 on full_4k in an earlier run; at head_dim 256 51 and 48, split 24 and 23, where plain ones
// reach 10. Head_dim 512, 8 heads on 4: causal_16k 80, where plain kernels reach 6.
// By panels it reached 66 there, where fetching own rows again keeps L2 busy, and 71 with all panels of own rows in shared
// memory, as Hopper has it: one CTA an SM has none to hide its waits for each panel. Float32 at head_dim 256 reached 30 and
// 18 by panels, split 17 and 11.
#pragma once

#include <algorithm>
#include <type_traits>

#include "any/block_backward.h"
#include "any/gradients.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"
#include "sm80/block_backward.h"
#include "sm80/block_backward_added.h"
#include "sm80/tile.cuh"
#include "sm80/turing.h"
#include "tile/softmax.cuh"

namespace spattn::sm80 {

// What a walk makes: gradients of its own tokens, or also terms of dq that it adds in memory (block_backward_added.cuh).
enum class Sums { dq, dk, dv, dk_dv, all };

// ---- configuration ----
// `first` operands make s: q and k; `second` ones dp: dout and v.
template <Dtype D, int HeadDim, int HeadDimV, Sums S, bool IsRoomy, bool Splits>
struct BackwardConfig {
    static constexpr Dtype dtype = D;
    static constexpr bool is_float32 = D == Dtype::f32, splits = Splits;
    using Element = typename tile::Element<D>::type;
    static constexpr int element_bytes = sizeof(Element);
    using Rows = ElementRows<D>;
    using Kernel = BlockBackward<D, HeadDim, HeadDimV, 64, Splits>;
    static constexpr bool by_query = S == Sums::dq, adds_dq = S == Sums::all;
    static constexpr bool has_dp = S != Sums::dv, sums_p = S == Sums::dv || S == Sums::dk_dv || adds_dq;
    using Added = BlockBackwardAdded<D, HeadDim, HeadDimV, 64>;
    static constexpr int own_rows = 64, step = adds_dq ? 64 : Kernel::step(IsRoomy);
    static constexpr int column_parts = Kernel::column_parts;
    static constexpr int columns = Kernel::part_columns, columns_p = HeadDimV / column_parts;  // of sums of ds, of p
    static_assert(column_parts == 1 || columns == any::Shape<float>::most_columns, "grids have such parts");
    using First = SharedTile<HeadDim, HeadDim, element_bytes>;
    using PartOfFirst = SharedTile<columns, HeadDim, element_bytes>;
    static constexpr int second_columns = has_dp ? HeadDimV : columns_p;  // what meets p alone is a part
    using Second = SharedTile<second_columns, second_columns, element_bytes>;
    static constexpr int first_tiles = adds_dq ? Added::first_tiles(IsRoomy) : Kernel::first_tiles(IsRoomy);
    static constexpr int first_bytes = First::bytes(step), second_bytes = Second::bytes(step);
    static constexpr int own_first_bytes = First::bytes(own_rows);
    static constexpr int own_bytes = own_first_bytes + (has_dp ? Second::bytes(own_rows) : 0);
    // Rows in panels. What a step brings, in units that two tiles have by turns: panels for dp, then for s, with those of
    // own rows; and panels of the part that ds or p is multiplied by.
    static constexpr bool in_panels = Kernel::in_panels(IsRoomy);
    using Panel = SharedTile<Kernel::Columns::panel, Kernel::Columns::panel, element_bytes>;
    static constexpr int panels = Kernel::Columns::panels, units_of_dp = has_dp ? panels : 0;
    static constexpr int units_of_rows = units_of_dp + panels, units = units_of_rows + Kernel::Columns::part_panels;
    static constexpr int own_panel_bytes = Panel::bytes(own_rows), unit_bytes = own_panel_bytes + Panel::bytes(step);
    // ds of a step as [key][query], and what multiplies it: 64 columns of own rows.
    using DsTile = SharedTile<64>;
    using OwnColumns = SharedTile<64, HeadDim, element_bytes>;
    static constexpr int ds_bytes = adds_dq ? DsTile::bytes(own_rows) : 0;
    static constexpr int tile_bytes =
        in_panels ? 2 * unit_bytes : own_bytes + first_tiles * first_bytes + second_bytes + ds_bytes;
    static constexpr int stats_bytes = 2 * step * int(sizeof(float));
    static constexpr int sums_bytes = own_rows * 4 * ((has_dp ? columns : 0) + (sums_p ? columns_p : 0));
    static constexpr int shared_bytes = std::max(tile_bytes + first_tiles * stats_bytes, sums_bytes);
    // A thread's bits of a step.
    using MaskWord = std::conditional_t<step == 64, uint32_t, uint16_t>;
    static constexpr int ctas = column_parts > 1 && has_dp && IsRoomy ? 1 : HeadDim <= 64 && !is_float32 ? 3 : 2;
    static_assert(HeadDimV <= HeadDim, "value_in_key adds dv to dk's columns");
};

struct GradientParams : any::BackwardParams<float> {
    explicit GradientParams(const any::BackwardParams<float>& params) : any::BackwardParams<float>(params) {}
    bool q_is_wide, k_is_wide, v_is_wide, dout_is_wide;
    bool has_quads;  // four columns of each gradient are one aligned word
    float scale_log2, into_cap;
    float* added;  // where walks add to dq: sums of 64 queries each, as fragments have them
};

// ---- which pairs a task has, step after step ----
// Masks and sets of live tokens have words for 64 tokens, of which a step may be a half.
template <bool ByQuery, int Step>
struct Steps {
    static constexpr int steps_of_word = 64 / Step;
    const GradientParams& params;
    const Task& task;                  // in memory: its fields are asked for at the ends
    const int first_row, batch, head;  // first_row: of the CTA, in its block; head: of keys where rows are keys
    int head_q, part = 0, parts;       // part: of a block that is larger than a step
    any::ListWalk walk{};

    __device__ Steps(const GradientParams& params, unsigned index)
        : params(params),
          task(params.tasks.tasks[index / unsigned(params.row_parts)]),
          first_row(int(index % unsigned(params.row_parts)) * 64),
          batch(int(task.head / (ByQuery ? params.heads_q : params.heads_kv))),
          head(int(task.head % (ByQuery ? params.heads_q : params.heads_kv))),
          head_q(ByQuery ? head : head * params.group),
          parts((ByQuery ? params.layout.block_k : params.layout.block_q) / Step) {
        open(task.skip, task.take);
    }

    __device__ int head_kv() const { return ByQuery ? head / params.group : head; }
    __device__ int kind() const { return params.layout.kind_of_head[batch * params.heads_q + head_q]; }
    __device__ const ListsView& lists() const { return ByQuery ? params.layout.by_query : params.layout.by_key; }
    __device__ void open(int skip, int take) {
        const Slice slice = lists().slices[int64_t(kind()) * lists().rows + task.row];
        walk = {lists().runs + slice.begin, lists().runs + slice.end, skip, take, 0, full_block};
    }
    // The next block; by key, also of the group's next head.
    __device__ bool next_block() {
        while (!walk.next()) {
            if (ByQuery || walk.take == 0 || (head_q + 1) % params.group == 0) return false;
            ++head_q;
            open(walk.skip, walk.take);
        }
        return true;
    }
    __device__ bool next() {
        if (++part < parts) return true;
        part = 0;
        return next_block();
    }

    __device__ any::OwnTokens written_tokens() const {
        const LayoutView& layout = params.layout;
        return ByQuery ? any::own_tokens_of(layout.queries, layout.block_q, layout.seq_q, task.row)
                       : any::own_tokens_of(layout.keys, layout.block_k, layout.seq_k, task.row);
    }
    // The tokens of the block at hand.
    __device__ any::TileTokens tokens() const {
        const LayoutView& layout = params.layout;
        return ByQuery ? any::tokens_of(layout.keys, layout.block_k, layout.seq_k, walk.block)
                       : any::tokens_of(layout.queries, layout.block_q, layout.seq_q, walk.block);
    }
    // Those of the step's tokens that anything sees, or that see anything.
    __device__ uint64_t live() const {
        const LiveView& live = ByQuery ? params.layout.live_keys : params.layout.live_queries;
        const int rows = ByQuery ? params.layout.by_key.rows : params.layout.by_query.rows;
        const int set = live.set_of ? live.set_of[int64_t(kind()) * rows + walk.block] : all_live;
        if (set == all_live) return ~uint64_t(0);
        const uint64_t word = live.sets[set * live.words + part / steps_of_word];
        const int skip = part % steps_of_word * Step;
        return word >> skip | word << (64 - skip) % 64;  // in turn, so that all of the step's are the first
    }
    // A thread's word of the step's mask, for the 16 own rows from `row` on.
    __device__ uint32_t mask_word(int row) const {
        const LayoutView& layout = params.layout;
        const int own_block = ByQuery ? layout.block_q : layout.block_k;
        const auto* words = reinterpret_cast<const uint32_t*>(layout.masks + int64_t(walk.mask) * layout.mask_words +
                                                              (ByQuery ? layout.block_q * layout.block_k / 64 : 0));
        const uint32_t word =
            __ldg(words + part / steps_of_word * 2 * own_block + (first_row + row) / 16 * 32 + threadIdx.x % 32);
        return word >> part % steps_of_word * (Step / 2);
    }
};

// ---- repair: one warp makes a row of gradients from the pairs that it keeps, and from nothing else ----
template <Dtype D, int Columns, bool ByQuery>
struct GradientRepair {
    using Element = any::ElementOf<D>;
    static constexpr int columns = Columns / 32;  // a lane's, 32 apart

    const GradientParams& params;
    const int first_column, lane = threadIdx.x % 32;
    Steps<ByQuery, step_tokens> steps;
    float dfirst[columns] = {}, dv[columns] = {};  // dq, or dk

    // index: of the CTA, as of Steps; first_column: of the sums.
    __device__ GradientRepair(const GradientParams& params, unsigned index, int first_column)
        : params(params), first_column(first_column), steps(params, index) {}

    // `row` of the CTA's, into dfirst and dv.
    __device__ __noinline__ void run(int row) {
        const int own_place = steps.first_row + row, own = steps.written_tokens().at(own_place);
        const LayoutView& layout = params.layout;
        const int block = ByQuery ? layout.block_k : layout.block_q;
        while (own != no_token && steps.next_block()) {
            const any::TileTokens tokens = steps.tokens();
            const uint64_t* words = layout.masks + int64_t(steps.walk.mask) * layout.mask_words;
            for (int base = 0; base < block; base += 32) {
                const int query = ByQuery ? own_place : base + lane, key = ByQuery ? base + lane : own_place;
                const int bit = tile::key_fragment_bit(query, key, layout.block_k);
                const bool kept = steps.walk.mask == full_block || (words[bit / 64] >> (bit % 64) & 1);
                for (unsigned bits = __ballot_sync(~0u, kept); bits; bits &= bits - 1) {
                    const int other = tokens.at(base + __ffs(int(bits)) - 1);
                    pair(ByQuery ? own : other, ByQuery ? other : own);
                }
            }
        }
    }

    __device__ void pair(int64_t query, int64_t key) {
        const auto* q = any::row_of<Element>(params.q, steps.batch, steps.head_q, query);
        const auto* k = any::row_of<Element>(params.k, steps.batch, steps.head_kv(), key);
        const auto* v = any::row_of<Element>(params.v, steps.batch, steps.head_kv(), key);
        const auto* dout = any::row_of<Element>(params.dout, steps.batch, steps.head_q, query);
        float s = dot(q, params.q.column, k, params.k.column, params.head_dim), slope = 1;
        const float dp = dot(dout, params.dout.column, v, params.v.column, params.head_dim_v);
        if (params.softcap != 0) s = tile::cap(s, params.into_cap), slope = 1 - s * s;
        const int64_t row = params.row_q(steps.batch, steps.head_q, query);
        const float p = ptx::exp2_approx(s * params.scale_log2 - params.space.lse[row] * float(M_LOG2E));
        const float ds = p * slope * (dp - params.space.delta[row]);
        for (int i = 0; i < columns; ++i) {
            const int column = first_column + lane + 32 * i;
            if (column < params.head_dim_v) dv[i] = fmaf(p, any::to_real(dout[column * params.dout.column]), dv[i]);
            if (column < params.head_dim)
                dfirst[i] = fmaf(ds, any::to_real(ByQuery ? k[column * params.k.column] : q[column * params.q.column]),
                                 dfirst[i]);
        }
    }

    __device__ float dot(const Element* a, int64_t a_column, const Element* b, int64_t b_column, int width) const {
        float sum = 0;
        for (int column = lane; column < width; column += 32)
            sum = fmaf(any::to_real(a[column * a_column]), any::to_real(b[column * b_column]), sum);
        for (int n = 16; n; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
        return sum;
    }
};

// ---- the CTA ----
template <class C>
struct Backward {
    using StepsOf = Steps<C::by_query, C::step>;
    using DsSums = SumTile<C::columns>;
    using PSums = SumTile<C::columns_p>;
    using MaskWord = typename C::MaskWord;
    using Rows = typename C::Rows;
    using Probabilities = uint32_t[1][C::step / (2 * tile::operand_values<C::dtype>)][4];

    const GradientParams& params;
    const uint32_t own_first, own_second, first, second, ds_at, stats;  // shared addresses
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, first_column;
    StepsOf steps;
    float offset[2], delta[2];  // of this thread's rows, where they are queries
    float sums_p[1][C::sums_p ? C::columns_p / 2 : 2], sums_ds[1][C::has_dp ? C::columns / 2 : 2];

    __device__ Backward(const GradientParams& params, uint32_t shared)
        : params(params),
          own_first(shared),
          own_second(shared + C::own_first_bytes),
          first(shared + C::own_bytes),
          second(first + C::first_tiles * C::first_bytes),
          ds_at(second + C::second_bytes),
          stats(shared + C::tile_bytes),
          first_column(C::column_parts == 1 ? 0 : int(blockIdx.x % unsigned(params.column_parts)) * C::columns),
          steps(params, index_of_rows(params)) {}

    // Without the part of the columns.
    __device__ static unsigned index_of_rows(const GradientParams& params) {
        return C::column_parts == 1 ? blockIdx.x : blockIdx.x / unsigned(params.column_parts);
    }

    __device__ __forceinline__ void run() {
        clear(sums_p), clear(sums_ds);
        if constexpr (C::in_panels)
            run_in_panels();
        else
            run_whole();
        finish();
    }

    __device__ __forceinline__ void run_whole() {
        bool more = steps.next_block();
        TokenRange range{};
        if (more) {
            load_own();
            read_own_stats();
            range = step_range();
            load_first(range, 0);
            load_second(range);
        }
        ptx::cp_async_commit();
        if constexpr (C::is_float32 && !C::splits) {
            ptx::cp_async_wait<0>();
            round_own_chunks<C::own_rows, typename C::First>(own_first);
            if constexpr (C::has_dp) round_own_chunks<C::own_rows, typename C::Second>(own_second);
        }
        for (int turn = 0; more; turn = (turn + 1) % C::first_tiles) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // the step is there, and everyone is done with the one before
            const bool is_masked = steps.walk.mask != full_block;
            const MaskWord word = is_masked ? MaskWord(steps.mask_word(warp_row)) : 0;
            float* const added = added_to();
            more = steps.next();  // from here on what is to be loaded; this step's word is at hand
            if (more) range = step_range();
            if (C::first_tiles == 2 && more) load_first(range, 1 - turn);
            ptx::cp_async_commit();
            const uint32_t at = first + turn * C::first_bytes;
            Probabilities p, ds;
            make_gradients(at, turn, is_masked, word, p, ds);
            if constexpr (C::adds_dq) store_ds(ds[0]);
            if constexpr (C::sums_p) add_to<typename C::Second>(p, second, sums_p);
            __syncthreads();  // everyone is done with the second operand, and ds is there
            if (more) load_second(range);
            ptx::cp_async_commit();
            if constexpr (C::adds_dq) add_queries(added);
            if constexpr (C::has_dp) add_to<typename C::PartOfFirst>(ds, at + first_column * C::element_bytes, sums_ds);
            if constexpr (C::first_tiles == 1) {
                __syncthreads();  // everyone is done with the first operand
                if (more) load_first(range, 0);
                ptx::cp_async_commit();
            }
        }
    }

    __device__ __forceinline__ void run_in_panels() {
        static_assert(C::units % 2 == 0, "in every step the same tile has a unit");
        bool more = steps.next_block();
        TokenRange range{};
        if (more) {
            read_own_stats();
            range = step_range();
            load_unit(0, range);
        }
        ptx::cp_async_commit();
        while (more) {
            const bool is_masked = steps.walk.mask != full_block;
            const MaskWord word = is_masked ? MaskWord(steps.mask_word(warp_row)) : 0;
            float s[1][C::step / 2], dp[1][C::step / 2];
            clear(s), clear(dp);
            Probabilities p, ds;
#pragma unroll
            for (int unit = 0; unit < C::units; ++unit) {
                if (unit == C::units - 1) {
                    more = steps.next();
                    if (more) range = step_range();
                }
                ptx::cp_async_wait<0>();
                __syncthreads();  // the unit is there, and everyone is done with the one before
                if (more) load_unit((unit + 1) % C::units, range);
                ptx::cp_async_commit();
                if (unit < C::units_of_rows) {
                    add_row_products<C::dtype, typename C::Panel, typename C::Panel, C::splits, true>(
                        own_panel(unit), warp_row, step_panel(unit), unit < C::units_of_dp ? dp : s);
                    continue;
                }
                if (unit == C::units_of_rows) make_gradients(stats, is_masked, word, s, dp, p, ds);
                const int column = (unit - C::units_of_rows) * C::Panel::columns;
                if constexpr (C::has_dp)
                    add_to<typename C::Panel>(ds, step_panel(unit), sums_ds, column);
                else
                    add_to<typename C::Panel>(p, step_panel(unit), sums_p, column);
            }
        }
    }
    __device__ __forceinline__ uint32_t own_panel(int unit) const { return own_first + unit % 2 * C::unit_bytes; }
    __device__ __forceinline__ uint32_t step_panel(int unit) const { return own_panel(unit) + C::own_panel_bytes; }
    __device__ __forceinline__ void load_unit(int unit, const TokenRange& range) {
        const bool has_own = unit < C::units_of_rows, is_second = has_own ? unit < C::units_of_dp : !C::has_dp;
        const int panel = has_own ? unit % C::panels : unit - C::units_of_rows;
        const int column = (has_own ? 0 : first_column) + panel * C::Panel::columns;
        Rows own = is_second ? own_second_rows() : own_first_rows(), rows = is_second ? second_rows() : first_rows();
        own.skip_columns(column), rows.skip_columns(column);
        if (has_own) load_rows<C::own_rows, typename C::Panel>(own_panel(unit), own, own_range());
        load_rows<C::step, typename C::Panel>(step_panel(unit), rows, range);
        if (unit == 0) load_stats(range, 0);
    }

    // ---- copies ----
    __device__ __forceinline__ Rows queries(const TensorView& x, int columns, bool is_wide) const {
        return Rows(x, steps.batch, steps.head_q, columns, is_wide);
    }
    __device__ __forceinline__ Rows keys(const TensorView& x, int columns, bool is_wide) const {
        return Rows(x, steps.batch, steps.head_kv(), columns, is_wide);
    }
    __device__ __forceinline__ Rows q() const { return queries(params.q, params.head_dim, params.q_is_wide); }
    __device__ __forceinline__ Rows dout() const {
        return queries(params.dout, params.head_dim_v, params.dout_is_wide);
    }
    __device__ __forceinline__ Rows k() const { return keys(params.k, params.head_dim, params.k_is_wide); }
    __device__ __forceinline__ Rows v() const { return keys(params.v, params.head_dim_v, params.v_is_wide); }
    __device__ __forceinline__ Rows own_first_rows() const { return C::by_query ? q() : k(); }
    __device__ __forceinline__ Rows own_second_rows() const { return C::by_query ? dout() : v(); }
    __device__ __forceinline__ Rows first_rows() const { return C::by_query ? k() : q(); }
    __device__ __forceinline__ Rows second_rows() const { return C::by_query ? v() : dout(); }

    // As they stand in the block, also those that are away: no mask keeps a pair of these.
    __device__ __forceinline__ TokenRange own_range() const { return {steps.written_tokens().tokens, steps.first_row}; }
    __device__ __forceinline__ void load_own() {
        load_rows<C::own_rows, typename C::First>(own_first, own_first_rows(), own_range());
        if constexpr (C::has_dp)
            load_rows<C::own_rows, typename C::Second>(own_second, own_second_rows(), own_range());
    }
    __device__ __forceinline__ void read_own_stats() {
        if constexpr (C::by_query)
            for (int h = 0; h < 2; ++h) {
                const int row_token = own_range().at(warp_row + lane / 4 + 8 * h);
                const int64_t row = params.row_q(steps.batch, steps.head_q, max(row_token, 0));
                offset[h] = offset_of(params.space.lse[row]);
                delta[h] = params.space.delta[row];
            }
    }

    // p = exp2(scale_log2 s + offset)
    __device__ __forceinline__ static float offset_of(float lse) { return tile::lift<C::dtype> - lse * float(M_LOG2E); }

    // Tokens that take part in nothing are 0: what they hold would reach every row, which would all need a repair.
    __device__ __forceinline__ TokenRange step_range() const {
        return {steps.tokens(), steps.part * C::step, steps.live()};
    }
    __device__ __forceinline__ void load_first(const TokenRange& range, int turn) {
        load_rows<C::step, typename C::First>(first + turn * C::first_bytes, first_rows(), range);
        load_stats(range, turn);
    }
    __device__ __forceinline__ void load_stats(const TokenRange& range, int turn) {
        if (C::by_query || threadIdx.x >= 2 * C::step) return;
        const int query = range.at(int(threadIdx.x) % C::step);
        const float* from = threadIdx.x < C::step ? params.space.lse : params.space.delta;
        from += params.row_q(steps.batch, steps.head_q, max(query, 0));
        ptx::cp_async_4(stats + turn * C::stats_bytes + threadIdx.x * sizeof(float), from, query == no_token ? 0 : 4);
    }
    __device__ __forceinline__ void load_second(const TokenRange& range) {
        Rows rows = second_rows();
        if constexpr (!C::has_dp) rows.skip_columns(first_column);
        load_rows<C::step, typename C::Second>(second, rows, range);
    }

    // ---- products ----
    // The step's columns are the sums' from `column` on.
    template <class Tile, int Values>
    __device__ __forceinline__ static void add_to(const Probabilities& p, uint32_t step, float (&sums)[1][Values],
                                                  int column = 0) {
        if constexpr (C::is_float32)
            FloatProduct<Tile, C::splits>(step).add(p, sums, column);
        else
            add_product<C::dtype, Tile>(p, step, sums, column);
    }

    // dp comes first, so that each score becomes p and ds at once and no third tile is held.
    __device__ __forceinline__ void make_gradients(uint32_t at, int turn, bool is_masked, MaskWord word,
                                                   Probabilities& p, Probabilities& ds) {
        float s[1][C::step / 2], dp[1][C::step / 2];
        using First = typename C::First;
        using Second = typename C::Second;
        if constexpr (C::has_dp) multiply_rows<C::dtype, Second, Second, C::splits>(own_second, warp_row, second, dp);
        multiply_rows<C::dtype, First, First, C::splits>(own_first, warp_row, at, s);
        make_gradients(stats + turn * C::stats_bytes, is_masked, word, s, dp, p, ds);
    }
    __device__ __forceinline__ void make_gradients(uint32_t turn_stats, bool is_masked, MaskWord word,
                                                   float (&s)[1][C::step / 2], float (&dp)[1][C::step / 2],
                                                   Probabilities& p, Probabilities& ds) const {
        if (params.softcap != 0)
            multiply_by_dp<true>(turn_stats, s[0], dp[0]);
        else
            multiply_by_dp<false>(turn_stats, s[0], dp[0]);
        if (is_masked) tile::keep(s[0], word);
        if constexpr (C::sums_p) tile::pack_tile<C::dtype>(s[0], p[0]);
        if constexpr (C::has_dp) {
            if (is_masked) tile::keep(dp[0], word);
            tile::pack_tile<C::dtype>(dp[0], ds[0]);
        }
    }

    // s becomes p, and dp ds.
    template <bool HasCap>
    __device__ __forceinline__ void multiply_by_dp(uint32_t turn_stats, float (&s)[C::step / 2],
                                                   float (&dp)[C::step / 2]) const {
        constexpr float ds_scale = tile::ds_lift<C::dtype> * tile::unlift<C::dtype>;
        float offsets[2], deltas[2];  // of two neighbouring columns
#pragma unroll
        for (int i = 0; i < C::step / 2; ++i) {
            if (!C::by_query && i % 4 == 0) {
                read_stats(turn_stats, i, offsets);
                offsets[0] = offset_of(offsets[0]), offsets[1] = offset_of(offsets[1]);
                if (C::has_dp) read_stats(turn_stats + C::step * sizeof(float), i, deltas);
            }
            const int which = C::by_query ? tile::row_of(i) : i % 2;
            float slope = 1;
            if constexpr (HasCap) s[i] = tile::cap(s[i], params.into_cap), slope = 1 - s[i] * s[i];
            s[i] = ptx::exp2_approx(fmaf(s[i], params.scale_log2, C::by_query ? offset[which] : offsets[which]));
            if constexpr (C::has_dp)
                dp[i] = (HasCap ? s[i] * slope : s[i]) *
                        (ds_scale * (dp[i] - (C::by_query ? delta[which] : deltas[which])));
        }
    }

    // ---- dq, a step's terms of which are added in memory ----
    // Where the sums of the step's queries stand.
    __device__ __forceinline__ float* added_to() const {
        if constexpr (!C::adds_dq) return nullptr;
        const LayoutView& layout = params.layout;
        const int64_t plane = int64_t(steps.batch) * params.heads_q + steps.head_q;
        const int64_t tile = (plane * layout.by_query.rows + steps.walk.block) * steps.parts + steps.part;
        return params.added + tile * (64 * C::First::columns);
    }
    // What all CTAs added becomes the sums of own queries.
    __device__ __forceinline__ void finish_added() {
        const int64_t tile =
            (int64_t(steps.task.head) * params.layout.by_query.rows + steps.task.row) * params.row_parts;
        const float* from = params.added + (tile + steps.first_row / 64) * (64 * C::columns) + warp_row * C::columns;
#pragma unroll
        for (int i = 0; i < C::columns / 2; ++i) sums_ds[0][i] = __ldcs(from + 32 * i + lane);
        finish();
    }
    // Terms of dq are sums over keys, which warps have apart: ds goes through shared memory.
    __device__ __forceinline__ void store_ds(const uint32_t (&ds)[C::step / 16][4]) const {
        const int row = warp_row + lane / 4;
#pragma unroll
        for (int i = 0; i < C::step / 4; ++i) {  // words: rows 8 apart, then columns 8 apart
            const uint32_t chunk = C::DsTile::at(ds_at, row + i % 2 * 8, i / 2);
            ptx::store_shared(chunk + lane % 4 * 4, ds[i / 4][i % 4]);
        }
    }
    // Each warp has 16 of the queries. Sums stand in memory as fragments do.
    __device__ __forceinline__ void add_queries(float* to) const {
        const uint32_t from = C::DsTile::at(ds_at, lane % 8 + lane / 16 * 8, warp_row / 8 + lane / 8 % 2);
        uint32_t words[1][4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::load_matrix_x4_transposed(words[0][k], from + k * C::DsTile::bytes16);
#pragma unroll
        for (int column = 0; column < C::First::columns; column += 64) {
            float sums[1][32] = {};
            add_product<C::dtype, typename C::OwnColumns>(words, own_first + column * C::element_bytes, sums);
            float* const at = to + warp_row * C::First::columns + 16 * column + lane;
#pragma unroll
            for (int i = 0; i < 32; ++i) ptx::add_global(at + 32 * i, sums[0][i]);
        }
    }

    // What two neighbouring columns have: the step's tokens are the columns of s.
    __device__ __forceinline__ void read_stats(uint32_t from, int i, float (&x)[2]) const {
        ptx::load_shared(x, from + uint32_t(tile::fragment_column(lane, i) * sizeof(float)));
    }

    // ---- the end ----
    __device__ __forceinline__ void finish() {
        float is_nan[2], also[2] = {0, 0};
        tile::find_not_finite(sums_ds[0], is_nan);
        if constexpr (C::sums_p) tile::find_not_finite(sums_p[0], also);
        is_nan[0] += also[0], is_nan[1] += also[1];
        const unsigned odd = __all_sync(~0u, is_nan[0] == 0 && is_nan[1] == 0)
                                 ? 0
                                 : tile::rows_with(!(is_nan[0] == 0), !(is_nan[1] == 0));
        __syncthreads();  // everyone is done with tiles and row sums, where sums are staged
        if constexpr (C::has_dp) stage<DsSums>(own_first, sums_ds, tile::ds_unlift<C::dtype>);
        if constexpr (C::sums_p) stage<PSums>(p_at(), sums_p, tile::unlift<C::dtype>);
        __syncwarp();  // a row's sums are there before its repair overwrites them
#pragma unroll 1
        for (unsigned bits = odd; bits; bits &= bits - 1) repair(warp_row + __ffs(int(bits)) - 1);
        __syncwarp();  // all sums of the warp's rows are there
        const any::OwnTokens own = steps.written_tokens();
#pragma unroll 1
        for (int row = warp_row; row < warp_row + 16; ++row) {
            const int token = own.at(steps.first_row + row);
            if (steps.task.part == whole_row && token == no_token) continue;
#pragma unroll
            for (int column = 4 * lane; column < C::columns; column += 128) {
                float ds[4] = {}, p[4] = {};
                if constexpr (C::has_dp) ptx::load_shared(ds, DsSums::at(own_first, row, column));
                if constexpr (C::sums_p)
                    if (column < C::columns_p) ptx::load_shared(p, PSums::at(p_at(), row, column));
                const int to = first_column + column;
                steps.task.part == whole_row ? store(token, to, ds, p) : store_part(row, to, ds, p);
            }
        }
    }
    template <class Sums, int Values>
    __device__ __forceinline__ void stage(uint32_t to, const float (&sums)[1][Values], float factor) const {
        if constexpr (C::is_float32)
            Sums::template stage_float<1>(to, warp_row, sums);
        else
            Sums::template stage<1>(to, warp_row, sums, factor);
    }
    __device__ __forceinline__ uint32_t p_at() const {
        return own_first + (C::has_dp ? C::own_rows * DsSums::row_bytes : 0);
    }

    __device__ __forceinline__ void repair(int row) const {
        GradientRepair<C::dtype, C::columns, C::by_query> repair(params, index_of_rows(params), first_column);
        repair.run(row);
        for (int i = 0; i < C::columns / 32; ++i) {
            const int column = lane + 32 * i;
            if constexpr (C::has_dp) ptx::store_shared(DsSums::at(own_first, row, column), repair.dfirst[i]);
            if constexpr (C::sums_p)
                if (column < C::columns_p) ptx::store_shared(PSums::at(p_at(), row, column), repair.dv[i]);
        }
    }

    // Four columns of a token's gradients: dq or dk, and dv, whichever this walk makes.
    __device__ __forceinline__ void store(int token, int column, float (&ds)[4], float (&p)[4]) const {
        const int head = C::by_query ? steps.head : steps.head_kv();
        const int64_t row =
            C::by_query ? params.row_q(steps.batch, head, token) : params.row_k(steps.batch, head, token);
        const int left_p = params.head_dim_v - column, left = params.head_dim - column;
        if (C::sums_p && left_p > 0 && join(p, params.carried.dv + row * params.head_dim_v + column, left_p) &&
            !params.value_in_key)
            write(p, params.dv, head, token, column, left_p);
        if (!C::has_dp || left <= 0) return;
        float* const carried = (C::by_query ? params.carried.dq : params.carried.dk) + row * params.head_dim + column;
        if (!join(ds, carried, left)) return;
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[e] = params.scale * ds[e] + (params.value_in_key && e < left_p ? p[e] : 0);
        write(ds, C::by_query ? params.dq : params.dk, head, token, column, left);
    }
    // Adds what pieces before left. True where x is final.
    __device__ __forceinline__ bool join(float (&x)[4], float* carried, int left) const {
        if (!params.piece.is_first) add_from(x, carried, 1, params.has_quads, left);
        if (!params.piece.is_last) write_floats(x, carried, params.has_quads, left);
        return params.piece.is_last;
    }
    __device__ __forceinline__ void write(const float (&x)[4], const TensorView& to, int head, int token, int column,
                                          int left) const {
        write_elements<C::dtype>(x, any::row_of<typename C::Element>(to, steps.batch, head, token) + column * to.column,
                                 to.column, params.has_quads, left);
    }

    // A part of keys has dk's columns, then dv's.
    __device__ __forceinline__ void store_part(int row, int column, const float (&ds)[4], const float (&p)[4]) const {
        const bool quads = params.head_dim % 4 == 0 && params.head_dim_v % 4 == 0;
        const int width = C::by_query ? params.head_dim : params.head_dim + params.head_dim_v;
        const int block = C::by_query ? params.layout.block_q : params.layout.block_k;
        float* const to = (C::by_query ? params.space.parts_query : params.space.parts_key) +
                          (int64_t(steps.task.part) * block + steps.first_row + row) * width + column;
        if (C::has_dp && column < params.head_dim) write_floats(ds, to, quads, params.head_dim - column);
        if (C::sums_p && column < params.head_dim_v)
            write_floats(p, to + params.head_dim, quads, params.head_dim_v - column);
    }
};

// ---- kernel ----
template <class C>
__global__ void __launch_bounds__(threads, C::ctas)
    block_backward_kernel(const __grid_constant__ GradientParams params) {
    if constexpr (!is_turing || runs_on_turing<C::dtype, C::shared_bytes>)
        Backward<C>(params, ptx::shared_address(ptx::swizzled_shared<uint8_t>())).run();
}

// ---- launch ----
template <Dtype D, int HeadDim, int HeadDimV, bool IsRoomy, bool Splits>
struct BackwardLaunch {
    using Kernel = BlockBackward<D, HeadDim, HeadDimV, 64, Splits>;
    static constexpr bool joins_dk_dv = Kernel::joins_dk_dv;
    template <Sums S>
    using Config = BackwardConfig<D, HeadDim, HeadDimV, S, IsRoomy, Splits>;
    const BackwardArgs& args;
    GradientParams params;

    explicit BackwardLaunch(const BackwardArgs& args)
        : args(args), params(any::make_params<D>(args, any::MaskOrder::key_fragments)) {
        const Problem& p = *args.problem;
        constexpr int bytes = Kernel::element_bytes;
        params.q_is_wide = is_wide(args.q, bytes), params.k_is_wide = is_wide(args.k, bytes);
        params.v_is_wide = is_wide(args.v, bytes), params.dout_is_wide = is_wide(args.dout, bytes);
        params.has_quads = p.head_dim % 4 == 0 && p.head_dim_v % 4 == 0 && has_quads(args.dq, bytes) &&
                           has_quads(args.dk, bytes) && (p.value_in_key || has_quads(args.dv, bytes));
        const bool has_cap = p.softcap != 0;
        params.scale_log2 = float((has_cap ? p.softcap : p.scale) * M_LOG2E);
        params.into_cap = has_cap ? float(p.scale / p.softcap) : 0;
    }

    template <Sums S>
    void run() {
        launch<Config<S>>(block_backward_kernel<Config<S>>, Config<S>::shared_bytes);
    }
    template <class C>
    void launch(void (*kernel)(GradientParams), int bytes) {
        params.tasks = C::by_query ? args.second_tasks : args.tasks;
        params.row_parts = (C::by_query ? args.layout.block_q : args.layout.block_k) / C::own_rows;
        params.column_parts = any::column_parts<float>(C::has_dp ? params.head_dim : params.head_dim_v);
        const unsigned ctas = unsigned(params.tasks.num_tasks) * unsigned(params.row_parts * params.column_parts);
        runtime::launch(kernel, {ctas, unsigned(threads), size_t(bytes)}, args.stream, params);
    }
    template <Sums S>
    static void prepare() {
        using C = Config<S>;
        static_assert(C::adds_dq || C::shared_bytes <= Kernel::shared_bytes(IsRoomy), "what the host was told");
        runtime::prepare(block_backward_kernel<C>, C::shared_bytes);
    }

    void run_all() {
        any::BlockBackward<D>::rows(args);
        if constexpr (joins_dk_dv) {
            run<Sums::dk_dv>();
        } else {
            run<Sums::dk>();
            run<Sums::dv>();
        }
        any::BlockBackward<D>::join_keys(args);
        if (args.layout.queries.listed && !args.layout.queries.away) {
            any::BlockBackward<D>::by_query(args);
        } else {
            run<Sums::dq>();
            any::BlockBackward<D>::join_queries(args);
        }
        any::BlockBackward<D>::sinks(args);
    }
    static void prepare_all() {
        if constexpr (joins_dk_dv) {
            prepare<Sums::dk_dv>();
        } else {
            prepare<Sums::dk>();
            prepare<Sums::dv>();
        }
        prepare<Sums::dq>();
    }
};

// act(launch's type), roomy where the device has shared memory for that.
template <Dtype D, int HeadDim, int HeadDimV, bool Splits, class Act>
void choose_room(int32_t device, Act act) {
    using Kernel = BlockBackward<D, HeadDim, HeadDimV, 64, Splits>;
    constexpr int least = Kernel::shared_bytes(false), most = Kernel::shared_bytes(true);
    if (least == most || runtime::shared_bytes(device) >= most)
        act(std::type_identity<BackwardLaunch<D, HeadDim, HeadDimV, true, Splits>>{});
    else
        act(std::type_identity<BackwardLaunch<D, HeadDim, HeadDimV, least == most, Splits>>{});
}

struct RunAll {
    const BackwardArgs& args;
    template <class Launch>
    void operator()(std::type_identity<Launch>) const {
        Launch(args).run_all();
    }
};
struct PrepareAll {
    template <class Launch>
    void operator()(std::type_identity<Launch>) const {
        Launch::prepare_all();
    }
};

template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits>
void BlockBackward<D, HeadDim, HeadDimV, Block, Splits>::run(const BackwardArgs& args) {
    choose_room<D, HeadDim, HeadDimV, Splits>(args.device, RunAll{args});
}
template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits>
void BlockBackward<D, HeadDim, HeadDimV, Block, Splits>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    choose_room<D, HeadDim, HeadDimV, Splits>(device, PrepareAll{});
    any::BlockBackward<D>::prepare(device);
}

}  // namespace spattn::sm80
