// SPDX-License-Identifier: MIT
//
//     by key     sT = k qT,  pT = exp2(scale_log2 sT - lse),  dv += pT dout;  dpT = v doutT,  dk += dsT q
//     by query   s and dp once more,  dq += ds k
//
// Each sum has one owner and one order, so that bits are the same in every call, for seven products where the sums of
// dq in memory would need five (block_backward.cuh). With head_dim above 128 registers hold one sum: dk and dv are made
// by a walk each, which makes eight products.
//
//   One kernel serves all: two warpgroups own 64 tokens each of a tile of 128, keys or queries, and meet the tokens of
//   the other axis 64 at a time, which a producer warp loads by TMA. Own tokens are the rows of all products, so that p
//   and ds are a operands as they stand, and nothing goes through shared memory but what comes and what leaves.
//
//               tensor   | dp | sum of p | sum of ds | next s |
//               the rest   p    ds
//
//   walks     up to head_dim 128 tasks of both walks come in turn in one launch: what one has read the other meets in
//             L2, there is one tail, and a small problem waits for one launch less
//
//   columns   beyond 256 two CTAs share a tile, as in the forward: they exchange their parts of s and of dp, and each makes
//             its columns of the sums. Steps have 32 tokens then, and tokens stand in their own order
//
//   orders    as in the forward, tokens may stand in any order; and a pattern may be run in pieces, each of which takes
//             on the float sums of the one before. Sums of homes leave as boxes, others row by row. Where tokens stand
//             in any order a block is often empty in parts: steps without a kept pair are not loaded, and a warpgroup
//             passes over those that have none for it
//
//   isolation as in block_backward.cuh: rows that are not finite are noted and made again from kept pairs.
//
// What binds. A 64 x 128 block is 512 cycles of the tensor unit for each product, and the first two read both operands
// from shared memory at its full rate. Steps come two or three ahead, so what the producer does between a slot that is
// free and its boxes counts. Residue classes wait for that most: in 24 registers it spills some at each step. Of
// block_diagonal512_16k 12 % are ends and begins of tasks, when the other warpgroup has the tensor unit; dilated_16k
// keeps the way between the halves of L2 busy for 79 % of its time (ncu). Measured (H200, bf16, L2 cold, TFLOP/s of 10
// pairs d, whatever is made twice, 2026-11, GEMM 800): random blocks (bsr128_10_16k) 474, window1k_16k 395,
// block_diagonal512_16k 395, head_dim 192/128 424, 256 453; dilated_16k 74, strided_16k 89, longnet_128k 213,
// landmark_64k 273, global_tokens_64k 264; as a union in pieces sparse_transformer_16k 92. With a launch for each walk,
// every step loaded and sums of pieces read one by one it was 459 for random blocks and 345 for block_diagonal512_16k;
// 54, 65, 195, 263, 238 and 48 in other orders. Pairs, head_dim 512, 8 heads on 4: full_16k 234, causal_16k 238,
// window1k_16k 190, where torch's memory-efficient kernel reaches 44 and 39; of shared memory they want as much, 352 KiB
// for 32 tokens.
//
// Tried and dropped: sums as members of what is made for each task (ptxas takes those of both walks for alive at once,
// and serializes the products); 40 registers a producer (the same, in any order of tokens); what belongs to own queries
// read under the first scores instead of before them (block diagonals the same, residue classes +2 to +4 %); the next
// task's first scores begun before sums leave (block_diagonal512_16k 434 -> 432 us, residue classes +5 to +38 %: ends
// shrink, and waits for products grow by as much).
#pragma once

#include <algorithm>
#include <type_traits>

#include "sm90/block_backward_apart.h"
#include "sm90/gradient.cuh"
#include "sm90/token_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace spattn::sm90 {

enum class Sums { dq, dk, dv, dk_dv };
// How tokens stand in tiles: one after the other; in residue classes, which come as boxes, too; or in such of which
// some are listed, and come row by row.
enum class Order { consecutive, residues, listed };

// ---- configuration ----
// What the walks of one kernel have in common. HasDp: they make dp, so that own tokens have two operands.
template <Dtype D, int HeadDim, int HeadDimV, bool HasDp, Order O>
struct ApartTiles : TileConfig<D, HeadDim / BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas,
                               HeadDimV / BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas> {
    static constexpr int tile_ctas = BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas;
    static constexpr bool in_pair = tile_ctas == 2;
    using Base = TileConfig<D, HeadDim / tile_ctas, HeadDimV / tile_ctas>;
    using Base::head_dim, Base::head_dim_v, Base::panels, Base::row_bytes, Base::v_panels;
    static constexpr Order order = O;
    static constexpr bool has_dp = HasDp, any_order = O != Order::consecutive, copies = O == Order::listed;
    static constexpr int block_q = 128, block_k = 128;
    static constexpr int own_rows = 128, step = in_pair ? 32 : 64;  // tokens of a tile; of the other axis at a time
    static constexpr int steps = 128 / step;                        // of a block
    // Masks have words for 64 tokens, of which a step may be a half.
    static constexpr int steps_of_word = 64 / step;
    using MaskWord = std::conditional_t<step == 64, uint32_t, uint16_t>;  // a thread's bits of a step
    static constexpr int warpgroups = own_rows / Base::warpgroup_rows;
    static constexpr int warps = 4 * warpgroups, consumers = 32 * warps, threads = consumers + 128;
    static constexpr int own_bytes = own_rows * row_bytes, step_bytes = step * row_bytes;  // of a panel
    using Pair = std::conditional_t<in_pair, PairShared<warpgroups, step>, Alone>;
    // As many tiles as there is room for: own tokens of two tasks, two steps of the other axis, or three. Not in
    // residue classes, whose tasks have few steps: three took strided(128) 7 % longer, and others 2 to 4 % less.
    static constexpr int most_bytes = 227 * 1024 - 2048 - Pair::parts_bytes;
    static constexpr int second_panels = has_dp ? v_panels : 0;  // of own tokens: v or dout
    static constexpr int tile_bytes = (panels + second_panels) * own_bytes;
    static constexpr int slot_bytes = panels * step_bytes, second_slot_bytes = v_panels * step_bytes;
    static constexpr int tiles = 2 * (tile_bytes + slot_bytes + second_slot_bytes) <= most_bytes ? 2 : 1;
    static constexpr bool takes_three =
        O != Order::residues && 2 * tile_bytes + 3 * (slot_bytes + second_slot_bytes) <= most_bytes;
    static constexpr int slots = takes_three ? 3 : 2;
    static constexpr bool takes_two = tiles * tile_bytes + 2 * (slot_bytes + second_slot_bytes) <= most_bytes;
    static constexpr int second_slots = takes_three ? 3 : takes_two ? 2 : 1;
    static constexpr int producers = any_order ? tile_copiers : 32, tile_counts = copies ? tile_arrivals : 1;
    static constexpr bool has_helpers = any_order && !copies;
    static constexpr int own_tiles = copies && has_dp ? 2 : 1;  // that come one by one
    // Whether steps without a kept pair are left out, so that the last one has to be told of. Patterns whose tokens
    // stand one after the other have few, and took 3 to 5 % longer so.
    static constexpr bool leaves_out = any_order;
    static constexpr int values = step / 2;  // a thread's of s, and of sums of ds and of p
    static constexpr int of_ds = has_dp ? head_dim / 2 : 2,
                         of_p = has_dp && head_dim > joined_head_dim ? 2 : head_dim_v / 2;
    // With 232 registers next to none spill, but the compiler mixes less: at 128 columns blocks of 128 took 4 to 11 %
    // longer so than with 240. At 256 they took 2 % less.
    static constexpr int producer_registers = head_dim > 128 ? 40 : 24, consumer_registers = head_dim > 128 ? 232 : 240;
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, 1),
                  "roles share what the launch gives");
    static_assert(head_dim_v <= head_dim, "value_in_key adds dv to dk's columns");
    static_assert(tiles * tile_bytes + slots * slot_bytes + second_slots * second_slot_bytes <= most_bytes, "no room");
};
template <Dtype D, int HeadDim, int HeadDimV, Sums S, Order O>
struct ApartConfig : ApartTiles<D, HeadDim, HeadDimV, S != Sums::dv, O> {
    using Tiles = ApartTiles<D, HeadDim, HeadDimV, S != Sums::dv, O>;
    static constexpr int quarters_word = 2 * (BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::mask_words - 1);
    static constexpr bool by_query = S == Sums::dq, sums_p = S == Sums::dv || S == Sums::dk_dv;
};

