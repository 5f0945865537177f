// SPDX-License-Identifier: MIT
//
//     s = q kT,  p = exp2(scale_log2 s - m),  out = sum(p v) / sum(p),  lse = scale m + log(sum(p))
//
// over the blocks that a layout lists for each query block. The kernel knows runs of blocks and bit masks, no pattern.
//
//   grid      one CTA an SM, persistent; tasks longest first, from a counter
//   producer  one warp walks the runs 32 at a time and fills a ring of 32 KiB tiles with k and v blocks by TMA, with
//             the next q ahead; it tells the consumers each block's mask through shared memory: they read no list
//   consumers 64 rows a warpgroup, scores and out in registers; p becomes the a operand of p v in place; a masked block
//             costs a thread one 64-bit load and predicated moves (tile/fragment.h); out leaves through the q tile
//
//   192 rows: three warpgroups, each serial: what one waits for, the others hide. A 64 x 128 part of a masked block
//             that keeps nothing is skipped, so edges cost what 64-row blocks would.
//   128 rows: two warpgroups take turns; each begins s of block j + 1 before p v of block j, also from one task into
//             the next, and makes probabilities under them:
//
//               tensor   | s1 | p0 v0 | the other's | s2 | p1 v1 | the other's
//               the rest      | softmax of s1       |    | softmax of s2
//
// What binds. The products of a 64 x 128 block are 1024 cycles of the tensor unit, its exponentials 512 of theirs;
// reading operands from shared memory takes 80 % of its rate while TMA writes the next ones. Counters (ncu, full_16k at
// 1.77 GHz): the tensor pipe is busy 71 % of all cycles with 192 rows, 68 % with 128; L2 gives 34 and 38 % of its rate,
// issue slots are 38 % used. Without the copies (stale tiles, timing only) full_16k runs at 768 with 192 rows and 658
// with 128: 192 rows lose 7 % to memory and 5 points to waves (1376 equal tasks on 132 SMs fill 10.4 of 11); 128 rows
// are bound by each warpgroup's own chain of scores, softmax and waits, 2700 cycles a block. Beyond some milliseconds
// the 700 W cap decides: the clock falls to 1.5 GHz for GEMM, cuDNN and this kernel alike.
//
// Measured (H200, bf16, L2 cold, 10 ms between calls, TFLOP/s on kept pairs, on two machines, 2026-11): full_16k 707
// and 730, causal_16k 679 and 708, window1k_16k 526 and 540, window4k_128k 706, streaming_16k 522, streaming_128k 550
// with 192 rows; bsr128_10_16k 553 and 567, bsr128_05_32k 572 with 128.
// What the layout costs: single blocks instead of runs nothing (full_16k as 128 runs a row); a mask on every block 2 %
// with 192 rows and 3 % with 128, with 256 different masks 3 and 4 %.
//
// Tried and dropped: descriptors from registers that are not known uniform (3 R2UR an instruction: 676 instead of 730
// on full_16k); one q tile and five ring tiles for 192 rows (284 instead of 260 us on window1k_16k); a static round of
// tasks instead of the counter (2 to 11 % slower); heads one after the other instead of longest first (10 % slower on
// causal_16k, 4 to 7 % faster on bsr128_10_16k and 05_32k); looking at the ring's next barriers ahead (3 % slower); no
// turns between two warpgroups (the same); one wait for p v after the exponentials, which the compiler moves above
// them.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/math.h"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "runtime/launch.h"
#include "runtime/tensor_map.h"
#include "sm90/block_forward.h"
#include "tile/fragment.h"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

// ---- configuration ----
template <int BlockQ>
struct Config {
    static constexpr int block_q = BlockQ, block_k = 128, head_dim = 128;
    static constexpr int warpgroups = block_q / 64, threads = 128 * (warpgroups + 1);
    static constexpr bool overlap = warpgroups == 2;  // registers for two tiles of scores exist only then
    static constexpr int q_tiles = 2, slots = overlap ? 5 : 4;
    static constexpr int producer_registers = overlap ? 40 : 32, consumer_registers = overlap ? 232 : 160;
    static constexpr int panel_bytes = block_q * 128, box_bytes = block_k * 128;  // of 64 columns
    static_assert(warpgroups == 2 || warpgroups == 3, "register budgets are for these");
    static_assert(producer_registers + warpgroups * consumer_registers <= 65536 / 128, "an SM has no more");
};

