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
    static constexpr int shared_bytes(int step) {
        return 2 * 64 * (HeadDim + HeadDimV) + 2 * step * (first_tiles * HeadDim + HeadDimV) + first_tiles * 2 * step * 4;
    }
    // Tokens of a step: 64 where a CTA may have so much shared memory. Of more than 128 columns it may not where there
    // are 99 KiB (Ada, and Ampere but for A100).
    static constexpr int least_step = HeadDim <= 128 ? 64 : 32;
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
