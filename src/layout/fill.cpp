// SPDX-License-Identifier: MIT
#include "layout/fill.h"

#include <algorithm>

#include "layout/tables.h"

namespace spattn {

namespace {
constexpr int32_t none = -1;
// Wanted blocks closer than this are asked for together: a call of keys() costs about as much as stepping over the
// intervals of a few blocks.
constexpr int32_t near_blocks = 8;

bool equal(const Intervals& a, const Intervals& b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](Interval x, Interval y) {
               return x.begin == y.begin && x.end == y.end;
           });
}
}  // namespace

BlockRowBits::BlockRowBits(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k)
    : pattern_(pattern), seq_q_(extent.seq_q), seq_k_(extent.seq_k), block_q_(block_q), block_k_(block_k),
      words_(words_for(int64_t(block_q) * block_k)), slot_of_(size_t((extent.seq_k + block_k - 1) / block_k), none) {}

void BlockRowBits::clear() {
    for (int32_t column : columns_) slot_of_[column] = none;
    columns_.clear();
    bits_.clear();
}

int32_t BlockRowBits::add_slot(int32_t column) {
    const int32_t slot = size();
    slot_of_[column] = slot;
    columns_.push_back(column);
    bits_.resize(bits_.size() + words_);
    return slot;
}

int32_t BlockRowBits::want(int32_t column) { return slot_of_[column] == none ? add_slot(column) : slot_of_[column]; }

void BlockRowBits::fill(const Plane& plane, int64_t row) {
    for (size_t first = 0; first < columns_.size();) {
        size_t last = first;
        while (last + 1 < columns_.size() && columns_[last + 1] - columns_[last] <= near_blocks) ++last;
        fill_columns(plane, row, columns_[first], columns_[last], false);
        first = last + 1;
    }
}

void BlockRowBits::fill_rest(const Plane& plane, int64_t row, int32_t column) {
    fill_columns(plane, row, column, int32_t(slot_of_.size()) - 1, true);
}

void BlockRowBits::fill_columns(const Plane& plane, int64_t row, int32_t first, int32_t last, bool want_all) {
    const int64_t rows = std::min<int64_t>(block_q_, seq_q_ - row);
    const Interval clip{int64_t(first) * block_k_, std::min((int64_t(last) + 1) * block_k_, seq_k_)};
    for (int64_t r = 0; r < rows; ++r) {
        intervals_.clear();
        pattern_.keys(plane, row + r, clip, intervals_);
        // Neighbours often see the same keys (documents, blocks): then the division into blocks stands.
        if (r == 0 || !equal(intervals_, previous_)) {
            find_strokes(want_all);
            intervals_.swap(previous_);
        }
        for (const Stroke& stroke : strokes_)
            set_bits(&bits_[size_t(stroke.slot) * words_], r * block_k_ + stroke.begin, r * block_k_ + stroke.end);
    }
}

void BlockRowBits::find_strokes(bool want_all) {
    strokes_.clear();
    for (const Interval& interval : intervals_) {
        int32_t column = int32_t(interval.begin / block_k_);
        for (int64_t key = interval.begin; key < interval.end; ++column) {
            const int64_t start = int64_t(column) * block_k_, end = std::min(interval.end, start + block_k_);
            if (want_all && slot_of_[column] == none) add_slot(column);
            if (slot_of_[column] != none)
                strokes_.push_back({slot_of_[column], int32_t(key - start), int32_t(end - start)});
            key = end;
        }
    }
}

}  // namespace spattn
