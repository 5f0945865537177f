// SPDX-License-Identifier: MIT
// What the host may know of the sm90 gather backward kernels.
#pragma once

#include "plan/call.h"

namespace spattn::sm90 {

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns. Beyond 256 columns, values are the
// first columns of keys. Tiles of BlockQ query rows, heads of a group mostly, and BlockK listed keys.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct GatherBackward {
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
