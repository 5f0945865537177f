// SPDX-License-Identifier: MIT
// What a pass over token lists is expected to take, in the clocks of cost.h. Read off random lists of 1 % and latent
// attention at head_dim 64 to 576, and off random problems (bench/choices.py, Zen 4).
#pragma once

#include "cpu/generic/cost.h"
#include "cpu/generic/gather_backward_dims.h"

namespace spattn::cpu {
namespace {

// Clocks a float of a gathered row, from the caches near by and on top of that from memory that lanes share, or where
// waves of rows take ranges of keys; clocks of a query row, of a pair beyond its flops where dims lie in lanes, and a
// byte of Real for a query row to meet a range of keys backward: its q, dout and dq, list, p and ds are fetched.
constexpr double near_float = 0.03, far_float = 0.12, range_float = 0.04, gather_row = 250, dims_pair = 8, cell = 80;
// Clocks a float of rows that are widened, or copied to whole vectors, for one query of one head (Sapphire Rapids).
constexpr double copied_float = 0.15;
constexpr double near_bytes = 1 << 20;  // of keys and values of a kv head
// Clocks a byte of a key where heads lie in lanes: it is copied, and backward its sums are loaded and stored, too; and of
// a list, however short (random lists of 4 to 64 keys, Sapphire Rapids).
constexpr double forward_key = 0.05, backward_key = 0.2, heads_list = 6000;

inline double gathered_clocks(const Problem& p, const LayoutStats& stats, int element, double far = far_float) {
    const double dims = double(p.head_dim) + (p.value_in_key ? 0 : double(p.head_dim_v));
    const bool is_near = double(p.seq_k) * dims * element <= near_bytes;
    return stats.gathered * dims * (is_near ? near_float : far * element / 4 + near_float);
}

// Meetings of query rows with ranges of keys, at most one a pair.
inline double cells(const Problem& p, const LayoutStats& stats, int num_lanes) {
    const double listed = stats.pairs / most_of(1, stats.rows);
    const int64_t range = DimsBackward::range_of(p, slots_of(p), listed, num_lanes);
    const double met = double(stats.rows) * double((p.seq_k + range - 1) / range);
    return met < stats.pairs ? met : stats.pairs;
}

// Clocks a float of keys' sums backward: all are cleared and written as gradients, whether a query sees them or not.
constexpr double key_sum = 2.5;
inline double key_sums(const Problem& p) {
    const double dims = double(p.head_dim) + (p.value_in_key ? 0 : double(p.head_dim_v));
    return double(p.batch) * double(p.heads_kv) * double(p.seq_k) * dims * key_sum;
}

// Forward, a list is one lane's: it is not split, as rows of blocks are, and up to `most_heads` heads of a group share
// it. Backward, most of the work is with ranges of keys.
template <Pass pass>
Cost gather_cost(const Problem& p, double clocks, const Machine& machine) {
    const int64_t tiles = p.batch * p.heads_kv * p.seq_q * ((p.group() + most_heads - 1) / most_heads);
    const int64_t busy = pass == Pass::forward ? least_of(machine.lanes, tiles) : machine.lanes;
    return {clocks / (1e3 * machine.clock * double(busy)), "compute"};
}

template <class T, Pass pass>
Cost dims_cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    const bool in_ranges = !p.call_lists.at_run_time();
    // Each a pass over head_dim + head_dim_v of a pair. Where rows come from afar, backward's loads and stores wait.
    const double products = pass == Pass::forward ? 1 : in_ranges ? 2.5 : 3.5;
    const double vectors = double(columns_of(p) + values_of(p)) / lanes;
    double clocks = stats.pairs * (products * (vectors * 2 + dims_pair) + softmax_clocks / lanes);
    if (pass == Pass::forward)
        clocks += gathered_clocks(p, stats, sizeof(T), in_ranges ? range_float : far_float);
    else if (in_ranges)
        clocks += cells(p, stats, machine.lanes) * cell * sizeof(Real);
    else  // what is gathered for dq is met again by dk and dv, which are loaded and stored
        clocks += gathered_clocks(p, stats, sizeof(T)) * 5.5;
    const bool is_copied = sizeof(T) < sizeof(Real) || (p.head_dim | p.head_dim_v) % lanes != 0;
    if (pass == Pass::forward && is_copied) clocks += stats.gathered * vectors * lanes * copied_float;
    if (pass == Pass::backward) clocks += key_sums(p);
    return gather_cost<pass>(p, clocks + double(stats.rows) * gather_row, machine);
}

template <class T, Pass pass>
Cost heads_cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    constexpr double products = pass == Pass::forward ? 1 : 2.5;
    const double dims = double(p.head_dim + p.head_dim_v), width = double(HeadPairs::group_width(p));
    double clocks = stats.gathered * width * (products * 2 * dims / flops_per_clock + softmax_clocks / lanes);
    clocks += gathered_clocks(p, stats, sizeof(T)) * (width / most_heads + 1);
    clocks += stats.gathered * dims * sizeof(Real) * (pass == Pass::forward ? forward_key : backward_key);
    // Only the group's heads count: lanes that it leaves empty have no q to read and no out to write.
    clocks += double(stats.rows) * dims * (pass == Pass::forward ? forward_row : backward_row);
    if (pass == Pass::backward) clocks += key_sums(p);
    return gather_cost<pass>(p, clocks + double(stats.rows) / double(p.group()) * heads_list, machine);
}

}  // namespace
}  // namespace spattn::cpu
