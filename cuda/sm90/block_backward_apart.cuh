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
//   orders    as in the forward, tokens may stand in any order; and a pattern may be run in pieces, each of which takes
//             on the float sums of the one before. Sums of homes leave as boxes, others row by row
//
//   isolation as in block_backward.cuh: rows that are not finite are noted and made again from kept pairs.
//
// What binds. A 64 x 128 block is 512 cycles of the tensor unit for each product, and the first two read both operands
// from shared memory at its full rate. Measured (H200, bf16, L2 cold, TFLOP/s of 10 pairs d, whatever is made twice):
// full_16k 502, window1k_16k 371, block_diagonal512_16k 347, head_dim 192/128 420, 256 453;
// dilated_16k, in residue classes, 54.
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

// ---- configuration ----
// AnyOrder: as in the forward.
template <Dtype D, int HeadDim, int HeadDimV, Sums S, bool AnyOrder>
struct ApartConfig : TileConfig<D, HeadDim, HeadDimV> {
    using Base = TileConfig<D, HeadDim, HeadDimV>;
    using Base::head_dim, Base::head_dim_v, Base::panels, Base::row_bytes, Base::v_panels;
    static constexpr bool any_order = AnyOrder;
    static constexpr int block_q = 128, block_k = 128;
    static constexpr bool by_query = S == Sums::dq, has_dp = S != Sums::dv, sums_p = S == Sums::dv || S == Sums::dk_dv;
    static constexpr int own_rows = 128, step = 64;  // tokens of a tile, and of the other axis at a time
    static constexpr int steps = 128 / step;         // of a block
    static constexpr int warpgroups = own_rows / Base::warpgroup_rows;
    static constexpr int warps = 4 * warpgroups, consumers = 32 * warps, threads = consumers + 128;
    static constexpr int own_bytes = own_rows * row_bytes, step_bytes = step * row_bytes;  // of a panel
    // As many tiles as there is room for: own tokens of two tasks, two steps of the other axis.
    static constexpr int most_bytes = 227 * 1024 - 2048;
    static constexpr int second_panels = has_dp ? v_panels : 0;  // of own tokens: v or dout
    static constexpr int tile_bytes = (panels + second_panels) * own_bytes;
    static constexpr int slot_bytes = panels * step_bytes, second_slot_bytes = v_panels * step_bytes;
    static constexpr int tiles = 2 * (tile_bytes + slot_bytes + second_slot_bytes) <= most_bytes ? 2 : 1;
    static constexpr int slots = 2;
    static constexpr int second_slots =
        tiles * tile_bytes + slots * slot_bytes + 2 * second_slot_bytes <= most_bytes ? 2 : 1;
    static constexpr int producers = any_order ? tile_copiers : 32, tile_counts = any_order ? tile_arrivals : 1;
    static constexpr int own_tiles = any_order && has_dp ? 2 : 1;  // that come one by one
    // With 232 registers next to none spill, but the compiler mixes less: at 128 columns blocks of 128 took 4 to 11 %
    // longer so than with 240. At 256 they took 2 % less.
    static constexpr int producer_registers = head_dim > 128 ? 40 : 24, consumer_registers = head_dim > 128 ? 232 : 240;
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, 1),
                  "roles share what the launch gives");
    static_assert(head_dim_v <= head_dim, "value_in_key adds dv to dk's columns");
    static_assert(tiles * tile_bytes + slots * slot_bytes + second_slots * second_slot_bytes <= most_bytes, "no room");
};

// Own tokens are queries where sums are dq's, else keys. `first` operands make s, `second` ones dp.
struct ConsecutiveGradientMaps {
    CUtensorMap own, own_second, other, other_second;  // boxes of one 64-column panel
    CUtensorMap ds, p;                                 // where sums of ds (dq or dk) and of p (dv) go
};
struct ResidueGradientMaps {
    runtime::ResidueMaps own, own_second, other, other_second, ds, p;
};
template <bool AnyOrder>
struct ApartParams : GradientParams {
    std::conditional_t<AnyOrder, ResidueGradientMaps, ConsecutiveGradientMaps> maps;
    bool has_copies;  // some tiles are listed, and come row by row
};

