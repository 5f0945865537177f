// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - m),  out = sum(p v) / sum(p),  lse = scale m + log(sum(p))
//
// over lists of keys that the heads of a group share: 64 query rows, the heads of one query or of those that have a
// list in common, meet the keys of their list 32 or 64 at a time. Values may be the first columns of keys, which then
// come once.
//
//   grid      tiles of 64 rows in turn; those of a list follow each other, so that L2 has its keys
//   parts     as in ../sm90/gather_forward.cuh: processors have equal shares of all lists where whole ones would keep
//             some waiting
//   a step    the next keys are on their way while scores, p and p v of these are made:
//
//               find     | keys 1      | keys 2
//               copy     | keys 1      | keys 2
//               products | q k0, p0 v0 | q k1, p1 v1
//
//   warps     four, of 16 rows. More than 256 columns of out do not fit a warp's registers: eight warps then have
//             half of them each, and make scores twice, which costs a half more than making them once
//   softmax   as in block_forward.cuh
//   float8    of caches: what k and v stand for is made by the threads that bring them, which wait for them first
//   isolation what a list does not name is not read; absent keys are rows of zeros whose scores are masked
//
// Measured (H200, bf16, L2 cold, TFLOP/s of 2 heads queries list (head_dim + head_dim_v), 2026-11, GEMM 793 in the same
// run): 128 heads, 576/512, lists of 2,048 among 16K keys 129, lists of 512 among 4K 114; 16 heads of 128 37, 64 heads
// 147, 64 heads of 256 150. No older GPU was tried.
#pragma once

#include <cmath>
#include <type_traits>

#include "any/join_lists.cuh"
#include "any/row_end.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"
#include "sm80/gather_forward.h"
#include "sm80/gather_rows.cuh"
#include "sm80/tile.cuh"
#include "sm80/turing.h"
#include "tile/softmax.cuh"

namespace spattn::sm80 {

// ---- configuration ----
template <Dtype D, int HeadDim, int HeadDimV, int Keys, int Stages>
struct GatherConfig {
    using Kernel = GatherForward<D, HeadDim, HeadDimV, any::gather_tile>;
    static constexpr Dtype dtype = D;
    using Element = typename tile::Element<D>::type;
    static constexpr bool value_in_key = Kernel::value_in_key;
    static constexpr int column_parts = Kernel::column_parts, part_columns = Kernel::part_columns;
    static constexpr int threads = 128 * column_parts, step = Keys, stages = Stages;
    using KeyTile = SharedTile<HeadDim>;
    using ValueTile = SharedTile<HeadDimV>;
    using PartTile = SharedTile<part_columns, value_in_key ? HeadDim : HeadDimV>;  // of values, a warp's columns
    static constexpr int q_bytes = KeyTile::bytes(any::gather_tile), k_bytes = KeyTile::bytes(step);
    static constexpr int stage_bytes = k_bytes + (value_in_key ? 0 : ValueTile::bytes(step));
    static constexpr int tile_bytes = q_bytes + stages * stage_bytes;
    static constexpr int shared_bytes = Kernel::shared_bytes({step, stages});
    static_assert(tile_bytes == Kernel::tile_bytes({step, stages}), "what the host was told");
    static constexpr int ctas = Kernel::ctas, combine_warps = HeadDimV / 32;
};

struct GatherForwardParams {
    TensorView q, k, v;
    TensorView k_scales, v_scales;  // of a float8 cache
    any::GatherLists lists;
    any::ListRows rows;
    any::ListShares shares;
    any::Partials<float> partials;  // of lists that are split
    any::SplitList* notes;          // which of them are
    any::ForwardOutputs to;
    int head_dim, head_dim_v;
    bool q_is_wide, k_is_wide, v_is_wide;
    bool is_float8;           // k and v
    bool has_pairs;           // two columns of out are one aligned word
    float scale, scale_log2;  // from what stands for scores to their natural units, and to powers of two
    bool has_cap;             // scores become tanh(into_cap s) first
    float into_cap;
};

// There is one slot more than stages: with two, a warp may still read its own when another finds those that come after
// the next.
template <class C>
using ListedKeys = StepKeys<C::step, C::stages + 1>;

// In shared memory behind the tiles.
template <class C>
struct BesideTiles {
    any::ListShare share;  // of all lists, what this CTA takes
    ListedKeys<C> keys;
};

// ---- the CTA ----
template <class C>
struct Gathered {
    using Element = typename C::Element;

