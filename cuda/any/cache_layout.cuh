// SPDX-License-Identifier: MIT
// A call on a cache: its layout, its queries where the layout's rows have them, and what came of them back.
//
//     lay out      lists     a CTA a row of tiles   the plan's lists of the row that the queries lie in, or their blocks
//                                                   one by one where pages say which these are
//                  tokens    a thread each          of listed tiles, as far as a query may see
//                  queries   a thread 16 bytes      or an element, where rows are not that even
//                  tasks     a thread each          the plan's share of each row, as long as that is now
//     bring back   results   as queries
#pragma once

#include <algorithm>

#include "any/cache_layout.h"
#include "core/math.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

// Rows of a tensor of the call and of its copy, in units of bytes that both are multiples of.
struct CopiedRows {
    TensorView call, copy;  // strides in units; the copy's columns lie side by side
    int units;              // a row
    int unit;               // bytes: 16, 8, 4 or 2

    static CopiedRows of(const TensorView& call, const TensorView& copy, int64_t columns, int64_t element) {
        const int64_t strides[] = {call.batch * element, call.head * element, call.row * element, columns * element,
                                   int64_t(reinterpret_cast<uintptr_t>(call.data) % 16)};
        const bool is_even = (call.column == 1 || columns == 1) &&
                             std::all_of(std::begin(strides), std::end(strides), [](int64_t n) { return n % 16 == 0; });
        const int64_t unit = is_even ? 16 : element;
        const auto in_units = [&](TensorView x) {
            for (int64_t* stride : {&x.batch, &x.head, &x.row}) *stride = *stride * element / unit;
            if (is_even) x.column = 1;
            return x;
        };
        return {in_units(call), in_units(copy), int(columns * element / unit), int(unit)};
    }
};

struct CacheParams {
    CacheLayout cache;
    CopiedRows q, out;
    TensorView lse, max_logits;  // of the call

    __device__ int64_t integer(const IndexView& view, int64_t batch, int64_t entry) const {
        const int64_t at = batch * view.batch + entry * view.entry;
        return view.is_wide ? static_cast<const int64_t*>(view.data)[at] : static_cast<const int32_t*>(view.data)[at];
    }
    __device__ int64_t start_of(int64_t batch) const {
        return min(max(integer(cache.cache.starts, batch, 0), -cache.seq_q), cache.seq_k);
    }
    // The row of the plan's layout that an entry's queries begin in, and how many of its places stand before them.
    __device__ int first_row(int64_t start) const {
        return int((start + int64_t(cache.tile_q) * cache.rows) / cache.tile_q) - cache.rows;
    }
    __device__ int before(int64_t start) const { return int(start - int64_t(first_row(start)) * cache.tile_q); }
    __device__ int known_kind(int64_t head) const {
        return cache.known.head_kinds == 1 ? 0 : cache.known.kind_of_head[head];
    }
    // The row of k where a page begins. Pages that do not exist are not read.
    __device__ int64_t page_begin(int64_t batch, int64_t page_of_entry) const {
        const int64_t page = integer(cache.cache.page_table, batch, page_of_entry);
        return (page < 0 || page >= cache.cache.pages ? 0 : page) * cache.cache.page_rows;
    }
};

constexpr int cache_threads = 256;

// One row of tiles of a kind of heads, by a CTA.
__device__ __forceinline__ void make_cache_row(const CacheParams& params, int64_t n) {
    const CacheLayout& cache = params.cache;
    const ListsView& known = cache.known.by_query;
    const int64_t head = n / cache.rows * cache.heads_of_kind, batch = head / cache.heads;
    const int row = params.first_row(params.start_of(batch)) + int(n % cache.rows);
    const bool is_there = row >= 0 && row < known.rows;
    const Slice slice = is_there ? known.slices[int64_t(params.known_kind(head)) * known.rows + row] : Slice{0, 0};
    const int begin = int(n * cache.room);
    Run* const to = cache.runs + begin;
    int count = slice.end - slice.begin;
    if (cache.keys != CacheKeys::in_pages) {
        const int first = cache.listed && cache.page_size ? int(batch) * cache.tiles_k : 0;
        for (int i = int(threadIdx.x); i < count; i += cache_threads) {
            const Run run = known.runs[slice.begin + i];
            to[i] = {run.first + first, run.count, run.mask};
        }
    } else {
        const int blocks_of_page = int(cache.page_size) / cache.tile_k;
        count = 0;
        for (int i = slice.begin; i < slice.end; ++i) {
            const Run run = known.runs[i];
            for (int at = int(threadIdx.x); at < run.count; at += cache_threads) {
                const int block = run.first + at, page = block / blocks_of_page;
                const int64_t place = params.page_begin(batch, page) / cache.tile_k + block % blocks_of_page;
                to[count + at] = {int(place), 1, run.mask};
            }
            count += run.count;
        }
    }
    if (threadIdx.x == 0) cache.slices[n] = {begin, begin + count};
}

