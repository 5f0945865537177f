// SPDX-License-Identifier: MIT
// Two CTAs of a cluster that share a tile, where heads have more columns than registers have room for: each has half of
// the columns of all operands and results. It makes its columns' part of scores, and of dp, and both add the other's.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/pipeline.cuh"

namespace spattn::sm90 {

// This CTA's number among those that share its tile.
template <class C>
__device__ __forceinline__ int tile_rank() {
    if constexpr (C::in_pair) return int(ptx::cluster_rank());
    else return 0;
}
// The first of the CTA's columns.
template <class C>
__device__ __forceinline__ int first_column() {
    return tile_rank<C>() * C::head_dim;
}

// All threads of the CTAs that share a tile.
template <class C>
__device__ __forceinline__ void sync_tile() {
    if constexpr (C::in_pair) ptx::cluster_sync();
    else __syncthreads();
}

// Places for parts, in turn. With one, and a slot more for k and v, the forward reached 8 % less.
constexpr int part_places = 2;

// What the CTAs of a pair send each other: parts of scores, of 64 rows a warpgroup and so many tokens; and which tasks
// both work on.
template <int Warpgroups, int Tokens>
struct alignas(16) PairShared {
    static constexpr int values = 64 * Tokens, bytes = values * int(sizeof(float));  // of a warpgroup
    static constexpr int parts_bytes = part_places * Warpgroups * bytes;

    float parts[part_places][Warpgroups][values];  // as the other CTA's accumulators lie
    uint32_t task[4];                              // to the second CTA: what the first one took from the counter of tasks
    uint64_t parts_full[part_places][Warpgroups];  // the bytes of parts
    uint64_t parts_read[part_places][Warpgroups];  // of those that went to the other CTA: its warps that read them
    uint64_t task_full;                            // of the second CTA: the bytes of task
    uint64_t task_read;                            // of the first CTA: the other's producer, which has read it

    __device__ __forceinline__ void init() {
        for (int place = 0; place < part_places; ++place)
            for (int i = 0; i < Warpgroups; ++i) {
                ptx::mbarrier_init(&parts_full[place][i], 1);
                ptx::mbarrier_arrive_expect(&parts_full[place][i], bytes);
                ptx::mbarrier_init(&parts_read[place][i], 4);
            }
        ptx::mbarrier_init(&task_full, 1);
        ptx::mbarrier_init(&task_read, 1);
    }

    // A warpgroup's parts go to the other CTA, and those of its warpgroup with the same number are added: so both have
    // the same bits. Before, the place there must be free; after, the other CTA is told that this one has read its own.
    __device__ __forceinline__ void wait_for_room(const Cursor<part_places>& at, int warpgroup) {
        ptx::mbarrier_wait(&parts_read[at.index][warpgroup], at.phase ^ 1);
    }
    template <int Values>
    __device__ __forceinline__ void exchange(float (&s)[Values], const Cursor<part_places>& at, int warpgroup, int thread) {
        static_assert(128 * Values == values, "a thread has as many values as another");
        constexpr int step = 128 * 16;  // bytes, from four values of all threads to their next four
        float* const own = parts[at.index][warpgroup];
        uint64_t* const full = &parts_full[at.index][warpgroup];
        const uint32_t to = of_other(own) + 16 * thread, bar = of_other(full);
#pragma unroll
        for (int i = 0; i < Values; i += 4)
            ptx::cluster_store(to + i / 4 * step, {s[i], s[i + 1], s[i + 2], s[i + 3]}, bar);
        ptx::mbarrier_wait(full, at.phase);
        if (thread == 0) ptx::mbarrier_arrive_expect(full, bytes);  // of the place's next time
        const uint32_t from = ptx::shared_address(own) + 16 * thread;
#pragma unroll
        for (int i = 0; i < Values; i += 4) {
            float part[4];
            ptx::load_shared(part, from + i / 4 * step);
#pragma unroll
            for (int n = 0; n < 4; ++n) s[i + n] += part[n];
        }
    }
    // s: what the parts were added to, or was made of that.
    template <int Values>
    __device__ __forceinline__ void tell_read(const float (&s)[Values], Cursor<part_places>& at, int warpgroup,
                                              int thread) {
        uint64_t* const read = &parts_read[at.index][warpgroup];
        __syncwarp();  // all lanes have read theirs
        if (thread % 32 == 0) ptx::cluster_arrive_after(of_other(read), s[Values - 1]);
        at.advance();
    }
    __device__ __forceinline__ static uint32_t of_other(const void* shared) {
        return ptx::cluster_address(shared, ptx::cluster_rank() ^ 1);
    }

    // What the first CTA has taken from the counter of tasks.
    __device__ __forceinline__ int agree_on(unsigned taken, uint32_t& phase, int lane) {
        if (ptx::cluster_rank() == 0) {
            ptx::mbarrier_wait(&task_read, phase ^ 1);
            if (lane == 0)
                ptx::cluster_store(ptx::cluster_address(task, 1), {__uint_as_float(taken), 0, 0, 0},
                                   ptx::cluster_address(&task_full, 1));
            taken = __shfl_sync(~0u, taken, 0);
        } else {
            if (lane == 0) ptx::mbarrier_arrive_expect(&task_full, sizeof task);
            ptx::mbarrier_wait(&task_full, phase);
            taken = task[0];
            __syncwarp();  // all lanes have read it
            if (lane == 0) ptx::cluster_arrive_after(ptx::cluster_address(&task_read, 0), __uint_as_float(taken));
        }
        phase ^= 1;
        return int(taken);
    }
};

// A CTA that has its tiles for itself.
struct Alone {
    static constexpr int parts_bytes = 0;
    __device__ __forceinline__ void init() {}
};

}  // namespace spattn::sm90
