// SPDX-License-Identifier: MIT
// Sums of dq whose parts are added in whatever order they come, and become elements as soon as the last part is there,
// while L2 has them.
//
// A consumer warp adds a strip, its 16 rows of a tile. How many parts of each strip are still to come is counted in
// memory. Three warps of a CTA that do nothing else see to that: one, the counter, hears from the consumers which of
// their additions are complete, counts, and lists strips that are; the others, finishers, turn listed strips into
// elements, whichever CTA listed them. Nobody waits for another CTA but where that has a place in the list and is about
// to write it. A finisher leaves when its own CTA's counter has left and the list is empty.
#pragma once

#include "any/element.cuh"
#include "layout/view.h"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/order.cuh"
#include "ptx/tma.cuh"
#include "runtime/launch.h"
#include "sm90/gradient.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/query_sums.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"

namespace spattn::sm90 {

// What consumers tell the counter.
template <class C>
struct AddedStrips {
    static constexpr int told_ahead = 8, finishers = 2;
    static constexpr int32_t no_more = -1;
    int32_t strip[C::warps][told_ahead];
    int32_t told[C::warps];     // strips that each consumer warp has told; the counter looks
    int32_t sent[C::warps];
    int32_t counted[C::warps];  // of these; consumers look
    int32_t is_complete;        // the counter has left; finishers look
    int32_t noted[finishers];   // the last strip with rows to be made again, of each finisher; no_strip where none
    uint64_t finished;          // one arrival a finisher; consumers wait

    __device__ __forceinline__ void init() {
        for (int warp = 0; warp < C::warps; ++warp) told[warp] = counted[warp] = 0, sent[warp] = -1;
        is_complete = 0;
        ptx::mbarrier_init(&finished, finishers);
    }
};

constexpr int32_t no_strip = -1, abandoned = -1;
// Where a strip has rows that are not finite, its sums' place takes a note: the strip noted before, and a bit a row.
__device__ __forceinline__ int2* note_of_strip(float* strip) { return reinterpret_cast<int2*>(strip); }

// ---- consumers ----
template <class C>
struct AddedTeller {
    AddedStrips<C>& added;
    const int warp;  // of the consumers
    int32_t told = 0, sent = no_strip;
#ifdef V3
    __device__ __forceinline__ void tell_sent() {
        if (added.sent[warp] == no_strip) return;
        ptx::bulk_wait();
        tell(added.sent[warp]);
        added.sent[warp] = no_strip;
    }
    __device__ __forceinline__ void tell(int32_t strip) {
        const int32_t t = added.told[warp];
        while (t - ptx::load_acquire_cta(&added.counted[warp]) == AddedStrips<C>::told_ahead) ptx::pause();
        added.strip[warp][t % AddedStrips<C>::told_ahead] = strip;
        ptx::store_release_cta(&added.told[warp], t + 1);
    }
#else
    // Of one lane, that which sends: a strip is told when what was added to it can be seen.
    __device__ __forceinline__ void tell_sent() {
        if (sent == no_strip) return;
#ifdef V1
        ptx::bulk_wait_read();
#else
        ptx::bulk_wait();
#endif
#ifndef V4
        tell(sent);
#endif
        sent = no_strip;
    }
    __device__ __forceinline__ void tell(int32_t strip) {
        while (told - ptx::load_acquire_cta(&added.counted[warp]) == AddedStrips<C>::told_ahead) ptx::pause();
        added.strip[warp][told % AddedStrips<C>::told_ahead] = strip;
        ptx::store_release_cta(&added.told[warp], ++told);
    }
#endif
};

struct NoTeller {
    template <class Sums>
    __device__ __forceinline__ NoTeller(const Sums&, int) {}
};

// ---- counter: lane n hears from consumer warp n ----
template <class C>
struct AddedCounter {
    static_assert(C::warps <= 32, "a lane each");
    const QuerySums& sums;
    AddedStrips<C>& added;
    const int lane;

    __device__ __forceinline__ void run() {
        bool hears = lane < C::warps;
        int32_t counted = 0;
        while (__any_sync(~0u, hears)) {
            const bool is_told = hears && ptx::load_acquire_cta(&added.told[lane]) != counted;
            if (is_told) {
                const int32_t strip = added.strip[lane][counted % AddedStrips<C>::told_ahead];
                ptx::store_release_cta(&added.counted[lane], ++counted);
                hears = strip != AddedStrips<C>::no_more;
                if (hears) count(strip);
            }
            #ifdef V2
            if (!__any_sync(~0u, is_told)) ptx::pause(1000);
#else
            if (!__any_sync(~0u, is_told)) ptx::pause();
#endif
        }
        if (lane == 0) ptx::store_release_cta(&added.is_complete, 1);
    }
    // Finishers that have left abandoned their places in the list; those of this CTA have not.
    __device__ __forceinline__ void count(int32_t strip) {
        if (ptx::add_release(sums.left + strip, -1) != 1) return;
        __threadfence();  // what others added before they counted is seen by who sees the list
        while (ptx::exchange_release(sums.complete + atomicAdd(&sums.progress->listed, 1), strip + 1) == abandoned) {
        }
    }
};

// ---- finishers: a warp each ----
template <class C>
struct SumsFinisher {
    using Element = typename C::Element;
    const GradientParams& params;
    const QuerySums& sums;
    AddedStrips<C>& added;
    const int lane, which;

