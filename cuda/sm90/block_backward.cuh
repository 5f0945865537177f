// SPDX-License-Identifier: MIT
//
//     sT = k qT,  pT = exp2(scale_log2 sT - lse),  dv += pT dout
//     dpT = v doutT,  dsT = pT (dpT - delta),  dk += dsT q,  dq += ds k
//
// over the blocks of queries that a layout lists for each block of keys. lse and delta of the rows come from any's
// kernel before.
//
//   grid      one CTA an SM, persistent; tasks from a counter, in the plan's order
//   producer  one warp walks the runs of all query heads of the group and fills two rings with q and dout by TMA, q
//             with what belongs to its rows: lse, delta, and which tile of dq; the next task's k and v go ahead
//   consumers two warpgroups, 64 keys each, dk and dv in registers. pT and dsT are the a operands of dv and dk as they
//             stand. For dq, whose sum goes over the keys of both, dsT goes through shared memory. dq is that of the
//             block before, so that neither waits for the other's part in step. A tile of 64 rows is made by one of
//             them, in turn with the other; of 128 rows each makes half
//
//               tensor   | dpT | dv | dk | dq before | next sT |
//               the rest   pT    dsT              dq before to memory
//
//   dq        sums lie in shared memory, and in memory, as a warp's accumulators do (tile/fragment.h): the copy engine
//             adds 4 or 8 KiB a warp and no thread waits for L2. A kernel before clears the sums, one after turns them
//             into elements. Which CTA adds first is chance, so last bits differ between calls; or, in order, two warps
//             more send whole tiles when it is their turn, and nothing is cleared (sums_in_order.cuh)
//   isolation 0 * NaN is NaN: a row of dk, dv or dq that is not finite may owe that to a pair that is not kept. Such
//             rows are made again from kept pairs alone, of keys when nothing else is left, of queries at the end
//
// What binds is shared memory, 128 bytes a cycle. Of a 64 x 128 block with head_dim 128, sT and dpT read 512 cycles
// each, dq 384 (512 if each warpgroup made half of a tile's columns, for both would then read all of ds), dv and dk 256
// each; dsT takes 128, dq on its way 512, q and dout 256, what belongs to rows 128: 2944, when the tensor
// unit needs 2560. full_16k takes 3400. L2 takes the sums of dq, 32 KiB a block, in 2260. To clear them, delta and
// reading them take 30, 42 and 57 us of window1k_16k's 747: they run at 4.5, 3.2 and 3.5 TB/s.
//
// Measured (H200, bf16, d128, L2 cold, TFLOP/s of 10 pairs d, 2026-11, GEMM 790, as sums come / in order): full_16k 668
// / 643, causal_16k 661 / 639, window1k_16k 446 / 443, window4k_128k 624 / 621, streaming_16k 430 / 409, streaming_128k
// 440 / 439; as they come bsr128_10_16k 542, causal_4k with 64 heads on 8 508.
//
// Tried and dropped (full_16k, in one run): sums of dq from registers by red.v4, whose queue the softmax's reads wait
// in (-11 %); both warpgroups in step, dq of the block at hand (-6 %); dk behind ds's way to shared memory (-5 %);
// scores of the next block before dq (-6 %); offsets and deltas side by side, sixteen bytes a read (-8 %). In order:
// a warp that turns sums into elements as soon as they are complete, while L2 has them (window1k_16k 814 -> 1082 us).
// As they come: parts still to come counted in memory, and 16 rows whose last one is there turned into elements by two
// idle warps of any CTA (window1k_16k 760 -> 800 us, full_16k 8270 -> 9070). To tell which additions are complete costs
// the consumers 7 to 9 % by releases in shared memory. With nothing told, and so no dq written, window1k_16k takes 711
// us; the warps' reading and writing adds 40, probably since the sums keep L2 busy.
// 232 registers a consumer and 40 a producer, which spill nothing (-19 %: 240 spill a little, but let the compiler mix
// more). By the writers below, the first part stored and others added as they come, so that nothing is cleared:
// window1k_16k +4 %, streaming_128k +3 %, but full_16k -5 %, bsr128_10_16k -40 %.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "any/block_backward.h"
#include "any/element.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "runtime/launch.h"
#include "runtime/tensor_map.h"
#include "sm90/block_backward.h"
#include "sm90/gradient.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/sums_in_order.cuh"
#include "tile/fragment.h"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

