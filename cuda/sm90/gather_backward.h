// SPDX-License-Identifier: MIT
// What the host may know of the sm90 gather backward kernels.
#pragma once

#include "any/gather_backward.h"
#include "plan/kernel.h"

namespace spattn::sm90 {

// What a workspace holds: at its start lse and delta as any's kernels leave them, then the sums of dk and dv, a row for
// each key of each kv head; or what any's kernels lay out, which serve views that copies of 16 bytes cannot read. Where
// values are columns of keys, sums of dv are columns of those of dk.
struct GatherBackwardSpace {
    size_t sums, dv, sums_bytes, bytes;  // offsets of all sums and of dv's, the size of all sums, and the whole

    GatherBackwardSpace(const Problem& problem, const TokenListsView& tokens);
};

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns. Beyond 256 columns, values are the
// first columns of keys. Tiles of BlockQ query rows, heads of a group mostly, and BlockK listed keys.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
struct GatherBackward {
    static void run(const BackwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm90
