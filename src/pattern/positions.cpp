// SPDX-License-Identifier: MIT
#include "pattern/positions.h"

#include "core/error.h"

namespace spattn {

Positions::Positions(std::vector<int64_t> given) : sorted_(std::move(given)) {
    std::sort(sorted_.begin(), sorted_.end());
    sorted_.erase(std::unique(sorted_.begin(), sorted_.end()), sorted_.end());
    if (!sorted_.empty() && (sorted_[0] < 0 || sorted_.back() == forever)) {
        const int64_t bad = sorted_[0] < 0 ? sorted_[0] : forever;
        fail(SPATTN_E_RANGE, "positions", text("has ", bad, "; accepted: 0 to ", forever - 1));
    }
    Cutter cutter({0, forever}, intervals_);
    for (int64_t x : sorted_) cutter.add(x, x + 1);
}

void Positions::keys(Interval clip, Intervals& out) const {
    Cutter cutter(clip, out);
    for (auto i = first_ending_after(intervals_, clip.begin); i != intervals_.end() && i->begin < clip.end; ++i) {
        cutter.add(i->begin, i->end);
    }
}

Coverage Positions::classify(int64_t begin, int64_t count, Key& key) const {
    const auto first = first_ending_after(intervals_, begin);
    if (first == intervals_.end()) return {Coverage::empty, forever};
    const int64_t end = add_saturated(begin, count);
    if (first->begin >= end) return {Coverage::empty, blocks_until(first->begin, begin, count)};
    if (first->begin <= begin && first->end >= end) {
        return {Coverage::full, blocks_until(first->end, begin, count)};
    }
    const size_t mark = key.size();
    key.push_back(0);
    for (auto i = first; i != intervals_.end() && i->begin < end; ++i) {
        ++key[mark];
        key.push_back(std::max(i->begin, begin) - begin);
        key.push_back(std::min(i->end, end) - begin);
    }
    return {Coverage::partial, 1};
}

std::vector<int64_t> Positions::in_residue(int64_t modulus, int64_t residue) const {
    std::vector<int64_t> members;
    for (int64_t x : sorted_)
        if (x % modulus == residue) members.push_back(x / modulus);
    return members;
}

}  // namespace spattn
