// SPDX-License-Identifier: MIT
// Calls on a cache: their queries begin anywhere among the keys, and keys may lie in pages. C++17-clean.
//
// The plan's layout is that of the whole sequence, and a call makes one of its own from it: the lists of those rows of
// blocks that its queries lie in, for each batch entry. So rows of kernels know neither starts nor pages. Where a row
// takes no spans, queries are copied to where such a row of blocks has them, and results back.
//
//     sequence, in rows of 4     0 1 2 3 | 4 5 6 7 | 8 9 ..       starts 6, two queries, 6 and 7
//     the call                             . . q q                  lists and masks of row 1
//
// Where each call says how many queries sequences have, which lie one after the other, tiles are those of one batch entry
// and keys those of a pool: each tile is of one sequence. A sequence may have one tile more than its queries fill, and
// one more since they begin anywhere in the first, so where its tiles begin follows from its number and the queries
// before it. Where queries are fewer than tiles would be, each has a tile: a sequence needs no more.
//
// Where pages are made of whole blocks, lists name the blocks of all pages. Elsewhere the cache's blocks are listed
// tiles, which name their tokens; rows that read stretches of them fetch these as boxes. On a CPU they always are: its
// rows would else pack all blocks of a cache, filled or not, while listed tiles are packed where they are met.
//
// Rows that read no float8 are given elements: the tiles of keys that a call's queries see are copied first, each to its
// place in its sequence. Where many queries see each of them, as those of a prompt do, that takes less than to widen a
// tile for each block of queries.
//
// Where queries are nodes of trees, the keys that they are themselves, their own, are seen by some and not by others. Each
// row of tiles gets masks for the tiles of own keys, which keep what the plan's do and the trees as well.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/math.h"
#include "plan/bit_places.h"
#include "plan/cache_lists.h"
#include "plan/call_lists.h"
#include "plan/kernel.h"

namespace spattn {

// How a row of kernels finds the keys of a cache.
enum class CacheKeys {
    in_place,  // blocks of an entry's own keys
    in_pages,  // blocks of all pages
    listed,    // listed tiles
    widened    // blocks of a copy, of other elements than the cache's
};

inline CacheKeys cache_keys(const Kernel& kernel, const Problem& p) {
    if (p.float8_cache && !kernel.float8_cache) return CacheKeys::widened;
    if (kernel.device == SPATTN_CPU) return CacheKeys::listed;
    if (p.page_size == 0) return CacheKeys::in_place;
    return p.page_size % kernel.block_k == 0 ? CacheKeys::in_pages : CacheKeys::listed;
}

// Tokens of a listed tile that lie side by side, whatever the pages.
inline int32_t cache_stretch(const Kernel& kernel, const Problem& p) {
    return p.page_size ? int32_t(std::gcd(p.page_size, int64_t(kernel.block_k))) : kernel.block_k;
}
inline bool takes_stretches(const Kernel& kernel, const Problem& p) {
    return kernel.key_stretch && cache_stretch(kernel, p) >= kernel.key_stretch;
}

// What the copy of a float8 cache takes, in bytes: twice what it is copied from, and all layers of a model may use the
// same memory. But there is room for all tokens that sequences may ever have, which of many long ones is more than the
// pages that there are.
constexpr double most_widened_bytes = double(int64_t(1) << 30);
inline double widened_bytes(const Kernel& kernel, const Problem& p) {
    const double tokens = double(p.page_size ? p.sequences() : p.batch) * double(round_up(p.seq_k, kernel.block_k));
    const double columns = double(p.head_dim + (p.value_in_key ? 0 : p.head_dim_v));
    return tokens * double(p.heads_kv) * columns * dtype_row(p.dtype).bytes;
}

// Tiles that calls make masks for have up to so many tokens a side, and so many pairs.
constexpr int most_tree_side = 256, most_tree_pairs = 32768;
inline bool takes_trees(const Kernel& kernel) {
    return std::max(kernel.block_q, kernel.block_k) <= most_tree_side &&
           kernel.block_q * kernel.block_k <= most_tree_pairs;
}

// Why a row cannot work on a cache; null where it can.
inline const char* refuse_cache(const Kernel& kernel, const Problem& p) {
    if (kernel.family == Family::gather) return nullptr;  // plan/cache_lists.h
    if (p.has_parents && !takes_trees(kernel)) return "tiles too large for the masks of trees";
    const CacheKeys keys = cache_keys(kernel, p);
    if (keys == CacheKeys::widened && kernel.family == Family::block)
        return widened_bytes(kernel, p) <= most_widened_bytes ? nullptr : "reads no float8, and a copy is above 1 GiB";
    if (kernel.family == Family::reference || keys != CacheKeys::listed) return nullptr;
    if (!kernel.orders && !takes_stretches(kernel, p)) return "pages that are not made of its blocks";
    const double places = double(p.sequences()) * double(round_up(p.seq_k, kernel.block_k));
    return places < double(int64_t(1) << 31) ? nullptr : "a cache of more tokens than it counts";
}

// What follows from a plan alone.
struct CacheSizes {
    CacheKeys keys;
    int64_t batch, heads, seq_q, seq_k, page_size;
    int64_t sequences;      // batch entries, or more that share one
    bool is_ragged;
    int tile_q, tile_k;
    int32_t rows;           // of queries, of a batch entry: as many tiles as they may lie in
    int32_t tiles_k;        // of a sequence's keys
    int32_t listed;         // tiles whose tokens are named: each sequence's own where pages say which these are
    int32_t own_tiles;      // of keys that a sequence's queries may be: those that get masks, if queries are trees
    int32_t stretch;        // of listed tiles
    int64_t kinds;          // of heads, of a call: batch entries, or all their heads where the plan tells these apart
    int64_t heads_of_kind;
    int64_t room;           // for the runs of a row
    // Calls may cut rows by their lengths for so many workers; 0: they are cut as the plan's. The plan's schedule then
    // has room for more than its own tasks and joins, which have up to so many parts of a row.
    int32_t cuts_rows_for = 0, plan_tasks = 0, plan_joins = 0, plan_parts = 1;