// ---- shared memory ----
struct TaskMessage {
    int32_t head, row, count, part;  // count: blocks; end_of_work after the last task
};
constexpr int32_t end_of_work = -1;

// What consumers must know of a block: its mask above, and below a bit for each warpgroup that has a row with a key.
constexpr int part_bits = 3;
__device__ __forceinline__ int32_t pack_message(int mask, int parts) {
    return int32_t(uint32_t(mask) << part_bits) | (parts & ((1 << part_bits) - 1));
}

template <class C>
struct Shared {
    uint8_t q[C::q_tiles][2][C::panel_bytes];  // a tile becomes its task's out once all its scores are done
    uint8_t ring[C::slots][2][C::box_bytes];   // blocks of k and v in the order of their use
    TaskMessage task[C::q_tiles];
    int32_t block[C::slots];
    uint64_t q_full[C::q_tiles];   // producer with the bytes of q; consumers wait
    uint64_t q_empty[C::q_tiles];  // one arrival a consumer warpgroup, when its out has left; producer waits
    uint64_t full[C::slots];       // producer with the bytes of a block; consumers wait
    uint64_t empty[C::slots];      // one arrival a consumer warp; producer waits
    uint64_t landed;               // bytes of a v block with dead keys; producer waits
};

// A position in a ring of tiles and the parity of its turn.
template <unsigned Size>
struct Cursor {
    unsigned turn = 0;
    __device__ __forceinline__ int index() const { return turn % Size; }
    __device__ __forceinline__ uint32_t phase() const { return turn / Size & 1; }
    __device__ __forceinline__ void advance() { ++turn; }
};

// ---- producer: one warp walks the lists and keeps the ring full ----
template <class C>
struct Producer {
    const BlockForwardParams& params;
    Shared<C>& shared;
    const int lane;
    Cursor<C::q_tiles> q;
    Cursor<C::slots> slot;
    uint32_t landed_phase = 0;
    int batch, head_kv;                             // of the task
    int live;
    int pending = -1, pending_batch, pending_head, pending_set;  // the v block that follows the next k block

    __device__ __forceinline__ void run() {
        for (int at = blockIdx.x; at < params.tasks.num_tasks;) {
            // Asked for one task ahead and first looked at when that is done: the round trip is never waited for.
            unsigned taken = 0;
            if (params.next_task && lane == 0) taken = atomicAdd(params.next_task, 1);
            task(params.tasks.tasks[at]);
            at = params.next_task ? int(__shfl_sync(~0u, taken, 0)) + int(gridDim.x) : params.tasks.num_tasks;
        }
        if (pending >= 0) load_pending_v();
        announce({0, 0, end_of_work, 0}, 0);
    }

    __device__ __forceinline__ void task(const Task& task) {
        const LayoutView& layout = params.layout;
        const int list = layout.classes == 1 ? 0 : layout.class_of[task.head];
        const Slice slice = layout.by_query.slices[list * layout.by_query.rows + task.row];
        batch = task.head / params.heads_q;
        head_kv = (task.head - batch * params.heads_q) / params.group;
        live = list * layout.by_key.rows;
        announce({task.head, task.row, task.take, task.part}, task.take ? 2 * C::panel_bytes : 0);
        int skip = task.skip, left = task.take;
        for (int base = slice.begin; base < slice.end && left; base += 32) {
            Run mine{0, 0, full_block};
            if (base + lane < slice.end) mine = layout.by_query.runs[base + lane];
            int my_parts = ~0;
            if (mine.mask != full_block) my_parts = int(layout.masks[size_t(mine.mask) * layout.mask_words]);
            const int runs = min(32, slice.end - base);
            for (int r = 0; r < runs && left; ++r) {
                const int first = __shfl_sync(~0u, mine.first, r), count = __shfl_sync(~0u, mine.count, r);
                const int mask = __shfl_sync(~0u, mine.mask, r), parts = __shfl_sync(~0u, my_parts, r);
                const int from = min(skip, count), to = min(count, from + left);
                skip -= from, left -= to - from;
                for (int n = from; n < to; ++n) load_block(first + n, pack_message(mask, parts));
            }
        }
    }

