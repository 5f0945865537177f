// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - m),  out = sum(p v) / sum(p),  lse = scale m + log(sum(p))
//
// over the blocks that a layout lists for each query block. The kernel knows runs of blocks and bit masks, no pattern.
//
//   grid      one CTA an SM, persistent; tasks from a counter, in the plan's order. Blocks of 64 queries have CTAs of
//             one warpgroup, two an SM, for patterns that leave most of a larger tile empty
//   producer  one warp walks the runs 32 at a time and fills a ring of 32 KiB tiles with k and v blocks by TMA, with
//             the next q ahead; it tells the consumers each block's mask through shared memory: they read no list
//   consumers two warpgroups, 64 rows each, scores and out in registers. Each begins s of block j + 1, then p v of
//             block j, also from one task into the next, and makes probabilities under them and under the other's:
//
//               tensor   | s1 | p0 v0 | the other's | s2 | p1 v1 | the other's
//               the rest      |  softmax of s1      |    |  softmax of s2
//
//             p is the a operand of p v as it stands; a masked block costs a thread one 64-bit load and predicated
//             moves (tile/fragment.h); out leaves through the q tile
//   softmax   exponentials are made relative to the maximum that was found last, and their sums tell whether that was
//             good enough. Where it was not (a task's first block, rows that grow by 2^12) they are made once more from
//             the scores, which still stand. So a block takes no maximum and no exchange between lanes
//
//   orders    where tokens do not stand in their own order, a second kernel of the same parts: residue classes are
//             boxes of a tensor map whose rows are a class, rows of listed tiles are copied by number by four producer
//             warps, and out leaves row by row
//
//   heads     those of a group may share a tile, token by token, where queries are few: boxes of q and out have as many
//             heads, and masks were widened for them. Only whose a written row is differs (any::TileRows)
//
//   isolation out is p v, and 0 * NaN is NaN: a row whose sums are not finite may owe that to a key that it does not
//             see. Warps note such rows and, when nothing else is left, make them again from kept pairs alone
//
// What binds. The products of a 64 x 128 block are 1024 cycles of the tensor unit, so two warpgroups cannot be faster
// than 2048 a block; full_16k takes 2280. A warpgroup's own chain is about 250 cycles of waits and descriptors, 900 to
// issue the products (wgmmas queue four or five deep, then issue blocks) and 950 for the softmax, of which the 64
// exponentials a thread are 512. Counters (ncu): the tensor pipe is busy 87 % of all cycles of full_16k, 77 % of
// bsr128_10_16k and 73 % of window1k_16k. On full_16k the 700 W cap holds the clock at 1.6 GHz, as it does GEMM's.
//
// Measured (H200, bf16, d128, L2 cold, 10 ms between calls, TFLOP/s on kept pairs, 2026-11, GEMM 8192^3 782 in the same
// run): full_16k 799, causal_16k 770, window1k_16k 576, window4k_128k 742, streaming_16k 557, bsr128_10_16k 696. Single
// blocks instead of runs cost 0.5 %, a mask on every block 4 to 6 %. In later runs full_16k at head_dim 64 551 (468
// before, with two q tiles, not four), and one query of 64 heads on 8 over 128K keys read k and v at 3.65 TB/s. Blocks
// of 64 x 64 beside 128 x 64, 16 heads of 16K tokens, us (at head_dim 64): block_diagonal(192) 89 and 100 (61 and 77),
// window(63,63) 91 and 104 (65 and 85), 8 blocks of 64 a query block at random 160 and 190 (113 and 146).
//
// Tried and dropped (full_16k or window1k_16k, in one run): three serial warpgroups of 64 rows (722 instead of 788);
// row maxima before the exponentials (-6 %); sums and packing behind the wait for p v (-3 %); p v issued between
// exponentials (0 to -3 %); four ring tiles at constant places instead of five (-3 to -6 %); descriptors that are not
// known uniform (3 R2UR an instruction: -7 %); first blocks first (-7 %: few rows of a window see its first block). 128
// keys by number, copied by 16-byte cp.async of four warps into a tile as a box would fill it, cost 1.3 blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "any/element.cuh"
#include "any/partials.h"
#include "any/tile.cuh"
#include "core/math.h"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "runtime/launch.h"
#include "runtime/tensor_map.h"
#include "sm90/block_forward.h"
#include "sm90/pipeline.cuh"
#include "sm90/row_end.cuh"
#include "sm90/token_tiles.cuh"
#include "tile/fragment.h"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

