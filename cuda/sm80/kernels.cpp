// SPDX-License-Identifier: MIT
// The rows of this folder, with what the plan asks of them.
#include <algorithm>

#include "any/block_backward.h"
#include "any/carried.h"
#include "any/combine.h"
#include "any/cost.h"
#include "any/dispatch.h"
#include "any/fits.h"
#include "any/key_sums.h"
#include "any/list_shares.h"
#include "runtime/device.h"
#include "sm80/block_backward.h"
#include "sm80/block_backward_added.h"
#include "sm80/block_forward.h"
#include "sm80/gather_backward.h"
#include "sm80/gather_forward.h"
#include "sm80/turing.h"
#include "tile/fragment.h"

namespace spattn::sm80 {

BlockBackwardAddedSpace::BlockBackwardAddedSpace(const Problem& p, const LayoutView& layout, const TasksView& by_key,
                                                 const TasksView& by_query, int head_dim) {
    constexpr int64_t alignment = 256;
    sums = size_t(round_up(int64_t(any::BackwardSpace<float>::bytes(p, layout, by_key, by_query)), alignment));
    const int64_t tiles = p.batch * p.heads_q * layout.by_query.rows;
    bytes = sums + size_t(tiles * layout.block_q) * size_t(head_dim) * sizeof(float);
}

namespace {

// Also what comes after Hopper, by PTX; a GPU of these may have less shared memory than another.
template <int SharedBytes, int LeastCapability = 80>
bool runs_here(int32_t device) {
    return runtime::capability(device) >= LeastCapability && runtime::shared_bytes(device) >= SharedBytes;
}
template <Dtype D, int SharedBytes>
constexpr auto blocks_run_here = runs_here<SharedBytes, runs_on_turing<D, SharedBytes> ? 75 : 80>;

template <int HeadDim, int HeadDimV>
const char* tiles_fit(const Problem& p, int column_parts) {
    if (const char* why = any::columns_fit(p, HeadDim, HeadDimV)) return why;
    return any::grid_fits(p, column_parts);
}

// What float32 is multiplied as.
template <Dtype D, bool Splits>
const char* products_fit(const Problem& p) {
    return D == Dtype::f32 && !Splits && !p.tf32 ? "rounds to TF32, only with SPATTN_PLAN_TF32" : nullptr;
}

// ---- forward ----
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int Heads, bool Splits>
const char* block_forward_fits(const Problem& p) {
    constexpr int column_parts = BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::ValueColumns::parts;
    if (const char* why = products_fit<D, Splits>(p)) return why;
    if (const char* why = tiles_fit<HeadDim, HeadDimV>(p, column_parts)) return why;
    if (const char* why = any::tile_heads_fit<Heads>(p)) return why;
    return any::maximum_fits(p);
}

// Cycles of a processor for a block's products, its mask, and a task; tokens that are not consecutive cost half their
// bytes more. Read off full, windows and dilated windows at 16K on an H200; no older GPU was tried. With TF32 the
// smaller tiles are faster at head_dim 128: an SM has room for two of their CTAs, and for one of the larger tiles'.
// Parts of columns are CTAs of their own, as if there were so many times the rows; those of head_dim 512 are read off
// causal attention at 16K.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits>
struct ForwardCycles {
    static constexpr int columns = HeadDim + BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::ValueColumns::of_part;
    static constexpr double flops_per_cycle = HeadDim > 256             ? 1300
                                       : D != Dtype::f32         ? (BlockQ == 128 ? 1150 : 1050)
                                       : Splits && HeadDim > 128 ? 178
                                       : Splits                  ? (BlockQ == 128 || HeadDim > 64 ? 215 : 190)
                                       : HeadDim <= 64           ? (BlockQ == 128 ? 460 : 375)
                                                                 : (BlockQ == 128 ? 380 : 415);
    static constexpr double block(double widening = 0) {
        return std::max(2.0 * BlockQ * 64 * columns / flops_per_cycle, widening) + 100;
    }
    static constexpr double task = BlockQ == 128 || HeadDim > 256 ? 5000 : 1600;
    static constexpr SchedulePolicy policy = any::forward_policy(block(), task, BlockQ, HeadDimV);
};

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int Heads, bool Splits>
Cost block_forward_cost(const Problem& p, const LayoutStats& of_rows, const Machine& machine) {
    using C = ForwardCycles<D, HeadDim, HeadDimV, BlockQ, Splits>;
    constexpr double width = dtype_row(D).bytes / 2;  // of 16 bits
    constexpr double launch = 7;                      // us
    constexpr double mask = 1.5 * BlockQ;
    const int column_parts = any::column_parts<float>(p.head_dim_v);
    LayoutStats s = of_rows;
    s.blocks *= column_parts, s.masked *= column_parts, s.repeated *= column_parts, s.rows *= column_parts;
    const double handed_on = s.is_piece ? 80 * BlockQ : 0;  // cycles, those of sm90's rows
    const double widening = p.float8_cache ? 0.585 * 64 * C::columns : 0;  // read off an H200, too
    const double blocks = s.blocks * C::block(widening) + s.masked * mask + double(s.rows) * (C::task + handed_on);
    const double cycles = (blocks + any::copied_cycles(p, s.repeated + s.away, 21)) / Heads;
    const double filled = double(p.seq_q) * Heads / BlockQ;
    const any::Spread spread = any::Spread::of(p, s, machine, cycles, C::policy, filled, Heads);
    const double operands = any::query_bytes(p) + any::visited_bytes(p, of_rows, 64, Heads);
    const double memory = any::memory_us(operands, machine, 0.8) +
                          any::memory_us(width * s.gathered * double(p.head_dim + p.head_dim_v), machine, 1);
    return any::overlapped(launch + spread.join_us, any::compute_us(spread.cycles, machine), memory);
}

size_t block_forward_workspace(const Sizing& s) { return any::Partials<float>::bytes(s.problem, s.layout, s.tasks); }

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits>
void forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::run(args);
    any::Combine<D>::run(args, any::Partials<float>::at(args.workspace, *args.problem, args.layout, args.tasks));
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits>
void prepare_forward(int32_t device) {
    BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::prepare(device);
    any::Combine<D>::prepare(device);
}

// Heads: those of a group that share a tile of BlockQ rows.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, bool Splits = false, int Heads = 1>
Kernel block_forward(const char* name) {
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .block_q = BlockQ / Heads,
            .block_k = 64,
            .mask_words = tile::fragment_words(BlockQ, 64),
            .permute = tile::permute_to_fragments<Heads>,
            .walks = {{Owner::queries, ForwardCycles<D, HeadDim, HeadDimV, BlockQ, Splits>::policy, Heads}},
            .num_walks = 1,
            .runs_here = blocks_run_here<D, BlockForward<D, HeadDim, HeadDimV, BlockQ, Splits>::shared_bytes>,
            .fits = block_forward_fits<D, HeadDim, HeadDimV, BlockQ, Heads, Splits>,
            .cost = block_forward_cost<D, HeadDim, HeadDimV, BlockQ, Heads, Splits>,
            .workspace = block_forward_workspace,
            .forward = forward<D, HeadDim, HeadDimV, BlockQ, Splits>,
            .prepare = prepare_forward<D, HeadDim, HeadDimV, BlockQ, Splits>,
            .orders = Heads == 1,
            .max_logits = true,
            .float8_cache = BlockQ == 64 || Heads > 1,  // many queries of a head are a prompt's, and worth a copy
            .shares_lists = Heads > 1,
            .carries = any::ForwardCarried<float>::bytes,
            .dispatch = any::dispatch_of<D>()};
}

// ---- forward, lists ----
template <int HeadDim, int HeadDimV>
const char* gather_fits(const Problem& p) {
    if (const char* why = any::columns_fit(p, HeadDim, HeadDimV)) return why;
    if (const char* why = any::values_fit(p, HeadDim)) return why;
    return any::lists_fit(p);
}

template <int HeadDim, int HeadDimV>
const char* gather_forward_fits(const Problem& p) {
    if (const char* why = gather_fits<HeadDim, HeadDimV>(p)) return why;
    return any::maximum_fits(p);
}

// Cycles of a processor for 64 rows and 64 keys: the products, of which those over head_dim are made once a part of
// out's columns, or the way of the keys' rows from L2. Read off lists of 2,048 keys on an H200.
template <int HeadDim, int HeadDimV>
Cost gather_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr bool value_in_key = HeadDim > 256;
    constexpr double flops_per_cycle = 950, fetched_bytes = 25, around = 1000, task = 4000, launch = 4;  // us
    constexpr double products = 2.0 * 64 * 64 * ((HeadDimV > 256 ? 2 : 1) * HeadDim + HeadDimV) / flops_per_cycle;
    const double columns = double(p.head_dim + (value_in_key ? 0 : p.head_dim_v));
    const any::ListTasks work = any::ListTasks::of(p, s);
    const double widening = p.float8_cache ? 0.585 * 64 * columns : 0;  // as in block_forward_cost
    const double block = std::max({products + around, 64 * columns * 2 / fetched_bytes, widening});
    const double keys = std::min(s.gathered, double(p.batch * p.heads_kv * p.seq_k)) * columns;
    return any::overlapped(launch, any::tasks_us(work.tasks, work.blocks * block + task, machine),
                           any::memory_us(any::query_bytes(p) + 2 * keys, machine, 0.8));
}

