// SPDX-License-Identifier: MIT
// logsparse: p - k in {0, 1, 2, 4, 8, ...}. LogSparse Transformer (https://arxiv.org/abs/1907.00235).
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

// The largest distance p - k that the pattern keeps and that is at most `limit`; -1 where there is none.
int64_t kept_distance(int64_t limit) {
    if (limit <= 0) return limit;
    return int64_t(1) << (63 - __builtin_clzll(static_cast<unsigned long long>(limit)));
}

class Logsparse : public Leaf {
public:
    Logsparse() : Leaf("logsparse") {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t p = plane.position(row);
        Cutter cutter(clip, out);
        for (int64_t d = kept_distance(p - clip.begin); d >= 0; d = kept_distance(d - 1)) cutter.add(p - d, p - d + 1);
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool&) const override {
        const int64_t distance = plane.position(block.row) - block.key;
        const int64_t farthest = distance + block.rows - 1, nearest = distance - (block.keys - 1);
        const int64_t first = kept_distance(farthest);
        if (first < 0) return {Coverage::empty, forever};
        if (first < nearest) return {Coverage::empty, blocks_until(distance - first, 0, block.keys)};
        if (farthest == nearest || (nearest >= 0 && farthest <= 2)) return {Coverage::full, 1};
        // One diagonal in a block looks alike wherever it is; several depend on which ones they are.
        key.push_back(first - distance);
        key.push_back(kept_distance(first - 1) >= std::max<int64_t>(nearest, 0) ? first : -1);
        return {Coverage::partial, 1};
    }
};

}  // namespace

PatternRef make_logsparse() { return make_ref<Logsparse>(); }

}  // namespace spattn
