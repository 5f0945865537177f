// SPDX-License-Identifier: MIT
// Rows of listed keys as panels: copied, two keys at a time, from where they lie to a left panel, whose rows they are,
// and to a right one, whose terms they are.
#pragma once

#include "cpu/generic/gather_lists.h"
#include "cpu/generic/panels.h"
#include "cpu/generic/prefetch.h"

namespace spattn::cpu {
namespace {

// Where the rows of one operand go: the first `left_columns` to [tiles of keys][steps], the first `right_columns` to
// [steps of keys][tiles]. Either may be 0.
struct RowPanels {
    TensorView x;
    int left_columns, right_columns;
    Tile *left, *right;
};

// Spreads parts of some work evenly over so many calls of what is done beside it.
class Pace {
public:
    Pace(int parts, int calls) : parts_(parts), calls_(calls) {}
    int next() {
        int now = 0;
        for (due_ += parts_; due_ >= calls_; due_ -= calls_) ++now;
        return now;
    }

private:
    int parts_, calls_, due_ = 0;
};

// The panels of a chunk of keys, made bit by bit: beside products, which leave the vector units idle. Rows up to the
// next whole step of keys are zero.
class GatheredPanels {
public:
    // rows [3][staged_columns]
    void place(const RowPanels* operands, int count, Element* rows, int64_t columns) {
        operands_ = operands, num_operands_ = count, a_ = rows, b_ = rows + columns, zeros_ = b_ + columns;
        __builtin_memset((void*)zeros_, 0, size_t(columns) * sizeof(Element));
    }
    void begin(const Place& keys) { keys_ = keys, next_ = 0, end_ = steps_of(keys.count) * step_terms; }

    int pairs_left() const { return (end_ - next_) / 2; }
    void pack(int pairs) {
        for (const int end = least(next_ + 2 * pairs, end_); next_ < end; next_ += 2)
            for (int i = 0; i < num_operands_; ++i) pack_pair(operands_[i]);
    }

private:
    static constexpr int ahead = 16;  // keys that memory is asked for before they are copied

    void pack_pair(const RowPanels& to) {
        const int columns = to.left_columns > to.right_columns ? to.left_columns : to.right_columns;
        if (next_ + ahead < keys_.count && to.x.column == 1)
            for (int i = 0; i < 2; ++i)
                prefetch_row(address<Element>(to.x, keys_, least(next_ + ahead + i, keys_.count - 1)),
                             columns * int64_t(sizeof(Element)));
        const Element *a = row(to.x, next_, columns, a_), *b = row(to.x, next_ + 1, columns, b_);
        const int steps = steps_of(to.left_columns), tiles = tiles_of(to.right_columns), in_tile = next_ % tile_rows;
        Tile* left = to.left + next_ / tile_rows * steps;
        for (int s = 0; s < steps; ++s) {
            __builtin_memcpy((void*)left[s].rows[in_tile], a + s * step_terms, sizeof left[s].rows[0]);
            __builtin_memcpy((void*)left[s].rows[in_tile + 1], b + s * step_terms, sizeof left[s].rows[0]);
        }
        Tile* right = to.right + next_ / step_terms * tiles;
        const int pair = next_ % step_terms / 2;
        for (int t = 0; t < tiles; t += 2)
            store_columns(a + t * tile_rows, b + t * tile_rows, right[t].rows[pair],
                          t + 1 < tiles ? right[t + 1].rows[pair] : nullptr);
    }

    // Whole steps of a row, from where it lies or from a copy with zeros behind it.
    const Element* row(const TensorView& x, int i, int columns, Element* copy) const {
        if (i >= keys_.count) return zeros_;
        const Element* from = address<Element>(x, keys_, i);
        if (x.column == 1 && columns % step_terms == 0) return from;
        copy_row(from, x.column, columns, copy);
        return copy;
    }

    const RowPanels* operands_ = nullptr;
    int num_operands_ = 0, next_ = 0, end_ = 0;
    Element *a_ = nullptr, *b_ = nullptr, *zeros_ = nullptr;
    Place keys_{};
};

// Rows of heads as a right panel: [steps][tiles of heads]. rows [16][staged columns] is scratch.
inline void pack_heads_right(const TensorView& heads_as_rows, const HeadTile& t, int columns, Element* rows,
                             Tile* out) {
    const int tiles = tiles_of(t.heads), steps = steps_of(columns);
    for (int tile = 0; tile < tiles; ++tile) {
        Place at = place_of(t);
        at.first += tile * tile_rows, at.count = least(tile_rows, t.heads - tile * tile_rows);
        const Staged staged = stage(heads_as_rows, at, columns, tile_rows, rows);
        for (int s = 0; s < steps; ++s) pack_rows(staged.x + s * step_terms, staged.ld, true, out + s * tiles + tile);
    }
}

}  // namespace
}  // namespace spattn::cpu
