// SPDX-License-Identifier: MIT
// A call on a cache: its layout, its queries where the layout's rows have them, and what came of them back.
//
//     lay out      lists     a CTA a row of tiles   the plan's lists of the row that queries lie in, or their blocks one by
//                                                   one where pages say which these are
//                  tasks     a thread each          the plan's share of each row, as long as that is now
//                  tokens    a thread each          of listed tiles, as far as a query may see
//                  queries   a thread 16 bytes      for rows of kernels that take no shift, or an element each
//     bring back   results   as queries             for these
#pragma once

#include <algorithm>

#include "any/cache_layout.h"
#include "core/math.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

constexpr int cache_threads = 256;

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

// How many CTAs each job has.
struct CacheJobs {
    static constexpr int64_t most = 1024;  // more have nothing to do that these cannot
    int lists, tasks, entries, tokens_of_entry, queries;

    explicit CacheJobs(const CacheLayout& cache, int64_t copied) {
        lists = int(std::min(cache.kinds * cache.rows, most));
        tasks = ctas(std::max(int64_t(cache.from.num_tasks), cache.batch * cache.heads));
        entries = cache.listed ? int(std::min(cache.page_size ? cache.batch : 1, most)) : 0;
        tokens_of_entry = int(std::clamp<int64_t>(cache.seq_k / (8 * cache_threads), 1, 32));
        queries = cache.copies ? ctas(copied) : 0;
    }
    static int ctas(int64_t threads) { return int(std::min(ceil_div(threads, cache_threads), most)); }
    unsigned all() const { return unsigned(lists + tasks + entries * tokens_of_entry + queries); }
};

struct CacheParams {
    CacheLayout cache;
    CacheJobs jobs;
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
    // The plan's row of a tile of an entry's queries, or -1 where it has none.
    __device__ int row_of(int64_t start, int tile) const {
        const int row = first_row(start) + tile;
        const bool has_queries = tile * int64_t(cache.tile_q) < before(start) + cache.seq_q;
        return row < cache.known.by_query.rows && has_queries ? max(row, -1) : -1;
    }
    __device__ int known_kind(int64_t head) const {
        return cache.known.head_kinds == 1 ? 0 : cache.known.kind_of_head[head];
    }
    // The row of k where a page begins. Pages that do not exist are not read.
    __device__ int64_t page_begin(int64_t batch, int64_t page_of_entry) const {
        const int64_t page = integer(cache.cache.page_table, batch, page_of_entry);
        return (page < 0 || page >= cache.cache.pages ? 0 : page) * cache.cache.page_rows;
    }
};

