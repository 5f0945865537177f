// SPDX-License-Identifier: MIT
// Lists of keys become lists by key, on the device and in each call: which lists name a block of keys, in rising
// order, and each as often as it does.
//
//     count    how many entries name each block      atomics, in each stretch of lists; of few blocks in shared memory
//     scan     where the lists of each block end     a CTA a plane
//     fill     each entry takes a place              atomics again: from the end down, in whatever order they come
//     sort     each block's lists of a stretch       a warp or a CTA each compares them, or counts how often each
//                                                    number is there: from here on all calls have the same bits
//
// Lists of any content fit: the room of a plane follows from the shape of its lists.
#pragma once

#include "any/gather_lists.cuh"
#include "runtime/launch.h"

namespace spattn::any {

struct TransposeParams {
    GatherLists lists;
    ListsByKey by_key;

    __device__ int64_t* begin_of(int64_t plane) const { return by_key.begin + plane * by_key.places; }
    // Where a block's lists stand in the plane's.
    struct Span {
        int64_t begin, count;
    };
    __device__ Span span_of(int64_t plane, int64_t block) const {
        const int64_t* const at = begin_of(plane) + block * by_key.stretches;
        return {at[0], at[by_key.stretches] - at[0]};
    }
    // The place in begin_of() of a list that names a block, and the number under which it stands there.
    __device__ int64_t place_of(unsigned list, int64_t block) const {
        const unsigned joined = unsigned(by_key.joined);
        return unsigned(block) / joined * by_key.stretches + list / (ListsByKey::numbers / joined);
    }
    __device__ int32_t number_of(unsigned list, int64_t block) const {
        const unsigned joined = unsigned(by_key.joined);
        return int32_t(list * joined + unsigned(block) % joined);
    }
    __device__ int32_t* lists_of(int64_t plane) const { return by_key.lists + lists.entries_before(plane); }
};

constexpr int entry_threads = 256, scan_threads = 1024, sort_threads = 128, sort_warps = sort_threads / 32;
constexpr int64_t most_list_ctas = 1 << 16;  // they go on to further lists, or blocks, as far as there are any

// A lane has an entry; lists of few entries share a warp. Counts, or takes the places that the scan has found.
template <bool Fills>
__global__ void __launch_bounds__(entry_threads) entries_kernel(const __grid_constant__ TransposeParams params) {
    const ListSizes& sizes = params.lists.sizes;
    unsigned lanes = 32;  // of a list
    while (sizes.most && lanes / 2 >= sizes.most) lanes /= 2;
    const unsigned at_once = entry_threads / lanes, lists = unsigned(sizes.lists);  // 32 bits: fits() sees to it
    const unsigned all = unsigned(sizes.planes) * lists;
    for (unsigned n = blockIdx.x * at_once + threadIdx.x / lanes; n < all; n += gridDim.x * at_once) {
        const unsigned plane = n / lists, list = n % lists;
        const KeyList entries = params.lists.list(plane, list);
        int64_t* const begin = params.begin_of(plane);
        int32_t* const to = params.lists_of(plane);
        for (int i = int(threadIdx.x % lanes); i < entries.count; i += int(lanes)) {
            const int64_t block = entries.block(entries.load(i), sizes.blocks);
            if (block < 0) continue;
            auto* const at = reinterpret_cast<unsigned long long*>(begin + params.place_of(list, block));
            if (!Fills) atomicAdd(at, 1ull);
            else to[int64_t(atomicAdd(at, ~0ull)) - 1] = params.number_of(list, block);  // ~0: one less
        }
    }
}

// Where blocks are few, many entries would meet at few counters: a CTA counts those of a chunk of lists in shared
// memory, and asks for places of all of them at once.
struct ListChunks {
    static constexpr int entries = 4096, most_blocks = 1024;  // of a chunk; that have counters in shared memory
    unsigned lists, of_plane;  // lists: of a chunk, a power of two and within a stretch

