// SPDX-License-Identifier: MIT
// The one product that forward and backward are made of:
//
//     C[m][n] (+)= A[m][k] B[k][n]
//
// n lies in vector lanes, A is read one number at a time and broadcast. A may be stored row-major [m][k] or transposed
// [k][m], so neither K nor V nor P is ever repacked: what a product sums over is a matter of two strides. Register
// tiles are tile_m x tile_n vectors; edges along m and n have smaller tiles, and k is any number. The sum over k starts
// at zero and is added to C once: block sums added to a running sum lose less than one long chain.
//
// Right operands that are made for products lie in panels, as wide as a tile: [panel][k][panel_lanes]. A tile reads
// neighbouring lines of them then. Where panel_lanes is a line of a row of several, it finds its lines in a fraction of
// the places of an L1 cache, which hold no more than these and lose them to A: 82 and not 77 GFLOP/s with eight lanes
// (Zen 3, its core shared with another thread).
#pragma once

#include "cpu/generic/verbs.h"

namespace spattn::cpu {
namespace {

constexpr int panel_lanes = tile_n * lanes;

#define SPATTN_INLINE __attribute__((always_inline))  // for what must not leave registers

// For products that nothing is done beside. What is, is called before each tile.
struct Nothing {
    void operator()() const {}
};
constexpr Nothing nothing;

enum class Store { set, add };
enum class Left { rows, transposed };  // how A is stored

struct Product {
    const Real* a;
    int64_t lda;
    const Real* b;
    int64_t ldb;
    Real* c;
    int64_t ldc;
    int k;
};

// One term of the sums of a tile.
template <int M, int N, Left left>
[[gnu::always_inline]] inline void add_term(Vec (&acc)[M][N], const Real* a, int64_t lda, const Real* b) {
    Vec row[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) row[j] = load(b + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
        const Vec x = set1(left == Left::rows ? a[i * lda] : a[i]);
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) add_product(acc[i][j], x, row[j]);
    }
}

template <int M, int N, Left left, Store mode>
inline void tile(const Product& g) {
    Vec acc[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) acc[i][j] = set1(0.f);
    const Real* a = g.a;
    const Real* b = g.b;
    const int64_t lda = g.lda, ldb = g.ldb, next = left == Left::rows ? 1 : lda;
    int left_over = g.k;
    if constexpr (tile_k > 1)
        for (; left_over >= tile_k; left_over -= tile_k)
#pragma GCC unroll 16
            for (int u = 0; u < tile_k; ++u, b += ldb, a += next) add_term<M, N, left>(acc, a, lda, b);
    for (; left_over > 0; --left_over, b += ldb, a += next) add_term<M, N, left>(acc, a, lda, b);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) {
            Real* c = g.c + i * g.ldc + j * lanes;
            store(c, mode == Store::add ? load(c) + acc[i][j] : acc[i][j]);
        }
}

// The next smaller tile for what is left: 4, 2 and 1. Blocks and heads are rarely 3 or 5 beyond a multiple of tile_m, and
// each size of a tile is compiled for every product.
constexpr int smaller(int size) { return size > 4 ? 4 : size / 2; }

// All rows of a strip of N vectors: the largest tiles first.
template <int N, Left left, Store mode, int M = tile_m, class Beside>
inline void strip(Product g, int m, Beside& beside) {
    for (; m >= M; m -= M) {
        beside();
        tile<M, N, left, mode>(g);
        g.a += M * (left == Left::rows ? g.lda : 1);
        g.c += M * g.ldc;
    }
    if constexpr (M > 1)
        if (m > 0) strip<N, left, mode, smaller(M)>(g, m, beside);
}

// n in vectors.
template <Left left, Store mode, int N = tile_n, class Beside = const Nothing>
inline void multiply(Product g, int m, int n, Beside& beside = nothing) {
    for (; n >= N; n -= N) {
        strip<N, left, mode>(g, m, beside);
        g.b += N * lanes;
        g.c += N * lanes;
    }
    if constexpr (N > 1)
        if (n > 0) multiply<left, mode, smaller(N)>(g, m, n, beside);
}

}  // namespace
}  // namespace spattn::cpu
