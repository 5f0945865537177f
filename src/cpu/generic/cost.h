// SPDX-License-Identifier: MIT
// What a pass is expected to take, in clocks of one lane: products at the arch's rate, softmax by the vector, a constant a
// block, and the wider of that and main memory. Figures of an arch stand in its vec.h; they were read off dense, windowed
// and block-diagonal runs at head_dim 64 and 128 and make rows comparable, not the clock on the wall predictable.
#pragma once

namespace spattn::cpu {
namespace {

template <class T, int bq, int bk, Pass pass>
Cost cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    constexpr bool forward = pass == Pass::forward;
    const double dims = double(p.head_dim + p.head_dim_v);
    const double flops = (forward ? 2 : 5) * dims * stats.visited;
    const double vectors = (stats.visited + stats.masked * bq * bk * mask_share) / lanes;
    const double converted = sizeof(T) == sizeof(float) ? 0 : stats.blocks * (forward ? bk : bq) * dims / lanes;
    const double clocks = flops / flops_per_clock + vectors * softmax_clocks + stats.blocks * block_clocks * (forward ? 1 : 2.5) +
                          converted * convert_clocks + double(stats.rows) * (bq + bk) * dims / lanes * row_clocks;
    const double rows = double(p.batch) * (double(p.heads_q) * double(p.seq_q) + double(p.heads_kv) * double(p.seq_k));
    const double bytes = rows * dims * sizeof(T) * (forward ? 1 : 2);
    const double compute_us = clocks / (1e3 * machine.clock * machine.lanes), memory_us = bytes / (1e3 * machine.bandwidth);
    return compute_us > memory_us ? Cost{compute_us, "compute"} : Cost{memory_us, "memory"};
}

}  // namespace
}  // namespace spattn::cpu
