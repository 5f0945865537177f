// SPDX-License-Identifier: MIT
// A row that was split is the average of its parts with weights exp(lse_i - lse). A warp has a row: lanes own parts,
// then columns, and a lane's loads of some parts and columns do not wait for each other.
#pragma once

#include "any/combine.h"
#include "any/row_end.cuh"
#include "any/tile.cuh"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int combine_threads = 128;
constexpr int columns_of_lane = 4, parts_at_once = 4;

template <class Real>
struct CombineParams {
    LayoutView layout;
    TasksView tasks;
    ForwardOutputs to;
    Partials<Real> parts;
    TileRows tile;
    int copies;  // of a row's state
};

// join(a, b) of all lanes' x, in all of them.
template <class Real, class Join>
__device__ Real join_lanes(Real x, Join join) {
    for (int n = 16; n; n /= 2) x = join(x, __shfl_xor_sync(~0u, x, n));
    return x;
}

template <Dtype D>
__global__ void __launch_bounds__(combine_threads)
    combine_kernel(const __grid_constant__ CombineParams<RealOf<D>> params) {
    using Real = RealOf<D>;
    const TileRows& tile = params.tile;
    const unsigned rows = unsigned(params.layout.block_q) << tile.bits;
    const unsigned at = blockIdx.x * (combine_threads / 32) + threadIdx.x / 32;
    const int lane = int(threadIdx.x % 32), in_tile = int(at % rows);
    if (at / rows >= unsigned(params.tasks.num_joins)) return;
    const Join join = params.tasks.joins[at / rows];
    const int token =
        own_token_at(params.layout.queries, params.layout.block_q, params.layout.seq_q, join.row, tile.place(in_tile));
    if (token == no_token) return;
    const auto row_at = [&](int part) { return size_t(join.first_part + part) * rows + in_tile; };
    const auto highest = [](Real a, Real b) { return fmax(a, b); };
    const auto sum = [](Real a, Real b) { return a + b; };
    RowState<Real> row{-INFINITY, 0, -INFINITY};
    for (int part = lane; part < join.parts; part += 32) {
        row.m = fmax(row.m, params.parts.lse[row_at(part)]);
        if (params.to.max_logits.data) row.top = fmax(row.top, params.parts.top[row_at(part)]);
    }
    const Real base = row.m = join_lanes(row.m, highest);
    if (params.to.max_logits.data) row.top = join_lanes(row.top, highest);
    for (int part = lane; part < join.parts; part += 32) row.l += weight(params.parts.lse[row_at(part)], base);
    row.l = join_lanes(row.l, sum);
    RowEnd<D> end(params.to, join.head / params.to.heads_q, join.head % params.to.heads_q + tile.head(in_tile), token);
    end.take_on(row, 0);
    __syncwarp();  // all have read what the pieces before handed on
    end.finish(row);
    const size_t stride = size_t(rows) * params.to.head_dim_v;  // from a part to the next
    for (int column = lane; column - lane < params.to.head_dim_v; column += 32 * columns_of_lane) {
        const Real* from = params.parts.out + row_at(0) * params.to.head_dim_v + column;
        Real x[columns_of_lane] = {};
        for (int first = 0; first < join.parts; first += 32) {
            const Real mine = first + lane < join.parts ? weight(params.parts.lse[row_at(first + lane)], base) : 0;
            const int count = min(32, join.parts - first);
            for (int next = 0; next < count; next += parts_at_once, from += parts_at_once * stride) {
                Real out[parts_at_once][columns_of_lane];
#pragma unroll
                for (int i = 0; i < parts_at_once; ++i)
#pragma unroll
                    for (int c = 0; c < columns_of_lane; ++c)
                        out[i][c] = next + i < count && column + 32 * c < params.to.head_dim_v
                                        ? from[i * stride + 32 * c]
                                        : Real(0);
#pragma unroll
                for (int i = 0; i < parts_at_once; ++i) {
                    const Real w = __shfl_sync(~0u, mine, next + i);
                    if (w == 0) continue;  // the part saw nothing: what it left may be NaN
#pragma unroll
                    for (int c = 0; c < columns_of_lane; ++c) x[c] += w * out[i][c];
                }
            }
        }
#pragma unroll
        for (int c = 0; c < columns_of_lane; ++c)
            if (column + 32 * c < params.to.head_dim_v) end.write(column + 32 * c, x[c]);
    }
    for (int copy = lane; copy < params.copies; copy += 32) end.write_state(row, copy);
}

template <Dtype D>
void Combine<D>::run(const ForwardArgs& args, const Partials<RealOf<D>>& parts) {
    if (!args.tasks.num_joins) return;
    const CombineParams<RealOf<D>> params{args.layout, args.tasks, make_outputs<RealOf<D>>(args), parts,
                                          TileRows(args.tasks), column_parts<RealOf<D>>(args.problem->head_dim_v)};
    const unsigned rows =
        unsigned(args.tasks.num_joins) * unsigned(args.layout.block_q) * unsigned(args.tasks.tile_heads);
    constexpr unsigned at_once = combine_threads / 32;  // rows of a CTA
    const unsigned ctas = (rows + at_once - 1) / at_once;
    runtime::launch(combine_kernel<D>, {ctas, unsigned(combine_threads), 0}, args.stream, params);
}

template <Dtype D>
void Combine<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(combine_kernel<D>, 0);
}

}  // namespace spattn::any
