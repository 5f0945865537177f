// SPDX-License-Identifier: MIT
// block_diagonal(block): k / block = p / block; nothing for p < 0.
#include "core/error.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class BlockDiagonal : public Leaf {
public:
    explicit BlockDiagonal(int64_t block) : Leaf(text("block_diagonal(", block, ')')), block_(block) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t p = plane.position(row);
        if (p >= 0) Cutter(clip, out).add(begin(p), end(p));
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool&) const override {
        const int64_t p = plane.position(block.row), last = p + block.rows - 1, last_key = block.key + block.keys - 1;
        if (last < 0) return {Coverage::empty, forever};
        const int64_t from = begin(std::max<int64_t>(p, 0)), to = end(last);
        if (block.key >= to) return {Coverage::empty, forever};
        if (last_key < from) return {Coverage::empty, blocks_until(from, block.key, block.keys)};
        if (p >= 0 && to == end(p) && block.key >= from && last_key < to) {
            return {Coverage::full, blocks_until(to, block.key, block.keys)};
        }
        key.push_back(floor_div(p, block_) - floor_div(block.key, block_));
        key.push_back(std::min(block_ - floor_mod(p, block_), block.rows));
        key.push_back(std::min(block_ - floor_mod(block.key, block_), block.keys));
        key.push_back(std::max<int64_t>(-p, 0));  // rows before position 0
        return {Coverage::partial, 1};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        const int64_t p = plane.position(row), last = p + rows - 1;
        const bool is_same = last < 0 || (p >= 0 && end(p) == end(last));
        if (is_same) key.push_back(last < 0 ? -1 : floor_div(p, block_));
        return is_same;
    }
    // Before the block of the first row that has one, nothing is seen.
    int64_t stem_key(const Plane& plane, int64_t row, int64_t rows, Key&) const override {
        const int64_t p = plane.position(row);
        return p + rows <= 0 ? forever : begin(std::max<int64_t>(p, 0));
    }
    PatternRef transposed() const override { return PatternRef::share(this); }
    int64_t modulus() const override { return block_ == 1 ? 0 : 1; }
    PatternRef in_residue(int64_t modulus, int64_t) const override {
        if (block_ <= modulus) return make_block_diagonal(1);
        return block_ % modulus ? PatternRef() : make_block_diagonal(block_ / modulus);
    }

private:
    int64_t begin(int64_t p) const { return p - floor_mod(p, block_); }
    int64_t end(int64_t p) const { return add_saturated(begin(p), block_); }

    int64_t block_;
};

}  // namespace

PatternRef make_block_diagonal(int64_t block) {
    if (block < 1) fail(SPATTN_E_RANGE, "block", text("is ", block, "; accepted: 1 and more"));
    return make_ref<BlockDiagonal>(block);
}

}  // namespace spattn