    static bool fit(const ListSizes& sizes, const ListsByKey& by_key) {
        return sizes.most && divide_up(sizes.blocks, by_key.joined) <= most_blocks &&
               double(sizes.lists) * double(sizes.most) < double(int64_t(1) << 31);
    }
    __host__ __device__ ListChunks(const ListSizes& sizes, const ListsByKey& by_key)
        : lists(unsigned(ListsByKey::numbers / by_key.joined)) {
        while (lists > 1 && int64_t(lists) * sizes.most > entries) lists /= 2;
        of_plane = (unsigned(sizes.lists) + lists - 1) / lists;
    }
};

template <bool Fills>
__global__ void __launch_bounds__(entry_threads) chunks_kernel(const __grid_constant__ TransposeParams params) {
    __shared__ int32_t counts[ListChunks::most_blocks];
    const ListSizes& sizes = params.lists.sizes;
    const ListChunks chunks(sizes, params.by_key);
    const unsigned most = unsigned(sizes.most), joined = unsigned(params.by_key.joined);
    const unsigned blocks = (unsigned(sizes.blocks) + joined - 1) / joined;
    for (unsigned n = blockIdx.x; n < unsigned(sizes.planes) * chunks.of_plane; n += gridDim.x) {
        const unsigned plane = n / chunks.of_plane, first = n % chunks.of_plane * chunks.lists;
        const unsigned all = min(chunks.lists, unsigned(sizes.lists) - first) * most;
        // put(list, block) for each entry of the chunk that names a block.
        const auto for_each_entry = [&](auto put) {
            for (unsigned i = threadIdx.x; i < all; i += entry_threads) {
                const KeyList entries = params.lists.list(plane, first + i / most);
                const int entry = int(i % most);
                const int64_t block = entry < entries.count ? entries.block(entries.load(entry), sizes.blocks) : -1;
                if (block >= 0) put(first + i / most, unsigned(block));
            }
        };
        for (unsigned block = threadIdx.x; block < blocks; block += entry_threads) counts[block] = 0;
        __syncthreads();  // before somebody counts
        for_each_entry([&](unsigned, unsigned block) { atomicAdd(&counts[block / joined], 1); });
        __syncthreads();  // all are counted
        for (unsigned block = threadIdx.x; block < blocks; block += entry_threads) {
            const int count = counts[block];
            if (!count) continue;
            auto* const at = reinterpret_cast<unsigned long long*>(params.begin_of(plane) +
                                                                   params.place_of(first, int64_t(block) * joined));
            if (!Fills) atomicAdd(at, uint64_t(count));
            else counts[block] = int32_t(atomicAdd(at, ~uint64_t(count) + 1));  // where this chunk's places end
        }
        __syncthreads();  // places are known, or counts have been read
        if constexpr (Fills) {
            int32_t* const to = params.lists_of(plane);
            for_each_entry([&](unsigned list, unsigned block) {
                to[atomicAdd(&counts[block / joined], -1) - 1] = params.number_of(list, block);
            });
            __syncthreads();  // before counts are another chunk's
        }
    }
}

// put(at, own, before) for each place up to `count`, by a CTA: what own(at) says, and the sum of all before; at `count`
// it is 0 and the sum of all. What put() writes own() may have read.
template <class Sum, class Own, class Put>
__device__ __forceinline__ void scan(int64_t count, Own own, Put put) {
    __shared__ Sum sums[scan_threads / 32];
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    Sum before = 0;  // of the places that are done
    for (int64_t first = 0; first <= count; first += scan_threads) {
        const int64_t at = first + threadIdx.x;
        const Sum mine = at < count ? own(at) : Sum(0);
        Sum sum = mine;
        for (int n = 1; n < 32; n *= 2) {
            const Sum more = __shfl_up_sync(~0u, sum, n);
            if (lane >= n) sum += more;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();  // the sums of all warps are there
        Sum all = 0;
        for (int n = 0; n < scan_threads / 32; ++n) {
            if (n == warp) sum += before + all;
            all += sums[n];
        }
        if (at <= count) put(at, mine, sum - mine);
        before += all;
        __syncthreads();  // all have read the sums
    }
}

// Counts become ends, which filling moves down to where each block's lists begin. The last of a plane stays: its end.
static __global__ void __launch_bounds__(scan_threads) scan_kernel(const __grid_constant__ TransposeParams params) {
    int64_t* const at = params.begin_of(blockIdx.x);
    scan<int64_t>(
        params.by_key.places - 1, [&](int64_t place) { return at[place]; },
        [&](int64_t place, int64_t own, int64_t before) { at[place] = before + own; });
}

// Lists of a block in a stretch, as numbers from `first` on.
struct SortedPlace {
    int32_t* lists = nullptr;
    int64_t count = 0;
    int first = 0;

    __device__ SortedPlace() = default;
    __device__ SortedPlace(const TransposeParams& params, int64_t n) {
        const int64_t places = params.by_key.places - 1, plane = n / places, place = n % places;
        const int64_t* const begin = params.begin_of(plane) + place;
        lists = params.lists_of(plane) + begin[0], count = begin[1] - begin[0];
        first = int(place % params.by_key.stretches) * ListsByKey::numbers;
    }
};

// Few lists: a lane each compares its own with all.
__device__ __forceinline__ void sort_by_warp(const SortedPlace& place, int lane) {
    const int count = int(place.count);
    const int32_t mine = lane < count ? place.lists[lane] : 0;
    int before = 0;
    for (int i = 0; i < count; ++i) {
        const int32_t other = __shfl_sync(~0u, mine, i);
        before += other < mine || (other == mine && i < lane);
    }
    if (lane < count) place.lists[before] = mine;
}

// Warps have a place each, and where one of these has many lists, all have it together.
static __global__ void __launch_bounds__(sort_threads) sort_kernel(const __grid_constant__ TransposeParams params) {
    constexpr int numbers = ListsByKey::numbers, own = numbers / sort_threads;
    static_assert(own == 32, "a thread's counts begin a bank after those of the thread before");
    const auto at = [](int number) { return number + number / own; };
    __shared__ int32_t counts[numbers + sort_threads];
    __shared__ int32_t sums[sort_warps];
    const int64_t all = params.lists.sizes.planes * (params.by_key.places - 1);
    const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const auto sort_by_all = [&](const SortedPlace& place) {
        if (place.count <= sort_threads) {  // to compare so few takes less time than to go through all numbers
            const int count = int(place.count);
            if (thread < count) counts[thread] = place.lists[thread];
            __syncthreads();  // all have been read
            if (thread < count) {
                const int32_t mine = counts[thread];
                int before = 0;
                for (int i = 0; i < count; ++i) before += counts[i] < mine || (counts[i] == mine && i < thread);
                place.lists[before] = mine;
            }
            __syncthreads();  // before counts are another place's
            return;
        }
        for (int i = thread; i < numbers + sort_threads; i += sort_threads) counts[i] = 0;
        __syncthreads();  // before somebody counts
        for (int64_t i = thread; i < place.count; i += sort_threads)
            atomicAdd(&counts[at(place.lists[i] - place.first)], 1);
        __syncthreads();  // all are counted
        int sum = 0;  // how often this thread's numbers are there; end: and those before
        for (int i = 0; i < own; ++i) sum += counts[at(thread * own + i)];
        int end = sum;
        for (int step = 1; step < 32; step *= 2) {
            const int more = __shfl_up_sync(~0u, end, step);
            if (lane >= step) end += more;
        }
        if (lane == 31) sums[warp] = end;
        __syncthreads();  // the sums of all warps are there, and what is listed has been read
        for (int before = 0; before < warp; ++before) end += sums[before];
        int32_t* to = place.lists + end - sum;
        for (int i = 0; i < own; ++i)
            for (int times = counts[at(thread * own + i)]; times; --times) *to++ = place.first + thread * own + i;
        __syncthreads();  // before counts are another place's
    };
    for (int64_t first = int64_t(blockIdx.x) * sort_warps; first < all; first += int64_t(gridDim.x) * sort_warps) {
        const SortedPlace mine = first + warp < all ? SortedPlace(params, first + warp) : SortedPlace();
        const bool has_many = mine.count > 32;
        if (mine.count > 1 && !has_many) sort_by_warp(mine, lane);
        if (!__syncthreads_or(has_many)) continue;
        for (int64_t n = first; n < min(first + sort_warps, all); ++n) {
            const SortedPlace place(params, n);
            if (place.count > 32) sort_by_all(place);
        }
    }
}

// ---- launch ----
template <bool Fills>
void launch_entries(const TransposeParams& params, void* stream) {
    const ListSizes& sizes = params.lists.sizes;
    const auto launch = [&](auto kernel, int64_t wanted) {
        const unsigned ctas = unsigned(std::min(wanted, most_list_ctas));
        runtime::launch(kernel, {ctas, unsigned(entry_threads), 0}, stream, params);
    };
    const int64_t lanes = sizes.most ? std::min<int64_t>(sizes.most, 32) : 32;
    if (ListChunks::fit(sizes, params.by_key))
        launch(chunks_kernel<Fills>, sizes.planes * ListChunks(sizes, params.by_key).of_plane);
    else
        launch(entries_kernel<Fills>, divide_up(sizes.planes * sizes.lists * lanes, entry_threads));
}

inline void transpose_lists(const TransposeParams& params, void* stream) {
    const ListSizes& sizes = params.lists.sizes;
    const int64_t groups = divide_up(sizes.planes * (params.by_key.places - 1), sort_warps);
    const unsigned sort_ctas = unsigned(std::min(groups, most_list_ctas));
    runtime::clear(params.by_key.begin, params.by_key.begin_bytes(sizes), stream);
    launch_entries<false>(params, stream);
    runtime::launch(scan_kernel, {unsigned(sizes.planes), unsigned(scan_threads), 0}, stream, params);
    launch_entries<true>(params, stream);
    runtime::launch(sort_kernel, {sort_ctas, unsigned(sort_threads), 0}, stream, params);
}

inline void prepare_transpose() {
    runtime::prepare(chunks_kernel<false>, 0);
    runtime::prepare(chunks_kernel<true>, 0);
    runtime::prepare(entries_kernel<false>, 0);
    runtime::prepare(scan_kernel, 0);
    runtime::prepare(entries_kernel<true>, 0);
    runtime::prepare(sort_kernel, 0);
}

}  // namespace spattn::any
