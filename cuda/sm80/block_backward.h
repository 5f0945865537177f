// SPDX-License-Identifier: MIT
// What the host may know of the sm80 block backward kernels.
#pragma once

#include "plan/kernel.h"
#include "sm80/split.h"

namespace spattn::sm80 {

// D: f16, bf16 or f32, as of BlockForward. HeadDim, HeadDimV: of the tiles; operands may have fewer columns, and any
// strides. Blocks of a layout are multiples of 64 tokens, and its masks in both fragment orders (tile/fragment.h).
// args.tasks go by key, args.second_tasks by query. Workspace: as any::BackwardSpace.
template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits = false>
struct BlockBackward {
    static constexpr bool joins_dk_dv = HeadDim <= 128;  // else registers hold one sum at a time
    static constexpr int element_bytes = dtype_row(D).bytes;
    static constexpr bool has_room = element_bytes * HeadDim <= 256;
    // Registers hold a sum of 256 columns. More are another CTA's, which makes the scores, too.
    static constexpr int column_parts = HeadDim > 256 ? 2 : 1, part_columns = HeadDim / column_parts;
    static_assert(column_parts == 1 || HeadDim == HeadDimV, "a sum's part has as many columns, whichever it is");
    // Own tokens and those of a step, and where there is room the first operand of the next one with its row sums.
    static constexpr int first_tiles = has_room ? 2 : 1;
    static constexpr int shared_bytes(int step) {
        return element_bytes * (64 * (HeadDim + HeadDimV) + step * (first_tiles * HeadDim + HeadDimV)) +
               first_tiles * 2 * step * 4;
    }
    // Tokens of a step: 64 where a CTA may have so much shared memory. Where there are 99 KiB (Ada, and Ampere but for
    // A100) it may not if rows have more than 256 bytes. Such rows of float32 always have steps of 32: registers hold two
    // sums beside what belongs to a step. Own rows of 1 KiB leave room for 32 tokens on Hopper, and for 16 on A100.
    static constexpr int least_step = has_room ? 64 : column_parts == 1 ? 32 : 16;
    static constexpr int most_step = column_parts > 1 ? 32 : D == Dtype::f32 ? least_step : 64;
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
