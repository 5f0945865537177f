// SPDX-License-Identifier: MIT
// Verbs on tiles, sixteen vectors of 64 bytes, for generic/panels.h. An arch includes its element.h first, which says
// what tiles hold.
#pragma once

#include "cpu/generic/panel.h"

namespace spattn::cpu {
namespace {

// The number of an element of two vectors, one after the other, for each place of their interleaved elements.
struct Interleaved {
    uint16_t low[32], high[32];
    constexpr Interleaved() : low(), high() {
        for (int i = 0; i < 32; ++i) low[i] = uint16_t(i / 2 + (i % 2) * 32), high[i] = uint16_t(low[i] + 16);
    }
};
constexpr Interleaved interleaved;

// Two rows of 32 become a row of each of two right tiles: elements of the same column stand side by side.
inline void interleave(const Element* a, const Element* b, __m512i& low, __m512i& high) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    low = _mm512_permutex2var_epi16(x, _mm512_loadu_si512(interleaved.low), y);
    high = _mm512_permutex2var_epi16(x, _mm512_loadu_si512(interleaved.high), y);
}

// A row of a left tile: 32 terms, those of a first.
inline void store_terms(Element* out, Vec a, Vec b) { _mm512_store_si512(out, narrow(a, b)); }
// A row of a right tile: two terms of sixteen lanes, side by side.
inline void store_pairs(Element* out, Vec a, Vec b) { _mm512_store_si512(out, narrow_pairs(a, b)); }
// The same of what becomes a result: to nearest, ties to even, as rows are stored.
inline void store_pairs_to_even(Element* out, Vec a, Vec b) { _mm512_store_si512(out, narrow_pairs_to_even(a, b)); }

// Sixteen vectors of sixteen pairs: rows become columns.
inline void transpose_pairs(__m512i (&x)[16]) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    // x[4 g + c] holds, in its 128 bits number q, column 4 q + c of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512i even_low = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        y[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        y[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        y[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        y[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}

inline void store_tile(const __m512i (&x)[16], Tile* out) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_si512(out->rows[i], x[i]);
}

// Sixteen rows of 32 elements as a left tile, or transposed as a right one, whose lanes they are.
inline void pack_rows(const Element* x, int64_t ld, bool transposed, Tile* out) {
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(x + i * ld);
    if (transposed) transpose_pairs(rows);
    store_tile(rows, out);
}

// 32 rows of 32 elements as two right tiles, or transposed as two left ones, whose terms they are. `high` may be null.
inline void pack_terms(const Element* x, int64_t ld, bool transposed, Tile* low, Tile* high) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) interleave(x + 2 * i * ld, x + (2 * i + 1) * ld, a[i], b[i]);
    if (transposed) transpose_pairs(a);
    store_tile(a, low);
    if (!high) return;
    if (transposed) transpose_pairs(b);
    store_tile(b, high);
}

// A right tile becomes the left one whose rows are its lanes.
inline void transpose_tile(Tile& tile) {
    __m512i pairs[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) pairs[i] = _mm512_load_si512(tile.rows[i]);
    transpose_pairs(pairs);
    store_tile(pairs, &tile);
}

// 32 columns of two rows as a row of each of two right tiles. `high` may be null.
inline void store_columns(const Element* a, const Element* b, Element* low, Element* high) {
    __m512i x, y;
    interleave(a, b, x, y);
    _mm512_store_si512(low, x);
    if (high) _mm512_store_si512(high, y);
}

// count is a multiple of 32.
inline bool all_finite(const Element* x, int64_t count) {
    const __m512i exponent = _mm512_set1_epi16(element_exponent);
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i += 32)
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(x + i), exponent), exponent);
    return found == 0;
}

}  // namespace
}  // namespace spattn::cpu
