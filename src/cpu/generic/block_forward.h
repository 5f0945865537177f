// SPDX-License-Identifier: MIT
// Blocked attention, forward, with queries in vector lanes.
//
//     sT[key][query] = K[key][dim] . qT[dim][query]          rows of K are broadcast where they lie
//     m, l           online softmax down the keys            vertical: no operation crosses lanes
//     oT[dim][query] += V[key][dim] . pT[key][query]          V is read transposed by its strides
//
// One task is one block of queries of one head: qT is packed once, K and V are never repacked, though copied ahead
// where their rows lie apart, and out is transposed back at the end. Scores are in units of log2: scale * log2(e) is
// folded into qT. A lane runs tasks alone, in its own scratch.
//
// What binds: FMA. Per pair 4 * head_dim flops against one exp2 of about a dozen vector operations a vector, which is
// 10 % of the time at head_dim 64 and 5 % at 128. K and V blocks come from L2 at about a byte a cycle.
#pragma once

#include <float.h>
#include <math.h>

namespace spattn::cpu {
namespace {

// The running maximum may lag behind by 2^8: p and l stay far from overflow, and most blocks need no rescaling of oT.
// FlashAttention-4 does the same: https://github.com/Dao-AILab/flash-attention
constexpr Real lag = 8;
constexpr Real lowest = sizeof(Real) == sizeof(float) ? -FLT_MAX : -DBL_MAX;

// oT [head_dim_v][bq], m [bq], l [bq], top [bq]: one lane's running state, and what a part leaves in the workspace. m
// lags behind top, the largest score.
struct State {
    Real *out, *m, *l, *top;
};
inline int64_t state_floats(const Problem& p, int bq) { return (p.head_dim_v + 3) * bq; }
inline State state_at(Real* at, const Problem& p, int bq) {
    return {at, at + p.head_dim_v * bq, at + (p.head_dim_v + 1) * bq, at + (p.head_dim_v + 2) * bq};
}

// A query's row of what pieces hand on: out as summed so far, m, l, top. The same for every arch.
inline int64_t carried_floats(const Problem& p) { return round_up(p.head_dim_v + 3, 16); }

struct ForwardSpace {
    Real *parts, *scratch;
    int64_t lane_floats;
};

template <int bq, int bk>
struct ForwardScratch {
    Real *q, *s, *state;         // [head_dim][bq], [bk][bq], State
    Real *rows_q, *k, *v, *out;  // [2][bq][columns], [2][bk][columns] twice, [bq][columns]
};

template <int bq, int bk>
inline ForwardScratch<bq, bk> carve_lane(Carver& carver, const Problem& p) {
    const int64_t columns = round_up(p.head_dim, lanes), columns_v = round_up(p.head_dim_v, lanes);
    ForwardScratch<bq, bk> lane;
    lane.q = carver.take<Real>(p.head_dim * bq);
    lane.s = carver.take<Real>(bk * bq);
    lane.state = carver.take<Real>(state_floats(p, bq));
    lane.rows_q = carver.take<Real>(2 * bq * columns);
    lane.k = carver.take<Real>(2 * bk * columns);
    lane.v = carver.take<Real>(2 * bk * columns_v);
    lane.out = carver.take<Real>(bq * columns_v);
    return lane;
}

template <int bq, int bk>
inline ForwardSpace carve_forward(Carver& carver, const Problem& p, const TasksView& tasks, int num_lanes) {
    Carver lane{0};
    carve_lane<bq, bk>(lane, p);
    ForwardSpace space;
    space.parts = carver.take<Real>(tasks.num_parts * state_floats(p, bq));
    space.lane_floats = int64_t(lane.used / sizeof(Real));
    space.scratch = carver.take<Real>(space.lane_floats * num_lanes);
    return space;
}

template <class T, int bq, int bk>
struct ForwardLane {
    static constexpr int width = bq / lanes;             // vectors of a row of sT

    const ForwardArgs& args;
    const Problem& p;
    ForwardSpace space;
    ForwardScratch<bq, bk> lane;
    State state;
    Held held_q, held_k, held_v;
    Ahead<T> ahead;
    const SoftcapFactors cap;  // read where the problem has one

    ForwardLane(const ForwardArgs& a, const ForwardSpace& s, int64_t index)
        : args(a), p(*a.problem), space(s), cap(softcap_factors(p)) {
        Carver carver{(uintptr_t)(s.scratch + index * s.lane_floats)};
        lane = carve_lane<bq, bk>(carver, p);
        state = state_at(lane.state, p, bq);
        const int64_t columns = round_up(p.head_dim, lanes);
        held_q.place(lane.rows_q, lane.rows_q + bq * columns);
        held_k.place(lane.k, lane.k + bk * columns);
        held_v.place(lane.v, lane.v + bk * round_up(p.head_dim_v, lanes));
    }

