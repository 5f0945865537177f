// SPDX-License-Identifier: MIT
// Compiles the rows of kernels.inc and says what they take and cost.
#include "sm90/block_forward.cuh"

namespace spattn::sm90 {

// Measured cycles (H200, full_16k and window1k_16k): they settle which tile a problem gets.
template <int BlockQ>
struct Cycles;
template <>
struct Cycles<128> {
    static constexpr double full = 2450, masked = 2600, task = 1500;
};

size_t block_forward_workspace(const Problem& problem, const LayoutView& layout, const TasksView& tasks, int) {
    return counter_bytes +
           size_t(tasks.num_parts) * size_t(layout.block_q) * size_t(problem.head_dim_v + 1) * sizeof(float);
}

const char* block_forward_fits(const Problem& p) {
    if (p.head_dim != 128 || p.head_dim_v != 128) return "head_dim other than 128";
    if (!(p.scale > 0)) return "scale not above 0";
    return nullptr;
}

bool block_forward_takes(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    return runtime::has_tensor_map(args.q, q_sizes(p)) && runtime::has_tensor_map(args.k, k_sizes(p)) &&
           runtime::has_tensor_map(args.v, k_sizes(p)) && runtime::has_tensor_map(args.out, q_sizes(p));
}

template <int BlockQ>
void block_forward(const ForwardArgs& args) {
    launch_block_forward<Config<BlockQ>>(args);
}

template <int BlockQ>
void prepare_block_forward(int device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_forward<Config<BlockQ>>, sizeof(Shared<Config<BlockQ>>));
    runtime::prepare_tensor_maps();
}

template <int BlockQ>
Cost block_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    using C = Cycles<BlockQ>;
    const double cycles = (s.blocks - s.masked) * C::full + s.masked * C::masked + double(s.rows) * C::task;
    const double compute = cycles / (machine.lanes * machine.clock) * 1e-3;
    const double rows = double(p.batch) * double(p.heads_q * p.seq_q + p.heads_kv * p.seq_k);
    const double memory = rows * double(p.head_dim + p.head_dim_v) * 2 / machine.bandwidth * 1e-3;
    constexpr double launch = 4;  // us
    return {launch + std::max(compute, memory), compute >= memory ? "compute" : "memory"};
}

#define SPATTN_BLOCK_FORWARD(dtype, head_dim, block_q)            \
    template void block_forward<block_q>(const ForwardArgs&);     \
    template void prepare_block_forward<block_q>(int);            \
    template Cost block_forward_cost<block_q>(const Problem&, const LayoutStats&, const Machine&);
#include "sm90/kernels.inc"
#undef SPATTN_BLOCK_FORWARD

}  // namespace spattn::sm90