    // Publishes a task, with its q tile where it has work.
    __device__ __forceinline__ void announce(const TaskMessage& message, int bytes) {
        ptx::mbarrier_wait(&shared.q_empty[q.index()], q.phase() ^ 1);
        if (lane == 0) {
            shared.task[q.index()] = message;
            ptx::mbarrier_arrive_expect(&shared.q_full[q.index()], bytes);
            if (bytes) {
                const int head = message.head - batch * params.heads_q;
                for (int panel = 0; panel < 2; ++panel)
                    ptx::tma_load_4d(shared.q[q.index()][panel], &params.q, 64 * panel, head, message.row * C::block_q,
                                     batch, &shared.q_full[q.index()]);
            }
        }
        q.advance();
    }

    __device__ __forceinline__ void load_block(int block, int32_t message) {
        ptx::mbarrier_wait(&shared.empty[slot.index()], slot.phase() ^ 1);
        if (lane == 0) {
            shared.block[slot.index()] = message;
            ptx::mbarrier_arrive_expect(&shared.full[slot.index()], 2 * C::box_bytes);
            load(&params.k, block, head_kv, batch, &shared.full[slot.index()]);
        }
        slot.advance();
        if (C::overlap && pending >= 0) load_pending_v();
        pending = block, pending_batch = batch, pending_head = head_kv;
        pending_set = params.layout.live_keys.set_of ? params.layout.live_keys.set_of[live + block] : all_live;
        if (!C::overlap) load_pending_v();
    }

    __device__ __forceinline__ void load_pending_v() {
        uint64_t* full = &shared.full[slot.index()];
        ptx::mbarrier_wait(&shared.empty[slot.index()], slot.phase() ^ 1);
        uint64_t* bytes_to = pending_set == all_live ? full : &shared.landed;
        if (lane == 0) {
            ptx::mbarrier_arrive_expect(bytes_to, 2 * C::box_bytes);
            load(&params.v, pending, pending_head, pending_batch, bytes_to);
        }
        if (pending_set != all_live) clear_dead_keys(full);
        slot.advance();
        pending = -1;
    }

    // 0 * NaN is NaN: rows of v that no query sees must not hold what the caller left there.
    __device__ __forceinline__ void clear_dead_keys(uint64_t* full) {
        ptx::mbarrier_wait(&shared.landed, landed_phase);
        landed_phase ^= 1;
        const uint64_t* set = params.layout.live_keys.sets + pending_set * params.layout.live_keys.words;
        for (int key = 0; key < C::block_k; ++key)
            if (!(set[key / 64] >> (key % 64) & 1)) {
                uint8_t* row = shared.ring[slot.index()][lane / 16] + key * 128 + lane % 16 * 8;
                *reinterpret_cast<uint64_t*>(row) = 0;
            }
        ptx::fence_async_shared();
        __syncwarp();  // all lanes' zeros before lane 0 tells the consumers
        if (lane == 0) ptx::mbarrier_arrive(full);
    }

    __device__ __forceinline__ void load(const CUtensorMap* map, int block, int head, int entry, uint64_t* bar) {
        for (int panel = 0; panel < 2; ++panel)
            ptx::tma_load_4d(shared.ring[slot.index()][panel], map, 64 * panel, head, block * C::block_k, entry, bar);
    }
};

