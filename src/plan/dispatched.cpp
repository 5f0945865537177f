// SPDX-License-Identifier: MIT
#include "plan/dispatched.h"

#include <limits>

namespace spattn {

LayoutStats make_dispatch_stats(const DispatchShape& shape, const Kernel& kernel) {
    const double copies = double(shape.entries()) * double(shape.copies_of_entry());
    const double tiles = copies / shape.tile_q + 0.5 * double(shape.planes() * shape.blocks());  // the last half full
    LayoutStats stats{};
    stats.pairs = copies * double(shape.block_k);
    stats.blocks = tiles * shape.tiles_k;
    stats.masked = shape.joined > 1 ? stats.blocks : 0;
    stats.visited = stats.worked = stats.blocks * shape.tile_q * shape.tile_k;
    stats.rows = kernel.owner() == Owner::keys ? shape.planes() * shape.rows_k() : int64_t(tiles);
    return stats;
}

// What the row takes, and around it: steps on lists, an entry of which takes its time in counting and sorting; copies
// written and results read, which backward are fewer of the bytes; and masks, where every tile has one. Read off lists of
// 8 blocks of 128 and 512 keys a query, and of 16 of 64 for groups of 16 heads, at 16K and 64K tokens (H200): within 7 %,
// head_dim 64 a sixth too little. Backward, rows take longer for blocks of less than 128 keys than they expect of tasks
// so short.
Cost dispatch_cost(const DispatchShape& shape, const Kernel& kernel, const LayoutStats& stats, const Machine& machine) {
    constexpr double steps = 30, an_entry = 0.08e-3, a_mask = 0.003;  // us
    const double streamed = shape.pass == Pass::forward ? 0.55 : 0.72;
    const Cost row = kernel.cost(shape.round, stats, machine);
    const double copied = double(shape.entries() * shape.copies_of_entry()) * double(shape.copy_bytes());
    const double moved = copied / (1e3 * machine.bandwidth * streamed);
    const double listed = an_entry * double(shape.entries()) + a_mask * stats.masked;
    const double shorter = shape.pass == Pass::backward && shape.block_k < 128 ? 1.6 : 1;
    const double us = double(shape.rounds()) * (shorter * row.us + moved + listed + steps);
    return {us, moved > row.us ? "memory" : row.binds};
}

Schedule schedule_dispatch(const DispatchShape& shape, const Walk& given, int lanes) {
    Walk walk = given;
    walk.policy.whole_rows = std::numeric_limits<int64_t>::max();
    const bool by_key = walk.owner == Owner::keys;
    const int32_t rows = int32_t(by_key ? shape.rows_k() : shape.tiles);
    const int64_t tiles_of_key = std::max<int64_t>(shape.tiles / shape.blocks(), 1);
    const Run run{0, by_key ? int32_t(tiles_of_key) : shape.tiles_k, full_block};
    const std::vector<Slice> slices(size_t(rows), Slice{0, 1});
    const std::vector<int32_t> kinds(size_t(shape.planes()));
    LayoutView layout{};
    (by_key ? layout.by_key : layout.by_query) = {slices.data(), &run, rows, 1};
    layout.queries.modulus = layout.keys.modulus = 1;
    layout.kind_of_head = kinds.data(), layout.head_kinds = 1;
    return make_schedule(shape.round, layout, walk, lanes);
}

size_t dispatch_workspace(const DispatchShape& shape, const Kernel& kernel, const Schedule& first,
                          const Schedule& second, int lanes) {
    const TasksView tasks = view(first), second_tasks = view(second);
    const DispatchRound round(shape, tasks, second_tasks, nullptr, 0, nullptr);
    return round.bytes + kernel.workspace({shape.round, round.layout(), tasks, second_tasks, {}, lanes});
}

}  // namespace spattn
