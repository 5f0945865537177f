// SPDX-License-Identifier: MIT
// logsparse: p - k in {0, 1, 2, 4, 8, ...}. LogSparse Transformer (https://arxiv.org/abs/1907.00235). Its transpose has
// k - p there.
#include <bit>

#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

// The largest distance that the pattern keeps and that is at most `limit`; below 0 where there is none.
int64_t kept_distance(int64_t limit) {
    if (limit <= 0) return limit;
    return int64_t(1) << (63 - __builtin_clzll(static_cast<unsigned long long>(limit)));
}

// The smallest one that is at least `limit`.
int64_t kept_distance_from(int64_t limit) {
    return limit <= 0 ? 0 : int64_t(std::bit_ceil(static_cast<unsigned long long>(limit)));
}

class Logsparse : public Leaf {
public:
    explicit Logsparse(bool is_transposed)
        : Leaf(is_transposed ? "transpose(logsparse)" : "logsparse"), is_transposed_(is_transposed) {}

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t p = plane.position(row);
        Cutter cutter(clip, out);
        if (is_transposed_) {
            int64_t d = kept_distance_from(clip.begin - p);
            for (; d < clip.end - p; d = kept_distance_from(d + 1)) cutter.add(p + d, p + d + 1);
            return;
        }
        for (int64_t d = kept_distance(p - clip.begin); d >= 0; d = kept_distance(d - 1)) cutter.add(p - d, p - d + 1);
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool&) const override {
        const int64_t behind = plane.position(block.row) - block.key, distance = is_transposed_ ? -behind : behind;
        const int64_t farther = is_transposed_ ? block.keys : block.rows, nearer = block.rows + block.keys - farther;
        const int64_t farthest = distance + farther - 1, nearest = distance - (nearer - 1);
        const int64_t first = kept_distance(farthest);
        if (first < 0 || first < nearest) {
            // Distances grow along the keys of the transpose, and else fall.
            if (is_transposed_)
                return {Coverage::empty, blocks_until(kept_distance_from(farthest + 1) - distance, 0, block.keys)};
            return {Coverage::empty, first < 0 ? forever : blocks_until(distance - first, 0, block.keys)};
        }
        if (farthest == nearest || (nearest >= 0 && farthest <= 2)) return {Coverage::full, 1};
        // One diagonal in a block looks alike wherever it is; several depend on which ones they are.
        key.push_back(first - distance);
        key.push_back(kept_distance(first - 1) >= std::max<int64_t>(nearest, 0) ? first : -1);
        return {Coverage::partial, 1};
    }

    PatternRef transposed() const override { return make_ref<Logsparse>(!is_transposed_); }

private:
    bool is_transposed_;
};

}  // namespace

PatternRef make_logsparse() { return make_ref<Logsparse>(false); }

}  // namespace spattn