// Own tokens are queries where sums are dq's, else keys. `first` operands make s, `second` ones dp.
struct ConsecutiveGradientMaps {
    CUtensorMap own, own_second, other, other_second;  // boxes of one 64-column panel
    CUtensorMap ds, p;                                 // where sums of ds (dq or dk) and of p (dv) go
};
struct ResidueGradientMaps {
    runtime::ResidueMaps own, own_second, other, other_second, ds, p;
};
template <Order O>
struct ApartWalk {
    std::conditional_t<O == Order::consecutive, ConsecutiveGradientMaps, ResidueGradientMaps> maps;
    TasksView tasks;
    int2* notes;  // [task][warp]
};
template <Order O>
struct ApartParams : GradientParams {
    ApartWalk<O> walks[2];  // the second may have no tasks
    uint32_t share;         // the first one's, of all tasks, in units of 2^-32; rounded up

    __host__ __device__ int num_tasks() const { return walks[0].tasks.num_tasks + walks[1].tasks.num_tasks; }
};

// Task `at` of a kernel: tasks of its walks come in turn, in proportion. So what one reads the other meets in L2, where
// they read the same tokens.
struct PlaceInWalk {
    int walk, task;
    template <class Params>
    __device__ __forceinline__ PlaceInWalk(const Params& params, int at) {
        if (!params.walks[1].tasks.num_tasks) {
            walk = 0, task = at;
            return;
        }
        const auto of_first_before = [&](int n) { return int(uint64_t(n) * params.share >> 32); };
        const int of_first = of_first_before(at);
        walk = of_first_before(at + 1) == of_first;
        task = walk ? at - of_first : of_first;
    }
};

// Calls run<C>() for the walk of a task. Each walk has code of its own, for operands and sums are known when it is
// compiled. First and Second are the same where a kernel takes one walk.
template <class First, class Second, class Run>
__device__ __forceinline__ void in_walk(int walk, Run run) {
    if constexpr (std::is_same_v<First, Second>)
        run.template operator()<First>();
    else if (walk == 0)
        run.template operator()<First>();
    else
        run.template operator()<Second>();
}

// ---- shared memory ----
struct ApartMessage : TaskMessage {
    int32_t walk;
};

// What a producer tells of a step, in a word: the mask of its part of a block, for which warpgroups that has kept
// pairs, and whether it is its task's last.
struct StepMessage {
    int32_t word;
    StepMessage() = default;
    __device__ __forceinline__ explicit StepMessage(int word) : word(word) {}
    __device__ __forceinline__ StepMessage(int mask, int part, int parts, uint32_t pairs, bool is_last)
        : word((mask == full_block ? full_block : mask * parts + part) * 8 + int(2 * pairs) + is_last) {}
    __device__ __forceinline__ int mask() const { return word >> 3; }  // full_block, or of parts of all masks
    __device__ __forceinline__ bool has_pairs(int warpgroup) const { return word >> (1 + warpgroup) & 1; }
    __device__ __forceinline__ bool is_last() const { return word & 1; }
};
static_assert(full_block == -1, "what an arithmetic shift leaves");

template <class T>
struct ApartShared {
    uint8_t own[T::tiles][T::panels + T::second_panels][T::own_bytes];  // becomes what its sums are
    uint8_t other[T::slots][T::panels][T::step_bytes];
    uint8_t other_second[T::second_slots][T::v_panels][T::step_bytes];
    float offset[T::slots][T::step], delta[T::slots][T::step];  // QueryStats, where the other tokens are queries
    ApartMessage task[T::tiles];
    StepMessage step[T::slots];
    // Full: the producer with the bytes; consumers wait. Empty: one arrival a consumer warp; the producer waits.
    uint64_t own_full[T::tiles], own_empty[T::tiles];
    uint64_t other_full[T::slots], other_empty[T::slots];
    uint64_t second_full[T::second_slots], second_empty[T::second_slots];
    int32_t next[2];  // tasks that all producers take, in turn
    typename T::Pair pair;
};

// The tokens of an own tile that are written from it.
template <class C>
__device__ __forceinline__ any::OwnTokens own_tokens(const LayoutView& layout, int tile) {
    return C::by_query ? any::own_tokens_of(layout.queries, C::block_q, layout.seq_q, tile)
                       : any::own_tokens_of(layout.keys, C::block_k, layout.seq_k, tile);
}

// ---- producer ----
// One warp, or four where tokens stand in any order. Of these all load where some tiles are copied; else the first
// does, and the others are its helpers, for tasks without blocks. What a thread of theirs keeps from task to task:
template <class T>
struct ApartProducerState {
    const ApartParams<T::order>& params;
    ApartShared<T>& shared;
    const int lane;
    const bool is_leader, helps;  // one lane of all producers; whether this warp loads nothing
    Cursor<T::tiles> tile;
    Cursor<T::slots> slot;
    Cursor<T::second_slots> second;
    NextTask next{0};
    int turn = 0;              // of shared.next
    uint32_t tasks_phase = 0;  // of what two CTAs that share tiles agree on

    // The same, of producers that are one warp: see elect.
    __device__ __forceinline__ bool leads() const {
        if constexpr (T::copies)
            return is_leader;
        else
            return ptx::elect();
    }

    // Publishes a task, or the end of work; load(full) begins its own tokens.
    template <class Load>
    __device__ __forceinline__ void announce(const ApartMessage& message, Load load) {
        uint64_t* full = &shared.own_full[tile.index];
        ptx::mbarrier_wait(&shared.own_empty[tile.index], tile.phase ^ 1);
        if (leads()) shared.task[tile.index] = message;
        load(full);
        tile.advance();
    }
    __device__ __forceinline__ void announce_end() {
        announce({{0, 0, 0, end_of_work, 0, 0}, 0}, [&](uint64_t* full) {
            if constexpr (T::copies)
                for (int i = 0; i < T::own_tiles; ++i) arrive_without_tile(full);
            else if (leads())
                ptx::mbarrier_arrive(full);
        });
    }

