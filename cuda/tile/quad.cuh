// SPDX-License-Identifier: MIT
// Rows of tiles as memory has them, 16 neighbouring bytes a thread, out of what the four lanes of a quad hold of them,
// and back.
#pragma once

#include <cstdint>

#include "tile/dtype.cuh"

namespace spattn::tile {

// Word i of lane t of a quad becomes word t of its lane i: pairs change places, then neighbours.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
    for (int step = 2; step; step /= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const bool is_upper = lane & step;
            const uint32_t theirs = __shfl_xor_sync(~0u, is_upper ? words[i] : words[i + step], step);
            (is_upper ? words[i] : words[i + step]) = theirs;
        }
}

// A quad's row `half` of 32 columns, whose values lie from `first` on: lane t gets the 8 columns from 8 t on.
template <Dtype D, int Values>
__device__ __forceinline__ void pack_row(const float (&tile)[Values], int first, int half, float factor, int lane,
                                         uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = first + 4 * i + 2 * half;
        words[i] = pack<D>(tile[at] * factor, tile[at + 1] * factor);
    }
    transpose_quad(words, lane);
}

}  // namespace spattn::tile
