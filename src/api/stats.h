// SPDX-License-Identifier: MIT
#pragma once

#include "layout/layout.h"
#include "sparseattn/sparseattn.h"

namespace spattn {

// Counts over `planes` (batch * heads) as the ABI's struct; bytes and FLOPs stay 0.
inline spattn_stats make_stats(const Counts& counts, int64_t planes, int64_t seq_q, int64_t seq_k) {
    spattn_stats stats{};
    stats.pairs = counts.pairs;
    stats.visited = counts.visited;
    const double all = double(planes) * double(seq_q) * double(seq_k);
    stats.density = all > 0 ? counts.pairs / all : 0;
    stats.blocks_full = counts.blocks_full;
    stats.blocks_partial = counts.blocks_partial;
    stats.blocks_empty = counts.blocks_empty;
    stats.row_min = counts.row_min;
    stats.row_max = counts.row_max;
    stats.rows_empty = counts.rows_empty;
    return stats;
}

}  // namespace spattn