// ---- configuration ----
// AnyOrder: tokens stand in any order in the layout's tiles.
template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK, bool AnyOrder>
struct Config : TileConfig<D, HeadDim, HeadDimV> {
    using Base = TileConfig<D, HeadDim, HeadDimV>;
    using Base::head_dim, Base::head_dim_v, Base::panels, Base::row_bytes;
    using MaskWord = std::conditional_t<BlockK == 128, uint64_t, uint32_t>;  // a thread's bits of a block
    static constexpr bool any_order = AnyOrder;
    static constexpr int block_q = BlockQ, block_k = BlockK, warpgroups = block_q / Base::warpgroup_rows;
    static constexpr int ctas = BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::ctas;  // an SM
    static constexpr int threads = tile::fragment_threads * (warpgroups + 1);
    static constexpr int panel_bytes = block_q * row_bytes, box_bytes = block_k * row_bytes;  // a panel of q; of k or v
    // Tasks of few blocks may end faster than q comes and out leaves: where there is room, more of them are under way.
    // Not in any order of tokens, where three cost dilated windows 5 % (and won 5 % on strided(128)).
    static constexpr int q_tiles = any_order ? 2 : head_dim == 64 ? 4 : head_dim == 128 && block_k == 64 ? 3 : 2;
    static constexpr int most_bytes = (228 / ctas - 1) * 1024, barrier_bytes = 1024;  // of shared memory
    static constexpr int slots = (most_bytes - barrier_bytes - q_tiles * panels * panel_bytes) / (panels * box_bytes);
    static constexpr int producers = any_order ? tile_copiers : 32, tile_counts = any_order ? tile_arrivals : 1;
    static constexpr int producer_registers = any_order ? 56 : 40;
    static constexpr int consumer_registers = any_order ? 224 : ctas == 2 ? 216 : 232;
    static_assert(head_dim_v <= head_dim, "out leaves through the q tile, and v lies in tiles that hold k");
    static_assert(slots >= 3, "k of the next block, v of this one, and one on its way");
    static_assert(block_k == 64 || block_k == 128, "a thread's mask of a block is one word");
    static_assert(producer_registers + warpgroups * consumer_registers <= launch_registers(threads, ctas),
                  "roles share what the launch gives");
};

// What a launch hands to the device. Boxes are of one 64-column panel.
struct ConsecutiveMaps {
    CUtensorMap q, k, v, out;  // [batch, seq, head, head_dim]
};
struct ResidueClassMaps {
    runtime::ResidueMaps q, k, v;
};
template <bool AnyOrder>
struct BlockForwardParams {
    std::conditional_t<AnyOrder, ResidueClassMaps, ConsecutiveMaps> maps;
    TensorView q, k, v, out;                  // the same by addresses
    TensorView lse, max_logits, sink_logits;  // absent where nobody asked, or the problem has none
    LayoutView layout;                        // in device memory, as the tasks
    TasksView tasks;
    any::Partials<float> parts;
    any::TileRows tile;   // of orders that are not consecutive: of one head
    unsigned* next_task;  // tasks taken beyond the first of each block; null where there is but one
    int2* notes;          // [task][warp]
    int heads_q, group, head_dim, head_dim_v;
    float scale, scale_log2;  // from what stands for scores to their natural units, and to powers of two
    bool has_cap;             // scores become tanh(into_cap s) first
    float into_cap;
};

// Parts of a row end without the sink.
template <class Params>
__device__ __forceinline__ RowEnd end_row(const Params& params, int head, int part, float m, float l, float lift) {
    const TensorView& sinks = params.sink_logits;
    const bool has_sink = sinks.data && part == whole_row;
    return end_row(m, l, lift, params.scale,
                   has_sink ? static_cast<const float*>(sinks.data)[head * sinks.head] : -INFINITY);
}

// ---- shared memory ----
template <class C>
struct Shared {
    uint8_t q[C::q_tiles][C::panels][C::panel_bytes];  // a tile becomes its task's out once all its scores are done
    uint8_t ring[C::slots][C::panels][C::box_bytes];   // blocks of k and v in the order of their use
    TaskMessage task[C::q_tiles];
    int32_t mask[C::slots];        // of the block whose k lies there
    uint64_t q_full[C::q_tiles];   // producer with the bytes of q; consumers wait
    uint64_t q_empty[C::q_tiles];  // one arrival a consumer warpgroup, when its out has left; producer waits
    uint64_t full[C::slots];       // producer with the bytes of a block; consumers wait
    uint64_t empty[C::slots];      // one arrival a consumer warp; producer waits
    uint64_t landed;               // bytes of a v block with dead keys; producer waits
    int32_t next[2];               // tasks that all producers take, in turn
};

// ---- producer: one warp walks the lists and keeps the ring full ----
// Four warps where tokens stand in any order: each walks, and all copy the rows of listed tiles.
template <class C>
struct Producer {
    using Element = typename C::Element;

    const BlockForwardParams<C::any_order>& params;
    Shared<C>& shared;
    const int lane;
    const bool is_leader;  // one lane of all producers
    Cursor<C::q_tiles> q;
    Cursor<C::slots> slot;
    uint32_t landed_phase = 0;
    int batch, head_kv;  // of the task
    int live;
    int pending = -1, pending_batch, pending_head, pending_set;  // the v block that follows the next k block
    NextTask next{0};
    int turn = 0;  // of shared.next

