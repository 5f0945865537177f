// SPDX-License-Identifier: MIT
// The product of panels by BFMMLA: two rows of A, four terms of each, meet two lanes of B.
#pragma once

#include "cpu/neonbf16/tiles.h"
#include "cpu/generic/gemm.h"

namespace spattn::cpu {
namespace {

// What products run at here, for costs: flops a clock of one core. An instruction is 32 flops, and cores of Neoverse V1
// and later begin two a clock or more. An estimate, not measured on silicon.
inline double product_flops_per_clock() { return 45; }

constexpr bool takes_rows = false;

// Vector instructions need no setting up.
inline void begin_products() {}
inline void end_products() {}

inline bfloat16x8_t terms_of_rows(const Bf16* a, const Bf16* b) {
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(bits_of(a)), vld1_u16(bits_of(b))));
}

// Rows [row, row + 8) of a tile of A meet lanes [lane, lane + 8) of a tile of B. Sums stand by two rows and two lanes.
template <Store mode>
inline void multiply_rows(const TileProduct& g, int64_t tile, int row, int64_t column, int lane) {
    constexpr int pairs = 4;  // of rows, and of lanes
    float* const c = g.c + (tile * 16 + row) * g.ldc + column * 16 + lane;
    float32x4_t sums[pairs][pairs];
#pragma GCC unroll 4
    for (int i = 0; i < pairs; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < pairs; j += 2) {
            const float* const at = c + 2 * i * g.ldc + 2 * j;
            float32x4_t x = vdupq_n_f32(0), y = x;
            if (mode == Store::add && !g.is_first) x = vld1q_f32(at), y = vld1q_f32(at + g.ldc);
            sums[i][j] = vcombine_f32(vget_low_f32(x), vget_low_f32(y));
            sums[i][j + 1] = vcombine_f32(vget_high_f32(x), vget_high_f32(y));
        }
    for (const Terms* t = g.terms; t < g.terms + g.count; ++t) {
        const Tile *a = t->a + tile * g.a_row, *b = t->b + column;
        for (int step = 0; step < t->steps; ++step, ++a, b += g.b_step)
            for (int quad = 0; quad < 8; ++quad) {
                bfloat16x8_t lanes_of[pairs];
#pragma GCC unroll 2
                for (int j = 0; j < pairs; j += 2) {
                    const uint32x4_t first = vld1q_u32(words_of(b->rows[2 * quad]) + lane + 2 * j),
                                     second = vld1q_u32(words_of(b->rows[2 * quad + 1]) + lane + 2 * j);
                    lanes_of[j] = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
                    lanes_of[j + 1] = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
                }
#pragma GCC unroll 4
                for (int i = 0; i < pairs; ++i) {
                    const bfloat16x8_t x =
                        terms_of_rows(a->rows[row + 2 * i] + 4 * quad, a->rows[row + 2 * i + 1] + 4 * quad);
#pragma GCC unroll 4
                    for (int j = 0; j < pairs; ++j) sums[i][j] = vbfmmlaq_f32(sums[i][j], x, lanes_of[j]);
                }
            }
    }
#pragma GCC unroll 4
    for (int i = 0; i < pairs; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < pairs; j += 2) {
            float* const at = c + 2 * i * g.ldc + 2 * j;
            vst1q_f32(at, vcombine_f32(vget_low_f32(sums[i][j]), vget_low_f32(sums[i][j + 1])));
            vst1q_f32(at + g.ldc, vcombine_f32(vget_high_f32(sums[i][j]), vget_high_f32(sums[i][j + 1])));
        }
}

// Rows [first, end) of tiles of C, n in each. Nothing is done meanwhile: there is one kind of unit.
template <Store mode, class Meanwhile>
inline void multiply_panels(const TileProduct& g, int first, int end, int n, Meanwhile&&) {
    for (int i = first; i < end; ++i)
        for (int j = 0; j < n; ++j)
            for (int lane = 0; lane < 16; lane += 8)
                for (int row = 0; row < 16; row += 8) multiply_rows<mode>(g, i, row, j, lane);
}

}  // namespace
}  // namespace spattn::cpu
