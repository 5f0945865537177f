// SPDX-License-Identifier: MIT
// Who holds what of a 64 x 128 accumulator tile: value i of thread t of the warpgroup is at (row, column). Masks of
// tensor core kernels are stored in this order: bit i of the 64-bit word of (64-row part, thread), so that a masked
// block costs a thread one load.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SPATTN_HOST_DEVICE __host__ __device__
#else
#define SPATTN_HOST_DEVICE
#endif

namespace spattn::tile {

constexpr int fragment_rows = 64, fragment_columns = 128, fragment_threads = 128;

SPATTN_HOST_DEVICE constexpr int fragment_row(int thread, int i) {
    return 16 * (thread / 32) + (thread % 32) / 4 + 8 * ((i >> 1) & 1);
}
SPATTN_HOST_DEVICE constexpr int fragment_column(int thread, int i) {
    return 8 * (i >> 2) + 2 * (thread & 3) + (i & 1);
}

// The inverse, as a bit number within a mask of rows x 128.
SPATTN_HOST_DEVICE constexpr int fragment_bit(int row, int column) {
    const int in_part = row % fragment_rows;
    const int thread = 32 * (in_part / 16) + 4 * (in_part % 8) + (column % 8) / 2;
    const int i = 4 * (column / 8) + 2 * ((in_part % 16) / 8) + column % 2;
    return (row / fragment_rows * fragment_threads + thread) * 64 + i;
}

constexpr int fragment_words(int block_q) { return block_q / fragment_rows * fragment_threads; }

// A PermuteMask (plan/kernel.h) for blocks of multiples of 64 queries and 128 keys.
inline void permute_to_fragments(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    for (int part = 0; part < block_q / fragment_rows; ++part)
        for (int thread = 0; thread < fragment_threads; ++thread) {
            uint64_t word = 0;
            for (int i = 0; i < 64; ++i) {
                const int bit = (part * fragment_rows + fragment_row(thread, i)) * block_k + fragment_column(thread, i);
                word |= (bits[bit / 64] >> (bit % 64) & 1) << i;
            }
            out[part * fragment_threads + thread] = word;
        }
}

}  // namespace spattn::tile
