// SPDX-License-Identifier: MIT
// What the host may know of the sm80 block backward kernels.
#pragma once

#include "plan/kernel.h"

namespace spattn::sm80 {

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns, and any strides. Blocks of a layout
// are multiples of 64 tokens, and its masks in both fragment orders (tile/fragment.h). args.tasks go by key,
// args.second_tasks by query. Workspace: as any::BackwardSpace.
template <Dtype D, int HeadDim, int HeadDimV, int Block>
struct BlockBackward {
    static constexpr bool joins_dk_dv = HeadDim <= 128;  // else registers hold one sum at a time
    // Own tokens and those of a step, and where there is room the first operand of the next one with its row sums.
    static constexpr int first_tiles = HeadDim <= 128 ? 2 : 1;
    static constexpr int shared_bytes = 2 * 64 * ((1 + first_tiles) * HeadDim + 2 * HeadDimV) + first_tiles * 2 * 64 * 4;
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
