// SPDX-License-Identifier: MIT
// Lists of rows of keys for a call on a cache, from its lists of tokens, or from the plan's layout. A thread makes one
// key after the other of a list, which several CTAs share where lists are few: each key is a chain of loads that wait
// for memory.
#pragma once

#include <algorithm>

#include "any/cache_call.cuh"
#include "any/cache_lists.h"
#include "any/cache_rows.cuh"
#include "any/divisor.h"
#include "core/math.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int list_threads = 256;

struct CacheListParams {
    CallCache cache;
    CallLists lists;
    LayoutView known;    // of blocks of consecutive tokens, where the pattern says what queries see
    ListedKeys made;
    CacheRowsOfCall rows;
    int64_t all;         // lists of the round
    int ctas_of_list;
    int heads, most;     // heads: that have lists; most: entries of a list of the call
    int heads_q, group;
    Divisor block_k, page_size;
    bool has_pages, has_parents;

    // The row of k that a key of a list lies in.
    __device__ int32_t row_of(int64_t sequence, int64_t token, int64_t block, int number) const {
        if (block < 0 || block > int(token) / block_k) return no_token;
        const int key = int(block) * block_k + number;
        return key > token ? no_token : row_of(sequence, key);
    }
    __device__ int32_t row_of(int64_t sequence, int key) const {
        if (!has_pages) return key;
        const int of_sequence = key / page_size;
        const int64_t page = integer_at(cache.page_table, sequence, of_sequence);
        return int((page < 0 || page >= cache.pages ? 0 : page) * cache.page_rows) + key - of_sequence * page_size;
    }

    // Where queries are nodes of trees: whether one's own key, by number, is on a node's way to its root. begin: the
    // first query of the sequence.
    __device__ bool is_on_way(int64_t batch, int64_t begin, int64_t node, int64_t key) const {
        while (node > key) {
            const int64_t parent = integer_at(cache.parents, batch, begin + node);
            node = parent < node ? max(parent, int64_t(-1)) : -1;
        }
        return node == key;
    }
};

// The list whose part a CTA makes.
struct ListOfQuery {
    int64_t list, batch, row, head;
    CacheRowsOfCall::Owner owner;
    int64_t token;  // -1: none

    __device__ ListOfQuery(const CacheListParams& params, int64_t list) : list(list) {
        const int64_t query = list / params.heads;
        head = list - query * params.heads;
        batch = query / params.made.count, row = params.made.first + query - batch * params.made.count;
        owner = params.rows.owner_of(params.cache, batch, row);
        token = params.rows.token_of(params.cache, owner);
    }
};

// Each list, by CTAs that take shares of it: make(list, the first key of this thread, and how far it is to the next).
template <class Make>
__device__ __forceinline__ void each_list(const CacheListParams& params, Make make) {
    const int share = int(blockIdx.x) % params.ctas_of_list, step = int(gridDim.x) / params.ctas_of_list;
    for (int64_t list = int(blockIdx.x) / params.ctas_of_list; list < params.all; list += step)
        make(ListOfQuery(params, list), share * list_threads + int(threadIdx.x), params.ctas_of_list * list_threads);
}

static __global__ void __launch_bounds__(list_threads)
    list_keys_kernel(const __grid_constant__ CacheListParams params) {
    const IndexView &indices = params.lists.indices, &counts = params.lists.counts;
    each_list(params, [&](const ListOfQuery& of, int first, int step) {
        int32_t* const keys = params.made.keys + of.list * params.made.shape.most;
        const int64_t at = of.batch * indices.batch + of.row * indices.row + of.head * indices.head;
        const int64_t given = counts.data ? integer_at(counts, of.batch, of.row, of.head) : params.most;
        const int count = of.token < 0 ? 0 : int(min(max(given, int64_t(0)), int64_t(params.most))) * params.block_k;
        if (first == 0) params.made.counts[of.list] = count;
        for (int n = first; n < count; n += step) {
            const int entry = n / params.block_k;
            const int64_t block = integer_at(indices, at + entry * indices.entry);
            keys[n] = params.row_of(of.owner.sequence, of.token, block, n - entry * params.block_k);
        }
    });
}

// Runs of a row of the layout, as many as a CTA has threads: how many keys each keeps of a query, and where they go.
struct RunsOfQuery {
    int ends[list_threads];       // keys up to the end of each run
    uint64_t kept[list_threads];  // of a block
    int first[list_threads];      // block
    int runs;
    int of_warps[list_threads / 32];

