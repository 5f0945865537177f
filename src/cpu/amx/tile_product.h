// SPDX-License-Identifier: MIT
// The product of panels on AMX: of eight tile registers, four hold 2 x 2 tiles of C, two of A and two of B, so that
// four loads feed four products. An arch includes its element.h first.
#pragma once

#include "cpu/avx512/tiles.h"
#include "cpu/amx/registers.h"
#include "cpu/generic/gemm.h"

namespace spattn::cpu {
namespace {

// What products run at here, for costs: flops a clock of one core (705 GFLOP/s at 2.1 GHz with loads from L1).
inline double product_flops_per_clock() { return 300; }

// Tile registers of this thread, all 16 rows of 64 bytes, from begin_products() to end_products(). Released, they make
// thread switches cheap again, and leave the clock to others. No class: what unwinds would be a weak symbol.
inline void begin_products() {
    const TileConfig config;
    load_config(config);
}
inline void end_products() { release_tiles(); }

// Loads of tiles name the distance of their rows.
constexpr bool takes_rows = true;

// Two lines of a tile into L1: those after them follow. With all sixteen, attention backward takes 5 to 11 % longer
// (4,096 tokens, head_dim 128).
inline void prefetch_tile(const char* at, int64_t row_bytes) {
    __builtin_prefetch(at), __builtin_prefetch(at + 8 * row_bytes);
}

// M x N tiles of C, in tmm0 to tmm3; A in tmm4 and tmm5, B in tmm6 and tmm7.
template <int M, int N, Store mode, class Meanwhile>
SPATTN_INLINE inline void multiply_block(const TileProduct& g, int64_t row, int64_t column, Meanwhile& meanwhile) {
    float* c = g.c + row * 16 * g.ldc + column * 16;
    const int64_t ldc = g.ldc * int64_t(sizeof(float));
    float* lower = c + 16 * g.ldc;
    if (mode == Store::set || g.is_first) {
        zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    } else {
        load_tile<0>(c, ldc);
        if constexpr (N > 1) load_tile<1>(c + 16, ldc);
        if constexpr (M > 1) load_tile<2>(lower, ldc);
        if constexpr (M > 1 && N > 1) load_tile<3>(lower + 16, ldc);
    }
    for (const Terms* t = g.terms; t < g.terms + g.count; ++t) {
        const char* a = (const char*)(t->a + row * g.a_row);
        const Tile* b = t->b + column;
        const int64_t row_bytes = g.row_bytes, below = g.a_row * int64_t(sizeof(Tile));
        for (int i = 0; i < t->steps; ++i, a += g.step_bytes, b += g.b_step) {
            load_tile<4>(a, row_bytes);
            load_tile<6>(b, 64);
            if constexpr (N > 1) load_tile<7>(b + 1, 64);
            if constexpr (M > 1) load_tile<5>(a + below, row_bytes);
            if constexpr (M > 1) prefetch_tile(a + 2 * below, row_bytes), prefetch_tile(a + 3 * below, row_bytes);
            multiply_tiles<Element, 0, 4, 6>();
            if constexpr (N > 1) multiply_tiles<Element, 1, 4, 7>();
            if constexpr (M > 1) multiply_tiles<Element, 2, 5, 6>();
            if constexpr (M > 1 && N > 1) multiply_tiles<Element, 3, 5, 7>();
            meanwhile();
        }
    }
    store_tile<0>(c, ldc);
    if constexpr (N > 1) store_tile<1>(c + 16, ldc);
    if constexpr (M > 1) store_tile<2>(lower, ldc);
    if constexpr (M > 1 && N > 1) store_tile<3>(lower + 16, ldc);
}

// Rows [first, end) of tiles of C, n in each. meanwhile() is called after each step of 2 x 2 tiles, for work that needs
// no tiles: the unit runs beside the vector units, but only some 500 instructions ahead of them. All is inlined, so
// that what meanwhile() holds stays in registers: stored and loaded each step, it took as long as alone.
template <Store mode, class Meanwhile>
SPATTN_INLINE inline void multiply_panels(const TileProduct& g, int first, int end, int n, Meanwhile&& meanwhile) {
    int i = first;
    for (; i + 2 <= end; i += 2) {
        int j = 0;
        for (; j + 2 <= n; j += 2) multiply_block<2, 2, mode>(g, i, j, meanwhile);
        if (j < n) multiply_block<2, 1, mode>(g, i, j, meanwhile);
    }
    if (i == end) return;
    int j = 0;
    for (; j + 2 <= n; j += 2) multiply_block<1, 2, mode>(g, i, j, meanwhile);
    if (j < n) multiply_block<1, 1, mode>(g, i, j, meanwhile);
}

}  // namespace
}  // namespace spattn::cpu
