// SPDX-License-Identifier: MIT
// Times that costs are put together from, and how tasks are cut.
#pragma once

#include <algorithm>
#include <cmath>

#include "plan/kernel.h"

namespace spattn::any {

// `reached`: the share of the memory's bandwidth that a kernel gets.
inline double memory_us(double bytes, const Machine& machine, double reached) {
    return bytes / (machine.bandwidth * reached) * 1e-3;
}
// Cycles over all processors.
inline double compute_us(double cycles, const Machine& machine) {
    return cycles / (machine.lanes * machine.clock) * 1e-3;
}
// Cycles of one processor, at the clock of an H200 that multiplies without pause.
constexpr double clock_mhz = 1755;
constexpr double cycles_us(double cycles) { return cycles / clock_mhz; }

// What it takes to put parts together, us: at all, and for each float of a part, which is written and read.
struct Joining {
    double us, float_us;
};
// A task takes task_cycles beside those of its blocks, and a part has so many floats.
constexpr SchedulePolicy split_policy(double block_cycles, double task_cycles, const Joining& joining, int floats,
                                      double workers_of_lane) {
    return {.workers = 0,
            .workers_of_lane = workers_of_lane,
            .block_us = cycles_us(block_cycles),
            .task_us = cycles_us(task_cycles),
            .join_us = joining.us,
            .part_us = joining.float_us * floats};
}

// Tiles of so many rows. One head of causal attention over 4,096 tokens took 28.6 us in parts of 2,048 keys and 18.7 in
// parts of 512, and in float32 two heads over 2,048 took 182 in whole rows and 75 in parts of 256; but eight heads over
// 2,048 26 in whole rows and 31 in parts (H200).
constexpr SchedulePolicy forward_policy(double block_cycles, double task_cycles, int rows, int head_dim_v,
                                        double workers_of_lane = 1) {
    return split_policy(block_cycles, task_cycles, {2, 5e-6}, rows * head_dim_v, workers_of_lane);
}
// Parts of so many tokens with so many sums each; to join them is a kernel that does not begin early. One head of causal
// attention over 4,096 tokens took 135 us in whole rows, 62 in parts of 1,024 queries and 56 in parts of 512; eight of
// full attention over 1,024 took 37 in whole rows and 75 in parts (H200).
constexpr SchedulePolicy backward_policy(double block_cycles, double task_cycles, int tokens, int sums,
                                         double workers_of_lane = 1) {
    return split_policy(block_cycles, task_cycles, {6, 3.5e-6}, tokens * sums, workers_of_lane);
}
constexpr double combine_us = 3;  // of the kernel that joins parts of lists, which begins early (H200)

// What the longest task of a walk takes of a processor, cycles, and what it takes to put parts of rows together, us: where
// tasks are few, or some far longer than others, processors are idle.
struct Longest {
    double cycles, join_us;
    // Rows have so many blocks, of which the longest has `longest`, or none: a bound, of which no row is known. `block`
    // and `task` are cycles. filled: the share of a tile's rows that has tokens. Rows are split into what a worker would do
    // in all, if that saves more than it takes; where the longest is far longer than most, few are as long.
    static Longest of(double rows, double blocks, double longest, double block, double task, double workers,
                      const SchedulePolicy& policy, double filled = 1, bool may_split = true) {
        if (longest <= 0) return {0, 0};
        const double parts = std::clamp(longest * workers / std::max(blocks, 1.0), 1.0, longest);
        const double mean = blocks / std::max(rows, 1.0), split_rows = longest > 2 * mean ? blocks / longest : rows;
        const double join = policy.join_us + split_rows * parts * policy.part_us * std::min(filled, 1.0);
        const bool is_split = may_split && longest * (1 - 1 / parts) * policy.block_us > join;
        // Nothing else is done while a part waits for its first block.
        return {(is_split ? longest / parts + 1 : longest) * block + task, is_split ? join : 0};
    }
    // Backward walks go by key, where a task has all heads of a group, and by query.
    static Longest by_key(const Problem& p, const LayoutStats& s, const Machine& machine, double block, double task,
                          const SchedulePolicy& policy) {
        const double group = double(p.group()), workers = policy.workers_of_lane * machine.lanes;
        return of(double(s.rows) / group, s.blocks, s.longest.row * group, block, task, workers, policy);
    }
    static Longest by_query(const LayoutStats& s, const Machine& machine, double block, double task,
                            const SchedulePolicy& policy) {
        const double workers = policy.workers_of_lane * machine.lanes;
        return of(double(s.longest.rows_across), s.blocks, s.longest.across, block, task, workers, policy);
    }
};

// What `cycles` of tiles come to, in all, where rows of blocks are fewer than processors; and what it takes to join parts,
// if rows are split.
struct Spread {
    double cycles, join_us;
    // Tiles are of `heads` heads, and their rows split by the policy. A lane of the machine is so many SMs as share a tile.
    // waits: cycles of a task that others hide where there are more.
    static Spread of(const Problem& p, const LayoutStats& s, const Machine& machine, double cycles,
                     const SchedulePolicy& policy, double filled, int heads = 1, int tile_ctas = 1, double waits = 0) {
        if (s.longest.row <= 0) return {cycles, 0};  // a bound, of which no row is known
        const double rows = std::max(double(s.rows) / heads, 1.0), mean = std::max(s.blocks / heads / rows, 1.0);
        const double task = std::min(policy.task_us * clock_mhz, cycles / rows), block = (cycles / rows - task) / mean;
        const double workers = policy.workers_of_lane * tile_ctas * machine.lanes;
        const Longest longest = Longest::of(rows, rows * mean, std::max(s.longest.row, mean), block, task + waits,
                                            workers, policy, filled, !p.call_lists.at_run_time());
        return {std::max(cycles, machine.lanes * longest.cycles), longest.join_us};
    }
};

// Tasks of so many cycles that are never split: where they are few, processors are idle.
inline double tasks_us(double tasks, double cycles, const Machine& machine) {
    return compute_us(std::max(tasks, double(machine.lanes)) * cycles, machine);
}
// Products and memory overlap, but for the blocks that a task begins and ends with: the less, the more alike both are.
inline Cost overlapped(double apart, double compute, double memory) {
    return {apart + std::hypot(compute, memory), compute >= memory ? "compute" : "memory"};
}

// Key tiles of so many tokens that no query sees: their gradients are written, and nothing of them is read.
inline double unseen_tiles(const Problem& p, const LayoutStats& s, int block) {
    const double tiles = double(p.batch * p.heads_kv) * std::ceil(double(p.seq_k) / block);
    return s.longest.row > 0 ? std::max(tiles - double(s.rows) / double(p.group()), 0.0) : 0;
}

// Cycles for so many tokens of listed tiles, whose rows are copied one by one: so many a row of 128 columns, keys' and
// values'.
inline double copied_cycles(const Problem& p, double tokens, double a_row) {
    return a_row * tokens * double(p.head_dim + p.head_dim_v) / 128;
}
// Keys that stand in listed tiles alone, half of all such tokens perhaps, are copied there before, by a kernel of its
// own.
inline double packing_us(const Problem& p, const LayoutStats& s, const Machine& machine) {
    const double keys = s.away / 2 / double(p.group());
    const double bytes = 2 * keys * double(p.head_dim + p.head_dim_v) * dtype_row(p.dtype).bytes;
    return s.away > 0 ? 3 + memory_us(bytes, machine, 0.8) : 0;
}
// Queries that stand in several tiles have the plain walk by query: each 64 of them look for theirs in the tiles that
// list them, and this is what every time takes of a processor's two CTAs, few or many. Read off scattered keys at 16K
// (H200); where tiles list neighbours, they meet fewer than is assumed.
inline double repeated_queries_us(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double once = 66;  // us
    const double tiles = double(p.seq_q) / 64 * double(p.seq_k) / 128;
    const double times = std::min(s.repeated, double(p.batch * p.heads_q) * tiles);
    return times > 0 ? once * std::max(times / (2.0 * machine.lanes), 1.0) : 0;
}

// Tokens of a problem times their columns, in bytes: q or dq, and out or dout; k or dk, and v or dv.
inline double query_bytes(const Problem& p) {
    return double(p.batch * p.heads_q * p.seq_q) * double(p.head_dim + p.head_dim_v) * dtype_row(p.dtype).bytes;
}
inline double key_bytes(const Problem& p) {
    return double(p.batch * p.heads_kv * p.seq_k) * double(p.head_dim + p.head_dim_v) * p.key_bytes();
}

// At most so many bytes of keys and values are read for blocks in tiles of `heads` heads: decoding may see few keys.
inline double visited_bytes(const Problem& p, const LayoutStats& s, int block_k, int heads) {
    const double keys = s.blocks / heads * block_k;
    return std::min(key_bytes(p), keys * double(p.head_dim + p.head_dim_v) * p.key_bytes());
}

// What tasks of gather rows are that share lists: so many tiles of 64 rows, or more, of so many blocks of 64 keys each.
struct ListTasks {
    double tasks, blocks;
    static ListTasks of(const Problem& p, const LayoutStats& s, int tile = 64) {
        const double list = s.pairs / double(std::max(s.rows, int64_t(1)));  // keys
        return {double(s.rows) / double(p.group()) * std::ceil(double(p.group()) / tile), std::ceil(list / 64)};
    }
};

}  // namespace spattn::any
