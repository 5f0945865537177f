// SPDX-License-Identifier: MIT
// cost.h for bf16 on panels: products at the unit's rate, the vectors of softmax partly beside them, packing.
#pragma once

#include "cpu/generic/cost.h"

namespace spattn::cpu {
namespace {

// Clocks a number: of K and V packed before the tasks, once; of a listed tile packed where it is met; of a row of
// blocks, packed and written back; and of sums that a block's products load and store again.
constexpr double pack_home = 0.6, pack_listed = 0.8, panel_row = 1.5, panel_touch = 0.05;

template <int bq, int bk, Pass pass>
Cost panel_cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    constexpr bool forward = pass == Pass::forward;
    const double dims = double(staged_columns(p.head_dim) + staged_columns(p.head_dim_v));
    const double edges = double(bq + bk) * dims;
    const double rows_q = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    const double rows_k = double(p.batch) * double(p.heads_kv) * double(p.seq_k);
    const double cap = p.softcap != 0 ? softcap_share : 0;
    const double vectors = (stats.worked * (1 + cap) + stats.masked * bq * bk * mask_share) / lanes;
    double clocks = (forward ? 2 : 5) * dims * stats.worked / product_flops_per_clock();
    clocks += vectors * softmax_clocks / 2;
    clocks += stats.blocks * edges * panel_touch * (forward ? 1 : 3);
    clocks += double(stats.rows) * edges * panel_row * (forward ? 1 : 2);
    clocks += stats.gathered * dims * pack_listed + (forward ? rows_k : rows_k + 2 * rows_q) * dims * pack_home;

    const double bytes = (rows_q + (forward ? 3 : 1) * rows_k) * dims * sizeof(Bf16) * (forward ? 1 : 2);
    const double compute_us = clocks / (1e3 * machine.clock * machine.lanes),
                 memory_us = bytes / (1e3 * machine.bandwidth);
    return compute_us > memory_us ? Cost{compute_us, "compute"} : Cost{memory_us, "memory"};
}

}  // namespace
}  // namespace spattn::cpu
