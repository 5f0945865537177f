// SPDX-License-Identifier: MIT
// Isolation: what a query does not see cannot change its result, whatever it holds. A block's products run over pairs
// that its mask does not keep, too. Such a pair has p = ds = 0 and adds 0 times what the other token holds: nothing,
// unless that is NaN or an infinity, for 0 times these is NaN. Rows that hold one are therefore left out of the
// products of masked blocks (zeros take their place), and what they add is added pair by pair, to pairs that are kept.
//
// Looking for such rows must cost next to nothing where there are none. So forward looks at what it has summed, once a
// task, and works a task anew that is not finite; backward looks at k once a column, and learns of q and dout from the
// statistics of their row.
#pragma once

#include <math.h>

#include "cpu/generic/operand.h"

// Not inlined: what numbers never need stays out of the way of what they do.
#define SPATTN_RARE __attribute__((noinline, cold))

namespace spattn::cpu {
namespace {

inline bool is_finite(Real x) { return x - x == 0; }

// NaN from a caller as arithmetic makes it: rounded to bf16 by an addition, one with all digits set becomes 0.
inline float usual_nan(float x) { return x == x ? x : __builtin_nanf(""); }

// Whether numbers in scratch are all finite; count is a multiple of lanes. 0 times a number is 0, times the rest NaN.
inline bool all_finite(const Real* x, int64_t count) {
    const Vec zero = set1(0.f);
    Vec sums[4] = {zero, zero, zero, zero};
    int64_t i = 0;
    for (; i + 4 * lanes <= count; i += 4 * lanes)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[j] = fma(load(x + i + j * lanes), zero, sums[j]);
    for (; i < count; i += lanes) sums[0] = fma(load(x + i), zero, sums[0]);
    const Vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return !any(above(zero, max(sum, set1(-1.f))));  // max() takes the -1 where the other is NaN
}

// Whether a row of a tensor is surely finite: a row of numbers whose squares overflow is taken for one that is not.
// That costs time, and no more.
inline bool is_row_finite(const Elements& elements, const TensorView& x, const Place& at, int i, int columns) {
    const void* row = elements.address(x, at, i);
    return is_finite(elements.dot(row, x.column, row, x.column, columns));
}

// Those of the rows that may be read that are not finite.
SPATTN_RARE inline uint64_t rows_not_finite(const Elements& elements, const TensorView& x, const Place& at,
                                            int columns) {
    uint64_t rows = 0;
    for (int i = 0; i < at.count; ++i)
        if (at.alive >> i & 1 && !is_row_finite(elements, x, at, i, columns)) rows |= uint64_t(1) << i;
    return rows;
}
SPATTN_RARE inline uint64_t rows_not_finite(const KeySource& from, const Place& at, int columns) {
    uint64_t rows = rows_not_finite(from.elements, from.x, at, columns);
    for (int i = 0; i < at.count; ++i)  // an element may overflow by a scale that is finite
        if (at.alive >> i & 1 && !is_finite(from.scale(at, i) * Real(most_float8))) rows |= uint64_t(1) << i;
    return rows;
}

// A tile whose `rows` read as zeros.
inline Place without(Place at, uint64_t rows) {
    at.alive &= ~rows;
    return at;
}

// body(i) for each bit i.
template <class Body>
inline void each_bit(uint64_t bits, Body body) {
    for (; bits != 0; bits &= bits - 1) body(__builtin_ctzll(bits));
}

}  // namespace
}  // namespace spattn::cpu
