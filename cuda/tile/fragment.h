// SPDX-License-Identifier: MIT
// Who holds what of an accumulator tile of 64 rows: value i of thread t of the warpgroup is at (row, column), whatever
// the tile's width. Masks of tensor core kernels are stored in this order: a thread has one word of block_k / 2 bits
// for each 64 rows, bit i for value i, so that a masked block costs a thread one load.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SPATTN_HOST_DEVICE __host__ __device__
#else
#define SPATTN_HOST_DEVICE
#endif

namespace spattn::tile {

constexpr int fragment_rows = 64, fragment_threads = 128;

SPATTN_HOST_DEVICE constexpr int fragment_row(int thread, int i) {
    return 16 * (thread / 32) + (thread % 32) / 4 + 8 * ((i >> 1) & 1);
}
SPATTN_HOST_DEVICE constexpr int fragment_column(int thread, int i) {
    return 8 * (i >> 2) + 2 * (thread & 3) + (i & 1);
}

// The inverse, as a bit number within a mask of rows x block_k.
SPATTN_HOST_DEVICE constexpr int fragment_bit(int row, int column, int block_k) {
    const int in_part = row % fragment_rows;
    const int thread = 32 * (in_part / 16) + 4 * (in_part % 8) + (column % 8) / 2;
    const int i = 4 * (column / 8) + 2 * ((in_part % 16) / 8) + column % 2;
    return (row / fragment_rows * fragment_threads + thread) * (block_k / 2) + i;
}

// 64-bit words of a mask whose tile has block_q rows and block_k columns.
constexpr int fragment_words(int block_q, int block_k) {
    return block_q / fragment_rows * fragment_threads * (block_k / 2) / 64;
}

// A PermuteMask (plan/kernel.h) for blocks of multiples of 64 queries, and 64 or 128 keys.
inline void permute_to_fragments(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    const int values = block_k / 2;
    for (int w = 0; w < fragment_words(block_q, block_k); ++w) out[w] = 0;
    for (int part = 0; part < block_q / fragment_rows; ++part)
        for (int thread = 0; thread < fragment_threads; ++thread) {
            uint64_t word = 0;
            for (int i = 0; i < values; ++i) {
                const int bit = (part * fragment_rows + fragment_row(thread, i)) * block_k + fragment_column(thread, i);
                word |= (bits[bit / 64] >> (bit % 64) & 1) << i;
            }
            const int at = (part * fragment_threads + thread) * values;
            out[at / 64] |= word << (at % 64);
        }
}

// Masks for tiles whose rows are keys: columns of 64 queries at a time, and for each the parts of 64 keys.
SPATTN_HOST_DEVICE constexpr int key_fragment_bit(int query, int key, int block_k) {
    return query / 64 * (block_k * 64) + fragment_bit(key, query % 64, 64);
}

// A PermuteMask for blocks of multiples of 64 queries and keys.
inline void permute_to_key_fragments(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    for (int w = 0; w < block_q * block_k / 64; ++w) out[w] = 0;
    for (int query = 0; query < block_q; ++query)
        for (int key = 0; key < block_k; ++key) {
            const int from = query * block_k + key, to = key_fragment_bit(query, key, block_k);
            out[to / 64] |= (bits[from / 64] >> (from % 64) & 1) << (to % 64);
        }
}

// First for tiles whose rows are keys, then for such whose rows are queries, columns of 64 keys at a time.
inline void permute_to_both_fragments(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    permute_to_key_fragments(bits, block_q, block_k, out);
    uint64_t* const second = out + block_q * block_k / 64;
    for (int w = 0; w < block_q * block_k / 64; ++w) second[w] = 0;
    for (int query = 0; query < block_q; ++query)
        for (int key = 0; key < block_k; ++key) {
            const int from = query * block_k + key, to = key_fragment_bit(key, query, block_q);
            second[to / 64] |= (bits[from / 64] >> (from % 64) & 1) << (to % 64);
        }
}

}  // namespace spattn::tile
