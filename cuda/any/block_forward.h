// SPDX-License-Identifier: MIT
// Plain CUDA for every dtype, head_dim, stride and order: the floor under the tuned kernels.
#pragma once

#include "any/combine.h"
#include "any/mask_order.h"

namespace spattn::any {

// Blocks of 16, 32, and multiples of 64 tokens. Masks may be in the order of the tensor core kernels, which leave
// views to this one that their copy engine does not read.
template <Dtype D>
struct BlockForward {
    static void run(const ForwardArgs& args, MaskOrder order);
    static void prepare(int32_t device);
};

}  // namespace spattn::any
