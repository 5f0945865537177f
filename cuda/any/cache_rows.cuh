// SPDX-License-Identifier: MIT
// What kernels share that move rows of tokens, of a cache or between ranks: numbers that come with a call, and rows that
// are copied.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "any/element.cuh"
#include "plan/call.h"

namespace spattn::any {

__device__ __forceinline__ int64_t integer_at(const IndexView& view, int64_t at) {
    return view.is_wide ? static_cast<const int64_t*>(view.data)[at] : static_cast<const int32_t*>(view.data)[at];
}
__device__ __forceinline__ int64_t integer_at(const IndexView& view, int64_t batch, int64_t entry) {
    return integer_at(view, batch * view.batch + entry * view.entry);
}
__device__ __forceinline__ int64_t integer_at(const IndexView& view, int64_t batch, int64_t row, int64_t head) {
    return integer_at(view, batch * view.batch + row * view.row + head * view.head);
}

// The last of so many sequences for which first(sequence) is this number or less.
template <class First>
__device__ __forceinline__ int last_sequence(int64_t sequences, int64_t number, First first) {
    int begin = 0, end = int(sequences);
    while (end - begin > 1) {
        const int middle = (begin + end) / 2;
        (first(middle) <= number ? begin : end) = middle;
    }
    return begin;
}

// Whose the rows of a call are, and which tokens of their sequences.
struct CacheRowsOfCall {
    int64_t sequences, seq_q, seq_k;
    bool is_ragged;

    static CacheRowsOfCall of(const Problem& p) { return {p.sequences(), p.seq_q, p.seq_k, p.ragged != 0}; }

    struct Owner {
        int64_t sequence, order;  // order: rows of the sequence before this one; -1: the row is nobody's
    };
    __device__ Owner owner_of(const CallCache& cache, int64_t batch, int64_t row) const {
        if (!is_ragged) return {batch, row};
        const auto first = [&](int64_t sequence) {
            return min(max(integer_at(cache.query_offsets, sequence, 0), int64_t(0)), seq_q);
        };
        const int sequence = last_sequence(sequences, row, first);
        const int64_t begin = first(sequence);
        return {sequence, row >= begin && row < first(sequence + 1) ? row - begin : -1};
    }
    // -1 where the sequence has no such token.
    __device__ int64_t token_of(const CallCache& cache, const Owner& owner) const {
        if (owner.order < 0) return -1;
        const int64_t token = min(max(integer_at(cache.starts, owner.sequence, 0), -seq_q), seq_k) + owner.order;
        return token < seq_k ? max(token, int64_t(-1)) : -1;
    }
};

// Columns of one row that a lane reads or writes at once.
template <class T, int Width>
struct alignas(Width * sizeof(T) < 16 ? Width * sizeof(T) : 16) Columns {
    T x[Width];
};

// Columns of float8 as elements: each times the row's scale, and rounded.
template <Dtype D, int Width>
__device__ __forceinline__ Columns<ElementOf<D>, Width> widen_columns(const Columns<uint8_t, Width>& codes, float scale) {
    Columns<ElementOf<D>, Width> elements;
    if constexpr (Width % 4 == 0) {
#pragma unroll
        for (int c = 0; c < Width; c += 4) {
            float x[4];
            widen_float8_word(reinterpret_cast<const uint32_t&>(codes.x[c]), x);
            if constexpr (sizeof(ElementOf<D>) == 2) {
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    reinterpret_cast<uint32_t&>(elements.x[c + i]) =
                        pack_anywhere<D>(x[i] * scale, x[i + 1] * scale);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) from_real(x[i] * scale, elements.x[c + i]);
            }
        }
    } else {
#pragma unroll
        for (int c = 0; c < Width; ++c) from_real(widen_float8(codes.x[c]) * scale, elements.x[c]);
    }
    return elements;
}

// body.template operator()<dtype>() for the dtypes of operands.
template <class Body>
void each_dtype(Body body) {
    body.template operator()<Dtype::f32>();
    body.template operator()<Dtype::f16>();
    body.template operator()<Dtype::bf16>();
    body.template operator()<Dtype::f64>();
}

// Rows of a tensor of the call and of their copies, in units of bytes that both are multiples of.
struct CopiedRows {
    TensorView call, copy;  // strides in units
    int units;              // a row
    int unit;               // bytes: 16, 8, 4, 2 or 1

    static CopiedRows of(const TensorView& call, const TensorView& copy, int64_t columns, int64_t element) {
        const auto is_even = [&](const TensorView& x) {
            const int64_t bytes[] = {x.batch * element, x.head * element, x.row * element, columns * element,
                                     int64_t(reinterpret_cast<uintptr_t>(x.data) % 16)};
            return (x.column == 1 || columns == 1) &&
                   std::all_of(std::begin(bytes), std::end(bytes), [](int64_t n) { return n % 16 == 0; });
        };
        const bool are_even = is_even(call) && is_even(copy);
        const int64_t unit = are_even ? 16 : element;
        const auto in_units = [&](TensorView x) {
            for (int64_t* stride : {&x.batch, &x.head, &x.row}) *stride = *stride * element / unit;
            if (are_even) x.column = 1;
            return x;
        };
        return {in_units(call), in_units(copy), int(columns * element / unit), int(unit)};
    }
};

}  // namespace spattn::any
