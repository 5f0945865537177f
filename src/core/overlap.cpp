// SPDX-License-Identifier: MIT
#include "core/overlap.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/math.h"

namespace spattn {
namespace {

// x * stride with low <= x <= high.
struct Term {
    int64_t stride, low, high;
};

// Is there a choice of every x with low < start + sum(x * stride) < high? Depth first over the terms, largest stride
// first, so that what the smaller ones can still reach leaves one or two candidates a level where strides nest. Where a
// search takes longer, candidates from which no multiple of the smaller strides' greatest common divisor leads there are
// left out, too.
class Search {
public:
    Search(int64_t low, int64_t high) : low_(low), high_(high) {}

    // Equal strides share one term: index differences are what matters, and fewer terms are fewer steps.
    void add(int64_t stride, int64_t low, int64_t high) {
        if (stride == 0 || (low == 0 && high == 0)) return;
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
        if (level == count_ || ++steps_ > most_steps) return true;
        if (steps_ == few_steps) find_divisors();
        if (steps_ >= few_steps && !has_multiple(start, divisor_[level])) return false;
        const Term& t = terms_[level];
        const int64_t first = std::max(t.low, floor_div(low_ - start - rest_high_[level + 1], t.stride));
        const int64_t last = std::min(t.high, floor_div(high_ - start - rest_low_[level + 1], t.stride) + 1);
        for (int64_t x = first; x <= last; ++x)
            if (reaches(start + x * t.stride, level + 1)) return true;
        return false;
    }

    void find_divisors() {
        for (int i = count_; i-- > 0;) divisor_[i] = std::gcd(divisor_[i + 1], terms_[i].stride);
    }
    bool has_multiple(int64_t start, int64_t divisor) const {
        return start + floor_div(high_ - 1 - start, divisor) * divisor > low_;
    }

    static constexpr int few_steps = 64, most_steps = 10000;  // few: to divide costs more than those take
    static constexpr int max_terms = 2 * StridedBytes::max_axes;
    Term terms_[max_terms];
    int64_t rest_low_[max_terms + 1] = {}, rest_high_[max_terms + 1] = {};  // what the terms from a level on can add
    int64_t divisor_[max_terms + 1] = {};  // of all strides from a level on
    int64_t low_, high_;
    int count_ = 0, steps_ = 0;
};

// Bytes: beyond what a tensor spans whose strides tensor_strides() has checked. Sums of a few do not overflow.
constexpr uintptr_t longest_span = uintptr_t(1) << 61;

bool is_empty(const StridedBytes& t) {
    return std::any_of(t.axes.begin(), t.axes.end(), [](const StridedBytes::Axis& a) { return a.size == 0; });
}

// Sorted by stride, each axis steps over all that the smaller ones span, as in every view that an array library makes
// of one buffer without repetition.
bool nests(const StridedBytes& t) {
    auto axes = t.axes;
    std::sort(axes.begin(), axes.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
    int64_t span = t.element;
    for (const auto& axis : axes) {
        if (axis.size <= 1) continue;
        if (axis.stride < span) return false;
        span += axis.stride * (axis.size - 1);
    }
    return true;
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
    if (is_empty(t) || nests(t)) return false;
    // Two indices of one byte differ first on some axis, where the later one lies some steps further on; on the axes
    // behind it may lie any number of steps forth or back.
    for (size_t first = 0; first < t.axes.size(); ++first) {
        if (t.axes[first].size == 1) continue;
        if (t.axes[first].stride == 0) return true;
        Search search(-t.element, t.element);
        search.add(t.axes[first].stride, 1, t.axes[first].size - 1);
        for (size_t i = first + 1; i < t.axes.size(); ++i)
            search.add(t.axes[i].stride, 1 - t.axes[i].size, t.axes[i].size - 1);
        if (search.reaches(0)) return true;
    }
    return false;
}

}  // namespace spattn