    Place queries(int32_t head, int32_t row) const {
        const LayoutView& layout = args.layout;
        const TileView tile = tile_at(layout.queries, bq, p.seq_q, row);
        const uint64_t alive = alive_of(layout.live_queries, layout.by_query.rows, layout.class_of[head], row);
        return {tile, head / p.heads_q, head % p.heads_q, alive, owned_of(layout.queries, tile, row)};
    }

    Place keys(const Place& q, int32_t list_class, int32_t block) const {
        const LayoutView& layout = args.layout;
        const int64_t group = p.heads_q / p.heads_kv;
        const uint64_t alive = alive_of(layout.live_keys, layout.by_key.rows, list_class, block);
        return {tile_at(layout.keys, bk, p.seq_k, block), q.batch, q.head / group, alive, 0};
    }

    void start() {
        for (int64_t i = 0; i < p.head_dim_v * bq; ++i) state.out[i] = 0.f;
        for (int i = 0; i < bq; ++i) state.m[i] = lowest, state.l[i] = 0.f, state.top[i] = -INFINITY;
    }

    Real score_factor() const { return p.softcap != 0 ? cap.in : Real(p.scale * log2_e); }

    Walk blocks_of(const Task& t) const {
        const ListsView& lists = args.layout.by_query;
        return walk(lists, slice_of(lists, args.layout.class_of[t.head], t.row), t.skip, t.take);
    }

    // The next visit is to the task's next block; after its last to the first of the task after, if that is known.
    void task(const Task& t, const Task* after) {
        const Place q = queries(t.head, t.row);
        const int32_t list_class = args.layout.class_of[t.head];
        start();
        if (t.take > 0) pack_queries(q, t.row);
        Walk w = blocks_of(t);
        for (bool more = w.next(); more;) {
            const int32_t block = w.block;
            const uint64_t* bits = mask_bits(args.layout, w.mask);
            const Place at = keys(q, list_class, block);
            const Rows k = held_k.rows(args.k, at, block, int(p.head_dim), load_rows<T>);
            const Rows v = held_v.rows(args.v, at, block, int(p.head_dim_v), load_swept<T>);
            more = w.next();
            if (more) fetch_keys(keys(q, list_class, w.block), w.block);
            else if (after) fetch_task(*after);
            visit(k, v, at.count, bits);
            ahead.finish();
        }
        t.part == whole_row ? finish(q) : keep(t.part);
    }

    void pack_queries(const Place& q, int32_t row) {
        const Rows rows = held_q.rows(args.q, q, row, int(p.head_dim), load_rows<T>);
        pack_transposed(rows, q.count, int(p.head_dim), score_factor(), lane.q, bq);
    }

    void fetch_keys(const Place& at, int32_t block) {
        held_k.fetch(args.k, at, block, int(p.head_dim), ahead);
        held_v.fetch(args.v, at, block, int(p.head_dim_v), ahead);
    }

    void fetch_task(const Task& t) {
        const Place q = queries(t.head, t.row);
        held_q.fetch(args.q, q, t.row, int(p.head_dim), ahead);
        Walk w = blocks_of(t);
        if (w.next()) fetch_keys(keys(q, args.layout.class_of[t.head], w.block), w.block);
    }

    void visit(Rows k, Rows v, int count, const uint64_t* bits) {
        if (!bits || bq == strip_lanes) return attend<width>(k, v, {0, count}, 0, bits);
        for (int first = 0; first < bq; first += strip_lanes) {
            const Span keys = rows_kept<bq>(bits, count, first);
            if (keys.count > 0) attend<strip_lanes / lanes>(k, v, keys, first, bits);
        }
    }

    // n vectors of queries, from lane `first` on, meet some keys of a block.
    template <int n>
    void attend(Rows k, Rows v, Span keys, int first, const uint64_t* bits) {
        const Real* k_x = k.x + keys.first * k.ld;
        Real* s = lane.s + keys.first * bq + first;
        multiply<Left::rows, Store::set>({k_x, k.ld, lane.q + first, bq, s, bq, int(p.head_dim)}, keys.count, n, ahead);
        for (int i = 0; p.softcap != 0 && i < keys.count; ++i) cap_scores(s + i * bq, n * lanes, cap.out);
        constexpr int strip = n < 4 ? n : 4;  // vectors that softmax holds at once
        for (int at = first; at < first + n * lanes; at += strip * lanes)
            bits ? softmax<true, strip>(keys, at, bits) : softmax<false, strip>(keys, at, bits);
        const Real* v_x = v.x + keys.first * v.ld;
        multiply<Left::transposed, Store::add>({v_x, v.ld, s, bq, state.out + first, bq, keys.count},
                                               int(p.head_dim_v), n, ahead);
    }