// ---- consumer: one warpgroup owns 64 rows of scores and output ----
template <class C>
struct Consumer {
    const BlockForwardParams& params;
    Shared<C>& shared;
    const int warpgroup, thread;  // of the warpgroup
    Cursor<C::q_tiles> q;         // the next task's
    Cursor<C::slots> slot;
    int held = -1;                // a q tile that this warpgroup's out is leaving
    int k_slot, v_slot, mask_id;
    uint64_t mask_word;
    float s[64], r_out[64];
    uint32_t p[8][4];
    tile::RowState rows;

    // The blocks of the next task with work, or end_of_work. Its message stays in place until its q tile is released.
    __device__ __forceinline__ int take_task(int& q_index) {
        for (;;) {
            ptx::mbarrier_wait(&shared.q_full[q.index()], q.phase());
            q_index = q.index();
            q.advance();
            const int count = shared.task[q_index].count;
            if (count) return count;
            store_empty(q_index);
        }
    }

    // Waits for the next block's k. False where no row of this warpgroup sees it.
    __device__ __forceinline__ bool take_block() {
        k_slot = slot.index();
        ptx::mbarrier_wait(&shared.full[k_slot], slot.phase());
        slot.advance();
        // Read by the lane that will release the slot, so that nobody reads what the producer already overwrites.
        const int32_t message = __shfl_sync(~0u, thread % 32 ? 0 : shared.block[k_slot], 0);
        mask_id = message >> part_bits;
        return message >> warpgroup & 1;
    }

    __device__ __forceinline__ void pass_block() {
        release(k_slot);
        ptx::mbarrier_wait(&shared.full[slot.index()], slot.phase());
        release(slot.index());
        slot.advance();
    }