// ---- shared memory ----
template <class C>
struct ApartShared {
    uint8_t own[C::tiles][C::panels + C::second_panels][C::own_bytes];  // becomes what its sums are
    uint8_t other[C::slots][C::panels][C::step_bytes];
    uint8_t other_second[C::second_slots][C::v_panels][C::step_bytes];
    float offset[C::slots][C::step], delta[C::slots][C::step];  // QueryStats, where the other tokens are queries
    TaskMessage task[C::tiles];
    int32_t mask[C::slots];  // of the step's block
    // Full: the producer with the bytes; consumers wait. Empty: one arrival a consumer warp; the producer waits.
    uint64_t own_full[C::tiles], own_empty[C::tiles];
    uint64_t other_full[C::slots], other_empty[C::slots];
    uint64_t second_full[C::second_slots], second_empty[C::second_slots];
    int32_t next[2];  // tasks that all producers take, in turn
};

// The tokens of an own tile that are written from it.
template <class C>
__device__ __forceinline__ any::OwnTokens own_tokens(const LayoutView& layout, int tile) {
    return C::by_query ? any::own_tokens_of(layout.queries, C::block_q, layout.seq_q, tile)
                       : any::own_tokens_of(layout.keys, C::block_k, layout.seq_k, tile);
}

// ---- producer ----
// One warp, or four, as in the forward.
template <class C>
struct ApartProducer {
    using Element = typename C::Element;

    const ApartParams<C::any_order>& params;
    ApartShared<C>& shared;
    const int lane;
    const bool is_leader;  // one lane of all producers
    Cursor<C::tiles> tile;
    Cursor<C::slots> slot;
    Cursor<C::second_slots> second;
    int batch;
    int head_q, head_kv;
    NextTask next{0};
    int turn = 0;  // of shared.next

    __device__ __forceinline__ void run() {
        for (int at = blockIdx.x; at < params.tasks.num_tasks;) {
            const Task& task = params.tasks.tasks[at];
            next = NextTask(task.take);
            const int heads = C::by_query ? params.heads_q : params.heads_kv;
            batch = task.head / heads;
            head_q = task.head - batch * heads, head_kv = C::by_query ? head_q / params.group : head_q;
            if (task.take) {
                load_task(task, at);
            } else {
                next.ask(params.next_task, is_leader);
                store_empty(task);
            }
            at = params.next_task ? int(tell_producers<C::producers>(next.taken, is_leader, shared.next, turn,
                                                                     1 + C::warpgroups)) +
                                        int(gridDim.x)
                                  : params.tasks.num_tasks;
        }
        announce({0, 0, 0, end_of_work, 0, 0});
    }

    // Tokens that see nothing, or that nobody sees. Consumers never hear of them, as in the forward.
    __device__ __forceinline__ void store_empty(const Task& task) {
        if constexpr (C::any_order) {
            end_empty(task);
            return;
        }
        const int first = task.row * C::own_rows;
        const int rows = min(C::own_rows, (C::by_query ? params.seq_q : params.seq_k) - first);
        if constexpr (C::by_query) {
            clear_rows<Element>(params.dq, batch, head_q, first, rows, params.head_dim, lane);
        } else {
            if (C::has_dp) clear_rows<Element>(params.dk, batch, head_kv, first, rows, params.head_dim, lane);
            if (C::sums_p && !params.value_in_key)
                clear_rows<Element>(params.dv, batch, head_kv, first, rows, params.head_dim_v, lane);
        }
    }

