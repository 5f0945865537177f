// SPDX-License-Identifier: MIT
// Split rows of blocks are put together.
#pragma once

#include <algorithm>

#include "any/combine.h"
#include "any/combine_row.cuh"
#include "any/tile.cuh"
#include "ptx/grid.cuh"
#include "runtime/launch.h"

namespace spattn::any {

template <class Real>
struct CombineParams {
    LayoutView layout;
    TasksView tasks;
    ForwardOutputs to;
    Partials<Real> parts;
    TileRows tile;
    int places;  // of a tile that may have a row; parts have all of them
    int copies;  // of a row's state
};

// BeginsEarly: while the grid ahead, which makes the parts, has yet to end.
template <Dtype D, int Warps, bool BeginsEarly>
__global__ void __launch_bounds__(CombineShape<Warps>::threads)
    combine_kernel(const __grid_constant__ CombineParams<RealOf<D>> params) {
    const TileRows& tile = params.tile;
    const unsigned rows = unsigned(params.layout.block_q) << tile.bits, worked = unsigned(params.places) << tile.bits;
    const unsigned at = CombineShape<Warps>::row();
    const int in_tile = int(at % worked);
    Join join{0, 0, 0, no_join};
    int token = no_token;
    if (at / worked < unsigned(params.tasks.num_joins)) join = params.tasks.joins[at / worked];
    if (join.parts != no_join) {
        const LayoutView& layout = params.layout;
        const int place = tile.place(in_tile);
        token = layout.spans ? query_at(span_of(layout, join.head / int(params.to.heads_q), join.row), place)
                             : own_token_at(layout.queries, layout.block_q, layout.seq_q, join.row, place);
    }
    if constexpr (BeginsEarly) ptx::wait_for_grid_ahead();
    RowEnd<D> end(params.to, join.head / params.to.heads_q, join.head % params.to.heads_q + tile.head(in_tile), token);
    const PartRows of_parts{size_t(join.first_part) * rows + in_tile, size_t(rows), 0};
    combine_row<D, Warps>(end, token != no_token, params.parts, of_parts, join.parts, params.copies);
}

template <Dtype D, int Warps, bool BeginsEarly>
void launch_combine(unsigned rows, void* stream, const CombineParams<RealOf<D>>& params) {
    const runtime::Shape shape = CombineShape<Warps>::grid(rows);
    if constexpr (BeginsEarly)
        runtime::launch_early(combine_kernel<D, Warps, true>, shape, stream, params);
    else
        runtime::launch(combine_kernel<D, Warps, false>, shape, stream, params);
}

template <Dtype D, bool BeginsEarly>
void launch_combine(const ForwardArgs& args, const Partials<RealOf<D>>& parts) {
    if (!args.tasks.num_joins) return;
    const LayoutView& layout = args.layout;
    const int places = layout.spans ? layout.block_q : int(std::min<int64_t>(layout.block_q, layout.seq_q));
    const CombineParams<RealOf<D>> params{args.layout, args.tasks, make_outputs<RealOf<D>>(args), parts,
                                          TileRows(args.tasks), places,
                                          column_parts<RealOf<D>>(args.problem->head_dim_v)};
    const unsigned rows = unsigned(args.tasks.num_joins) * unsigned(places) * unsigned(args.tasks.tile_heads);
    rows <= few_combined_rows ? launch_combine<D, 4, BeginsEarly>(rows, args.stream, params)
                              : launch_combine<D, 1, BeginsEarly>(rows, args.stream, params);
}

template <Dtype D, bool BeginsEarly>
void prepare_combine() {
    runtime::prepare(combine_kernel<D, 1, BeginsEarly>, 0);
    runtime::prepare(combine_kernel<D, 4, BeginsEarly>, 0);
}

template <Dtype D>
void Combine<D>::run(const ForwardArgs& args, const Partials<RealOf<D>>& parts) {
    launch_combine<D, false>(args, parts);
}

template <Dtype D>
void Combine<D>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    prepare_combine<D, false>();
}

}  // namespace spattn::any