    __device__ __forceinline__ void run() {
        for (int at = blockIdx.x; at < params.tasks.num_tasks;) {
            const Task& task = params.tasks.tasks[at];
            next = NextTask(task.take);
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
        if (pending >= 0) load_pending_v();
        announce({0, 0, 0, end_of_work, 0, 0});
    }

    // A row of blocks without a key: out 0, lse -infinity or the sink's. Consumers never hear of it: one that waited
    // for the message after such a task would still hold the tile that this message needs.
    __device__ __forceinline__ void store_empty(const Task& task) {
        const int entry = task.head / params.heads_q, head = task.head - entry * params.heads_q;
        if constexpr (C::any_order)
            end_empty(task.row, entry, head);
        else
            clear_rows(task.row, entry, head);
    }

    __device__ __forceinline__ void end_empty(int tile, int entry, int head) {
        const any::OwnTokens own = any::own_tokens_of(params.layout.queries, C::block_q, params.layout.seq_q, tile);
        clear_tokens<C::block_q, Element>(own, params.out, entry, head, params.head_dim_v);
        const float lse = end_row(params, head, whole_row, -INFINITY, 0, 0).lse;
        for (int place = int(threadIdx.x) % C::producers; place < C::block_q; place += C::producers) {
            const int token = own.at(place);
            if (token == no_token) continue;
            if (params.lse.data) *any::row_of<float>(params.lse, entry, head, token) = lse;
            if (params.max_logits.data) *any::row_of<float>(params.max_logits, entry, head, token) = -INFINITY;
        }
    }

    __device__ __forceinline__ void clear_rows(int tile, int entry, int head) {
        const any::TileRows& of = params.tile;
        const int first = tile * params.layout.block_q;
        const int rows = min(params.layout.block_q, int(params.layout.seq_q) - first) << of.bits;
        const int words = params.head_dim_v / 2;  // of two elements: head_dim_v is a multiple of 8
        for (int row = 0; row < rows; ++row) {
            auto* out = any::row_of<typename C::Element>(params.out, entry, head + of.head(row), first + of.place(row));
            for (int word = lane; word < words; word += 32) reinterpret_cast<uint32_t*>(out)[word] = 0;
        }
        for (int row = lane; row < rows; row += 32) {
            const int of_row = head + of.head(row), token = first + of.place(row);
            if (params.lse.data)
                *any::row_of<float>(params.lse, entry, of_row, token) =
                    end_row(params, of_row, whole_row, -INFINITY, 0, 0).lse;
            if (params.max_logits.data) *any::row_of<float>(params.max_logits, entry, of_row, token) = -INFINITY;
        }
    }

    __device__ __forceinline__ void load_task(const Task& task, int index) {
        const LayoutView& layout = params.layout;
        const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
        const Slice slice = layout.by_query.slices[list * layout.by_query.rows + task.row];
        batch = task.head / params.heads_q;
        const int head = task.head - batch * params.heads_q;
        head_kv = head / params.group;
        live = list * layout.by_key.rows;
        announce({batch, head, task.row, task.take, task.part, index});
        // Last blocks first: where few rows see a row's first block (windows), all see its last, and their maxima are
        // known from there on. Parts of a row are counted from the end just so.
        int skip = task.skip, left = task.take;
        for (int end = slice.end; end > slice.begin && left; end -= 32) {
            const int runs = min(32, end - slice.begin);
            Run mine{0, 0, full_block};
            if (lane < runs) mine = layout.by_query.runs[end - 1 - lane];
            for (int r = 0; r < runs && left; ++r) {
                const int first = __shfl_sync(~0u, mine.first, r), count = __shfl_sync(~0u, mine.count, r);
                const int mask = __shfl_sync(~0u, mine.mask, r);
                const int from = min(skip, count), take = min(count - from, left);
                skip -= from, left -= take;
                for (int n = from; n < from + take; ++n) load_block(first + count - 1 - n, mask);
            }
        }
    }

    // Publishes a task with its q tile, or the end of work with none.
    __device__ __forceinline__ void announce(const TaskMessage& message) {
        uint64_t* full = &shared.q_full[q.index];
        ptx::mbarrier_wait(&shared.q_empty[q.index], q.phase ^ 1);
        if (is_leader) shared.task[q.index] = message;
        if (message.count != end_of_work)
            load_q(message, full);
        else if constexpr (C::any_order)
            arrive_without_tile(full);
        else if (is_leader)
            ptx::mbarrier_arrive(full);
        q.advance();
    }

    __device__ __forceinline__ void load_q(const TaskMessage& message, uint64_t* full) {
        uint8_t* tile = shared.q[q.index][0];
        if constexpr (C::any_order)
            load_rows<C::block_q, C::panels, Element>(queries(), message.row, 0, message.batch, message.head, nullptr,
                                                      tile, full);
        else if (is_leader)
            load<C::panels, C::panel_bytes>(&params.maps.q, message.row * params.layout.block_q, message.head,
                                            message.batch, tile, full);
    }

    __device__ __forceinline__ void load_block(int block, int mask) {
        uint64_t* full = &shared.full[slot.index];
        uint8_t* tile = shared.ring[slot.index][0];
        ptx::mbarrier_wait(&shared.empty[slot.index], slot.phase ^ 1);
        next.begin_block(params.next_task, is_leader);
        if (is_leader) shared.mask[slot.index] = mask;
        if constexpr (C::any_order)
            load_rows<C::block_k, C::panels, Element>(keys(), block, 0, batch, head_kv, nullptr, tile, full);
        else if (is_leader)
            load<C::panels, C::box_bytes>(&params.maps.k, block * C::block_k, head_kv, batch, tile, full);
        slot.advance();
        if (pending >= 0) load_pending_v();
        pending = block, pending_batch = batch, pending_head = head_kv;
        pending_set = params.layout.live_keys.set_of ? params.layout.live_keys.set_of[live + block] : all_live;
    }

    __device__ __forceinline__ void load_pending_v() {
        uint64_t* full = &shared.full[slot.index];
        uint8_t* tile = shared.ring[slot.index][0];
        ptx::mbarrier_wait(&shared.empty[slot.index], slot.phase ^ 1);
        const uint64_t* alive = pending_set == all_live
                                    ? nullptr
                                    : params.layout.live_keys.sets + pending_set * params.layout.live_keys.words;
        if constexpr (C::any_order) {
            load_rows<C::block_k, C::v_panels, Element>(values(), pending, 0, pending_batch, pending_head, alive, tile,
                                                        full);
        } else {
            uint64_t dead[C::block_k / 64];
            const bool clears = alive && find_dead_keys(alive, dead);
            if (is_leader)
                load<C::v_panels, C::box_bytes>(&params.maps.v, pending * C::block_k, pending_head, pending_batch, tile,
                                                clears ? &shared.landed : full);
            if (clears) clear_dead_keys(dead, full);
        }
        slot.advance();
        pending = -1;
    }

    // Keys of the pending block that no query sees, a bit each; whether there are any. What lies beyond the last key
    // comes as zeros anyway.
    __device__ __forceinline__ bool find_dead_keys(const uint64_t* alive, uint64_t (&dead)[C::block_k / 64]) const {
        uint64_t some = 0;
#pragma unroll
        for (int word = 0; word < C::block_k / 64; ++word) {
            const int64_t keys = params.layout.seq_k - (int64_t(pending) * C::block_k + 64 * word);  // from here on
            dead[word] = keys >= 64 ? ~alive[word] : keys > 0 ? ~alive[word] & ((1ull << keys) - 1) : 0;
            some |= dead[word];
        }
        return some != 0;
    }

    // 0 * NaN is NaN: rows of v that no query sees must not hold what the caller left there. Consumers would repair
    // what comes of it, but padding is no exception, and a repair takes long.
    __device__ __forceinline__ void clear_dead_keys(const uint64_t (&dead)[C::block_k / 64], uint64_t* full) {
        ptx::mbarrier_wait(&shared.landed, landed_phase);
        landed_phase ^= 1;
#pragma unroll
        for (int word = 0; word < C::block_k / 64; ++word)
            for (uint64_t bits = dead[word]; bits; bits &= bits - 1) {
                const int key = 64 * word + __ffsll(int64_t(bits)) - 1;
                for (int at = lane; at < C::v_panels * 16; at += 32) {
                    uint8_t* row = shared.ring[slot.index][at / 16] + key * C::row_bytes + at % 16 * 8;
                    *reinterpret_cast<uint64_t*>(row) = 0;
                }
            }
        ptx::fence_async_shared();
        __syncwarp();  // all lanes' zeros before lane 0 tells the consumers
        if (lane == 0) ptx::mbarrier_arrive(full);
    }

    __device__ __forceinline__ TileSource queries() const {
        return {params.maps.q, params.q, params.layout.queries, params.layout.seq_q, C::block_q, params.head_dim};
    }
    __device__ __forceinline__ TileSource keys() const {
        return {params.maps.k, params.k, params.layout.keys, params.layout.seq_k, C::block_k, params.head_dim};
    }
    __device__ __forceinline__ TileSource values() const {
        return {params.maps.v, params.v, params.layout.keys, params.layout.seq_k, C::block_k, params.head_dim_v};
    }

    template <int Panels, int Bytes>
    __device__ __forceinline__ void load(const CUtensorMap* map, int row, int head, int entry, uint8_t* to,
                                         uint64_t* bar) {
        ptx::mbarrier_arrive_expect(bar, Panels * Bytes);
        for (int panel = 0; panel < Panels; ++panel)
            ptx::tma_load_4d(to + panel * Bytes, map, C::panel_columns * panel, head, row, entry, bar);
    }
};

// ---- repair: one warp makes a row from the pairs that it keeps, and from nothing else ----
template <class C>
struct Repair {
    using Element = typename C::Element;
    static constexpr int columns = C::head_dim / 32;  // a lane's, 32 apart

