// SPDX-License-Identifier: MIT
// The backward workspace: row statistics, a dQ buffer an order, parts of dK and dV, scratch of lanes.
#pragma once

namespace spattn::cpu {
namespace {

// Where an order collects dQ: home tiles of queries [first, first + count) of each head of its group, from block `block`
// of the buffers on. `next` is the next order of the same kv head, or -1.
struct OrderSpace {
    int64_t block;
    int32_t first, count, next;
};

// Sums that pieces hand on, by tokens, and delta where the problem has sinks. The same for every arch.
struct Carried {
    TensorView dq, dk, dv, delta;
};

inline TensorView carve_rows(Carver& carver, const Problem& p, int64_t heads, int64_t seq, int64_t columns) {
    Real* rows = carver.take<Real>(p.batch * heads * seq * columns);
    return {rows, heads * seq * columns, seq * columns, columns, 1};
}
inline Carried carve_carried(Carver& carver, const Problem& p) {
    return {carve_rows(carver, p, p.heads_q, p.seq_q, p.head_dim),
            carve_rows(carver, p, p.heads_kv, p.seq_k, p.head_dim),
            carve_rows(carver, p, p.heads_kv, p.seq_k, p.head_dim_v),
            carve_rows(carver, p, p.heads_q, p.seq_q, p.has_sink_logits ? 1 : 0)};
}

struct BackwardSpace {
    int64_t heads, rows;       // batch * heads_q; home tiles of queries
    Real *delta, *minus_lse;  // [heads][rows * bq], by home places; the latter in units of log2
    uint64_t* seeing;          // [classes][rows] bit i: query i of the home tile sees a key; where the problem has sinks
    OrderSpace* orders;
    int32_t* first_order;  // [batch * heads_kv]
    Real* dq;             // [blocks][bq][columns]
    uint8_t* touched;      // [blocks]
    Carried carried;       // read and written where the pass has several pieces
    Real* parts;          // [num_parts][part_floats]
    int64_t part_floats;
    Real* scratch;
    int64_t lane_floats;
};

struct BackwardScratch {
    Real *k_t, *v_t;          // [head_dim][bk], [head_dim_v][bk]
    Real *s, *dp;             // [bq][bk]
    Real *k, *q, *dout;       // [bk][columns], [bq or bk][columns], [bq or bk][columns_v]
    Real *dk, *dv;            // [bk][columns], [bk][columns_v]; one piece
    Real* dq;                 // [bq][columns], of a listed tile, as are
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
    lane.q = carver.take<Real>(staged * columns);
    lane.dout = carver.take<Real>(staged * columns_v);
    lane.dk = carver.take<Real>(bk * (columns + columns_v));
    lane.dv = lane.dk + bk * columns;
    lane.dq = carver.take<Real>(bq * columns);
    lane.minus_lse = carver.take<Real>(bq);
    lane.delta = carver.take<Real>(bq);
    return lane;
}

// Home tiles [low, high).
struct Reach {
    int32_t low, high;
    int32_t listed = -1;  // the listed tile that was covered last: most lists begin with the same one
    void cover(int64_t first, int64_t end) {
        low = first < low ? int32_t(first) : low;
        high = end > high ? int32_t(end) : high;
    }
};

// Covers the homes of the tokens of query tiles [first, end).
inline void cover_homes(const LayoutView& layout, int32_t first, int32_t end, Reach& homes) {
    const AxisView& axis = layout.queries;
    const int32_t block = layout.block_q;
    for (; first < end && first < axis.listed; ++first) {
        if (first == homes.listed) continue;
        homes.listed = first;
        for (int32_t i = 0; i < block; ++i) {
            const int32_t token = axis.tokens[int64_t(first) * block + i];
            if (token == no_token) continue;
            const int64_t tile = home_of(axis, block, token) / block;
            homes.cover(tile, tile + 1);
        }
    }
    if (first < end) homes.cover(first - axis.listed, end - axis.listed);
}

// The home tiles of queries that an order touches in any head of its group, as [first, first + count).
inline OrderSpace reach(const Problem& p, const LayoutView& layout, const TasksView& tasks, int32_t w) {
    const int64_t group = p.heads_q / p.heads_kv;
    Reach homes{INT32_MAX, 0};
    for (int32_t i = tasks.begin[w]; i < tasks.begin[w + 1]; ++i) {
        const Task& t = tasks.tasks[i];
        int64_t skip = t.skip, take = t.take;
        for (int64_t g = 0; g < group; ++g) {
            const Slice slice = slice_of(layout.by_key, layout.class_of[t.head * group + g], t.row);
            for (int32_t r = slice.begin; r < slice.end && take > 0; ++r) {
                const Run& run = layout.by_key.runs[r];
                const int64_t skipped = skip < run.count ? skip : run.count, left = run.count - skipped;
                const int64_t taken = left < take ? left : take;
                skip -= skipped, take -= taken;
                if (taken == 0) continue;
                cover_homes(layout, int32_t(run.first + skipped), int32_t(run.first + skipped + taken), homes);
            }
        }
    }
    if (homes.high == 0) return {0, 0, 0, -1};
    return {0, homes.low, homes.high - homes.low, -1};
}

inline int64_t dq_blocks(const Problem& p, const LayoutView& layout, const TasksView& tasks) {
    int64_t blocks = 0;
    for (int32_t w = 0; w < tasks.orders; ++w) blocks += reach(p, layout, tasks, w).count * (p.heads_q / p.heads_kv);
    return blocks;
}

template <int bq, int bk>
inline BackwardSpace carve_backward(Carver& carver, const Problem& p, const LayoutView& layout, const TasksView& tasks,
                                    int num_lanes) {
    const int64_t columns = round_up(p.head_dim, lanes), columns_v = round_up(p.head_dim_v, lanes);
    Carver lane{0};
    carve_backward_lane<bq, bk>(lane, p);
    const int64_t blocks = dq_blocks(p, layout, tasks);
    BackwardSpace space;
    space.heads = p.batch * p.heads_q;
    space.rows = layout.by_query.rows - layout.queries.listed;
    space.delta = carver.take<Real>(space.heads * space.rows * bq);
    space.minus_lse = carver.take<Real>(space.heads * space.rows * bq);
    space.seeing = carver.take<uint64_t>(p.has_sink_logits ? layout.classes * space.rows : 0);
    space.orders = carver.take<OrderSpace>(tasks.orders);
    space.first_order = carver.take<int32_t>(p.batch * p.heads_kv);
    space.dq = carver.take<Real>(blocks * bq * columns);
    space.touched = carver.take<uint8_t>(blocks);
    space.part_floats = bk * (columns + columns_v);
    space.parts = carver.take<Real>(tasks.num_parts * space.part_floats);
    space.lane_floats = int64_t(lane.used / sizeof(Real));
    space.scratch = carver.take<Real>(space.lane_floats * num_lanes);
    return space;
}

// Which queries see a key. Without sinks lse says so; with them, a query that sees none has a finite lse, too. A tile
// that is not listed is a home tile; what a listed tile sees, its queries see.
template <int bq>
inline void find_seeing(const BackwardSpace& space, const LayoutView& layout) {
    const AxisView& axis = layout.queries;
    for (int32_t c = 0; c < layout.classes; ++c) {
        uint64_t* seeing = space.seeing + c * space.rows;
        for (int32_t t = 0; t < space.rows; ++t)
            seeing[t] = alive_of(layout.live_queries, layout.by_query.rows, c, axis.listed + t);
        for (int32_t t = 0; t < axis.listed; ++t) {
            const uint64_t alive = alive_of(layout.live_queries, layout.by_query.rows, c, t);
            for (int i = 0; i < bq; ++i) {
                if (!(alive >> i & 1)) continue;
                const int64_t home = home_of(axis, bq, axis.tokens[int64_t(t) * bq + i]);
                seeing[home / bq] |= uint64_t(1) << (home % bq);
            }
        }
    }
}

// Fills orders and first_order. Orders are chained from the last to the first, so that a chain runs upwards.
inline void place_orders(const BackwardSpace& space, const Problem& p, const LayoutView& layout,
                         const TasksView& tasks) {
    int64_t block = 0;
    for (int32_t w = 0; w < tasks.orders; ++w) {
        space.orders[w] = reach(p, layout, tasks, w);
        space.orders[w].block = block;
        block += space.orders[w].count * (p.heads_q / p.heads_kv);
    }
    for (int64_t head = 0; head < p.batch * p.heads_kv; ++head) space.first_order[head] = -1;
    for (int32_t w = tasks.orders - 1; w >= 0; --w) {
        if (tasks.begin[w] == tasks.begin[w + 1]) continue;
        int32_t& first = space.first_order[tasks.tasks[tasks.begin[w]].head];
        space.orders[w].next = first;
        first = w;
    }
}

}  // namespace
}  // namespace spattn::cpu
