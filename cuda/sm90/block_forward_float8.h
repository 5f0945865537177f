// SPDX-License-Identifier: MIT
// What the host may know of the sm90 block forward kernels for operands of float8.
#pragma once

#include "sm90/block_forward.h"

namespace spattn::sm90 {

// D: of v and out. As BlockForward otherwise, for tokens in their own order.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct BlockForwardFloat8 {
    static void run(const ForwardArgs& args);  // joins the parts of split rows, too
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