    const BlockForwardParams<C::any_order>& params;
    const Task& task;
    const int lane;
    float q[columns], out[columns];
    float m, l;

    __device__ __noinline__ void row(int in_block) {
        const any::TileRows& rows = params.tile;
        const int batch = task.head / params.heads_q, head = task.head - batch * params.heads_q + rows.head(in_block);
        const int token = any::own_token_at(params.layout.queries, params.layout.block_q, params.layout.seq_q, task.row,
                                            rows.place(in_block));
        if (token == no_token) return;
        const auto* from = any::row_of<Element>(params.q, batch, head, token);
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            q[i] = column < params.head_dim ? any::to_real(from[column]) : 0;
            out[i] = 0;
        }
        m = -INFINITY, l = 0;
        walk(batch, head / params.group, in_block);
        store(batch, head, token, in_block);
    }

    // The task's blocks; parts of a row are counted from its end.
    __device__ void walk(int batch, int head_kv, int in_block) {
        const LayoutView& layout = params.layout;
        const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[task.head];
        const Slice slice = layout.by_query.slices[list * layout.by_query.rows + task.row];
        int skip = task.skip, left = task.take;
        for (int r = slice.end - 1; r >= slice.begin && left; --r) {
            const Run run = layout.by_query.runs[r];
            const int from = min(skip, run.count), take = min(run.count - from, left);
            skip -= from, left -= take;
            for (int n = from; n < from + take; ++n)
                block(batch, head_kv, run.first + run.count - 1 - n, run.mask, in_block);
        }
    }