    // sT becomes pT, in the strip of lanes that starts at `first`.
    template <bool masked, int strip>
    void softmax(Span keys, int first, const uint64_t* bits) {
        const int end = keys.first + keys.count;
        Vec top[strip], sum[strip];
        for (int w = 0; w < strip; ++w) top[w] = set1(-INFINITY), sum[w] = set1(0.f);
        for (int r = keys.first; r < end; ++r)
#pragma GCC unroll 4
            for (int w = 0; w < strip; ++w) {
                const int at = r * bq + first + w * lanes;
                Vec x = load(lane.s + at);
                if (masked) {
                    x = select(bits_at(bits, at), x, set1(-INFINITY));
                    store(lane.s + at, x);
                }
                top[w] = max(x, top[w]);
            }
        raise<strip>(first, top);
        for (int r = keys.first; r < end; ++r)
#pragma GCC unroll 4
            for (int w = 0; w < strip; ++w) {
                Real* x = lane.s + r * bq + first + w * lanes;
                const Vec e = exp2(load(x) - load(state.m + first + w * lanes));
                sum[w] = sum[w] + e;
                store(x, e);
            }
        for (int w = 0; w < strip; ++w) {
            Real* l = state.l + first + w * lanes;
            store(l, load(l) + sum[w]);
        }
    }

    // Moves the maximum where some query's new one is beyond the lag, and rescales what was summed under the old one.
    template <int strip>
    void raise(int first, const Vec* top) {
        bool needed = false;
        for (int w = 0; w < strip; ++w) {
            Real* highest = state.top + first + w * lanes;
            store(highest, max(top[w], load(highest)));
        }
        for (int w = 0; w < strip; ++w) needed |= any_above(top[w], load(state.m + first + w * lanes) + set1(lag));
        if (!needed) return;
        for (int w = 0; w < strip; ++w) {
            const int at = first + w * lanes;
            const Vec old = load(state.m + at), m = max(top[w], old), keep = exp2(old - m);
            store(state.m + at, m);
            store(state.l + at, load(state.l + at) * keep);
            for (int64_t d = 0; d < p.head_dim_v; ++d)
                store(state.out + d * bq + at, load(state.out + d * bq + at) * keep);
        }
    }

    void keep(int32_t part) {
        __builtin_memcpy(space.parts + part * state_floats(p, bq), lane.state, state_floats(p, bq) * sizeof(Real));
    }

    // Parts of a row, in order: each is brought to the highest maximum and added.
    void join(const Join& j) {
        start();
        for (int i = 0; i < j.parts; ++i) {
            const State part = state_at(space.parts + (j.first_part + i) * state_floats(p, bq), p, bq);
            for (int at = 0; at < bq; at += lanes) {
                const Vec m = max(load(part.m + at), load(state.m + at));
                const Vec mine = exp2(load(state.m + at) - m), other = exp2(load(part.m + at) - m);
                store(state.m + at, m);
                store(state.top + at, max(load(part.top + at), load(state.top + at)));
                store(state.l + at, load(state.l + at) * mine + load(part.l + at) * other);
                for (int64_t d = 0; d < p.head_dim_v; ++d) {
                    Real* out = state.out + d * bq + at;
                    store(out, load(out) * mine + load(part.out + d * bq + at) * other);
                }
            }
        }
        finish(queries(j.head, j.row));
    }

    // out = oT / l, transposed back; a row that saw nothing is 0 and its lse -inf, or the sink's logit.
    void finish(const Place& at) {
        const int columns = int(p.head_dim_v), ld = round_up(columns, lanes);
        const double sink = sink_of(args.sink_logits, at.head);
        transpose({state.out, bq}, columns, at.count, 1.f, lane.out, ld);
        for (int i = 0; i < at.count; ++i) {
            if (!(at.owned >> i & 1)) continue;
            Real* out = lane.out + i * ld;
            RowState row{state.m[i], state.l[i], state.top[i]};
            if (!args.piece.is_first) take_on(at, i, row, out);
            args.piece.is_last ? finish_row(at, i, row, end_row(row.m, row.l, sink), out) : hand_on(at, i, row, out);
        }
    }