    CacheSizes(const Problem& p, const Kernel& kernel, const LayoutView& known)
        : keys(cache_keys(kernel, p)), batch(p.batch), heads(p.heads_q), seq_q(p.seq_q), seq_k(p.seq_k),
          page_size(p.page_size), sequences(p.sequences()), is_ragged(p.ragged), tile_q(kernel.block_q),
          tile_k(kernel.block_k), rows(int32_t(is_ragged ? std::min(seq_q, seq_q / tile_q + 2 * sequences)
                                                         : (seq_q + 2 * tile_q - 2) / tile_q)),
          tiles_k(int32_t(ceil_div(seq_k, tile_k))),
          listed(keys == CacheKeys::listed || keys == CacheKeys::widened
                     ? int32_t(page_size ? sequences * tiles_k : tiles_k) : 0),
          own_tiles(p.has_parents ? int32_t(std::min((seq_q + 2 * tile_k - 2) / tile_k, int64_t(tiles_k))) : 0),
          stretch(cache_stretch(kernel, p)), kinds(known.head_kinds > 1 ? batch * heads : batch),
          heads_of_kind(batch * heads / kinds), room(1) {}

    // Where a sequence's queries begin, as far as it matters: beyond either end they see nothing.
    int64_t start_of(int64_t given) const { return std::clamp(given, -seq_q, seq_k); }
    // The first tile of a sequence, the first of whose queries is number `begin` of its batch entry.
    int64_t first_tile(int64_t sequence, int64_t begin) const {
        if (!is_ragged) return 0;
        return rows == seq_q ? begin : begin / tile_q + 2 * sequence;
    }
    // Masks of a call, behind the plan's.
    int64_t tree_masks() const { return kinds * rows * own_tiles; }
    // Places of listed tiles, or of a copy: of a batch entry, or of all sequences where there are pages.
    int64_t places() const { return int64_t(listed) * tile_k; }
    // Tiles of all sequences, as the plan may come to see them.
    int64_t all_tiles() const { return sequences * tiles_k; }
    // The tile that lists a sequence's first tokens.
    int64_t first_listed(int64_t sequence) const { return listed && page_size ? sequence * tiles_k : 0; }
};

// A row of the plan's layout: the runs of its stem, if it has one, and its own (Lists).
struct KnownRow {
    const Run* runs;
    Slice stem, own;

    // stems: null where no row has one.
    KnownRow(const ListsView& lists, const Slice* stems, int64_t row)
        : runs(lists.runs), stem(stems ? stems[row] : Slice{0, 0}), own(lists.slices[row]) {}
    int32_t count() const { return stem.end - stem.begin + own.end - own.begin; }
    const Run& run(int32_t number) const {
        const int32_t of_stem = stem.end - stem.begin;
        return runs[number < of_stem ? stem.begin + number : own.begin + number - of_stem];
    }
};

// What the calls of a plan have in common.
struct CacheShape : CacheSizes {
    Problem call;
    std::vector<int32_t> row_blocks;    // [head_kinds * rows] of the plan's layout: how many blocks each row has
    std::vector<int32_t> longest;       // [head_kinds] of these
    std::vector<int32_t> join_of_part;  // of the plan's schedule
    std::vector<uint16_t> bit_places;   // of masks that calls make

