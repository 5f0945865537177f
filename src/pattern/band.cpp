// SPDX-License-Identifier: MIT
#include "pattern/band.h"

#include <numeric>

#include "core/cancel.h"
#include "core/error.h"

namespace spattn {

Band make_band(int64_t left, int64_t right, int64_t step) {
    if (left < -1) fail(SPATTN_E_RANGE, "left", text("is ", left, "; accepted: -1 (unbounded), or 0 and more"));
    if (right < -1) fail(SPATTN_E_RANGE, "right", text("is ", right, "; accepted: -1 (unbounded), or 0 and more"));
    return {left < 0 ? lowest : -left, right < 0 ? forever : right, step};
}

void BandPattern::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    const int64_t p = plane.position(row);
    const int64_t first = std::max(add_saturated(p, band_.low), clip.begin);
    const int64_t last = std::min(add_saturated(p, band_.high), clip.end - 1);
    if (first > last) return;
    if (band_.step == 1) return out.push_back({first, last + 1});
    int64_t k = add_saturated(first, floor_mod(p - first, band_.step));
    for (Pace pace; k <= last; k += band_.step) {
        pace.step();
        out.push_back({k, k + 1});
        if (last - k < band_.step) return;  // also keeps k + step in range
    }
}

// Differences of a block form the interval [nearest, farthest] around key - p; what the band keeps of it, relative to
// the block, is the mask.
Coverage BandPattern::classify(const Plane& plane, const Block& block, Key& key, bool&) const {
    const auto [low, high, step] = band_;
    const int64_t offset = block.key - plane.position(block.row);
    const int64_t nearest = offset - (block.rows - 1), farthest = offset + (block.keys - 1);
    const int64_t from = std::max(low, nearest), to = std::min(high, farthest);
    const int64_t first = step == 1 ? from : add_saturated(from, floor_mod(-from, step));  // no division for windows
    if (first > high) return {Coverage::empty, forever};
    if (first > farthest) return {Coverage::empty, blocks_until(first, offset, block.keys)};
    const int64_t last = step == 1 ? to : to - floor_mod(to, step);
    // How many blocks from here on lie below the band's end. No extent has half of all numbers, and callers multiply.
    const auto inside = [&] {
        const int64_t left = add_saturated(high, -farthest);
        return left > forever / 2 ? forever : left / block.keys + 1;
    };
    if (first == nearest && last == farthest && (step == 1 || nearest == farthest)) {
        return {Coverage::full, step == 1 ? inside() : 1};
    }
    key.push_back(first - offset);
    key.push_back(last - offset);
    // Away from the band's ends, a block whose width is a multiple of the step meets the same diagonals as the next.
    const bool is_periodic = step > 1 && block.keys % step == 0 && low <= nearest && farthest <= high;
    return {Coverage::partial, is_periodic ? inside() : 1};
}

bool BandPattern::row_key(const Plane& plane, int64_t row, int64_t, Key& key) const {
    if (!band_.is_unbounded()) return false;
    key.push_back(floor_mod(plane.position(row), band_.step));
    return true;
}

// Before the band nothing is seen. Without a beginning, it looks alike up to the first row's end.
int64_t BandPattern::stem_key(const Plane& plane, int64_t row, int64_t, Key& key) const {
    const int64_t p = plane.position(row);
    if (band_.low != lowest) return add_saturated(p, band_.low);
    key.push_back(floor_mod(p, band_.step));
    return add_saturated(add_saturated(p, band_.high), 1);
}

PatternRef BandPattern::transposed() const {
    const int64_t low = band_.high == forever ? lowest : -band_.high;
    const int64_t high = band_.low == lowest ? forever : -band_.low;
    return make_ref<BandPattern>("transpose(" + print() + ")", Band{low, high, band_.step});
}

int64_t BandPattern::modulus() const {
    const bool is_diagonal = -band_.step < band_.low && band_.high < band_.step;
    return is_diagonal ? 0 : band_.step;
}

// modulus * (k' - p') = k - p lies in the band. The words of plain patterns, so that equal residue classes have equal
// texts.
PatternRef BandPattern::in_residue(int64_t modulus, int64_t) const {
    const int64_t left = band_.low == lowest ? -1 : -band_.low / modulus;
    const int64_t right = band_.high == forever ? -1 : band_.high / modulus;
    const int64_t step = band_.step / std::gcd(band_.step, modulus);
    if (step > 1) return band_.is_unbounded() ? make_strided(step) : make_dilated(left, right, step);
    if (band_.is_unbounded()) return make_full();
    return left < 0 && right == 0 ? make_causal() : make_window(left, right);
}

}  // namespace spattn
