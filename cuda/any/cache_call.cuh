// SPDX-License-Identifier: MIT
// What kernels know of a call on a cache: whose its queries are, and where they begin.
#pragma once

#include <algorithm>

#include "any/cache_rows.cuh"
#include "any/divisor.h"
#include "core/math.h"
#include "plan/cache.h"

namespace spattn::any {

constexpr int cache_threads = 256;

// How many CTAs each job has.
struct CacheJobs {
    static constexpr int64_t most = 1024;  // more have nothing to do that these cannot
    int lists = 0, masks = 0, tasks = 0, heads = 0, spans = 0, sequences = 0, tokens_of_sequence = 0;  // of the layout
    int nobodys, queries;

    // copied: how many threads copy queries, where the row does not take them as they lie.
    CacheJobs(const CacheLayout& cache, bool has_layout, int64_t copied)
        : nobodys(cache.is_ragged ? 16 : 0), queries(cache.copies ? ctas(copied) : 0) {
        if (has_layout) return;
        lists = int(std::min(cache.kinds * cache.rows, most));
        masks = cache.own_tiles ? ctas(int64_t(cache.known.num_masks) * cache.known.mask_words) : 0;
        tasks = ctas(std::max(cache.from.num_tasks, cache.from.num_joins));
        heads = ctas(cache.batch * cache.heads);
        spans = ctas(cache.batch * cache.rows);
        sequences = cache.listed ? int(std::min(cache.page_size ? cache.sequences : 1, most)) : 0;
        tokens_of_sequence = int(std::clamp<int64_t>(cache.seq_k / (8 * cache_threads), 1, 32));
    }
    static int ctas(int64_t threads) { return int(std::min(ceil_div(threads, cache_threads), most)); }
    unsigned all() const {
        return unsigned(lists + masks + tasks + heads + spans + sequences * tokens_of_sequence + nobodys + queries);
    }
};

// KnownRow of plan/cache.h, for devices.
struct RowOfPlan {
    const Run* runs;
    Slice stem, own;

    // stems: null where no row has one.
    __device__ RowOfPlan(const ListsView& lists, const Slice* stems, int64_t row)
        : runs(lists.runs), stem(stems ? stems[row] : Slice{0, 0}), own(lists.slices[row]) {}
    __device__ explicit RowOfPlan(const Run* runs) : runs(runs), stem{0, 0}, own{0, 0} {}  // without a run
    __device__ int count() const { return stem.end - stem.begin + own.end - own.begin; }
    __device__ Run run(int number) const {
        const int of_stem = stem.end - stem.begin;
        return runs[number < of_stem ? stem.begin + number : own.begin + number - of_stem];
    }
};

struct CacheParams {
    CacheLayout cache;
    CacheJobs jobs;
    CopiedRows q, out;
    TensorView lse, max_logits, sink_logits;  // of the call
    Divisor heads, rows, heads_of_kind, blocks_of_page;
    int page_step;  // blocks from the first of a page to that of the next

    CacheParams(const CacheLayout& cache, const CacheJobs& jobs, const CopiedRows& q, const CopiedRows& out,
                const ForwardArgs& args)
        : cache(cache), jobs(jobs), q(q), out(out), lse(args.lse), max_logits(args.max_logits),
          sink_logits(args.sink_logits), heads(cache.heads), rows(cache.rows), heads_of_kind(cache.heads_of_kind),
          blocks_of_page(cache.page_size / cache.tile_k), page_step(int(cache.cache.page_rows / cache.tile_k)) {}

    __device__ int64_t start_of(int64_t sequence) const {
        return min(max(integer_at(cache.cache.starts, sequence, 0), -cache.seq_q), cache.seq_k);
    }
    // Which of the call's queries are those of a sequence: [begin, end), empty where offsets fall.
    __device__ int first_query(int64_t sequence) const {
        if (!cache.is_ragged) return 0;
        return int(min(max(integer_at(cache.cache.query_offsets, sequence, 0), int64_t(0)), cache.seq_q));
    }
    __device__ int end_query(int64_t sequence) const {
        return cache.is_ragged ? first_query(sequence + 1) : int(cache.seq_q);
    }
    __device__ int first_tile(int64_t sequence) const {
        if (!cache.is_ragged) return 0;
        const int begin = first_query(sequence);
        return cache.rows == cache.seq_q ? begin : begin / cache.tile_q + 2 * int(sequence);
    }
    // The row of the plan's layout that a sequence's queries begin in, and how many of its places stand before them.
    __device__ int first_row(int64_t start) const {
        return int(unsigned(start + int64_t(cache.tile_q) * cache.rows) / unsigned(cache.tile_q)) - cache.rows;
    }
    __device__ int before(int64_t start) const { return int(start - int64_t(first_row(start)) * cache.tile_q); }

