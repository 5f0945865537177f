// SPDX-License-Identifier: MIT
// Rows that may be very long, in stretches of keys: patterns may list a key in two, and a stretch of them takes little
// memory and time, after which the call can be cancelled.
#pragma once

#include "core/cancel.h"
#include "pattern/intervals.h"

namespace spattn {

// Visits an interval piece by piece.
template <class Visit>
void visit_pieces(const Interval& whole, Visit visit) {
    constexpr int64_t most_keys = int64_t(1) << 20;
    for (int64_t begin = whole.begin; begin < whole.end; begin += most_keys) {
        check_cancelled();
        visit(Interval{begin, std::min(begin + most_keys, whole.end)});
    }
}

// Asks for what a row sees of `clip`, one stretch with each next(). An interval that a border of stretches cuts comes as
// two.
class KeyWalk {
public:
    // `kept` has the intervals of the last stretch.
    KeyWalk(const Pattern& pattern, const Plane& plane, int64_t row, Interval clip, Intervals& kept)
        : pattern_(pattern), plane_(plane), row_(row), left_(clip), kept_(kept),
          stretch_(clip.end - clip.begin > of_dense && pattern.period() > 1 ? of_dense : of_others) {}

    bool next() {
        if (left_.begin >= left_.end) return false;
        check_cancelled();
        const int64_t end = std::min(left_.begin + stretch_, left_.end);
        kept_.clear();
        pattern_.keys(plane_, row_, {left_.begin, end}, kept_);
        left_.begin = end;
        return true;
    }

private:
    // Keys of a stretch. Patterns that repeat list some of each period. Most others list few, and are asked less often:
    // the rows of a sequence of millions are millions, too.
    static constexpr int64_t of_dense = int64_t(1) << 20, of_others = int64_t(1) << 24;

    const Pattern& pattern_;
    const Plane& plane_;
    const int64_t row_;
    Interval left_;
    Intervals& kept_;
    const int64_t stretch_;
};

}  // namespace spattn