    __device__ void block(int batch, int head_kv, int block, int mask, int in_block) {
        const LayoutView& layout = params.layout;
        const uint32_t* words = mask_words(layout, mask);
        const any::TileTokens tokens = any::tokens_of(layout.keys, C::block_k, layout.seq_k, block);
        for (int base = 0; base < C::block_k; base += 32) {
            const int bit = tile::fragment_bit(in_block, base + lane, C::block_k);
            const bool kept = mask == full_block || (words[bit / 32] >> (bit % 32) & 1);
            for (unsigned keys = __ballot_sync(~0u, kept); keys; keys &= keys - 1)
                pair(batch, head_kv, tokens.at(base + __ffs(int(keys)) - 1));
        }
    }

    __device__ void pair(int batch, int head_kv, int64_t key) {
        if (isnan(l)) return;  // by its own keys: nothing can change it
        const auto* k = any::row_of<Element>(params.k, batch, head_kv, key);
        const auto* v = any::row_of<Element>(params.v, batch, head_kv, key);
        float s = 0;
        for (int i = 0; i < columns; ++i)
            if (lane + 32 * i < params.head_dim) s = fmaf(q[i], any::to_real(k[lane + 32 * i]), s);
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
        if (params.has_cap) s = tile::cap(s, params.into_cap);
        const float highest = fmaxf(m, s);
        const float factor = m == highest ? 1 : ptx::exp2_approx((m - highest) * params.scale_log2);
        const float p = s == -INFINITY ? 0 : ptx::exp2_approx((s - highest) * params.scale_log2);
        m = highest, l = fmaf(l, factor, p);
        for (int i = 0; i < columns; ++i)
            if (lane + 32 * i < params.head_dim_v) out[i] = fmaf(p, any::to_real(v[lane + 32 * i]), out[i] * factor);
    }

    __device__ void store(int batch, int head, int64_t token, int in_block) {
        const RowEnd end = end_row(params, head, task.part, m, l, 0);
        const int64_t part_row = int64_t(task.part) * C::block_q + in_block;
        for (int i = 0; i < columns; ++i) {
            const int column = lane + 32 * i;
            if (column >= params.head_dim_v) continue;
            const float x = l == 0 ? 0 : out[i] * end.factor;
            if (task.part == whole_row)
                any::from_real(x, any::row_of<Element>(params.out, batch, head, token)[column]);
            else
                params.parts.out[part_row * params.head_dim_v + column] = x;
        }
        if (lane) return;
        if (task.part != whole_row) {
            params.parts.lse[part_row] = end.lse;
            params.parts.top[part_row] = m * params.scale;
            return;
        }
        if (params.lse.data) *any::row_of<float>(params.lse, batch, head, token) = end.lse;
        if (params.max_logits.data) *any::row_of<float>(params.max_logits, batch, head, token) = m * params.scale;
    }
};

// ---- consumer: one warpgroup owns 64 rows of scores and output ----
// HasCap: with a softcap. Its code in the middle of the loop costs who has none 2 to 5 %, jumped over or not.
template <class C, bool HasCap>
struct Consumer {
    using Probabilities = uint32_t[C::block_k / 16][4];  // the a operand of p v: steps of 16 keys

    const BlockForwardParams<C::any_order>& params;
    Shared<C>& shared;
    const int warpgroup, thread;  // of the warpgroup
    Cursor<C::q_tiles> q;         // the next task's
    Cursor<C::slots> slot;
    int held = -1;      // a q tile that this warpgroup's out is leaving
    int q_index, left;  // of the task whose scores come next; blocks
    bool first = true;  // the block whose p v comes next is its task's first
    int noted = -1;     // the last task of which this warp must repair rows
    float s[C::block_k / 2], r_out[C::head_dim_v / 2];
    tile::RowState rows;

    // The blocks of the next task, or end_of_work. Its message stays in place until its q tile is released.
    __device__ __forceinline__ int take_task(int& taken) {
        wait_tile<C>(&shared.q_full[q.index], q.phase);
        taken = q.index;
        q.advance();
        return shared.task[taken].count;
    }

