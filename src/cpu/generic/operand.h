// SPDX-License-Identifier: MIT
// Between tensors and the rows of Real that products read. Rows of Real in equal steps whose columns are contiguous are
// read where they lie; all else (narrow elements, strided columns, listed tokens, rows that must not leak) is copied to
// scratch first.
//
// What a tensor's elements are is known to the functions of `Elements` alone, which are called by the tile or by the
// row. So each algorithm is compiled once for all dtypes: a copy for each was twice the code and took twice the time to
// compile.
#pragma once

#include "core/float8.h"
#include "plan/call.h"
#include "cpu/generic/gemm.h"

namespace spattn::cpu {
namespace {

constexpr int round_up(int64_t x, int unit) { return int((x + unit - 1) / unit * unit); }
constexpr int least(int64_t a, int64_t b) { return int(a < b ? a : b); }

// Columns of a key's row and of a value's, in whole vectors.
inline int columns_of(const Problem& p) { return round_up(p.head_dim, lanes); }
inline int values_of(const Problem& p) { return round_up(p.head_dim_v, lanes); }

// The tokens of a tile in one (batch entry, head). Bit i of alive: row i may be read, so it has a token; of owned: it
// is written from here.
struct Place : TileView {
    int64_t batch, head;
    uint64_t alive, owned;
};
constexpr uint64_t all_rows = ~uint64_t(0);

template <class T>
inline T* address(const TensorView& x, const Place& at, int i = 0) {
    const int64_t token = at.tokens ? at.tokens[i] : at.first + i * at.stride;
    return (T*)x.data + at.batch * x.batch + at.head * x.head + token * x.row;
}

struct Rows {
    const Real* x;
    int64_t ld;
};

// ---- elements -----------------------------------------------------------------------------------------------------

struct Elements {
    int bytes;
    bool are_real;  // rows of them may be read where they lie
    void (*copy_rows)(const TensorView& x, const Place& at, int columns, Real* out);
    void (*store_row)(const Real* in, int columns, Real factor, const TensorView& x, const Place& at, int i);
    Real (*dot)(const void* a, int64_t stride_a, const void* b, int64_t stride_b, int columns);
    Real (*to_real)(const void* element);

    // Row i of a tile.
    char* address(const TensorView& x, const Place& at, int i = 0) const {
        const int64_t token = at.tokens ? at.tokens[i] : at.first + i * at.stride;
        return (char*)x.data + (at.batch * x.batch + at.head * x.head + token * x.row) * bytes;
    }
};

template <class T>
inline void load_row(const T* in, int64_t stride, int columns, Real* out) {
    int c = 0;
    if (stride == 1 && columns >= lanes) {
        for (; c + lanes <= columns; c += lanes) store(out + c, load_wide(in + c));
        // The last vector steps back over elements that are there already.
        if (c < columns) store(out + columns - lanes, load_wide(in + columns - lanes));
        return;
    }
    for (; c < columns; ++c) out[c] = to_real(in[c * stride]);
}

// What the loop reads lies in copies: its stores could change the arguments for all that the compiler knows.
template <class T>
inline void copy_rows_of(const TensorView& from, const Place& place, int columns, Real* out) {
    const TensorView x = from;
    const Place at = place;
    const int ld = round_up(columns, lanes);
    for (int i = 0; i < at.count; ++i) {
        const bool alive = at.alive >> i & 1;
        if (alive) load_row(address<T>(x, at, i), x.column, columns, out + i * ld);
        for (int c = alive ? columns : 0; c < ld; ++c) out[i * ld + c] = 0.f;
    }
}

template <class T>
inline void store_row(const Real* in, int columns, Real factor, T* out, int64_t stride) {
    if (stride == 1)
        for (int c = 0; c < columns; ++c) from_real(in[c] * factor, out[c]);
    else
        for (int c = 0; c < columns; ++c) from_real(in[c] * factor, out[c * stride]);
}

// Rows of tokens that lie apart go past the caches where they are whole cache lines: none is read to be overwritten,
// and by the time that a neighbouring token is written, none would be there. Whoever stores tiles calls end_streams()
// after.
inline bool is_streamed(const Real* out, int columns, int64_t stride, const Place& at) {
    constexpr uintptr_t line = 64;
    const bool apart = at.tokens || at.stride > 1;
    return apart && stride == 1 && ((uintptr_t)out | size_t(columns) * sizeof(Real)) % line == 0;
}
template <class T>
inline void store_row_of(const Real* in, int columns, Real factor, const TensorView& x, const Place& at, int i) {
    T* out = address<T>(x, at, i);
    if constexpr (sizeof(T) == sizeof(Real))
        if (is_streamed(out, columns, x.column, at)) {
            for (int c = 0; c < columns; c += lanes) stream(out + c, load(in + c) * set1(factor));
            return;
        }
    store_row(in, columns, factor, out, x.column);
}

template <class T>
inline Real dot_of(const void* left, int64_t stride_a, const void* right, int64_t stride_b, int columns) {
    const T *a = (const T*)left, *b = (const T*)right;
    Vec sums = set1(0.f);
    int c = 0;
    if (stride_a == 1 && stride_b == 1)
        for (; c + lanes <= columns; c += lanes) sums = fma(load_wide(a + c), load_wide(b + c), sums);
    Real each[lanes], sum = 0.f;
    store(each, sums);
    for (Real x : each) sum += x;
    for (; c < columns; ++c) sum += to_real(a[c * stride_a]) * to_real(b[c * stride_b]);
    return sum;
}

template <class T>
inline Real to_real_of(const void* element) {
    return to_real(*(const T*)element);
}

template <class T>
constexpr Elements elements_of{int(sizeof(T)), __is_same(T, Real), copy_rows_of<T>, store_row_of<T>, dot_of<T>,
                               to_real_of<T>};

// ---- keys ---------------------------------------------------------------------------------------------------------

struct Float8 {
    uint8_t bits;
};
inline Real to_real(Float8 x) { return widen_float8(x.bits); }
inline void from_real(Real x, Float8& out) { out.bits = narrow_float8(float(x)); }
inline Vec load_wide(const Float8* x) { return load_float8(&x->bits); }

// Keys, or values. Those of a float8 cache have elements of their own, and a scale a row.
struct KeySource {
    const Elements& elements;
    TensorView x, scales;  // scales: of floats, absent where all are 1