    const GatherForwardParams& params;
    BesideTiles<C>& beside;
    ListedKeys<C>& keys;
    const uint32_t q_tile, stages;  // shared addresses
    any::GatherTask task;
    any::ListPart piece;  // of its list
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16, part = threadIdx.x / 128;
    float out[1][C::part_columns / 2];
    tile::RowState rows;

    __device__ Gathered(const GatherForwardParams& params, uint8_t* memory)
        : params(params),
          beside(*reinterpret_cast<BesideTiles<C>*>(memory + C::tile_bytes)),
          keys(beside.keys),
          q_tile(ptx::shared_address(memory)),
          stages(q_tile + C::q_bytes) {}

    __device__ __forceinline__ void run() {
        if (threadIdx.x < 32) any::ShareFinder{params.shares, params.rows, params.lists, params.notes}.run(beside.share);
        __syncthreads();
        const any::ListShare share = beside.share;
        for (int unit = share.begin.unit; share.has(unit); unit += share.step) {
            task = any::GatherTask::at(params.rows, params.lists, unit * params.shares.width + share.of_group);
            const int blocks = any::count_blocks(params.lists, task);
            piece = any::ListPart::of(params.shares, share, unit, blocks, params.notes);
            run_task();
            __syncthreads();  // all are done with q and keys
        }
    }

    __device__ __forceinline__ void run_task() {
        const TileList list(params.lists, task, piece.first, piece.end);
        rows = tile::RowState{};
        const int steps = list.steps(C::step);
        const auto find = [&](int step) {
            if (int(threadIdx.x) < max(C::step, 32)) list.find(keys, step, int(threadIdx.x));
        };
#pragma unroll
        for (float& x : out[0]) x = 0;
        load_queries<any::gather_tile, typename C::KeyTile, C::threads>(
            q_tile, params.q, params.head_dim, params.q_is_wide, params.rows, params.lists, task);
        find(0);
        __syncthreads();  // the first keys are known
        if (steps > 0) load(0);
        ptx::cp_async_commit();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            find(step + 1);
            ptx::cp_async_wait<0>();
            __syncthreads();  // the step is there, the next one's keys are known, and all are done with the one before
            if constexpr (C::stages > 1) load_next(step, steps);
            attend(step);
            if constexpr (C::stages == 1) {
                __syncthreads();  // all are done with the step
                load_next(step, steps);
            }
        }
        ptx::cp_async_wait<0>();
        finish();
    }

    __device__ __forceinline__ uint32_t stage(int step) const { return stages + step % C::stages * C::stage_bytes; }

    __device__ __forceinline__ void load_next(int step, int steps) {
        if (step + 1 < steps) load(step + 1);
        ptx::cp_async_commit();
    }
    __device__ __forceinline__ void load(int step) {
        load_rows<typename C::KeyTile>(stage(step), params.k, params.k_scales, params.head_dim, params.k_is_wide, step);
        if constexpr (!C::value_in_key)
            load_rows<typename C::ValueTile>(stage(step) + C::k_bytes, params.v, params.v_scales, params.head_dim_v,
                                             params.v_is_wide, step);
    }
    template <class Tile>
    __device__ __forceinline__ void load_rows(uint32_t to, const TensorView& x, const TensorView& scales, int columns,
                                              bool is_wide, int step) {
        if (params.is_float8)
            load_listed_float8<C::dtype, C::step, Tile, C::threads>(
                to, {x, scales, task.batch, task.head_kv}, columns, is_wide, keys.keys(step));
        else
            load_listed<C::step, Tile, C::threads>(to, x, columns, is_wide, task, keys.keys(step));
    }

