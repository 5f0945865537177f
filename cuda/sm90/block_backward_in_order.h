// SPDX-License-Identifier: MIT
// What the host may know of the sm90 block backward that adds dq in the order of keys.
#pragma once

#include "plan/call.h"

namespace spattn::sm90 {

// As BlockBackward, with the same workspace and the same bits in every call. args.tasks go by key, each head's in the
// order of its rows: who adds waits for tasks that were taken before.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct BlockBackwardInOrder {
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