    __device__ __forceinline__ void end_empty(const Task& task) {
        if (!params.piece.is_first || !params.piece.is_last) {
            for (int place = int(threadIdx.x) / 32 % 4; place < C::own_rows; place += C::producers / 32)
                hand_on(task, place);
            return;
        }
        const any::OwnTokens own = own_tokens<C>(params.layout, task.row);
        if constexpr (C::by_query)
            clear_tokens<C::own_rows, Element>(own, params.dq, batch, head_q, params.head_dim);
        else if constexpr (C::has_dp)
            clear_tokens<C::own_rows, Element>(own, params.dk, batch, head_kv, params.head_dim);
        if (C::sums_p && !params.value_in_key)
            clear_tokens<C::own_rows, Element>(own, params.dv, batch, head_kv, params.head_dim_v);
    }
    // A token by a warp: other pieces of the pattern may have sums for it.
    __device__ __forceinline__ void hand_on(const Task& task, int place) {
        const int token = own_tokens<C>(params.layout, task.row).at(place);
        if (token == no_token) return;
        GradientRepair<C> nothing{params, lane, batch, C::has_dp, C::sums_p};
        if constexpr (C::by_query)
            nothing.store_query(task, head_q, token, place);
        else
            nothing.store_key(task, head_kv, token, place);
    }

    // Queries walk their own list, keys those of all query heads of the group.
    __device__ __forceinline__ void load_task(const Task& task, int index) {
        const LayoutView& layout = params.layout;
        announce({batch, C::by_query ? head_q : head_kv, task.row, C::steps * task.take, task.part, index});
        const auto load = [&](int head, int block, int mask) {
            next.begin_block(params.next_task, is_leader);
            head_q = head - batch * params.heads_q;
            for (int n = 0; n < C::steps; ++n) load_step(block, n, mask);
        };
        if constexpr (C::by_query) {
            int skip = task.skip, left = task.take;
            const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
            each_block(layout.by_query, list, task.row, lane, task.head, 1, skip, left, load);
        } else {
            each_block_of_group(layout, task, params.group, lane, load);
        }
    }

    // Publishes a task with its own tokens, or the end of work with none.
    __device__ __forceinline__ void announce(const TaskMessage& message) {
        uint64_t* full = &shared.own_full[tile.index];
        ptx::mbarrier_wait(&shared.own_empty[tile.index], tile.phase ^ 1);
        if (is_leader) shared.task[tile.index] = message;
        if (message.count != end_of_work)
            load_own(message, full);
        else if constexpr (C::any_order)
            for (int i = 0; i < C::own_tiles; ++i) arrive_without_tile(full);
        else if (is_leader)
            ptx::mbarrier_arrive(full);
        tile.advance();
    }

    __device__ __forceinline__ void load_own(const TaskMessage& task, uint64_t* full) {
        auto& own = shared.own[tile.index];
        if constexpr (C::any_order) {
            const auto load = [&]<int Panels>(const runtime::ResidueMaps& maps, const TensorView& view, int columns,
                                              uint8_t* to) {
                load_rows<C::own_rows, Panels, Element>(source<C::by_query>(maps, view, columns), task.row, 0,
                                                        task.batch, task.head, nullptr, to, full);
            };
            load.template operator()<C::panels>(params.maps.own, C::by_query ? params.q : params.k, params.head_dim,
                                                own[0]);
            if constexpr (C::has_dp)
                load.template operator()<C::v_panels>(params.maps.own_second, C::by_query ? params.dout : params.v,
                                                      params.head_dim_v, own[C::panels]);
        } else if (is_leader) {
            ptx::mbarrier_arrive_expect(full, C::tile_bytes);
            for (int panel = 0; panel < C::panels + C::second_panels; ++panel) {
                const bool is_first = panel < C::panels;
                ptx::tma_load_4d(own[panel], is_first ? &params.maps.own : &params.maps.own_second,
                                 C::panel_columns * (is_first ? panel : panel - C::panels), task.head,
                                 task.row * C::own_rows, task.batch, full);
            }
        }
    }

