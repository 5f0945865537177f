// SPDX-License-Identifier: MIT
// What the patterns share: arithmetic that saturates, since bounds may be as large as a caller likes, and intervals.
#pragma once

#include <algorithm>

#include "pattern/pattern.h"

namespace spattn {

constexpr int64_t lowest = std::numeric_limits<int64_t>::min();

constexpr int64_t add_saturated(int64_t a, int64_t b) {
    int64_t sum = 0;
    if (!__builtin_add_overflow(a, b, &sum)) return sum;
    return b < 0 ? lowest : forever;
}

constexpr int64_t multiply_saturated(int64_t a, int64_t b) {
    int64_t product = 0;
    if (!__builtin_mul_overflow(a, b, &product)) return product;
    return (a < 0) != (b < 0) ? lowest : forever;
}

// Whole blocks of `keys` between key and end: how often an answer that holds up to `end` repeats.
constexpr int64_t blocks_until(int64_t end, int64_t key, int64_t keys) {
    return end == forever ? forever : std::max<int64_t>(1, add_saturated(end, -key) / keys);
}

// How many of 0, 1, 2, ... are below x and `residue` mod `modulus`: where x stands as a bound within that residue
// class.
constexpr int64_t bound_in_residue(int64_t x, int64_t modulus, int64_t residue) {
    return ceil_div(x - residue, modulus);
}

inline bool is_earlier(const Interval& a, const Interval& b) { return a.begin < b.begin; }

// Joins those of sorted intervals, from index `first` on, that touch or overlap.
inline void join_touching(Intervals& sorted, size_t first) {
    if (first >= sorted.size()) return;
    size_t last = first;
    for (size_t i = first + 1; i < sorted.size(); ++i) {
        if (sorted[i].begin <= sorted[last].end) {
            sorted[last].end = std::max(sorted[last].end, sorted[i].end);
        } else {
            sorted[++last] = sorted[i];
        }
    }
    sorted.resize(last + 1);
}

// The first of sorted intervals that ends after x: where x belongs.
inline Intervals::const_iterator first_ending_after(const Intervals& sorted, int64_t x) {
    return std::upper_bound(sorted.begin(), sorted.end(), x,
                            [](int64_t value, const Interval& interval) { return value < interval.end; });
}
inline bool is_member(const Intervals& sorted, int64_t x) {
    const auto place = first_ending_after(sorted, x);
    return place != sorted.end() && place->begin <= x;
}

// Appends intervals in order, cut to a clip, and joins those that touch.
class Cutter {
public:
    Cutter(Interval clip, Intervals& out) : clip_(clip), out_(out), start_(out.size()) {}

    void add(int64_t begin, int64_t end) {
        begin = std::max(begin, clip_.begin);
        end = std::min(end, clip_.end);
        if (begin >= end) return;
        if (out_.size() > start_ && out_.back().end >= begin) {
            out_.back().end = std::max(out_.back().end, end);
        } else {
            out_.push_back({begin, end});
        }
    }

private:
    Interval clip_;
    Intervals& out_;
    size_t start_;  // what lies before belongs to the caller
};

}  // namespace spattn
