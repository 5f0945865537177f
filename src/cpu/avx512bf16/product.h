// SPDX-License-Identifier: MIT
// The product of panels by VDPBF16PS: a pair of terms of a row of A is broadcast to sixteen lanes.
#pragma once

#include "cpu/avx512bf16/element.h"
#include "cpu/avx512/tiles.h"
#include "cpu/generic/gemm.h"

namespace spattn::cpu {
namespace {

// What products run at here, for costs: flops a clock of one core. An instruction is 64 flops, and Zen 4 begins one a
// clock. Intel's cores do float32 products twice as fast: on a Xeon attention took half the time in them.
inline double product_flops_per_clock() { return __builtin_cpu_is("intel") ? 20 : 60; }

constexpr bool takes_rows = false;

// Vector instructions need no setting up.
inline void begin_products() {}
inline void end_products() {}

inline __m512bh broadcast_pair(const Element* x) {
    int pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

// Rows [row, row + M) of a tile of A meet N tiles of B.
template <int M, int N, Store mode>
inline void multiply_rows(const TileProduct& g, int64_t tile, int row, int64_t column) {
    float* c = g.c + (tile * 16 + row) * g.ldc + column * 16;
    const bool adds = mode == Store::add && !g.is_first;
    Vec sums[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) sums[i][j] = adds ? load(c + i * g.ldc + j * 16) : set1(0.f);
    for (const Terms* t = g.terms; t < g.terms + g.count; ++t) {
        const Tile *a = t->a + tile * g.a_row, *b = t->b + column;
        for (int step = 0; step < t->steps; ++step, ++a, b += g.b_step)
            for (int pair = 0; pair < 16; ++pair) {
                __m512bh lanes_of[N];
#pragma GCC unroll 16
                for (int j = 0; j < N; ++j) lanes_of[j] = (__m512bh)_mm512_load_si512(b[j].rows[pair]);
#pragma GCC unroll 16
                for (int i = 0; i < M; ++i) {
                    const __m512bh x = broadcast_pair(a->rows[row + i] + 2 * pair);
#pragma GCC unroll 16
                    for (int j = 0; j < N; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], x, lanes_of[j]);
                }
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) store(c + i * g.ldc + j * 16, sums[i][j]);
}

// Rows [first, end) of tiles of C, n in each. Nothing is done meanwhile: there is one kind of unit.
template <Store mode, class Meanwhile>
inline void multiply_panels(const TileProduct& g, int first, int end, int n, Meanwhile&&) {
    for (int i = first; i < end; ++i) {
        int j = 0;
        for (; j + 2 <= n; j += 2)
            for (int row = 0; row < 16; row += 8) multiply_rows<8, 2, mode>(g, i, row, j);
        if (j < n)
            for (int row = 0; row < 16; row += 8) multiply_rows<8, 1, mode>(g, i, row, j);
    }
}

}  // namespace
}  // namespace spattn::cpu
