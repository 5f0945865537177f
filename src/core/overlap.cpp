// SPDX-License-Identifier: MIT
#include "core/overlap.h"

#include <algorithm>
#include <utility>

#include "core/math.h"

namespace spattn {
namespace {

// x * stride with low <= x <= high.
struct Term {
    int64_t stride, low, high;
};

// Is there a choice of every x with low < start + sum(x * stride) < high? Depth first over the terms, largest stride
// first, so that what the smaller ones can still reach leaves one or two candidates a level where strides nest.
class Search {
public:
    Search(int64_t low, int64_t high) : low_(low), high_(high) {}

    // Equal strides share one term: index differences are what matters, and fewer terms are fewer steps.
    void add(int64_t stride, int64_t low, int64_t high) {
        if (stride == 0 || low == high) return;
        for (int i = 0; i < count_; ++i)
            if (terms_[i].stride == stride) {
                terms_[i].low += low;
                terms_[i].high += high;
                return;
            }
        terms_[count_++] = {stride, low, high};
    }

    bool reaches(int64_t start) {
        for (int n = 1; n < count_; ++n)  // a handful: of std::sort, gcc 12 warns that it might read a sixteenth
            for (int i = n; i > 0 && terms_[i - 1].stride < terms_[i].stride; --i) std::swap(terms_[i - 1], terms_[i]);
        for (int i = count_; i-- > 0;) {
            rest_low_[i] = rest_low_[i + 1] + terms_[i].low * terms_[i].stride;
            rest_high_[i] = rest_high_[i + 1] + terms_[i].high * terms_[i].stride;
        }
        return reaches(start, 0);
    }

private:
    bool reaches(int64_t start, int level) {
        if (start + rest_low_[level] >= high_ || start + rest_high_[level] <= low_) return false;
        if (level == count_ || ++steps_ > 10000) return true;
        const Term& t = terms_[level];
        const int64_t first = std::max(t.low, floor_div(low_ - start - rest_high_[level + 1], t.stride));
        const int64_t last = std::min(t.high, floor_div(high_ - start - rest_low_[level + 1], t.stride) + 1);
        for (int64_t x = first; x <= last; ++x)
            if (reaches(start + x * t.stride, level + 1)) return true;
        return false;
    }

    static constexpr int max_terms = 2 * StridedBytes::max_axes;
    Term terms_[max_terms];
    int64_t rest_low_[max_terms + 1] = {}, rest_high_[max_terms + 1] = {};  // what the terms from a level on can add
    int64_t low_, high_;
    int count_ = 0, steps_ = 0;
};

// Bytes: beyond what a tensor spans whose strides tensor_strides() has checked. Sums of a few do not overflow.
constexpr uintptr_t longest_span = uintptr_t(1) << 61;

bool is_empty(const StridedBytes& t) {
    return std::any_of(t.axes.begin(), t.axes.end(), [](const StridedBytes::Axis& a) { return a.size == 0; });
}

}  // namespace

bool overlaps(const StridedBytes& a, const StridedBytes& b) {
    if (is_empty(a) || is_empty(b)) return false;
    const uintptr_t apart = a.begin > b.begin ? a.begin - b.begin : b.begin - a.begin;
    if (apart > longest_span) return false;
    Search search(-a.element, b.element);
    for (const auto& axis : a.axes) search.add(axis.stride, 0, axis.size - 1);
    for (const auto& axis : b.axes) search.add(axis.stride, -(axis.size - 1), 0);
    return search.reaches(a.begin > b.begin ? int64_t(apart) : -int64_t(apart));
}

bool overlaps_itself(const StridedBytes& t) {
    if (is_empty(t)) return false;
    // Sorted by stride, an axis must step over everything that the smaller ones span; that is enough, and every view
    // that an array library makes of one buffer without repetition satisfies it.
    auto axes = t.axes;
    std::sort(axes.begin(), axes.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
    int64_t span = t.element;
    for (const auto& axis : axes) {
        if (axis.size <= 1) continue;
        if (axis.stride < span) return true;
        span += axis.stride * (axis.size - 1);
    }
    return false;
}

}  // namespace spattn