    __device__ __forceinline__ void attend(int step) {
        float s[1][C::step / 2];
        multiply_rows<C::dtype, typename C::KeyTile>(q_tile, warp_row, stage(step), s);
        if (params.has_cap) tile::cap(s[0], params.into_cap);
        mask(s[0], step);
        uint32_t p[1][C::step / 16][4];
        float factor[2];
        const bool fresh = step == 0;
        // Who asks for the largest score gets it by following the maximum in each step.
        const bool follows = fresh || params.to.max_logits.data;
        if (tile::softmax<C::dtype>(s[0], rows, params.scale_log2, follows, p[0], factor) && !fresh)
            tile::scale_rows(out[0], factor[0], factor[1]);
        const uint32_t values = stage(step) + (C::value_in_key ? 0 : C::k_bytes) + part * C::part_columns * 2;
        add_product<C::dtype, typename C::PartTile>(p, values, out);
    }

    __device__ __forceinline__ void mask(float (&s)[C::step / 2], int step) const {
        const ThereBits there = keys.there(step);
        if (there.all()) return;
#pragma unroll
        for (int i = 0; i < C::step / 2; ++i) ptx::minus_infinity_unless(s[i], there.has(i));
    }

    __device__ __forceinline__ void finish() const {
        constexpr float unlift = tile::unlift<C::dtype>;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int in_tile = warp_row + lane / 4 + 8 * h;
            const any::TileRow row(params.rows, params.lists, task, in_tile);
            const float m = rows.m[h] * params.scale, l = tile::quad_sum(rows.l[h]) * unlift;
            const any::RowState<float> state{m, l, m};
            if (piece.tile != any::ListPart::whole) {
                if (row.is_there) store_part(h, int64_t(piece.tile) * any::gather_tile + in_tile, state);
                continue;
            }
            any::RowEnd<C::dtype> end(params.to, task.batch, row.head, row.query);
            end.finish(state);
            if (!row.is_there) continue;
            if (part == 0 && lane % 4 == 0) end.write_state(state, 0);
            Element* const to = any::row_of<Element>(params.to.out, task.batch, row.head, row.query);
            const float factor = end.mine * unlift;
#pragma unroll
            for (int i = 2 * h; i < C::part_columns / 2; i += 4) {
                const int column = part * C::part_columns + tile::fragment_column(lane, i);
                const float x = out[0][i] * factor, y = out[0][i + 1] * factor;
                if (params.has_pairs) {
                    if (column < params.head_dim_v)
                        *reinterpret_cast<uint32_t*>(to + column) = tile::pack<C::dtype>(x, y);
                } else {
                    if (column < params.head_dim_v) any::from_real(x, to[column * params.to.out.column]);
                    if (column + 1 < params.head_dim_v) any::from_real(y, to[(column + 1) * params.to.out.column]);
                }
            }
        }
    }

    __device__ __forceinline__ void store_part(int h, int64_t at, const any::RowState<float>& state) const {
        const float factor = state.l == 0 ? 0 : tile::unlift<C::dtype> / state.l;
        if (part == 0 && lane % 4 == 0) {
            params.partials.lse[at] = state.l == 0 ? -INFINITY : state.m + logf(state.l);
            params.partials.top[at] = state.top;
        }
        float* const to = params.partials.out + at * params.head_dim_v;
#pragma unroll
        for (int i = 2 * h; i < C::part_columns / 2; i += 4) {
            const int column = part * C::part_columns + tile::fragment_column(lane, i);
            if (column < params.head_dim_v) to[column] = out[0][i] * factor;
            if (column + 1 < params.head_dim_v) to[column + 1] = out[0][i + 1] * factor;
        }
    }
};