    // The task after the one at hand.
    __device__ __forceinline__ int take_next() {
        if (!params.next_task) return params.num_tasks();
        const int tiles = int(gridDim.x) / T::tile_ctas;  // that are worked on at once
        if constexpr (T::in_pair) return shared.pair.agree_on(next.taken, tasks_phase, lane) + tiles;
        return int(tell_producers<T::producers>(next.taken, is_leader, shared.next, turn, 1 + T::warpgroups)) + tiles;
    }
};

// A task of a walk.
template <class C>
struct ApartProducer {
    using Element = typename C::Element;

    ApartProducerState<typename C::Tiles>& state;
    const ApartWalk<C::order>& walk;
    const ApartParams<C::order>& params = state.params;
    ApartShared<typename C::Tiles>& shared = state.shared;
    int batch, head_q, head_kv;

    __device__ __forceinline__ void run(int index) {
        const Task& task = walk.tasks.tasks[index];
        state.next = NextTask(task.take);
        const any::Divisor& heads = C::by_query ? params.heads_q : params.heads_kv;
        batch = task.head / heads;
        head_q = task.head - batch * heads, head_kv = C::by_query ? head_q / params.group : head_q;
        if (C::has_helpers && state.helps) {
            if (!task.take) store_empty(task);
            return;
        }
        if (task.take) return load_task(task, index);
        state.next.ask(params.next_task, state.is_leader);
        if constexpr (!C::has_helpers) store_empty(task);
    }

    // Tokens that see nothing, or that nobody sees. Consumers never hear of them, as in the forward.
    __device__ __forceinline__ void store_empty(const Task& task) {
        if constexpr (C::any_order) {
            end_empty(task);
            return;
        }
        if constexpr (C::by_query) {
            clear_tile(task, params.dq, head_q, params.head_dim);
        } else {
            if (C::has_dp) clear_tile(task, params.dk, head_kv, params.head_dim);
            if (C::sums_p && !params.value_in_key) clear_tile(task, params.dv, head_kv, params.head_dim_v);
        }
    }
    // The CTA's columns of them.
    __device__ __forceinline__ void clear_tile(const Task& task, const TensorView& sums, int head, int columns) {
        const int first = task.row * C::own_rows;
        const int rows = min(C::own_rows, (C::by_query ? params.seq_q : params.seq_k) - first);
        const int own_columns = min(columns - first_column<C>(), C::head_dim);
        if (own_columns > 0)
            clear_rows<Element>(from_column<Element>(sums, first_column<C>()), batch, head, first, rows, own_columns,
                                state.lane);
    }

    __device__ __forceinline__ void end_empty(const Task& task) {
        if (!params.piece.is_first || !params.piece.is_last) {
            for (int place = warp(); place < C::own_rows; place += warps) hand_on(task, place);
            return;
        }
        if constexpr (C::by_query)
            clear_own(task, params.dq, head_q, params.head_dim);
        else if constexpr (C::has_dp)
            clear_own(task, params.dk, head_kv, params.head_dim);
        if (C::sums_p && !params.value_in_key) clear_own(task, params.dv, head_kv, params.head_dim_v);
    }
    // Those that write for empty tasks, and which of them this one is.
    static constexpr int warps = C::producers / 32 - C::has_helpers;
    __device__ __forceinline__ static int warp() { return int(threadIdx.x) / 32 % 4 - C::has_helpers; }
    __device__ __forceinline__ void clear_own(const Task& task, const TensorView& sums, int head, int columns) {
        clear_tokens<C::own_rows, warps, Element>(own_tokens<C>(params.layout, task.row), sums, batch, head, columns,
                                                  warp());
    }
    // A token by a warp: other pieces of the pattern may have sums for it.
    __device__ __forceinline__ void hand_on(const Task& task, int place) {
        const int token = own_tokens<C>(params.layout, task.row).at(place);
        if (token == no_token) return;
        GradientRepair<C> nothing{params, state.lane, batch, C::has_dp, C::sums_p};
        if constexpr (C::by_query)
            nothing.store_query(task, head_q, token, place);
        else
            nothing.store_key(task, head_kv, token, place);
    }

    // Queries walk their own list, keys those of all query heads of the group.
    __device__ __forceinline__ void load_task(const Task& task, int index) {
        const LayoutView& layout = params.layout;
        const ApartMessage message{
            {batch, C::by_query ? head_q : head_kv, task.row, C::steps * task.take, task.part, index},
            int(&walk - params.walks)};
        state.announce(message, [&](uint64_t* full) { load_own(message, full); });
        const auto load = [&](int head, int block, int mask) {
            state.next.begin_block(params.next_task, state.is_leader);
            head_q = head - batch * params.heads_q;
            const Place place(C::by_query ? layout.keys : layout.queries, residue_tiles_of(params, !C::by_query),
                              C::block_q, block);
            uint32_t quarters = quarters_of(mask);
#pragma unroll(C::copies ? 1 : C::steps)
            for (int n = 0; n < C::steps; ++n, quarters >>= 2)
                if (quarters & 3) load_step(place, block, n, mask, quarters & 3, state.next.due == 0 && quarters < 4);
        };
        if constexpr (C::by_query) {
            int skip = task.skip, left = task.take;
            const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
            each_block(layout.by_query, list, task.row, state.lane, task.head, 1, skip, left, load);
        } else {
            each_block_of_group(layout, task, params.group, state.lane, load);
        }
    }

    __device__ __forceinline__ void load_own(const TaskMessage& task, uint64_t* full) {
        auto& own = shared.own[state.tile.index];
        if constexpr (C::copies) {
            const auto load = [&]<int Panels>(const runtime::ResidueMaps& maps, const TensorView& view, int columns,
                                              uint8_t* to) {
                load_rows<C::own_rows, Panels, Element>(source<C::by_query>(maps, view, columns), task.row, 0,
                                                        task.batch, task.head, nullptr, to, full);
            };
            load.template operator()<C::panels>(walk.maps.own, C::by_query ? params.q : params.k, params.head_dim,
                                                own[0]);
            if constexpr (C::has_dp)
                load.template operator()<C::v_panels>(walk.maps.own_second, C::by_query ? params.dout : params.v,
                                                      params.head_dim_v, own[C::panels]);
        } else if (state.leads()) {
            ptx::mbarrier_arrive_expect(full, C::tile_bytes);
            const Place at(C::by_query ? params.layout.queries : params.layout.keys,
                           residue_tiles_of(params, C::by_query), C::own_rows, task.row);
            send_boxes<C::panels, C::own_bytes>(walk.maps.own, at, task.head, 0, own[0], full);
            if constexpr (C::has_dp)
                send_boxes<C::v_panels, C::own_bytes>(walk.maps.own_second, at, task.head, 0, own[C::panels], full);
        }
    }

    // Where a tile's tokens stand; and those from place `begin` on, as boxes of 64 columns, for the leader to call.
    struct RowPlace {
        int first;
        __device__ __forceinline__ RowPlace(const AxisView&, const any::Divisor&, int block, int tile)
            : first(tile * block) {}
    };
    template <int Panels, int PanelBytes>
    __device__ __forceinline__ void send_boxes(const CUtensorMap& map, const RowPlace& at, int head, int begin,
                                               uint8_t* to, uint64_t* full) {
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_load_4d(to + panel * PanelBytes, &map, first_column<C>() + C::panel_columns * panel, head,
                             at.first + begin, batch, full);
    }
    template <int Panels, int PanelBytes>
    __device__ __forceinline__ void send_boxes(const runtime::ResidueMaps& maps, const HomePlace& at, int head,
                                               int begin, uint8_t* to, uint64_t* full) {
        send_home<Panels, PanelBytes>(maps, at, begin, batch, head, to, full);
    }
    struct NoPlace {
        __device__ __forceinline__ NoPlace(const AxisView&, const any::Divisor&, int, int) {}
    };
    using Place = std::conditional_t<C::copies, NoPlace, std::conditional_t<C::any_order, HomePlace, RowPlace>>;

