// SPDX-License-Identifier: MIT
// A row that was split is the average of its parts with weights exp(lse_i - lse). A CTA has one row; threads own
// columns.
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
    int copies;  // of a row's state
};

template <Dtype D>
__global__ void __launch_bounds__(combine_threads)
    combine_kernel(const __grid_constant__ CombineParams<RealOf<D>> params) {
    using Real = RealOf<D>;
    const int block = params.layout.block_q, place = int(blockIdx.x % unsigned(block));
    const Join join = params.tasks.joins[blockIdx.x / unsigned(block)];
    const int token = own_token_at(params.layout.queries, block, params.layout.seq_q, join.row, place);
    if (token == no_token) return;
    const auto row_at = [&](int part) { return size_t(join.first_part + part) * block + place; };
    RowState<Real> row{-INFINITY, 0, -INFINITY};
    for (int part = 0; part < join.parts; ++part) {
        row.m = fmax(row.m, params.parts.lse[row_at(part)]);
        if (params.to.max_logits.data) row.top = fmax(row.top, params.parts.top[row_at(part)]);
    }
    const Real base = row.m;
    for (int part = 0; part < join.parts; ++part) row.l += weight(params.parts.lse[row_at(part)], base);
    RowEnd<D> end(params.to, join.head / params.to.heads_q, join.head % params.to.heads_q, token);
    end.take_on(row, 0);
    __syncthreads();  // all have read what the pieces before handed on
    end.finish(row);
    for (int column = threadIdx.x; column < params.to.head_dim_v; column += combine_threads) {
        Real x = 0;
        for (int part = 0; part < join.parts; ++part) {
            const Real w = weight(params.parts.lse[row_at(part)], base);
            if (w != 0) x += w * params.parts.out[row_at(part) * params.to.head_dim_v + column];
        }
        end.write(column, x);
    }
    if (int(threadIdx.x) < params.copies) end.write_state(row, threadIdx.x);
}

template <Dtype D>
void Combine<D>::run(const ForwardArgs& args, const Partials<RealOf<D>>& parts) {
    if (!args.tasks.num_joins) return;
    const CombineParams<RealOf<D>> params{args.layout, args.tasks, make_outputs<RealOf<D>>(args), parts,
                                          column_parts<RealOf<D>>(args.problem->head_dim_v)};
    const unsigned ctas = unsigned(args.tasks.num_joins) * unsigned(args.layout.block_q);
    runtime::launch(combine_kernel<D>, {ctas, unsigned(combine_threads), 0}, args.stream, params);
}

template <Dtype D>
void Combine<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(combine_kernel<D>, 0);
}

}  // namespace spattn::any
