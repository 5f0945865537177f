// SPDX-License-Identifier: MIT
// Patterns that ask only for the difference k - p: low <= k - p <= high and (k - p) mod step = 0. causal, window,
// dilated and strided are four such bands.
#pragma once

#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {

struct Band {
    int64_t low, high;  // lowest and forever where unbounded
    int64_t step;       // >= 1

    bool is_unbounded() const { return low == lowest && high == forever; }
};

class BandPattern : public Leaf {
public:
    BandPattern(std::string text, Band band) : Leaf(std::move(text)), band_(band) {}
    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override;
    Coverage classify(const Plane& plane, const Block& block, Key& key, bool& known) const override;
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;
    int64_t stem_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override;
    PatternRef transposed() const override;
    int64_t modulus() const override;
    int64_t period() const override { return band_.step; }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override;

private:
    Band band_;
};

// Bounds of a window as the C ABI gives them; -1 = unbounded.
Band make_band(int64_t left, int64_t right, int64_t step);

}  // namespace spattn
