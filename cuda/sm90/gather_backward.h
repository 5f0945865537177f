// SPDX-License-Identifier: MIT
// What the host may know of the sm90 gather backward kernels.
#pragma once

#include "any/gather_backward.h"
#include "plan/kernel.h"

namespace spattn::sm90 {

// What a workspace holds, as offsets: at its start lse and delta as any's kernels leave them, then the sums of dk and dv,
// a row for each key of each kv head, and what a deterministic plan needs for them (key_sums.cuh); or what any's kernels
// lay out, which serve views that copies of 16 bytes cannot read.
struct GatherBackwardSpace {
    struct Sums {
        size_t sums, bounds, quanta;
    };
    Sums dk, dv;            // where values are columns of keys, sums of dv are columns of those of dk
    size_t begin, cleared;  // what is 0 at first: so many bytes from there on
    size_t bytes;           // the whole

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