    // By all threads. A block has a word of each mask for each of its queries. Returns how many keys there are.
    __device__ int take(const LayoutView& known, const RowOfPlan& row, int base, int query) {
        const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
        const int taken = min(row.count() - base, list_threads);
        int keys = 0;
        if (thread == 0) runs = taken;
        if (thread < taken) {
            const Run run = row.run(base + thread);
            const uint64_t word =
                run.mask == full_block ? ~uint64_t(0) : known.masks[int64_t(run.mask) * list_block + query];
            kept[thread] = word, first[thread] = run.first, keys = run.count * __popcll(word);
        }
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_up_sync(~0u, keys, unsigned(distance));
            if (lane >= distance) keys += before;
        }
        if (lane == 31) of_warps[warp] = keys;
        __syncthreads();
        for (int n = 0; n < warp; ++n) keys += of_warps[n];
        ends[thread] = keys;
        __syncthreads();
        return ends[taken - 1];
    }

    // The key at a place among them.
    __device__ int key(int place) const {
        int begin = 0, end = runs - 1;  // the first run that ends behind the place
        while (begin < end) {
            const int middle = (begin + end) / 2;
            if (ends[middle] > place) end = middle;
            else begin = middle + 1;
        }
        const uint64_t word = kept[begin];
        const int of_block = __popcll(word), of_run = place - (begin ? ends[begin - 1] : 0);
        const int block = of_run / of_block;
        return (first[begin] + block) * list_block + set_bit(word, of_run - block * of_block);
    }

private:
    // The number of a word's n-th bit that is set, both from 0.
    __device__ static int set_bit(uint64_t word, int n) {
        if (word == ~uint64_t(0)) return n;
        int at = 0;
#pragma unroll
        for (int half = 32; half > 0; half /= 2) {
            const int below = __popcll(word >> at & ((uint64_t(1) << half) - 1));
            if (n >= below) n -= below, at += half;
        }
        return at;
    }
};

static __global__ void __launch_bounds__(list_threads)
    list_pattern_kernel(const __grid_constant__ CacheListParams params) {
    __shared__ RunsOfQuery runs;
    const LayoutView& known = params.known;
    each_list(params, [&](const ListOfQuery& of, int first, int step) {
        int32_t* const keys = params.made.keys + of.list * params.made.shape.most;
        const int64_t sequence = of.owner.sequence;
        int count = 0;
        if (of.token >= 0) {
            const int token = int(of.token), order = int(of.owner.order), start = token - order;
            const int kind = known.kind_of_head[sequence * params.heads_q + of.head * params.group];
            const ListsView& lists = known.by_query;
            const RowOfPlan row(lists, params.made.stems, int64_t(kind) * lists.rows + token / list_block);
            for (int base = 0; base < row.count(); base += list_threads) {
                const int found = runs.take(known, row, base, token % list_block);
                for (int place = first; place < found; place += step) {
                    const int key = runs.key(place);
                    const bool is_seen = !params.has_parents || key < start ||
                                         params.is_on_way(of.batch, of.row - order, order, key - start);
                    keys[count + place] = is_seen ? params.row_of(sequence, key) : no_token;
                }
                count += found;
                __syncthreads();  // all have read what the next runs take the place of
            }
        }
        if (first == 0) params.made.counts[of.list] = count;
    });
}

// ---- launch ----
void list_keys_of_cache(const ForwardArgs& args, const ListedKeys& to) {
    const runtime::CurrentDevice current(args.device);
    const Problem& p = *args.problem;
    constexpr int64_t most_ctas = 1 << 16, few_ctas = 1024;
    const int64_t lists = to.lists(), ctas = ceil_div(to.shape.most, int64_t(list_threads));
    const int ctas_of_list = int(std::clamp<int64_t>(few_ctas / lists, 1, ctas));
    const CacheListParams params{args.cache,
                                 args.call_lists,
                                 args.layout,
                                 to,
                                 CacheRowsOfCall::of(p),
                                 lists,
                                 ctas_of_list,
                                 int(to.shape.heads),
                                 int(p.call_lists.most),
                                 int(p.heads_q),
                                 int(p.group()),
                                 Divisor(to.shape.block_k),
                                 Divisor(p.page_size),
                                 p.page_size != 0,
                                 p.has_parents};
    const unsigned grid = unsigned(std::min(lists, most_ctas)) * unsigned(ctas_of_list);
    const auto kernel = to.shape.of_pattern() ? list_pattern_kernel : list_keys_kernel;
    runtime::launch(kernel, {grid, unsigned(list_threads), 0}, args.stream, params);
}

void prepare_cache_lists(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(list_keys_kernel, 0);
    runtime::prepare(list_pattern_kernel, 0);
}

}  // namespace spattn::any
