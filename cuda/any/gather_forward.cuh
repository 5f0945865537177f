// SPDX-License-Identifier: MIT
// out = softmax(scale * q kT) v over lists of keys, without an assumption.
//
//     s = q kT                   32 keys of the list at a time, several rows on their way at once
//     m, l, p                    online softmax; a lane has a key
//     sums = factor sums + p v   sums in shared memory, read and written once a tile
//
//   grid: a warp has a row of one query head, and warps of a CTA have heads of a group, whose keys then come from the
//         cache. Where rows are few, as in decoding, the warps of a CTA share a row's list and join their sums at the
//         end, in the order of the warps. Bits depend on the problem alone.
//   isolation: keys that the list does not name are not read.
//   binds: short lists, the row's chain of list, entries, keys and values, each of which waits for the one before: so
//          entries are loaded a tile ahead, and an SM has 32 warps. Long ones, the way of the gathered rows from memory
//          or L2; in float32, and in doubles, multiply-adds beside it.
//
// Measured (H200, bf16, 16K tokens, 8 heads of 64, L2 cold, 2026-11): random lists of 0.05 % 269 us, 0.2 % 433, 0.5 %
// 735, where blocks take 1,500; with 20 warps an SM and entries loaded when they are due 329, 514 and 841.
#pragma once

#include "any/gather_forward.h"
#include "any/gather_warp.cuh"
#include "any/row_end.cuh"
#include "ptx/shared.cuh"
#include "runtime/launch.h"

namespace spattn::any {

template <class Real>
struct GatherForwardParams {
    TensorView q, k, v, k_scales, v_scales;
    GatherLists lists;
    ForwardOutputs to;
    int64_t rows;  // of all query heads
    int head_dim, share;
    unsigned warp_bytes;
    Real scale, softcap;
};

template <Dtype D, int Width, bool IsFloat8>
struct GatheredForward : GatherRow<D, Width> {
    using Base = GatherRow<D, Width>;
    using typename Base::T, typename Base::Real;
    using Base::lane, Base::tile, Base::count, Base::batch, Base::head, Base::head_kv, Base::token, Base::share;

    const GatherForwardParams<Real>& params;
    Real *const q, *const sums;
    Real m = -INFINITY, l = 0;  // l: this lane's share

    __device__ GatheredForward(const GatherForwardParams<Real>& params, void* memory)
        : Base(params.lists, memory, params.warp_bytes, params.share, params.rows),
          params(params),
          q(Base::vectors()),
          sums(q + padded(params.head_dim)) {}

    __device__ void run() {
        const auto k = key_rows<D, IsFloat8>(params.k, params.k_scales, batch, head_kv);
        const auto v = key_rows<D, IsFloat8>(params.v, params.v_scales, batch, head_kv);
        Base::load(params.q, row_of<T>(params.q, batch, head, token), params.head_dim, q);
        Base::clear(sums, params.to.head_dim_v);
        while (Base::next()) {
            Base::dots(q, k, params.head_dim, tile.products[0]);
            const Real factor = softmax();
            Base::add(tile.products[0], v, params.to.head_dim_v, factor, sums);
        }
        finish();
    }

    // Products become probabilities relative to m. Returns what sums so far must be multiplied by.
    __device__ Real softmax() {
        Real s = -INFINITY;
        if (lane < count) {
            s = params.scale * tile.products[0][lane];
            if (params.softcap != 0) s = params.softcap * tanh(s / params.softcap);
        }
        Real top = fmax(m, s);
        for (int n = 16; n; n /= 2) top = fmax(top, __shfl_xor_sync(~0u, top, n));
        const Real factor = weight(m, top), base = top == -INFINITY ? 0 : top;  // all scores so far may be NaN
        const Real p = lane < count ? exp(s - base) : 0;
        m = top, l = l * factor + p;
        tile.products[0][lane] = p;
        __syncwarp();  // all weights are there
        return factor;
    }

    // Joins what the warps of the row have come to.
    __device__ void finish() {
        for (int n = 16; n; n /= 2) l += __shfl_xor_sync(~0u, l, n);
        Real &state_m = tile.products[0][0], &state_l = tile.products[1][0];
        if (lane == 0) state_m = m, state_l = l;
        __syncthreads();  // states and sums of all warps of the row are there
        if (!Base::is_there) return;
        RowState<Real> row{-INFINITY, 0, -INFINITY};
        for (int n = 0; n < share; ++n) row.m = fmax(row.m, Base::theirs(state_m, n));
        for (int n = 0; n < share; ++n) row.l += Base::theirs(state_l, n) * weight(Base::theirs(state_m, n), row.m);
        row.top = row.m;
        RowEnd<D> end(params.to, batch, head, token);
        end.finish(row);
        for (int column = Base::thread(); column < params.to.head_dim_v; column += 32 * share) {
            Real x = 0;
            for (int n = 0; n < share; ++n)
                x += Base::theirs(sums[column], n) * weight(Base::theirs(state_m, n), row.m);
            end.write(column, x);
        }
        if (Base::thread() == 0) end.write_state(row, 0);
    }
};

// ---- kernel ----
template <Dtype D, int Width, bool IsFloat8>
__global__ void __launch_bounds__(most_gather_warps * 32, gather_ctas)
    gather_forward_kernel(const __grid_constant__ GatherForwardParams<RealOf<D>> params) {
    GatheredForward<D, Width, IsFloat8>(params, ptx::dynamic_shared<void>()).run();
}

// ---- launch ----
template <Dtype D>
void GatherForward<D>::run(const ForwardArgs& args) {
    using Real = RealOf<D>;
    const Problem& p = *args.problem;
    const GatherShape shape = gather_shape<Real>(args.device, padded(p.head_dim) + padded(p.head_dim_v));
    const int64_t rows = p.batch * p.heads_q * p.seq_q;
    const int share = share_of_row(rows, shape);
    const GatherForwardParams<Real> params{args.q,
                                           args.k,
                                           args.v,
                                           args.k_scales,
                                           args.v_scales,
                                           GatherLists::of(args),
                                           make_outputs<Real>(args),
                                           rows,
                                           int(p.head_dim),
                                           share,
                                           shape.warp_bytes,
                                           Real(p.scale),
                                           Real(p.softcap)};
    const bool is_wide = reads_wide<D>(p, {args.k, args.v});
    const auto kernel = p.float8_cache ? is_wide ? gather_forward_kernel<D, wide<D>, true>
                                                 : gather_forward_kernel<D, 1, true>
                        : is_wide      ? gather_forward_kernel<D, wide<D>, false>
                                       : gather_forward_kernel<D, 1, false>;
    runtime::launch(kernel,
                    {unsigned(divide_up(rows * share, shape.warps)), shape.threads(), shape.bytes()}, args.stream,
                    params);
}

template <Dtype D>
void GatherForward<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    const size_t bytes = most_gather_bytes(device);
    runtime::prepare(gather_forward_kernel<D, wide<D>, false>, bytes);
    runtime::prepare(gather_forward_kernel<D, 1, false>, bytes);
    runtime::prepare(gather_forward_kernel<D, wide<D>, true>, bytes);
    runtime::prepare(gather_forward_kernel<D, 1, true>, bytes);
}

}  // namespace spattn::any
