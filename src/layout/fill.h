// SPDX-License-Identifier: MIT
// Computes the exact bits of chosen blocks of one block row by asking the pattern for keys() of each query.
#pragma once

#include <cstdint>
#include <vector>

#include "pattern/pattern.h"

namespace spattn {

class BlockRowBits {
public:
    BlockRowBits(const Pattern& pattern, const Extent& extent, int32_t block_q, int32_t block_k);

    void clear();
    // Asks for block `column`, further right than all before it; returns its slot.
    int32_t want(int32_t column);
    // Computes the bits of all wanted blocks of the block row that starts at query `row`.
    void fill(const Plane& plane, int64_t row);
    // Computes every block of columns [column, end) that keeps a pair, and wants it.
    void fill_rest(const Plane& plane, int64_t row, int32_t column, int32_t end);

    int32_t size() const { return int32_t(columns_.size()); }
    int32_t column(int32_t slot) const { return columns_[slot]; }
    const uint64_t* bits(int32_t slot) const { return &bits_[size_t(slot) * words_]; }

private:
    struct Stroke {  // keys [begin, end) of one block: what of an interval falls into it
        int32_t slot, begin, end;
    };

    Interval span(int32_t first, int32_t last) const;  // keys of these columns
    void fill_slots(const Plane& plane, int64_t row, size_t first, size_t end);
    template <class FindStrokes>
    void fill_rows(const Plane& plane, int64_t row, Interval clip, FindStrokes find_strokes);
    void strike(size_t first, size_t end, size_t struck);
    void strike_all(size_t struck);

    const Pattern& pattern_;
    int64_t seq_q_, seq_k_;
    int32_t block_q_, block_k_, words_;
    std::vector<int32_t> columns_;   // of each slot
    std::vector<int32_t> slot_of_;   // [columns of the extent] or none; fill_rest() alone needs it
    std::vector<uint64_t> bits_;     // [slots * words]
    Intervals intervals_, previous_;
    std::vector<Stroke> strokes_;
    std::vector<size_t> stroke_ends_;  // after each interval
};

}  // namespace spattn