// ---- configuration ----
// InOrder: parts of dq are added in the order of keys.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK, bool InOrder>
struct BackwardConfig : TileConfig<D, HeadDim, HeadDimV> {
    using Base = TileConfig<D, HeadDim, HeadDimV>;
    using Base::head_dim, Base::head_dim_v, Base::row_bytes, Base::v_panels, Base::warp_bytes;
    using MaskWord = std::conditional_t<BlockQ == 128, uint64_t, uint32_t>;  // a thread's bits of a block
    static constexpr bool in_order = InOrder;
    static constexpr int block_q = BlockQ, block_k = BlockK, warpgroups = block_k / Base::warpgroup_rows;
    static constexpr int warps = 4 * warpgroups, consumers = 32 * warps, threads = consumers + 128;
    static constexpr int q_bytes = block_q * row_bytes, k_bytes = block_k * row_bytes;  // of a panel
    static constexpr int q_panels = block_q / Base::panel_columns;                      // of ds
    static constexpr int k_tiles = 2, slots = 2, ds_tiles = 2;
    static constexpr int writers = 2;  // warps that send dq, in order
    // A tile of dq: a warpgroup makes all of it where it has 64 rows, in turn with the other; else each makes 64 rows.
    static constexpr bool dq_in_turn = block_q == Base::warpgroup_rows;
    static constexpr int dq_tile = block_q * head_dim, dq_warp = Base::warp_rows * head_dim, dq_values = dq_warp / 32;
    static constexpr int dq_warps = dq_tile / dq_warp, dv_bytes = Base::v_panels * Base::warp_bytes;  // dv: a warp's
    static constexpr int producer_registers = 24, consumer_registers = 240;
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, 1),
                  "roles share what the launch gives");
    static_assert(head_dim_v <= head_dim, "value_in_key adds dv to dk's columns");
    static_assert(block_q == 64 || block_q == 128, "a thread's mask of a block is one word");
    static_assert(warpgroups == 2 && ds_tiles == 2, "a warpgroup makes dq of one tile of ds, or half of each");
    static_assert((dq_in_turn ? warpgroups : 1) * dv_bytes <= dq_warp * int(sizeof(float)), "dv leaves where dq does");
};

struct BlockBackwardParams : GradientParams {
    CUtensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map;  // boxes of one 64-column panel
    TasksView tasks;
    int2* notes;  // [task][warp]
    QuerySums sums;
    any::Divisor query_tiles;
};

// ---- shared memory ----
template <class C>
struct BackwardShared {
    uint8_t k[C::k_tiles][C::panels][C::k_bytes];  // a tile becomes its task's dk once all products are done
    uint8_t v[C::v_panels][C::k_bytes];
    uint8_t q[C::slots][C::panels][C::q_bytes];
    uint8_t dout[C::slots][C::v_panels][C::q_bytes];
    uint8_t ds[C::ds_tiles][C::q_panels][C::k_bytes];                 // [key][query]
    float dq[C::dq_warps][C::dq_warp];                                // on its way to memory; a task's dv, too
    float offset[C::slots][C::block_q], delta[C::slots][C::block_q];  // QueryStats
    TaskMessage task[C::k_tiles];
    int32_t mask[C::slots], dq_tile[C::slots];
    SumsQueue<C> sums;
    // Full: the producer with the bytes; consumers wait. Empty: one arrival a consumer warp; the producer waits.
    uint64_t k_full[C::k_tiles], k_empty[C::k_tiles];  // empty when dk has left
    uint64_t v_full, v_empty;
    uint64_t q_full[C::slots], q_empty[C::slots], dout_full[C::slots], dout_empty[C::slots];
    // Consumers wait for each other: a tile of ds is full when all warps have written, and empty when those that make
    // its dq have read it. dq is empty when the warpgroup whose turn it was has seen its copies leave.
    uint64_t ds_full[C::ds_tiles], ds_empty[C::ds_tiles], dq_empty;
};

// ---- producer ----
template <class C>
struct BackwardProducer {
    const BlockBackwardParams& params;
    BackwardShared<C>& shared;
    const int lane;
    Cursor<C::k_tiles> tile;
    Cursor<C::slots> slot;
    Cursor<1> v;
    unsigned told = 0;  // parts
    NextTask next{0};
    bool v_is_due = false;
    int batch, head_kv, key_row;  // of the task

    __device__ __forceinline__ void run() {
        if constexpr (C::in_order) next.ask(params.next_task, lane == 0);
        for (int at = C::in_order ? taken() : int(blockIdx.x); at < params.tasks.num_tasks; at = taken()) {
            const Task& task = params.tasks.tasks[at];
            next = NextTask(task.take);
            if (task.take) {
                load_task(task, at);
            } else {
                next.ask(params.next_task, lane == 0);
                store_empty(task);
            }
        }
        announce({0, 0, 0, end_of_work, 0, 0});
        if constexpr (C::in_order)
            for (int i = 0; i < C::writers; ++i) tell_writer(-1);
    }

    // In order, all tasks come from the counter: who waits for a task that was taken before must not have been there
    // first.
    __device__ __forceinline__ int taken() const {
        if (!params.next_task) return params.tasks.num_tasks;
        return int(__shfl_sync(~0u, next.taken, 0)) + (C::in_order ? 0 : int(gridDim.x));
    }

    // Keys that nobody sees. Consumers never hear of them, as in the forward.
    __device__ __forceinline__ void store_empty(const Task& task) {
        const int entry = task.head / params.heads_kv, head_kv = task.head - entry * params.heads_kv;
        const int first = task.row * C::block_k, rows = min(C::block_k, params.seq_k - first);
        using Element = typename C::Element;
        clear_rows<Element>(params.dk, entry, head_kv, first, rows, params.head_dim, lane);
        if (!params.value_in_key) clear_rows<Element>(params.dv, entry, head_kv, first, rows, params.head_dim_v, lane);
    }

