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
    const double element = dtype_row(p.dtype).bytes;
    const double of_q = p.float8_operands ? 1 : element, of_k = p.float8_operands ? 1 : p.key_bytes();
    // q, out; k, v; and a scale for each row of float8. Backward also has the gradients of all four.
    const double q = rows_q * double(p.head_dim), out = rows_q * double(p.head_dim_v);
    const double keys = rows_k * double(p.head_dim + (p.value_in_key ? 0 : p.head_dim_v));
    const bool has_key_scales = p.float8_cache || p.float8_operands;
    const double scaled = (has_key_scales ? rows_k * (p.value_in_key ? 1 : 2) : 0) + (p.float8_operands ? rows_q : 0);
    const double gradients = pass == Pass::forward ? 0 : q + out + keys;
    const double lse = rows_q;
    return q * of_q + keys * of_k + (out + gradients) * element + (scaled + lse) * sizeof(float);
}

namespace {

double widening_us(double elements, Dtype dtype, const Machine& machine, int32_t device) {
    constexpr double ns_an_element = 0.5, launch = 3;  // of a CPU's lane; us
    if (device == SPATTN_CPU) return elements * ns_an_element * 1e-3 / machine.lanes;
    return launch + elements * (1 + dtype_row(dtype).bytes) / (machine.bandwidth * 1e3);
}

}  // namespace

double listing_us(double bytes, const Machine& machine, int32_t device) {
    constexpr double ns_a_key = 1, launch = 5;  // of a CPU's lane; us
    if (device == SPATTN_CPU) return bytes / sizeof(int32_t) * ns_a_key * 1e-3 / machine.lanes;
    return launch + bytes / (machine.bandwidth * 1e3);
}

double widening_us(const Problem& p, const Machine& machine, int32_t device) {
    const double rows = double(p.sequences()) * double(p.heads_kv) * double(p.seq_k);
    return widening_us(rows * double(p.head_dim + (p.value_in_key ? 0 : p.head_dim_v)), p.dtype, machine, device);
}

double float8_us(const Problem& p, bool keeps_q_and_k, const Machine& machine, int32_t device) {
    const double rows_q = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    const double rows_k = double(p.batch) * double(p.heads_kv) * double(p.seq_k);
    const double q_and_k = keeps_q_and_k ? 0 : (rows_q + rows_k) * double(p.head_dim);
    return widening_us(q_and_k + (p.value_in_key ? 0 : rows_k * double(p.head_dim_v)), p.dtype, machine, device);
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
