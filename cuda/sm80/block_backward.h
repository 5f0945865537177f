// SPDX-License-Identifier: MIT
// What the host may know of the sm80 block backward kernels.
#pragma once

#include <algorithm>

#include "plan/call.h"
#include "sm80/column_split.h"
#include "sm80/split.h"

namespace spattn::sm80 {

// D: f16, bf16 or f32, as of BlockForward. HeadDim, HeadDimV: of the tiles; operands may have fewer columns, and any
// strides. Blocks of a layout are multiples of 64 tokens, and its masks in both fragment orders (tile/fragment.h).
// args.tasks go by key, args.second_tasks by query. Workspace: as any::BackwardSpace.
template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits = false>
struct BlockBackward {
    static constexpr bool joins_dk_dv = HeadDim <= 128;  // else registers hold one sum at a time
    static constexpr int element_bytes = dtype_row(D).bytes;
    using Columns = ColumnSplit<HeadDim, element_bytes>;  // of each sum
    static constexpr int column_parts = Columns::parts, part_columns = Columns::of_part;
    static_assert(Columns::panels == 1 || HeadDim == HeadDimV, "a sum's part has as many columns, whichever it is");
    // A CTA is roomy where it may have so much shared memory. Where there are 99 KiB (Ada, and Ampere but for A100) it may
    // not if rows have more than 256 bytes: steps are shorter, or rows of more than 512 bytes come in panels, on A100, too.
    // Nor may it on Turing if they have more than 128. Rows of float32 have steps of 32 tokens where registers hold two
    // sums beside what belongs to a step, or one beside both numbers of split ones.
    static constexpr bool has_room(bool is_roomy) {
        return element_bytes * HeadDim <= (is_roomy || D != Dtype::f16 ? 256 : 128);
    }
    // Own tokens and those of a step, and where there is room the first operand of the next one with its row sums. Of rows
    // that come in panels, two with those of own tokens.
    static constexpr int first_tiles(bool is_roomy) { return has_room(is_roomy) ? 2 : 1; }
    static constexpr bool in_panels(bool is_roomy) { return Columns::panels > 1 && !is_roomy; }
    static constexpr int step(bool is_roomy) {
        if (has_room(is_roomy)) return 64;
        if (in_panels(is_roomy)) return Splits ? 32 : 64;
        return column_parts == 1 && is_roomy && D != Dtype::f32 ? 64 : 32;
    }
    static constexpr int shared_bytes(bool is_roomy) {
        const int tokens = step(is_roomy), tiles = first_tiles(is_roomy), stats = tiles * 2 * tokens * 4;
        const int rows = in_panels(is_roomy) ? 2 * (64 + tokens) * Columns::panel
                                             : 64 * (HeadDim + HeadDimV) + tokens * (tiles * HeadDim + HeadDimV);
        const int sums = 64 * 4 * (joins_dk_dv ? HeadDim + HeadDimV : part_columns);  // take that place in the end
        return std::max(element_bytes * rows + stats, sums);
    }
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