    // Parts of a row are counted over the blocks of all heads of the group.
    __device__ __forceinline__ void load_task(const Task& task, int index) {
        batch = task.head / params.heads_kv;
        head_kv = task.head - batch * params.heads_kv;
        key_row = task.row * C::block_k;
        announce({batch, head_kv, task.row, task.take, task.part, index});
        each_block_of_group(params.layout, task, params.group, lane,
                            [&](int plane, int block, int mask) { load_block(plane, block, mask); });
    }

    // Publishes a task with its k, or the end of work with none. v follows the first q: it is needed later, and its one
    // tile is free later.
    __device__ __forceinline__ void announce(const TaskMessage& message) {
        ptx::mbarrier_wait(&shared.k_empty[tile.index], tile.phase ^ 1);
        v_is_due = message.count != end_of_work;
        if (lane == 0) {
            uint64_t* full = &shared.k_full[tile.index];
            shared.task[tile.index] = message;
            if (v_is_due)
                load(shared.k[tile.index], &params.k_map, message.head, key_row, full);
            else
                ptx::mbarrier_arrive(full);
        }
        tile.advance();
    }

    __device__ __forceinline__ void load_v() {
        ptx::mbarrier_wait(&shared.v_empty, v.phase ^ 1);
        if (lane == 0) load(shared.v, &params.v_map, head_kv, key_row, &shared.v_full);
        v.advance();
        v_is_due = false;
    }

    __device__ __forceinline__ void load_block(int plane, int block, int mask) {
        next.begin_block(params.next_task, lane == 0);
        const int head = plane - batch * params.heads_q;
        QueryStats stats[C::block_q / 32];  // asked for before the slot is free
#pragma unroll
        for (int i = 0; i < C::block_q / 32; ++i)
            stats[i] = query_stats<C>(params, plane, block * C::block_q + lane + 32 * i);
        ptx::mbarrier_wait(&shared.q_empty[slot.index], slot.phase ^ 1);
#pragma unroll
        for (int i = 0; i < C::block_q / 32; ++i) {
            shared.offset[slot.index][lane + 32 * i] = stats[i].offset;
            shared.delta[slot.index][lane + 32 * i] = stats[i].delta;
        }
        __syncwarp();  // all lanes' before lane 0 tells the consumers
        if (lane == 0) {
            shared.mask[slot.index] = mask;
            if constexpr (!C::in_order) shared.dq_tile[slot.index] = plane * params.layout.by_query.rows + block;
            load(shared.q[slot.index], &params.q_map, head, block * C::block_q, &shared.q_full[slot.index]);
        }
        if constexpr (C::in_order) tell_writer(plane * params.layout.by_query.rows + block);
        if (v_is_due) load_v();
        ptx::mbarrier_wait(&shared.dout_empty[slot.index], slot.phase ^ 1);
        if (lane == 0)
            load(shared.dout[slot.index], &params.dout_map, head, block * C::block_q, &shared.dout_full[slot.index]);
        slot.advance();
    }

    // Which tile's part comes next; -1 after the last.
    __device__ __forceinline__ void tell_writer(int tile) {
        const int at = told++ % SumsQueue<C>::told_ahead;
        if (lane) return;
        shared.sums.part[at] = {tile, key_row / C::block_k};
        ptx::mbarrier_arrive(&shared.sums.told[at]);
    }

    template <int Panels, int Bytes>
    __device__ __forceinline__ void load(uint8_t (&to)[Panels][Bytes], const CUtensorMap* map, int of_head, int row,
                                         uint64_t* full) {
        ptx::mbarrier_arrive_expect(full, Panels * Bytes);
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_load_4d(to[panel], map, C::panel_columns * panel, of_head, row, batch, full);
    }
};

// ---- consumer: one warpgroup owns 64 keys ----
// HasCap: with a softcap, whose code in the middle of the loop would cost who has none.
template <class C, bool HasCap>
struct BackwardConsumer {
    using Tag = tile::MatrixTag<C::dtype>;
    static constexpr int values = C::block_q / 2;  // a thread's of sT
    using Words = uint32_t[C::block_q / 16][4];    // an a operand: steps of 16 queries
    static constexpr int all_consumers = 1;        // a named barrier

    const BlockBackwardParams& params;
    BackwardShared<C>& shared;
    const int warpgroup, thread;  // of the warpgroup
    Cursor<C::k_tiles> tile;
    Cursor<1> v;
    Cursor<C::slots> slot;
    Cursor<C::ds_tiles> ds, ds_before;  // of this block, and of the one before, whose dq is made now
    Cursor<2> turn;                     // at shared.dq: a block's
    int dq_tile;                        // of the block before
    int held = -1;                      // a tile of k that this warp's dk is leaving
    int noted = -1;                     // the last task of which this warp must repair rows
    float s[values], r_dk[C::head_dim / 2], r_dv[C::head_dim_v / 2];

    __device__ __forceinline__ void run() {
        for (;;) {
            ptx::mbarrier_wait(&shared.k_full[tile.index], tile.phase);
            const int count = shared.task[tile.index].count;
            if (count == end_of_work) break;
            ptx::mbarrier_wait(&shared.q_full[slot.index], slot.phase);
            begin_scores(slot.index);
            ptx::wgmma_wait<0>();
            for (int n = 0; n < count - 1; ++n) step<false>(n == 0);
            step<true>(count == 1);
            last_dq();
            store();
            tile.advance();
        }
        repair_noted();
    }

