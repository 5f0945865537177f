// SPDX-License-Identifier: MIT
#include "layout/fill.h"

#include <algorithm>

#include "layout/tables.h"
#include "pattern/key_walk.h"

namespace spattn {

namespace {
constexpr int32_t no_slot = -1;
// One keys() call serves several wanted blocks where few intervals lie between them: all blocks of the row at up to
// few_intervals a block, otherwise those that are at most near_blocks apart.
constexpr size_t few_intervals = 4;
constexpr int32_t near_blocks = 8;

// How many intervals both begin with.
size_t count_common(const Intervals& a, const Intervals& b) {
    const auto is_same = [](Interval x, Interval y) { return x.begin == y.begin && x.end == y.end; };
    return size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end(), is_same).first - a.begin());
}
}  // namespace

BlockRowBits::BlockRowBits(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k)
    : pattern_(pattern), seq_q_(extent.seq_q), seq_k_(extent.seq_k), block_q_(block_q), block_k_(block_k),
      words_(words_for(int64_t(block_q) * block_k)),
      slot_of_(make_table(size_t((extent.seq_k + block_k - 1) / block_k), no_slot)) {}

void BlockRowBits::clear() {
    for (int32_t column : columns_) slot_of_[column] = no_slot;
    columns_.clear();
    bits_.clear();
}

int32_t BlockRowBits::want(int32_t column) {
    const int32_t slot = size();
    slot_of_[column] = slot;
    columns_.push_back(column);
    bits_.resize(bits_.size() + words_);
    return slot;
}

Interval BlockRowBits::span(int32_t first, int32_t last) const {
    return {int64_t(first) * block_k_, std::min((int64_t(last) + 1) * block_k_, seq_k_)};
}

void BlockRowBits::fill(const Plane& plane, int64_t row) {
    if (columns_.empty()) return;
    const size_t few = few_intervals * columns_.size();
    size_t intervals = 0;
    KeyWalk walk(pattern_, plane, row, span(columns_.front(), columns_.back()), intervals_);
    while (intervals <= few && walk.next()) intervals += intervals_.size();
    if (intervals <= few) return fill_slots(plane, row, 0, columns_.size());
    for (size_t first = 0; first < columns_.size();) {
        size_t end = first + 1;
        while (end < columns_.size() && columns_[end] - columns_[end - 1] <= near_blocks) ++end;
        fill_slots(plane, row, first, end);
        first = end;
    }
}

void BlockRowBits::fill_slots(const Plane& plane, int64_t row, size_t first, size_t end) {
    fill_rows(plane, row, span(columns_[first], columns_[end - 1]),
              [&](size_t struck) { strike(strokes_.empty() ? first : size_t(strokes_.back().slot), end, struck); });
}

void BlockRowBits::fill_rest(const Plane& plane, int64_t row, int32_t column, int32_t end) {
    fill_rows(plane, row, span(column, end - 1), [&](size_t struck) { strike_all(struck); });
}

template <class FindStrokes>
void BlockRowBits::fill_rows(const Plane& plane, int64_t row, Interval clip, FindStrokes find_strokes) {
    const int64_t rows = std::min<int64_t>(block_q_, seq_q_ - row);
    previous_.clear(), strokes_.clear(), stroke_ends_.clear();
    for (int64_t r = 0; r < rows; ++r) {
        check_cancelled();
        intervals_.clear();
        pattern_.keys(plane, row + r, clip, intervals_);
        // Neighbours often see the same keys (documents, blocks), or begin with them (trees): their division into
        // blocks stands.
        const size_t common = count_common(intervals_, previous_);
        if (common < std::max(intervals_.size(), previous_.size())) {
            stroke_ends_.resize(common);
            strokes_.resize(common ? stroke_ends_.back() : 0);
            find_strokes(common);
            intervals_.swap(previous_);
        }
        for (const Stroke& stroke : strokes_)
            set_bits(&bits_[size_t(stroke.slot) * words_], r * block_k_ + stroke.begin, r * block_k_ + stroke.end);
    }
}

// Divides the intervals from number `struck` on among slots [first, end), both from left to right.
void BlockRowBits::strike(size_t first, size_t end, size_t struck) {
    for (; struck < intervals_.size(); ++struck) {
        const Interval interval = intervals_[struck];
        while (first < end && (int64_t(columns_[first]) + 1) * block_k_ <= interval.begin) ++first;
        for (size_t slot = first; slot < end; ++slot) {
            const int64_t start = int64_t(columns_[slot]) * block_k_;
            if (start >= interval.end) break;
            strokes_.push_back({int32_t(slot), int32_t(std::max(interval.begin, start) - start),
                                int32_t(std::min(interval.end, start + block_k_) - start)});
        }
        stroke_ends_.push_back(strokes_.size());
    }
}

// Divides the intervals from number `struck` on among all blocks that they touch.
void BlockRowBits::strike_all(size_t struck) {
    for (; struck < intervals_.size(); ++struck) {
        const Interval interval = intervals_[struck];
        int32_t column = int32_t(interval.begin / block_k_);
        for (int64_t key = interval.begin; key < interval.end; ++column) {
            const int64_t start = int64_t(column) * block_k_, end = std::min(interval.end, start + block_k_);
            const int32_t slot = slot_of_[column] == no_slot ? want(column) : slot_of_[column];
            strokes_.push_back({slot, int32_t(key - start), int32_t(end - start)});
            key = end;
        }
        stroke_ends_.push_back(strokes_.size());
    }
}

}  // namespace spattn