    // An operand along the queries, or along the keys.
    template <bool IsQueries>
    __device__ __forceinline__ TileSource source(const runtime::ResidueMaps& maps, const TensorView& view,
                                                 int columns) const {
        const LayoutView& layout = params.layout;
        const AxisView& axis = IsQueries ? layout.queries : layout.keys;
        const int64_t seq = IsQueries ? layout.seq_q : layout.seq_k;
        return {maps, view, axis, residue_tiles_of(params, IsQueries), seq, C::block_q, columns};
    }

    // The query of a block's place; beyond the sequence where there is none.
    __device__ __forceinline__ int query_at(const Place& place, int block, int n) const {
        const LayoutView& layout = params.layout;
        if constexpr (C::copies)
            return any::token_at(layout.queries, C::block_q, layout.seq_q, block, n);
        else if constexpr (C::any_order)
            return place.token_at(layout.queries, layout.seq_q, n);
        else
            return place.first + n;
    }

    // Two bits for each of a block's steps: which warpgroups have kept pairs there. All have where none is left out.
    __device__ __forceinline__ uint32_t quarters_of(int mask) const {
        constexpr uint32_t all = (1 << 2 * C::steps) - 1;
        if (!C::leaves_out || mask == full_block) return all;
        return __ldg(mask_words(params.layout, mask) + C::quarters_word + C::by_query);
    }

    // Part n of a block of the other axis.
    __device__ __forceinline__ void load_step(const Place& place, int block, int n, int mask, uint32_t pairs,
                                              bool is_last) {
        QueryStats stats[C::step / 32];  // asked for before the slot is free
        const bool has_stats = !C::by_query && threadIdx.x % C::producers < 32;
        if (has_stats)
#pragma unroll
            for (int i = 0; i < C::step / 32; ++i) {
                stats[i] = query_stats<C>(params, batch * params.heads_q + head_q,
                                          query_at(place, block, n * C::step + state.lane + 32 * i));
            }
        uint64_t* const full = &shared.other_full[state.slot.index];
        ptx::mbarrier_wait(&shared.other_empty[state.slot.index], state.slot.phase ^ 1);
        begin_other(place, n, walk.maps.other, shared.other[state.slot.index], full);
        if (has_stats)
#pragma unroll
            for (int i = 0; i < C::step / 32; ++i) {
                shared.offset[state.slot.index][state.lane + 32 * i] = stats[i].offset;
                shared.delta[state.slot.index][state.lane + 32 * i] = stats[i].delta;
            }
        __syncwarp();  // all lanes' before the leader tells the consumers
        if (state.leads()) shared.step[state.slot.index] = StepMessage(mask, n, C::steps, pairs, is_last);
        finish_other(block, n, walk.maps.other, C::by_query ? params.k : params.q, params.head_dim,
                     shared.other[state.slot.index], full);
        state.slot.advance();
        auto& second = shared.other_second[state.second.index];
        uint64_t* const second_full = &shared.second_full[state.second.index];
        ptx::mbarrier_wait(&shared.second_empty[state.second.index], state.second.phase ^ 1);
        begin_other(place, n, walk.maps.other_second, second, second_full);
        finish_other(block, n, walk.maps.other_second, C::by_query ? params.v : params.dout, params.head_dim_v, second,
                     second_full);
        state.second.advance();
    }

    // Boxes are on their way before anything else is done for a step, since consumers are only two or three steps
    // behind. They may land before the barrier is told how many bytes to expect.
    template <int Panels, class Maps>
    __device__ __forceinline__ void begin_other(const Place& at, int n, const Maps& maps,
                                                uint8_t (&to)[Panels][C::step_bytes], uint64_t* full) {
        if constexpr (!C::copies)
            if (state.leads())
                send_boxes<Panels, C::step_bytes>(maps, at, C::by_query ? head_kv : head_q, n * C::step, to[0], full);
    }
    // What the barrier of a step's tile waits for besides; or the tile itself, where it may be listed.
    template <int Panels, class Maps>
    __device__ __forceinline__ void finish_other(int block, int n, const Maps& map, const TensorView& view, int columns,
                                                 uint8_t (&to)[Panels][C::step_bytes], uint64_t* full) {
        if constexpr (C::copies)
            load_rows<C::step, Panels, Element>(source<!C::by_query>(map, view, columns), block, n * C::step, batch,
                                                C::by_query ? head_kv : head_q, nullptr, to[0], full);
        else if (state.leads())
            ptx::mbarrier_arrive_expect(full, Panels * C::step_bytes);
    }
};

// ---- consumer: one warpgroup owns 64 tokens ----
template <class C>
struct ApartConsumer;
// What a thread keeps from task to task.
template <class T>
struct ApartConsumerState {
    const ApartParams<T::order>& params;
    ApartShared<T>& shared;
    const int warpgroup, thread;  // of the warpgroup
    Cursor<T::tiles> tile;
    Cursor<T::slots> slot;
    Cursor<T::second_slots> second;
    int held = -1;            // a tile that this warp's sums are leaving
    int noted[2] = {-1, -1};  // of each walk the last task of which this warp must repair rows
    Cursor<part_places> part_at;  // where the other CTA's next parts come, if two share a tile
    float s[T::values], r_ds[T::of_ds], r_p[T::of_p];

    __device__ __forceinline__ void wait(uint64_t* full, uint32_t phase) const {
        ptx::mbarrier_wait(full, phase);
        if constexpr (T::copies) ptx::fence_async_shared();  // rows that threads copied are ordinary writes
    }
    // Who works on tasks of C's walk, in a kernel whose first walk is First's.
    template <class C, class First>
    __device__ __forceinline__ ApartConsumer<C> of() {
        constexpr int walk = std::is_same_v<C, First> ? 0 : 1;
        return {*this, params.walks[walk], noted[walk]};
    }
};

// A task of a walk.
template <class C>
struct ApartConsumer {
    using Tag = tile::MatrixTag<C::dtype>;
    using Words = uint32_t[C::step / 16][4];  // an a operand: steps of 16 tokens

    ApartConsumerState<typename C::Tiles>& state;
    const ApartWalk<C::order>& walk;
    int& noted;
    const ApartParams<C::order>& params = state.params;
    ApartShared<typename C::Tiles>& shared = state.shared;
    const int warpgroup = state.warpgroup, thread = state.thread;
    QueryStats own[2];  // of the thread's two rows, where own tokens are queries
    StepMessage at_hand;
    static constexpr int values = C::values, of_ds = C::of_ds, of_p = C::of_p;
    float (&s)[C::values] = state.s, (&r_ds)[C::of_ds] = state.r_ds, (&r_p)[C::of_p] = state.r_p;

