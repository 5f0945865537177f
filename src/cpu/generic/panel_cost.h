// SPDX-License-Identifier: MIT
// cost.h and gather_cost.h for panels: products at the unit's rate, the vectors of softmax partly beside them,
// packing.
#pragma once

#include "cpu/generic/gather_cost.h"
#include "cpu/generic/gather_forward_panels.h"
#include "cpu/generic/panel_forward.h"

namespace spattn::cpu {
namespace {

// Clocks a number: of K and V packed before the tasks, once; of a listed tile packed where it is met; of a row of
// blocks, packed and written back, forward, backward, and backward where all queries are one tile, which stays near by;
// and of sums that a block's products load and store again.
constexpr double pack_home = 0.6, pack_listed = 0.8, panel_row = 0.6, panel_row_backward = 3, panel_row_one_tile = 0.7,
                 panel_touch = 0.05;

template <int bq, int bk, Pass pass>
Cost panel_cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    constexpr bool forward = pass == Pass::forward;
    const double dims = double(staged_columns(p.head_dim) + staged_columns(p.head_dim_v));
    const double edges = double(bq + bk) * dims;
    const double rows_q = double(p.batch) * double(p.heads_q) * double(p.seq_q);
    const double rows_k = double(p.batch) * double(p.heads_kv) * double(p.seq_k);
    const double cap = p.softcap != 0 ? softcap_share : 0;
    // Steps of tokens are worked on whole: half of one more for each row of a masked block.
    const double whole_steps = stats.worked + stats.masked * (step_terms / 2) * (forward ? bq : bk);
    const double worked = whole_steps < stats.visited ? whole_steps : stats.visited;
    const double vectors = (worked * (1 + cap) + stats.masked * bq * bk * mask_share) / lanes;
    double clocks = (forward ? 2 : 5) * dims * worked / product_flops_per_clock();
    clocks += vectors * softmax_clocks / 2;
    clocks += stats.blocks * edges * panel_touch * (forward ? 1 : 3);
    const double of_row = forward ? panel_row : p.seq_q <= bq ? panel_row_one_tile : panel_row_backward;
    clocks += double(stats.rows) * edges * of_row;
    clocks += stats.gathered * dims * pack_listed + (forward ? rows_k : rows_k + 2 * rows_q) * dims * pack_home;

    const double moves = forward && !keys_meet_once(p, bq) ? 3 : 1;  // of K and V: read, written as panels, read
    const double bytes = (rows_q + moves * rows_k) * dims * sizeof(Element) * (forward ? 1 : 2);
    const double compute_us = clocks / (1e3 * machine.clock * machine.lanes),
                 memory_us = bytes / (1e3 * machine.bandwidth);
    return compute_us > memory_us ? Cost{compute_us, "compute"} : Cost{memory_us, "memory"};
}

// Lists of keys. Clocks a number of a gathered key, packed; of its sums of dK and dV, loaded and stored; and of q, out
// and their gradients of a query row, packed and written back. Clocks of a pair a column, for operands and sums that
// come from L2; and of a list, and backward of a column of it, however short it is. Read off lists of 8 to 2,048 keys
// for groups of 1 to 128 heads (Sapphire Rapids).
constexpr double pack_gathered = 0.2, gathered_sums = 0.65, gathered_row = 1, far_pair = 0.005, panel_list = 1000,
                 panel_list_column = 30;

template <class T, Pass pass>
Cost gather_panel_cost(const Problem& p, const LayoutStats& stats, const Machine& machine) {
    constexpr bool forward = pass == Pass::forward;
    const double dims = double(p.head_dim + p.head_dim_v), tiles = double((p.group() + panel_heads - 1) / panel_heads);
    const double width = double(PairStore<T, panel_heads, tile_rows, 1>::group_width(p));
    const double wide = double(staged_columns(p.head_dim) + staged_columns(p.head_dim_v));
    const double pairs = stats.gathered * width, products = forward ? 1 : 2.5;
    double clocks = pairs * products * wide * (2 / product_flops_per_clock() + far_pair);
    clocks += pairs * softmax_clocks / lanes / 2;
    clocks += (stats.gathered * dims * pack_gathered + gathered_clocks(p, stats, sizeof(T))) * tiles;
    clocks += double(stats.rows) * dims * gathered_row * (forward ? 1 : 2);
    const double lists = double(stats.rows) / double(p.group());
    if (!forward) clocks += (stats.gathered * gathered_sums + lists * panel_list_column) * dims + key_sums(p);
    return gather_cost<pass>(p, clocks + lists * panel_list, machine);
}

}  // namespace
}  // namespace spattn::cpu