    // of_queries: the elements of the problem's dtype.
    static KeySource keys(const ForwardArgs& args, const Elements& of_queries) {
        return {args.problem->float8_cache ? elements_of<Float8> : of_queries, args.k, args.k_scales};
    }
    static KeySource values(const ForwardArgs& args, const Elements& of_queries) {
        return {args.problem->float8_cache ? elements_of<Float8> : of_queries, args.v, args.v_scales};
    }

    Real scale(const Place& at, int i) const { return scales.data ? *address<float>(scales, at, i) : Real(1); }
};

// Copies of rows become what these stand for.
inline void scale_rows(const KeySource& from, const Place& at, int columns, Real* rows) {
    const int ld = round_up(columns, lanes);
    for (int i = 0; i < at.count; ++i) {
        if (!(at.alive >> i & 1)) continue;
        const Real scale = from.scale(at, i);
        for (int c = 0; c < columns; ++c) rows[i * ld + c] *= scale;
    }
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// Rows to scratch [count][round_up(columns, lanes)]; dead rows and the padding are zero, for they meet zeros in
// products.
inline Rows copy_rows(const Elements& elements, const TensorView& x, const Place& at, int columns, Real* scratch) {
    elements.copy_rows(x, at, columns, scratch);
    return {scratch, round_up(columns, lanes)};
}

inline bool all_of(const Place& at) { return at.count == 0 || (~at.alive & (all_rows >> (64 - at.count))) == 0; }

// Rows as a left operand: nothing beyond `columns` is read.
inline Rows load_rows(const Elements& elements, const TensorView& x, const Place& at, int columns, Real* scratch) {
    const bool in_steps = elements.are_real && !at.tokens && (x.column == 1 || columns == 1);
    if (in_steps && all_of(at)) return {address<Real>(x, at), x.row * at.stride};
    return copy_rows(elements, x, at, columns, scratch);
}

// Rows in equal steps start at 4 KiB / spacing places of a way of an L1 cache, which is 4 KiB wide.
inline int64_t spacing(int64_t floats) {
    const int64_t step = (floats * int64_t(sizeof(Real))) | 4096;
    return step & -step;
}

// Rows that a product sweeps through again and again, some columns at a time. Where steps put more of them into a place
// than eight ways hold, they are copied: p.V takes half the time then on rows 8 KiB apart.
inline Rows load_swept(const Elements& elements, const TensorView& x, const Place& at, int columns, Real* scratch) {
    const int64_t apart = spacing(x.row * at.stride);
    const bool collide = at.count * apart > 8 * 4096 && apart > spacing(round_up(columns, lanes));
    return collide ? copy_rows(elements, x, at, columns, scratch) : load_rows(elements, x, at, columns, scratch);
}

// Rows as a right operand too: columns are read in whole vectors.
inline Rows load_padded(const Elements& elements, const TensorView& x, const Place& at, int columns, Real* scratch) {
    if (columns % lanes == 0) return load_swept(elements, x, at, columns, scratch);
    return copy_rows(elements, x, at, columns, scratch);
}

// Rows of keys by one of these, `load`. What has scales is not read where it lies.
template <class Load>
inline Rows load_keys(const KeySource& from, const Place& at, int columns, Real* scratch, Load load) {
    const Rows rows = load(from.elements, from.x, at, columns, scratch);
    if (from.scales.data) scale_rows(from, at, columns, scratch);
    return rows;
}

inline void store_rows(const Elements& elements, const Real* in, int64_t ld, Real factor, int columns,
                       const TensorView& x, const Place& at) {
    for (int i = 0; i < at.count; ++i)
        if (at.owned >> i & 1) elements.store_row(in + i * ld, columns, factor, x, at, i);
}

// ---- transposes ---------------------------------------------------------------------------------------------------

typedef Real Four __attribute__((vector_size(4 * sizeof(Real))));

inline void transpose_4x4(const Real* in, int64_t ld, Real factor, Real* out, int64_t ld_out) {
    Four a, b, c, d;
    __builtin_memcpy(&a, in, sizeof a);
    __builtin_memcpy(&b, in + ld, sizeof a);
    __builtin_memcpy(&c, in + 2 * ld, sizeof a);
    __builtin_memcpy(&d, in + 3 * ld, sizeof a);
    const Four ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Four cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5) * factor;
    b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7) * factor;
    c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5) * factor;
    d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7) * factor;
    __builtin_memcpy(out, &a, sizeof a);
    __builtin_memcpy(out + ld_out, &b, sizeof a);
    __builtin_memcpy(out + 2 * ld_out, &c, sizeof a);
    __builtin_memcpy(out + 3 * ld_out, &d, sizeof a);
}

