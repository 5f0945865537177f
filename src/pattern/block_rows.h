// SPDX-License-Identifier: MIT
// Patterns of square blocks: with I = p / block, all rows of block I see the same whole blocks J of keys.
#pragma once

#include <bit>

#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {

class BlockRows : public Leaf {
public:
    BlockRows(std::string text, int64_t block)
        : Leaf(std::move(text)), block_(block),
          shift_(std::has_single_bit(uint64_t(block)) ? std::countr_zero(uint64_t(block)) : -1) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;

protected:
    struct Row {
        const Intervals& seen;  // blocks J, sorted; until the next call
        int64_t until;          // says nothing of J from here on
    };
    // The blocks of block row i, at least those J that lie in `columns`.
    virtual Row row(const Plane& plane, int64_t i, Interval columns) const = 0;

    // The block I or J of a position. Most blocks are powers of two, and a division is slow.
    int64_t block_of(int64_t position) const { return shift_ < 0 ? floor_div(position, block_) : position >> shift_; }

private:
    // Whether J is seen, and the first block from J on where that may change.
    struct Stretch {
        bool is_seen;
        int64_t end;
    };
    static Stretch stretch(const Row& row, int64_t j);

    int64_t block_;
    int shift_;  // of a power of two, else -1
};

}  // namespace spattn
