// SPDX-License-Identifier: MIT
// A call on a cache: its layout, its queries where the layout's rows have them, and what came of them back.
//
//     lay out      lists     a CTA a row of tiles   the plan's lists of the row that queries lie in, or their blocks one by
//                                                   one where pages say which these are
//                  masks     a thread 8 bytes       the plan's, where calls add their own (cache_masks.cuh)
//                  tasks     some rows a thread     the plan's share of each row, as long as that is now; or, where some
//                                                   are far longer than others, equal shares of all; and joins of parts
//                  heads     a thread each          whose lists a head has
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

// Sums over the threads of a CTA, all of which call it: returns that of those before, and of all.
__device__ __forceinline__ int64_t add_up(int64_t own, int64_t& all) {
    __shared__ int64_t of_warps[cache_threads / 32];
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int64_t to_here = own;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t more = __shfl_up_sync(~0u, to_here, unsigned(distance));
        if (lane >= distance) to_here += more;
    }
    __syncthreads();  // all have read what stood there
    if (lane == 31) of_warps[warp] = to_here;
    __syncthreads();
    int64_t before = to_here - own;
    all = 0;
    for (int n = 0; n < cache_threads / 32; ++n) {
        if (n < warp) before += of_warps[n];
        all += of_warps[n];
    }
    return before;
}

// The rows of a call, in the order of heads: each thread of a CTA has as many as the others.
struct RowsOfCall {
    const CacheParams& params;
    int tiles, first, end;

    __device__ explicit RowsOfCall(const CacheParams& params) : params(params) {
        const CacheLayout& cache = params.cache;
        tiles = int(cache.batch * cache.heads / cache.from.tile_heads) * cache.rows;
        const int own = (tiles + cache_threads - 1) / cache_threads;
        first = min(int(threadIdx.x) * own, tiles), end = min(first + own, tiles);
    }
    __device__ int head(int tile) const { return tile / params.rows * params.cache.from.tile_heads; }
    __device__ int row(int tile) const { return tile - tile / params.rows * params.cache.rows; }
    __device__ int64_t blocks(int tile) const { return cache_blocks(params, head(tile), row(tile)); }

    __device__ static int parts_of(int64_t blocks, int64_t share) {
        return blocks > share ? int(divide(blocks + share - 1, share)) : 1;
    }

    // Rows that are cut into parts of so many blocks at most: those of other threads before, and of all.
    struct Cut {
        int64_t parts, joins, all_parts, all_joins;
    };
    __device__ Cut cut(int64_t share) const {
        Cut cut{0, 0, 0, 0};
        for (int tile = first; tile < end; ++tile) {
            const int parts = parts_of(blocks(tile), share);
            if (parts > 1) cut.parts += parts, ++cut.joins;
        }
        cut.parts = add_up(cut.parts, cut.all_parts), cut.joins = add_up(cut.joins, cut.all_joins);
        return cut;
    }

    // The longest part of a row, if some are cut by their lengths: where the longest that the plan's tasks would have is
    // far longer than an equal share of all blocks. It is as near to that as there is room for. Otherwise 0.
    __device__ int64_t find_share() const {
        const CacheLayout& cache = params.cache;
        if (!cache.cuts_rows_for) return 0;
        int64_t sum = 0, all;
        int longest = 0;
        for (int tile = first; tile < end; ++tile) {
            const int own = int(blocks(tile));
            sum += own, longest = max(longest, own);
        }
        add_up(sum, all);
        int64_t share = max(divide(all, cache.cuts_rows_for) + 1, CacheLayout::least_blocks);
        // Who has one that is too long says so for all.
        while (__syncthreads_or(longest > share * cache.plan_parts * 5 / 4)) {
            const Cut tried = cut(share);
            const int64_t tasks = tried.all_parts + tiles - tried.all_joins;
            if (tasks <= cache.from.num_tasks && tried.all_joins <= cache.from.num_joins &&
                tried.all_parts <= cache.from.num_parts)
                return share;
            share += share / 4 + 1;
        }
        return 0;
    }
};

// The tasks and joins of a call; by some CTAs, each of which has as many of the rows as the others.
__device__ __forceinline__ void make_cache_tasks(const CacheParams& params, int cta) {
    const CacheLayout& cache = params.cache;
    const RowsOfCall rows(params);
    const int64_t share = rows.find_share();
    const int ctas = params.jobs.tasks, thread = cta * cache_threads + int(threadIdx.x), threads = ctas * cache_threads;
    if (share == 0) {
        for (int n = thread; n < cache.from.num_tasks; n += threads)
            cache.tasks[n] = n < cache.plan_tasks ? cache_task(params, cache.from.tasks[n]) : Task{};
        for (int n = thread; n < cache.from.num_joins; n += threads)
            cache.joins[n] = n < cache.plan_joins ? cache_join(params, cache.from.joins[n]) : Join{0, 0, 0, no_join};
        return;
    }
    const RowsOfCall::Cut cut = rows.cut(share);
    int part = int(cut.parts), join = int(cut.joins);
    // Parts, which are long, then the rows that are whole.
    for (int tile = rows.first; tile < rows.end; ++tile) {
        const int64_t blocks = rows.blocks(tile);
        const int of_row = rows.parts_of(blocks, share), head = rows.head(tile), row = rows.row(tile);
        const bool is_own = tile % ctas == cta;
        if (of_row == 1) {
            if (is_own) cache.tasks[cut.all_parts + tile - join] = {head, row, 0, int(blocks), whole_row};
            continue;
        }
        if (is_own) cache.joins[join] = {head, row, part, of_row};
        for (int n = 0; is_own && n < of_row; ++n) {
            const int skip = int(divide(blocks * n, of_row));
            cache.tasks[part + n] = {head, row, skip, int(divide(blocks * (n + 1), of_row)) - skip, part + n};
        }
        part += of_row, ++join;
    }
    const int made = int(cut.all_parts + rows.tiles - cut.all_joins);
    for (int n = made + thread; n < cache.from.num_tasks; n += threads) cache.tasks[n] = {};
    for (int n = int(cut.all_joins) + thread; n < cache.from.num_joins; n += threads) cache.joins[n] = {0, 0, 0, no_join};
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
    if (cta < jobs.tasks) return make_cache_tasks(params, cta);
    cta -= jobs.tasks;
    if (cta < jobs.heads) {
        const int64_t thread = int64_t(cta) * cache_threads + threadIdx.x;
        for (int64_t head = thread; head < cache.batch * cache.heads; head += int64_t(jobs.heads) * cache_threads)
            cache.kind_of_head[head] = int(head) / params.heads_of_kind;
        return;
    }
    cta -= jobs.heads;
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