    // ---- products, begun ----
    // sT = k qT
    __device__ __forceinline__ void begin_scores(int index) {
        const uint32_t a = descriptor(shared.k[tile.index][0] + warpgroup * C::warpgroup_bytes);
        const uint32_t b = descriptor(shared.q[index][0]);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::head_dim / 16; ++i)
            ptx::wgmma(s, a + (i / 4) * (C::k_bytes / 16) + (i % 4) * 2, b + (i / 4) * (C::q_bytes / 16) + (i % 4) * 2,
                       i > 0, Tag{});
        ptx::wgmma_commit();
    }
    // dpT = v doutT
    __device__ __forceinline__ void begin_dp(float (&dp)[values]) {
        const uint32_t a = descriptor(shared.v[0] + warpgroup * C::warpgroup_bytes);
        const uint32_t b = descriptor(shared.dout[slot.index][0]);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::head_dim_v / 16; ++i)
            ptx::wgmma(dp, a + (i / 4) * (C::k_bytes / 16) + (i % 4) * 2, b + (i / 4) * (C::q_bytes / 16) + (i % 4) * 2,
                       i > 0, Tag{});
        ptx::wgmma_commit();
    }
    // sum += left right: dv += pT dout, dk += dsT q
    template <int Size>
    __device__ __forceinline__ void begin_sum(float (&sum)[Size], const Words& left, const uint8_t* right, bool first) {
        const uint32_t b = ptx::wgmma_descriptor(right, C::q_bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::block_q / 16; ++i)
            ptx::wgmma_transposed(sum, left[i], b + i * 128, i > 0 || !first, Tag{});
        ptx::wgmma_commit();
    }
    // This warpgroup's rows of dq = ds k.
    __device__ __forceinline__ void begin_dq(float (&dq)[C::dq_values]) {
        const uint32_t a = ptx::wgmma_descriptor(shared.ds[ds_before.index][C::dq_in_turn ? 0 : warpgroup], 0);
        const uint32_t b = ptx::wgmma_descriptor(shared.k[tile.index][0], C::k_bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::block_k / 16; ++i) ptx::wgmma_transposed(dq, a + i * 128, b + i * 128, i > 0, Tag{});
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ bool makes_dq() const { return !C::dq_in_turn || ds_before.index == warpgroup; }
    __device__ __forceinline__ static uint32_t descriptor(const void* at) { return ptx::wgmma_descriptor(at, 0); }

    // ---- one block of queries ----
    // Its scores are in s; leaves with those of the next, unless it is the task's last. Each kind of block has code of
    // its own, so that no product begins in a branch, around which the compiler may let all products end.
    template <bool IsLast>
    __device__ __forceinline__ void step(bool is_first) {
        if (!is_first && makes_dq())
            step<IsLast, true>(false);
        else
            step<IsLast, false>(is_first);
    }
    template <bool IsLast, bool MakesDq>
    __device__ __forceinline__ void step(bool is_first) {
        float dp[values];
        const int at = slot.index;
        if (is_first) ptx::mbarrier_wait(&shared.v_full, v.phase);
        ptx::mbarrier_wait(&shared.dout_full[at], slot.phase);
        begin_dp(dp);
        // Read by the lane that will release the slot, so that nobody reads what the producer already overwrites.
        const int mask = __shfl_sync(~0u, thread % 32 ? 0 : shared.mask[at], 0);
        const int next_dq_tile = C::in_order ? 0 : __shfl_sync(~0u, thread % 32 ? 0 : shared.dq_tile[at], 0);
        typename C::MaskWord word = ~typename C::MaskWord(0);
        if (mask != full_block) {
            const uint32_t* words = mask_words(params.layout, mask) + warpgroup * 128 + thread;
            word = __ldg(words);
            if constexpr (C::block_q == 128) word |= uint64_t(__ldg(words + C::warpgroups * 128)) << 32;
        }
        Words words;
        make_probabilities(at, mask, word, words);
        begin_sum(r_dv, words, shared.dout[at][0], is_first);
        if constexpr (!MakesDq)
            if (!is_first) yield_dq();
        ptx::wgmma_wait<1>();
        if constexpr (IsLast) {
            release(&shared.v_empty);
            v.advance();
        }
        multiply_by_dp(at, dp);
        Words ds_words;
        tile::pack_tile<C::dtype>(s, ds_words);
        begin_sum(r_dk, ds_words, shared.q[at][0], is_first);
        ptx::mbarrier_wait(&shared.ds_empty[ds.index], ds.phase ^ 1);
        tile::store_swizzled(ds_words, ptx::shared_address(shared.ds[ds.index][0] + warpgroup * C::warpgroup_bytes),
                             C::k_bytes, thread);
        ptx::fence_async_shared();
        release(&shared.ds_full[ds.index]);
        ptx::wgmma_wait<1>();  // dv: its operand's registers are needed
        release(&shared.dout_empty[at]);
        float dq[C::dq_values];
        if constexpr (MakesDq) {
            ptx::mbarrier_wait(&shared.ds_full[ds_before.index], ds_before.phase);
            begin_dq(dq);
            if constexpr (C::dq_in_turn) finish_dq(dq);  // all of a tile: no registers are left for scores beside it
        }
        slot.advance();
        if constexpr (!IsLast) {
            ptx::mbarrier_wait(&shared.q_full[slot.index], slot.phase);
            begin_scores(slot.index);
        }
        if constexpr (MakesDq && !C::dq_in_turn) finish_dq<IsLast ? 0 : 1>(dq);
        dq_tile = next_dq_tile;
        ds_before = ds;
        ds.advance();
        ptx::wgmma_wait<0>();
        release(&shared.q_empty[at]);
    }

    // What was begun, once all but so many later products are done.
    template <int Later = 0>
    __device__ __forceinline__ void finish_dq(const float (&dq)[C::dq_values]) {
        ptx::wgmma_wait<Later>();
        release(&shared.ds_empty[ds_before.index]);
        add_dq(dq);
    }
    // dq of a task's last block.
    __device__ __forceinline__ void last_dq() {
        if (!makes_dq()) {
            yield_dq();
            return;
        }
        float dq[C::dq_values];
        ptx::mbarrier_wait(&shared.ds_full[ds_before.index], ds_before.phase);
        begin_dq(dq);
        finish_dq(dq);
    }

    // s becomes p and its words; with a cap what ds is a multiple of.
    __device__ __forceinline__ void make_probabilities(int at, int mask, typename C::MaskWord word, Words& words) {
        const float* offsets = shared.offset[at] + 2 * (thread & 3);
        if constexpr (!HasCap) {
#pragma unroll
            for (int i = 0; i < values; i += 4) {
                const float2 two = *reinterpret_cast<const float2*>(offsets + 2 * i);
                s[i] = ptx::exp2_approx(fmaf(s[i], params.scale_log2, two.x));
                s[i + 1] = ptx::exp2_approx(fmaf(s[i + 1], params.scale_log2, two.y));
                s[i + 2] = ptx::exp2_approx(fmaf(s[i + 2], params.scale_log2, two.x));
                s[i + 3] = ptx::exp2_approx(fmaf(s[i + 3], params.scale_log2, two.y));
            }
            if (mask != full_block) [[unlikely]]
                tile::keep(s, word);
            tile::pack_tile<C::dtype>(s, words);
        } else {
#pragma unroll
            for (int i = 0; i < values; i += 2) {
                const float2 two = *reinterpret_cast<const float2*>(offsets + 2 * (i & ~3));
                const float c0 = tile::cap(s[i], params.into_cap), c1 = tile::cap(s[i + 1], params.into_cap);
                float p0 = ptx::exp2_approx(fmaf(c0, params.scale_log2, two.x));
                float p1 = ptx::exp2_approx(fmaf(c1, params.scale_log2, two.y));
                ptx::zero_unless(p0, word >> i & 1);
                ptx::zero_unless(p1, word >> (i + 1) & 1);
                words[i / 8][i % 8 / 2] = tile::pack<C::dtype>(p0, p1);
                s[i] = p0 * (1 - c0 * c0), s[i + 1] = p1 * (1 - c1 * c1);
            }
        }
    }

    // s becomes ds. A pair that is not kept has p = 0, which leaves NaN of its dp to the repairs.
    __device__ __forceinline__ void multiply_by_dp(int at, const float (&dp)[values]) {
        const float* deltas = shared.delta[at] + 2 * (thread & 3);
#pragma unroll
        for (int i = 0; i < values; i += 4) {
            const float2 two = *reinterpret_cast<const float2*>(deltas + 2 * i);
            s[i] *= fmaf(dp[i], dp_factor<C>, -two.x);
            s[i + 1] *= fmaf(dp[i + 1], dp_factor<C>, -two.y);
            s[i + 2] *= fmaf(dp[i + 2], dp_factor<C>, -two.x);
            s[i + 3] *= fmaf(dp[i + 3], dp_factor<C>, -two.y);
        }
    }

    // The copy engine adds, so that no thread waits for memory. A warp's part of a tile lies as its threads have it.
    __device__ __forceinline__ void add_dq(const float (&dq)[C::dq_values]) {
        float* const own = staged_dq();
        wait_for_copies();
        if constexpr (C::dq_in_turn) ptx::mbarrier_wait(&shared.dq_empty, turn.index);
        wait_for_writer();
        uint64_t* const full = &shared.sums.full[turn.index];
        turn.advance();
#pragma unroll
        for (int i = 0; i < C::dq_values; i += 4)
            *reinterpret_cast<float4*>(own + 32 * i + 4 * (thread % 32)) =
                make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        ptx::fence_async_shared();
        __syncwarp();  // all lanes' sums before one sends them
        if (!ptx::elect()) return;  // lane 0 by its number would have a loop around the copy: 0.5 % of full_16k
        if constexpr (C::in_order) return ptx::mbarrier_arrive(full);
        ptx::bulk_add(params.sums.tiles + size_t(dq_tile) * C::dq_tile + (own - shared.dq[0]), own,
                      C::dq_warp * sizeof(float));
        ptx::bulk_commit();
    }

    __device__ __forceinline__ float* staged_dq() const {
        return shared.dq[thread / 32 + (C::dq_in_turn ? 0 : 4 * warpgroup)];
    }

    // The other's turn: what this warp has sent from where that will write was read.
    __device__ __forceinline__ void yield_dq() {
        wait_for_copies();
        if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.dq_empty);
        turn.advance();
    }

    // In order: until the tile of the block before has been sent.
    __device__ __forceinline__ void wait_for_writer() const {
        const int before = turn.index ^ 1;
        if constexpr (C::in_order) ptx::mbarrier_wait(&shared.sums.sent[before], turn.phase ^ before);
    }

    // Until what this warp has sent was read.
    __device__ __forceinline__ void wait_for_copies() {
        if (ptx::elect()) {
            ptx::bulk_wait_read();
            if (held >= 0) ptx::mbarrier_arrive(&shared.k_empty[held]);
        }
        held = -1;
        __syncwarp();
    }

    __device__ __forceinline__ void release(uint64_t* empty) {
        __syncwarp();  // all lanes have read what may be overwritten
        if (thread % 32 == 0) ptx::mbarrier_arrive(empty);
    }

    // ---- a task's end ----
    __device__ __forceinline__ void store() {
        const TaskMessage task = shared.task[tile.index];
        __syncwarp();  // all lanes have read the message before its tile can be released
#pragma unroll
        for (int i = 0; i < C::head_dim_v / 2; ++i) r_dv[i] *= tile::unlift<C::dtype>;
#pragma unroll
        for (int i = 0; i < C::head_dim / 2; ++i) r_dk[i] *= tile::ds_unlift<C::dtype>;
        note_not_finite(task.index);
        wait_for_copies();
        wait_for_writer();
        ptx::named_barrier_sync(all_consumers, C::consumers);  // the other's products with k are done, its copies read
        if (task.part == whole_row)
            store_whole(task);
        else
            store_part(task);
        held = tile.index;
    }

    __device__ __forceinline__ void note_not_finite(int index) {
        float of_dk[2], of_dv[2];
        tile::find_not_finite(r_dk, of_dk);
        tile::find_not_finite(r_dv, of_dv);
        const bool is_finite[2] = {of_dk[0] + of_dv[0] == 0, of_dk[1] + of_dv[1] == 0};
        if (__all_sync(~0u, is_finite[0] && is_finite[1])) [[likely]]
            return;
        const unsigned bits = tile::rows_with(!is_finite[0], !is_finite[1]);
        if (thread % 32 == 0) *note_of(index) = make_int2(noted, int(bits));
        noted = index;
    }
    __device__ __forceinline__ int2* note_of(int task) const {
        return params.notes + (size_t(task) * C::warpgroups + warpgroup) * 4 + thread / 32;
    }

    __device__ __forceinline__ void store_whole(const TaskMessage& task) {
#pragma unroll
        for (int i = 0; i < C::head_dim / 2; ++i) {
            r_dk[i] *= params.scale;
            if (i < C::head_dim_v / 2 && params.value_in_key) r_dk[i] += r_dv[i];
        }
        const int warp = 4 * warpgroup + thread / 32;
        uint8_t* dk = shared.k[tile.index][0] + warp * C::warp_bytes;
        uint8_t* dv = reinterpret_cast<uint8_t*>(staged_dq()) + (C::dq_in_turn ? warpgroup * C::dv_bytes : 0);
        uint32_t dk_words[C::head_dim / 16][4], dv_words[C::head_dim_v / 16][4];
        tile::pack_tile<C::dtype>(r_dk, dk_words);
        tile::store_swizzled(dk_words, ptx::shared_address(dk), C::k_bytes, thread % 32);
        tile::pack_tile<C::dtype>(r_dv, dv_words);
        tile::store_swizzled(dv_words, ptx::shared_address(dv), C::warp_bytes, thread % 32);
        ptx::fence_async_shared();
        __syncwarp();  // the warp's rows are written before one lane sends them
        if (!ptx::elect()) return;
        const int row = task.row * C::block_k + C::warp_rows * warp;
        for (int panel = 0; panel < C::panels; ++panel)
            ptx::tma_store_4d(&params.dk_map, C::panel_columns * panel, task.head, row, task.batch,
                              dk + panel * C::k_bytes);
        for (int panel = 0; panel < C::v_panels && !params.value_in_key; ++panel)
            ptx::tma_store_4d(&params.dv_map, C::panel_columns * panel, task.head, row, task.batch,
                              dv + panel * C::warp_bytes);
        ptx::bulk_commit();
    }

    __device__ __forceinline__ void store_part(const TaskMessage& task) {
        const int width = params.head_dim + params.head_dim_v;
        float* part =
            params.space.parts_key + (size_t(task.part) * C::block_k + warpgroup * C::warpgroup_rows) * size_t(width);
#pragma unroll
        for (int i = 0; i < C::head_dim / 2; ++i) {
            const int column = tile::fragment_column(thread, i);
            if (column < params.head_dim) part[tile::fragment_row(thread, i) * width + column] = r_dk[i];
        }
        part += params.head_dim;
#pragma unroll
        for (int i = 0; i < C::head_dim_v / 2; ++i) {
            const int column = tile::fragment_column(thread, i);
            if (column < params.head_dim_v) part[tile::fragment_row(thread, i) * width + column] = r_dv[i];
        }
    }

    // The rows noted, over what the copy engine has stored of them.
    __device__ __forceinline__ void repair_noted() {
        if (ptx::elect()) ptx::bulk_wait();
        __syncwarp();  // what was sent is there before others write there
        while (noted >= 0) {
            const int2 note = *note_of(noted);
            const Task task = params.tasks.tasks[noted];
            for (unsigned bits = unsigned(note.y); bits; bits &= bits - 1)
                GradientRepair<C>{params, thread % 32, task.head / params.heads_kv}.key_row(
                    task, warpgroup * C::warpgroup_rows + thread / 32 * 16 + __ffs(int(bits)) - 1);
            noted = note.x;
        }
    }
};

