// SPDX-License-Identifier: MIT
// The rows of this arch, with what the plan asks of them. Host code, so that plans for an imaginary GPU can be tested
// where there is none.
#include <algorithm>

#include "any/block_forward.h"
#include "any/combine.h"
#include "core/math.h"
#include "runtime/device.h"
#include "runtime/operand.h"
#include "sm90/block_forward.h"
#include "tile/fragment.h"

namespace spattn::sm90 {

BlockForwardSpace::BlockForwardSpace(const Problem& p, const LayoutView& layout, const TasksView& tasks) {
    constexpr int64_t alignment = 256, note_bytes = 8;
    const int64_t warps = layout.block_q / 16;
    counter = size_t(round_up(int64_t(any::Partials<float>::bytes(p, layout, tasks)), alignment));
    notes = counter + alignment;
    bytes = notes + size_t(tasks.num_tasks * warps * note_bytes);
}

namespace {

using any::MaskOrder;

const char* const assumes =
    "column stride 1, addresses and other strides multiples of 16 bytes; what else comes runs on "
    "any_block_forward, some hundred times slower";

template <int HeadDim>
const char* block_forward_fits(const Problem& p) {
    if (p.run_lists.at_run_time()) return "reads blocks, and each call brings its lists";
    if (p.head_dim > HeadDim) return HeadDim == 64 ? "head_dim above 64" : "head_dim above 128";
    if (p.head_dim_v > HeadDim) return HeadDim == 64 ? "head_dim_v above 64" : "head_dim_v above 128";
    if (p.head_dim % 8 || p.head_dim_v % 8) return "head_dim not a multiple of 8: rows of 16 bytes";
    if (!(p.scale > 0) && p.softcap == 0) return "scale not above 0";
    return nullptr;
}

// Measured cycles of a block and of what a task adds (H200, full_16k and window1k_16k): they settle which tile a problem
// gets.
struct Cycles {
    double full, masked, task;
};
template <int HeadDim>
constexpr Cycles cycles{};
template <>
constexpr Cycles cycles<128>{2450, 2600, 1500};
template <>
constexpr Cycles cycles<64>{1600, 1750, 1200};

template <int HeadDim>
Cost block_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr Cycles c = cycles<HeadDim>;
    const double total = (s.blocks - s.masked) * c.full + s.masked * c.masked + double(s.rows) * c.task;
    const double compute = total / (machine.lanes * machine.clock) * 1e-3;
    const double rows = double(p.batch) * double(p.heads_q * p.seq_q + p.heads_kv * p.seq_k);
    const double memory = rows * double(p.head_dim + p.head_dim_v) * 2 / machine.bandwidth * 1e-3;
    constexpr double launch = 4;  // us
    return {launch + std::max(compute, memory), compute >= memory ? "compute" : "memory"};
}

size_t block_forward_workspace(const Sizing& s) { return BlockForwardSpace(s.problem, s.layout, s.tasks).bytes; }

bool is_addressable(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    return runtime::has_tensor_map(args.q, runtime::q_sizes(p)) && runtime::has_tensor_map(args.k, runtime::k_sizes(p)) &&
           runtime::has_tensor_map(args.v, runtime::v_sizes(p)) &&
           runtime::has_tensor_map(args.out, runtime::out_sizes(p));
}

// Views that the copy engine cannot address are read by the plain kernel, through the same layout.
template <Dtype D, int HeadDim, int BlockQ, int BlockK>
void forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    if (is_addressable(args))
        BlockForward<D, HeadDim, BlockQ, BlockK>::run(args);
    else
        any::BlockForward<D>::run(args, MaskOrder::fragments);
    any::Combine<D>::run(args, any::Partials<float>::at(args.workspace, *args.problem, args.layout, args.tasks));
}

template <Dtype D, int HeadDim, int BlockQ, int BlockK>
void prepare(int32_t device) {
    BlockForward<D, HeadDim, BlockQ, BlockK>::prepare(device);
    any::BlockForward<D>::prepare(device);
    any::Combine<D>::prepare(device);
}

template <Dtype D, int HeadDim, int BlockQ, int BlockK>
Kernel block_forward(const char* name) {
    constexpr int words = tile::fragment_words(BlockQ, BlockK);
    static_assert(sizeof(uint64_t) * words % 128 == 0, "masks start at lines of the cache");
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .block_q = BlockQ,
            .block_k = BlockK,
            .mask_words = words,
            .permute = tile::permute_to_fragments,
            .walks = {{Owner::queries, {.workers = 0}}},
            .num_walks = 1,
            .runs_here = [](int32_t device) { return runtime::capability(device) == 90; },
            .fits = block_forward_fits<HeadDim>,
            .cost = block_forward_cost<HeadDim>,
            .workspace = block_forward_workspace,
            .forward = forward<D, HeadDim, BlockQ, BlockK>,
            .prepare = prepare<D, HeadDim, BlockQ, BlockK>,
            .max_logits = true,
            .assumes = assumes};
}

}  // namespace

KernelTable kernels() {
    static const Kernel rows[] = {
#define SPATTN_KERNEL(kernel, dtype, head_dim, block_q, block_k) \
    kernel<Dtype::dtype, head_dim, block_q, block_k>(            \
        "sm90_" #kernel "_" #dtype "_d" #head_dim "_" #block_q "x" #block_k),
#include "sm90/kernels.inc"
#undef SPATTN_KERNEL
    };
    return {rows, int(sizeof rows / sizeof *rows)};
}

}  // namespace spattn::sm90