    __device__ int sequence_of_tile(int64_t batch, int tile) const {
        if (!cache.is_ragged) return int(batch);
        return last_sequence(cache.sequences, tile, [&](int sequence) { return first_tile(sequence); });
    }

    // The place of a query of a batch entry among those of its tiles, or -1 where it belongs to no sequence.
    __device__ int64_t place_of(int64_t batch, int query) const {
        const auto first = [&](int sequence) { return first_query(sequence); };
        const int sequence = cache.is_ragged ? last_sequence(cache.sequences, query, first) : int(batch);
        if (query < first_query(sequence) || query >= end_query(sequence)) return -1;
        const int64_t first_place = int64_t(first_tile(sequence)) * cache.tile_q + before(start_of(sequence));
        return first_place + query - first_query(sequence);
    }

    // A tile of a batch entry's queries: of which sequence, in which row of the plan's layout, and which query its first
    // place has. It has those of [begin, end); row is -1 where these are none, or beyond the sequence.
    struct Tile {
        int sequence, row, first, begin, end;
    };
    __device__ Tile tile_of(int64_t batch, int number) const {
        const int sequence = sequence_of_tile(batch, number);
        const int64_t start = start_of(sequence);
        const int of_sequence = number - first_tile(sequence), row = first_row(start) + of_sequence;
        const int begin = first_query(sequence), first = begin - before(start) + of_sequence * cache.tile_q;
        const int from = max(first, begin), to = min(first + cache.tile_q, end_query(sequence));
        const bool has_keys = from < to && row >= 0 && row < cache.known.by_query.rows;
        return {sequence, has_keys ? row : -1, first, from, max(from, to)};
    }
    // How many of a sequence's tokens its queries may see, and what tiles have beside them.
    __device__ int64_t seen_tokens(int64_t sequence) const {
        const int64_t start = start_of(sequence);
        const int64_t places = before(start) + end_query(sequence) - first_query(sequence);
        const int64_t tiles = (places + cache.tile_q - 1) / cache.tile_q;
        return min(max((first_row(start) + tiles) * cache.tile_q, int64_t(0)), cache.seq_k);
    }
    // The tiles of keys that have keys of a sequence's own: [begin, end), none where its queries are no trees.
    struct OwnTiles {
        int begin, end;
        __device__ bool are_some() const { return begin < end; }
        __device__ bool has(int tile) const { return begin <= tile && tile < end; }
    };
    __device__ OwnTiles own_tiles(int64_t sequence) const {
        if (!cache.own_tiles) return {0, 0};
        const int64_t start = start_of(sequence), first = max(start, int64_t(0));
        const int64_t end = min(start + end_query(sequence) - first_query(sequence), cache.seq_k);
        if (first >= end) return {0, 0};
        return {int(first / cache.tile_k), int((end + cache.tile_k - 1) / cache.tile_k)};
    }
    __device__ int known_kind(int64_t sequence, int64_t head) const {
        return cache.known.head_kinds == 1 ? 0 : cache.known.kind_of_head[sequence * cache.heads + head];
    }
    // The row of the plan's layout that a tile lies in; -1: none, which has no runs.
    __device__ RowOfPlan row_of_plan(int64_t known_kind, int row) const {
        const ListsView& lists = cache.known.by_query;
        if (row < 0) return RowOfPlan(lists.runs);
        return {lists, cache.of_plan.stems, known_kind * lists.rows + row};
    }
    // Page 0 stands for those that do not exist, so that these are not read.
    __device__ int64_t page_at(int64_t sequence, int64_t page_of_sequence) const {
        const int64_t page = integer_at(cache.cache.page_table, sequence, page_of_sequence);
        return page < 0 || page >= cache.cache.pages ? 0 : page;
    }
    // The row of k where a page begins.
    __device__ int64_t page_begin(int64_t sequence, int64_t page_of_sequence) const {
        return page_at(sequence, page_of_sequence) * cache.cache.page_rows;
    }
};

}  // namespace spattn::any
