// SPDX-License-Identifier: MIT
// Online softmax of the two rows that a thread shares with the other three of its quad, and verbs on a tile of 64 rows:
// a thread has `Values` values, half as many as the tile has columns.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "ptx/convert.cuh"
#include "tile/dtype.cuh"

namespace spattn::tile {

// Value i of a thread belongs to its row (i >> 1) & 1: the rows r and r + 8.
__device__ __forceinline__ constexpr int row_of(int i) { return (i >> 1) & 1; }

// Bit i of word keeps value i.
template <int Values, class Word>
__device__ __forceinline__ void mask(float (&s)[Values], Word word) {
    static_assert(sizeof(Word) * 8 == Values, "a word has a bit for each value");
    const uint32_t low = uint32_t(word), high = uint32_t(uint64_t(word) >> 32);
#pragma unroll
    for (int i = 0; i < Values; ++i) ptx::minus_infinity_unless(s[i], (i < 32 ? low : high) & (1u << (i & 31)));
}

// The same with 0 for what is not kept.
template <int Values, class Word>
__device__ __forceinline__ void keep(float (&x)[Values], Word word) {
    static_assert(sizeof(Word) * 8 == Values, "a word has a bit for each value");
    const uint32_t low = uint32_t(word), high = uint32_t(uint64_t(word) >> 32);
#pragma unroll
    for (int i = 0; i < Values; ++i) ptx::zero_unless(x[i], (i < 32 ? low : high) & (1u << (i & 31)));
}

// tanh(into_cap s): what softcap makes of scores, still to be multiplied by the cap. Before the mask, which it would
// lift. Small ones take a series, for 1 - 1 leaves nothing of them.
__device__ __forceinline__ float cap(float s, float into_cap) {
    const float x = s * into_cap, square = x * x;
    const float e = ptx::exp2_approx(x * (2 * float(M_LOG2E)));
    const float series = x * fmaf(square, fmaf(square, 2.f / 15, -1.f / 3), 1.f);
    return square < 0.01f ? series : 1 - 2 * ptx::reciprocal_approx(1 + e);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// What scores of a thread's two rows are multiplied by: a number, or one each.
struct RowScales {
    float of[2];
};
__device__ __forceinline__ float scale_of(float scale, int) { return scale; }
__device__ __forceinline__ float scale_of(const RowScales& scales, int h) { return scales.of[h]; }
// The same of value i of a thread, of which each may have its own; values are asked for in their order.
template <class Scale>
__device__ __forceinline__ float scale_of_value(Scale& scale, int i) {
    return scale_of(scale, row_of(i));
}

template <int Values, class Scale>
__device__ __forceinline__ void cap(float (&s)[Values], const Scale& into_cap) {
#pragma unroll
    for (int i = 0; i < Values; ++i) s[i] = cap(s[i], scale_of(into_cap, row_of(i)));
}

struct RowState {
    float m[2] = {-INFINITY, -INFINITY};  // what probabilities are relative to: the maximum when it was last looked at
    float l[2] = {0, 0};                  // this thread's share of sum(exp(s - m))
};

// m becomes the maximum. Returns in factor what sums so far must be multiplied by.
template <int Values, class Scale>
__device__ __forceinline__ void raise_maximum(const float (&s)[Values], RowState& rows, const Scale& scale_log2,
                                              float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float x = s[2 * h], y = s[2 * h + 1];
#pragma unroll
        for (int i = 4; i < Values; i += 4) x = fmaxf(x, s[i + 2 * h]), y = fmaxf(y, s[i + 2 * h + 1]);
        const float m = fmaxf(rows.m[h], quad_max(fmaxf(x, y)));
        factor[h] = m == rows.m[h] ? 1 : ptx::exp2_approx((rows.m[h] - m) * scale_of(scale_log2, h));  // -inf - -inf is NaN
        rows.l[h] *= factor[h];
        rows.m[h] = m;
    }
}

// Probabilities are made this many powers of two larger than exp(s - m), and so are their sums: of fp16's range most
// lies above 1, and what is far below 1 would lose digits, which a large v brings back.
template <Dtype D>
constexpr float lift = D == Dtype::f16 ? 8 : 0;
template <Dtype D>
constexpr float unlift = D == Dtype::f16 ? 1.f / 256 : 1;  // 2^-lift
// What gradients of scores are multiplied by, for the same reason: by less, for dp may be large.
template <Dtype D>
constexpr float ds_lift = D == Dtype::f16 ? 16 : 1;
template <Dtype D>
constexpr float ds_unlift = 1 / ds_lift<D>;

// A thread's probabilities that make its part of an a operand: 16 keys of 16 bits, or 8 of float32.
template <Dtype D>
constexpr int operand_values = D == Dtype::f32 ? 4 : 8;

// What stands for weights of probabilities where they have none. Weights are told of each two values, in their order,
// when these have been added to the sums.
struct NoWeights {
    __device__ __forceinline__ void operator()(int, float&, float&) const {}
};

// p = exp(s - m), lifted, as the a operand of the next product, and this thread's sums. Two 16-bit values of
// neighbouring keys are a word, and the layouts agree; an operand of float32 has eight keys, of which the even ones
// stand before the odd ones, so that here, too, each thread has what it needs. What products take of such a word is
// theirs to say. A row that has seen no key has m = -infinity: a key gives infinity there, and no key 0.
template <Dtype D, int Values, class Scale, class Weights = NoWeights>
__device__ __forceinline__ void exponentials(const float (&s)[Values], const RowState& rows, Scale& scale_log2,
                                             float (&sum)[2], uint32_t (&p)[Values / operand_values<D>][4],
                                             Weights weights = {}) {
    float offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) offset[h] = fminf(lift<D> - rows.m[h] * scale_of(scale_log2, h), FLT_MAX), sum[h] = 0;
#pragma unroll
    for (int i = 0; i < Values; i += 2) {
        const float scale_x = scale_of_value(scale_log2, i), scale_y = scale_of_value(scale_log2, i + 1);
        float x = ptx::exp2_approx(fmaf(s[i], scale_x, offset[row_of(i)]));
        float y = ptx::exp2_approx(fmaf(s[i + 1], scale_y, offset[row_of(i)]));
        sum[row_of(i)] += x, sum[row_of(i)] += y;
        weights(i, x, y);
        if constexpr (D == Dtype::f32)
            p[i / 4][row_of(i)] = __float_as_uint(x), p[i / 4][row_of(i) + 2] = __float_as_uint(y);
        else
            p[i / 8][i % 8 / 2] = pack<D>(x, y);
    }
    // Sums and words are made here, between the exponentials that leave room for them, and not where they are used.
#pragma unroll
    for (int i = 0; i < 4 * Values / operand_values<D>; ++i) ptx::make_here(p[i / 4][i % 4]);
    ptx::make_here(sum[0], sum[1]);
}

