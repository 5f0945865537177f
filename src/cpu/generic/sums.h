// SPDX-License-Identifier: MIT
// Sums within vectors, as many at a time as 128 bits hold: neighbours are paired until each 128 bits of one vector hold
// a part of every sum, then these are folded. Three operations a pair, where summing one vector after the other takes
// that many a step.
#pragma once

#include <math.h>

#include "cpu/generic/verbs.h"

namespace spattn::cpu {
namespace {

// Sums that are made together.
constexpr int sums_at_once = 16 / int(sizeof(Real));

// Neighbours within 128 bits of a, then of b.
template <class V>
inline V pair_sums(V a, V b) {
    constexpr int width = sizeof(V) / sizeof(Real);
    if constexpr (sizeof(Real) == sizeof(double)) {
        if constexpr (width == 8)
            return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
                   __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
        else if constexpr (width == 4)
            return __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
        else
            return __builtin_shufflevector(a, b, 0, 2) + __builtin_shufflevector(a, b, 1, 3);
    } else if constexpr (width == 16)
        return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    else if constexpr (width == 8)
        return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
               __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    else
        return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

// The sum of its 128-bit parts.
template <class V>
inline void store_folded(V x, Real* out) {
    constexpr int width = sizeof(V) / sizeof(Real);
    if constexpr (width == sums_at_once)
        __builtin_memcpy(out, &x, sizeof x);
    else if constexpr (width == 16)
        store_folded(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15),
                     out);
    else if constexpr (width == 8)
        store_folded(__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7), out);
    else
        store_folded(__builtin_shufflevector(x, x, 0, 1) + __builtin_shufflevector(x, x, 2, 3), out);
}

// out[i]: the sum of x[i], of N vectors; each is summed in the same order, whatever N.
template <int N, class V>
inline void sums(const V* x, Real* out) {
    static_assert(N % sums_at_once == 0, "sums are made as many at a time as 128 bits hold");
#pragma GCC unroll 16
    for (int i = 0; i < N; i += sums_at_once) {
        if constexpr (sums_at_once == 4)
            store_folded(pair_sums(pair_sums(x[i], x[i + 1]), pair_sums(x[i + 2], x[i + 3])), out + i);
        else
            store_folded(pair_sums(x[i], x[i + 1]), out + i);
    }
}

// The largest number of one vector, which is not below -infinity where there is NaN, and the sum of all.
inline Real highest(Vec x) {
    Real each[lanes], top = -INFINITY;
    store(each, x);
    for (Real value : each) top = value > top ? value : top;
    return top;
}
inline Real total(Vec x) {
    Real each[lanes], sum = 0.f;
    store(each, x);
    for (Real value : each) sum += value;
    return sum;
}

}  // namespace
}  // namespace spattn::cpu
