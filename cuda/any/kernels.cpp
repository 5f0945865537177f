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
#include "core/math.h"
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

// What an SM does: float32 as causal at 4K does on an H200, the rest from that by estimate. One task does as much as
// several that share an SM.
constexpr double flops_per_cycle(Dtype dtype, int block) {
    const double rate = block >= 64 ? 72 : block == 32 ? 48 : 24;
    return dtype == Dtype::f64 ? rate / 3 : rate;
}
// Cycles of an SM for a block: products over head_dim and over head_dim_v, whose columns come in parts of 64.
template <int Block>
constexpr double block_cycles(Dtype dtype, int products_q, int64_t head_dim, int products_v, int64_t head_dim_v) {
    const int64_t columns = products_q * round_up(head_dim, 64) + products_v * round_up(head_dim_v, 64);
    return 2.0 * double(columns) * Block * Block / flops_per_cycle(dtype, Block);
}
double column_parts(const Problem& p) { return double(ceil_div(std::max(p.head_dim, p.head_dim_v), 64)); }
// What blocks take for what they take where columns are one part: an SM has room for fewer CTAs where their sums have
// more, and each part adds so much. Read off random problems of head_dim 16 to 256 (H200).
constexpr double crowding(double parts, double of_part) { return 1 + of_part * (parts - 1); }
// Policies of rows take these columns for all.
template <int Block>
constexpr double usual_cycles(int products) {
    return block_cycles<Block>(Dtype::f32, products, 128, 0, 0);
}
constexpr double forward_task = 2000, backward_task = 4000;  // cycles of an SM, of each walk
// The longest task of small tiles waits more than it multiplies, which others hide where there are more.
constexpr double waits(int block) { return block >= 64 ? 0 : block == 32 ? 30000 : 45000; }  // cycles
template <int Block>
constexpr SchedulePolicy forward_split = forward_policy(usual_cycles<Block>(2), forward_task, Block, 128);
template <int Block>
constexpr SchedulePolicy by_key_split = backward_policy(usual_cycles<Block>(4), backward_task, Block, 256);
template <int Block>
constexpr SchedulePolicy by_query_split = backward_policy(usual_cycles<Block>(3), backward_task, Block, 128);

template <int Block>
Cost forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double launch = 4;  // us
    const double block = block_cycles<Block>(p.dtype, 1, p.head_dim, 1, p.head_dim_v) * crowding(column_parts(p), 0.12);
    const double cycles = block * s.blocks + forward_task * double(s.rows), filled = double(p.seq_q) / Block;
    const Spread spread = Spread::of(p, s, machine, cycles, forward_split<Block>, filled, 1, 1, waits(Block));
    return {launch + spread.join_us + compute_us(spread.cycles, machine), "compute"};
}
// s and dp twice, and three gradients; those of keys that no query sees are written, too.
template <int Block>
Cost backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double launches = 30, cleared = 1000 + 170 * Block;  // us; cycles of a part of the columns
    const double parts = column_parts(p), crowded = crowding(parts, 0.3);
    const double longest_task = backward_task + waits(Block) * parts;
    const double of_key = block_cycles<Block>(p.dtype, 2, p.head_dim, 2, p.head_dim_v);
    const double of_query = block_cycles<Block>(p.dtype, 2, p.head_dim, 1, p.head_dim_v);
    const Longest by_key = Longest::by_key(p, s, machine, of_key, longest_task, by_key_split<Block>);
    const Longest by_query = Longest::by_query(s, machine, of_query, longest_task, by_query_split<Block>);
    const double keys = crowded * of_key * s.blocks + backward_task * double(s.rows);
    const double queries = crowded * of_query * s.blocks + backward_task * double(s.longest.rows_across);
    const double cycles = std::max(keys, machine.lanes * by_key.cycles) +
                          std::max(queries, machine.lanes * by_query.cycles) +
                          unseen_tiles(p, s, Block) * parts * cleared;
    return {launches + by_key.join_us + by_query.join_us + compute_us(cycles, machine), "compute"};
}

