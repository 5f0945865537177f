// SPDX-License-Identifier: MIT
// The backward workspace: row statistics, a dQ buffer a queue, parts of dK and dV, scratch of lanes.
//
// Queues that reach the same queries have a buffer each, many times dQ for long contexts and few kv heads. There the
// schedule goes over the queries in rounds: buffers are those of one round, and sums of dK and dV go from round to round
// in float32, in the gradients themselves where these are float32. A column's are in memory only between the first and
// the last round that it has blocks in.
#pragma once

#include "cpu/generic/walk.h"

namespace spattn::cpu {
namespace {

// Where a queue collects dQ: a buffer for each head of its group and each of the `tiles` that it reaches, from buffer
// `block` on. `next` is the next queue of the same kv head, or -1.
struct QueueSpace {
    int64_t block;
    int32_t tiles, next;
};

// Own tiles [first, first + count) that a queue reaches, as bits. Neighbouring lists mostly reach the same tiles
// (full, documents) or some of them (causal): tiles [last_from, last_to) were covered last.
struct TileSet {
    uint64_t* words;
    int64_t first, count, last_from = 0, last_to = 0;

    void cover(int64_t from, int64_t to) {
        from = from > first ? from - first : 0, to = to - first < count ? to - first : count;
        if (from >= last_from && to <= last_to) return;
        last_from = from, last_to = to;
        for (int64_t end; from < to; from = end) {
            end = from / 64 * 64 + 64 < to ? from / 64 * 64 + 64 : to;
            words[from / 64] |= all_rows >> (64 - (end - from)) << (from % 64);
        }
    }
};
constexpr int64_t words_of(int64_t tiles) { return (tiles + 63) / 64; }

// Sums that pieces hand on, by tokens; delta where the problem has sinks; and in double what block_backward_f64.h makes
// of lse. The same for every arch. dk and dv are also what rounds hand on.
struct Carried {
    TensorView dq, dk, dv, delta, minus_lse;
};

inline TensorView carve_rows(Carver& carver, const Problem& p, int64_t heads, int64_t seq, int64_t columns) {
    Real* rows = carver.take<Real>(p.batch * heads * seq * columns);
    return {rows, heads * seq * columns, seq * columns, columns, 1};
}
inline Carried carve_carried(Carver& carver, const Problem& p) {
    return {carve_rows(carver, p, p.heads_q, p.seq_q, p.head_dim),
            carve_rows(carver, p, p.heads_kv, p.seq_k, p.head_dim),
            carve_rows(carver, p, p.heads_kv, p.seq_k, p.head_dim_v),
            carve_rows(carver, p, p.heads_q, p.seq_q, p.has_sink_logits ? 1 : 0),
            carve_rows(carver, p, p.heads_q, p.seq_q, sizeof(Real) == sizeof(double) ? 1 : 0)};
}

// Whether sums begin with those of pieces, portions and rounds before, and whether others come after.
struct Between {
    bool has_before, has_after;
};

struct BackwardSpace {
    Round round;              // at hand
    int64_t heads, rows;      // batch * heads_q; own tiles of queries
    Real *delta, *minus_lse;  // [heads][rows * bq], by own places; the latter in units of log2
    uint64_t* not_finite;     // [heads][rows] bit i: q or dout of query i of the own tile may not be finite
    uint64_t* seeing;  // [head_kinds][rows] bit i: query i of the own tile sees a key; where the problem has sinks
    QueueSpace* queues;
    uint64_t* reached;        // [queues][words of rows] own tiles that a queue reaches in some head of its group,
    int32_t* ranks;           // and how many of them lie before each word
    int32_t* first_queues;    // [rounds][batch * heads_kv]
    const int32_t* first_queue;  // those of the round
    Real* dq;                 // [blocks][bq][columns]
    Real dq_factor = 1;       // what their sums are multiplied by
    uint8_t* touched;         // [blocks]
    Carried carried;          // read and written where the pass has several pieces, or rounds; the former have portions
    Real* parts;              // [num_parts][part_floats]
    int64_t part_floats;
    Real* scratch;
    int64_t lane_floats;

