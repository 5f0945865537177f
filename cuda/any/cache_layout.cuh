// SPDX-License-Identifier: MIT
// A call on a cache: its layout, its queries where the layout's rows have them, and what came of them back.
//
//     lay out      lists     a CTA a row of tiles   the plan's lists of the row that queries lie in, or their blocks one by
//                                                   one where pages say which these are
//                  masks     a thread 8 bytes       the plan's, where calls add their own (cache_masks.cuh)
//                  tasks     a thread each          the plan's share of each row, as long as that is now
//                  joins     a thread each          of the parts that there are; and whose lists a head has
//                  spans     a thread each          which queries a tile has
//                  tokens    a thread each          of listed tiles, as far as a query may see
//                  nobody's  a thread a row         queries of a call that belong to no sequence
//                  queries   a thread 16 bytes      for rows of kernels that take no spans, or an element each
//     widen        copy      some CTAs a tile       of a float8 cache, for rows that read none (cache_widen.cuh)
//     bring back   results   as queries             for these
#pragma once

#include <algorithm>

#include "any/cache_append.h"
#include "any/cache_call.cuh"
#include "any/cache_layout.h"
#include "any/cache_lists.h"
#include "any/cache_masks.cuh"
#include "any/cache_widen.cuh"
#include "any/row_of_runs.cuh"
#include "core/math.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace spattn::any {

// Notes that queries see the tiles of a row's runs: a run by a warp.
__device__ __forceinline__ void mark_seen(const CacheLayout& cache, int64_t sequence, const RowOfPlan& known) {
    uint8_t* const seen = cache.seen + sequence * cache.tiles_k;
    for (int i = int(threadIdx.x) / 32; i < known.count(); i += cache_threads / 32) {
        const Run run = known.run(i);
        for (int at = int(threadIdx.x) % 32; at < run.count; at += 32) seen[run.first + at] = 1;
    }
}

// The blocks of a run one by one, where pages say which these are; by a CTA. Some pages at once: each read waits for
// memory.
__device__ __forceinline__ void name_blocks(const CacheParams& params, int sequence, const Run& run,
                                            const CacheParams::OwnTiles& own, int own_mask, Run* to) {
    constexpr int at_once = 4;
    for (int first = int(threadIdx.x); first < run.count; first += at_once * cache_threads) {
        int place[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int block = run.first + min(first + i * cache_threads, run.count - 1);
            const int page = block / params.blocks_of_page;
            place[i] = int(params.page_at(sequence, page)) * params.page_step + block - page * params.blocks_of_page;
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int at = first + i * cache_threads, block = run.first + at;
            if (at < run.count) to[at] = {place[i], 1, own.has(block) ? own_mask + block : run.mask};
        }
    }
}

// One row of tiles of a kind of heads, by a CTA.
__device__ __forceinline__ void make_cache_row(const CacheParams& params, int n) {
    const CacheLayout& cache = params.cache;
    const int kind = n / params.rows, head = kind * params.heads_of_kind, batch = head / params.heads;
    const CacheParams::Tile tile = params.tile_of(batch, n - kind * params.rows);
    const int64_t known_kind = params.known_kind(tile.sequence, head - batch * params.heads);
    const RowOfPlan known = params.row_of_plan(known_kind, tile.row);
    const int begin = int(n * cache.room);
    Run* const to = cache.runs + begin;
    int count = known.count();
    const CacheParams::OwnTiles own = params.own_tiles(tile.sequence);
    const int own_mask = first_tree_mask(cache, n) - own.begin;  // an own tile's mask less the tile
    if (cache.keys != CacheKeys::in_pages) {
        const int first = cache.listed && cache.page_size ? tile.sequence * cache.tiles_k : 0;
        if (!own.are_some()) {
            for (int i = int(threadIdx.x); i < count; i += cache_threads) {
                const Run run = known.run(i);
                to[i] = {run.first + first, run.count, run.mask};
            }
        } else if (threadIdx.x < 32) {
            int blocks;
            count = make_row(count, to, blocks, [&](int64_t entry, auto act) {
                const Run run = known.run(int(entry));
                const int end = run.first + run.count, own_begin = max(run.first, own.begin);
                const int own_end = min(end, own.end);
                if (own_begin >= own_end) return act(Run{run.first + first, run.count, run.mask});
                if (run.first < own_begin) act(Run{run.first + first, own_begin - run.first, run.mask});
                for (int at = own_begin; at < own_end; ++at) act(Run{at + first, 1, own_mask + at});
                if (own_end < end) act(Run{own_end + first, end - own_end, run.mask});
            });
        }
        if (cache.keys == CacheKeys::widened) mark_seen(cache, tile.sequence, known);
    } else {
        count = 0;
        for (int i = 0; i < known.count(); ++i) {
            const Run run = known.run(i);
            name_blocks(params, tile.sequence, run, own, own_mask, to + count);
            count += run.count;
        }
    }
    if (threadIdx.x == 0) cache.slices[n] = {begin, begin + count};
    if (own.are_some() && tile.row >= 0) make_tree_masks(params, tile, batch, own, known, own_mask);
}

