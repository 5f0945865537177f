// SPDX-License-Identifier: MIT
// Descriptors of the bulk tensor copy engine.
#pragma once

#include <cuda.h>

#include "runtime/operand.h"

namespace spattn::runtime {

// Finds the driver's encoder, so that no launch has to.
void prepare_tensor_maps();

// Boxes of one swizzled panel of 128 bytes a row and `rows` rows of one head. Coordinates: column, head, row, batch.
// Columns beyond head_dim arrive as zeros and are not written.
CUtensorMap make_tensor_map(const TensorView& operand, const Sizes& sizes, Dtype dtype, int rows);

}  // namespace spattn::runtime
