// SPDX-License-Identifier: MIT
// A row that was split is the average of its parts with weights exp(lse_i - lse). A CTA has one row; threads own
// columns, and before that a part each.
#pragma once

#include "any/combine.h"
#include "any/row_end.cuh"
#include "any/tile.cuh"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int combine_threads = 128;

template <class Real>
struct CombineParams {
    LayoutView layout;
    TasksView tasks;
    ForwardOutputs to;
    Partials<Real> parts;
    TileRows tile;
    int copies;  // of a row's state
};

// join(a, b) of all threads' x, in all of them.
template <class Real, class Join>
__device__ Real join_threads(Real x, Real* of_warps, Join join) {
    for (int n = 16; n; n /= 2) x = join(x, __shfl_xor_sync(~0u, x, n));
    __syncthreads();  // what stood there is read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warps[0];
    for (int warp = 1; warp < combine_threads / 32; ++warp) x = join(x, of_warps[warp]);
    return x;
}

template <Dtype D>
__global__ void __launch_bounds__(combine_threads)
    combine_kernel(const __grid_constant__ CombineParams<RealOf<D>> params) {
    using Real = RealOf<D>;
    const TileRows& tile = params.tile;
    const unsigned rows = unsigned(params.layout.block_q) << tile.bits;
    const int in_tile = int(blockIdx.x % rows);
    const Join join = params.tasks.joins[blockIdx.x / rows];
    const int token =
        own_token_at(params.layout.queries, params.layout.block_q, params.layout.seq_q, join.row, tile.place(in_tile));
    if (token == no_token) return;
    const auto row_at = [&](int part) { return size_t(join.first_part + part) * rows + in_tile; };
    __shared__ Real of_warps[combine_threads / 32];
    const auto highest = [](Real a, Real b) { return fmax(a, b); };
    const auto sum = [](Real a, Real b) { return a + b; };
    RowState<Real> row{-INFINITY, 0, -INFINITY};
    for (int part = threadIdx.x; part < join.parts; part += combine_threads) {
        row.m = fmax(row.m, params.parts.lse[row_at(part)]);
        if (params.to.max_logits.data) row.top = fmax(row.top, params.parts.top[row_at(part)]);
    }
    const Real base = row.m = join_threads(row.m, of_warps, highest);
    if (params.to.max_logits.data) row.top = join_threads(row.top, of_warps, highest);
    for (int part = threadIdx.x; part < join.parts; part += combine_threads)
        row.l += weight(params.parts.lse[row_at(part)], base);
    row.l = join_threads(row.l, of_warps, sum);
    RowEnd<D> end(params.to, join.head / params.to.heads_q, join.head % params.to.heads_q + tile.head(in_tile), token);
    end.take_on(row, 0);
    __syncthreads();  // all have read what the pieces before handed on
    end.finish(row);
    for (int column = threadIdx.x; column < params.to.head_dim_v; column += combine_threads) {
        Real x = 0;
#pragma unroll 8
        for (int part = 0; part < join.parts; ++part) {  // loads that do not wait for each other
            const Real out = params.parts.out[row_at(part) * params.to.head_dim_v + column];
            const Real w = weight(params.parts.lse[row_at(part)], base);
            x += w != 0 ? w * out : 0;
        }
        end.write(column, x);
    }
    if (int(threadIdx.x) < params.copies) end.write_state(row, threadIdx.x);
}

template <Dtype D>
void Combine<D>::run(const ForwardArgs& args, const Partials<RealOf<D>>& parts) {
    if (!args.tasks.num_joins) return;
    const CombineParams<RealOf<D>> params{args.layout, args.tasks, make_outputs<RealOf<D>>(args), parts,
                                          TileRows(args.tasks), column_parts<RealOf<D>>(args.problem->head_dim_v)};
    const unsigned ctas =
        unsigned(args.tasks.num_joins) * unsigned(args.layout.block_q) * unsigned(args.tasks.tile_heads);
    runtime::launch(combine_kernel<D>, {ctas, unsigned(combine_threads), 0}, args.stream, params);
}

template <Dtype D>
void Combine<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(combine_kernel<D>, 0);
}

}  // namespace spattn::any