// out[c][r] = factor * in[r][c], up to 4 x 4
inline void transpose_corner(Rows in, int rows, int columns, Real factor, Real* out, int64_t ld_out) {
    if (rows >= 4 && columns >= 4) return transpose_4x4(in.x, in.ld, factor, out, ld_out);
    for (int i = 0; i < least(4, rows); ++i)
        for (int j = 0; j < least(4, columns); ++j) out[j * ld_out + i] = factor * in.x[i * in.ld + j];
}

// out[c][r] = factor * in[r][c], a line of 16 rows at a time: written in quarters, it would leave the cache in between.
inline void transpose(Rows in, int rows, int columns, Real factor, Real* out, int64_t ld_out) {
    for (int first = 0; first < rows; first += 16)
        for (int c = 0; c < columns; c += 4)
            for (int r = first; r < least(first + 16, rows); r += 4)
                transpose_corner({in.x + r * in.ld + c, in.ld}, rows - r, columns - c, factor, out + c * ld_out + r,
                                 ld_out);
}

// Rows to out [columns][width], the right operand whose lanes are rows; lanes without a row are zero.
inline void transpose_padded(Rows in, int rows, int columns, Real factor, Real* out, int width) {
    transpose(in, rows, columns, factor, out, width);
    for (int c = 0; rows < width && c < columns; ++c)
        for (int i = rows; i < width; ++i) out[c * width + i] = 0.f;
}

// Rows of a tensor, as that.
inline void pack_transposed(const Elements& elements, const TensorView& x, const Place& at, int columns, Real factor,
                            Real* out, int width, Real* scratch) {
    transpose_padded(load_rows(elements, x, at, columns, scratch), at.count, columns, factor, out, width);
}

// The same in panels [width / panel][columns][panel].
template <int width>
inline void pack_panels(const Elements& elements, const TensorView& x, const Place& at, int columns, Real factor,
                        Real* out, Real* scratch) {
    constexpr int panel = least(width, panel_lanes);
    const Rows in = load_rows(elements, x, at, columns, scratch);
    for (int first = 0; first < width; first += panel) {
        const int rows = at.count < first ? 0 : least(at.count - first, panel);
        transpose_padded({in.x + first * in.ld, in.ld}, rows, columns, factor, out + int64_t(first) * columns, panel);
    }
}

}  // namespace
}  // namespace spattn::cpu
