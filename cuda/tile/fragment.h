// SPDX-License-Identifier: MIT
// Who holds what of an accumulator tile of 64 rows: value i of thread t of the warpgroup is at (row, column), whatever
// the tile's width. Masks of tensor core kernels are stored in this order: a thread has one word of block_k / 2 bits
// for each 64 rows, bit i for value i, so that a masked block costs a thread one load.
#pragma once

#include <cstdint>

#include "ptx/host_device.h"

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

// Masks for tiles whose rows are keys: columns of 64 queries at a time, and for each the parts of 64 keys.
SPATTN_HOST_DEVICE constexpr int key_fragment_bit(int query, int key, int block_k) {
    return query / 64 * (block_k * 64) + fragment_bit(key, query % 64, 64);
}

// ---- masks in this order, by words: a tile of 64 rows and 64 columns is a word for each row ----

// The two lowest bits of each byte of two rows, eight apart, as the 32 bits of the thread that holds those columns.
inline uint32_t join_pairs(uint64_t upper, uint64_t lower) {
    constexpr uint64_t pairs = 0x0303030303030303;
    uint64_t x = (upper & pairs) | (lower & pairs) << 2;
    x = (x | x >> 4) & 0x00FF00FF00FF00FF;
    x = (x | x >> 8) & 0x0000FFFF0000FFFF;
    return uint32_t(x | x >> 16);
}

// Calls put(thread, bits) with the 32 bits of each thread for a tile; row(n) is a word.
template <class Row, class Put>
void for_each_fragment(Row&& row, Put&& put) {
    for (int thread = 0; thread < fragment_threads; thread += 4) {
        const uint64_t upper = row(fragment_row(thread, 0)), lower = row(fragment_row(thread, 2));
        for (int pair = 0; pair < 4; ++pair) put(thread + pair, join_pairs(upper >> 2 * pair, lower >> 2 * pair));
    }
}

// Rows of a tile become its columns: halves change places, then quarters within halves, down to single bits.
// After Hacker's Delight, 7-3.
inline void transpose_tile(uint64_t (&rows)[64]) {
    uint64_t mask = 0x00000000FFFFFFFF;
    for (int step = 32; step; step /= 2, mask ^= mask << step)
        for (int n = 0; n < 64; n = (n + step + 1) & ~step) {
            const uint64_t other = (rows[n] >> step ^ rows[n + step]) & mask;
            rows[n] ^= other << step, rows[n + step] ^= other;
        }
}

// A PermuteMask (plan/kernel.h) for tiles of multiples of 64 rows, of which each query has so many, and 64 or 128 keys.
template <int Heads = 1>
void permute_to_fragments(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    const int rows = block_q * Heads, values = block_k / 2, words = block_k / 64;
    for (int w = 0; w < fragment_words(rows, block_k); ++w) out[w] = 0;
    for (int part = 0; part < rows / fragment_rows; ++part)
        for (int word = 0; word < words; ++word)
            for_each_fragment([&](int row) { return bits[(part * fragment_rows + row) / Heads * words + word]; },
                              [&](int thread, uint64_t found) {
                                  const int at = (part * fragment_threads + thread) * values + word * 32;
                                  out[at / 64] |= found << (at % 64);
                              });
}

// A PermuteMask for blocks of multiples of 64 queries and keys: first for tiles whose rows are keys, then for such whose
// rows are queries, columns of 64 keys at a time.
inline void permute_to_both_fragments(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    const int words = block_k / 64;
    uint64_t* const second = out + block_q * words;
    for (int w = 0; w < 2 * block_q * words; ++w) out[w] = 0;
    for (int query = 0; query < block_q; query += 64)
        for (int key = 0; key < block_k; key += 64) {
            uint64_t tile[64];
            for (int row = 0; row < 64; ++row) tile[row] = bits[(query + row) * words + key / 64];
            const auto write = [&](uint64_t* to, int first) {
                for_each_fragment([&](int row) { return tile[row]; },
                                  [&](int thread, uint64_t found) {
                                      const int at = first + thread * 32;
                                      to[at / 64] |= found << (at % 64);
                                  });
            };
            write(second, key_fragment_bit(key, query, block_q));
            transpose_tile(tile);
            write(out, key_fragment_bit(query, key, block_k));
        }
}

// The same for blocks of 128 x 128, and after these tiles a word that says which quarters of a block have kept pairs:
// bit 2 q + k for the q-th 64 queries and the k-th 64 keys, and bit 32 + 2 k + q. A block without any pair says that all
// of them have: who walks a list of blocks may rely on a quarter of each.
inline void permute_to_both_fragments_and_quarters(const uint64_t* bits, int block_q, int block_k, uint64_t* out) {
    permute_to_both_fragments(bits, block_q, block_k, out);
    const int words = block_k / 64;
    uint64_t quarters = 0;
    for (int query = 0; query < block_q; ++query)
        for (int k = 0, q = query / 64; k < words; ++k)
            if (bits[query * words + k]) quarters |= uint64_t(1) << (2 * q + k) | uint64_t(1) << (32 + 2 * k + q);
    out[2 * block_q * words] = quarters ? quarters : 0x0000000F0000000F;
}

}  // namespace spattn::tile
