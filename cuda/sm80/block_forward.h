// SPDX-License-Identifier: MIT
// What the host may know of the sm80 block forward kernels.
#pragma once

#include "plan/call.h"
#include "sm80/column_split.h"
#include "sm80/split.h"

namespace spattn::sm80 {
// D: f16, bf16, or f32, whose products are TF32's: of rounded operands, or of split ones. HeadDim, HeadDimV: of the
// tiles; operands may have fewer columns, and any strides. A CTA has BlockQ queries; a layout's blocks are multiples of
// BlockQ queries and of 64 keys, and its masks in fragment order (tile/fragment.h). Workspace: partial results of split
// rows.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits = false>
struct BlockForward {
    static constexpr int element_bytes = dtype_row(D).bytes;
    using KeyColumns = ColumnSplit<HeadDim, element_bytes>;
    // A problem that has no columns of the second part has no CTAs for it.
    using ValueColumns = ColumnSplit<HeadDimV, element_bytes>;
    static constexpr int shared_bytes =
        element_bytes * (BlockQ * HeadDim + 64 * (KeyColumns::panel + ValueColumns::panel));
    static void run(const ForwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
