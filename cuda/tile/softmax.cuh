// SPDX-License-Identifier: MIT
// Online softmax of the two rows that a thread shares with the other three of its quad, and verbs on a 64 x 128 tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/convert.cuh"

namespace spattn::tile {

// Value i of a thread belongs to its row (i >> 1) & 1: the rows r and r + 8.
__device__ __forceinline__ constexpr int row_of(int i) { return (i >> 1) & 1; }

// Bit i of word keeps value i.
__device__ __forceinline__ void mask(float (&s)[64], uint64_t word) {
    const uint32_t low = uint32_t(word), high = uint32_t(word >> 32);
#pragma unroll
    for (int i = 0; i < 64; ++i) ptx::minus_infinity_unless(s[i], (i < 32 ? low : high) & (1u << (i & 31)));
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

struct RowState {
    float m[2] = {-INFINITY, -INFINITY};  // what probabilities are relative to: at most 2^slack below the true maximum
    float l[2] = {0, 0};                  // this thread's share of sum(exp(s - m))
};

// Probabilities may exceed 1 by this power of two before m follows the maximum: their sums stay far inside fp32, and
// most
// steps rescale nothing. An idea of FlashAttention-4, https://github.com/Dao-AILab/flash-attention.
constexpr float slack = 8;

// Turns scores into probabilities and merges them into the rows. True where what is accumulated must be multiplied by
// `factor` (the same answer for a whole warp).
__device__ __forceinline__ bool softmax(float (&s)[64], RowState& rows, float scale_log2, float (&factor)[2]) {
    float maximum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float x = s[2 * h], y = s[2 * h + 1];
#pragma unroll
        for (int i = 4; i < 64; i += 4) x = fmaxf(x, s[i + 2 * h]), y = fmaxf(y, s[i + 2 * h + 1]);
        maximum[h] = quad_max(fmaxf(x, y));
    }
    // -inf - -inf is NaN and compares false: rows without a key never grow.
    const bool grows = (maximum[0] - rows.m[0]) * scale_log2 > slack || (maximum[1] - rows.m[1]) * scale_log2 > slack;
    const bool rescale = __any_sync(~0u, grows);
    if (rescale) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float m = fmaxf(rows.m[h], maximum[h]);
            factor[h] = m == rows.m[h] ? 1 : ptx::exp2_approx((rows.m[h] - m) * scale_log2);
            rows.l[h] *= factor[h];
            rows.m[h] = m;
        }
    }
    // A row that has seen no key yet has m = -infinity; any finite offset then makes its probabilities 0, not NaN.
    float offset[2], sum[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) offset[h] = rows.m[h] == -INFINITY ? 0 : -rows.m[h] * scale_log2;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, offset[row_of(i)]));
        sum[row_of(i)] += s[i];
    }
    rows.l[0] += sum[0], rows.l[1] += sum[1];
    return rescale;
}

// Accumulators of one product as the a operand of the next: the layouts agree.
__device__ __forceinline__ void pack(const float (&s)[64], uint32_t (&p)[8][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) p[i][j] = ptx::pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
}

__device__ __forceinline__ void scale_rows(float (&tile)[64], float row0, float row1) {
#pragma unroll
    for (int i = 0; i < 64; ++i) tile[i] *= row_of(i) ? row1 : row0;
}

// The tile as bf16 into two swizzled 64-column panels, 64 rows of 128 bytes each. Base a multiple of 1024.
__device__ __forceinline__ void store_swizzled(const float (&tile)[64], uint32_t panel0, uint32_t panel1, int thread) {
    const int lane = thread % 32, row = 16 * (thread / 32) + (lane & 15);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const uint32_t column = 16 * (c % 4) + 8 * (lane >> 4);
        const uint32_t at = (c < 4 ? panel0 : panel1) + row * 128 + ((column * 2) ^ ((row & 7) << 4));
        ptx::store_matrix_x4(
            at, ptx::pack_bf16(tile[8 * c], tile[8 * c + 1]), ptx::pack_bf16(tile[8 * c + 2], tile[8 * c + 3]),
            ptx::pack_bf16(tile[8 * c + 4], tile[8 * c + 5]), ptx::pack_bf16(tile[8 * c + 6], tile[8 * c + 7]));
    }
}

}  // namespace spattn::tile
