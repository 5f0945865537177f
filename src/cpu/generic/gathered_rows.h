// SPDX-License-Identifier: MIT
// Rows of listed keys with dims in lanes: brought near, met with one row, summed under weights.
#pragma once

#include "cpu/generic/gather_lists.h"
#include "cpu/generic/sums.h"

namespace spattn::cpu {
namespace {

// How many rows dots() takes at a time: no more than that less one are worked on beyond those asked for.
constexpr int dots_step = least(4, lanes), dots_beyond = dots_step - 1;

// Rows of up to `lanes` listed keys: where they lie, or copied. The last row fills up what dots() takes beyond them.
template <class T>
struct GatheredRows {
    const Real* row[lanes];
    int count = 0;

    void load(const TensorView& x, const Place& at, int columns, Real* scratch) {
        count = at.count;
        const bool in_place = __is_same(T, Real) && x.column == 1 && columns % lanes == 0;
        const Rows copy = in_place ? Rows{} : copy_rows<T>(x, at, columns, scratch);
        for (int i = 0; i < count; ++i) row[i] = in_place ? (const Real*)address<T>(x, at, i) : copy.x + i * copy.ld;
        for (int i = count; i < round_up(count, dots_step); ++i) row[i] = row[count - 1];
    }
};

// out[i] = a . b[i] of N rows. Eight chains of sums hide what an FMA takes, and as many pointers fit into registers.
template <int N>
inline void dots_of(const Real* a, const Real* const* b, int columns, Real* out) {
    const Real* row[N];
    Vec acc[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) row[i] = b[i], acc[i] = set1(0.f);
    for (int c = 0; c < columns; c += lanes) {
        const Vec x = load(a + c);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) acc[i] = fma(x, load(row[i] + c), acc[i]);
    }
    sums<N>(acc, out);
}

// Of `count` rows, and of those up to a multiple of dots_step.
inline void dots(const Real* a, const Real* const* b, int count, int columns, Real* out) {
    int i = 0;
    for (; i + 2 * dots_step <= count + dots_beyond; i += 2 * dots_step)
        dots_of<2 * dots_step>(a, b + i, columns, out + i);
    if (i < count) dots_of<dots_step>(a, b + i, columns, out + i);
}

// out += sum of weight[i] rows[i], N vectors of columns from `first` on; one row after the other, so that sums are the
// same wherever a list is cut.
template <int N>
inline void add_weighted(const Real* weight, const Real* const* rows, int count, int first, Real* out) {
    Vec acc[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[j] = load(out + first + j * lanes);
    for (int i = 0; i < count; ++i) {
        const Vec w = set1(weight[i]);
        const Real* row = rows[i] + first;
        asm("" : "+r"(row));  // one pointer: GCC would keep `first` and each offset added up, N of them, and spill them
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[j] = fma(w, load(row + j * lanes), acc[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(out + first + j * lanes, acc[j]);
}

template <int N = 8>
inline void add_weighted_rows(const Real* weight, const Real* const* rows, int count, int columns, Real* out,
                              int first = 0) {
    for (; columns - first >= N * lanes; first += N * lanes) add_weighted<N>(weight, rows, count, first, out);
    if constexpr (N > 1)
        if (first < columns) add_weighted_rows<N / 2>(weight, rows, count, columns, out, first);
}

constexpr int line_bytes = 64;
inline void prefetch_row(const void* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += line_bytes) __builtin_prefetch((const char*)row + at);
}

// Of the keys [i, i + lanes) of a list, rows of k and v.
template <class T>
inline void prefetch_keys(const RunArgs& args, const TensorView& k, const TensorView& v, const HeadTile& t, Keys keys,
                          int64_t i) {
    const Problem& p = *args.problem;
    for (const int64_t end = i + lanes < keys.count ? i + lanes : keys.count; i < end; ++i) {
        const Place at = place_of(t, keys.at + i, 1);
        if (k.column == 1) prefetch_row(address<T>(k, at), p.head_dim * int64_t(sizeof(T)));
        if (v.column == 1 && !p.value_in_key) prefetch_row(address<T>(v, at), p.head_dim_v * int64_t(sizeof(T)));
    }
}

// Of an increasing list, how many keys lie below `end`. Whole vectors are counted: branches would be guessed wrong.
inline int count_below(const int32_t* keys, int64_t count, int64_t end) {
    constexpr int step = 16;
    const int32_t limit = int32_t(least_of(end, INT32_MAX));  // keys are tokens: none is the last of int32_t
    int64_t at = 0;
    for (; at + step <= count; at += step) {
        int below = 0;
        for (int i = 0; i < step; ++i) below += keys[at + i] < limit;
        if (below < step) return int(at) + below;
    }
    while (at < count && keys[at] < limit) ++at;
    return int(at);
}

}  // namespace
}  // namespace spattn::cpu