    struct RowState {
        Real m, l, top;
    };

    void finish_row(const Place& at, int i, const RowState& row, const RowEnd& end, const Real* out) {
        store_row<T>(out, int(p.head_dim_v), end.factor, args.out, at, i);
        if (args.lse.data) *address<float>(args.lse, at, i) = end.lse();
        if (args.max_logits.data) *address<float>(args.max_logits, at, i) = float(double(row.top) * ln_2);
    }

    // What the pieces before left of a query, which each piece works on in a tile of its own.
    Real* carried(const Place& at, int i) const {
        const int64_t floats = carried_floats(p);
        return address<Real>({args.piece.carried, p.heads_q * p.seq_q * floats, p.seq_q * floats, floats, 1}, at, i);
    }

    void hand_on(const Place& at, int i, const RowState& row, const Real* out) {
        Real* to = carried(at, i);
        const Real state[3] = {row.m, row.l, row.top};
        __builtin_memcpy(to, out, size_t(p.head_dim_v) * sizeof(Real));
        __builtin_memcpy(to + p.head_dim_v, state, sizeof state);
    }

    // As parts are joined: both are brought to the higher maximum and added.
    void take_on(const Place& at, int i, RowState& row, Real* out) {
        const Real *other = carried(at, i), *state = other + p.head_dim_v;
        const Real m = state[0] > row.m ? state[0] : row.m;
        const Real mine = Real(::exp2(double(row.m) - double(m))), share = Real(::exp2(double(state[0]) - double(m)));
        for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] = out[d] * mine + other[d] * share;
        row = {m, row.l * mine + state[1] * share, state[2] > row.top ? state[2] : row.top};
    }
};

// ---- phases -------------------------------------------------------------------------------------------------------

struct ForwardRun {
    const ForwardArgs* args;
    ForwardSpace space;
    int64_t next_order, next_join;
};

// Tasks of the orders that a lane takes.
struct TaskQueue {
    const TasksView& tasks;
    int64_t& next_order;
    int32_t at = 0, end = 0;

    const Task* next() {
        while (at == end) {
            const int64_t w = next_of(next_order);
            if (w >= tasks.orders) return nullptr;
            at = tasks.begin[w], end = tasks.begin[w + 1];
        }
        return &tasks.tasks[at++];
    }
};

template <class T, int bq, int bk>
inline void forward_tasks(void* argument, int64_t index) {
    ForwardRun& run = *(ForwardRun*)argument;
    const TasksView& tasks = run.args->tasks;
    ForwardLane<T, bq, bk> lane(*run.args, run.space, index);
    TaskQueue queue{tasks, run.next_order};
    // Whoever knows the task after has taken its order from others: only where rows are copied ahead.
    const bool looks_ahead = run.args->layout.keys.modulus > 1;
    for (const Task* t = queue.next(); t;) {
        const Task* after = looks_ahead ? queue.next() : nullptr;
        lane.task(*t, after);
        t = looks_ahead ? after : queue.next();
    }
    end_streams();
}

template <class T, int bq, int bk>
inline void forward_joins(void* argument, int64_t index) {
    ForwardRun& run = *(ForwardRun*)argument;
    ForwardLane<T, bq, bk> lane(*run.args, run.space, index);
    for (int64_t j; (j = next_of(run.next_join)) < run.args->tasks.num_joins;) lane.join(run.args->tasks.joins[j]);
    end_streams();
}

template <class T, int bq, int bk>
void block_forward(const ForwardArgs& args) {
    Carver carver{(uintptr_t)args.workspace};
    ForwardRun run{&args, carve_forward<bq, bk>(carver, *args.problem, args.tasks, args.parallel->lanes()), 0, 0};
    args.parallel->run(forward_tasks<T, bq, bk>, &run);
    if (args.tasks.num_joins > 0) args.parallel->run(forward_joins<T, bq, bk>, &run);
}

template <int bq, int bk>
size_t forward_workspace(const Problem& p, const LayoutView&, const TasksView& tasks, int num_lanes) {
    Carver carver{0};
    carve_forward<bq, bk>(carver, p, tasks, num_lanes);
    return carver.used;
}

inline size_t forward_carries(const Problem& p) {
    return size_t(p.batch * p.heads_q * p.seq_q * carried_floats(p)) * sizeof(Real);
}

}  // namespace
}  // namespace spattn::cpu
