// SPDX-License-Identifier: MIT
// The kernel of block_backward.cuh with sums of dq in the order of keys (sums_in_order.cuh).
#pragma once

#include "sm90/block_backward.cuh"
#include "sm90/block_backward_in_order.h"

namespace spattn::sm90 {

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardInOrder<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs& args) {
    run_block_backward<BackwardConfig<D, HeadDim, HeadDimV, BlockQ, BlockK, true>>(args);
}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardInOrder<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    prepare_block_backward<BackwardConfig<D, HeadDim, HeadDimV, BlockQ, BlockK, true>>(device);
}

}  // namespace spattn::sm90