// Tokens of an entry's listed tiles that its queries may see. Without pages entries share them.
__device__ __forceinline__ void name_cache_tokens(const CacheParams& params, int64_t thread, int64_t threads) {
    const CacheLayout& cache = params.cache;
    const int64_t of_entry = int64_t(cache.tiles_k) * cache.tile_k;
    for (int64_t n = thread; n < int64_t(cache.listed) * cache.tile_k; n += threads) {
        const int64_t batch = n / of_entry, token = n % of_entry;
        const int64_t end = int64_t(params.first_row(params.start_of(batch)) + cache.rows) * cache.tile_q;
        if (cache.page_size && token / cache.tile_k * cache.tile_k >= end) continue;
        cache.tokens[n] =
            token >= cache.seq_k ? no_token
            : cache.page_size
                ? int(params.page_begin(batch, token / cache.page_size) + token % cache.page_size)
                : int(token);
    }
}

template <class Unit, bool ToCopy>
__device__ __forceinline__ void copy_cache_rows(const CacheParams& params, const CopiedRows& rows, int64_t thread,
                                                int64_t threads) {
    const CacheLayout& cache = params.cache;
    const unsigned length = unsigned(ToCopy ? cache.rows * cache.tile_q : cache.seq_q), heads = unsigned(cache.heads);
    for (int64_t n = thread; n < int64_t(cache.batch) * heads * length * rows.units; n += threads) {
        // In 64 bits a division takes ten times as long; there are fewer than 2^31 rows.
        const unsigned of_all = rows.units == 16 ? unsigned(n >> 4) : unsigned(n / rows.units);
        const int unit = int(n - int64_t(of_all) * rows.units);
        const unsigned at = of_all % length, plane = of_all / length, batch = plane / heads, head = plane % heads;
        const int64_t before = params.before(params.start_of(batch));
        const int64_t row = ToCopy ? at - before : at, place = row + before;
        const TensorView &call = rows.call, &copy = rows.copy;
        Unit* const of_call = static_cast<Unit*>(call.data) + batch * call.batch + head * call.head + row * call.row +
                              unit * call.column;
        Unit* const of_copy = static_cast<Unit*>(copy.data) + batch * copy.batch + head * copy.head + place * copy.row + unit;
        if constexpr (ToCopy) *of_copy = row >= 0 && row < cache.seq_q ? *of_call : Unit{};
        else *of_call = *of_copy;
    }
}

template <bool ToCopy>
__device__ __forceinline__ void copy_cache_rows(const CacheParams& params, const CopiedRows& rows, int64_t thread,
                                                int64_t threads) {
    switch (rows.unit) {
        case 16: return copy_cache_rows<uint4, ToCopy>(params, rows, thread, threads);
        case 8: return copy_cache_rows<uint64_t, ToCopy>(params, rows, thread, threads);
        case 4: return copy_cache_rows<uint32_t, ToCopy>(params, rows, thread, threads);
        default: return copy_cache_rows<uint16_t, ToCopy>(params, rows, thread, threads);
    }
}

__device__ __forceinline__ int64_t cache_blocks(const CacheParams& params, int head, int tile) {
    const ListsView& known = params.cache.known.by_query;
    const int row = params.first_row(params.start_of(head / params.cache.heads)) + tile;
    const bool is_there = row >= 0 && row < known.rows;
    return is_there ? params.cache.of_plan.row_blocks[int64_t(params.known_kind(head)) * known.rows + row] : 0;
}

// A row that is split has as many parts as it has blocks for.
__device__ __forceinline__ Join cache_join(const CacheParams& params, Join join) {
    const int64_t blocks = cache_blocks(params, join.head, join.row);
    const int64_t parts = (blocks + CacheLayout::least_blocks - 1) / CacheLayout::least_blocks;
    join.parts = int(min(int64_t(join.parts), parts));
    return join;
}