    __device__ __forceinline__ void run(const TaskMessage& task) {
        if constexpr (C::by_query)
            for (int h = 0; h < 2; ++h) own[h] = stats_of(task, tile::fragment_row(thread, 2 * h));
        state.wait(&shared.other_full[state.slot.index], state.slot.phase);
        begin_scores();
        if constexpr (C::leaves_out) take_step();
        ptx::wgmma_wait<0>();
        if constexpr (C::leaves_out) {
            clear_sums();
            while (!at_hand.is_last())
                if (at_hand.has_pairs(warpgroup))
                    step<false>(false);
                else
                    pass<false>();
            if (at_hand.has_pairs(warpgroup))
                step<true>(false);
            else
                pass<true>();
        } else {
            for (int n = 0; n < task.count - 1; ++n) step<false>(n == 0);
            step<true>(task.count == 1);
        }
        store(task);
    }

    __device__ __forceinline__ QueryStats stats_of(const TaskMessage& task, int row) const {
        const int place = warpgroup * C::warpgroup_rows + row;
        const LayoutView& layout = params.layout;
        const int token = C::any_order ? any::token_at(layout.queries, C::block_q, layout.seq_q, task.row, place)
                                       : task.row * C::own_rows + place;
        return query_stats<C>(params, task.batch * params.heads_q + task.head, token);
    }

    // ---- products, begun ----
    template <int Columns, int Size>
    __device__ __forceinline__ void begin_product(float (&to)[Size], const uint8_t* left, const uint8_t* right) {
        const uint32_t a = ptx::wgmma_descriptor(left + warpgroup * C::warpgroup_rows * C::row_bytes, 0);
        const uint32_t b = ptx::wgmma_descriptor(right, 0);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Columns / 16; ++i)
            ptx::wgmma(to, a + (i / 4) * (C::own_bytes / 16) + (i % 4) * 2,
                       b + (i / 4) * (C::step_bytes / 16) + (i % 4) * 2, i > 0, Tag{});
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ void begin_scores() {
        begin_product<C::head_dim>(s, shared.own[state.tile.index][0], shared.other[state.slot.index][0]);
    }
    template <int Size>
    __device__ __forceinline__ void begin_sum(float (&sum)[Size], const Words& left, const uint8_t* right, bool first) {
        const uint32_t b = ptx::wgmma_descriptor(right, C::step_bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::step / 16; ++i) ptx::wgmma_transposed(sum, left[i], b + i * 128, i > 0 || !first, Tag{});
        ptx::wgmma_commit();
    }