// Tokens of a sequence's listed tiles, as far as its queries may see; by a few of the CTAs that it has. Without pages
// sequences share them, and all are named.
__device__ __forceinline__ void name_cache_tokens(const CacheParams& params, int64_t sequence, int cta, int ctas) {
    const CacheLayout& cache = params.cache;
    const int tile_k = cache.tile_k;
    const int64_t end = (cache.page_size ? params.seen_tokens(sequence) : cache.seq_k) + tile_k - 1;
    int32_t* const to = cache.tokens + (cache.page_size ? sequence * cache.tiles_k * tile_k : 0);
    const unsigned size = unsigned(cache.page_size), last = unsigned(end / tile_k * tile_k);
    const unsigned step = unsigned(ctas) * cache_threads;
    for (unsigned token = unsigned(cta) * cache_threads + threadIdx.x; token < last; token += step) {
        to[token] = token >= cache.seq_k ? no_token
                    : size               ? int(params.page_begin(sequence, token / size) + token % size)
                                         : int(token);
    }
}

template <class Unit>
__device__ __forceinline__ void clear_row(const CopiedRows& rows, int64_t head, int64_t query) {
    Unit* const to = static_cast<Unit*>(rows.call.data) + head * rows.call.head + query * rows.call.row;
    for (int64_t unit = 0; unit < rows.units; ++unit) to[unit * rows.call.column] = Unit{};
}

