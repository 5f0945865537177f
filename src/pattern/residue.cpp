// SPDX-License-Identifier: MIT
// residue(modulus,offset): k mod modulus = offset where p mod modulus = offset, else nothing.
// LongNet (https://arxiv.org/abs/2307.02486) is a union of block_diagonal(w) & residue(r,o).
#include "core/cancel.h"
#include "core/error.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Residue : public Leaf {
public:
    Residue(int64_t modulus, int64_t offset)
        : Leaf(text("residue(", modulus, ',', offset, ')')), modulus_(modulus), offset_(offset) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        if (distance(plane.position(row)) != 0) return;
        Cutter cutter(clip, out);
        int64_t k = add_saturated(clip.begin, distance(clip.begin));
        for (Pace pace; k < clip.end; k = add_saturated(k, modulus_)) {
            pace.step();
            cutter.add(k, k + 1);
        }
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool&) const override {
        const int64_t row = distance(plane.position(block.row)), column = distance(block.key);
        if (row >= block.rows) return {Coverage::empty, forever};
        if (column >= block.keys) return {Coverage::empty, column / block.keys};
        if (modulus_ == 1) return {Coverage::full, forever};
        if (block.rows == 1 && block.keys == 1) return {Coverage::full, 1};
        key.push_back(row);
        key.push_back(column);
        return {Coverage::partial, block.keys % modulus_ == 0 ? forever : 1};
    }

    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        key.push_back(std::min(distance(plane.position(row)), rows));
        return true;
    }
    PatternRef transposed() const override { return PatternRef::share(this); }
    int64_t modulus() const override { return modulus_; }
    int64_t period() const override { return modulus_; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        if (modulus % modulus_ == 0) return residue % modulus_ == offset_ ? make_full() : make_nothing();
        if (modulus_ % modulus) return {};
        if (offset_ % modulus != residue) return make_nothing();
        return make_residue(modulus_ / modulus, offset_ / modulus);
    }

private:
    int64_t distance(int64_t x) const { return floor_mod(offset_ - floor_mod(x, modulus_), modulus_); }  // to a member

    int64_t modulus_, offset_;
};

}  // namespace

PatternRef make_residue(int64_t modulus, int64_t offset) {
    if (modulus < 1) fail(SPATTN_E_RANGE, "modulus", text("is ", modulus, "; accepted: 1 and more"));
    if (offset < 0 || offset >= modulus) {
        fail(SPATTN_E_RANGE, "offset", text("is ", offset, "; accepted: 0 to ", modulus - 1, ", below the modulus"));
    }
    return make_ref<Residue>(modulus, offset);
}

}  // namespace spattn
