// SPDX-License-Identifier: MIT
// Verbs on tiles of bf16 for generic/panels.h.
#pragma once

#include "cpu/neonbf16/element.h"
#include "cpu/generic/panel.h"

namespace spattn::cpu {
namespace {

inline uint16_t* bits_of(Bf16* x) { return reinterpret_cast<uint16_t*>(x); }
inline const uint16_t* bits_of(const Bf16* x) { return reinterpret_cast<const uint16_t*>(x); }
inline uint32_t* words_of(Bf16* x) { return reinterpret_cast<uint32_t*>(x); }
inline const uint32_t* words_of(const Bf16* x) { return reinterpret_cast<const uint32_t*>(x); }

// Eight numbers to bf16, to nearest, ties to even; NaN stays NaN.
inline uint16x8_t narrow(float32x4_t a, float32x4_t b) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b));
}
// A row of a left tile: 32 terms, those of a first.
inline void store_terms(Bf16* out, Vec a, Vec b) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        vst1q_u16(bits_of(out) + 8 * i, narrow(a.part[2 * i], a.part[2 * i + 1]));
        vst1q_u16(bits_of(out) + 16 + 8 * i, narrow(b.part[2 * i], b.part[2 * i + 1]));
    }
}
// A row of a right tile: two terms of sixteen lanes, side by side.
inline void store_pairs(Bf16* out, Vec a, Vec b) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        vst2q_u16(bits_of(out) + 16 * i,
                  (uint16x8x2_t{{narrow(a.part[2 * i], a.part[2 * i + 1]), narrow(b.part[2 * i], b.part[2 * i + 1])}}));
}
inline void store_pairs_to_even(Bf16* out, Vec a, Vec b) { store_pairs(out, a, b); }

// Sixteen columns of two rows as a row of a right tile.
inline void interleave(const Bf16* a, const Bf16* b, Bf16* out) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        vst2q_u16(bits_of(out) + 16 * i,
                  (uint16x8x2_t{{vld1q_u16(bits_of(a) + 8 * i), vld1q_u16(bits_of(b) + 8 * i)}}));
}
// 32 columns of two rows as a row of each of two right tiles. `high` may be null.
inline void store_columns(const Bf16* a, const Bf16* b, Bf16* low, Bf16* high) {
    interleave(a, b, low);
    if (high) interleave(a + 16, b + 16, high);
}

// Sixteen rows of sixteen pairs, `ld` pairs from one to the next: rows become columns of a tile, four by four.
inline void transpose_pairs(const uint32_t* x, int64_t ld, Tile* out) {
    for (int row = 0; row < 16; row += 4)
        for (int column = 0; column < 16; column += 4) {
            const uint32_t* const from = x + row * ld + column;
            const uint32x4_t a = vld1q_u32(from), b = vld1q_u32(from + ld), c = vld1q_u32(from + 2 * ld),
                             d = vld1q_u32(from + 3 * ld);
            const uint32x4x2_t even = vzipq_u32(a, c), odd = vzipq_u32(b, d);
            const uint32x4x2_t first = vzipq_u32(even.val[0], odd.val[0]), last = vzipq_u32(even.val[1], odd.val[1]);
            const uint32x4_t columns[4] = {first.val[0], first.val[1], last.val[0], last.val[1]};
            for (int i = 0; i < 4; ++i) vst1q_u32(words_of(out->rows[column + i]) + row, columns[i]);
        }
}

// A right tile becomes the left one whose rows are its lanes.
inline void transpose_tile(Tile& tile) {
    const Tile copy = tile;
    transpose_pairs(words_of(copy.rows[0]), 16, &tile);
}

// Sixteen rows of 32 elements as a left tile, or transposed as a right one, whose lanes they are.
inline void pack_rows(const Bf16* x, int64_t ld, bool transposed, Tile* out) {
    if (transposed) return transpose_pairs(words_of(x), ld / 2, out);
    for (int i = 0; i < 16; ++i) __builtin_memcpy(out->rows[i], x + i * ld, sizeof out->rows[i]);
}

// 32 rows of 32 elements as two right tiles, or transposed as two left ones, whose terms they are. `high` may be null.
inline void pack_terms(const Bf16* x, int64_t ld, bool transposed, Tile* low, Tile* high) {
    for (int i = 0; i < 16; ++i)
        store_columns(x + 2 * i * ld, x + (2 * i + 1) * ld, low->rows[i], high ? high->rows[i] : nullptr);
    if (!transposed) return;
    transpose_tile(*low);
    if (high) transpose_tile(*high);
}

// count is a multiple of 32.
inline bool all_finite(const Bf16* x, int64_t count) {
    const uint16x8_t exponent = vdupq_n_u16(0x7f80);
    uint16x8_t found = vdupq_n_u16(0);
    for (int64_t i = 0; i < count; i += 8)
        found = vorrq_u16(found, vceqq_u16(vandq_u16(vld1q_u16(bits_of(x) + i), exponent), exponent));
    return vmaxvq_u16(found) == 0;
}

}  // namespace
}  // namespace spattn::cpu