    // An operand along the queries, or along the keys.
    template <bool IsQueries>
    __device__ __forceinline__ TileSource source(const runtime::ResidueMaps& maps, const TensorView& view,
                                                 int columns) const {
        const LayoutView& layout = params.layout;
        return {maps,    view, IsQueries ? layout.queries : layout.keys, IsQueries ? layout.seq_q : layout.seq_k,
                C::block_q, columns};
    }

    // Part n of a block of the other axis.
    __device__ __forceinline__ void load_step(int block, int n, int mask) {
        QueryStats stats[C::step / 32];  // asked for before the slot is free
        const bool has_stats = !C::by_query && threadIdx.x % C::producers < 32;
        if (has_stats)
#pragma unroll
            for (int i = 0; i < C::step / 32; ++i) {
                const int place = n * C::step + lane + 32 * i;
                const int token = C::any_order ? any::token_at(params.layout.queries, C::block_q, params.layout.seq_q,
                                                               block, place)
                                               : block * C::block_q + place;
                stats[i] = query_stats<C>(params, batch * params.heads_q + head_q, token);
            }
        ptx::mbarrier_wait(&shared.other_empty[slot.index], slot.phase ^ 1);
        if (has_stats)
#pragma unroll
            for (int i = 0; i < C::step / 32; ++i) {
                shared.offset[slot.index][lane + 32 * i] = stats[i].offset;
                shared.delta[slot.index][lane + 32 * i] = stats[i].delta;
            }
        __syncwarp();  // all lanes' before the leader tells the consumers
        if (is_leader) shared.mask[slot.index] = mask == full_block ? full_block : mask * C::steps + n;
        load_other(block, n, params.maps.other, C::by_query ? params.k : params.q, params.head_dim,
                   shared.other[slot.index], &shared.other_full[slot.index]);
        slot.advance();
        ptx::mbarrier_wait(&shared.second_empty[second.index], second.phase ^ 1);
        load_other(block, n, params.maps.other_second, C::by_query ? params.v : params.dout, params.head_dim_v,
                   shared.other_second[second.index], &shared.second_full[second.index]);
        second.advance();
    }

    template <int Panels, class Maps>
    __device__ __forceinline__ void load_other(int block, int n, const Maps& map, const TensorView& view, int columns,
                                               uint8_t (&to)[Panels][C::step_bytes], uint64_t* full) {
        const int head = C::by_query ? head_kv : head_q;
        if constexpr (C::any_order) {
            load_rows<C::step, Panels, Element>(source<!C::by_query>(map, view, columns), block, n * C::step, batch,
                                                head, nullptr, to[0], full);
        } else if (is_leader) {
            ptx::mbarrier_arrive_expect(full, Panels * C::step_bytes);
            for (int panel = 0; panel < Panels; ++panel)
                ptx::tma_load_4d(to[panel], &map, C::panel_columns * panel, head, block * C::block_q + n * C::step,
                                 batch, full);
        }
    }
};

// ---- consumer: one warpgroup owns 64 tokens ----
template <class C>
struct ApartConsumer {
    using Tag = tile::MatrixTag<C::dtype>;
    using Words = uint32_t[C::step / 16][4];    // an a operand: steps of 16 tokens
    static constexpr int values = C::step / 2;  // a thread's of s
    static constexpr int of_ds = C::has_dp ? C::head_dim / 2 : 2, of_p = C::sums_p ? C::head_dim_v / 2 : 2;

    const ApartParams<C::any_order>& params;
    ApartShared<C>& shared;
    const int warpgroup, thread;  // of the warpgroup
    Cursor<C::tiles> tile;
    Cursor<C::slots> slot;
    Cursor<C::second_slots> second;
    int held = -1;      // a tile that this warp's sums are leaving
    int noted = -1;     // the last task of which this warp must repair rows
    QueryStats own[2];  // of the thread's two rows, where own tokens are queries
    float s[values], r_ds[of_ds], r_p[of_p];

