// SPDX-License-Identifier: MIT
// The rows of this folder, with what the plan asks of them.
#include <algorithm>

#include "any/block_backward.h"
#include "any/block_forward.h"
#include "any/carried.h"
#include "any/combine.h"
#include "any/cost.h"
#include "any/dispatch.h"
#include "any/fits.h"
#include "any/gather_backward.h"
#include "any/gather_forward.h"
#include "runtime/device.h"

namespace spattn::any {
namespace {

// A GPU whose CTAs have fewer rows than a block needs more of them, but has no memory for so many rows that this counts.
template <Dtype D>
const char* fits(const Problem& p) {
    if (p.head_dim > largest_head_dim || p.head_dim_v > largest_head_dim) return "head_dim above 1024";
    return grid_fits(p, column_parts<RealOf<D>>(std::max(p.head_dim, p.head_dim_v), 2));
}

// No grid has more CTAs than there are query rows, or keys, of all heads.
const char* gather_fits(const Problem& p) {
    if (p.head_dim > largest_head_dim || p.head_dim_v > largest_head_dim) return "head_dim above 1024";
    if (p.batch * p.heads_q > most_ctas / std::max(p.seq_q, p.seq_k)) return "more rows than a grid has";
    return nullptr;
}

// Products of 2 * columns flops a pair that is visited, by tiles of so many rows: small ones read more for each.
struct Rate {
    int products_q, products_v;  // over head_dim, over head_dim_v
    double task;                 // cycles of an SM
    double launches;             // us
    double alone;                // times its share of a busy SM takes a task that has one to itself, at least
};
// What an SM does: float32 as causal at 4K does on an H200, the rest from that by estimate.
constexpr double flops_per_cycle(Dtype dtype, int block) {
    const double rate = block >= 64 ? 72 : block == 32 ? 48 : 24;
    return dtype == Dtype::f64 ? rate / 3 : rate;
}
template <int Block>
Cost cost(const Problem& p, const LayoutStats& s, const Machine& machine, const Rate& rate) {
    const double columns = rate.products_q * double(p.head_dim) + rate.products_v * double(p.head_dim_v);
    const double cycles = 2 * columns * s.visited / flops_per_cycle(p.dtype, Block) + rate.task * double(s.rows);
    const double tasks = double(std::max(s.rows, int64_t(1)));
    const double longest = rate.alone * machine.lanes * cycles / tasks;
    return {rate.launches + compute_us(std::max(cycles, longest), machine), "compute"};
}
// Rows of 128 columns take so long; those of others are split as if they did.
template <int Block>
constexpr double block_cycles(int products) {
    return 2.0 * products * 128 * Block * Block / flops_per_cycle(Dtype::f32, Block);
}
template <int Block>
Cost forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    return cost<Block>(p, s, machine, {1, 1, 2000, 4, 1});
}
// s and dp twice, and three gradients. Few tasks are read off trees of 26 to 128 nodes (H200).
template <int Block>
Cost backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    return cost<Block>(p, s, machine, {4, 3, 8000, 25, 2.3});
}

// What a pass over lists takes, read off bf16 lists of 9 to 2,048 keys (H200). An SM fetches rows of each pair from
// L2, or from what lies nearer, and multiplies beside that; memory gives the rows of each listed key once for heads that
// share a list.
constexpr double fetched_bytes = 20, gather_flops = 48;  // a cycle of an SM
constexpr double widened_column = 0.195;                 // cycles of an SM for a column of float8, read off 8K keys
constexpr double row_cycles = 390, key_cycles = 1200;    // of an SM: that a row or a key takes beside its pairs
constexpr double busy_warps = 8;                         // of an SM that does as much as it can; a row has one
struct GatherWork {
    int products_q, products_v;  // over head_dim, over head_dim_v
    double fetches;              // of both rows of a pair
    int64_t rows, keys;          // keys: where they have warps
    double launch_us;
};
Cost gather_cost(const Problem& p, const LayoutStats& s, const Machine& machine, const GatherWork& work) {
    const double columns = work.products_q * double(p.head_dim) + work.products_v * double(p.head_dim_v);
    const double bytes = work.fetches * double(p.head_dim + p.head_dim_v) * p.key_bytes();
    const double flops_per_cycle = p.dtype == Dtype::f64 ? gather_flops / 3 : gather_flops;
    const double widening = p.float8_cache ? widened_column * double(p.head_dim + p.head_dim_v) : 0;
    const double pair_cycles = std::max({bytes / fetched_bytes, 2 * columns / flops_per_cycle, widening});
    const double cycles = pair_cycles * s.pairs + row_cycles * double(work.rows) + key_cycles * double(work.keys);
    const double tasks = std::max(double(work.rows + work.keys) / busy_warps, 1.0);
    const double busy = tasks_us(tasks, cycles / tasks, machine);
    const double memory = bytes * s.gathered / machine.bandwidth * 1e-3;
    return {work.launch_us + std::max(busy, memory), busy >= memory ? "compute" : "memory"};
}
Cost gather_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    return gather_cost(p, s, machine, {1, 1, 1, s.rows, 0, 4});
}
// By query and by key; before that the lists are brought into the order of keys. By key, rows lie further apart.
Cost gather_backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    return gather_cost(p, s, machine, {4, 3, 3.1, s.rows, p.batch * p.heads_kv * p.seq_k, 16});
}