template <class C, bool HasCap>
__global__ void __launch_bounds__(C::threads, 1)
    block_backward_kernel(const __grid_constant__ BlockBackwardParams params) {
    BackwardShared<C>& shared = *ptx::swizzled_shared<BackwardShared<C>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::k_tiles; ++i) {
            ptx::mbarrier_init(&shared.k_full[i], 1);
            ptx::mbarrier_init(&shared.k_empty[i], C::warps);
        }
        ptx::mbarrier_init(&shared.v_full, 1);
        ptx::mbarrier_init(&shared.v_empty, C::warps);
        for (int i = 0; i < C::slots; ++i) {
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.dout_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], C::warps);
            ptx::mbarrier_init(&shared.dout_empty[i], C::warps);
        }
        for (int i = 0; i < C::ds_tiles; ++i) {
            ptx::mbarrier_init(&shared.ds_full[i], C::warps);
            ptx::mbarrier_init(&shared.ds_empty[i], C::dq_warps);
        }
        ptx::mbarrier_init(&shared.dq_empty, C::warps / 2);
        if constexpr (C::in_order) shared.sums.init();
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    if (warpgroup == C::warpgroups) {
        ptx::give_registers<C::producer_registers>();
        const int warp = __shfl_sync(~0u, int(threadIdx.x - C::consumers) / 32, 0), lane = int(threadIdx.x % 32);
        if (C::in_order && warp > 0) {
            if (warp <= C::writers)
                SumsWriter<C>{params.layout, params.sums, shared.sums, shared.dq[0], lane, unsigned(warp - 1)}.run();
            return;  // and not else below: the compiler would spill registers of both roles
        }
        if (warp == 0) BackwardProducer<C>{params, shared, lane}.run();
    } else {
        ptx::take_registers<C::consumer_registers>();
        BackwardConsumer<C, HasCap>{params, shared, warpgroup, int(threadIdx.x % 128)}.run();
    }
}