template <class K>
size_t gather_forward_workspace(const Sizing& s) {
    const ListSizes sizes = ListSizes::of(s.problem, s.tokens);
    return any::SharedLists(s.problem, any::ListRows::of(s.problem, sizes, s.layout), sizes, s.lanes * K::ctas).bytes;
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void gather(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    GatherForward<D, HeadDim, HeadDimV, Block>::run(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
Kernel gather_forward(const char* name) {
    using K = GatherForward<D, HeadDim, HeadDimV, Block>;
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .runs_here = runs_here<K::shared_bytes(K::least)>,
            .fits = gather_forward_fits<HeadDim, HeadDimV>,
            .cost = gather_forward_cost<HeadDim, HeadDimV>,
            .workspace = gather_forward_workspace<K>,
            .forward = gather<D, HeadDim, HeadDimV, Block>,
            .prepare = K::prepare,
            .family = Family::gather,
            .max_logits = true,
            .float8_cache = true,
            .shares_lists = true};
}

// ---- backward ----
// Seven products, or eight where dk and dv are made apart. Two walks read scattered tokens, and write such. Each part of
// a sum's columns has scores made for it; what such CTAs reach is read off causal attention at 16K on an H200, and short
// rows of head_dim 256, few tasks and keys that no query sees off random problems (bench/choices.py).
template <Dtype D, int HeadDim, int HeadDimV, bool Splits>
struct BackwardCycles {
    static constexpr bool is_wide = HeadDim > 128;
    static constexpr double flops_per_cycle = HeadDim > 256     ? 970
                                              : D != Dtype::f32 ? (is_wide ? 600 : 1000)
                                              : Splits          ? (is_wide ? 156 : 235)
                                                                : (is_wide ? 323 : 445);
    static constexpr double around = 450, mask = 150, task = is_wide ? 8000 : 4000;
    static constexpr double cleared = is_wide ? 30000 : D == Dtype::f32 ? 13000 : 7500;  // a tile that no query sees
    static constexpr double products(double columns) { return 2 * 64 * 64 * columns / flops_per_cycle; }
    // columns: of the products of a walk; sums: of a token.
    static constexpr SchedulePolicy policy(int columns, int sums) {
        return any::backward_policy(products(columns), task, 64, sums);
    }
    static constexpr int by_key_columns = 2 * (HeadDim + HeadDimV), by_query_columns = 2 * HeadDim + HeadDimV;
    static constexpr SchedulePolicy by_key = policy(by_key_columns, HeadDim + HeadDimV),
                                    by_query = policy(by_query_columns, HeadDim);
};

template <Dtype D, int HeadDim, int HeadDimV, bool JoinsDkDv, bool Splits>
Cost block_backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    using K = BlockBackward<D, HeadDim, HeadDimV, 64, Splits>;
    using C = BackwardCycles<D, HeadDim, HeadDimV, Splits>;
    constexpr double width = dtype_row(D).bytes, launches = 21;  // us
    constexpr int of_ds = 2 * (HeadDim + HeadDimV + K::part_columns), of_p = HeadDim + HeadDimV / K::column_parts;
    const double parts = any::column_parts<float>(p.head_dim), parts_p = any::column_parts<float>(p.head_dim_v);
    const double columns = JoinsDkDv ? 4 * HeadDim + 3 * HeadDimV : parts * of_ds + parts_p * of_p;
    const double cycles = s.blocks * (C::products(columns) + parts * C::around) +
                          parts * (s.masked * C::mask + double(s.rows) * C::task) +
                          any::unseen_tiles(p, s, 64) * C::cleared;
    const double of_key = C::products(C::by_key_columns) + C::around;
    const double of_query = C::products(C::by_query_columns) + C::around;
    const any::Longest by_key = any::Longest::by_key(p, s, machine, of_key, C::task, C::by_key);
    const any::Longest by_query = any::Longest::by_query(s, machine, of_query, C::task, C::by_query);
    const double longest = machine.lanes * (by_key.cycles + by_query.cycles);
    const double row_sums = any::memory_us(any::query_bytes(p), machine, 0.7);
    const double memory = any::memory_us(2.5 * any::query_bytes(p) + 3 * any::key_bytes(p), machine, 0.8) +
                          any::memory_us(6 * s.gathered * double(p.head_dim + p.head_dim_v) * width, machine, 1);
    const double apart =
        launches + row_sums + any::repeated_queries_us(p, s, machine) + by_key.join_us + by_query.join_us;
    return any::overlapped(apart, any::compute_us(std::max(cycles, longest), machine), memory);
}

template <Dtype D, int HeadDim, int HeadDimV, bool JoinsDkDv, bool Splits>
const char* block_backward_fits(const Problem& p) {
    constexpr int column_parts = BlockBackward<D, HeadDim, HeadDimV, 64, Splits>::column_parts;
    if (const char* why = products_fit<D, Splits>(p)) return why;
    if (const char* why = tiles_fit<HeadDim, HeadDimV>(p, column_parts)) return why;
    if (!JoinsDkDv && p.value_in_key) return "values in keys, whose two gradients it makes apart";
    return nullptr;
}

size_t block_backward_workspace(const Sizing& s) {
    return any::BackwardSpace<float>::bytes(s.problem, s.layout, s.tasks, s.second_tasks);
}

template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits>
void backward(const BackwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    BlockBackward<D, HeadDim, HeadDimV, Block, Splits>::run(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int Block, bool Splits = false>
Kernel block_backward(const char* name) {
    using K = BlockBackward<D, HeadDim, HeadDimV, Block, Splits>;
    using Cycles = BackwardCycles<D, HeadDim, HeadDimV, Splits>;
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::backward,
            .dtype = D,
            .block_q = Block,
            .block_k = Block,
            .mask_words = 2 * Block * Block / 64,
            .permute = tile::permute_to_both_fragments,
            .walks = {{Owner::keys, Cycles::by_key}, {Owner::queries, Cycles::by_query}},
            .num_walks = 2,
            .runs_here = blocks_run_here<D, K::shared_bytes(false)>,
            .fits = block_backward_fits<D, HeadDim, HeadDimV, K::joins_dk_dv, Splits>,
            .cost = block_backward_cost<D, HeadDim, HeadDimV, K::joins_dk_dv, Splits>,
            .workspace = block_backward_workspace,
            .backward = backward<D, HeadDim, HeadDimV, Block, Splits>,
            .prepare = K::prepare,
            .orders = true,
            .carries = any::BackwardCarried<float>::bytes,
            .dispatch = any::dispatch_of<D>()};
}

// ---- backward, dq added in memory ----
const char* queries_added_by_arrival(const Problem&) { return "dq"; }

template <int HeadDim, int HeadDimV>
const char* block_backward_added_fits(const Problem& p) {
    if (const char* why = tiles_fit<HeadDim, HeadDimV>(p, 1)) return why;
    return p.deterministic ? "adds dq in the order of arrival" : nullptr;
}

// Five products. Sums of dq are cleared before, added to, and read after. Read off full attention and a window at 16K
// (H200); keys that no query sees as of block_backward.
template <int HeadDim, int HeadDimV>
struct AddedCycles {
    static constexpr double flops_per_cycle = HeadDim <= 64 ? 955 : 1050, around = 450, mask = 150, task = 4000;
    static constexpr double cleared = 7500;  // a tile that no query sees
    static constexpr double block = 2.0 * 64 * 64 * (3 * HeadDim + 2 * HeadDimV) / flops_per_cycle + around;
    static constexpr SchedulePolicy by_key = any::backward_policy(block, task, 64, HeadDim + HeadDimV);
};

template <int HeadDim, int HeadDimV>
Cost block_backward_added_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    using C = AddedCycles<HeadDim, HeadDimV>;
    constexpr double launches = 21;  // us
    const double cycles = s.blocks * C::block + s.masked * C::mask + double(s.rows) * C::task +
                          any::unseen_tiles(p, s, 64) * C::cleared;
    const any::Longest by_key = any::Longest::by_key(p, s, machine, C::block, C::task, C::by_key);
    const double sums = double(p.batch * p.heads_q * p.seq_q) * HeadDim * sizeof(float);
    const double around = any::memory_us(2 * any::query_bytes(p) + 2 * sums, machine, 0.7);
    const double memory = any::memory_us(any::query_bytes(p) + 2 * any::key_bytes(p) + 2 * sums, machine, 0.8);
    const double apart = launches + around + any::repeated_queries_us(p, s, machine) + by_key.join_us;
    return any::overlapped(apart, any::compute_us(std::max(cycles, machine.lanes * by_key.cycles), machine), memory);
}

template <int HeadDim>
size_t block_backward_added_workspace(const Sizing& s) {
    return BlockBackwardAddedSpace(s.problem, s.layout, s.tasks, s.second_tasks, HeadDim).bytes;
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void backward_added(const BackwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    BlockBackwardAdded<D, HeadDim, HeadDimV, Block>::run(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
Kernel block_backward_added(const char* name) {
    using K = BlockBackwardAdded<D, HeadDim, HeadDimV, Block>;
    Kernel row = block_backward<D, HeadDim, HeadDimV, Block>(name);
    row.walks[0].policy = AddedCycles<HeadDim, HeadDimV>::by_key;
    row.walks[1].policy = {.workers = 0};  // sums of whole rows become elements
    row.runs_here = blocks_run_here<D, K::shared_bytes(false)>;
    row.fits = block_backward_added_fits<HeadDim, HeadDimV>;
    row.cost = block_backward_added_cost<HeadDim, HeadDimV>;
    row.workspace = block_backward_added_workspace<HeadDim>;
    row.backward = backward_added<D, HeadDim, HeadDimV, Block>;
    row.prepare = K::prepare;
    row.added_by_arrival = queries_added_by_arrival;
    return row;
}

// ---- backward, lists ----
// As forward with five products, after which each key's row of sums goes to L2. An estimate, which no older GPU has
// tried.
template <int HeadDim, int HeadDimV>
Cost gather_backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr bool value_in_key = HeadDim > 256;
    constexpr double flops_per_cycle = 700, fetched_bytes = 25, added_bytes = 12, around = 3000, task = 6000;
    constexpr double launches = 12;  // us
    constexpr double products = 2.0 * 64 * 64 * (3 * HeadDim + 2 * HeadDimV) / flops_per_cycle;
    const double columns = double(p.head_dim + (value_in_key ? 0 : p.head_dim_v));
    const any::ListTasks work = any::ListTasks::of(p, s);
    const double exchanged = 64 * columns * (2 / fetched_bytes + 4 / added_bytes);
    const double walks = p.deterministic ? 2.1 : 1;  // the bounds, and additions of integers that take longer
    const double cycles = walks * (work.blocks * std::max(products + around, exchanged) + task);  // a task
    const double keys = double(p.batch * p.heads_kv * p.seq_k) * columns;
    const double around_us = any::memory_us(2 * any::query_bytes(p) + 10 * keys, machine, 0.7);
    return any::overlapped(launches + around_us, any::tasks_us(work.tasks, cycles, machine),
                           any::memory_us(2 * any::query_bytes(p) + 2 * keys, machine, 0.8));
}

size_t gather_backward_workspace(const Sizing& s) { return any::KeySumsSpace(s.problem).bytes; }

template <Dtype D, int HeadDim, int HeadDimV, int Block>
void gather(const BackwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    GatherBackward<D, HeadDim, HeadDimV, Block>::run(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int Block>
Kernel gather_backward(const char* name) {
    using K = GatherBackward<D, HeadDim, HeadDimV, Block>;
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::backward,
            .dtype = D,
            .runs_here = runs_here<K::shared_bytes(K::least_rows)>,
            .fits = gather_fits<HeadDim, HeadDimV>,
            .cost = gather_backward_cost<HeadDim, HeadDimV>,
            .workspace = gather_backward_workspace,
            .backward = gather<D, HeadDim, HeadDimV, Block>,
            .prepare = K::prepare,
            .family = Family::gather,
            .shares_lists = true,
            .added_by_arrival = any::keys_added_by_arrival};
}

}  // namespace

KernelTable kernels() {
    static const Kernel rows[] = {
// What products are made in.
#define SPATTN_PRODUCTS_bf16 "bf16"
#define SPATTN_PRODUCTS_f16 "f16"
#define SPATTN_PRODUCTS_f32 "tf32"
#define SPATTN_PRODUCTS_f32split "f32"
#define SPATTN_SPLITS_ false
#define SPATTN_SPLITS_split true
#define SPATTN_NAME(kernel, products, head_dim, head_dim_v, block) \
    "sm80_" #kernel "_" SPATTN_PRODUCTS_##products "_d" #head_dim "_v" #head_dim_v "_" #block "x64"
#define SPATTN_KERNEL(kernel, dtype, head_dim, head_dim_v, block, ...)           \
    kernel<Dtype::dtype, head_dim, head_dim_v, block __VA_OPT__(, __VA_ARGS__)>( \
        SPATTN_NAME(kernel, dtype##__VA_ARGS__, head_dim, head_dim_v, block)),
#define SPATTN_OF_HEADS(heads, kernel, dtype, head_dim, head_dim_v, block, ...)            \
    kernel<Dtype::dtype, head_dim, head_dim_v, block, SPATTN_SPLITS_##__VA_ARGS__, heads>( \
        SPATTN_NAME(kernel, dtype##__VA_ARGS__, head_dim, head_dim_v, block) "_heads" #heads),
#define SPATTN_TILE_HEADS(...)                                       \
    SPATTN_OF_HEADS(16, __VA_ARGS__) SPATTN_OF_HEADS(8, __VA_ARGS__) \
    SPATTN_OF_HEADS(4, __VA_ARGS__) SPATTN_OF_HEADS(2, __VA_ARGS__)
#include "sm80/kernels.inc"
#undef SPATTN_TILE_HEADS
#undef SPATTN_OF_HEADS
#undef SPATTN_KERNEL
#undef SPATTN_NAME
#undef SPATTN_SPLITS_split
#undef SPATTN_SPLITS_
#undef SPATTN_PRODUCTS_f32split
#undef SPATTN_PRODUCTS_f32
#undef SPATTN_PRODUCTS_f16
#undef SPATTN_PRODUCTS_bf16
    };
    return {rows, int(sizeof rows / sizeof *rows)};
}

}  // namespace spattn::sm80