// ---- kernel ----
template <class C>
__global__ void __launch_bounds__(C::threads, C::ctas)
    gather_forward_kernel(const __grid_constant__ GatherForwardParams params) {
    if constexpr (!is_turing) Gathered<C>(params, ptx::swizzled_shared<uint8_t>()).run();
}

// ---- launch ----
// act(config) with the one that the device has shared memory for.
template <Dtype D, int HeadDim, int HeadDimV, class Act>
void choose_steps(int32_t device, Act act) {
    using Kernel = GatherForward<D, HeadDim, HeadDimV, any::gather_tile>;
    using Usual = GatherConfig<D, HeadDim, HeadDimV, Kernel::usual.keys, Kernel::usual.stages>;
    using Least = GatherConfig<D, HeadDim, HeadDimV, Kernel::least.keys, Kernel::least.stages>;
    if (std::is_same_v<Usual, Least> || runtime::shared_bytes(device) >= Usual::shared_bytes)
        act(Usual{});
    else
        act(Least{});
}

template <class C>
void launch_gather(const ForwardArgs& args, const GatherForwardParams& params) {
    static_assert(sizeof(BesideTiles<C>) <= C::shared_bytes - C::tile_bytes, "what the host was told");
    runtime::launch(gather_forward_kernel<C>,
                    {unsigned(params.shares.ctas()), unsigned(C::threads), size_t(C::shared_bytes)}, args.stream,
                    params);
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherForward<D, HeadDim, HeadDimV, Block>::run(const ForwardArgs& args) {
    static_assert(Block == any::gather_tile, "tiles of 64 rows");
    const Problem& p = *args.problem;
    const any::GatherLists lists = any::GatherLists::of(args);
    const any::ListRows rows = any::ListRows::of(p, lists.sizes, lists.known);
    const any::SharedLists space(p, rows, lists.sizes, runtime::count_processors(args.device) * GatherForward::ctas);
    const double scale = p.softcap != 0 ? p.softcap : p.scale;
    const bool has_pairs = p.head_dim_v % 2 == 0 && args.out.column == 1 &&
                           (args.out.batch | args.out.head | args.out.row) % 2 == 0 &&
                           reinterpret_cast<uintptr_t>(args.out.data) % 4 == 0;
    const auto is_wide = [&](const TensorView& x, int64_t columns) {
        return p.float8_cache ? any::reads_together(x, int(columns), 8) : any::is_wide(x);
    };
    const GatherForwardParams params{args.q,
                                     args.k,
                                     args.v,
                                     args.k_scales,
                                     args.v_scales,
                                     lists,
                                     rows,
                                     space.of_call(lists.sizes, lists.call),
                                     space.partials(args),
                                     space.noted(args),
                                     any::make_outputs<float>(args),
                                     int(p.head_dim),
                                     int(p.head_dim_v),
                                     any::is_wide(args.q),
                                     is_wide(args.k, p.head_dim),
                                     is_wide(args.v, p.head_dim_v),
                                     p.float8_cache,
                                     has_pairs,
                                     float(scale),
                                     float(scale * M_LOG2E),
                                     p.softcap != 0,
                                     p.softcap != 0 ? float(p.scale / p.softcap) : 0};
    choose_steps<D, HeadDim, HeadDimV>(args.device, [&]<class C>(C) {
        launch_gather<C>(args, params);
        any::join_lists<D, C::combine_warps, false>(args, lists, rows, space);
    });
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void GatherForward<D, HeadDim, HeadDimV, Block>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    choose_steps<D, HeadDim, HeadDimV>(
        device, []<class C>(C) {
            runtime::prepare(gather_forward_kernel<C>, C::shared_bytes);
            any::prepare_join_lists<D, C::combine_warps, false>();
        });
}

}  // namespace spattn::sm80
