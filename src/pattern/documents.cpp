// SPDX-License-Identifier: MIT
// documents(cu_seqlens): k and p in the same [cu[t], cu[t+1]).
#include "core/error.h"
#include "pattern/intervals.h"
#include "pattern/leaf.h"

namespace spattn {
namespace {

class Documents : public ListLeaf {
public:
    explicit Documents(const std::vector<int64_t>& cu) : ListLeaf("documents", cu), cuts_(cu) {
        cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());  // empty documents hold no token
        const int64_t length = cuts_.back() - cuts_.front();
        while (length >> shift_ > int64_t(cuts_.size())) ++shift_;
        for (int64_t stretch = 0, cut = 0; stretch <= (length >> shift_) + 1; ++stretch) {
            while (cut <= documents() && (cuts_[size_t(cut)] - cuts_.front()) >> shift_ < stretch) ++cut;
            first_cut_.push_back(cut);
        }
    }

    void keys(const Plane& plane, int64_t row, Interval clip, Intervals& out) const override {
        const int64_t t = segment(plane.position(row));
        if (t >= 0 && t < documents()) Cutter(clip, out).add(cuts_[t], cuts_[t + 1]);
    }

    Coverage classify(const Plane& plane, const Block& block, Key& key, bool&) const override {
        const int64_t p = plane.position(block.row), key_end = block.key + block.keys;
        const int64_t first = segment(p), last = segment(p + block.rows - 1, first);
        const int64_t from = std::max<int64_t>(first, 0), to = std::min(last, documents() - 1);
        if (from > to || block.key >= cuts_[to + 1]) return {Coverage::empty, forever};
        if (key_end <= cuts_[from]) return {Coverage::empty, blocks_until(cuts_[from], block.key, block.keys)};
        if (first == last && block.key >= cuts_[from] && key_end <= cuts_[to + 1]) {
            return {Coverage::full, blocks_until(cuts_[to + 1], block.key, block.keys)};
        }
        const int64_t first_key = segment(block.key);
        key.push_back(first - first_key);
        key.push_back((first < 0) + 2 * (last == documents()));  // rows outside of all documents see nothing
        push_cuts(first, last, p, key);
        push_cuts(first_key, segment(key_end - 1, first_key), block.key, key);
        return {Coverage::partial, 1};
    }

    // Rows within one document are alike.
    bool row_key(const Plane& plane, int64_t row, int64_t rows, Key& key) const override {
        const int64_t first = segment(plane.position(row));
        if (first != segment(plane.position(row + rows - 1), first)) return false;
        key.push_back(first);
        return true;
    }
    // Before the document of the first row that has one, nothing is seen.
    int64_t stem_key(const Plane& plane, int64_t row, int64_t, Key&) const override {
        const int64_t first = segment(plane.position(row));
        return first < documents() ? cuts_[size_t(std::max<int64_t>(first, 0))] : forever;
    }
    PatternRef transposed() const override { return PatternRef::share(this); }
    PatternRef in_residue(int64_t modulus, int64_t residue) const override {
        std::vector<int64_t> cuts;
        for (int64_t cut : cuts_) cuts.push_back(bound_in_residue(cut, modulus, residue));
        return make_documents(std::move(cuts));
    }

private:
    int64_t documents() const { return int64_t(cuts_.size()) - 1; }

    // The document of x; -1 before the first, documents() after the last. Only the cuts of a stretch are searched.
    int64_t segment(int64_t x) const {
        if (x < cuts_.front()) return -1;
        if (x >= cuts_.back()) return documents();
        const size_t stretch = size_t((x - cuts_.front()) >> shift_);
        const auto begin = cuts_.begin() + first_cut_[stretch], end = cuts_.begin() + first_cut_[stretch + 1];
        return std::upper_bound(begin, end, x) - cuts_.begin() - 1;
    }

    // The same of an x in segment `from` or, most likely, soon after it.
    int64_t segment(int64_t x, int64_t from) const {
        constexpr int near = 4;
        for (int step = 0; step < near; ++step, ++from)
            if (from == documents() || x < cuts_[size_t(from + 1)]) return from;
        return segment(x);
    }

    // The borders between segments first and last, relative to `origin`.
    void push_cuts(int64_t first, int64_t last, int64_t origin, Key& key) const {
        key.push_back(last - first);
        for (int64_t t = first + 1; t <= last; ++t) key.push_back(cuts_[t] - origin);
    }

    std::vector<int64_t> cuts_;  // strictly increasing
    // Stretches of 2^shift_ tokens from the first cut on, about as many as cuts: the first cut in each, or after it.
    std::vector<int64_t> first_cut_;
    int shift_ = 0;
};

}  // namespace

PatternRef make_documents(std::vector<int64_t> cu) {
    if (cu.empty()) fail(SPATTN_E_SHAPE, "cu_seqlens", "has no number; accepted: [documents + 1], the first >= 0");
    if (cu[0] < 0) fail(SPATTN_E_RANGE, "cu_seqlens", text("starts with ", cu[0], "; accepted: 0 and more"));
    for (size_t t = 1; t < cu.size(); ++t) {
        if (cu[t] >= cu[t - 1]) continue;
        fail(SPATTN_E_RANGE, "cu_seqlens",
             text("falls from ", cu[t - 1], " to ", cu[t], " at index ", t,
                  "; accepted: numbers that do not decrease"));
    }
    return make_ref<Documents>(cu);
}

}  // namespace spattn