    // s = q kT, begun.
    __device__ __forceinline__ void begin_scores(uint32_t a, uint32_t b) {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::head_dim / 16; ++i)
            ptx::wgmma(s, a + (i / 4) * (C::panel_bytes / 16) + (i % 4) * 2,
                       b + (i / 4) * (C::box_bytes / 16) + (i % 4) * 2, i > 0, tile::MatrixTag<C::dtype>{});
        ptx::wgmma_commit();
    }

    // r_out += p v, begun.
    __device__ __forceinline__ void begin_output(const Probabilities& p, uint32_t b) {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::block_k / 16; ++i)
            ptx::wgmma_transposed(r_out, p[i], b + i * 128, i > 0 || !first, tile::MatrixTag<C::dtype>{});
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ uint32_t q_descriptor(int tile) const {
        return ptx::wgmma_descriptor(shared.q[tile][0] + warpgroup * C::warpgroup_bytes, 0);
    }
    __device__ __forceinline__ uint32_t k_descriptor(int index) const {
        return ptx::wgmma_descriptor(shared.ring[index][0], 0);
    }
    __device__ __forceinline__ uint32_t v_descriptor(int index) const {
        return ptx::wgmma_descriptor(shared.ring[index][0], C::box_bytes);
    }

    // The mask of the block whose k lies there; its word follows while the scores are made. Read by the lane that will
    // release the slot, so that nobody reads what the producer already overwrites.
    __device__ __forceinline__ int take_mask(int index, typename C::MaskWord& word) {
        const int mask = __shfl_sync(~0u, thread % 32 ? 0 : shared.mask[index], 0);
        if (mask != full_block)
            word = __ldg(reinterpret_cast<const typename C::MaskWord*>(mask_words(params.layout, mask)) +
                         warpgroup * 128 + thread);
        return mask;
    }

    __device__ __forceinline__ void cap_scores() {
        if constexpr (HasCap)
            if (!C::any_order || params.has_cap) tile::cap(s, params.into_cap);
    }

    __device__ __forceinline__ void release(int index) {
        if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.empty[index]);
    }

    __device__ __forceinline__ void release_held() {
        if (held < 0) return;
        if (thread == 0) {
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(&shared.q_empty[held]);
        }
        held = -1;
    }

    __device__ __forceinline__ void store(int q_index, const tile::RowState& done) {
        const TaskMessage task = shared.task[q_index];
        const any::TileRows& of = params.tile;
        RowEnd ends[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            ends[h] = end_row(params, task.head + of.head(row_in_tile(h)), task.part, done.m[h],
                              tile::quad_sum(done.l[h]), tile::lift<C::dtype>);
        tile::scale_rows(r_out, ends[0].factor, ends[1].factor);
        note_not_finite(task.index);
        const float lse[2] = {ends[0].lse, ends[1].lse}, top[2] = {done.m[0] * params.scale, done.m[1] * params.scale};
        if (task.part == whole_row)
            store_whole(q_index, task, lse, top);
        else
            store_part(q_index, task, lse, top);
    }

    // A value that is not finite may come from a key that its row does not see: 0 * NaN. Such rows are noted, and made
    // once more when nothing else is left to do. A note: the task noted before, and a bit for each of the warp's rows.
    __device__ __forceinline__ void note_not_finite(int index) {
        float is_nan[2];
        tile::find_not_finite(r_out, is_nan);
        if (__all_sync(~0u, is_nan[0] == 0 && is_nan[1] == 0)) [[likely]]
            return;
        const unsigned bits = tile::rows_with(!(is_nan[0] == 0), !(is_nan[1] == 0));
        if (thread % 32 == 0) *note_of(index) = make_int2(noted, int(bits));
        noted = index;
    }

    // The tile's row whose state is in rows[h].
    __device__ __forceinline__ int row_in_tile(int h) const {
        return warpgroup * C::warpgroup_rows + tile::fragment_row(thread, 2 * h);
    }

    __device__ __forceinline__ int2* note_of(int task) const {
        return params.notes + (size_t(task) * C::warpgroups + warpgroup) * 4 + thread / 32;
    }

    __device__ __forceinline__ void store_whole(int q_index, const TaskMessage& task, const float (&lse)[2],
                                                const float (&top)[2]) {
        const uint32_t panel = ptx::shared_address(shared.q[q_index][0] + warpgroup * C::warpgroup_bytes);
        uint32_t words[C::head_dim_v / 16][4];
        tile::pack_tile<C::dtype>(r_out, words);
        tile::store_swizzled(words, panel, C::panel_bytes, thread);
        const any::TileRows& of = params.tile;
        const int first = task.row * params.layout.block_q;
        int token[2] = {first + of.place(row_in_tile(0)), first + of.place(row_in_tile(1))};
        if constexpr (C::any_order)
            write_tokens(q_index, task, panel, token);
        else
            send(q_index, task, first + of.place(warpgroup * C::warpgroup_rows));
        if (thread % 4) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (unsigned(token[h]) >= unsigned(params.layout.seq_q)) continue;
            const int head = task.head + of.head(row_in_tile(h));
            if (params.lse.data) *any::row_of<float>(params.lse, task.batch, head, token[h]) = lse[h];
            if (params.max_logits.data) *any::row_of<float>(params.max_logits, task.batch, head, token[h]) = top[h];
        }
    }
    __device__ __forceinline__ void send(int q_index, const TaskMessage& task, int token) {
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // the warpgroup's tile is written before thread 0 sends it
        if (thread == 0) {
            for (int panel = 0; panel < C::v_panels; ++panel)
                ptx::tma_store_4d(&params.maps.out, C::panel_columns * panel, task.head, token, task.batch,
                                  shared.q[q_index][panel] + warpgroup * C::warpgroup_bytes);
            ptx::bulk_commit();
        }
        held = q_index;
    }
    // Each warp's 16 rows to where their tokens stand. Places become tokens.
    __device__ __forceinline__ void write_tokens(int q_index, const TaskMessage& task, uint32_t panel,
                                                 int (&token)[2]) {
        const LayoutView& layout = params.layout;
        const any::OwnTokens own = any::own_tokens_of(layout.queries, C::block_q, layout.seq_q, task.row);
#pragma unroll
        for (int& at : token) at = own.at(at - task.row * C::block_q);
        __syncwarp();  // the warp's rows are written before others of its lanes read them
        write_rows<C::v_panels, typename C::Element>(panel + thread / 32 * C::warp_bytes, C::panel_bytes, params.out,
                                                     task.batch, task.head, token, params.head_dim_v);
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // all are done with the q tile and its message
        if (thread == 0) ptx::mbarrier_arrive(&shared.q_empty[q_index]);
    }

    __device__ __forceinline__ void store_part(int q_index, const TaskMessage& task, const float (&lse)[2],
                                               const float (&top)[2]) {
        const size_t row = size_t(task.part) * C::block_q + warpgroup * C::warpgroup_rows;
#pragma unroll
        for (int i = 0; i < C::head_dim_v / 2; ++i) {
            const int column = tile::fragment_column(thread, i);
            if (column < params.head_dim_v)
                params.parts.out[(row + tile::fragment_row(thread, i)) * params.head_dim_v + column] = r_out[i];
        }
        if (thread % 4 == 0)
            for (int h = 0; h < 2; ++h) {
                params.parts.lse[row + tile::fragment_row(thread, 2 * h)] = lse[h];
                params.parts.top[row + tile::fragment_row(thread, 2 * h)] = top[h];
            }
        held = q_index;
        ptx::named_barrier_sync(1 + warpgroup, 128);  // all are done with the q tile and its message
    }

    // From the block whose probabilities are in p to the next, across tasks too: its scores, then p v, begun; under
    // them its probabilities into next_p. Two arrays, for p v reads p until it is done. False at the end of work.
    __device__ __forceinline__ bool step(const Probabilities& p, Probabilities& next_p) {
        const bool last = --left == 0;
        int next_left, next_q = q_index;
        if (last) [[unlikely]] {
            release_held();
            next_left = take_task(next_q);
            if (next_left == end_of_work) return false;
        }
        const Cursor<C::slots> k = slot;
        slot.advance();
        const Cursor<C::slots> v = slot;
        slot.advance();
        const uint32_t k_at = k_descriptor(k.index), v_at = v_descriptor(v.index), q_at = q_descriptor(next_q);
        wait_tile<C>(&shared.full[k.index], k.phase);
        begin_scores(q_at, k_at);
        typename C::MaskWord word;
        const int mask = take_mask(k.index, word);
        wait_tile<C>(&shared.full[v.index], v.phase);
        begin_output(p, v_at);
        if (held >= 0) [[unlikely]]
            release_held();
        ptx::wgmma_wait<1>();
        release(k.index);
        const tile::RowState done = rows;
        if (last) [[unlikely]]
            rows = tile::RowState{};
        cap_scores();
        if (mask != full_block) [[unlikely]]
            tile::mask(s, word);
        float factor[2];
        // Who asks for the largest score gets it by following the maximum in each block.
        const bool follows = last || params.max_logits.data;
        const bool rescale = tile::softmax<C::dtype>(s, rows, params.scale_log2, follows, next_p, factor);
        if (last) [[unlikely]] {
            ptx::wgmma_wait_all();
            release(v.index);
            store(q_index, done);
            q_index = next_q, left = next_left;
        } else {
            ptx::wgmma_wait<0>();
            release(v.index);
            if (rescale) [[unlikely]]
                tile::scale_rows(r_out, factor[0], factor[1]);
        }
        first = last;
        return true;
    }

    // p v of the last block of all.
    __device__ __forceinline__ void finish(const Probabilities& p) {
        wait_tile<C>(&shared.full[slot.index], slot.phase);
        begin_output(p, v_descriptor(slot.index));
        ptx::wgmma_wait<0>();
        store(q_index, rows);
        release_held();
    }

    __device__ __forceinline__ void run() {
        left = take_task(q_index);
        if (left == end_of_work) return;
        wait_tile<C>(&shared.full[slot.index], slot.phase);
        begin_scores(q_descriptor(q_index), k_descriptor(slot.index));
        typename C::MaskWord word;
        const int mask = take_mask(slot.index, word);
        ptx::wgmma_wait<0>();
        release(slot.index);
        slot.advance();
        cap_scores();
        if (mask != full_block) tile::mask(s, word);
        Probabilities even, odd;
        float factor[2];
        tile::softmax<C::dtype>(s, rows, params.scale_log2, true, even, factor);
        for (;;) {
            if (!step(even, odd)) {
                finish(even);
                break;
            }
            if (!step(odd, even)) {
                finish(odd);
                break;
            }
        }
        repair_noted();
    }

    // The rows noted, over what the copy engine has stored of them.
    __device__ __forceinline__ void repair_noted() {
        if (thread == 0) ptx::bulk_wait();
        ptx::named_barrier_sync(1 + warpgroup, 128);  // thread 0's stores are done before others write to the same rows
        while (noted >= 0) {
            const int2 note = *note_of(noted);
            const Task task = params.tasks.tasks[noted];
            for (unsigned bits = unsigned(note.y); bits; bits &= bits - 1)
                Repair<C>{params, task, thread % 32}.row(warpgroup * C::warpgroup_rows + thread / 32 * 16 +
                                                         __ffs(int(bits)) - 1);
            noted = note.x;
        }
    }
};

