// SPDX-License-Identifier: MIT
// What the host may know of the sm90 gather forward kernels.
#pragma once

#include "any/list_shares.h"
#include "plan/call.h"

namespace spattn::sm90 {

// Tiles with values in keys come in twos that share a list where they can: what a CTA gathers of float8 it widens for
// both.
constexpr bool widens_for_two(int head_dim, int tiles) { return head_dim > 256 && tiles % 2 == 0; }

inline any::SharedLists share_lists(const Problem& p, const any::ListRows& rows, const ListSizes& sizes, int processors) {
    const bool is_for_two = p.float8_cache && widens_for_two(int(p.head_dim), rows.tiles);
    return {p, rows, sizes, processors, is_for_two ? 2 : 1};
}

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns. Beyond 256 columns, values are the
// first columns of keys. Tiles of BlockQ query rows, heads of a group mostly, and BlockK listed keys.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct GatherForward {
    static void run(const ForwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
