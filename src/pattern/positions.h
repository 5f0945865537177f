// SPDX-License-Identifier: MIT
// A set of token positions, of any size: sorted intervals and binary search.
#pragma once

#include "pattern/intervals.h"

namespace spattn {

class Positions {
public:
    // `given` in any order; a negative position is an error.
    explicit Positions(std::vector<int64_t> given);

    bool contains(int64_t x) const { return is_member(intervals_, x); }
    void keys(Interval clip, Intervals& out) const;

    // Members among [begin, begin + count), in the words of a pattern's closed form; repeats go in steps of `count`. On
    // partial, `key` gains the number of intervals and each of them relative to `begin`.
    Coverage classify(int64_t begin, int64_t count, Key& key) const;

    // Members that are `residue` mod `modulus`, counted within that residue class.
    std::vector<int64_t> in_residue(int64_t modulus, int64_t residue) const;

    const std::vector<int64_t>& sorted() const { return sorted_; }  // each member once

private:
    std::vector<int64_t> sorted_;
    Intervals intervals_;
};

}  // namespace spattn