// ---- dq: sums into elements ----
// A CTA has a tile, the first CTA the last one: L2 still holds what was added to last. Threads read the sums as the
// consumers left them and lay the elements out in rows.
constexpr int dq_threads = 256, dq_ctas = 4;  // of an SM: repairs may spill, copies must not wait

template <class C>
__global__ void __launch_bounds__(dq_threads, dq_ctas) dq_kernel(const __grid_constant__ BlockBackwardParams params) {
    using Element = typename C::Element;
    constexpr int chunk = 16 / sizeof(Element), stride = C::head_dim + chunk;
    Element* const rows = ptx::dynamic_shared<Element>();
    const float scale = params.scale * tile::ds_unlift<C::dtype>;
    __shared__ uint32_t not_finite[C::block_q / 32];
    if (threadIdx.x < C::block_q / 32) not_finite[threadIdx.x] = 0;
    __syncthreads();
    const int tile = int(gridDim.x - 1 - blockIdx.x);
    const int plane = tile / params.query_tiles, row = tile - plane * params.query_tiles;
    const int batch = plane / params.heads_q, head = plane - batch * params.heads_q;
    const float4* sums = reinterpret_cast<const float4*>(params.sums.tiles + size_t(tile) * C::dq_tile);
    const bool has_sums = !C::in_order || has_blocks(params.layout, plane, row);
    constexpr int loads = C::dq_tile / 4 / dq_threads;
    float4 mine[loads];  // all of them first: each would wait for its own otherwise
    if (has_sums)
#pragma unroll
        for (int n = 0; n < loads; ++n) mine[n] = __ldcs(sums + n * dq_threads + threadIdx.x);
#pragma unroll
    for (int n = 0; n < loads; ++n) {
        const int at = n * dq_threads + int(threadIdx.x);
        const int warp = at / (C::dq_warp / 4), i = at % (C::dq_warp / 4) / 32 * 4;
        const int thread = warp % 4 * 32 + at % 32;
        const float4 x = has_sums ? mine[n] : make_float4(0, 0, 0, 0);
        const int r = warp / 4 * C::warpgroup_rows + tile::fragment_row(thread, i),
                  column = tile::fragment_column(thread, i);
        uint32_t* to = reinterpret_cast<uint32_t*>(rows + r * stride + column);
        to[0] = tile::pack<C::dtype>(scale * x.x, scale * x.y);
        to[8 * stride / 2] = tile::pack<C::dtype>(scale * x.z, scale * x.w);
        if (x.x * 0 + x.y * 0 != 0) atomicOr(&not_finite[r / 32], 1u << (r % 32));
        if (x.z * 0 + x.w * 0 != 0) atomicOr(&not_finite[(r + 8) / 32], 1u << ((r + 8) % 32));
    }
    __syncthreads();
    constexpr int chunks = C::head_dim / chunk;  // of a row; the operand may have fewer
    const int left = min(C::block_q, params.seq_q - row * C::block_q);
    for (int at = threadIdx.x; at < left * chunks; at += dq_threads) {
        const int r = at / chunks, c = at % chunks * chunk;
        if (c >= params.head_dim) continue;
        Element* to = any::row_of<Element>(params.dq, batch, head, row * C::block_q + r) + c;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(rows + r * stride + c);
    }
    __syncthreads();  // elements before what repairs write over them
    for (int r = int(threadIdx.x) / 32; r < left; r += dq_threads / 32)
        if (not_finite[r / 32] >> (r % 32) & 1)
            GradientRepair<C>{params, int(threadIdx.x) % 32, batch}.query_row({plane, row, 0, INT_MAX, whole_row}, r);
}

