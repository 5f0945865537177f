// SPDX-License-Identifier: MIT
// The rows of this folder, with what the plan asks of them.
#include <cmath>


#include "any/block_forward.h"
#include "any/combine.h"
#include "runtime/device.h"

namespace spattn::any {
namespace {

constexpr int64_t largest_head_dim = 1024;
constexpr int64_t most_rows = ((int64_t(1) << 31) - 1) * 8;  // eight a CTA

const char* block_forward_fits(const Problem& p) {
    if (p.run_lists.at_run_time()) return "reads blocks, and each call brings its lists";
    if (p.softcap != 0) return "no softcap";
    if (p.has_sink_logits) return "no sink logits";
    if (p.head_dim > largest_head_dim || p.head_dim_v > largest_head_dim) return "head_dim above 1024";
    if (p.batch * p.heads_q * (p.seq_q + 127) > most_rows) return "more rows than a grid has";
    return nullptr;
}

Cost block_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double flops_per_cycle = 12;  // of an SM: 2.5 TFLOP/s on an H200
    const double flops = 2 * double(p.head_dim + p.head_dim_v) * s.visited;
    return {4 + flops / (machine.lanes * machine.clock * flops_per_cycle) * 1e-3, "compute"};
}

template <Dtype D>
size_t workspace(const Sizing& s) {
    return Partials<RealOf<D>>::bytes(s.problem, s.layout, s.tasks);
}

template <Dtype D>
void forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    BlockForward<D>::run(args, MaskOrder::rows);
    Combine<D>::run(args, Partials<RealOf<D>>::at(args.workspace, *args.problem, args.layout, args.tasks));
}

template <Dtype D>
void prepare(int32_t device) {
    BlockForward<D>::prepare(device);
    Combine<D>::prepare(device);
}

template <Dtype D>
Kernel block_forward(const char* name, int block) {
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .block_q = block,
            .block_k = block,
            .mask_words = (block * block + 63) / 64,
            .walks = {{Owner::queries, {.workers = 0}}},
            .num_walks = 1,
            .runs_here = [](int32_t device) { return runtime::capability(device) >= 80; },
            .fits = block_forward_fits,
            .cost = block_forward_cost,
            .workspace = workspace<D>,
            .forward = forward<D>,
            .prepare = prepare<D>};
}

}  // namespace

KernelTable kernels() {
    static const Kernel rows[] = {
        block_forward<Dtype::f32>("any_block_forward_f32_64x64", 64),
        block_forward<Dtype::f32>("any_block_forward_f32_32x32", 32),
        block_forward<Dtype::f32>("any_block_forward_f32_16x16", 16),
        block_forward<Dtype::f16>("any_block_forward_f16_64x64", 64),
        block_forward<Dtype::f16>("any_block_forward_f16_32x32", 32),
        block_forward<Dtype::f16>("any_block_forward_f16_16x16", 16),
        block_forward<Dtype::bf16>("any_block_forward_bf16_64x64", 64),
        block_forward<Dtype::bf16>("any_block_forward_bf16_32x32", 32),
        block_forward<Dtype::bf16>("any_block_forward_bf16_16x16", 16),
    };
    return {rows, int(sizeof rows / sizeof *rows)};
}

}  // namespace spattn::any
