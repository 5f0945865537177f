// SPDX-License-Identifier: MIT
// Descriptors of the bulk tensor copy engine.
#pragma once

#include <cuda.h>

#include "runtime/operand.h"

namespace spattn::runtime {

// Finds the driver's encoder, so that no launch has to.
void prepare_tensor_maps();

// Boxes of one swizzled panel of 128 bytes a row and `rows` rows of `heads` heads, whose rows of a token follow each
// other. Coordinates: column, head, row, batch. Columns beyond head_dim arrive as zeros and are not written.
CUtensorMap make_tensor_map(const TensorView& operand, const Sizes& sizes, Dtype dtype, int rows, int heads = 1);

// The same of tokens that have the same remainder by `modulus`. Coordinates: column, head, remainder, number within
// those of this remainder, batch. Where the modulus does not divide the sequence, the first remainders have a token
// more: these have a map of their own, for each map ends where the sequence does, and the other counts remainders from
// `longer_classes` on. A map that no remainder has is empty.
struct ResidueMaps {
    CUtensorMap longer, shorter;
    int32_t longer_classes;
};
ResidueMaps make_residue_maps(const TensorView& operand, const Sizes& sizes, Dtype dtype, int rows, int64_t modulus);

}  // namespace spattn::runtime