// ---- launch ----
template <class C>
struct BlockBackwardLaunch {
    const BackwardArgs& args;
    const Problem& p;
    const BlockBackwardSpace space;
    BlockBackwardParams params;
    static constexpr size_t dq_bytes = size_t(C::block_q) * (C::head_dim * sizeof(typename C::Element) + 16);

    explicit BlockBackwardLaunch(const BackwardArgs& args)
        : args(args), p(*args.problem), space(p, args.layout, args.tasks, args.second_tasks, C::head_dim) {
        char* const workspace = static_cast<char*>(args.workspace);
        params.q_map = runtime::make_tensor_map(args.q, runtime::q_sizes(p), C::dtype, C::block_q);
        params.k_map = runtime::make_tensor_map(args.k, runtime::k_sizes(p), C::dtype, C::block_k);
        params.v_map = runtime::make_tensor_map(args.v, runtime::v_sizes(p), C::dtype, C::block_k);
        params.dout_map = runtime::make_tensor_map(args.dout, runtime::out_sizes(p), C::dtype, C::block_q);
        params.dk_map = runtime::make_tensor_map(args.dk, runtime::k_sizes(p), C::dtype, C::warp_rows);
        if (!p.value_in_key)
            params.dv_map = runtime::make_tensor_map(args.dv, runtime::v_sizes(p), C::dtype, C::warp_rows);
        fill(params, args);
        params.tasks = args.tasks;
        params.sums = {reinterpret_cast<float*>(workspace + space.dq),
                       reinterpret_cast<int32_t*>(workspace + space.turns)};
        params.notes = reinterpret_cast<int2*>(workspace + space.notes);
        params.query_tiles = any::Divisor(params.layout.by_query.rows);
    }