    // s = q kT of the block taken, begun.
    __device__ __forceinline__ void begin_scores(int q_index) {
        const uint32_t a = ptx::wgmma_descriptor(shared.q[q_index][0] + warpgroup * 8192, 0);
        const uint32_t b = ptx::wgmma_descriptor(shared.ring[k_slot][0], 0);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i)
            ptx::wgmma_m64n128k16(s, a + (i / 4) * (C::panel_bytes / 16) + (i % 4) * 2,
                                  b + (i / 4) * (C::box_bytes / 16) + (i % 4) * 2, i > 0);
        ptx::wgmma_commit();
        if (mask_id != full_block)
            mask_word = __ldg(params.layout.masks + size_t(mask_id) * params.layout.mask_words +
                              tile::fragment_header + warpgroup * 128 + thread);
    }

    // r_out += p v of the block whose scores are done, begun.
    __device__ __forceinline__ void begin_output(bool first) {
        v_slot = slot.index();
        ptx::mbarrier_wait(&shared.full[v_slot], slot.phase());
        slot.advance();
        const uint32_t b = ptx::wgmma_descriptor(shared.ring[v_slot][0], C::box_bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) ptx::wgmma_m64n128k16_transposed(r_out, p[i], b + i * 128, i > 0 || !first);
        ptx::wgmma_commit();
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

    // Scores of the block into probabilities.
    __device__ __forceinline__ bool softmax(float (&factor)[2]) {
        if (mask_id != full_block) tile::mask(s, mask_word);
        return tile::softmax(s, rows, params.scale_log2, factor);
    }

    __device__ __forceinline__ void store(int q_index, const tile::RowState& done) {
        float l[2], lse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            l[h] = tile::quad_sum(done.l[h]);
            lse[h] = l[h] > 0 ? done.m[h] * params.scale + logf(l[h]) : -INFINITY;
            l[h] = l[h] > 0 ? 1 / l[h] : 0;
        }
        tile::scale_rows(r_out, l[0], l[1]);
        if (shared.task[q_index].part == whole_row) store_whole(q_index, lse);
        else store_part(q_index, lse);
    }

    __device__ __forceinline__ void store_whole(int q_index, const float (&lse)[2]) {
        const uint32_t panel = ptx::shared_address(shared.q[q_index][0] + warpgroup * 8192);
        tile::store_swizzled(r_out, panel, panel + C::panel_bytes, thread);
        send(q_index, lse);
    }

    // The out that lies in the q tile to memory, lse from registers.
    __device__ __forceinline__ void send(int q_index, const float (&lse)[2]) {
        const TaskMessage task = shared.task[q_index];
        ptx::fence_async_shared();
        ptx::named_barrier_sync(3 + warpgroup, 128);  // the warpgroup's tile is written before thread 0 sends it
        const int batch = task.head / params.heads_q, head = task.head - batch * params.heads_q;
        const int row = task.row * C::block_q + warpgroup * 64;
        if (thread == 0) {
            for (int panel = 0; panel < 2; ++panel)
                ptx::tma_store_4d(&params.out, 64 * panel, head, row, batch,
                                  shared.q[q_index][panel] + warpgroup * 8192);
            ptx::bulk_commit();
        }
        held = q_index;
        if (params.lse && thread % 4 == 0)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = row + tile::fragment_row(thread, 2 * h);
                if (at < params.seq_q)
                    params.lse[batch * params.lse_batch + head * params.lse_head + at * params.lse_row] = lse[h];
            }
    }

    __device__ __forceinline__ void store_part(int q_index, const float (&lse)[2]) {
        const size_t row = size_t(shared.task[q_index].part) * C::block_q + warpgroup * 64;
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
            float* out = params.part_out + (row + tile::fragment_row(thread, i)) * C::head_dim +
                         tile::fragment_column(thread, i);
            *reinterpret_cast<float2*>(out) = make_float2(r_out[i], r_out[i + 1]);
        }
        if (thread % 4 == 0)
            for (int h = 0; h < 2; ++h) params.part_lse[row + tile::fragment_row(thread, 2 * h)] = lse[h];
        held = q_index;
        ptx::named_barrier_sync(3 + warpgroup, 128);  // all are done with the q tile and its message
    }

    // A row of blocks without a key: out 0, lse -infinity.
    __device__ __forceinline__ void store_empty(int q_index) {
        release_held();
        for (int i = thread; i < 1024; i += 128) {
            uint8_t* panel = shared.q[q_index][i / 512] + warpgroup * 8192;
            reinterpret_cast<uint4*>(panel)[i % 512] = uint4{0, 0, 0, 0};
        }
        send(q_index, {-INFINITY, -INFINITY});
        release_held();
    }

    __device__ __forceinline__ void clear_output() {
#pragma unroll
        for (int i = 0; i < 64; ++i) r_out[i] = 0;
    }

    // Scores of block j + 1 are begun before the output of block j, across tasks too, so that the matrix unit works
    // while
    // probabilities are made.
    __device__ __forceinline__ void run_overlapped() {
        int q_index;
        int left = take_task(q_index);
        if (left == end_of_work) return;
        if (warpgroup == 1) ptx::named_barrier_arrive(1, 256);
        take_block();
        begin_scores(q_index);
        ptx::wgmma_wait<0>();
        release(k_slot);
        float factor[2];
        softmax(factor);
        tile::pack(s, p);
        bool first = true;
        for (;;) {
            const bool last = --left == 0;
            int next, next_q = q_index;
            if (last) {
                release_held();
                next = take_task(next_q);
                if (next == end_of_work) break;
            }
            ptx::named_barrier_sync(1 + warpgroup, 256);
            take_block();
            begin_scores(next_q);
            begin_output(first);
            ptx::named_barrier_arrive(2 - warpgroup, 256);
            release_held();
            ptx::wgmma_wait<1>();
            release(k_slot);
            const tile::RowState done = rows;
            if (last) rows = tile::RowState{};
            const bool rescale = softmax(factor);
            if (last) {
                ptx::wgmma_wait_all();
                release(v_slot);
                store(q_index, done);
                q_index = next_q, left = next;
            } else {
                ptx::wgmma_wait<0>();
                release(v_slot);
                if (rescale) tile::scale_rows(r_out, factor[0], factor[1]);
            }
            first = last;
            tile::pack(s, p);
        }
        if (warpgroup == 0) ptx::named_barrier_sync(1, 256);
        begin_output(first);
        ptx::wgmma_wait<0>();
        store(q_index, rows);
        release_held();
    }

    // One block after another; the other warpgroups fill the gaps.
    __device__ __forceinline__ void run_serial() {
        for (;;) {
            if (C::q_tiles == 1) release_held();
            int q_index;
            int left = take_task(q_index);
            if (left == end_of_work) break;
            rows = tile::RowState{};
            bool first = true;
            for (; left; --left) {
                if (!take_block()) {
                    pass_block();
                    continue;
                }
                begin_scores(q_index);
                release_held();
                ptx::wgmma_wait<0>();
                release(k_slot);
                float factor[2];
                const bool rescale = softmax(factor);
                if (rescale && !first) tile::scale_rows(r_out, factor[0], factor[1]);
                tile::pack(s, p);
                begin_output(first);
                first = false;
                ptx::wgmma_wait<0>();
                release(v_slot);
            }
            if (first) clear_output();
            release_held();
            store(q_index, rows);
        }
        release_held();
    }
};