    // ---- one step ----
    // Without a kept pair of this warpgroup's tokens: the scores that were made are of no use.
    template <bool IsLast>
    __device__ __forceinline__ void pass() {
        const int at = state.slot.index, second_at = state.second.index;
        state.wait(&shared.second_full[second_at], state.second.phase);
        release(&shared.second_empty[second_at]);
        state.second.advance();
        next_scores<IsLast>();
        if (state.held >= 0) [[unlikely]]
            wait_for_copies();
        ptx::wgmma_wait<0>();
        release(&shared.other_empty[at]);
    }
    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (float& x : r_ds) x = 0;
#pragma unroll
        for (float& x : r_p) x = 0;
    }

    // Its scores are in s; leaves with those of the next, unless it is the task's last.
    template <bool IsLast>
    __device__ __forceinline__ void step(bool is_first) {
        float dp[values];
        const int at = state.slot.index, second_at = state.second.index;
        state.wait(&shared.second_full[second_at], state.second.phase);
        if constexpr (C::has_dp)
            begin_product<C::head_dim_v>(dp, shared.own[state.tile.index][C::panels],
                                         shared.other_second[second_at][0]);
        if constexpr (!C::leaves_out) take_step();
        const int mask = at_hand.mask();
        uint32_t word = ~0u;
        if (mask != full_block)
            word = __ldg(words_of(mask) + warpgroup * 128 + thread) >> mask % C::steps_of_word * C::step / 2;
        join(s);
        Words words;
        make_probabilities(at, mask, word, words);
        if (state.held >= 0) [[unlikely]]
            wait_for_copies();
        if constexpr (C::sums_p) {
            begin_sum(r_p, words, shared.other_second[second_at][0], is_first);
            if constexpr (C::has_dp) {
                ptx::wgmma_wait<1>();
                join(dp);
                finish_ds(at, dp, is_first);
            }
            next_scores<IsLast>();
            ptx::wgmma_wait<0>();
            release(&shared.second_empty[second_at]);
        } else {
            ptx::wgmma_wait<0>();
            release(&shared.second_empty[second_at]);
            join(dp);
            finish_ds(at, dp, is_first);
            next_scores<IsLast>();
            ptx::wgmma_wait<0>();
        }
        state.second.advance();
        release(&shared.other_empty[at]);
    }
    // Parts of products become those of all columns, where two CTAs share a tile.
    __device__ __forceinline__ void join(float (&part)[values]) {
        if constexpr (C::in_pair) {
            shared.pair.wait_for_room(state.part_at, warpgroup);
            shared.pair.exchange(part, state.part_at, warpgroup, thread);
            shared.pair.tell_read(part, state.part_at, warpgroup, thread);
        }
    }
    __device__ __forceinline__ void finish_ds(int at, const float (&dp)[values], bool is_first) {
        multiply_by_dp(at, dp);
        Words words;
        tile::pack_tile<C::dtype>(s, words);
        begin_sum(r_ds, words, shared.other[at][0], is_first);
    }
    template <bool IsLast>
    __device__ __forceinline__ void next_scores() {
        state.slot.advance();
        if constexpr (!IsLast) {
            state.wait(&shared.other_full[state.slot.index], state.slot.phase);
            begin_scores();
            if constexpr (C::leaves_out) take_step();
        }
    }
    // Read by the lane that will release the slot, so that nobody reads what the producer already overwrites.
    __device__ __forceinline__ void take_step() {
        at_hand = StepMessage(__shfl_sync(~0u, thread % 32 ? 0 : shared.step[state.slot.index].word, 0));
    }

    // The step's part of a mask, where tiles of keys come first, then those of queries.
    __device__ __forceinline__ const uint32_t* words_of(int mask) const {
        constexpr int half = C::block_q * C::block_k / 32;
        return mask_words(params.layout, mask / C::steps) + (C::by_query ? half : 0) +
               mask % C::steps / C::steps_of_word * C::warpgroups * 128;
    }

    // s becomes p, and its words where they are wanted; with a cap s becomes what ds is a multiple of.
    __device__ __forceinline__ void make_probabilities(int at, int mask, uint32_t word, Words& words) {
        if (!params.has_cap) [[likely]] {
#pragma unroll
            for (int i = 0; i < values; ++i)
                s[i] = ptx::exp2_approx(fmaf(s[i], params.scale_log2, stat(shared.offset, at, i, &QueryStats::offset)));
            if (mask != full_block) [[unlikely]]
                tile::keep(s, typename C::MaskWord(word));
            if constexpr (C::sums_p) tile::pack_tile<C::dtype>(s, words);
            return;
        }
#pragma unroll
        for (int i = 0; i < values; i += 2) {
            float p[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float x = tile::cap(s[i + j], params.into_cap);
                p[j] =
                    ptx::exp2_approx(fmaf(x, params.scale_log2, stat(shared.offset, at, i + j, &QueryStats::offset)));
                ptx::zero_unless(p[j], word >> (i + j) & 1);
                s[i + j] = p[j] * (1 - x * x);
            }
            words[i / 8][i % 8 / 2] = tile::pack<C::dtype>(p[0], p[1]);
        }
    }

    // What belongs to the query of value i: the thread's own row, or its column of the step.
    __device__ __forceinline__ float stat(const float (&stats)[C::slots][C::step], int at, int i,
                                          float QueryStats::*own_stat) const {
        if constexpr (C::by_query) return own[tile::row_of(i)].*own_stat;
        const float2 two = *reinterpret_cast<const float2*>(stats[at] + 2 * (thread & 3) + 2 * (i & ~3));
        return i % 2 ? two.y : two.x;
    }

    // s becomes ds. A pair that is not kept has p = 0, which leaves NaN of its dp to the repairs.
    __device__ __forceinline__ void multiply_by_dp(int at, const float (&dp)[values]) {
#pragma unroll
        for (int i = 0; i < values; ++i)
            s[i] *= fmaf(dp[i], dp_factor<C>, -stat(shared.delta, at, i, &QueryStats::delta));
    }

    __device__ __forceinline__ void release(uint64_t* empty) {
        __syncwarp();  // all lanes have read what may be overwritten
        if (thread % 32 == 0) ptx::mbarrier_arrive(empty);
    }

    // Until what this warp has sent was read.
    __device__ __forceinline__ void wait_for_copies() {
        if (ptx::elect()) {
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(&shared.own_empty[state.held]);
        }
        state.held = -1;
    }

    // ---- a task's end ----
    __device__ __forceinline__ void store(const TaskMessage& task) {
        if constexpr (C::sums_p)
            for (float& x : r_p) x *= tile::unlift<C::dtype>;
        if constexpr (C::has_dp)
            for (float& x : r_ds) x *= tile::ds_unlift<C::dtype>;
        const unsigned odd = note_not_finite(task.index);
        ptx::named_barrier_sync(1 + warpgroup, 128);  // all warps have done with the own tokens
        if (task.part != whole_row) {
            store_part(task);
        } else if (!C::any_order || leaves_as_boxes(task, odd)) {
            finish_sums();
            store_whole(task);
        } else if constexpr (C::any_order) {
            store_tokens(task, odd);
        }
        state.held = state.tile.index;
        // One tile: nothing comes that it must be free for later.
        if constexpr (C::tiles == 1) wait_for_copies();
    }

    // Returns a bit for each of the warp's rows that are noted.
    __device__ __forceinline__ unsigned note_not_finite(int index) {
        float of[2] = {0, 0}, more[2] = {0, 0};
        if constexpr (C::has_dp) tile::find_not_finite(r_ds, of);
        if constexpr (C::sums_p) tile::find_not_finite(r_p, more);
        const bool is_finite[2] = {of[0] + more[0] == 0, of[1] + more[1] == 0};
        if (__all_sync(~0u, is_finite[0] && is_finite[1])) [[likely]]
            return 0;
        const unsigned bits = tile::rows_with(!is_finite[0], !is_finite[1]);
        if (thread % 32 == 0) *note_of(index) = make_int2(noted, int(bits));
        noted = index;
        return bits;
    }
    __device__ __forceinline__ int2* note_of(int task) const {
        const size_t tile = size_t(task) * C::tile_ctas + tile_rank<C>();
        return walk.notes + (tile * C::warpgroups + warpgroup) * 4 + thread / 32;
    }

    // Sums of pairs become gradients.
    __device__ __forceinline__ void finish_sums() {
        if constexpr (C::has_dp) {
#pragma unroll
            for (int i = 0; i < of_ds; ++i) {
                r_ds[i] *= params.scale;
                if (C::sums_p && i < of_p && params.value_in_key) r_ds[i] += r_p[i];
            }
        }
    }
    // Where sums of p are staged; those of ds are before them.
    static constexpr int p_panel = C::has_dp ? C::panels : 0;
    __device__ __forceinline__ uint8_t* staged(int panel) const {
        return shared.own[state.tile.index][panel] + (4 * warpgroup + thread / 32) * C::warp_bytes;
    }
    __device__ __forceinline__ void stage_sums() {
        if constexpr (C::has_dp) stage(r_ds, staged(0));
        if constexpr (C::sums_p) stage(r_p, staged(p_panel));
    }

    __device__ __forceinline__ void store_whole(const TaskMessage& task) {
        stage_sums();
        ptx::fence_async_shared();
        __syncwarp();  // the warp's rows are written before one lane sends them
        if (!ptx::elect()) return;
        if constexpr (C::has_dp) send<C::panels>(walk.maps.ds, task, 0);
        if (C::sums_p && !params.value_in_key) send<C::v_panels>(walk.maps.p, task, p_panel);
        ptx::bulk_commit();
    }
    // A warp's rows from staged panels on.
    template <int Panels>
    __device__ __forceinline__ void send(const CUtensorMap& map, const TaskMessage& task, int first) const {
        const int row = task.row * C::own_rows + row_in_tile();
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_store_4d(&map, first_column<C>() + C::panel_columns * panel, task.head, row, task.batch,
                              staged(first + panel));
    }
    template <int Panels>
    __device__ __forceinline__ void send(const runtime::ResidueMaps& maps, const TaskMessage& task, int first) const {
        const HomePlace at(own_axis(), residue_tiles_of(params, C::by_query), C::own_rows, task.row);
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_store_5d(at.map(maps), C::panel_columns * panel, task.head, at.in_map(maps),
                              at.first + row_in_tile(), task.batch, staged(first + panel));
    }
    __device__ __forceinline__ int row_in_tile() const { return C::warp_rows * (4 * warpgroup + thread / 32); }
    __device__ __forceinline__ const AxisView& own_axis() const {
        return C::by_query ? params.layout.queries : params.layout.keys;
    }
    // Homes with all of their tokens, where no other piece has sums for them. A row that is not finite is left out: its
    // repair may need what stands there.
    __device__ __forceinline__ bool leaves_as_boxes(const TaskMessage& task, unsigned odd) const {
        return !odd && params.piece.is_first && params.piece.is_last && task.row >= own_axis().listed &&
               !own_axis().away;
    }

    // Rows whose tokens stand anywhere, after what other pieces of the pattern made of them. The repair of a row that
    // is not finite takes on what these left, so it is not written here.
    __device__ __forceinline__ void store_tokens(const TaskMessage& task, unsigned odd) {
        const any::OwnTokens own = own_tokens<C>(params.layout, task.row);
        int token[2];
        int64_t row[2];  // of all heads and batch entries
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int in_warpgroup = tile::fragment_row(thread, 2 * h);
            token[h] = odd >> in_warpgroup % 16 & 1 ? no_token : own.at(warpgroup * C::warpgroup_rows + in_warpgroup);
            row[h] = C::by_query ? (int64_t(task.batch) * params.heads_q + task.head) * params.seq_q + token[h]
                                 : (int64_t(task.batch) * params.heads_kv + task.head) * params.seq_k + token[h];
        }
        if (!params.piece.is_first || !params.piece.is_last) {
            if constexpr (C::has_dp)
                join_pieces(r_ds, token, row, C::by_query ? params.carried.dq : params.carried.dk, params.head_dim);
            if constexpr (C::sums_p) join_pieces(r_p, token, row, params.carried.dv, params.head_dim_v);
        }
        if (params.piece.is_last) {
            finish_sums();
            stage_sums();
            __syncwarp();  // the warp's rows are written before others of its lanes read them
            if constexpr (C::has_dp)
                write_rows<C::panels, typename C::Element>(ptx::shared_address(staged(0)), C::own_bytes,
                                                           C::by_query ? params.dq : params.dk, task.batch, task.head,
                                                           token, params.head_dim);
            if (C::sums_p && !params.value_in_key)
                write_rows<C::v_panels, typename C::Element>(ptx::shared_address(staged(p_panel)), C::own_bytes,
                                                             params.dv, task.batch, task.head, token,
                                                             params.head_dim_v);
        }
        ptx::fence_async_shared();  // of the tile, before the next one's boxes
        __syncwarp();               // and of all lanes, before lane 0 releases it
    }

    // Sums of the pieces before come in, sums for the pieces to come go out.
    template <int Size>
    __device__ __forceinline__ void join_pieces(float (&sums)[Size], const int (&token)[2], const int64_t (&row)[2],
                                                float* carried, int columns) const {
        const auto is_there = [&](int i) {
            return token[tile::row_of(i)] != no_token && tile::fragment_column(thread, i) < columns;
        };
        const auto place = [&](int i) {
            return reinterpret_cast<float2*>(carried + row[tile::row_of(i)] * columns +
                                             tile::fragment_column(thread, i));
        };
        constexpr int at_once = 16;  // loads do not wait for each other
        if (!params.piece.is_first)
#pragma unroll
            for (int first = 0; first < Size; first += at_once) {
                float2 theirs[at_once / 2];
#pragma unroll
                for (int i = 0; i < at_once; i += 2)
                    theirs[i / 2] = is_there(first + i) ? *place(first + i) : make_float2(0, 0);
#pragma unroll
                for (int i = 0; i < at_once; i += 2)
                    sums[first + i] += theirs[i / 2].x, sums[first + i + 1] += theirs[i / 2].y;
            }
        if (!params.piece.is_last)
#pragma unroll
            for (int i = 0; i < Size; i += 2)
                if (is_there(i)) *place(i) = make_float2(sums[i], sums[i + 1]);
    }
    template <int Size>
    __device__ __forceinline__ void stage(const float (&sums)[Size], uint8_t* to) const {
        uint32_t words[Size / 8][4];
        tile::pack_tile<C::dtype>(sums, words);
        tile::store_swizzled(words, ptx::shared_address(to), C::own_bytes, thread % 32);
    }

    // A part of keys has dk's columns, then dv's.
    __device__ __forceinline__ void store_part(const TaskMessage& task) {
        const size_t row = size_t(task.part) * C::own_rows + warpgroup * C::warpgroup_rows;
        const int width = C::by_query ? params.head_dim : params.head_dim + params.head_dim_v;
        float* part = (C::by_query ? params.space.parts_query : params.space.parts_key) + row * size_t(width);
        if constexpr (C::has_dp) write(r_ds, part, width, params.head_dim);
        if constexpr (C::sums_p) write(r_p, part + params.head_dim, width, params.head_dim_v);
    }
    template <int Size>
    __device__ __forceinline__ void write(const float (&sums)[Size], float* to, int width, int columns) const {
#pragma unroll
        for (int i = 0; i < Size; ++i) {
            const int column = first_column<C>() + tile::fragment_column(thread, i);
            if (column < columns) to[tile::fragment_row(thread, i) * width + column] = sums[i];
        }
    }

    // The rows noted, over what the copy engine has stored of them.
    __device__ __forceinline__ void repair_noted() {
        if (ptx::elect()) ptx::bulk_wait();
        __syncwarp();  // what was sent is there before others write there
        while (noted >= 0) {
            const int2 note = *note_of(noted);
            const Task task = walk.tasks.tasks[noted];
            for (unsigned bits = unsigned(note.y); bits; bits &= bits - 1) {
                const int row = warpgroup * C::warpgroup_rows + thread / 32 * 16 + __ffs(int(bits)) - 1;
                GradientRepair<C> repair{params, thread % 32,
                                         task.head / (C::by_query ? params.heads_q : params.heads_kv), C::has_dp,
                                         C::sums_p};
                if constexpr (C::by_query)
                    repair.query_row(task, row);
                else
                    repair.key_row(task, row);
            }
            noted = note.x;
        }
    }
};

