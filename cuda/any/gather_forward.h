// SPDX-License-Identifier: MIT
// Plain CUDA over lists of keys, the plan's or a call's, for every dtype, head_dim and stride.
#pragma once

#include "plan/call.h"

namespace spattn::any {

template <Dtype D>
struct GatherForward {
    static void run(const ForwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::any
