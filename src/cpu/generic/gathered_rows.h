// SPDX-License-Identifier: MIT
// Rows of listed keys with dims in lanes: brought near, met with one row, summed under weights.
#pragma once

#include "cpu/generic/gather_lists.h"
#include "cpu/generic/prefetch.h"
#include "cpu/generic/sums.h"

namespace spattn::cpu {
namespace {

// How many rows dots() takes at a time: no more than that less one are worked on beyond those asked for.
constexpr int dots_step = least(4, lanes), dots_beyond = dots_step - 1;

// Rows of listed keys: where they lie, or copies, up to `lanes` of them.
struct GatheredRows {
    const Real* x = nullptr;
    int64_t ld = 0;
    const int32_t* token = nullptr;  // row i is x + token[i] * ld
    int count = 0;

    // Whether any number of rows may be taken at once.
    static bool in_place(const Elements& elements, const TensorView& x, int columns) {
        return elements.are_real && x.column == 1 && columns % lanes == 0;
    }
    void load(const KeySource& source, const Place& at, int columns, Real* scratch) {
        static constexpr int32_t one_by_one[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        static_assert(lanes <= int(sizeof one_by_one / sizeof *one_by_one), "a copy's rows are counted");
        const TensorView& from = source.x;
        count = at.count;
        if (in_place(source.elements, from, columns)) {
            x = (const Real*)from.data + at.batch * from.batch + at.head * from.head;
            ld = from.row, token = at.tokens;
        } else {
            const Rows copy = load_keys(source, at, columns, scratch, copy_rows);
            x = copy.x, ld = copy.ld, token = one_by_one;
        }
    }
    const Real* operator[](int i) const { return x + token[i] * ld; }
};

// acc[i] += a . rows[i] of V vectors from column c on.
template <int V, int N>
inline void add_products(const Real* a, const Real* const (&rows)[N], int c, Vec (&acc)[N]) {
    Vec x[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) x[j] = load(a + c + j * lanes);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        const Real* row = rows[i] + c;
        asm("" : "+r"(row));  // one pointer at a time: GCC would keep N in other registers, and fetch each for each use
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) acc[i] = fma(x[j], load(row + j * lanes), acc[i]);
    }
}

// out[i] = a . row first + i, of N rows; the last row fills up what there is not.
template <int N>
inline void dots_of(const Real* a, const GatheredRows& b, int first, int columns, Real* out) {
    const Real* row[N];
    Vec acc[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) row[i] = b[least(first + i, b.count - 1)], acc[i] = set1(0.f);
    int c = 0;
    for (; c + 4 * lanes <= columns; c += 4 * lanes) add_products<4>(a, row, c, acc);
    for (; c < columns; c += lanes) add_products<1>(a, row, c, acc);
    sums<N>(acc, out);
}

// Products of a with all rows, and with dots_beyond more at most.
inline void dots(const Real* a, const GatheredRows& b, int columns, Real* out) {
    int i = 0;
    for (; i + dots_step < b.count; i += 2 * dots_step) dots_of<2 * dots_step>(a, b, i, columns, out + i);
    if (i < b.count) dots_of<dots_step>(a, b, i, columns, out + i);
}

// out += sum of weight[i] rows[i], N vectors of columns from `first` on; one row after the other, so that sums are the
// same wherever a list is cut.
template <int N>
inline void add_weighted(const Real* weight, const GatheredRows& rows, int first, Real* out) {
    Vec acc[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[j] = load(out + first + j * lanes);
    for (int i = 0; i < rows.count; ++i) {
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
inline void add_weighted_rows(const Real* weight, const GatheredRows& rows, int columns, Real* out, int first = 0) {
    for (; columns - first >= N * lanes; first += N * lanes) add_weighted<N>(weight, rows, first, out);
    if constexpr (N > 1)
        if (first < columns) add_weighted_rows<N / 2>(weight, rows, columns, out, first);
}

// Long lists are worked on by chunks of so many keys. Their rows stay near while the heads of a group take them one after
// the other. And sums are kept in two: a chunk's rows are added to `near`, and what it holds at the end goes to `far`. So
// the error grows with the length of a chunk and with the number of chunks, not with their product: in one float the mean
// of 131,072 equal values was 1e-3 off, in two it is 4e-6 off.
constexpr int list_chunk = 256;

inline void move_sums(Real* near, Real* far, int columns) {
    for (int c = 0; c < columns; c += lanes) {
        store(far + c, load(far + c) + load(near + c));
        store(near + c, set1(0.f));
    }
}

// Asks for the rows of k and v of keys [i, i + lanes) of a list.
inline void prefetch_keys(const CallArgs& args, const Elements& elements, const TensorView& k, const TensorView& v,
                          const HeadTile& t, Keys keys, int64_t i) {
    const Problem& p = *args.problem;
    for (const int64_t end = i + lanes < keys.count ? i + lanes : keys.count; i < end; ++i) {
        const Place at = place_of(t, keys.at + i, 1);
        if (k.column == 1) prefetch_row(elements.address(k, at), p.head_dim * elements.bytes);
        if (v.column == 1 && !p.value_in_key) prefetch_row(elements.address(v, at), p.head_dim_v * elements.bytes);
    }
}

// Counts the keys of an increasing list of `count` that lie below `end`, where the first `from` are known to. It counts
// whole vectors, for branches would be guessed wrong; the last one steps back over keys that are known to lie below.
inline int count_below(const int32_t* keys, int from, int count, int64_t end) {
    constexpr int step = 16;
    const int32_t limit = int32_t(least_of(end, INT32_MAX));  // keys are tokens: none is the last of int32_t
    if (count < step) {
        while (from < count && keys[from] < limit) ++from;
        return from;
    }
    for (;; from += step) {
        from = least(from, count - step);
        int below = 0;
#pragma GCC unroll 1  // unrolled, it is not turned into vectors
        for (int i = 0; i < step; ++i) below += keys[from + i] < limit;
        if (below < step || from + step == count) return from + below;
    }
}

}  // namespace
}  // namespace spattn::cpu
