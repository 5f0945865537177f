// SPDX-License-Identifier: MIT
// Plain CUDA for every dtype, head_dim, stride and order: the floor under the tuned kernels.
#pragma once

#include "any/combine.h"

namespace spattn::any {

// Blocks of 16, 32, and multiples of 64 tokens.
template <Dtype D>
struct BlockForward {
    static void run(const ForwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::any