// What a pass over lists takes, read off bf16 lists of 9 to 2,048 keys, and off random problems of float32, whose rows
// are longer (H200). An SM fetches rows of each pair from L2, or from what lies nearer, and multiplies beside that; memory
// gives the rows of each listed key once for heads that share a list.
constexpr double fetched_bytes = 20, gather_flops = 48;  // a cycle of an SM
constexpr double long_fetched_bytes = 28;                // the same of rows of 4 bytes a column and more, forward
constexpr double widened_column = 0.195;                 // cycles of an SM for a column of float8, read off 8K keys
constexpr double row_cycles = 390, key_cycles = 1200;    // of an SM: that a row or a key takes beside its pairs
constexpr double wide_column = 3, wide_column_backward = 20;  // the same of a query row's columns beyond 64
constexpr double busy_warps = 8;                              // of an SM that does as much as it can; a row has one
// Rows of one axis, each of which has a warp.
struct GatherWalk {
    int products_q, products_v;  // over head_dim, over head_dim_v
    double fetches, rate;        // of both rows of a pair; bytes of them a cycle of an SM
    double rows, row_cycles;
    double longest, latency;     // pairs of the longest row, and cycles that its warp waits for each
};
struct GatherWork {
    double cycles = 0, bytes = 0;  // of an SM; of a pair

    void add(const Problem& p, const LayoutStats& s, const Machine& machine, const GatherWalk& walk) {
        const double columns = walk.products_q * double(p.head_dim) + walk.products_v * double(p.head_dim_v);
        const double fetched = walk.fetches * double(p.head_dim + p.head_dim_v) * p.key_bytes();
        const double flops_per_cycle = p.dtype == Dtype::f64 ? gather_flops / 3 : gather_flops;
        const double widening = p.float8_cache ? widened_column * double(p.head_dim + p.head_dim_v) : 0;
        const double pair = std::max({fetched / walk.rate, 2 * columns / flops_per_cycle, widening});
        const double all = pair * s.pairs + walk.row_cycles * walk.rows, tasks = std::max(walk.rows / busy_warps, 1.0);
        const double longest = std::max(all / tasks, walk.longest * std::max(busy_warps * pair, pair + walk.latency));
        cycles += std::max(all, machine.lanes * longest), bytes += fetched;
    }
    Cost cost(const LayoutStats& s, const Machine& machine, double launches) const {
        const double busy = compute_us(cycles, machine), memory = bytes * s.gathered / machine.bandwidth * 1e-3;
        return {launches + std::max(busy, memory), busy >= memory ? "compute" : "memory"};
    }
};
Cost gather_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    const double row = row_cycles + wide_column * std::max(double(p.head_dim) - 64, 0.0);
    GatherWork work;
    const double rate = p.key_bytes() < 4 ? fetched_bytes : long_fetched_bytes;
    work.add(p, s, machine, {1, 1, 1, rate, double(s.rows), row, s.longest.row, 0});
    return work.cost(s, machine, 8);
}
// By query and by key, where rows lie further apart; before that the lists are brought into the order of keys.
Cost gather_backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double latency = 700;
    const double keys = double(p.batch * p.heads_kv * p.seq_k), longest_key = s.longest.across * double(p.group());
    GatherWork work;
    const double row = row_cycles + wide_column_backward * std::max(double(p.head_dim) - 64, 0.0);
    work.add(p, s, machine, {2, 1, 1.3, fetched_bytes, double(s.rows), row, s.longest.row, latency});
    work.add(p, s, machine, {2, 2, 1.8, fetched_bytes, keys, key_cycles, longest_key, latency});
    return work.cost(s, machine, 40);
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
            .walks = {{Owner::queries, forward_split<Block>}},
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
            .walks = {{Owner::keys, by_key_split<Block>}, {Owner::queries, by_query_split<Block>}},
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
