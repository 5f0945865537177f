// SPDX-License-Identifier: MIT
// What a pass is expected to take, in clocks of one lane: products at the arch's rate, softmax by the vector, what each
// block and each row of blocks moves besides, and the wider of that and main memory. Read off dense, windowed and
// block-diagonal runs of 64x64 and 16x16 blocks at head_dim 64 and 128 (Zen 4; forward_row on Sapphire Rapids): right for
// choosing among rows, no promise.
#pragma once

#include "plan/kernel.h"
#include "cpu/generic/verbs.h"

namespace spattn::cpu {
namespace {

// Clocks a float: sums that a block's products load and store again; packing and writing back, once a row of blocks;
// widening of 16-bit elements; rows that lie apart (strided_64k: 51 ns for the 1 KiB of a key), where a backward pass
// brings home dq as well.
constexpr double forward_touch = 0.05, backward_touch = 0.25, forward_row = 0.8, backward_row = 2.5, widen = 0.12,
                 forward_apart = 0.5, backward_apart = 0.75;
// Selecting by mask bits, and capping, as shares of softmax.
constexpr double mask_share = 0.2, softcap_share = 1;

template <class T, int bq, int bk, Pass pass>
Cost cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    constexpr bool forward = pass == Pass::forward;
    const double dims = double(p.head_dim + p.head_dim_v), edges = double(bq + bk) * dims;
    double flops = (forward ? 2 : 5) * dims * stats.worked;
    const double cap = p.softcap != 0 ? softcap_share : 0;
    double vectors = (stats.worked * (1 + cap) + stats.masked * bq * bk * mask_share) / lanes;
    if (!forward && sizeof(T) > sizeof(float)) {  // scores once more, for lse
        flops += 2 * double(p.head_dim) * stats.worked;
        vectors *= 2;
    }
    double clocks = flops / flops_per_clock + vectors * softmax_clocks;
    clocks += stats.blocks * edges * (forward ? forward_touch : backward_touch);
    clocks += double(stats.rows) * edges * (forward ? forward_row : backward_row);
    clocks += stats.gathered * dims * (forward ? forward_apart : backward_apart);
    if (sizeof(T) < sizeof(float)) clocks += stats.blocks * (forward ? bk : bq) * dims * widen;

    const double rows_q = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    const double rows_k = double(p.batch) * double(p.heads_kv) * double(p.seq_k);
    // Keys that no query sees are not read; their gradients are written.
    const double met = double(stats.rows) / double(p.group()) * bk, read_k = met < rows_k ? met : rows_k;
    const double bytes = (forward ? rows_q + rows_k : 2 * rows_q + rows_k + read_k) * dims * sizeof(T);
    const double compute_us = clocks / (1e3 * machine.clock * machine.lanes),
                 memory_us = bytes / (1e3 * machine.bandwidth);
    return compute_us > memory_us ? Cost{compute_us, "compute"} : Cost{memory_us, "memory"};
}

}  // namespace
}  // namespace spattn::cpu
