// SPDX-License-Identifier: MIT
// From tensors to panels. Rows of a block are read where they lie if they are whole steps wide and all alive. Others are
// staged first: side by side, dead rows and all padding zero, for these meet zeros in products.
#pragma once

#include "cpu/generic/not_finite.h"
#include "cpu/generic/panel.h"

namespace spattn::cpu {
namespace {

constexpr int step_terms = 32, tile_rows = 16;
constexpr int steps_of(int64_t terms) { return int((terms + step_terms - 1) / step_terms); }
constexpr int tiles_of(int64_t rows) { return int((rows + tile_rows - 1) / tile_rows); }

// Up to 64 rows of `ld` elements.
struct Staged {
    const Element* x;
    int64_t ld;
};

constexpr int64_t staged_columns(int64_t columns) { return int64_t(steps_of(columns)) * step_terms; }

// Rows are read in pairs of elements, too, so these must begin at even places.
inline bool are_steps(const TensorView& x, const Place& at, int columns, int rows) {
    const bool are_whole = !at.tokens && x.column == 1 && columns % step_terms == 0 && at.count == rows && all_of(at);
    return are_whole && x.row * at.stride % 2 == 0 && (uintptr_t)address<Element>(x, at) % (2 * sizeof(Element)) == 0;
}

// Parts have sizes that the compiler knows: a call of memcpy for each row took a third of the time of 7 queries on
// 4,096 keys at head_dim 72.
inline void copy_elements(const Element* from, int count, Element* to) {
    constexpr int part = 8;
    int i = 0;
    for (; i + step_terms <= count; i += step_terms) __builtin_memcpy(to + i, from + i, step_terms * sizeof(Element));
    for (; i + part <= count; i += part) __builtin_memcpy(to + i, from + i, part * sizeof(Element));
    for (; i < count; ++i) to[i] = from[i];
}

// A row in whole steps, with zeros behind it.
inline void copy_row(const Element* from, int64_t stride, int columns, Element* row) {
    const int64_t whole = staged_columns(columns);
    if (whole > columns) __builtin_memset((void*)(row + whole - step_terms), 0, step_terms * sizeof(Element));
    if (stride == 1)
        copy_elements(from, columns, row);
    else
        for (int c = 0; c < columns; ++c) row[c] = from[c * stride];
}

// `rows` of them, however many tokens the tile has.
inline Staged stage(const TensorView& x, const Place& at, int columns, int rows, Element* out) {
    if (are_steps(x, at, columns, rows)) return {address<Element>(x, at), x.row * at.stride};
    const int64_t ld = staged_columns(columns);
    for (int i = 0; i < rows; ++i) {
        Element* row = out + i * ld;
        if (i < at.count && (at.alive >> i & 1))
            copy_row(address<Element>(x, at, i), x.column, columns, row);
        else
            __builtin_memset(row, 0, size_t(ld) * sizeof(Element));
    }
    return {out, ld};
}

inline bool all_finite(const Staged& x, int rows, int columns) {
    for (int i = 0; i < rows; ++i)
        if (!all_finite(x.x + i * x.ld, staged_columns(columns))) return false;
    return true;
}

// Rows are rows of A, or lanes of B; columns are terms.
//     left [row tile][step]        right [step][row tile]
inline void pack_left(const Staged& x, int rows, int columns, Tile* out) {
    const int steps = steps_of(columns);
    for (int r = 0; r < rows / tile_rows; ++r)
        for (int s = 0; s < steps; ++s)
            pack_rows(x.x + r * tile_rows * x.ld + s * step_terms, x.ld, false, out + r * steps + s);
}
inline void pack_right(const Staged& x, int rows, int columns, Tile* out) {
    for (int s = 0; s < steps_of(columns); ++s)
        for (int r = 0; r < rows / tile_rows; ++r)
            pack_rows(x.x + r * tile_rows * x.ld + s * step_terms, x.ld, true, out + s * (rows / tile_rows) + r);
}

// Rows are terms; columns are rows of A, or lanes of B.
//     left [column tile][step]     right [step][column tile]
inline void pack_terms_left(const Staged& x, int rows, int columns, Tile* out) {
    const int steps = rows / step_terms, tiles = tiles_of(columns);
    for (int s = 0; s < steps; ++s)
        for (int t = 0; t < tiles; t += 2) {
            Tile* to = out + t * steps + s;
            pack_terms(x.x + s * step_terms * x.ld + t * tile_rows, x.ld, true, to,
                       t + 1 < tiles ? to + steps : nullptr);
        }
}
inline void pack_terms_right(const Staged& x, int rows, int columns, Tile* out) {
    const int tiles = tiles_of(columns);
    for (int s = 0; s < rows / step_terms; ++s)
        for (int t = 0; t < tiles; t += 2) {
            Tile* to = out + s * tiles + t;
            pack_terms(x.x + s * step_terms * x.ld + t * tile_rows, x.ld, false, to, t + 1 < tiles ? to + 1 : nullptr);
        }
}

// Those of the `rows` of a mask, `width` bits each, that keep anything in 32 lanes from `lane` on, in steps of 32 rows.
template <int width>
inline Span steps_kept(const uint64_t* bits, int rows, int lane) {
    const uint64_t strip = uint64_t(0xffffffff) << lane;
    Span kept{0, rows / step_terms};
    const auto is_kept = [&](int step) {
        uint64_t any = 0;
        for (int row = step * step_terms; row < (step + 1) * step_terms; ++row)
            any |= bits[row * width / 64] >> (row * width % 64) & strip;
        return any != 0;
    };
    while (kept.count > 0 && !is_kept(kept.first + kept.count - 1)) --kept.count;
    while (kept.count > 0 && !is_kept(kept.first)) ++kept.first, --kept.count;
    return kept;
}

}  // namespace
}  // namespace spattn::cpu
