// SPDX-License-Identifier: MIT
// What the host may know of the sm80 gather forward kernels.
#pragma once

#include "plan/call.h"

namespace spattn::sm80 {

// How a CTA meets its list: so many keys at once, of which shared memory has so many steps.
struct ListSteps {
    int keys, stages;
};

// D: f16 or bf16. HeadDim, HeadDimV: of the tiles; operands may have fewer columns, and any strides. Beyond 256 columns,
// values are the first columns of keys. A CTA has Block query rows, heads of a group mostly.
template <Dtype D, int HeadDim, int HeadDimV, int Block>
struct GatherForward {
    static constexpr bool value_in_key = HeadDim > 256;
    // More than 256 columns of out are shared by two sets of warps.
    static constexpr int column_parts = HeadDimV > 256 ? 2 : 1, part_columns = HeadDimV / column_parts;
    static constexpr int ctas = part_columns <= 64 ? 3 : part_columns <= 128 ? 2 : 1;  // of a processor
    // Keys of one step come while those of another are used. Of 576 columns there is no room for that where a CTA may
    // have 99 KiB (Ada, and Ampere but for A100): few keys come, and all wait for them.
    static constexpr ListSteps usual = {HeadDim > 128 ? 32 : 64, 2};
    static constexpr ListSteps least = value_in_key ? ListSteps{16, 1} : usual;
    static constexpr int tile_bytes(ListSteps steps) {
        return 2 * (Block * HeadDim + steps.stages * steps.keys * (HeadDim + (value_in_key ? 0 : HeadDimV)));
    }
    // Bytes of shared memory: the tiles, and which keys they are.
    static constexpr int shared_bytes(ListSteps steps) { return tile_bytes(steps) + 1024; }
    static void run(const ForwardArgs& args);
    static void prepare(int32_t device);
};

}  // namespace spattn::sm80
