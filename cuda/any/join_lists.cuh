// SPDX-License-Identifier: MIT
// Rows of lists that were split are put together.
#pragma once

#include "any/combine_row.cuh"
#include "any/list_shares.cuh"
#include "ptx/grid.cuh"
#include "runtime/launch.h"

namespace spattn::any {

struct JoinListsParams {
    GatherLists lists;
    ListRows rows;
    ListShares shares;
    const SplitList* notes;
    Partials<float> partials;
    ForwardOutputs to;
};

// BeginsEarly: while the grid ahead, which makes the parts, has yet to end.
template <Dtype D, int Warps, bool BeginsEarly>
__global__ void __launch_bounds__(CombineShape<Warps>::threads)
    join_lists_kernel(const __grid_constant__ JoinListsParams params) {
    static_assert(gather_tile % CombineShape<Warps>::rows == 0, "rows of a CTA are of one tile");
    const ListShares& shares = params.shares;
    const int at = int(CombineShape<Warps>::row()), in_tile = at % gather_tile, tile = at / gather_tile;
    if constexpr (BeginsEarly) ptx::wait_for_grid_ahead();
    const SplitList split = params.notes[tile / shares.width];
    if (split.parts == 1) return;
    const int of_group = tile % shares.width;
    const GatherTask task = GatherTask::at(params.rows, params.lists, split.unit * shares.width + of_group);
    const TileRow row(params.rows, params.lists, task, in_tile);
    RowEnd<D> end(params.to, task.batch, row.head, row.query);
    const size_t stride = size_t(shares.width) * gather_tile;
    const PartRows parts{split.group * stride + size_t(of_group) * gather_tile + in_tile, stride, shares.groups * stride};
    combine_row<D, Warps>(end, row.is_there, params.partials, parts, split.parts, 1);
}

template <Dtype D, int Warps, bool BeginsEarly>
void launch_join_lists(unsigned rows, void* stream, const JoinListsParams& params) {
    const runtime::Shape shape = CombineShape<Warps>::grid(rows);
    if constexpr (BeginsEarly)
        runtime::launch_early(join_lists_kernel<D, Warps, true>, shape, stream, params);
    else
        runtime::launch(join_lists_kernel<D, Warps, false>, shape, stream, params);
}

// FewWarps: of a row, where rows are few.
template <Dtype D, int FewWarps, bool BeginsEarly>
void join_lists(const ForwardArgs& args, const GatherLists& lists, const ListRows& of_lists, const SharedLists& space) {
    const ListShares shares = space.of_call(lists.sizes, lists.call);
    if (!shares.splits) return;
    const JoinListsParams params{lists, of_lists, shares, space.noted(args), space.partials(args),
                                 make_outputs<float>(args)};
    const unsigned rows = unsigned(shares.notes() * shares.width) * gather_tile;
    rows <= few_combined_rows ? launch_join_lists<D, FewWarps, BeginsEarly>(rows, args.stream, params)
                              : launch_join_lists<D, 2, BeginsEarly>(rows, args.stream, params);
}

template <Dtype D, int FewWarps, bool BeginsEarly>
void prepare_join_lists() {
    runtime::prepare(join_lists_kernel<D, FewWarps, BeginsEarly>, 0);
    runtime::prepare(join_lists_kernel<D, 2, BeginsEarly>, 0);
}

}  // namespace spattn::any
