// SPDX-License-Identifier: MIT
// The two products of attention on tiles in shared memory, 4 x 4 pairs a thread, and how operands get there.
//
//     dot         s[row][token]    += left[row][column] . right[token][column]
//     accumulate  sums[row][column] += left[row][token] . right[token][column]
//
// Both read 16 bytes at a time: 8 reads for 64 multiply-adds in float, of which those of `left` are one address for all
// threads of a row.
#pragma once

#include "any/element.cuh"
#include "any/shape.h"
#include "plan/call.h"

namespace spattn::any {

// Where a thread's pairs are.
struct Spot {
    int rows, down, x, y;
    __device__ int row(int i) const { return y + i * down; }
};
template <class Real>
__device__ Spot make_spot(int rows) {
    constexpr int across = Shape<Real>::across;
    return {rows, rows / Shape<Real>::pairs, int(threadIdx.x) % across, int(threadIdx.x) / across};
}

// The token, and the column, of a thread's pair j.
template <class Real>
__device__ int token_of(int x, int j) {
    return x + j * Shape<Real>::across;
}
template <class Real>
__device__ int column_of(int x, int j) {
    constexpr int lanes = Shape<Real>::lanes;
    return j / lanes * (Shape<Real>::across * lanes) + x * lanes + j % lanes;
}

template <class Real>
struct alignas(16) Vec {
    Real x[Shape<Real>::lanes];
};
template <class Real>
__device__ Vec<Real> load(const Real* at) {
    return *reinterpret_cast<const Vec<Real>*>(at);
}

// Columns [first, first + width) of the rows of `count` tokens. What lies beyond the last column, or has no token, is
// 0. True where some number is not finite.
template <class Rows, class Real>
__device__ bool stage(const Rows& rows, const int32_t* tokens, int count, int first, int columns, Real* to) {
    using S = Shape<Real>;
    constexpr int ahead = 4;  // loads in flight
    const int column = int(threadIdx.x) % S::width, step = int(blockDim.x) / S::width;
    const bool inside = first + column < columns;
    const auto* const from = rows.first + (inside ? (first + column) * rows.column : 0);
    Real zero = 0;
    for (int row = int(threadIdx.x) / S::width; row < count; row += ahead * step) {
        Real value[ahead];
#pragma unroll
        for (int n = 0; n < ahead; ++n) {
            const int token = row + n * step < count ? tokens[row + n * step] : no_token;
            value[n] = inside && token != no_token ? Real(to_real(from[token * rows.row])) * rows.scale(token) : Real(0);
        }
#pragma unroll
        for (int n = 0; n < ahead; ++n) {
            if (row + n * step < count) to[(row + n * step) * S::stride + column] = value[n];
            zero = fma(value[n], Real(0), zero);  // infinity and NaN leave NaN
        }
    }
    return zero != 0;
}

template <class Real>
__device__ __forceinline__ void dot(const Spot& at, const Real* left, const Real* right, int columns,
                                    Real (&s)[4][4]) {
    using S = Shape<Real>;
#pragma unroll 2
    for (int c = 0; c < columns; c += S::lanes) {
        Vec<Real> a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = load(left + at.row(i) * S::stride + c);
            b[i] = load(right + token_of<Real>(at.x, i) * S::stride + c);
        }
#pragma unroll
        for (int e = 0; e < S::lanes; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) s[i][j] = fma(a[i].x[e], b[j].x[e], s[i][j]);
    }
}

// What a row's word does not see adds nothing, whatever it holds: with `selects`, where a product with 0 would not do.
template <bool selects, class Real, class Seen>
__device__ __forceinline__ void accumulate(const Spot& at, const Real* left, const Real* right, Seen seen,
                                           Real (&sums)[4][4]) {
    using S = Shape<Real>;
    uint64_t words[4] = {};
    if (selects)
        for (int i = 0; i < 4; ++i) words[i] = seen(at.row(i));
#pragma unroll 2
    for (int t = 0; t < S::width; t += S::lanes) {
        Vec<Real> a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = load(left + at.row(i) * S::stride + t);
#pragma unroll
        for (int e = 0; e < S::lanes; ++e) {
            Vec<Real> b[4 / S::lanes];
#pragma unroll
            for (int j = 0; j < 4; j += S::lanes)
                b[j / S::lanes] = load(right + (t + e) * S::stride + column_of<Real>(at.x, j));
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const Real sum = fma(a[i].x[e], b[j / S::lanes].x[j % S::lanes], sums[i][j]);
                    sums[i][j] = !selects || (words[i] >> (t + e) & 1) ? sum : sums[i][j];
                }
        }
    }
}

}  // namespace spattn::any
