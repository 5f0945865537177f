// SPDX-License-Identifier: MIT
// The producer of block_forward.cuh.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/row_end.cuh"
#include "sm90/token_tiles.cuh"

namespace spattn::sm90 {

// ---- producer: one warp walks the lists and keeps the ring full ----
// Four warps where tokens stand in any order: each walks, and all copy the rows of listed tiles.
template <class C>
struct Producer {
    using Element = typename C::Element;

    const typename C::Params& params;
    typename C::Shared& shared;
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

}  // namespace spattn::sm90