    __device__ __forceinline__ void run() {
        int32_t noted = no_strip;
        for (;;) {
            const int32_t strip = take();
            if (strip == no_strip) break;
            finish(strip, noted);
        }
        if (lane == 0) {
            added.noted[which] = noted;
            ptx::mbarrier_arrive(&added.finished);
        }
    }

    // The next place of the list, once a strip stands there.
    __device__ __forceinline__ int32_t take() const {
        int32_t found = 0;
        if (lane == 0) {
            int32_t* const place = sums.complete + atomicAdd(&sums.progress->taken, 1);
            while (!found) {
                const bool is_complete = ptx::load_acquire_cta(&added.is_complete);
                found = is_complete ? ptx::exchange_release(place, abandoned) : ptx::load_relaxed(place);
                if (is_complete) break;
                if (!found) ptx::pause(500);
            }
            __threadfence();  // what was added is seen
        }
        return __shfl_sync(~0u, found, 0) - 1;
    }

    __device__ __forceinline__ void finish(int32_t strip, int32_t& noted) const {
#ifdef V5
        return;
#endif
        float* const from = sums.tiles + size_t(strip) * C::dq_warp;
        const int tile = strip / C::dq_warps, rows = params.layout.by_query.rows, plane = tile / rows;
        const int batch = plane / params.heads_q;
        const int row = (tile - plane * rows) * C::block_q + strip % C::dq_warps * C::warp_rows + lane / 4;
        Element* to = any::row_of<Element>(params.dq, batch, plane - batch * params.heads_q, row) + 8 * (lane % 4);
        const float scale = params.scale * tile::ds_unlift<C::dtype>;
        float odd[2] = {0, 0};
#pragma unroll 1
        for (int first = 0; first < params.head_dim; first += 32) {
            float x[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::load_global_l2(x[i], from + 16 * first + 128 * i + 4 * lane);
            uint32_t upper[4], lower[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                odd[0] = fmaf(x[i][0], 0.f, fmaf(x[i][1], 0.f, odd[0]));
                odd[1] = fmaf(x[i][2], 0.f, fmaf(x[i][3], 0.f, odd[1]));
                upper[i] = tile::pack<C::dtype>(scale * x[i][0], scale * x[i][1]);
                lower[i] = tile::pack<C::dtype>(scale * x[i][2], scale * x[i][3]);
            }
            tile::transpose_quad(upper, lane);
            tile::transpose_quad(lower, lane);
            if (first + 8 * (lane % 4) >= params.head_dim) continue;
            if (row < params.seq_q) ptx::store_global(to + first, upper);
            if (row + 8 < params.seq_q) ptx::store_global(to + first + 8 * params.dq.row, lower);
        }
        if (__all_sync(~0u, odd[0] == 0 && odd[1] == 0)) return;
        const unsigned bits = tile::rows_with(!(odd[0] == 0), !(odd[1] == 0));
        if (lane == 0) *note_of_strip(from) = make_int2(noted, int(bits));
        noted = strip;
    }
};

// ---- before: sums and lists begin at zero, and strips know how many parts will come ----
// A CTA has a tile. Where no part will come, dq is 0.
constexpr int clear_threads = 256;

template <class C>
__global__ void __launch_bounds__(clear_threads)
    clear_sums_kernel(const __grid_constant__ GradientParams params, const __grid_constant__ QuerySums sums) {
    const ListsView& lists = params.layout.by_query;
    const int tile = int(blockIdx.x), plane = tile / lists.rows, row = tile - plane * lists.rows;
    auto* const to = reinterpret_cast<float4*>(sums.tiles + size_t(tile) * C::dq_tile);
#pragma unroll
    for (int n = 0; n < C::dq_tile / 4 / clear_threads; ++n)
        to[n * clear_threads + threadIdx.x] = make_float4(0, 0, 0, 0);
    if (threadIdx.x >= 32) return;
    const int lane = int(threadIdx.x);
    const Slice slice = keys_of(params.layout, plane, row);
    int parts = 0;
    for (int r = slice.begin + lane; r < slice.end; r += 32) parts += lists.runs[r].count;
    for (int n = 16; n; n /= 2) parts += __shfl_xor_sync(~0u, parts, n);
    if (lane < C::dq_warps) {
        sums.left[tile * C::dq_warps + lane] = parts;
        sums.complete[tile * C::dq_warps + lane] = 0;
    }
    if (tile == 0) {
        for (int i = lane; i < sums.finishers; i += 32) sums.complete[int(gridDim.x) * C::dq_warps + i] = 0;
        if (lane == 0) *sums.progress = {0, 0, 0};
    }
    const int batch = plane / params.heads_q, first = row * C::block_q;
    if (parts == 0)
        clear_rows<typename C::Element>(params.dq, batch, plane - batch * params.heads_q, first,
                                        min(C::block_q, params.seq_q - first), params.head_dim, lane);
}

}  // namespace spattn::sm90
