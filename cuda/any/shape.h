// SPDX-License-Identifier: MIT
// What host and device agree on: how a CTA of these kernels divides a tile, and where it leaves what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"

namespace spattn::any {

constexpr int64_t largest_head_dim = 1024;
constexpr int least_capability = 75;              // of GPUs that run these kernels
constexpr size_t least_shared_bytes = 64 * 1024;  // that a CTA may have on each of them

// What a row adds up in.
template <Dtype D>
using RealOf = std::conditional_t<D == Dtype::f64, double, float>;

// A CTA owns up to 64 rows and meets `width` tokens of the other axis a step; a thread owns 4 x 4 pairs of them, and
// `across` threads share the rows. Columns of operands are staged `width` at a time, too.
template <class Real>
struct Shape {
    static constexpr int most_rows = 64, pairs = 4;
    static constexpr int lanes = 16 / sizeof(Real);      // of what one instruction reads from shared memory
    static constexpr int width = 256 / sizeof(Real);
    static constexpr int across = width / pairs;         // threads
    static constexpr int most_threads = most_rows / pairs * across;
    // Rows in shared memory start 16 bytes apart modulo 128: threads that read down a column meet no conflict.
    static constexpr int stride = width + lanes;
    static constexpr int most_columns = 1024 / sizeof(Real);  // of sums that a CTA has room for, a row
    static constexpr int most_blocks = 4;                     // of a step: of 16 tokens each
    static_assert(across <= 32 && 32 % across == 0, "those who share a row exchange by shuffles");
    static_assert(width <= 64, "what a row of a step sees is one word");

    static constexpr int threads(int rows) { return rows / pairs * across; }
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// CTAs that share a task because its columns are more than one has room for.
template <class Real>
constexpr int column_parts(int64_t columns, int sums = 1) {
    return int(divide_up(columns, Shape<Real>::most_columns / sums));
}

}  // namespace spattn::any
