// SPDX-License-Identifier: MIT
// Lists of rows of keys for a call on a cache, from its lists of tokens. A thread makes one key after the other of a
// list, which several CTAs share where lists are few: each key is a chain of loads that wait for memory.
#pragma once

#include <algorithm>

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
    ListedKeys made;
    CacheRowsOfCall rows;
    int64_t all;         // lists
    int ctas_of_list;
    int heads_kv, most;  // most: entries of a list of the call
    Divisor block_k, page_size;
    bool has_pages;

    // The row of k that a key of a list lies in.
    __device__ int32_t row_of(int64_t sequence, int64_t token, int64_t block, int number) const {
        if (block < 0 || block > int(token) / block_k) return no_token;
        const int key = int(block) * block_k + number;
        if (key > token) return no_token;
        if (!has_pages) return key;
        const int of_sequence = key / page_size;
        const int64_t page = integer_at(cache.page_table, sequence, of_sequence);
        return int((page < 0 || page >= cache.pages ? 0 : page) * cache.page_rows) + key - of_sequence * page_size;
    }
};

static __global__ void __launch_bounds__(list_threads)
    list_keys_kernel(const __grid_constant__ CacheListParams params) {
    const int64_t most = params.made.shape.most;
    const IndexView &indices = params.lists.indices, &counts = params.lists.counts;
    const int share = int(blockIdx.x) % params.ctas_of_list, step = int(gridDim.x) / params.ctas_of_list;
    for (int64_t list = int(blockIdx.x) / params.ctas_of_list; list < params.all; list += step) {
        const int64_t query = list / params.heads_kv, head = list - query * params.heads_kv;
        const int64_t batch = query / params.rows.seq_q, row = query - batch * params.rows.seq_q;
        const CacheRowsOfCall::Owner owner = params.rows.owner_of(params.cache, batch, row);
        const int64_t token = params.rows.token_of(params.cache, owner);
        const int64_t at = batch * indices.batch + row * indices.row + head * indices.head;
        const int64_t given = counts.data ? integer_at(counts, batch, row, head) : params.most;
        const int count = token < 0 ? 0 : int(min(max(given, int64_t(0)), int64_t(params.most))) * params.block_k;
        if (share == 0 && threadIdx.x == 0) params.made.counts[list] = count;
        for (int n = share * list_threads + int(threadIdx.x); n < count; n += params.ctas_of_list * list_threads) {
            const int entry = n / params.block_k;
            const int64_t block = integer_at(indices, at + entry * indices.entry);
            params.made.keys[list * most + n] =
                params.row_of(owner.sequence, token, block, n - entry * params.block_k);
        }
    }
}

// ---- launch ----
void list_keys_of_cache(const ForwardArgs& args, const ListedKeys& to) {
    const runtime::CurrentDevice current(args.device);
    const Problem& p = *args.problem;
    constexpr int64_t most_ctas = 1 << 16, few_ctas = 1024;
    const int64_t lists = to.shape.lists(), ctas = ceil_div(to.shape.most, int64_t(list_threads));
    const int ctas_of_list = int(std::clamp<int64_t>(few_ctas / lists, 1, ctas));
    const CacheListParams params{args.cache, args.call_lists, to, CacheRowsOfCall::of(p), lists, ctas_of_list,
                                 int(p.heads_kv), int(p.call_lists.most), Divisor(to.shape.block_k),
                                 Divisor(p.page_size), p.page_size != 0};
    const unsigned grid = unsigned(std::min(lists, most_ctas)) * unsigned(ctas_of_list);
    runtime::launch(list_keys_kernel, {grid, unsigned(list_threads), 0}, args.stream, params);
}

void prepare_cache_lists(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(list_keys_kernel, 0);
}

}  // namespace spattn::any