    __device__ __forceinline__ void run() {
        for (;;) {
            wait(&shared.own_full[tile.index], tile.phase);
            const TaskMessage task = shared.task[tile.index];
            __syncwarp();  // all lanes have read the message before its tile can be released
            if (task.count == end_of_work) break;
            if constexpr (C::by_query)
                for (int h = 0; h < 2; ++h) own[h] = stats_of(task, tile::fragment_row(thread, 2 * h));
            wait(&shared.other_full[slot.index], slot.phase);
            begin_scores();
            ptx::wgmma_wait<0>();
            for (int n = 0; n < task.count - 1; ++n) step<false>(n == 0);
            step<true>(task.count == 1);
            store(task);
            tile.advance();
        }
        repair_noted();
    }

    __device__ __forceinline__ void wait(uint64_t* full, uint32_t phase) const {
        wait_tile<C>(full, phase, params.has_copies);
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
        begin_product<C::head_dim>(s, shared.own[tile.index][0], shared.other[slot.index][0]);
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
    // Its scores are in s; leaves with those of the next, unless it is the task's last.
    template <bool IsLast>
    __device__ __forceinline__ void step(bool is_first) {
        float dp[values];
        const int at = slot.index, second_at = second.index;
        wait(&shared.second_full[second_at], second.phase);
        if constexpr (C::has_dp)
            begin_product<C::head_dim_v>(dp, shared.own[tile.index][C::panels], shared.other_second[second_at][0]);
        // Read by the lane that will release the slot, so that nobody reads what the producer already overwrites.
        const int mask = __shfl_sync(~0u, thread % 32 ? 0 : shared.mask[at], 0);
        uint32_t word = ~0u;
        if (mask != full_block) word = __ldg(words_of(mask) + warpgroup * 128 + thread);
        Words words;
        make_probabilities(at, mask, word, words);
        if (held >= 0) [[unlikely]]
            wait_for_copies();
        if constexpr (C::sums_p) {
            begin_sum(r_p, words, shared.other_second[second_at][0], is_first);
            if constexpr (C::has_dp) {
                ptx::wgmma_wait<1>();
                finish_ds(at, dp, is_first);
            }
            next_scores<IsLast>();
            ptx::wgmma_wait<0>();
            release(&shared.second_empty[second_at]);
        } else {
            ptx::wgmma_wait<0>();
            release(&shared.second_empty[second_at]);
            finish_ds(at, dp, is_first);
            next_scores<IsLast>();
            ptx::wgmma_wait<0>();
        }
        second.advance();
        release(&shared.other_empty[at]);
    }
    __device__ __forceinline__ void finish_ds(int at, const float (&dp)[values], bool is_first) {
        multiply_by_dp(at, dp);
        Words words;
        tile::pack_tile<C::dtype>(s, words);
        begin_sum(r_ds, words, shared.other[at][0], is_first);
    }
    template <bool IsLast>
    __device__ __forceinline__ void next_scores() {
        slot.advance();
        if constexpr (!IsLast) {
            wait(&shared.other_full[slot.index], slot.phase);
            begin_scores();
        }
    }

    // The step's part of a mask, where tiles of keys come first, then those of queries.
    __device__ __forceinline__ const uint32_t* words_of(int mask) const {
        constexpr int half = C::block_q * C::block_k / 32;
        return mask_words(params.layout, mask / C::steps) + (C::by_query ? half : 0) +
               mask % C::steps * C::warpgroups * 128;
    }

    // s becomes p, and its words where they are wanted; with a cap s becomes what ds is a multiple of.
    __device__ __forceinline__ void make_probabilities(int at, int mask, uint32_t word, Words& words) {
        if (!params.has_cap) [[likely]] {
#pragma unroll
            for (int i = 0; i < values; ++i)
                s[i] = ptx::exp2_approx(fmaf(s[i], params.scale_log2, stat(shared.offset, at, i, &QueryStats::offset)));
            if (mask != full_block) [[unlikely]]
                tile::keep(s, word);
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
        if (thread % 32 == 0) {
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(&shared.own_empty[held]);
        }
        held = -1;
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
        held = tile.index;
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
        return params.notes + (size_t(task) * C::warpgroups + warpgroup) * 4 + thread / 32;
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
        return shared.own[tile.index][panel] + (4 * warpgroup + thread / 32) * C::warp_bytes;
    }
    __device__ __forceinline__ void stage_sums() {
        if constexpr (C::has_dp) stage(r_ds, staged(0));
        if constexpr (C::sums_p) stage(r_p, staged(p_panel));
    }

    __device__ __forceinline__ void store_whole(const TaskMessage& task) {
        stage_sums();
        ptx::fence_async_shared();
        __syncwarp();  // the warp's rows are written before lane 0 sends them
        if (thread % 32) return;
        if constexpr (C::has_dp) send<C::panels>(params.maps.ds, task, 0);
        if (C::sums_p && !params.value_in_key) send<C::v_panels>(params.maps.p, task, p_panel);
        ptx::bulk_commit();
    }
    // A warp's rows from staged panels on.
    template <int Panels>
    __device__ __forceinline__ void send(const CUtensorMap& map, const TaskMessage& task, int first) const {
        const int row = task.row * C::own_rows + row_in_tile();
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_store_4d(&map, C::panel_columns * panel, task.head, row, task.batch, staged(first + panel));
    }
    template <int Panels>
    __device__ __forceinline__ void send(const runtime::ResidueMaps& maps, const TaskMessage& task, int first) const {
        const HomePlace at(maps, own_axis(), C::own_rows, task.row);
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_store_5d(at.map, C::panel_columns * panel, task.head, at.residue, at.first + row_in_tile(),
                              task.batch, staged(first + panel));
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
            token[h] = odd >> in_warpgroup % 16 & 1
                           ? no_token
                           : own.at(warpgroup * C::warpgroup_rows + in_warpgroup);
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
#pragma unroll
        for (int i = 0; i < Size; i += 2) {
            const int h = tile::row_of(i), column = tile::fragment_column(thread, i);
            if (token[h] == no_token || column >= columns) continue;
            float2* const at = reinterpret_cast<float2*>(carried + row[h] * columns + column);
            if (!params.piece.is_first) sums[i] += at->x, sums[i + 1] += at->y;
            if (!params.piece.is_last) *at = make_float2(sums[i], sums[i + 1]);
        }
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
            const int column = tile::fragment_column(thread, i);
            if (column < columns) to[tile::fragment_row(thread, i) * width + column] = sums[i];
        }
    }

    // The rows noted, over what the copy engine has stored of them.
    __device__ __forceinline__ void repair_noted() {
        if (thread % 32 == 0) ptx::bulk_wait();
        __syncwarp();  // lane 0's stores are done before others write there
        while (noted >= 0) {
            const int2 note = *note_of(noted);
            const Task task = params.tasks.tasks[noted];
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

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    apart_kernel(const __grid_constant__ ApartParams<C::any_order> params) {
    ApartShared<C>& shared = *ptx::swizzled_shared<ApartShared<C>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::tiles; ++i) {
            ptx::mbarrier_init(&shared.own_full[i], C::own_tiles * C::tile_counts);
            ptx::mbarrier_init(&shared.own_empty[i], C::warps);
        }
        for (int i = 0; i < C::slots; ++i) {
            ptx::mbarrier_init(&shared.other_full[i], C::tile_counts);
            ptx::mbarrier_init(&shared.other_empty[i], C::warps);
        }
        for (int i = 0; i < C::second_slots; ++i) {
            ptx::mbarrier_init(&shared.second_full[i], C::tile_counts);
            ptx::mbarrier_init(&shared.second_empty[i], C::warps);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    if (warpgroup == C::warpgroups) {
        ptx::give_registers<C::producer_registers>();
        const int thread = int(threadIdx.x) - C::consumers;
        if (thread < C::producers) ApartProducer<C>{params, shared, thread % 32, thread == 0}.run();
    } else {
        ptx::take_registers<C::consumer_registers>();
        ApartConsumer<C>{params, shared, warpgroup, int(threadIdx.x % 128)}.run();
    }
}

// ---- launch ----
template <Dtype D, int HeadDim, int HeadDimV, bool AnyOrder>
struct ApartLaunch {
    const BackwardArgs& args;
    const Problem& p;
    const BlockBackwardApartSpace space;

    explicit ApartLaunch(const BackwardArgs& args)
        : args(args), p(*args.problem), space(p, args.layout, args.tasks, args.second_tasks) {}

    void clear() const {
        runtime::clear(static_cast<char*>(args.workspace) + space.counters, space.notes - space.counters, args.stream);
    }

    // The walk number `walk` of this call.
    template <Sums S>
    void run(int walk) const {
        using C = ApartConfig<D, HeadDim, HeadDimV, S, AnyOrder>;
        char* const workspace = static_cast<char*>(args.workspace);
        const TasksView& tasks = C::by_query ? args.second_tasks : args.tasks;
        ApartParams<AnyOrder> params;
        fill(params, args, tasks);
        params.notes = reinterpret_cast<int2*>(workspace + space.notes);
        params.has_copies = args.layout.queries.listed + args.layout.keys.listed > 0;
        make_maps<C>(params.maps);
        const int blocks = std::min(tasks.num_tasks, runtime::count_processors(args.device));
        if (blocks < tasks.num_tasks) params.next_task = reinterpret_cast<unsigned*>(workspace + space.counters) + walk;
        runtime::launch(apart_kernel<C>, {unsigned(blocks), unsigned(C::threads), sizeof(ApartShared<C>)}, args.stream,
                        params);
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

    template <Sums S>
    static void prepare() {
        using C = ApartConfig<D, HeadDim, HeadDimV, S, AnyOrder>;
        runtime::prepare(apart_kernel<C>, sizeof(ApartShared<C>));
    }
};

template <Dtype D, int HeadDim, int HeadDimV, bool AnyOrder>
void run_apart(const BackwardArgs& args) {
    const ApartLaunch<D, HeadDim, HeadDimV, AnyOrder> launch(args);
    launch.clear();
    any::BlockBackward<D>::rows(args);
    if constexpr (HeadDim <= joined_head_dim) {
        launch.template run<Sums::dk_dv>(0);
    } else {
        launch.template run<Sums::dk>(0);
        launch.template run<Sums::dv>(1);
    }
    any::BlockBackward<D>::join_keys(args);
    if (args.layout.queries.listed && !args.layout.queries.away) {
        any::BlockBackward<D>::by_query(args);  // queries that stand in several tiles have several sums
    } else {
        launch.template run<Sums::dq>(2);
        any::BlockBackward<D>::join_queries(args);
    }
    any::BlockBackward<D>::sinks(args);
}

template <Dtype D, int HeadDim, int HeadDimV, bool AnyOrder>
void prepare_apart() {
    using Launch = ApartLaunch<D, HeadDim, HeadDimV, AnyOrder>;
    if constexpr (HeadDim <= joined_head_dim) {
        Launch::template prepare<Sums::dk_dv>();
    } else {
        Launch::template prepare<Sums::dk>();
        Launch::template prepare<Sums::dv>();
    }
    Launch::template prepare<Sums::dq>();
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs& args) {
    static_assert(BlockQ == 128 && BlockK == 128, "tiles of own tokens are blocks");
    if (args.piece.is_whole() && is_consecutive(args.layout.queries) && is_consecutive(args.layout.keys))
        run_apart<D, HeadDim, HeadDimV, false>(args);
    else
        run_apart<D, HeadDim, HeadDimV, true>(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackwardApart<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    const runtime::CurrentDevice current(device);
    prepare_apart<D, HeadDim, HeadDimV, false>();
    prepare_apart<D, HeadDim, HeadDimV, true>();
    runtime::prepare_tensor_maps();
}

}  // namespace spattn::sm90
