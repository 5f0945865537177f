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
// A row is split where a processor would do more than its share with it, down to parts of 2,048 keys, or of 1,024 to
// 128 where queries are few: parts have to be put together. Those of 256 made causal attention over 1,024 tokens take
// 48 us, not 23. One query of 64 heads on 8 took 42 us over 8,192 keys in parts of 2,048, 34 in parts of 1,024 and 24 in
// parts of 512; over 2,048 keys 24 in two parts and 16 in sixteen. Eight queries of 32 heads on 8 over 1,024 keys took
// 21 us in whole rows and 24 in two parts (H200).
inline SchedulePolicy forward_policy(int block_k, int ctas = 1) {
    return {.workers = 0,
            .workers_of_lane = ctas,
            .longest_task = 2048 / block_k,
            .whole_rows = 1024 / block_k,
            .few_queries = 2048,
            .longest_of_few = 1024 / block_k,
            .least_of_few = 128 / block_k};
}

constexpr double combine_us = 3;  // of the kernel that joins parts forward, which begins early (H200)

// What `cycles` of tiles forward come to, in all, where rows of blocks are fewer than processors, so that some may be
// idle; and the time of the kernel that joins parts, if rows are split.
struct Spread {
    double cycles, join_us;
    // Tiles of `heads` heads; CTAs an SM.
    static Spread of(const Problem& p, const LayoutStats& s, const Machine& machine, double cycles, int block_k,
                     int heads, int ctas) {
        const SchedulePolicy policy = forward_policy(block_k, ctas);
        const double rows = std::max(double(s.rows) / heads, 1.0), blocks = s.blocks / heads / rows;
        const double longest_part = policy.longest_for(p.batch * p.heads_q * p.seq_q);
        const bool is_split = blocks > double(policy.whole_rows) && !p.call_lists.at_run_time();
        const double most = is_split ? std::max(blocks / longest_part, 1.0) : 1;
        const double parts = std::clamp(ctas * machine.lanes / rows, 1.0, most), tasks = rows * parts;
        // Nothing else is done while a part waits for its first block.
        const double longest = cycles / tasks + (parts > 1 ? cycles * heads / std::max(s.blocks, 1.0) : 0);
        return {std::max(cycles, machine.lanes * longest), parts > 1 ? combine_us : 0};
    }
};

// The same backward, for walks over blocks of so many tokens. To put parts together takes a kernel of its own: rows of
// up to 1,024 tokens stay whole, longer ones are split down to parts of 512. One head of causal attention over 4,096
// tokens took 64 us in parts of 512, 70 in parts of 1,024 and 143 in whole rows; eight of full attention over 1,024
// took 56 us in whole rows and 73 in parts of 512 (H200).
constexpr int whole_backward_rows = 1024;
inline SchedulePolicy backward_policy(int block) {
    return {.workers = 0, .longest_task = 512 / block, .whole_rows = whole_backward_rows / block};
}

// What it takes to put parts together after a backward walk over blocks of so many tokens, where its rows are mostly
// split: a kernel of 4 to 5 us and the gap before it (H200).
inline double join_us(const LayoutStats& s, const Machine& machine, int block) {
    const bool is_split = double(s.rows) < machine.lanes && s.blocks * block > whole_backward_rows * double(s.rows);
    return is_split ? 6 : 0;
}

// Tasks of so many cycles that are never split: where they are few, processors are idle.
inline double tasks_us(double tasks, double cycles, const Machine& machine) {
    return compute_us(std::max(tasks, double(machine.lanes)) * cycles, machine);
}
// Products and memory overlap, but for the blocks that a task begins and ends with: the less, the more alike both are.
inline Cost overlapped(double apart, double compute, double memory) {
    return {apart + std::hypot(compute, memory), compute >= memory ? "compute" : "memory"};
}

// Cycles for tokens of listed tiles, whose rows are copied one by one: so many a row of 128 columns, keys' and values'.
inline double copied_cycles(const Problem& p, const LayoutStats& s, double a_row) {
    return a_row * s.repeated * double(p.head_dim + p.head_dim_v) / 128;
}
// Queries that stand in several tiles have the plain walk by query: each 64 of them look for theirs in the tiles that
// list them, and this is what every time takes of a processor's two CTAs. Read off scattered keys at 16K (H200); where
// tiles list neighbours, they meet fewer than is assumed.
inline double repeated_queries_us(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double once = 66;  // us
    const double tiles = double(p.seq_q) / 64 * double(p.seq_k) / 128;
    return once * std::min(s.repeated, double(p.batch * p.heads_q) * tiles) / (2.0 * machine.lanes);
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