// ---- kernel ----
template <class C>
__global__ void __launch_bounds__(C::threads, 1) block_forward(const __grid_constant__ BlockForwardParams params) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared<C>& shared = *reinterpret_cast<Shared<C>*>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::q_tiles; ++i) {
            ptx::mbarrier_init(&shared.q_full[i], 1);
            ptx::mbarrier_init(&shared.q_empty[i], C::warpgroups);
        }
        for (int i = 0; i < C::slots; ++i) {
            ptx::mbarrier_init(&shared.full[i], 1);
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
        if (threadIdx.x < 128 * C::warpgroups + 32) Producer<C>{params, shared, int(threadIdx.x % 32)}.run();
    } else {
        ptx::take_registers<C::consumer_registers>();
        Consumer<C> consumer{params, shared, warpgroup, int(threadIdx.x % 128)};
        if (C::overlap) consumer.run_overlapped();
        else consumer.run_serial();
    }
}

// ---- launch ----
constexpr size_t counter_bytes = 256;  // of the workspace's head, so that what follows stays aligned

inline runtime::Sizes q_sizes(const Problem& p) { return {p.batch, p.heads_q, p.seq_q, p.head_dim}; }
inline runtime::Sizes k_sizes(const Problem& p) { return {p.batch, p.heads_kv, p.seq_k, p.head_dim}; }

template <class C>
BlockForwardParams make_params(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    BlockForwardParams params;
    params.q = runtime::make_tensor_map(args.q, q_sizes(p), C::block_q);
    params.k = runtime::make_tensor_map(args.k, k_sizes(p), C::block_k);
    params.v = runtime::make_tensor_map(args.v, k_sizes(p), C::block_k);
    params.out = runtime::make_tensor_map(args.out, q_sizes(p), 64);
    params.layout = args.layout;
    params.tasks = args.tasks;
    params.lse = static_cast<float*>(args.lse.data);
    params.lse_batch = args.lse.batch, params.lse_head = args.lse.head, params.lse_row = args.lse.row;
    char* workspace = static_cast<char*>(args.workspace);
    params.part_out = reinterpret_cast<float*>(workspace + counter_bytes);
    params.part_lse = params.part_out + size_t(args.tasks.num_parts) * C::block_q * C::head_dim;
    params.next_task = nullptr;
    params.heads_q = int(p.heads_q), params.group = int(p.group()), params.seq_q = int(p.seq_q);
    params.scale = float(p.scale), params.scale_log2 = float(p.scale * M_LOG2E);
    return params;
}

template <class C>
void launch_block_forward(const ForwardArgs& args) {
    BlockForwardParams params = make_params<C>(args);
    const int blocks = std::min(params.tasks.num_tasks, runtime::count_processors(args.device));
    if (blocks < params.tasks.num_tasks) {
        params.next_task = static_cast<unsigned*>(args.workspace);
        runtime::clear(args.workspace, sizeof(unsigned), args.stream);
    }
    runtime::launch(block_forward<C>, {unsigned(blocks), unsigned(C::threads), sizeof(Shared<C>)}, args.stream, params);
}

}  // namespace spattn::sm90
