// SPDX-License-Identifier: MIT
// What the host may know of the sm80 gather forward kernels.
#pragma once

#include "plan/kernel.h"

namespace spattn::sm80 {

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns, and any strides. Beyond 256 columns,
// values are the first columns of keys. A CTA has Block query rows, heads of a group mostly.
template <Dtype D, int HeadDim, int HeadDimV, int Block>
struct GatherForward {
    static constexpr bool value_in_key = HeadDim > 256;
    static constexpr int step_keys = HeadDim > 128 ? 32 : 64;  // of a list, that a CTA meets at once
    static constexpr int stages = 2;                           // of keys: one comes while another is used
    static constexpr int tile_bytes =
        2 * (Block * HeadDim + stages * step_keys * (HeadDim + (value_in_key ? 0 : HeadDimV)));
    static constexpr int shared_bytes = tile_bytes + 1024;  // and which keys they are
    static void run(const ForwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
