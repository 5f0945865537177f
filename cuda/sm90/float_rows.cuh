// SPDX-License-Identifier: MIT
// Sums of floats of keys' rows (any/key_sums.cuh), four of them an addition, which Hopper is the first to have.
#pragma once

#include "any/key_sums.cuh"

namespace spattn::sm90 {

// A warp's 16 rows of a tile of 64 keys and 64 or 32 columns, as accumulators have them; eight lanes have a row.
struct FloatRows {
    int keys[4];  // of the rows for which this lane stands

    __device__ FloatRows(const int32_t* tile_keys, int thread) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            keys[i] = tile_keys[16 * (thread / 32) + thread % 32 / 8 * 2 + i / 2 * 8 + i % 2];
    }

    // To columns from `first` on, below `end`, of rows of so many columns.
    template <int Values>
    __device__ __forceinline__ void add(const float (&x)[Values], float factor, float* sums, int columns, int first,
                                        int end, int thread) const {
        const bool is_odd = thread & 1, is_second = thread & 4;
        const int column = first + thread / 4 % 2 * 16 + thread % 2 * 8 + thread / 2 % 2 * 4;
#pragma unroll
        for (int half = 0; half < Values / 16; ++half)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float y[2][4];  // of 8 columns and of those 16 further: the lane's 4
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int n = i / 2, e = i % 2, at = 16 * half + 8 * n + 2 * h + e;
                    const float mine = factor * (is_odd ? x[at + 4] : x[at]);
                    const float theirs = __shfl_xor_sync(~0u, factor * (is_odd ? x[at] : x[at + 4]), 1);
                    y[n][e] = is_odd ? theirs : mine, y[n][2 + e] = is_odd ? mine : theirs;
                }
                float first_row[4], second_row[4];  // of two rows side by side
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float mine = is_second ? y[1][e] : y[0][e];
                    const float theirs = __shfl_xor_sync(~0u, is_second ? y[0][e] : y[1][e], 4);
                    first_row[e] = is_second ? theirs : mine, second_row[e] = is_second ? mine : theirs;
                }
                if (column + 32 * half >= end) continue;
                add_row(sums + column + 32 * half, keys[2 * h], columns, first_row);
                add_row(sums + column + 32 * half, keys[2 * h + 1], columns, second_row);
            }
    }

private:
    __device__ __forceinline__ static void add_row(float* sums, int key, int columns, const float (&x)[4]) {
        if (key != no_token) ptx::add_global(sums + int64_t(key) * columns, x[0], x[1], x[2], x[3]);
    }
};

}  // namespace spattn::sm90