// ---- kernel ----
template <class C, bool HasCap>
__global__ void __launch_bounds__(C::threads, C::ctas)
    block_forward_kernel(const __grid_constant__ BlockForwardParams<C::any_order> params) {
    Shared<C>& shared = *ptx::swizzled_shared<Shared<C>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::q_tiles; ++i) {
            ptx::mbarrier_init(&shared.q_full[i], C::tile_counts);
            ptx::mbarrier_init(&shared.q_empty[i], C::warpgroups);
        }
        for (int i = 0; i < C::slots; ++i) {
            ptx::mbarrier_init(&shared.full[i], C::tile_counts);
            ptx::mbarrier_init(&shared.empty[i], 4 * C::warpgroups);
        }
        ptx::mbarrier_init(&shared.landed, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0);  // a shuffle, so that the compiler sees one value a warp
    if (warpgroup == C::warpgroups) {
        ptx::give_registers<C::producer_registers>();
        const int thread = int(threadIdx.x) - 128 * C::warpgroups;
        if (thread < C::producers) Producer<C>{params, shared, thread % 32, thread == 0}.run();
    } else {
        ptx::take_registers<C::consumer_registers>();
        Consumer<C, HasCap>{params, shared, warpgroup, int(threadIdx.x % 128)}.run();
    }
}