// A thread's probabilities of a row and block may sum up to this before m follows the maximum: what is accumulated
// stays far inside fp32, and inside fp16's range, and hardly a block needs its maximum or a rescaling. That m may lag
// is an idea of FlashAttention-4, https://github.com/Dao-AILab/flash-attention.
template <Dtype D>
constexpr float most = D == Dtype::f16 ? 32768 : 4096;

// Scores into probabilities relative to the maximum that was found last, merged into the rows. False where that does
// not do (the same answer for a whole warp): nothing is merged then.
template <Dtype D, int Values, class Scale, class Weights = NoWeights>
__device__ __forceinline__ bool merge(const float (&s)[Values], RowState& rows, Scale& scale_log2,
                                      uint32_t (&p)[Values / operand_values<D>][4], Weights weights = {}) {
    float sum[2];
    exponentials<D>(s, rows, scale_log2, sum, p, weights);
    if (!__all_sync(~0u, sum[0] <= most<D> && sum[1] <= most<D>)) [[unlikely]]
        return false;
    rows.l[0] += sum[0], rows.l[1] += sum[1];
    return true;
}

// Scores into probabilities, merged into the rows. `fresh`: rows have seen nothing. True where what is accumulated must
// be multiplied by `factor` (the same answer for a whole warp).
template <Dtype D, int Values, class Scale, class Weights = NoWeights>
__device__ __forceinline__ bool softmax(const float (&s)[Values], RowState& rows, Scale scale_log2, bool fresh,
                                        uint32_t (&p)[Values / operand_values<D>][4], float (&factor)[2],
                                        Weights weights = {}) {
    if (!fresh) [[likely]]
        if (merge<D>(s, rows, scale_log2, p, weights)) [[likely]]
            return false;
    float sum[2];
    raise_maximum(s, rows, scale_log2, factor);
    exponentials<D>(s, rows, scale_log2, sum, p, weights);
    rows.l[0] += sum[0], rows.l[1] += sum[1];
    return true;
}

template <int Values>
__device__ __forceinline__ void scale_rows(float (&tile)[Values], float row0, float row1) {
#pragma unroll
    for (int i = 0; i < Values; ++i) tile[i] *= row_of(i) ? row1 : row0;
}

// NaN for each of the two rows where one of its values is not finite, else 0.
template <int Values>
__device__ __forceinline__ void find_not_finite(const float (&tile)[Values], float (&row)[2]) {
    row[0] = row[1] = 0;
#pragma unroll
    for (int i = 0; i < Values; ++i) row[row_of(i)] = fmaf(tile[i], 0.f, row[row_of(i)]);
}

// A bit for each of a warp's 16 rows of which a thread says yes, for its rows r and r + 8.
__device__ __forceinline__ unsigned rows_with(bool first, bool second) {
    unsigned bits = 0;
    const bool yes[2] = {first, second};
    for (int h = 0; h < 2; ++h) {
        const unsigned lanes = __ballot_sync(~0u, yes[h]);
        for (int quad = 0; quad < 8; ++quad) bits |= unsigned((lanes >> 4 * quad & 15) != 0) << (quad + 8 * h);
    }
    return bits;
}

// The tile as the a operand of a product, as probabilities are.
template <Dtype D, int Values>
__device__ __forceinline__ void pack_tile(const float (&tile)[Values], uint32_t (&words)[Values / operand_values<D>][4]) {
#pragma unroll
    for (int i = 0; i < Values; i += 2) {
        if constexpr (D == Dtype::f32)
            words[i / 4][row_of(i)] = __float_as_uint(tile[i]), words[i / 4][row_of(i) + 2] = __float_as_uint(tile[i + 1]);
        else
            words[i / 8][i % 8 / 2] = pack<D>(tile[i], tile[i + 1]);
    }
}

// Such words into swizzled panels of 64 columns, `panel_bytes` apart, 64 rows of 128 bytes each. Base a multiple of
// 1024.
template <int Words>
__device__ __forceinline__ void store_swizzled(const uint32_t (&tile)[Words][4], uint32_t base, uint32_t panel_bytes,
                                               int thread) {
    const int lane = thread % 32, row = 16 * (thread / 32) + (lane & 15);
#pragma unroll
    for (int c = 0; c < Words; ++c) {
        const uint32_t column = 16 * (c % 4) + 8 * (lane >> 4);
        const uint32_t at = base + c / 4 * panel_bytes + row * 128 + ((column * 2) ^ ((row & 7) << 4));
        ptx::store_matrix_x4(at, tile[c][0], tile[c][1], tile[c][2], tile[c][3]);
    }
}

}  // namespace spattn::tile