// One row of tiles of a kind of heads, by a CTA.
__device__ __forceinline__ void make_cache_row(const CacheParams& params, int64_t n) {
    const CacheLayout& cache = params.cache;
    const ListsView& known = cache.known.by_query;
    const int64_t head = n / cache.rows * cache.heads_of_kind, batch = head / cache.heads;
    const int row = params.row_of(params.start_of(batch), int(n % cache.rows));
    const Slice slice = row >= 0 ? known.slices[int64_t(params.known_kind(head)) * known.rows + row] : Slice{0, 0};
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

// Tokens of an entry's listed tiles, as far as its queries may see; by a few of the CTAs that it has. Without pages
// entries share them, and all are named.
__device__ __forceinline__ void name_cache_tokens(const CacheParams& params, int64_t batch, int cta, int ctas) {
    const CacheLayout& cache = params.cache;
    const int tile_k = cache.tile_k;
    const int64_t seen = int64_t(params.first_row(params.start_of(batch)) + cache.rows) * cache.tile_q;
    const int64_t end = (cache.page_size ? min(max(seen, int64_t(0)), cache.seq_k) : cache.seq_k) + tile_k - 1;
    int32_t* const to = cache.tokens + (cache.page_size ? batch * cache.tiles_k * tile_k : 0);
    const unsigned size = unsigned(cache.page_size), last = unsigned(end / tile_k * tile_k);
    const unsigned step = unsigned(ctas) * cache_threads;
    for (unsigned token = unsigned(cta) * cache_threads + threadIdx.x; token < last; token += step) {
        to[token] = token >= cache.seq_k ? no_token
                    : size               ? int(params.page_begin(batch, token / size) + token % size)
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
        Unit* const of_copy =
            static_cast<Unit*>(copy.data) + batch * copy.batch + head * copy.head + place * copy.row + unit;
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
    const int row = params.row_of(params.start_of(head / params.cache.heads), tile);
    return row >= 0 ? params.cache.of_plan.row_blocks[int64_t(params.known_kind(head)) * known.rows + row] : 0;
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

// Each job has CTAs of its own: all are chains of loads that wait for memory, one after the other if a CTA did several.
static __global__ void __launch_bounds__(cache_threads)
    lay_out_cache_kernel(const __grid_constant__ CacheParams params) {
    const CacheLayout& cache = params.cache;
    const CacheJobs& jobs = params.jobs;
    int cta = int(blockIdx.x);
    if (cta < jobs.lists) {
        for (int64_t n = cta; n < cache.kinds * cache.rows; n += jobs.lists) make_cache_row(params, n);
        return;
    }
    cta -= jobs.lists;
    if (cta < jobs.tasks) {
        const int64_t thread = int64_t(cta) * cache_threads + threadIdx.x;
        const int64_t threads = int64_t(jobs.tasks) * cache_threads;
        for (int64_t n = thread; n < cache.from.num_tasks; n += threads)
            cache.tasks[n] = cache_task(params, cache.from.tasks[n]);
        for (int64_t n = thread; n < cache.from.num_joins; n += threads)
            cache.joins[n] = cache_join(params, cache.from.joins[n]);
        for (int64_t head = thread; head < cache.batch * cache.heads; head += threads)
            cache.kind_of_head[head] = int(head / cache.heads_of_kind);
        for (int64_t batch = thread; batch < cache.batch; batch += threads)
            cache.before[batch] = params.before(params.start_of(batch));
        return;
    }
    cta -= jobs.tasks;
    if (cta < jobs.entries * jobs.tokens_of_entry) {
        const int ctas = jobs.tokens_of_entry;
        for (int64_t batch = cta / ctas; batch < (cache.page_size ? cache.batch : 1); batch += jobs.entries)
            name_cache_tokens(params, batch, cta % ctas, ctas);
        return;
    }
    cta -= jobs.entries * jobs.tokens_of_entry;
    copy_cache_rows<true>(params, params.q, int64_t(cta) * cache_threads + threadIdx.x,
                          int64_t(jobs.queries) * cache_threads);
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
    const CopiedRows q = CopiedRows::of(args.q, cache.q, p.head_dim, element);
    return {cache, CacheJobs(cache, cache.batch * cache.heads * cache.rows * cache.tile_q * q.units), q,
            CopiedRows::of(args.out, cache.out, p.head_dim_v, element), args.lse, args.max_logits};
}

void lay_out_cache(const ForwardArgs& args, const CacheLayout& to) {
    const runtime::CurrentDevice current(args.device);
    const CacheParams params = make_cache_params(args, to);
    runtime::launch(lay_out_cache_kernel, {params.jobs.all(), unsigned(cache_threads), 0}, args.stream, params);
}

void bring_back_from_cache(const ForwardArgs& args, const CacheLayout& from) {
    const runtime::CurrentDevice current(args.device);
    const CacheParams params = make_cache_params(args, from);
    const int64_t copied = from.batch * from.heads * from.seq_q * params.out.units;
    const unsigned ctas = unsigned(std::clamp<int64_t>(ceil_div(copied, cache_threads), 1, 1024));
    runtime::launch(bring_back_kernel, {ctas, unsigned(cache_threads), 0}, args.stream, params);
}

void prepare_cache_layout(int32_t device) {
    const runtime::CurrentDevice current(device);
    runtime::prepare(lay_out_cache_kernel, 0);
    runtime::prepare(bring_back_kernel, 0);
}

CacheSteps cache_steps() { return {lay_out_cache, bring_back_from_cache, prepare_cache_layout}; }

}  // namespace spattn::any