template <Dtype D>
size_t forward_workspace(const Sizing& s) {
    return Partials<RealOf<D>>::bytes(s.problem, s.layout, s.tasks);
}
template <Dtype D>
size_t backward_workspace(const Sizing& s) {
    return BackwardSpace<RealOf<D>>::bytes(s.problem, s.layout, s.tasks, s.second_tasks);
}

size_t no_workspace(const Sizing&) { return 0; }
template <Dtype D>
size_t gather_backward_workspace(const Sizing& s) {
    return GatherSpace<RealOf<D>>::bytes(s.problem, ListSizes::of(s.problem, s.tokens));
}

template <Dtype D>
void forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    BlockForward<D>::run(args);
    Combine<D>::run(args, Partials<RealOf<D>>::at(args.workspace, *args.problem, args.layout, args.tasks));
}
template <Dtype D>
void backward(const BackwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    BlockBackward<D>::run(args);
}

template <Dtype D>
void gather_forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    GatherForward<D>::run(args);
}
template <Dtype D>
void gather_backward(const BackwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    GatherBackward<D>::run(args);
}

template <Dtype D>
void prepare_forward(int32_t device) {
    BlockForward<D>::prepare(device);
    Combine<D>::prepare(device);
}

bool runs_here(int32_t device) {
    return runtime::capability(device) >= least_capability &&
           size_t(runtime::shared_bytes(device)) >= least_shared_bytes;
}

template <Dtype D, int Block>
Kernel block_forward(const char* name) {
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .block_q = Block,
            .block_k = Block,
            .mask_words = Block * Block / 64,
            .walks = {{Owner::queries, forward_policy(block_cycles<Block>(2), 2000, Block, 128)}},
            .num_walks = 1,
            .runs_here = runs_here,
            .fits = fits<D>,
            .cost = forward_cost<Block>,
            .workspace = forward_workspace<D>,
            .forward = forward<D>,
            .prepare = prepare_forward<D>,
            .orders = true,
            .max_logits = true,
            .float8_cache = true,
            .carries = ForwardCarried<RealOf<D>>::bytes,
            .dispatch = dispatch_of<D>()};
}

template <Dtype D, int Block>
Kernel block_backward(const char* name) {
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::backward,
            .dtype = D,
            .block_q = Block,
            .block_k = Block,
            .mask_words = Block * Block / 64,
            .walks = {{Owner::keys, backward_policy(block_cycles<Block>(4), 4000, Block, 256)},
                      {Owner::queries, backward_policy(block_cycles<Block>(3), 4000, Block, 128)}},
            .num_walks = 2,
            .runs_here = runs_here,
            .fits = fits<D>,
            .cost = backward_cost<Block>,
            .workspace = backward_workspace<D>,
            .backward = backward<D>,
            .prepare = BlockBackward<D>::prepare,
            .orders = true,
            .carries = BackwardCarried<RealOf<D>>::bytes,
            .sweeps = D == Dtype::f64 ? 2 : 1,
            .dispatch = dispatch_of<D>()};
}

template <Dtype D>
Kernel gather_forward_row(const char* name) {
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .runs_here = runs_here,
            .fits = gather_fits,
            .cost = gather_forward_cost,
            .workspace = no_workspace,
            .forward = gather_forward<D>,
            .prepare = GatherForward<D>::prepare,
            .family = Family::gather,
            .max_logits = true,
            .float8_cache = true};
}

template <Dtype D>
Kernel gather_backward_row(const char* name) {
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::backward,
            .dtype = D,
            .runs_here = runs_here,
            .fits = gather_fits,
            .cost = gather_backward_cost,
            .workspace = gather_backward_workspace<D>,
            .backward = gather_backward<D>,
            .prepare = GatherBackward<D>::prepare,
            .family = Family::gather};
}

}  // namespace

KernelTable kernels() {
#define SPATTN_ROW(pass, dtype, block) \
    block_##pass<Dtype::dtype, block>("any_block_" #pass "_" #dtype "_" #block "x" #block)
#define SPATTN_ROWS(pass, dtype)                                                                        \
    SPATTN_ROW(pass, dtype, 64), SPATTN_ROW(pass, dtype, 32), SPATTN_ROW(pass, dtype, 16),             \
        gather_##pass##_row<Dtype::dtype>("any_gather_" #pass "_" #dtype)
    static const Kernel rows[] = {
        SPATTN_ROWS(forward, f32),  SPATTN_ROWS(forward, f16),  SPATTN_ROWS(forward, bf16),  SPATTN_ROWS(forward, f64),
        SPATTN_ROWS(backward, f32), SPATTN_ROWS(backward, f16), SPATTN_ROWS(backward, bf16), SPATTN_ROWS(backward, f64),
    };
#undef SPATTN_ROWS
#undef SPATTN_ROW
    return {rows, int(sizeof rows / sizeof *rows)};
}

}  // namespace spattn::any
