// SPDX-License-Identifier: MIT
// Rows of tokens that go from one tensor of a call to another, for ranks that hold one sequence together. C++17-clean.
#pragma once

#include "plan/kernel.h"

namespace spattn {

// Row from_rows[i] of one becomes row to_rows[i] of the other; without a list it is row i itself.
struct RowsCopy {
    TensorView from, to;
    const int32_t *from_rows, *to_rows;
    int64_t rows, columns, element;  // element: bytes
};

// Row to_rows[i] of `to` becomes the sum of row own_rows[i] of `own`, which may be the same, and of the rows of `parts`
// that are listed for i, in their order.
struct RowsSum {
    TensorView own, parts, to;
    const int32_t *own_rows, *to_rows, *first_place, *places;  // first_place [rows + 1]: where its places begin
    int64_t rows, columns;
};

// What one step moves: keys, values and scales of both, of the rank's own tokens and of others'.
template <class Rows>
struct RowsTogether {
    static constexpr int most = 8;
    Rows all[most];
    int count = 0;

    void add(const Rows& rows) {
        if (rows.rows) all[count++] = rows;
    }
    const Rows* begin() const { return all; }
    const Rows* end() const { return all + count; }
};
using RowsCopies = RowsTogether<RowsCopy>;
using RowsSums = RowsTogether<RowsSum>;

// Rows are those of all batch entries and kv heads of a problem. Sums are of its dtype; copies say what they are of.
struct ExchangeCall {
    const Problem* problem;
    Parallel* parallel;  // CPU
    void* stream;        // CUDA
    int32_t device;      // CUDA: index among the devices of this kind
};

// What a backend does for exchanges.
struct ExchangeSteps {
    void (*copy)(const ExchangeCall& call, const RowsCopies& copies);
    void (*add)(const ExchangeCall& call, const RowsSums& sums);
    void (*prepare)(int32_t device);  // as Kernel::prepare
};

}  // namespace spattn
