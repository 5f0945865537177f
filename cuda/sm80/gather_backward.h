// SPDX-License-Identifier: MIT
// What the host may know of the sm80 gather backward kernels.
#pragma once

#include "plan/kernel.h"

namespace spattn::sm80 {

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns, and any strides. Beyond 256
// columns, values are the first columns of keys. A CTA has Block query rows, heads of a group mostly. Workspace: as
// any::KeySumsSpace.
template <Dtype D, int HeadDim, int HeadDimV, int Block>
struct GatherBackward {
    static constexpr bool value_in_key = HeadDim > 256;
    static constexpr int step_keys = HeadDim > 128 ? 16 : 64;  // of a list, that a CTA meets at once
    static constexpr int key_columns = HeadDim + (value_in_key ? 0 : HeadDimV);
    // q and dout, p and ds, and one step's keys and values.
    static constexpr int tile_bytes = 2 * (Block * (HeadDim + HeadDimV + 2 * step_keys) + step_keys * key_columns);
    static constexpr int shared_bytes = tile_bytes + 1024;  // and which keys they are
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
