// SPDX-License-Identifier: MIT
// What the host may know of the sm90 gather forward kernels.
#pragma once

#include <algorithm>

#include "any/gather_lists.h"
#include "plan/kernel.h"

namespace spattn::sm90 {

// Into how many parts lists of so many blocks of keys are split, which so many tiles have: as many as leave no
// processor idle, if that takes more blocks off a task than it takes to put the parts together.
constexpr int least_part = 2;  // blocks
inline int list_parts(double tiles, double blocks, int processors) {
    constexpr double join_blocks = 6;
    const int parts = int(std::min(processors / std::max(tiles, 1.0), blocks / least_part));
    return parts > 1 && blocks - blocks / parts >= join_blocks ? parts : 1;
}

// What a workspace holds: parts of rows, where lists are split. A plan and its calls count the same processors, those
// of the device.
struct GatherForwardSpace {
    int parts;           // of a list
    size_t rows, bytes;  // of all parts' tiles

    GatherForwardSpace(const Problem& p, const ListSizes& sizes, const LayoutView& known, int processors);
};

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns. Beyond 256 columns, values are the
// first columns of keys. Tiles of BlockQ query rows, heads of a group mostly, and BlockK listed keys.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct GatherForward {
    static void run(const ForwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