    CacheShape(const Problem& p, const Kernel& kernel, const LayoutView& known, const Slice* stems)
        : CacheSizes(p, kernel, known), call(p), row_blocks(size_t(known.head_kinds) * size_t(known.by_query.rows)),
          longest(size_t(known.head_kinds)) {
        std::vector<int64_t> before{0};  // blocks of all runs before: rows share stems, which may be long
        before.reserve(size_t(known.by_query.num_runs) + 1);
        for (int32_t run = 0; run < known.by_query.num_runs; ++run)
            before.push_back(before.back() + known.by_query.runs[run].count);
        const auto blocks_of = [&](const Slice& slice) {
            return int32_t(before[size_t(slice.end)] - before[size_t(slice.begin)]);
        };
        for (size_t row = 0; row < row_blocks.size(); ++row) {
            const KnownRow runs(known.by_query, stems, int64_t(row));
            row_blocks[row] = blocks_of(runs.stem) + blocks_of(runs.own);
            int32_t& most = longest[row / size_t(known.by_query.rows)];
            most = std::max(most, row_blocks[row]);
            room = std::max<int64_t>(room, keys == CacheKeys::in_pages ? row_blocks[row] : runs.count());
        }
        if (!p.has_parents) return;
        bit_places = make_bit_places(kernel);
        if (keys != CacheKeys::in_pages) room += own_tiles + 1;  // a run that has own tiles may go on behind them
    }

    // The kinds that tasks of a call's heads are cut for: of the sequences that share a head the longest.
    std::vector<int32_t> schedule_kinds(const LayoutView& known) const {
        std::vector<int32_t> kinds(known.kind_of_head, known.kind_of_head + batch * heads);
        for (int64_t head = batch * heads; head < sequences * heads; ++head) {
            int32_t& kind = kinds[size_t(head % heads)];
            if (longest[size_t(kind)] < longest[size_t(known.kind_of_head[head])]) kind = known.kind_of_head[head];
        }
        return kinds;
    }

    void note_joins(const TasksView& tasks) {
        join_of_part.resize(size_t(tasks.num_parts));
        plan_tasks = tasks.num_tasks, plan_joins = tasks.num_joins;
        for (int32_t join = 0; join < tasks.num_joins; ++join) {
            std::fill_n(join_of_part.begin() + tasks.joins[join].first_part, tasks.joins[join].parts, join);
            plan_parts = std::max(plan_parts, tasks.joins[join].parts);
        }
    }

    // The problem as rows see it: of copies, with all places of their tiles. cache: of a call, if there is one yet.
    Problem inner(const CallCache& cache, bool copies = true) const {
        Problem p = call;
        p.has_starts = p.has_parents = false, p.page_size = 0, p.ragged = 0, p.q_offset = 0;
        if (copies) p.seq_q = int64_t(rows) * tile_q;
        if (call.page_size && cache.pages) p.seq_k = (cache.pages - 1) * cache.page_rows + call.page_size;
        if (keys == CacheKeys::widened) p.float8_cache = false, p.seq_k = places();
        return p;
    }
};

// The arrays of CacheShape, and the stems of the plan's lists, where kernels read them.
struct CacheArrays {
    const Slice* stems = nullptr;
    const int32_t *row_blocks = nullptr, *join_of_part = nullptr;
    const uint16_t* bit_places = nullptr;
};

// One call, in memory. Without a workspace only `bytes` and sizes mean something.
struct CacheLayout : CacheSizes {
    LayoutView known;  // the plan's
    TasksView from;
    CacheArrays of_plan;
    CallCache cache;
    Slice* slices;          // [kinds][rows]
    Run* runs;              // [kinds][rows][room]
    int32_t* kind_of_head;  // [batch * heads]
    QuerySpan* spans;       // [batch][rows] as LayoutView has them
    int32_t* tokens;        // [listed][tile_k]
    uint64_t* masks = nullptr;  // where queries are trees: the plan's, then [kinds][rows][own_tiles], as it has them
    uint8_t* seen;          // [sequences][tiles_k], of a copy: 1 where a query of the call sees some of the tile, or 0
    Task* tasks;
    Join* joins;
    bool copies = true;     // queries and results; false: the row takes them where they are
    TensorView q, out, lse, max_logits;  // of the call's rows
    TensorView k, v;                     // the copy of a float8 cache
    size_t bytes = 0;