// A task's share of its row, which for parts that the row has not is nothing.
__device__ __forceinline__ Task cache_task(const CacheParams& params, Task task) {
    const CacheLayout& cache = params.cache;
    const int64_t blocks = cache_blocks(params, task.head, task.row);
    task.skip = 0, task.take = int(blocks);
    if (task.part == whole_row) return task;
    const Join join = cache_join(params, cache.from.joins[cache.of_plan.join_of_part[task.part]]);
    const int64_t number = task.part - join.first_part;
    if (number < join.parts) task.skip = int(blocks * number / join.parts);
    task.take = number < join.parts ? int(blocks * (number + 1) / join.parts) - task.skip : 0;
    return task;
}

static __global__ void __launch_bounds__(cache_threads)
    lay_out_cache_kernel(const __grid_constant__ CacheParams params) {
    const CacheLayout& cache = params.cache;
    const int64_t thread = int64_t(blockIdx.x) * cache_threads + threadIdx.x;
    const int64_t threads = int64_t(gridDim.x) * cache_threads;
    for (int64_t n = blockIdx.x; n < cache.kinds * cache.rows; n += gridDim.x) make_cache_row(params, n);
    name_cache_tokens(params, thread, threads);
    copy_cache_rows<true>(params, params.q, thread, threads);
    for (int64_t n = thread; n < cache.from.num_tasks; n += threads)
        cache.tasks[n] = cache_task(params, cache.from.tasks[n]);
    for (int64_t n = thread; n < cache.from.num_joins; n += threads)
        cache.joins[n] = cache_join(params, cache.from.joins[n]);
    for (int64_t head = thread; head < cache.batch * cache.heads; head += threads)
        cache.kind_of_head[head] = int(head / cache.heads_of_kind);
}

static __global__ void __launch_bounds__(cache_threads)
    bring_back_kernel(const __grid_constant__ CacheParams params) {
    const CacheLayout& cache = params.cache;
    const int64_t thread = int64_t(blockIdx.x) * cache_threads + threadIdx.x;
    const int64_t threads = int64_t(gridDim.x) * cache_threads;
    copy_cache_rows<false>(params, params.out, thread, threads);
    const auto bring = [&](const TensorView& call, const TensorView& copy) {
        for (int64_t n = thread; call.data && n < cache.batch * cache.heads * cache.seq_q; n += threads) {
            const int64_t row = n % cache.seq_q, plane = n / cache.seq_q;
            const int64_t batch = plane / cache.heads, head = plane % cache.heads;
            const int64_t place = row + params.before(params.start_of(batch));
            static_cast<float*>(call.data)[batch * call.batch + head * call.head + row * call.row] =
                static_cast<const float*>(copy.data)[batch * copy.batch + head * copy.head + place];
        }
    };
    bring(params.lse, cache.lse);
    bring(params.max_logits, cache.max_logits);
}

// ---- launch ----
CacheParams make_cache_params(const ForwardArgs& args, const CacheLayout& cache) {
    const Problem& p = *args.problem;
    const int64_t element = dtype_row(p.dtype).bytes;
    return {cache, CopiedRows::of(args.q, cache.q, p.head_dim, element),
            CopiedRows::of(args.out, cache.out, p.head_dim_v, element), args.lse, args.max_logits};
}

void launch_for_cache(void (*kernel)(CacheParams), int64_t threads, int64_t ctas, const ForwardArgs& args,
                      const CacheParams& params) {
    constexpr int64_t most_ctas = 1024;  // more have nothing to do that these cannot
    const runtime::CurrentDevice current(args.device);
    const int64_t wanted = std::max(ctas, ceil_div(threads, cache_threads));
    runtime::launch(kernel, {unsigned(std::clamp<int64_t>(wanted, 1, most_ctas)), unsigned(cache_threads), 0},
                    args.stream, params);
}

void lay_out_cache(const ForwardArgs& args, const CacheLayout& to) {
    const CacheParams params = make_cache_params(args, to);
    const int64_t rows = to.batch * to.heads * to.rows * to.tile_q;
    launch_for_cache(lay_out_cache_kernel, rows * params.q.units, to.kinds * to.rows, args, params);
}

void bring_back_from_cache(const ForwardArgs& args, const CacheLayout& from) {
    const CacheParams params = make_cache_params(args, from);
    const int64_t rows = from.batch * from.heads * from.seq_q;
    launch_for_cache(bring_back_kernel, rows * params.out.units, 1, args, params);
}

void prepare_cache_layout(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(lay_out_cache_kernel, 0);
    runtime::prepare(bring_back_kernel, 0);
}

CacheSteps cache_steps() { return {lay_out_cache, bring_back_from_cache, prepare_cache_layout}; }

}  // namespace spattn::any
