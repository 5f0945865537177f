// SPDX-License-Identifier: MIT
#include "pattern/block_rows.h"

#include "core/cancel.h"

namespace spattn {

// Numbers that determine a mask: tiny blocks inside large ones take longer to compare than to make.
static constexpr int64_t longest_key = 256;

BlockRows::Stretch BlockRows::stretch(const Row& row, int64_t j) {
    const auto i = first_ending_after(row.seen, j);
    if (i == row.seen.end()) return {false, row.until};
    return i->begin <= j ? Stretch{true, std::min(i->end, row.until)} : Stretch{false, std::min(i->begin, row.until)};
}

void BlockRows::keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const {
    if (clip.begin >= clip.end) return;
    const Interval columns{block_of(clip.begin), block_of(clip.end - 1) + 1};
    const Intervals& seen = this->row(plane, block_of(plane.position(row)), columns).seen;
    Cutter cutter(clip, out);
    for (auto i = first_ending_after(seen, columns.begin); i != seen.end() && i->begin < columns.end; ++i)
        cutter.add(multiply_saturated(i->begin, block_), multiply_saturated(i->end, block_));
}

// The mask is where borders of blocks cross the block asked for, then one bit for each (I, J) inside. Where no row's
// answer changes from one J to the next, the borders of the keys do not matter and one bit a row will do.
Coverage BlockRows::classify(const Plane& plane, const Block& block, Key& key, bool& known) const {
    const int64_t p = plane.position(block.row);
    const Interval rows{block_of(p), block_of(p + block.rows - 1) + 1};
    const Interval columns{block_of(block.key), block_of(block.key + block.keys - 1) + 1};
    if (rows.end - rows.begin > longest_key) {
        known = false;
        return {Coverage::partial, 1};
    }
    if (rows.end - rows.begin == 1) {
        const Stretch all = stretch(row(plane, rows.begin, columns), columns.begin);
        if (all.end >= columns.end)
            return {all.is_seen ? Coverage::full : Coverage::empty,
                    blocks_until(multiply_saturated(all.end, block_), block.key, block.keys)};
    }
    int64_t same_until = forever;  // in blocks J
    for (int64_t i = rows.begin; i < rows.end; ++i)
        same_until = std::min(same_until, stretch(row(plane, i, columns), columns.begin).end);
    const bool is_even = same_until >= columns.end;
    const int64_t width = is_even ? 1 : columns.end - columns.begin;
    const size_t mark = key.size();
    key.push_back(std::min(block_ - floor_mod(p, block_), block.rows));
    key.push_back(is_even ? -1 : std::min(block_ - floor_mod(block.key, block_), block.keys));
    int64_t ones = 0;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        check_cancelled();
        const Row seen = row(plane, i, columns);
        Stretch at{};
        for (int64_t j = 0; j < width; ++j) {
            if (j % 32 == 0) key.push_back(0);
            if (j == 0 || columns.begin + j >= at.end) at = stretch(seen, columns.begin + j);
            key.back() |= int64_t(at.is_seen) << (j % 32);
            ones += at.is_seen;
        }
    }
    const int64_t repeat = is_even ? blocks_until(multiply_saturated(same_until, block_), block.key, block.keys) : 1;
    if (ones > 0 && ones < width * (rows.end - rows.begin)) {
        const bool is_short = int64_t(key.size() - mark) <= longest_key;
        known &= is_short;
        if (!is_short) key.resize(mark);
        return {Coverage::partial, repeat};
    }
    key.resize(mark);
    return {ones ? Coverage::full : Coverage::empty, repeat};
}

}  // namespace spattn