// ---- launch ----
inline void make_maps(const ForwardArgs& args, Dtype dtype, int block_q, int block_k, ConsecutiveMaps& maps) {
    const Problem& p = *args.problem;
    const int heads = args.tasks.tile_heads;
    maps.q = runtime::make_tensor_map(args.q, runtime::q_sizes(p), dtype, block_q / heads, heads);
    maps.k = runtime::make_tensor_map(args.k, runtime::k_sizes(p), dtype, block_k);
    maps.v = runtime::make_tensor_map(args.v, runtime::v_sizes(p), dtype, block_k);
    maps.out = runtime::make_tensor_map(args.out, runtime::out_sizes(p), dtype, tile::fragment_rows / heads, heads);
}
inline void make_maps(const ForwardArgs& args, Dtype dtype, int block_q, int block_k, ResidueClassMaps& maps) {
    const Problem& p = *args.problem;
    const int64_t queries = args.layout.queries.modulus, keys = args.layout.keys.modulus;
    maps.q = runtime::make_residue_maps(args.q, runtime::q_sizes(p), dtype, block_q, queries);
    maps.k = runtime::make_residue_maps(args.k, runtime::k_sizes(p), dtype, block_k, keys);
    maps.v = runtime::make_residue_maps(args.v, runtime::v_sizes(p), dtype, block_k, keys);
}

template <class C>
BlockForwardParams<C::any_order> make_params(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    const BlockForwardSpace space(p, args.layout, args.tasks);
    char* const workspace = static_cast<char*>(args.workspace);
    BlockForwardParams<C::any_order> params{.tile = any::TileRows(args.tasks)};
    make_maps(args, C::dtype, C::block_q, C::block_k, params.maps);
    params.q = args.q, params.k = args.k, params.v = args.v, params.out = args.out;
    params.lse = args.lse, params.max_logits = args.max_logits, params.sink_logits = args.sink_logits;
    params.layout = args.layout;
    params.tasks = args.tasks;
    params.parts = any::Partials<float>::at(workspace, p, args.layout, args.tasks);
    params.next_task = nullptr;
    params.notes = reinterpret_cast<int2*>(workspace + space.notes);
    params.heads_q = int(p.heads_q), params.group = int(p.group());
    params.head_dim = int(p.head_dim), params.head_dim_v = int(p.head_dim_v);
    const double scale = p.softcap != 0 ? p.softcap : p.scale;
    params.scale = float(scale), params.scale_log2 = float(scale * M_LOG2E);
    params.has_cap = p.softcap != 0;
    params.into_cap = params.has_cap ? float(p.scale / p.softcap) : 0;
    return params;
}

template <class C, bool HasCap>
void launch_forward(const ForwardArgs& args) {
    auto params = make_params<C>(args);
    const int blocks = std::min(params.tasks.num_tasks, C::ctas * runtime::count_processors(args.device));
    if (blocks < params.tasks.num_tasks) {
        const BlockForwardSpace space(*args.problem, args.layout, args.tasks);
        params.next_task = reinterpret_cast<unsigned*>(static_cast<char*>(args.workspace) + space.counter);
        runtime::clear(params.next_task, sizeof(unsigned), args.stream);
    }
    runtime::launch(block_forward_kernel<C, HasCap>, {unsigned(blocks), unsigned(C::threads), sizeof(Shared<C>)},
                    args.stream, params);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::run(const ForwardArgs& args) {
    using C = Config<D, HeadDim, HeadDimV, BlockQ, BlockK, false>;
    if constexpr (any_order)
        if (!is_consecutive(args.layout.queries) || !is_consecutive(args.layout.keys))
            return launch_forward<Config<D, HeadDim, HeadDimV, BlockQ, BlockK, true>, true>(args);
    if (args.problem->softcap != 0)
        launch_forward<C, true>(args);
    else
        launch_forward<C, false>(args);
}

template <Dtype D, int HeadDim, int HeadDimV, int BlockQ, int BlockK>
void BlockForward<D, HeadDim, HeadDimV, BlockQ, BlockK>::prepare(int32_t device) {
    using C = Config<D, HeadDim, HeadDimV, BlockQ, BlockK, false>;
    const runtime::CurrentDevice current(device);
    runtime::prepare(block_forward_kernel<C, false>, sizeof(Shared<C>));
    runtime::prepare(block_forward_kernel<C, true>, sizeof(Shared<C>));
    if constexpr (any_order) {
        using Ordered = Config<D, HeadDim, HeadDimV, BlockQ, BlockK, true>;
        runtime::prepare(block_forward_kernel<Ordered, true>, sizeof(Shared<Ordered>));
    }
    runtime::prepare_tensor_maps();
}

}  // namespace spattn::sm90