    // Own tiles of the round.
    int64_t tiles() const { return (round.end_row < rows ? round.end_row : rows) - round.first_row; }
    void begin_round(const Problem& p, const LayoutView& layout, const TasksView& tasks, int32_t i) {
        round = round_at(tasks, layout.by_query.rows, i);
        first_queue = first_queues + i * p.batch * p.heads_kv;
    }
};

struct BackwardScratch {
    Real *k_t, *v_t;          // in panels [bk / panel]: [head_dim][panel], [head_dim_v][panel]
    Real *s, *dp;             // [bq][bk]
    Real *k, *q, *dout;       // panels [bk][columns of it], [2][bq or bk][columns], [2][bq or bk][columns_v]
    Real *dk, *dv;            // [bk][columns], [bk][columns_v]; one piece
    Real* dq;                 // [bq][columns], of a repeating tile, as are
    Real *minus_lse, *delta;  // [bq]
};

template <int bq, int bk>
inline BackwardScratch carve_backward_lane(Carver& carver, const Problem& p) {
    const int64_t columns = round_up(p.head_dim, lanes), columns_v = round_up(p.head_dim_v, lanes);
    const int64_t staged = bq > bk ? bq : bk;
    BackwardScratch lane;
    lane.k_t = carver.take<Real>(p.head_dim * bk);
    lane.v_t = carver.take<Real>(p.head_dim_v * bk);
    lane.s = carver.take<Real>(bq * bk);
    lane.dp = carver.take<Real>(bq * bk);
    lane.k = carver.take<Real>(bk * columns);
    lane.q = carver.take<Real>(2 * staged * columns);
    lane.dout = carver.take<Real>(2 * staged * columns_v);
    lane.dk = carver.take<Real>(bk * (columns + columns_v));
    lane.dv = lane.dk + bk * columns;
    lane.dq = carver.take<Real>(bq * columns);
    lane.minus_lse = carver.take<Real>(bq);
    lane.delta = carver.take<Real>(bq);
    return lane;
}

// Tiles that list queries once more. All of a query's own, from delta to dQ, lies in the one tile after them that owns
// it: at home, or where an axis lists it once and leaves its home away.
inline int32_t repeating(const AxisView& axis) { return axis.away ? 0 : axis.listed; }

// The own tiles of the tokens of query tiles [first, end). Most lists begin with the same repeating tile: `last` is the
// one before.
inline void cover_own(const LayoutView& layout, int32_t first, int32_t end, int32_t& last, TileSet& tiles) {
    const AxisView& axis = layout.queries;
    const int32_t block = layout.block_q, repeats = repeating(axis);
    for (; first < end && first < repeats; ++first) {
        if (first == last) continue;
        last = first;
        for (int32_t i = 0; i < block; ++i) {
            const int32_t token = axis.tokens[int64_t(first) * block + i];
            if (token == no_token) continue;
            const int64_t tile = home_of(axis, block, token) / block;
            tiles.cover(tile, tile + 1);
        }
    }
    if (first < end) tiles.cover(first - repeats, end - repeats);
}

// The tiles that a queue of a round reaches in any head of its group.
inline void reach(const Problem& p, const LayoutView& layout, const TasksView& tasks, const Round& round, int64_t w,
                  TileSet tiles) {
    const int64_t group = p.heads_q / p.heads_kv;
    __builtin_memset(tiles.words, 0, size_t(words_of(tiles.count)) * sizeof(uint64_t));
    int32_t last = -1;
    for (int32_t i = tasks.begin[w]; i < tasks.begin[w + 1]; ++i) {
        const Task& t = tasks.tasks[i];
        int32_t skip = t.skip, take = t.take, kind_before = -1;
        for (int64_t g = 0; g < group; ++g) {
            const int32_t kind = layout.kind_of_head[t.head * group + g];
            if (t.part == whole_row && kind == kind_before) continue;  // heads that see the same reach the same
            kind_before = kind;
            const Slice slice = slice_of(layout.by_key, kind, t.row);
            for (Walk left = walk_round(layout.by_key, slice, round, skip, take); left.take > 0; ++left.run) {
                const Run& run = *left.run;
                const int32_t skipped = left.skip < run.count ? left.skip : run.count, more = run.count - skipped;
                const int32_t taken = more < left.take ? more : left.take;
                left.skip -= skipped, left.take -= taken;
                if (taken > 0) cover_own(layout, run.first + skipped, run.first + skipped + taken, last, tiles);
            }
        }
    }
}

// How many buffers the queues of a round have at most. There is no workspace yet: tiles are counted so many at a time.
inline int64_t dq_blocks(const Problem& p, const LayoutView& layout, const TasksView& tasks, int64_t rows) {
    constexpr int64_t most = 1 << 15;
    uint64_t words[most / 64];
    int64_t most_tiles = 0;
    for (int32_t i = 0; i < rounds_of(tasks); ++i) {
        const Round round = round_at(tasks, layout.by_query.rows, i);
        const int64_t end = round.end_row < rows ? round.end_row : rows;
        int64_t tiles = 0;
        for (int32_t w = round.first_queue; w < round.end_queue; ++w)
            for (int64_t first = round.first_row; first < end; first += most) {
                const TileSet some{words, first, end - first < most ? end - first : most};
                reach(p, layout, tasks, round, w, some);
                for (int64_t word = 0; word < words_of(some.count); ++word)
                    tiles += __builtin_popcountll(words[word]);
            }
        if (tiles > most_tiles) most_tiles = tiles;
    }
    return most_tiles * (p.heads_q / p.heads_kv);
}

// What rounds hand on. Gradients of the type of sums hold them in place; of values that are columns of keys there is none.
inline void carve_rounds(Carver& carver, const Problem& p, const TasksView& tasks, Carried& carried) {
    if (tasks.num_rounds == 0) return;
    const bool is_in_place = p.dtype == (sizeof(Real) == sizeof(double) ? Dtype::f64 : Dtype::f32);
    if (!is_in_place) carried.dk = carve_rows(carver, p, p.heads_kv, p.seq_k, p.head_dim);
    if (!is_in_place || p.value_in_key) carried.dv = carve_rows(carver, p, p.heads_kv, p.seq_k, p.head_dim_v);
}

template <int bq, int bk>
inline BackwardSpace carve_backward(Carver& carver, const Problem& p, const LayoutView& layout, const TasksView& tasks,
                                    int num_lanes) {
    const int64_t columns = round_up(p.head_dim, lanes), columns_v = round_up(p.head_dim_v, lanes);
    Carver lane{0};
    carve_backward_lane<bq, bk>(lane, p);
    BackwardSpace space{};
    space.heads = p.batch * p.heads_q;
    space.rows = layout.by_query.rows - repeating(layout.queries);
    const int64_t words = words_of(space.rows);
    space.delta = carver.take<Real>(space.heads * space.rows * bq);
    space.minus_lse = carver.take<Real>(space.heads * space.rows * bq);
    space.not_finite = carver.take<uint64_t>(space.heads * space.rows);
    space.seeing = carver.take<uint64_t>(p.has_sink_logits ? layout.head_kinds * space.rows : 0);
    space.queues = carver.take<QueueSpace>(tasks.queues);
    space.reached = carver.take<uint64_t>(tasks.queues * words);
    space.ranks = carver.take<int32_t>(tasks.queues * words);
    space.first_queues = carver.take<int32_t>(rounds_of(tasks) * p.batch * p.heads_kv);
    space.part_floats = bk * (columns + columns_v);
    space.parts = carver.take<Real>(tasks.num_parts * space.part_floats);
    space.lane_floats = int64_t(lane.used / sizeof(Real));
    space.scratch = carver.take<Real>(space.lane_floats * num_lanes);
    carve_rounds(carver, p, tasks, space.carried);
    return space;
}

// dQ buffers lie last, so that a call may learn how many there are from the queues, once these are placed.
template <int bq>
inline void carve_dq(Carver& carver, BackwardSpace& space, const Problem& p, int64_t blocks) {
    space.dq = carver.take<Real>(blocks * bq * round_up(p.head_dim, lanes));
    space.touched = carver.take<uint8_t>(blocks);
}

// Which queries see a key. Without sinks lse says so; with them, a query that sees none has a finite lse, too. What a
// repeating tile sees, its queries see.
template <int bq>
inline void find_seeing(const BackwardSpace& space, const LayoutView& layout) {
    const AxisView& axis = layout.queries;
    const int32_t repeats = repeating(axis);
    const auto alive_in = [&](int32_t head_kind, int32_t tile) {
        return alive_of(layout.live_queries, layout.by_query.rows, head_kind, tile,
                        tile_at(axis, bq, layout.seq_q, tile));
    };
    for (int32_t c = 0; c < layout.head_kinds; ++c) {
        uint64_t* seeing = space.seeing + c * space.rows;
        for (int32_t t = 0; t < space.rows; ++t) seeing[t] = alive_in(c, repeats + t);
        for (int32_t t = 0; t < repeats; ++t) {
            const uint64_t alive = alive_in(c, t);
            for (int i = 0; i < bq; ++i) {
                if (!(alive >> i & 1)) continue;
                const int64_t home = home_of(axis, bq, axis.tokens[int64_t(t) * bq + i]);
                seeing[home / bq] |= uint64_t(1) << (home % bq);
            }
        }
    }
}

// Fills reached, ranks and tiles of one order.
inline void find_reached(const BackwardSpace& space, const Problem& p, const LayoutView& layout, const TasksView& tasks,
                         int64_t w) {
    const int64_t words = words_of(space.rows);
    uint64_t* reached = space.reached + w * words;
    int32_t i = 0;
    while (w >= round_at(tasks, layout.by_query.rows, i).end_queue) ++i;
    reach(p, layout, tasks, round_at(tasks, layout.by_query.rows, i), w, {reached, 0, space.rows});
    int32_t tiles = 0;
    for (int64_t i = 0; i < words; ++i) {
        space.ranks[w * words + i] = tiles;
        tiles += __builtin_popcountll(reached[i]);
    }
    space.queues[w].tiles = tiles;
}

// The place of an own tile among those that a queue reaches, or -1.
inline int64_t place_of(const BackwardSpace& space, int64_t w, int64_t tile) {
    const int64_t at = w * words_of(space.rows) + tile / 64;
    const uint64_t word = space.reached[at], bit = uint64_t(1) << (tile % 64);
    return word & bit ? space.ranks[at] + __builtin_popcountll(word & (bit - 1)) : -1;
}

// Fills the rest of queues, and first_queues; returns how many buffers the queues of a round have at most. Queues are
// chained from the last to the first, so that a chain runs upwards.
inline int64_t place_queues(const BackwardSpace& space, const Problem& p, const LayoutView& layout,
                            const TasksView& tasks) {
    int64_t most = 0;
    for (int32_t i = 0; i < rounds_of(tasks); ++i) {
        const Round round = round_at(tasks, layout.by_query.rows, i);
        int64_t block = 0;
        for (int32_t w = round.first_queue; w < round.end_queue; ++w) {
            space.queues[w].block = block;
            block += space.queues[w].tiles * (p.heads_q / p.heads_kv);
        }
        if (block > most) most = block;
        int32_t* const first_queue = space.first_queues + i * p.batch * p.heads_kv;
        for (int64_t head = 0; head < p.batch * p.heads_kv; ++head) first_queue[head] = -1;
        for (int32_t w = round.end_queue - 1; w >= round.first_queue; --w) {
            if (tasks.begin[w] == tasks.begin[w + 1]) continue;
            int32_t& first = first_queue[tasks.tasks[tasks.begin[w]].head];
            space.queues[w].next = first;
            first = w;
        }
    }
    return most;
}

}  // namespace
}  // namespace spattn::cpu