// ---- kernel: one walk, or two side by side ----
template <class First, class Second>
__device__ __forceinline__ void produce(ApartProducerState<typename First::Tiles>&& state) {
    const auto& params = state.params;
    for (int at = int(blockIdx.x) / First::tile_ctas; at < params.num_tasks(); at = state.take_next()) {
        const PlaceInWalk place(params, at);
        in_walk<First, Second>(place.walk, [&]<class C>() {
            ApartProducer<C>{state, params.walks[std::is_same_v<C, First> ? 0 : 1]}.run(place.task);
        });
    }
    if (!state.helps) state.announce_end();
}

template <class First, class Second>
__device__ __forceinline__ void consume(ApartConsumerState<typename First::Tiles>&& state) {
    const auto& shared = state.shared;
    for (;;) {
        state.wait(&state.shared.own_full[state.tile.index], state.tile.phase);
        const ApartMessage task = shared.task[state.tile.index];
        __syncwarp();  // all lanes have read the message before its tile can be released
        if (task.count == end_of_work) break;
        in_walk<First, Second>(__shfl_sync(~0u, task.walk, 0),
                               [&]<class C>() { state.template of<C, First>().run(task); });
        state.tile.advance();
    }
    state.template of<First, First>().repair_noted();
    if constexpr (!std::is_same_v<First, Second>) state.template of<Second, First>().repair_noted();
}

template <class First, class Second>
__global__ void __launch_bounds__(First::threads, 1)
    apart_kernel(const __grid_constant__ ApartParams<First::order> params) {
    using T = typename First::Tiles;
    static_assert(std::is_same_v<T, typename Second::Tiles>, "walks share rings");
    ApartShared<T>& shared = *ptx::swizzled_shared<ApartShared<T>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::tiles; ++i) {
            ptx::mbarrier_init(&shared.own_full[i], T::own_tiles * T::tile_counts);
            ptx::mbarrier_init(&shared.own_empty[i], T::warps);
        }
        for (int i = 0; i < T::slots; ++i) {
            ptx::mbarrier_init(&shared.other_full[i], T::tile_counts);
            ptx::mbarrier_init(&shared.other_empty[i], T::warps);
        }
        for (int i = 0; i < T::second_slots; ++i) {
            ptx::mbarrier_init(&shared.second_full[i], T::tile_counts);
            ptx::mbarrier_init(&shared.second_empty[i], T::warps);
        }
        shared.pair.init();
        ptx::fence_mbarrier_init();
    }
    sync_tile<T>();
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    if (warpgroup == T::warpgroups) {
        ptx::give_registers<T::producer_registers>();
        const int thread = int(threadIdx.x) - T::consumers;
        if (thread < T::producers) {
            if (T::has_helpers && thread >= 32)
                produce<First, Second>({params, shared, thread % 32, false, true});
            else
                produce<First, Second>({params, shared, thread % 32, thread == 0 && tile_rank<T>() == 0, false});
        }
    } else {
        ptx::take_registers<T::consumer_registers>();
        consume<First, Second>({params, shared, warpgroup, int(threadIdx.x % 128)});
    }
    if constexpr (T::in_pair) ptx::cluster_sync();  // the other CTA may have something to send to this one yet
}

