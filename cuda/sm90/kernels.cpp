// SPDX-License-Identifier: MIT
// The rows of this arch, with what the plan asks of them. Host code, so that plans for an imaginary GPU can be tested
// where there is none.
#include <algorithm>
#include <cmath>

#include "any/block_backward.h"
#include "any/block_forward.h"
#include "any/carried.h"
#include "any/combine.h"
#include "any/cost.h"
#include "any/dispatch.h"
#include "any/fits.h"
#include "any/key_sums.h"
#include "core/math.h"
#include "runtime/device.h"
#include "runtime/operand.h"
#include "sm80/block_backward.h"
#include "sm80/block_forward.h"
#include "sm80/gather_backward.h"
#include "sm80/gather_forward.h"
#include "sm90/block_backward.h"
#include "sm90/block_backward_apart.h"
#include "sm90/block_backward_in_order.h"
#include "sm90/block_forward.h"
#include "sm90/block_forward_float8.h"
#include "sm90/gather_backward.h"
#include "sm90/gather_backward_pair.h"
#include "sm90/gather_forward.h"
#include "tile/fragment.h"

namespace spattn::sm90 {

BlockForwardSpace::BlockForwardSpace(const Problem& p, const LayoutView& layout, const TasksView& tasks, int ctas) {
    constexpr int64_t alignment = 256, note_bytes = 8;
    const int64_t warps = ctas * layout.block_q * tasks.tile_heads / 16;
    counter = size_t(round_up(int64_t(any::Partials<float>::bytes(p, layout, tasks)), alignment));
    notes = counter + alignment;
    packed = notes + size_t(round_up(tasks.num_tasks * warps * note_bytes, alignment));
    const int64_t rows = p.batch * p.heads_kv * packed_places(layout);
    bytes = packed + size_t(rows * (p.head_dim + p.head_dim_v) * dtype_row(p.dtype).bytes);
}

BlockBackwardSpace::BlockBackwardSpace(const Problem& p, const LayoutView& layout, const TasksView& by_key,
                                       const TasksView& by_query, int head_dim) {
    constexpr int64_t alignment = 256, note_bytes = 8;
    const int64_t warps = layout.block_k / 16;
    notes = size_t(round_up(int64_t(any::BackwardSpace<float>::bytes(p, layout, by_key, by_query)), alignment));
    counter = notes + size_t(round_up(by_key.num_tasks * warps * note_bytes, alignment));
    const int64_t tiles = p.batch * p.heads_q * layout.by_query.rows;
    turns = counter + alignment;
    dq = turns + size_t(round_up(tiles * int64_t(sizeof(int32_t)), alignment));
    bytes = dq + size_t(tiles * layout.block_q) * size_t(head_dim) * sizeof(float);
}

BlockBackwardApartSpace::BlockBackwardApartSpace(const Problem& p, const LayoutView& layout, const TasksView& by_key,
                                                 const TasksView& by_query, int ctas) {
    constexpr int64_t alignment = 256, note_bytes = 8;
    const int64_t warps = ctas * layout.block_k / 16, tasks = by_key.num_tasks + by_query.num_tasks;
    counters = size_t(round_up(int64_t(any::BackwardSpace<float>::bytes(p, layout, by_key, by_query)), alignment));
    notes = counters + alignment;
    bytes = notes + size_t(tasks * warps * note_bytes);
}

namespace {

const char* const assumes =
    "column stride 1, addresses and other strides multiples of 16 bytes; what else comes runs on "
    "the kernels of older GPUs, at a quarter to a half of the rate";

bool runs_here(int32_t device) { return runtime::capability(device) == 90; }

const char* rows_of_16_bytes(const Problem& p) {
    return p.head_dim % 8 || p.head_dim_v % 8 ? "head_dim not a multiple of 8: rows of 16 bytes" : nullptr;
}

const char* float8_rows_of_16_bytes(const Problem& p) {
    return p.float8_cache && (p.head_dim % 16 || p.head_dim_v % 16)
               ? "head_dim not a multiple of 16: float8 rows of 16 bytes" : nullptr;
}

template <int HeadDim, int HeadDimV>
const char* tiles_fit(const Problem& p) {
    if (const char* why = any::columns_fit(p, HeadDim, HeadDimV)) return why;
    return rows_of_16_bytes(p);
}

template <int HeadDim, int HeadDimV, int Heads, bool ReadsFloat8>
const char* block_forward_fits(const Problem& p) {
    if (const char* why = tiles_fit<HeadDim, HeadDimV>(p)) return why;
    if (const char* why = ReadsFloat8 ? float8_rows_of_16_bytes(p) : nullptr) return why;
    if (const char* why = any::tile_heads_fit<Heads>(p)) return why;
    return any::maximum_fits(p);
}

// A machine whose processors are as many of a GPU's each as share a tile.
Machine of_tiles(const Machine& whole, int tile_ctas) {
    Machine machine = whole;
    machine.lanes /= tile_ctas;
    return machine;
}

// What kernels of these rows reach of a GPU's memory: streams that do nothing else, operands beside products, and keys
// that few queries ask for, whose tiles of 64 rows are several an SM (one query of 16 to 64 heads, 4K to 128K keys, H200).
constexpr double streamed = 0.7, beside_products = 0.8, for_few_rows = 0.84;

// Cycles of a processor for a block: its products at the tensor unit's rate, of which 87 % is reached, or its
// exponentials and what belongs to them, whichever takes longer; and what a mask and a task add. Blocks of 64 keys wait
// for each other as often as those of 128; those of 64 queries, two at a time, wait less, and fetch each key twice as
// often. Tasks of 192 queries are so long that processors wait for the last ones, for half a task. Read off full,
// windows and block diagonals at 16K (H200): within 11 %, but for a task a block, 17 %; blocks of 64 queries within
// 13 %, but for bigbird, a fifth too little; blocks of 192 off full and causal attention (H100). They settle which row
// a problem gets. Where tokens are not consecutive a task takes longer, and memory gives nearly all it has: dilated and
// strided attention, landmarks and global tokens at 16K to 128K (H100) within 10 %, LongNet's a quarter too much.
// Tokens of several lists come row by row, which is what such tasks take, read off scattered keys at 16K (H200). In
// pieces, sums of floats are handed on: what that takes of a CTA of one warpgroup is read off both pieces of Sparse
// Transformer's strided attention at 16K (H200), as their mean. Of one of two it is guessed: as much more as it was
// before sums came through the ring. Tiles that two CTAs share reach 62 %, read off full attention of head_dim 512 at 16K
// (H200).
template <int HeadDim, int HeadDimV, int BlockQ, int BlockK, bool MultipliesFloat8 = false>
struct ForwardCycles {
    static constexpr bool of_one = BlockQ == 64, of_three = BlockQ == 192;  // warpgroups a CTA
    static constexpr int tile_ctas = BlockForward<Dtype::bf16, HeadDim, HeadDimV, BlockQ, BlockK>::tile_ctas;
    static constexpr double tile = BlockQ / 128.0 * BlockK / 128;
    static constexpr double reached = tile_ctas == 1 ? 0.87 : 0.62, mask = 150 * tile;
    static constexpr double products = 8.0 * (HeadDim * (MultipliesFloat8 ? 0.5 : 1) + HeadDimV) * tile / tile_ctas;
    static constexpr double elements = of_one     ? (HeadDim > 64 ? 950 : BlockK == 128 ? 970 : 600)
                                       : of_three ? 2360
                                                  : (BlockK == 128 ? 1950 : 1550);
    static constexpr double block(double widening = 0, double copies = 0) {
        return std::max({products / reached, elements, widening, copies}) + 100;
    }
    static constexpr double task = of_one ? 700 : of_three ? 2800 : BlockK == 128 && HeadDim > 64 ? 4200 : 2200;
    // CTAs that share an SM take turns at it, and are one worker.
    static constexpr SchedulePolicy policy = any::forward_policy(block(), task, BlockQ, HeadDimV, 1.0 / tile_ctas);
};

// What the copy engine takes for a key's row of so many 16-bit elements that begins inside a sector of memory, as every
// second row does where 32 bytes do not divide it: cycles, for each panel of 64 columns.
double straddling_cycles(int64_t columns) { return columns % 16 ? 6 * double(ceil_div(columns, 64)) : 0; }

template <int HeadDim, int HeadDimV, int BlockQ, int BlockK, int Heads, bool MultipliesFloat8 = false>
Cost block_forward_cost(const Problem& p, const LayoutStats& s, const Machine& whole) {
    using C = ForwardCycles<HeadDim, HeadDimV, BlockQ, BlockK, MultipliesFloat8>;
    constexpr bool of_one = C::of_one, of_three = C::of_three;
    const Machine machine = of_tiles(whole, C::tile_ctas);
    const bool is_ordered = s.gathered > 0;
    const double order = !is_ordered ? 0 : of_one ? 700 : 1400, launch = is_ordered ? 5 : 4;  // cycles; us
    const double handed_on = !s.is_piece ? 0 : of_one ? 2300 : 5100;  // cycles a task
    const double widened = has_few_rows(p, Heads) ? 0.076 : 0.12;  // a byte, read off 32 x 8K keys (H200)
    const double widening = p.float8_cache ? widened * BlockK * (HeadDim + HeadDimV) : 0;
    const double copies = BlockK * (straddling_cycles(p.head_dim) + straddling_cycles(p.head_dim_v));
    const double blocks =
        s.blocks * C::block(widening, copies) + s.masked * C::mask + double(s.rows) * (C::task + order + handed_on);
    const double end = of_three ? blocks / std::max(double(s.rows), 1.0) * machine.lanes / 2 : 0;
    const double cycles = (blocks + end + any::copied_cycles(p, s.repeated, of_one ? 7 : 10)) / Heads;
    const double filled = double(p.seq_q) * Heads / BlockQ;
    const any::Spread spread = any::Spread::of(p, s, machine, cycles, C::policy, filled, Heads, C::tile_ctas);
    const double operands = any::query_bytes(p) + any::visited_bytes(p, s, BlockK, Heads);
    const double reached = is_ordered ? 0.95 : of_one && has_few_rows(p, Heads) ? for_few_rows : beside_products;
    const double memory = any::memory_us(operands, machine, reached) +
                          any::memory_us(s.repeated * double(p.head_dim + p.head_dim_v), machine, 1);
    const double around = launch + spread.join_us + any::packing_us(p, s, machine);
    return any::overlapped(around, any::compute_us(spread.cycles, machine), memory);
}

template <int TileCtas>
size_t block_forward_workspace(const Sizing& s) {
    return BlockForwardSpace(s.problem, s.layout, s.tasks, TileCtas).bytes;
}

bool is_addressable(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    return runtime::has_tensor_map(args.q, runtime::q_sizes(p)) &&
           runtime::has_tensor_map(args.k, runtime::k_sizes(p)) &&
           runtime::has_tensor_map(args.v, runtime::v_sizes(p)) &&
           runtime::has_tensor_map(args.out, runtime::out_sizes(p));
}

bool is_addressable(const BackwardArgs& args) {
    const Problem& p = *args.problem;
    return runtime::has_tensor_map(args.q, runtime::q_sizes(p)) &&
           runtime::has_tensor_map(args.k, runtime::k_sizes(p)) &&
           runtime::has_tensor_map(args.v, runtime::v_sizes(p)) &&
           runtime::has_tensor_map(args.dout, runtime::out_sizes(p)) &&
           runtime::has_tensor_map(args.dq, runtime::q_sizes(p)) &&
           runtime::has_tensor_map(args.dk, runtime::k_sizes(p)) &&
           (p.value_in_key || runtime::has_tensor_map(args.dv, runtime::v_sizes(p)));
}

// Views that the copy engine cannot address are read by the kernels of older GPUs, through the same layout.
constexpr int older_dim(int head_dim) {
    return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : 512;
}
template <Dtype D, int HeadDim, int BlockQ>
using OlderForward =
    sm80::BlockForward<D, older_dim(HeadDim), older_dim(HeadDim), HeadDim <= 128 && BlockQ == 128 ? 128 : 64>;
template <Dtype D, int HeadDim>
using OlderBackward = sm80::BlockBackward<D, older_dim(HeadDim), older_dim(HeadDim), 64>;

template <class Own, class Older, class Args>
void run_either(const Args& args) {
    const runtime::CurrentDevice current(args.device);
    is_addressable(args) ? Own::run(args) : Older::run(args);
}

template <class Own, class Older>
void prepare_both(int32_t device) {
    Own::prepare(device);
    Older::prepare(device);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void forward(const ForwardArgs& args) {
    const runtime::CurrentDevice current(args.device);
    if (is_addressable(args)) return BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(args);
    OlderForward<D, HeadDim, BlockQ>::run(args);
    any::Combine<D>::run(args, any::Partials<float>::at(args.workspace, *args.problem, args.layout, args.tasks));
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void prepare(int32_t device) {
    prepare_both<BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>, OlderForward<D, HeadDim, BlockQ>>(device);
    any::Combine<D>::prepare(device);
}

// The kernel of any order of tokens takes none, nor do those of older GPUs. That of float8 has boxes of any stretch.
bool takes_spans(const ForwardArgs& args) {
    return is_addressable(args) && (args.problem->float8_cache || come_in_boxes(args.layout.keys));
}

// Heads: those of a group that share a tile of BlockQ rows.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK, int Heads = 1>
Kernel block_forward(const char* name) {
    using K = BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    constexpr int words = tile::fragment_words(BlockQ, BlockK);
    static_assert(sizeof(uint64_t) * words % 128 == 0, "masks start at lines of the cache");
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .block_q = BlockQ / Heads,
            .block_k = BlockK,
            .mask_words = words,
            .permute = tile::permute_to_fragments<Heads>,
            .walks = {{Owner::queries, ForwardCycles<HeadDim, HeadDimV, BlockQ, BlockK>::policy, Heads}},
            .num_walks = 1,
            .runs_here = runs_here,
            .fits = block_forward_fits<HeadDim, HeadDimV, Heads, K::float8_cache>,
            .cost = block_forward_cost<HeadDim, HeadDimV, BlockQ, BlockK, Heads>,
            .workspace = block_forward_workspace<K::tile_ctas>,
            .forward = forward<D, HeadDim, HeadDimV, BlockQ, BlockK>,
            .prepare = prepare<D, HeadDim, HeadDimV, BlockQ, BlockK>,
            .orders = K::any_order && Heads == 1,
            .key_stretch = least_key_stretch,
            .takes_spans = takes_spans,
            .max_logits = true,
            .float8_cache = K::float8_cache,
            .shares_lists = Heads > 1,
            .carries = K::has_pieces && Heads == 1 ? any::ForwardCarried<float>::bytes : nullptr,
            .dispatch = any::dispatch_of<D>(),
            .assumes = assumes};
}

// ---- float8 ----
template <int HeadDim, int HeadDimV>
const char* block_forward_float8_fits(const Problem& p) {
    if (const char* why = any::columns_fit(p, HeadDim, HeadDimV)) return why;
    if (const char* why = rows_of_16_bytes(p)) return why;
    if (p.value_in_key) return "values in keys, which it multiplies as bytes";
    return any::maximum_fits(p);
}

bool multiplies_float8(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    runtime::Sizes q = runtime::q_sizes(p), k = runtime::k_sizes(p);
    q.element = k.element = 1;
    return runtime::has_tensor_map(args.q, q) && runtime::has_tensor_map(args.k, k) &&
           runtime::has_tensor_map(args.out, runtime::out_sizes(p));
}

// Where operands came as elements there are no factors of queries.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void forward_float8(const ForwardArgs& args) {
    if (!args.q_scales.data) return forward<D, HeadDim, HeadDimV, BlockQ, BlockK>(args);
    const runtime::CurrentDevice current(args.device);
    BlockForwardFloat8<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void prepare_float8(int32_t device) {
    BlockForwardFloat8<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(device);
    prepare<D, HeadDim, HeadDimV, BlockQ, BlockK>(device);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
Kernel block_forward_float8(const char* name) {
    Kernel row = block_forward<D, HeadDim, HeadDimV, BlockQ, BlockK>(name);
    row.fits = block_forward_float8_fits<HeadDim, HeadDimV>;
    row.cost = block_forward_cost<HeadDim, HeadDimV, BlockQ, BlockK, 1, true>;
    row.forward = forward_float8<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    row.prepare = prepare_float8<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    row.orders = false, row.key_stretch = 0, row.takes_spans = nullptr;
    row.float8_cache = false, row.carries = nullptr, row.dispatch = nullptr;
    row.multiplies_float8 = multiplies_float8;
    row.assumes = "columns of q and k side by side, addresses and other strides multiples of 16 bytes; what else comes "
                  "runs as elements of 16 bits";
    return row;
}

// ---- lists ----
// Tiles have 64 query rows, the heads of a group; what a group leaves of its last tile is worked on in vain.
template <int HeadDim, int HeadDimV>
const char* gather_fits(const Problem& p) {
    if (const char* why = any::columns_fit(p, HeadDim, HeadDimV)) return why;
    if (const char* why = rows_of_16_bytes(p)) return why;
    if (const char* why = any::values_fit(p, HeadDim)) return why;
    return any::lists_fit(p);
}

template <int HeadDim, int HeadDimV>
const char* gather_forward_fits(const Problem& p) {
    if (const char* why = gather_fits<HeadDim, HeadDimV>(p)) return why;
    if (const char* why = float8_rows_of_16_bytes(p)) return why;
    return any::maximum_fits(p);
}

// Cycles that a tile's block of 64 keys takes: its products, or scores, exponentials and p v one after the other, or
// the way of its keys' rows from L2. A task has its rows of q and out beside. Read off lists of 512 to 2,048 keys
// (H200).
template <int HeadDim, int HeadDimV>
Cost gather_forward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr bool value_in_key = HeadDim > 256;
    constexpr double products = 2.0 * (HeadDim + HeadDimV), reached = 0.64, elements = 1590;
    constexpr double fetched_bytes = 32, row_bytes = 21;  // a cycle of an SM
    constexpr double task = 2400 + 64.0 * (HeadDim + HeadDimV) * 2 / row_bytes;  // cycles
    constexpr double launch = 4;                                                 // us
    const double columns = double(p.head_dim + (value_in_key ? 0 : p.head_dim_v));
    const any::ListTasks work = any::ListTasks::of(p, s);
    const bool is_shared = widens_for_two(HeadDim, int(any::divide_up(p.group(), any::gather_tile)));
    const double widening = p.float8_cache ? (is_shared ? 0.138 : 0.155) * 64 * columns : 0;  // read off 576 columns (H200)
    const double fetched = 64 * columns * double(p.key_bytes()) / fetched_bytes;
    const double block = std::max({products / reached, elements, fetched, widening});
    // Where tasks are too few for all processors lists are split, if that takes enough off them.
    constexpr double least_part = any::ListShares::least_part, worth_joining = 6;  // blocks
    const double most_parts = std::min(machine.lanes / std::max(work.tasks, 1.0), work.blocks / least_part);
    const double parts = most_parts > 1 && work.blocks * (1 - 1 / most_parts) >= worth_joining ? most_parts : 1;
    const double looked_up = p.call_lists.block_k > 1 ? 1.5 : 1;  // which entry of a list of blocks a place belongs to
    const double cycles = work.blocks / parts * block * looked_up + task;  // a task
    const double rows = double(p.batch) * double(p.heads_q * p.seq_q) * double(p.head_dim + p.head_dim_v);
    const double keys = std::min(s.gathered, double(p.batch * p.heads_kv * p.seq_k)) * columns;
    return any::overlapped(launch + (parts > 1 ? any::combine_us : 0), any::tasks_us(work.tasks * parts, cycles, machine),
                           any::memory_us(2 * rows + double(p.key_bytes()) * keys, machine, beside_products));
}

// Beyond 256 columns there is one tile of either.
constexpr int older_key_dim(int head_dim) { return head_dim <= 256 ? older_dim(head_dim) : 576; }
constexpr int older_value_dim(int head_dim) { return head_dim <= 256 ? older_dim(head_dim) : 512; }
template <Dtype D, int HeadDim>
using OlderGatherForward = sm80::GatherForward<D, older_key_dim(HeadDim), older_value_dim(HeadDim), 64>;

template <Dtype D, int HeadDim>
size_t gather_forward_workspace(const Sizing& s) {
    const ListSizes sizes = ListSizes::of(s.problem, s.tokens);
    const any::ListRows rows = any::ListRows::of(s.problem, sizes, s.layout);
    const any::SharedLists older(s.problem, rows, sizes, s.lanes * OlderGatherForward<D, HeadDim>::ctas);
    return std::max(share_lists(s.problem, rows, sizes, s.lanes).bytes, older.bytes);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
Kernel gather_forward(const char* name) {
    using Own = GatherForward<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::forward,
            .dtype = D,
            .runs_here = runs_here,
            .fits = gather_forward_fits<HeadDim, HeadDimV>,
            .cost = gather_forward_cost<HeadDim, HeadDimV>,
            .workspace = gather_forward_workspace<D, HeadDim>,
            .forward = run_either<Own, OlderGatherForward<D, HeadDim>, ForwardArgs>,
            .prepare = prepare_both<Own, OlderGatherForward<D, HeadDim>>,
            .family = Family::gather,
            .max_logits = true,
            .float8_cache = true,
            .shares_lists = true,
            .assumes = assumes};
}

// As forward with five products. L2 gives the rows of listed keys, and takes a row of floats for each, one after the
// other. Read off lists of 2,048 keys (H200): within 13 % where L2 holds keys and sums. Lists over more keys, and
// those of 512, take a quarter longer.
template <int HeadDim, int HeadDimV>
Cost gather_backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr bool value_in_key = HeadDim > 256;
    constexpr double products = 2.0 * (3 * HeadDim + 2 * HeadDimV), reached = 0.55;
    constexpr double elements = HeadDim > 64 ? 3000 : 2600;
    constexpr double fetched_bytes = 27, added_bytes = 17, task = 6000;  // a cycle of an SM; cycles
    constexpr double launches = 11;                                      // us
    const double columns = double(p.head_dim + (value_in_key ? 0 : p.head_dim_v));
    const any::ListTasks work = any::ListTasks::of(p, s);
    const double exchanged = 64 * columns * (2 / fetched_bytes + 4 / added_bytes);
    const double walks = p.deterministic ? 2.1 : 1;  // the bounds, and additions of integers that take longer
    const double block = std::max({products / reached, elements, exchanged});
    const double cycles = walks * (work.blocks * block + task);  // a task
    const double rows = double(p.batch) * double(p.heads_q * p.seq_q) * double(p.head_dim + p.head_dim_v);
    const double keys = double(p.batch * p.heads_kv * p.seq_k) * columns;
    const double around = any::memory_us(4 * rows + 10 * keys, machine, streamed);  // delta; sums cleared, and read
    return any::overlapped(launches + around, any::tasks_us(work.tasks, cycles, machine),
                           any::memory_us(4 * rows + 2 * keys, machine, beside_products));
}

size_t gather_backward_workspace(const Sizing& s) { return any::KeySumsSpace(s.problem).bytes; }

template <Dtype D, int HeadDim>
using OlderGatherBackward = sm80::GatherBackward<D, older_key_dim(HeadDim), older_value_dim(HeadDim), 64>;

// A row that adds gradients of listed keys in memory.
template <class Own, Dtype D, int HeadDim>
Kernel list_gradients(const char* name, decltype(Kernel::fits) fits, decltype(Kernel::cost) cost) {
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::backward,
            .dtype = D,
            .runs_here = runs_here,
            .fits = fits,
            .cost = cost,
            .workspace = gather_backward_workspace,
            .backward = run_either<Own, OlderGatherBackward<D, HeadDim>, BackwardArgs>,
            .prepare = prepare_both<Own, OlderGatherBackward<D, HeadDim>>,
            .family = Family::gather,
            .shares_lists = true,
            .assumes = assumes,
            .added_by_arrival = any::keys_added_by_arrival};
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
Kernel gather_backward(const char* name) {
    return list_gradients<GatherBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>, D, HeadDim>(
        name, gather_fits<HeadDim, HeadDimV>, gather_backward_cost<HeadDim, HeadDimV>);
}

// Tiles of 128 rows that two CTAs share, by columns.
template <int HeadDim, int HeadDimV>
const char* gather_backward_pair_fits(const Problem& p) {
    if (const char* why = gather_fits<HeadDim, HeadDimV>(p)) return why;
    if (p.softcap != 0) return "knows no softcap";
    // What has the scale in it are elements of 16 bits, whose range ends at 2^-126.
    constexpr double smallest = 0x1p-40, largest = 0x1p40;
    const double scale = std::fabs(p.scale);
    return scale < smallest || scale > largest ? "scale below 2^-40 or above 2^40" : nullptr;
}

// Products and exchanges follow each other, so that the first tell of both: a block takes 11,000 cycles, wherever keys
// are, and 1.7 times that with the same bits in every call. Read off lists of 2,048 keys (H200).
template <int HeadDim, int HeadDimV, int BlockQ>
Cost gather_backward_pair_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    constexpr double products = 2.0 * (3 * HeadDim + 2 * HeadDimV), reached = 0.5, task = 9000;  // cycles
    constexpr double launches = 11;  // us
    const any::ListTasks work = any::ListTasks::of(p, s, BlockQ);
    const double walks = p.deterministic ? 1.7 : 1;  // the bounds, and additions of integers
    const double cycles = walks * (work.blocks * products / reached + task);
    const double rows = double(p.batch) * double(p.heads_q * p.seq_q) * double(p.head_dim + p.head_dim_v);
    const double keys = double(p.batch * p.heads_kv * p.seq_k) * double(p.head_dim);
    const double around = any::memory_us(4 * rows + 10 * keys, machine, streamed);  // delta; sums cleared, and read
    return any::overlapped(launches + around, any::tasks_us(2 * work.tasks, cycles, machine),
                           any::memory_us(4 * rows + 2 * keys, machine, beside_products));
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
Kernel gather_backward_pair(const char* name) {
    return list_gradients<GatherBackwardPair<D, HeadDim, HeadDimV, BlockQ, BlockK>, D, HeadDim>(
        name, gather_backward_pair_fits<HeadDim, HeadDimV>, gather_backward_pair_cost<HeadDim, HeadDimV, BlockQ>);
}

// ---- backward ----
const char* queries_added_by_arrival(const Problem&) { return "dq"; }

template <int HeadDim, int HeadDimV>
const char* block_backward_fits(const Problem& p) {
    if (const char* why = tiles_fit<HeadDim, HeadDimV>(p)) return why;
    if (p.deterministic) return "adds dq in the order of arrival";
    return nullptr;
}

// Tasks of more heads at a time share less of what L2 holds; of fewer, more tasks of a head wait for each other. Of 16
// heads at a time full and causal attention take 2 to 3 % longer than of 8, windows 2 %, but block diagonals 4 % less.
constexpr int heads_in_turn = 8;

// As in the forward, with five products a block. out and dout are read before; the sums of dq are cleared before, added
// to, and read after. In order nothing is cleared, but parts wait for each other: somewhat at every block, for as long
// as two blocks take wherever lists of queries have a gap, for then tasks do not go side by side, and where a head
// begins, when each of its tasks waits for an addition of those before it that add to the same queries. Read off full,
// causal, windows, block diagonals and random blocks at 4K to 16K (H100), and random problems (bench/choices.py, H200).
template <int HeadDim, int HeadDimV, int BlockQ, int BlockK, bool InOrder>
struct BackwardCycles {
    static constexpr double rows = BlockQ / 64.0, products = rows * 4 * (3 * HeadDim + 2 * HeadDimV);
    // Where warpgroups take turns at dq, and where not.
    static constexpr double reached = (BlockQ == 64 ? 0.775 : 0.73) * (InOrder ? 0.96 : 1);
    static constexpr double block = std::max(products / reached, 1900 * rows) + 100, mask = 150 * rows, task = 3000;
    static constexpr double cleared = 28;  // a column of a tile that no query sees
    static constexpr SchedulePolicy policy = any::backward_policy(block, task, BlockK, HeadDim + HeadDimV);
};

template <int HeadDim, int HeadDimV, int BlockQ, int BlockK, bool InOrder>
Cost block_backward_cost(const Problem& p, const LayoutStats& s, const Machine& machine) {
    using C = BackwardCycles<HeadDim, HeadDimV, BlockQ, BlockK, InOrder>;
    constexpr double gap = InOrder ? 7000 * C::rows : 0;
    constexpr double launches = 14, addition = InOrder ? 1.5 : 0;  // us
    const double unseen = any::unseen_tiles(p, s, BlockK), columns = double(p.head_dim + p.head_dim_v);
    const double cycles = s.blocks * C::block + s.masked * C::mask + double(s.rows) * C::task +
                          unseen * C::cleared * columns + s.gaps * gap;
    const double heads = double(p.batch * p.heads_kv), heads_q = double(p.batch * p.heads_q), rows = s.rows / heads_q;
    const double at_once = std::min(rows, machine.lanes / std::min<double>(heads, heads_in_turn));
    const double chain = s.longest.across > 0 ? std::min(at_once, s.longest.across) : at_once;
    const double waits = heads_q * at_once * chain / machine.lanes * addition;
    const double sums = double(p.batch * p.heads_q * p.seq_q) * HeadDim * sizeof(float);
    const double around =
        any::memory_us(1.5 * any::query_bytes(p) + (InOrder ? 1 : 2) * sums, machine, streamed) + waits;
    const double keys = 2 * any::key_bytes(p) - unseen * BlockK * columns * dtype_row(p.dtype).bytes;
    const double beside = any::memory_us(any::query_bytes(p) + keys + 2 * sums, machine, beside_products);
    const any::Longest longest = any::Longest::by_key(p, s, machine, C::block, C::task, C::policy);
    return any::overlapped(launches + around + longest.join_us,
                           any::compute_us(std::max(cycles, machine.lanes * longest.cycles), machine), beside);
}

template <int HeadDim>
size_t block_backward_workspace(const Sizing& s) {
    return BlockBackwardSpace(s.problem, s.layout, s.tasks, s.second_tasks, HeadDim).bytes;
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
Kernel block_backward(const char* name) {
    using Own = BlockBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::backward,
            .dtype = D,
            .block_q = BlockQ,
            .block_k = BlockK,
            .mask_words = 2 * BlockQ * BlockK / 64,
            .permute = tile::permute_to_both_fragments,
            .walks = {{Owner::keys, BackwardCycles<HeadDim, HeadDimV, BlockQ, BlockK, false>::policy},
                      {Owner::queries, {.workers = 0}}},
            .num_walks = 2,
            .runs_here = runs_here,
            .fits = block_backward_fits<HeadDim, HeadDimV>,
            .cost = block_backward_cost<HeadDim, HeadDimV, BlockQ, BlockK, false>,
            .workspace = block_backward_workspace<HeadDim>,
            .backward = run_either<Own, OlderBackward<D, HeadDim>, BackwardArgs>,
            .prepare = prepare_both<Own, OlderBackward<D, HeadDim>>,
            .dispatch = any::dispatch_of<D>(),
            .assumes = assumes,
            .added_by_arrival = queries_added_by_arrival};
}

// ---- backward, sums of dq in the order of keys ----
template <int HeadDim, int HeadDimV>
const char* block_backward_in_order_fits(const Problem& p) {
    if (p.call_lists.at_run_time()) return "adds in the order of the plan's lists, and each call brings its own";
    return tiles_fit<HeadDim, HeadDimV>(p);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
Kernel block_backward_in_order(const char* name) {
    using Own = BlockBackwardInOrder<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    Kernel row = block_backward<D, HeadDim, HeadDimV, BlockQ, BlockK>(name);
    row.walks[0].policy = BackwardCycles<HeadDim, HeadDimV, BlockQ, BlockK, true>::policy;
    row.walks[0].policy.heads_in_turn = heads_in_turn;
    row.fits = block_backward_in_order_fits<HeadDim, HeadDimV>;
    row.cost = block_backward_cost<HeadDim, HeadDimV, BlockQ, BlockK, true>;
    row.backward = run_either<Own, OlderBackward<D, HeadDim>, BackwardArgs>;
    row.prepare = prepare_both<Own, OlderBackward<D, HeadDim>>;
    row.added_by_arrival = nullptr;
    return row;
}

// ---- backward, each gradient apart ----
template <int HeadDim, int HeadDimV, bool JoinsDkDv>
const char* block_backward_apart_fits(const Problem& p) {
    if (const char* why = tiles_fit<HeadDim, HeadDimV>(p)) return why;
    if (!JoinsDkDv && p.value_in_key) return "values in keys, whose two gradients it makes apart";
    return nullptr;
}

// Products of 128 x 128 blocks: 8 cycles a column. Every kernel reads all operands; two walks of one share them. Tiles that
// two CTAs share reach 41 %, read off full attention of head_dim 512 at 16K (H200). Blocks of rows as short as most
// problems have them take a little longer, read off random ones (bench/choices.py, H200).
constexpr double short_rows = 1.07;
template <int HeadDim, int HeadDimV, bool JoinsDkDv, int TileCtas>
struct ApartCycles {
    static constexpr int walks = JoinsDkDv ? 2 : 3, kernels = JoinsDkDv ? 1 : 3;
    static constexpr double reached = TileCtas == 1 ? 0.77 : 0.41, task = 2000;  // of each walk
    static constexpr double of(int head_dims, int head_dims_v, int walks) {
        return std::max(8.0 * (head_dims * HeadDim + head_dims_v * HeadDimV) / TileCtas / reached, 3300.0 * walks);
    }
    static constexpr double block = of(JoinsDkDv ? 4 : 5, 3, walks);
    // Both walks of one kernel share the machine.
    static constexpr SchedulePolicy policy(double cycles, int columns) {
        SchedulePolicy made = any::backward_policy(cycles, task, 128, columns, (JoinsDkDv ? 0.5 : 1.0) / TileCtas);
        if (!JoinsDkDv) made.join_us = 14;  // each of dk and dv has a walk of its own, which begins anew
        return made;
    }
    static constexpr double by_key_block = of(JoinsDkDv ? 2 : 3, 2, walks - 1), by_query_block = of(2, 1, 1);
    static constexpr SchedulePolicy by_key = policy(by_key_block, HeadDim + HeadDimV),
                                    by_query = policy(by_query_block, HeadDim);
};

template <int HeadDim, int HeadDimV, bool JoinsDkDv, int TileCtas>
Cost block_backward_apart_cost(const Problem& p, const LayoutStats& s, const Machine& whole) {
    using C = ApartCycles<HeadDim, HeadDimV, JoinsDkDv, TileCtas>;
    constexpr int walks = C::walks, kernels = C::kernels;
    const Machine machine = of_tiles(whole, TileCtas);
    constexpr double mask = 300, cleared = 43;  // cycles; of a column of a tile that no query sees
    const double launches = (JoinsDkDv ? 9 : 15) + (s.away > 0 ? 8 : 0);  // us; tiles of copied rows begin late
    const double columns = double(p.head_dim + p.head_dim_v), unseen = any::unseen_tiles(p, s, 128);
    const double block = (s.gathered > 0 ? 1 : short_rows) * C::block;
    const double cycles = s.blocks * block + s.masked * mask + double(s.rows) * C::task * walks +
                          unseen * cleared * columns + any::copied_cycles(p, s.away, 3 * walks);
    const double around = any::memory_us(any::query_bytes(p), machine, streamed);
    const double seen_bytes = any::key_bytes(p) - unseen * 128 * columns * dtype_row(p.dtype).bytes;
    const double bytes = kernels * (any::query_bytes(p) + seen_bytes) + any::query_bytes(p) / 2 + any::key_bytes(p);
    const double memory = any::memory_us(bytes, machine, beside_products) +
                          any::memory_us(2 * walks * s.gathered * columns, machine, 1);
    const any::Longest by_key = any::Longest::by_key(p, s, machine, C::by_key_block, C::task, C::by_key);
    const any::Longest by_query = any::Longest::by_query(s, machine, C::by_query_block, C::task, C::by_query);
    const double longest =
        JoinsDkDv ? std::max(by_key.cycles, by_query.cycles) : by_key.cycles + by_query.cycles;  // side by side or not
    const double joins = by_key.join_us + by_query.join_us;
    const double apart = launches + around + any::repeated_queries_us(p, s, machine) + joins;
    return any::overlapped(apart, any::compute_us(std::max(cycles, machine.lanes * longest), machine), memory);
}

template <int TileCtas>
size_t block_backward_apart_workspace(const Sizing& s) {
    return BlockBackwardApartSpace(s.problem, s.layout, s.tasks, s.second_tasks, TileCtas).bytes;
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
Kernel block_backward_apart(const char* name) {
    using Own = BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>;
    constexpr bool joins = Own::joins_dk_dv;
    using Cycles = ApartCycles<HeadDim, HeadDimV, joins, Own::tile_ctas>;
    return {.name = name,
            .device = SPATTN_CUDA,
            .pass = Pass::backward,
            .dtype = D,
            .block_q = BlockQ,
            .block_k = BlockK,
            .mask_words = Own::mask_words,
            .permute = tile::permute_to_both_fragments_and_quarters,
            .walks = {{Owner::keys, Cycles::by_key}, {Owner::queries, Cycles::by_query}},
            .num_walks = 2,
            .runs_here = runs_here,
            .fits = block_backward_apart_fits<HeadDim, HeadDimV, joins>,
            .cost = block_backward_apart_cost<HeadDim, HeadDimV, joins, Own::tile_ctas>,
            .workspace = block_backward_apart_workspace<Own::tile_ctas>,
            .backward = run_either<Own, OlderBackward<D, HeadDim>, BackwardArgs>,
            .prepare = prepare_both<Own, OlderBackward<D, HeadDim>>,
            .orders = Own::any_order,
            .carries = Own::any_order ? any::BackwardCarried<float>::bytes : nullptr,
            .dispatch = any::dispatch_of<D>(),
            .assumes = assumes};
}

}  // namespace

KernelTable kernels() {
    static const Kernel rows[] = {
#define SPATTN_KERNEL(kernel, dtype, head_dim, head_dim_v, block_q, block_k)                               \
    kernel<Dtype::dtype, head_dim, head_dim_v, block_q, block_k>("sm90_" #kernel "_" #dtype "_d" #head_dim \
                                                                 "_v" #head_dim_v "_" #block_q "x" #block_k),
#define SPATTN_OF_HEADS(heads, kernel, dtype, head_dim, head_dim_v, block_q, block_k)                             \
    kernel<Dtype::dtype, head_dim, head_dim_v, block_q, block_k, heads>("sm90_" #kernel "_" #dtype "_d" #head_dim \
                                                                        "_v" #head_dim_v "_" #block_q "x" #block_k \
                                                                        "_heads" #heads),
#define SPATTN_TILE_HEADS(...)                                       \
    SPATTN_OF_HEADS(16, __VA_ARGS__) SPATTN_OF_HEADS(8, __VA_ARGS__) \
    SPATTN_OF_HEADS(4, __VA_ARGS__) SPATTN_OF_HEADS(2, __VA_ARGS__)
#include "sm90/kernels.inc"
#undef SPATTN_TILE_HEADS
#undef SPATTN_OF_HEADS
#undef SPATTN_KERNEL
    };
    return {rows, int(sizeof rows / sizeof *rows)};
}

}  // namespace spattn::sm90
