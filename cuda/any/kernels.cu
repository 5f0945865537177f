// SPDX-License-Identifier: MIT
// Both dtypes of the plain kernels.
#include "any/block_forward.cuh"

namespace spattn::any {

namespace {
constexpr int64_t largest_head_dim = 1024;
constexpr int64_t most_ctas = (int64_t(1) << 31) - 1;
}  // namespace

size_t block_forward_workspace(const Problem& p, const LayoutView& layout, const TasksView& tasks, int) {
    if (!tasks.num_parts) return 0;
    return workspace_head + size_t(tasks.num_parts) * size_t(layout.block_q) * size_t(p.head_dim_v + 1) * sizeof(float);
}

const char* block_forward_fits(const Problem& p) {
    if (p.head_dim > largest_head_dim || p.head_dim_v > largest_head_dim) return "head_dim above 1024";
    if (p.batch * p.heads_q * (p.seq_q + 127) > most_ctas * cta_rows) return "more rows than a grid has";
    return nullptr;
}

Cost block_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double flops_per_cycle = 12;  // of an SM: 2.5 TFLOP/s on an H200
    const double flops = 2 * double(p.head_dim + p.head_dim_v) * s.visited;
    return {4 + flops / (machine.lanes * machine.clock * flops_per_cycle) * 1e-3, "compute"};
}

template <class T, MaskOrder Order>
void block_forward(const ForwardArgs& args) {
    const int64_t ctas = int64_t(args.tasks.num_tasks) * (args.layout.block_q / cta_rows);
    runtime::launch(block_forward_kernel<T, Order>,
                    {unsigned(ctas), unsigned(threads), shared_bytes(args.problem->head_dim, args.problem->head_dim_v)},
                    args.stream, make_params(args));
}

template <class T, MaskOrder Order>
void prepare_block_forward(int device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_forward_kernel<T, Order>, shared_bytes(largest_head_dim, largest_head_dim));
}

template <class T>
void combine(const ForwardArgs& args) {
    if (!args.tasks.num_joins) return;
    const unsigned ctas = unsigned(args.tasks.num_joins) * unsigned(args.layout.block_q);
    runtime::launch(combine_kernel<T>, {ctas, unsigned(threads), 0}, args.stream, make_params(args));
}

template <class T>
void prepare_combine(int device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(combine_kernel<T>, 0);
}

template void block_forward<float, MaskOrder::rows>(const ForwardArgs&);
template void prepare_block_forward<float, MaskOrder::rows>(int);
template void combine<float>(const ForwardArgs&);
template void prepare_combine<float>(int);
template void block_forward<__nv_bfloat16, MaskOrder::rows>(const ForwardArgs&);
template void prepare_block_forward<__nv_bfloat16, MaskOrder::rows>(int);
template void block_forward<__nv_bfloat16, MaskOrder::fragments>(const ForwardArgs&);
template void prepare_block_forward<__nv_bfloat16, MaskOrder::fragments>(int);
template void combine<__nv_bfloat16>(const ForwardArgs&);
template void prepare_combine<__nv_bfloat16>(int);

}  // namespace spattn::any