    // The counter and the sums begin at zero; in order, the turns, and the first part of a sum is not added. They are
    // neighbours.
    void clear() const {
        const size_t end = C::in_order ? space.dq : space.bytes;
        runtime::clear(static_cast<char*>(args.workspace) + space.counter, end - space.counter, args.stream);
    }

    void keys() {
        const int blocks = std::min(params.tasks.num_tasks, runtime::count_processors(args.device));
        if (C::in_order || blocks < params.tasks.num_tasks)
            params.next_task = reinterpret_cast<unsigned*>(static_cast<char*>(args.workspace) + space.counter);
        const auto kernel = params.has_cap ? block_backward_kernel<C, true> : block_backward_kernel<C, false>;
        runtime::launch(kernel, {unsigned(blocks), unsigned(C::threads), sizeof(BackwardShared<C>)}, args.stream,
                        params);
    }

    void queries() const {
        const unsigned tiles = unsigned(p.batch * p.heads_q) * unsigned(params.layout.by_query.rows);
        runtime::launch(dq_kernel<C>, {tiles, unsigned(dq_threads), dq_bytes}, args.stream, params);
    }
};

template <class C>
void run_block_backward(const BackwardArgs& args) {
    BlockBackwardLaunch<C> launch(args);
    launch.clear();
    any::BlockBackward<C::dtype>::rows(args);
    launch.keys();
    any::BlockBackward<C::dtype>::join_keys(args);
    launch.queries();
    any::BlockBackward<C::dtype>::sinks(args);
}

template <class C>
void prepare_block_backward(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_backward_kernel<C, false>, sizeof(BackwardShared<C>));
    runtime::prepare(block_backward_kernel<C, true>, sizeof(BackwardShared<C>));
    runtime::prepare(dq_kernel<C>, BlockBackwardLaunch<C>::dq_bytes);
    runtime::prepare_tensor_maps();
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const BackwardArgs& args) {
    run_block_backward<BackwardConfig<D, HeadDim, HeadDimV, BlockQ, BlockK, false>>(args);
}
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockBackward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    prepare_block_backward<BackwardConfig<D, HeadDim, HeadDimV, BlockQ, BlockK, false>>(device);
}

}  // namespace spattn::sm90
