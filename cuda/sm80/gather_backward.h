// SPDX-License-Identifier: MIT
// What the host may know of the sm80 gather backward kernels.
#pragma once

#include "plan/call.h"

namespace spattn::sm80 {

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns, and any strides. Beyond 256
// columns, values are the first columns of keys. A CTA has Block query rows, heads of a group mostly, or fewer where it
// has less shared memory. Workspace: as any::KeySumsSpace.
template <Dtype D, int HeadDim, int HeadDimV, int Block>
struct GatherBackward {
    static constexpr bool value_in_key = HeadDim > 256;
    static constexpr int step_keys = HeadDim > 128 ? 16 : 64;  // of a list, that a CTA meets at once
    static constexpr int key_columns = HeadDim + (value_in_key ? 0 : HeadDimV);
    // Rows of 576 columns do not fit where a CTA may have 99 KiB (Ada, and Ampere but for A100), but half of them do.
    static constexpr int least_rows = value_in_key ? Block / 2 : Block;
    // q and dout, p and ds, and one step's keys and values; and which keys they are.
    static constexpr int shared_bytes(int rows) {
        return 2 * (rows * (HeadDim + HeadDimV + 2 * step_keys) + step_keys * key_columns) + 1024;
    }
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
