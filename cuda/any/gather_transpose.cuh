// SPDX-License-Identifier: MIT
// Lists of keys become lists by key, on the device and in each call: which lists name a block of keys, in rising
// order, and each as often as it does.
//
//     count    how many entries name each block      atomics
//     scan     where the lists of each block end     a CTA a plane
//     fill     each entry takes a place              atomics again: from the end down, in whatever order they come
//     sort     each block's lists                    a CTA a block: from here on all calls have the same bits
//
// Equal entries are alike, so that sorting leaves nothing to chance. Lists of any content fit: the room of a plane
// follows from the shape of its lists.
#pragma once

#include "any/gather_lists.cuh"
#include "runtime/launch.h"

namespace spattn::any {

struct TransposeParams {
    GatherLists lists;
    ListsByKey by_key;

    __device__ int64_t* begin_of(int64_t plane) const { return by_key.begin + plane * (lists.sizes.blocks + 1); }
    __device__ int32_t* lists_of(int64_t plane) const { return by_key.lists + lists.entries_before(plane); }
};

constexpr int entry_threads = 256, scan_threads = 1024, sort_threads = 128;
constexpr int sort_room = 4096;           // lists that are sorted in shared memory; longer ones are where they lie
constexpr int64_t most_list_ctas = 1 << 16;  // they go on to further lists, or blocks, as far as there are any

// A warp has a list, and a lane an entry. Counts, or takes the places that the scan has found.
template <bool Fills>
__global__ void __launch_bounds__(entry_threads) entries_kernel(const __grid_constant__ TransposeParams params) {
    const ListSizes& sizes = params.lists.sizes;
    constexpr int warps = entry_threads / 32;
    for (int64_t n = int64_t(blockIdx.x) * warps + threadIdx.x / 32; n < sizes.planes * sizes.lists;
         n += int64_t(gridDim.x) * warps) {
        const int64_t plane = n / sizes.lists, list = n % sizes.lists;
        const KeyList entries = params.lists.list(plane, list);
        for (int i = int(threadIdx.x) % 32; i < entries.count; i += 32) {
            const int64_t block = entries.block(entries.load(i), sizes.blocks);
            if (block < 0) continue;
            auto* const at = reinterpret_cast<unsigned long long*>(params.begin_of(plane) + block);
            if (!Fills) atomicAdd(at, 1ull);
            else params.lists_of(plane)[int64_t(atomicAdd(at, ~0ull)) - 1] = int32_t(list);  // ~0: one less
        }
    }
}

// Counts become ends, which filling moves down to where each block's lists begin. The last of a plane stays: its end.
static __global__ void __launch_bounds__(scan_threads) scan_kernel(const __grid_constant__ TransposeParams params) {
    __shared__ int64_t sums[scan_threads / 32];
    const int64_t blocks = params.lists.sizes.blocks;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int64_t* const at = params.begin_of(blockIdx.x);
    int64_t before = 0;  // of the blocks that are done
    for (int64_t first = 0; first <= blocks; first += scan_threads) {
        const int64_t block = first + threadIdx.x;
        int64_t sum = block < blocks ? at[block] : 0;
        for (int n = 1; n < 32; n *= 2) {
            const int64_t more = __shfl_up_sync(~0u, sum, n);
            if (lane >= n) sum += more;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();  // the sums of all warps are there
        int64_t all = 0;
        for (int n = 0; n < scan_threads / 32; ++n) {
            if (n == warp) sum += before + all;
            all += sums[n];
        }
        if (block <= blocks) at[block] = sum;
        before += all;
        __syncthreads();  // all have read the sums
    }
}

// Runs of 1, 2, 4, ... are merged, by a network in which the larger value always goes up: what would lie beyond the end
// of the last run, as if it were infinite, need not be there.
static __device__ void sort(int32_t* x, int64_t count) {
    for (int64_t run = 1; run < count; run *= 2)
        for (int64_t half = run; half > 0; half /= 2) {
            for (int64_t n = threadIdx.x;; n += blockDim.x) {
                const int64_t in_half = n & (half - 1), low = 2 * n - in_half;
                // The first step meets both runs from their ends, so that each half is what the next ones need.
                const int64_t high = half == run ? low + 2 * (half - in_half) - 1 : low + half;
                if (low >= count) break;
                if (high >= count || x[low] <= x[high]) continue;
                const int32_t larger = x[low];
                x[low] = x[high], x[high] = larger;
            }
            __syncthreads();  // the next step meets other pairs
        }
}

static __global__ void __launch_bounds__(sort_threads) sort_kernel(const __grid_constant__ TransposeParams params) {
    __shared__ int32_t room[sort_room];
    const ListSizes& sizes = params.lists.sizes;
    for (int64_t n = blockIdx.x; n < sizes.planes * sizes.blocks; n += gridDim.x) {
        const int64_t plane = n / sizes.blocks;
        const int64_t* const begin = params.begin_of(plane) + n % sizes.blocks;
        int32_t* const lists = params.lists_of(plane) + begin[0];
        const int64_t count = begin[1] - begin[0];
        if (count > sort_room) {
            sort(lists, count);
            continue;
        }
        for (int i = int(threadIdx.x); i < count; i += sort_threads) room[i] = lists[i];
        __syncthreads();  // all are there
        sort(room, count);
        for (int i = int(threadIdx.x); i < count; i += sort_threads) lists[i] = room[i];
        __syncthreads();  // before the room is another block's
    }
}

// ---- launch ----
inline void transpose_lists(const TransposeParams& params, void* stream) {
    const ListSizes& sizes = params.lists.sizes;
    const auto ctas = [](int64_t wanted) { return unsigned(std::min(wanted, most_list_ctas)); };
    const unsigned list_ctas = ctas(divide_up(sizes.planes * sizes.lists, entry_threads / 32));
    runtime::clear(params.by_key.begin, ListsByKey::begin_bytes(sizes), stream);
    runtime::launch(entries_kernel<false>, {list_ctas, unsigned(entry_threads), 0}, stream, params);
    runtime::launch(scan_kernel, {unsigned(sizes.planes), unsigned(scan_threads), 0}, stream, params);
    runtime::launch(entries_kernel<true>, {list_ctas, unsigned(entry_threads), 0}, stream, params);
    runtime::launch(sort_kernel, {ctas(sizes.planes * sizes.blocks), unsigned(sort_threads), 0}, stream, params);
}

inline void prepare_transpose() {
    runtime::prepare(entries_kernel<false>, 0);
    runtime::prepare(scan_kernel, 0);
    runtime::prepare(entries_kernel<true>, 0);
    runtime::prepare(sort_kernel, 0);
}

}  // namespace spattn::any