    CacheLayout(const CacheShape& shape, const LayoutView& known, const TasksView& from, const CacheArrays& of_plan,
                const CallCache& cache, void* workspace)
        : CacheSizes(shape), known(known), from(from), of_plan(of_plan), cache(cache) {
        CallRoom space(workspace);
        slices = space.take<Slice>(kinds * rows);
        runs = space.take<Run>(kinds * rows * room);
        kind_of_head = space.take<int32_t>(batch * heads), spans = space.take<QuerySpan>(batch * rows);
        tokens = space.take<int32_t>(int64_t(listed) * tile_k);
        if (own_tiles) masks = space.take<uint64_t>((known.num_masks + tree_masks()) * known.mask_words);
        tasks = space.take<Task>(from.num_tasks);
        joins = space.take<Join>(from.num_joins);
        const int64_t tokens_q = int64_t(rows) * tile_q;  // of a batch entry
        const auto elements = [&](int64_t columns) {
            const int64_t row_bytes = columns * dtype_row(shape.call.dtype).bytes;
            return TensorView{space.take<char>(batch * heads * tokens_q * row_bytes), heads * tokens_q * columns,
                              tokens_q * columns, columns, 1};
        };
        const auto floats = [&] {
            return TensorView{space.take<float>(batch * heads * tokens_q), heads * tokens_q, tokens_q, 1, 0};
        };
        q = elements(shape.call.head_dim), out = elements(shape.call.head_dim_v);
        lse = floats(), max_logits = floats();
        if (keys == CacheKeys::widened) take_widened(space, shape.call);
        bytes = space.bytes();
    }

    // inner: CacheShape::inner() of this call.
    LayoutView layout(const Problem& inner) const {
        LayoutView made = known;
        made.seq_q = inner.seq_q, made.seq_k = inner.seq_k;
        made.queries = {0, nullptr, 1, rows, nullptr, 0};
        const int32_t blocks = int32_t(ceil_div(inner.seq_k, tile_k));
        const bool are_listed = keys == CacheKeys::listed;
        made.keys = {are_listed ? listed : 0, are_listed ? tokens : nullptr, 1, blocks, nullptr, are_listed ? stretch : 0};
        made.by_query = {slices, runs, rows, int32_t(kinds * rows * room)};
        made.by_key.rows = are_listed ? listed : blocks;
        made.kind_of_head = kind_of_head, made.head_kinds = int32_t(kinds);
        if (own_tiles) made.masks = masks, made.num_masks = int32_t(known.num_masks + tree_masks());
        // What nobody sees may come to be seen, and the other way round: a row that meets NaN is made again.
        made.live_queries = made.live_keys = {nullptr, nullptr, 0};
        return made;
    }
    TasksView tasks_view() const {
        TasksView made = from;
        made.tasks = tasks, made.joins = joins;
        return made;
    }

    // All heads of a token stand side by side, as most caches have them: what is read together is written together.
    void take_widened(CallRoom& space, const Problem& p) {
        seen = space.take<uint8_t>(all_tiles());
        const auto take = [&](int64_t columns) {
            const int64_t row = p.heads_kv * columns, entry = places() * row, entries = page_size ? 1 : batch;
            char* const data = space.take<char>(entries * entry * dtype_row(p.dtype).bytes);
            return TensorView{data, page_size ? 0 : entry, columns, row, 1};
        };
        k = take(p.head_dim);
        v = p.value_in_key ? k : take(p.head_dim_v);
    }

    // A row of the plan's schedule is as long as the longest. One that is shorter has fewer parts: none without blocks,
    // and none of less than this.
    static constexpr int64_t least_blocks = 2;
};

// New tokens of a cache, which go to where their pages, or entries, have them. v and v_new have no data where values
// lie in keys.
struct CacheAppend {
    const Problem* problem;   // whose queries stand for the new tokens
    TensorView k_new, v_new;  // [batch, head, row, column], those of all sequences in one batch entry if it is ragged
    TensorView k, v;          // rows are those of an entry, or of all pages
    TensorView k_scales, v_scales;  // of a float8 cache: floats of each of these rows; absent: 1
    bool writes_scales;
    CallCache cache;
    IndexView counts;         // [sequences]: how many of an entry's rows are new, the last ones; no data: all
    Parallel* parallel;       // CPU
    void* stream;             // CUDA
    int32_t device;           // CUDA: index among the devices of this kind
};

// What a backend does for caches.
struct CacheSteps {
    // Makes a call's layout, if there is none yet, and copies its queries, and brings back what came of them.
    void (*lay_out)(const ForwardArgs& args, const CacheLayout& to);
    void (*bring_back)(const ForwardArgs& args, const CacheLayout& from);
    // Makes the copy of a float8 cache, when the layout is there.
    void (*widen)(const ForwardArgs& args, const CacheLayout& to);
    // Makes lists of keys: of a call that brings lists, or of args' layout.
    void (*list_keys)(const ForwardArgs& args, const ListedKeys& to);
    void (*append)(const CacheAppend& args);
    void (*prepare)(int32_t device);  // as Kernel::prepare
};

}  // namespace spattn