// Queries before all sequences' or after them, which see nothing but a sink: one of a head, by a thread.
__device__ __forceinline__ void empty_nobodys(const CacheParams& params, int64_t thread, int64_t threads) {
    const CacheLayout& cache = params.cache;
    const TensorView& sinks = params.sink_logits;
    const int before = params.first_query(0), end = params.first_query(cache.sequences);
    const int64_t nobodys = before + cache.seq_q - end;
    for (int64_t n = thread; n < nobodys * cache.heads; n += threads) {
        const int64_t head = n % cache.heads, number = n / cache.heads;
        const int64_t query = number < before ? number : end + number - before;
        switch (params.out.unit) {
            case 16: clear_row<uint4>(params.out, head, query); break;
            case 8: clear_row<uint64_t>(params.out, head, query); break;
            case 4: clear_row<uint32_t>(params.out, head, query); break;
            default: clear_row<uint16_t>(params.out, head, query);
        }
        const auto set = [&](const TensorView& x, float value) {
            if (x.data) static_cast<float*>(x.data)[head * x.head + query * x.row] = value;
        };
        set(params.lse, sinks.data ? static_cast<const float*>(sinks.data)[head * sinks.head] : -INFINITY);
        set(params.max_logits, -INFINITY);
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
        const TensorView &call = rows.call, &copy = rows.copy;
        const auto of_call = [&](int64_t query) {
            return static_cast<Unit*>(call.data) + batch * call.batch + head * call.head + query * call.row +
                   unit * call.column;
        };
        const auto of_copy = [&](int64_t place) {
            return static_cast<Unit*>(copy.data) + batch * copy.batch + head * copy.head + place * copy.row + unit;
        };
        if constexpr (ToCopy) {
            const CacheParams::Tile tile = params.tile_of(batch, int(at / unsigned(cache.tile_q)));
            const int query = tile.first + int(at % unsigned(cache.tile_q));
            *of_copy(at) = query >= tile.begin && query < tile.end ? *of_call(query) : Unit{};
        } else {
            const int64_t place = params.place_of(batch, int(at));
            if (place >= 0) *of_call(at) = *of_copy(place);
        }
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
    const int batch = head / params.heads;
    const CacheParams::Tile at = params.tile_of(batch, tile);
    const int64_t known_kind = params.known_kind(at.sequence, head - batch * params.heads);
    return at.row >= 0 ? params.cache.of_plan.row_blocks[known_kind * known.rows + at.row] : 0;
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
    const int number = task.part - join.first_part;
    if (number < join.parts) task.skip = int(divide(blocks * number, join.parts));
    task.take = number < join.parts ? int(divide(blocks * (number + 1), join.parts)) - task.skip : 0;
    return task;
}

// Each job has CTAs of its own: all are chains of loads that wait for memory, one after the other if a CTA did several.
static __global__ void __launch_bounds__(cache_threads)
    lay_out_cache_kernel(const __grid_constant__ CacheParams params) {
    const CacheLayout& cache = params.cache;
    const CacheJobs& jobs = params.jobs;
    int cta = int(blockIdx.x);
    if (cta < jobs.lists) {
        for (int n = cta; n < cache.kinds * cache.rows; n += jobs.lists) make_cache_row(params, n);
        return;
    }
    cta -= jobs.lists;
    if (cta < jobs.masks) {
        const int64_t words = int64_t(cache.known.num_masks) * cache.known.mask_words;
        const int64_t threads = int64_t(jobs.masks) * cache_threads;
        for (int64_t n = int64_t(cta) * cache_threads + threadIdx.x; n < words; n += threads)
            cache.masks[n] = cache.known.masks[n];
        return;
    }
    cta -= jobs.masks;
    if (cta < jobs.tasks) {
        const int64_t thread = int64_t(cta) * cache_threads + threadIdx.x;
        const int64_t threads = int64_t(jobs.tasks) * cache_threads;
        for (int64_t n = thread; n < cache.from.num_tasks; n += threads)
            cache.tasks[n] = cache_task(params, cache.from.tasks[n]);
        return;
    }
    cta -= jobs.tasks;
    if (cta < jobs.joins) {
        const int64_t thread = int64_t(cta) * cache_threads + threadIdx.x;
        const int64_t threads = int64_t(jobs.joins) * cache_threads;
        for (int64_t n = thread; n < cache.from.num_joins; n += threads)
            cache.joins[n] = cache_join(params, cache.from.joins[n]);
        for (int64_t head = thread; head < cache.batch * cache.heads; head += threads)
            cache.kind_of_head[head] = int(head) / params.heads_of_kind;
        return;
    }
    cta -= jobs.joins;
    if (cta < jobs.spans) {
        const int64_t threads = int64_t(jobs.spans) * cache_threads;
        for (int64_t n = int64_t(cta) * cache_threads + threadIdx.x; n < cache.batch * cache.rows; n += threads) {
            const int batch = int(n) / params.rows;
            const CacheParams::Tile tile = params.tile_of(batch, int(n) - batch * params.rows);
            cache.spans[n] = {tile.first, tile.begin, tile.end};
        }
        return;
    }
    cta -= jobs.spans;
    if (cta < jobs.sequences * jobs.tokens_of_sequence) {
        const int ctas = jobs.tokens_of_sequence;
        for (int64_t n = cta / ctas; n < (cache.page_size ? cache.sequences : 1); n += jobs.sequences)
            name_cache_tokens(params, n, cta % ctas, ctas);
        return;
    }
    cta -= jobs.sequences * jobs.tokens_of_sequence;
    if (cta < jobs.nobodys) {
        empty_nobodys(params, int64_t(cta) * cache_threads + threadIdx.x, int64_t(jobs.nobodys) * cache_threads);
        return;
    }
    cta -= jobs.nobodys;
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
            const int64_t place = params.place_of(batch, int(row));
            if (place < 0) continue;
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
    const CacheJobs jobs(cache, args.has_layout, cache.batch * cache.heads * cache.rows * cache.tile_q * q.units);
    return {cache, jobs, q, CopiedRows::of(args.out, cache.out, p.head_dim_v, element), args};
}

void lay_out_cache(const ForwardArgs& args, const CacheLayout& to) {
    const runtime::CurrentDevice current(args.device);
    const CacheParams params = make_cache_params(args, to);
    if (!params.jobs.all()) return;
    if (to.keys == CacheKeys::widened && !args.has_layout)
        runtime::clear(to.seen, size_t(to.all_tiles()), args.stream);
    runtime::launch(lay_out_cache_kernel, {params.jobs.all(), unsigned(cache_threads), 0}, args.stream, params);
}

void widen_cache(const ForwardArgs& args, const CacheLayout& to) {
    const runtime::CurrentDevice current(args.device);
    launch_widening(args, to);
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
    prepare_widening();
    prepare_cache_lists(device);
    prepare_cache_append(device);
}

CacheSteps cache_steps() {
    return {lay_out_cache,      bring_back_from_cache, widen_cache,
            list_keys_of_cache, append_to_cache,       prepare_cache_layout};
}

}  // namespace spattn::any
