// SPDX-License-Identifier: MIT
// Sums of dq whose parts are added in the order of keys, so that they have the same bits in every call.
//
// A tile of dq has a part for each block of keys that its queries see, which CTAs make at any time. A turn, a word for
// each tile in memory, says whose part is next: who has made it waits for its turn, has the copy engine add it, and
// when it is added gives the turn on. The first part is not added but stored, so that nobody has to clear the sums.
//
// Nobody waits for ever: tasks are taken from a counter, in the order of their blocks of keys, and only wait for tasks
// that were taken before them.
//
// An addition takes longer than a block until it is complete, so two warps that do nothing else take turns at them.
// Where the tasks of a tile begin at the same time, they work one behind the other from then on, by the time of an
// addition: that is lost once a call, not once a task. Where lists have gaps, tasks of a tile drift apart and wait
// again and again.
//
// Measured (H100, bf16, d128, TFLOP/s in order / as they come): full_16k 632 / 659, causal_16k 617 / 645, window1k_16k
// 408 / 404, window4k_128k 594 / 601, streaming_16k 378 / 389, bsr128_50_4k 365 / 488, bsr128_10_16k 319 / 510.
#pragma once

#include "layout/view.h"
#include "ptx/mbarrier.cuh"
#include "ptx/order.cuh"
#include "ptx/tma.cuh"
#include "sm90/pipeline.cuh"

namespace spattn::sm90 {

struct QuerySums {
    float* tiles;    // [batch, heads_q, blocks of queries][tile as the threads hold it]
    int32_t* turns;  // in order: of each tile the block of keys whose part is added next, 0 at first
};

// What the producer tells the writers, and how they and the consumers wait for each other.
template <class C>
struct SumsQueue {
    // Parts that the producer may have told and no writer read: fewer, for it waits for slots whose dq must be sent.
    static constexpr int told_ahead = 8;
    struct QueuedPart {
        int32_t tile, key_block;  // (batch, head, block of queries), or -1 after the last part
    };
    QueuedPart part[told_ahead];
    // Told: the producer; a writer waits. Full: one arrival a warp that makes dq; a writer waits. Sent: a writer, when
    // the tile in shared memory has been read; consumers wait. A writer has barriers of its own, so that nobody who
    // falls behind takes the phase of one tile for that of another.
    uint64_t told[told_ahead], full[C::writers], sent[C::writers];

    __device__ __forceinline__ void init() {
        for (uint64_t& bar : told) ptx::mbarrier_init(&bar, 1);
        for (uint64_t& bar : full) ptx::mbarrier_init(&bar, C::dq_warps);
        for (uint64_t& bar : sent) ptx::mbarrier_init(&bar, 1);
    }
};

__device__ __forceinline__ Slice keys_of(const LayoutView& layout, int plane, int block) {
    const int list = layout.head_kinds == 1 ? 0 : layout.kind_of_head[plane];
    return layout.by_query.slices[list * layout.by_query.rows + block];
}
__device__ __forceinline__ bool has_blocks(const LayoutView& layout, int plane, int block) {
    const Slice slice = keys_of(layout, plane, block);
    return slice.begin < slice.end;
}

// A warp that sends every second tile of dq.
template <class C>
struct SumsWriter {
    static_assert(C::writers == 2, "consumers count tiles by two");
    const LayoutView& layout;
    const QuerySums& sums;
    SumsQueue<C>& queue;
    const float* staged;
    const int lane;
    const unsigned which;

    __device__ __forceinline__ void run() {
        for (unsigned n = which;; n += C::writers) {
            const unsigned at = n % queue.told_ahead;
            ptx::mbarrier_wait(&queue.told[at], n / queue.told_ahead & 1);
            const int tile = queue.part[at].tile, key_block = queue.part[at].key_block;
            if (tile < 0) return;
            send(tile, key_block, n / C::writers & 1);
        }
    }

    __device__ __forceinline__ void send(int tile, int key_block, uint32_t phase) {
        const int plane = tile / layout.by_query.rows;
        const Slice slice = keys_of(layout, plane, tile - plane * layout.by_query.rows);
        const bool is_first = layout.by_query.runs[slice.begin].first == key_block;
        const int next = block_after(slice, key_block);
        // All lanes look: those that waited for the barrier below would suspend their warp, and one that looked at
        // memory beside them would hardly get on.
        if (!is_first) {
            while (ptx::load_relaxed(sums.turns + tile) != key_block) ptx::pause();
            ptx::load_acquire(sums.turns + tile);
            ptx::fence_async_global();
        }
        __syncwarp();  // whoever saw it last
        ptx::mbarrier_wait(&queue.full[which], phase);
        if (lane == 0) {
            float* const to = sums.tiles + size_t(tile) * C::dq_tile;
            if (is_first)
                ptx::bulk_store(to, staged, C::dq_tile * sizeof(float));
            else
                ptx::bulk_add(to, staged, C::dq_tile * sizeof(float));
            ptx::bulk_commit();
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(&queue.sent[which]);
            ptx::bulk_wait();
            if (next != no_block) ptx::store_release(sums.turns + tile, next);
        }
        __syncwarp();
    }

    // The block of keys that a list has next; lists begin at 0, which no block comes after.
    static constexpr int no_block = 0;
    __device__ __forceinline__ int block_after(const Slice& slice, int key_block) const {
        for (int begin = slice.begin; begin < slice.end; begin += 32) {
            int after = no_block;
            if (begin + lane < slice.end) {
                const Run run = layout.by_query.runs[begin + lane];
                if (run.first > key_block)
                    after = run.first;
                else if (run.first + run.count > key_block + 1)
                    after = key_block + 1;
            }
            const unsigned found = __ballot_sync(~0u, after != no_block);
            if (found) return __shfl_sync(~0u, after, __ffs(int(found)) - 1);
        }
        return no_block;
    }
};

}  // namespace spattn::sm90
