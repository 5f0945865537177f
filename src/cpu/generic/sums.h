// SPDX-License-Identifier: MIT
// The sum of each of `lanes` vectors, in one vector: halves are paired until every lane holds a whole sum. Three
// operations a pair, where summing one vector after the other takes that many a step.
#pragma once

namespace spattn::cpu {
namespace {

// Neighbours within 128 bits of a, then of b.
template <class V>
inline V pair_sums(V a, V b) {
    if constexpr (sizeof(V) / sizeof(Real) == 16)
        return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    else if constexpr (sizeof(V) / sizeof(Real) == 8)
        return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
               __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    else
        return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

// Neighbours of 128 bits of a, then of b.
template <class V>
inline V quarter_sums(V a, V b) {
    if constexpr (sizeof(V) / sizeof(Real) == 16)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    else
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

template <class V>
inline V sums_of_four(const V* x) {
    return pair_sums(pair_sums(x[0], x[1]), pair_sums(x[2], x[3]));
}

// Lane i: the sum of x[i].
template <class V>
inline V sums(const V* x) {
    if constexpr (sizeof(Real) != sizeof(float)) {
        Real each[lanes], out[lanes];
        for (int i = 0; i < lanes; ++i) {
            store(each, x[i]);
            out[i] = 0;
            for (Real value : each) out[i] += value;
        }
        return load(out);
    } else if constexpr (lanes == 16) {
        return quarter_sums(quarter_sums(sums_of_four(x), sums_of_four(x + 4)),
                            quarter_sums(sums_of_four(x + 8), sums_of_four(x + 12)));
    } else if constexpr (lanes == 8) {
        return quarter_sums(sums_of_four(x), sums_of_four(x + 4));
    } else {
        return sums_of_four(x);
    }
}

}  // namespace
}  // namespace spattn::cpu
