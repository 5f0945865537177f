// SPDX-License-Identifier: MIT
// Descriptors of the bulk tensor copy engine.
#pragma once

#include <cuda.h>

#include "plan/kernel.h"

namespace spattn::runtime {

// Sizes of a bf16 operand [batch, heads, seq, head_dim].
struct Sizes {
    int64_t batch, heads, seq, head_dim;
};

// Finds the driver's encoder, so that no launch has to.
void prepare_tensor_maps();

// True where the engine can read the operand: column stride 1, address and other strides multiples of 16 bytes.
bool has_tensor_map(const TensorView& operand, const Sizes& sizes);

// Boxes of one swizzled panel of 64 columns and `rows` rows of one head. Coordinates: column, head, row, batch.
CUtensorMap make_tensor_map(const TensorView& operand, const Sizes& sizes, int rows);

}  // namespace spattn::runtime