// ---- launch ----
template <Dtype D, int HeadDim, int HeadDimV, Order O>
struct ApartLaunch {
    const BackwardArgs& args;
    const Problem& p;
    const BlockBackwardApartSpace space;

    explicit ApartLaunch(const BackwardArgs& args)
        : args(args), p(*args.problem), space(p, args.layout, args.tasks, args.second_tasks, tile_ctas) {}

    static constexpr int tile_ctas = BlockBackwardApart<D, HeadDim, HeadDimV, 128, 128>::tile_ctas;
    int most_tiles() const { return runtime::count_processors(args.device) / tile_ctas; }  // that are worked on at once

    // Counters, unless all tasks are worked on at once.
    void clear() const {
        if (args.tasks.num_tasks + args.second_tasks.num_tasks > most_tiles())
            runtime::clear(workspace() + space.counters, space.notes - space.counters, args.stream);
    }

    template <Sums S>
    using Config = ApartConfig<D, HeadDim, HeadDimV, S, O>;

    // One walk, or two side by side, as number `kernel` of this call.
    template <Sums First, Sums Second = First>
    void run(int kernel, bool has_second = First != Second) const {
        using C = Config<First>;
        ApartParams<O> params;
        fill(params, args);
        set<C>(params.walks[0], 0);
        const int64_t of_first = params.walks[0].tasks.num_tasks;
        params.walks[1] = {};
        if (has_second) set<Config<Second>>(params.walks[1], of_first);
        const int tasks = params.num_tasks(), tiles = std::min(tasks, most_tiles());
        params.share = tasks ? uint32_t(ceil_div(of_first << 32, int64_t(tasks))) : 0;
        if (tiles < tasks) params.next_task = reinterpret_cast<unsigned*>(workspace() + space.counters) + kernel;
        runtime::launch(apart_kernel<C, Config<Second>>,
                        {unsigned(tiles * tile_ctas), unsigned(C::threads), sizeof(ApartShared<typename C::Tiles>),
                         unsigned(tile_ctas)},
                        args.stream, params);
    }

    char* workspace() const { return static_cast<char*>(args.workspace); }

    // notes: of walks before.
    template <class C>
    void set(ApartWalk<O>& walk, size_t notes) const {
        make_maps<C>(walk.maps);
        walk.tasks = C::by_query ? args.second_tasks : args.tasks;
        walk.notes = reinterpret_cast<int2*>(workspace() + space.notes) + notes * C::warps * tile_ctas;
    }

    template <class C>
    void make_maps(ConsecutiveGradientMaps& maps) const {
        const auto map = [&](const TensorView& x, const runtime::Sizes& sizes, int rows) {
            return runtime::make_tensor_map(x, sizes, D, rows);
        };
        make_operands<C>(maps, map, map);
        make_sums<C>(maps, map, map);
    }
    template <class C>
    void make_maps(ResidueGradientMaps& maps) const {
        const auto of = [&](const AxisView& axis) {
            return [&](const TensorView& x, const runtime::Sizes& sizes, int rows) {
                return runtime::make_residue_maps(x, sizes, D, rows, axis.modulus);
            };
        };
        const auto of_queries = of(args.layout.queries), of_keys = of(args.layout.keys);
        make_operands<C>(maps, of_queries, of_keys);
        make_sums<C>(maps, of_queries, of_keys);
    }
    template <class C, class Maps, class QueryMap, class KeyMap>
    void make_operands(Maps& maps, QueryMap query_map, KeyMap key_map) const {
        const int of_q = C::by_query ? C::own_rows : C::step, of_k = C::by_query ? C::step : C::own_rows;
        const auto q = query_map(args.q, runtime::q_sizes(p), of_q);
        const auto dout = query_map(args.dout, runtime::out_sizes(p), of_q);
        const auto k = key_map(args.k, runtime::k_sizes(p), of_k);
        const auto v = key_map(args.v, runtime::v_sizes(p), of_k);
        maps.own = C::by_query ? q : k, maps.own_second = C::by_query ? dout : v;
        maps.other = C::by_query ? k : q, maps.other_second = C::by_query ? v : dout;
    }

    template <class C, class Maps, class QueryMap, class KeyMap>
    void make_sums(Maps& maps, QueryMap query_map, KeyMap key_map) const {
        if (C::has_dp)
            maps.ds = C::by_query ? query_map(args.dq, runtime::q_sizes(p), C::warp_rows)
                                  : key_map(args.dk, runtime::k_sizes(p), C::warp_rows);
        if (C::sums_p && !p.value_in_key) maps.p = key_map(args.dv, runtime::v_sizes(p), C::warp_rows);
    }

    template <Sums First, Sums Second = First>
    static void prepare() {
        runtime::prepare(apart_kernel<Config<First>, Config<Second>>,
                         sizeof(ApartShared<typename Config<First>::Tiles>));
    }
};

template <Dtype D, int HeadDim, int HeadDimV, Order O>
void run_apart(const BackwardArgs& args) {
    const ApartLaunch<D, HeadDim, HeadDimV, O> launch(args);
    launch.clear();
    any::BlockBackward<D>::rows(args);
    // Queries that stand in several tiles have several sums.
    const bool has_queries = !args.layout.queries.listed || args.layout.queries.away;
    if constexpr (HeadDim <= joined_head_dim) {
        launch.template run<Sums::dk_dv, Sums::dq>(0, has_queries);
    } else {
        launch.template run<Sums::dk>(0);
        launch.template run<Sums::dv>(1);
        if (has_queries) launch.template run<Sums::dq>(2);
    }
    any::BlockBackward<D>::join_keys(args);
    if (has_queries)
        any::BlockBackward<D>::join_queries(args);
    else
        any::BlockBackward<D>::by_query(args);
    any::BlockBackward<D>::sinks(args);
}

template <Dtype D, int HeadDim, int HeadDimV, Order O>
void prepare_apart() {
    using Launch = ApartLaunch<D, HeadDim, HeadDimV, O>;
    if constexpr (HeadDim <= joined_head_dim) {
        Launch::template prepare<Sums::dk_dv, Sums::dq>();
    } else {
        Launch::template prepare<Sums::dk>();
        Launch::template prepare<Sums::dv>();
        Launch::template prepare<Sums::dq>();
    }
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs& args) {
    static_assert(BlockQ == 128 && BlockK == 128, "tiles of own tokens are blocks");
    const AxisView &queries = args.layout.queries, &keys = args.layout.keys;
    if constexpr (any_order) {
        if (queries.listed + keys.listed > 0) return run_apart<D, HeadDim, HeadDimV, Order::listed>(args);
        if (!args.piece.is_whole() || !is_consecutive(queries) || !is_consecutive(keys))
            return run_apart<D, HeadDim, HeadDimV, Order::residues>(args);
    }
    run_apart<D, HeadDim, HeadDimV, Order::consecutive>(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    prepare_apart<D, HeadDim, HeadDimV, Order::consecutive>();
    if constexpr (any_order) {
        prepare_apart<D, HeadDim, HeadDimV, Order::residues>();
        prepare_apart<D, HeadDim, HeadDimV, Order::listed>();
    }
    runtime::prepare_tensor_maps();
}

}  // namespace spattn::sm90
