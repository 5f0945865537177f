// SPDX-License-Identifier: MIT
// Work in units that people compare across libraries: on kept pairs, each operand moved once. What a row makes of it is
// the row's own cost().
#include <algorithm>

#include "plan/plan.h"

namespace spattn {

double flops(const Problem& problem, double pairs, Pass pass) {
    const double forward = 2 * double(problem.head_dim + problem.head_dim_v) * pairs;  // q kT and p v
    return pass == Pass::forward ? forward : 2.5 * forward;  // s again, dp, and three gradients
}

double operand_bytes(const Problem& p, Pass pass) {
    const double rows_q = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    const double rows_k = double(p.sequences()) * double(p.heads_kv) * double(p.seq_k);
    // q, out; k, v. Backward also has their gradients.
    const double dims = double(p.head_dim + p.head_dim_v), dims_k = p.value_in_key ? double(p.head_dim) : dims;
    const double scales = p.float8_cache ? 4 * rows_k * (p.value_in_key ? 1 : 2) : 0;
    const double bytes = rows_q * dims * dtype_row(p.dtype).bytes + rows_k * dims_k * p.key_bytes() + scales;
    const double lse = 4 * rows_q;
    return (pass == Pass::forward ? 1 : 2) * bytes + lse;
}

double widening_us(const Problem& p, const Machine& machine, int32_t device) {
    constexpr double ns_an_element = 0.5, launch = 3;  // of a CPU's lane; us
    const double rows = double(p.sequences()) * double(p.heads_kv) * double(p.seq_k);
    const double elements = rows * double(p.head_dim + (p.value_in_key ? 0 : p.head_dim_v));
    if (device == SPATTN_CPU) return elements * ns_an_element * 1e-3 / machine.lanes;
    return launch + elements * (p.key_bytes() + dtype_row(p.dtype).bytes) / (machine.bandwidth * 1e3);
}

// Sums as wide as a row adds them up: forward of out with three numbers a query, backward of dq, dk and dv.
double handed_on_bytes(const Problem& p, Pass pass) {
    const double rows_q = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    const double rows_k = double(p.batch) * double(p.heads_kv) * double(p.seq_k);
    const double forward = rows_q * double(p.head_dim_v + 3);
    const double backward = rows_q * double(p.head_dim) + rows_k * double(p.head_dim + p.head_dim_v);
    return std::max(4, dtype_row(p.dtype).bytes) * (pass == Pass::forward ? forward : backward);
}

}  // namespace spattn
