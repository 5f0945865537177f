// SPDX-License-Identifier: MIT
// A row that was split is the average of its parts with weights exp(lse_i - lse). Lanes own parts, then columns, and a
// lane's loads of some parts and columns do not wait for each other. Of more of them at once the code is so long that
// fetching it takes more than is won: where queries are few, as in decoding, all of this is found in no cache.
#pragma once

#include <algorithm>

#include "any/partials.h"
#include "any/row_end.cuh"
#include "runtime/launch.h"

namespace spattn::any {

// Warps: of a row. As many as it has times 32 columns are faster where no processor then has several turns.
template <int Warps>
struct CombineShape {
    static constexpr int threads = 32 * std::max(Warps, 4), rows = threads / 32 / Warps;  // of a CTA
    static constexpr int columns_of_lane = std::max(4 / Warps, 1), parts_at_once = 16 / columns_of_lane;

    __device__ static unsigned row() { return blockIdx.x * rows + threadIdx.x / (32 * Warps); }
    static runtime::Shape grid(unsigned all_rows) { return {(all_rows + rows - 1) / rows, unsigned(threads), 0}; }
};
constexpr unsigned few_combined_rows = 1024;  // more of them have fewer warps each

// join(a, b) of all lanes' x, in all of them.
template <class Real, class Join>
__device__ Real join_lanes(Real x, Join join) {
    for (int n = 16; n; n /= 2) x = join(x, __shfl_xor_sync(~0u, x, n));
    return x;
}

// The rows of partials that a row's parts lie in: from a part to the next it is `stride` rows, and so many more from the
// first to the second.
struct PartRows {
    size_t first, stride, apart;
    __device__ size_t at(int part) const { return first + part * stride + (part > 0 ? apart : 0); }
};

// All threads of a CTA call it, those without a row with is_there false. copies: of the row's state.
template <Dtype D, int Warps>
__device__ __forceinline__ void combine_row(RowEnd<D>& end, bool is_there, const Partials<RealOf<D>>& partials,
                                            const PartRows& rows, int parts, int copies) {
    using Real = RealOf<D>;
    constexpr int columns_of_lane = CombineShape<Warps>::columns_of_lane;
    constexpr int parts_at_once = CombineShape<Warps>::parts_at_once;
    const int lane = int(threadIdx.x % 32), first_column = int(threadIdx.x / 32 % Warps) * 32 * columns_of_lane;
    const int columns = end.to.head_dim_v;
    const bool has_top = end.to.max_logits.data;
    const auto highest = [](Real a, Real b) { return fmax(a, b); };
    const auto sum = [](Real a, Real b) { return a + b; };
    RowState<Real> row{-INFINITY, 0, -INFINITY};
    if (!is_there) parts = 0;
    for (int part = lane; part < parts; part += 32) {
        row.m = fmax(row.m, partials.lse[rows.at(part)]);
        if (has_top) row.top = fmax(row.top, partials.top[rows.at(part)]);
    }
    const Real base = row.m = join_lanes(row.m, highest);
    if (has_top) row.top = join_lanes(row.top, highest);
    const auto weight_of = [&](int part) {
        return part < parts ? weight(partials.lse[rows.at(part)], base) : Real(0);
    };
    for (int part = lane; part < parts; part += 32) row.l += weight_of(part);
    row.l = join_lanes(row.l, sum);
    if (is_there) end.take_on(row, 0);
    __syncthreads();  // all have read what the pieces before handed on
    if (!is_there) return;
    end.finish(row);
    const size_t step = rows.stride * columns, apart = rows.apart * columns;
    for (int column = first_column + lane; column - lane < columns; column += 32 * Warps * columns_of_lane) {
        const Real* from = partials.out + rows.first * columns + column;
        Real x[columns_of_lane] = {};
        for (int first = 0; first < parts; first += 32) {
            const Real mine = weight_of(first + lane);
            const int count = min(32, parts - first);
            for (int next = 0; next < count; next += parts_at_once, from += parts_at_once * step) {
                Real out[parts_at_once][columns_of_lane];
#pragma unroll
                for (int i = 0; i < parts_at_once; ++i)
#pragma unroll
                    for (int c = 0; c < columns_of_lane; ++c)
                        out[i][c] = next + i < count && column + 32 * c < columns
                                        ? from[i * step + (first + next + i > 0 ? apart : 0) + 32 * c] : Real(0);
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
            if (column + 32 * c < columns) end.write(column + 32 * c, x[c]);
    }
    if (first_column == 0)
        for (int copy = lane; copy < copies; copy += 32) end.write_state(row, copy);
}

}  // namespace spattn::any
