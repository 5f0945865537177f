// SPDX-License-Identifier: MIT
// Blocked attention, forward, with queries in vector lanes.
//
//     sT[key][query] = K[key][dim] . qT[dim][query]          rows of K are broadcast where they lie
//     m, l           online softmax down the keys            vertical: no operation crosses lanes
//     oT[dim][query] += V[key][dim] . pT[key][query]          V is read transposed by its strides
//
// One task is one block of queries of one head: qT is packed once, K and V are never repacked, and out is transposed
// back at the end. qT and sT lie in panels, and while a block is worked on, K and V of the next one are fetched. Scores
// are in units of log2: scale * log2(e) is folded into qT. A lane runs tasks alone, in its own scratch.
//
// What binds: FMA. Per pair 4 * head_dim flops against one exp2 of about a dozen vector operations a vector, which is
// 10 % of the time at head_dim 64 and 5 % at 128. K and V blocks come from L2 at about a byte a cycle.
#pragma once

#include <float.h>
#include <math.h>

#include "cpu/generic/beside.h"
#include "cpu/generic/held.h"
#include "cpu/generic/not_finite.h"
#include "cpu/generic/sink.h"
#include "cpu/generic/softcap.h"
#include "cpu/generic/walk.h"

namespace spattn::cpu {
namespace {

// The running maximum may lag behind by 2^8: p and l stay far from overflow, and most blocks need no rescaling of oT.
// FlashAttention-4 does the same: https://github.com/Dao-AILab/flash-attention
constexpr Real lag = 8;
constexpr Real lowest = sizeof(Real) == sizeof(float) ? -FLT_MAX : -DBL_MAX;

// m [bq], l [bq], top [bq], oT [head_dim_v, in tiles of 16][bq]: one lane's running state, and what a part leaves in
// the workspace. m lags behind top, the largest score.
struct State {
    Real *m, *l, *top, *out;
};
inline int64_t state_floats(const Problem& p, int bq) { return (round_up(p.head_dim_v, 16) + 3) * bq; }
inline State state_at(Real* at, int bq) { return {at, at + bq, at + 2 * bq, at + 3 * bq}; }

// A query's row of what pieces hand on: out as summed so far, m, l, top. The same for every arch.
inline int64_t carried_floats(const Problem& p) { return round_up(p.head_dim_v + 3, 16); }

struct ForwardSpace {
    Real *parts, *scratch;
    int64_t lane_floats;
    bool on_panels;  // what is made for products lies elsewhere
};

template <int bq, int bk>
struct ForwardScratch {
    Real *q, *s;          // in panels [bq / panel]: [head_dim][panel], [bk][panel]
    Real *state, *k, *v;  // State, [bk or bq][columns], [2][bk][columns]
};

// k is also where rows of q and out are staged.
template <int bq, int bk>
inline ForwardScratch<bq, bk> carve_lane(Carver& carver, const Problem& p, bool on_panels) {
    const int columns = round_up(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v, lanes);
    ForwardScratch<bq, bk> lane{};
    lane.state = carver.take<Real>(state_floats(p, bq));
    lane.k = carver.take<Real>(int64_t(bk > bq ? bk : bq) * columns);
    if (on_panels) return lane;
    lane.q = carver.take<Real>(p.head_dim * bq);
    lane.s = carver.take<Real>(bk * bq);
    lane.v = carver.take<Real>(2 * int64_t(bk) * columns);
    return lane;
}

template <int bq, int bk>
inline ForwardSpace carve_forward(Carver& carver, const Problem& p, const TasksView& tasks, int num_lanes,
                                  bool on_panels = false) {
    Carver lane{0};
    carve_lane<bq, bk>(lane, p, on_panels);
    ForwardSpace space;
    space.on_panels = on_panels;
    space.parts = carver.take<Real>(tasks.num_parts * state_floats(p, bq));
    space.lane_floats = int64_t(lane.used / sizeof(Real));
    space.scratch = carver.take<Real>(space.lane_floats * num_lanes);
    return space;
}

template <int bq, int bk>
struct ForwardLane {
    using Space = ForwardSpace;
    static constexpr int width = bq / lanes;                // vectors of a row of sT
    static constexpr int panel = least(bq, panel_lanes);    // lanes of a row of a panel

    const ForwardArgs& args;
    const Problem& p;
    const Elements& elements;
    ForwardSpace space;
    ForwardScratch<bq, bk> lane;
    State state;
    const KeySource k_from, v_from;
    Held values;
    const SoftcapFactors cap;  // read where the problem has one
    bool met_mask = false;     // this task
    bool is_anew = false;      // it is worked anew, with values that are not finite left out of products

    ForwardLane(const ForwardArgs& a, const Elements& e, const ForwardSpace& s, int64_t index)
        : args(a), p(*a.problem), elements(e), space(s), k_from(KeySource::keys(a, e)), v_from(KeySource::values(a, e)),
          cap(softcap_factors(p)) {
        Carver carver{(uintptr_t)(s.scratch + index * s.lane_floats)};
        lane = carve_lane<bq, bk>(carver, p, s.on_panels);
        state = state_at(lane.state, bq);
        if (!s.on_panels) values.place(lane.v, lane.v + int64_t(bk) * round_up(p.head_dim_v, lanes));
    }

    Place queries(int32_t head, int32_t row) const {
        const LayoutView& layout = args.layout;
        const TileView tile = tile_at(layout.queries, bq, p.seq_q, row);
        const uint64_t alive = alive_of(layout.live_queries, layout.by_query.rows, layout.kind_of_head[head], row, tile);
        return {tile, head / p.heads_q, head % p.heads_q, alive, owned_of(layout.queries, tile, row)};
    }

    Place keys(const Place& q, int32_t head_kind, int32_t block) const {
        const LayoutView& layout = args.layout;
        const int64_t group = p.heads_q / p.heads_kv;
        const TileView tile = keys_at(layout.keys, bk, p.seq_k, block);
        const uint64_t alive = alive_of(layout.live_keys, layout.by_key.rows, head_kind, block, tile);
        return {tile, q.batch, q.head / group, alive, 0};
    }

    void start() {
        start_rows();
        for (int64_t i = 0; i < p.head_dim_v * bq; ++i) state.out[i] = 0.f;
    }
    void start_rows() {
        met_mask = false;
        for (int i = 0; i < bq; ++i) state.m[i] = lowest, state.l[i] = 0.f, state.top[i] = -INFINITY;
    }

    Real score_factor() const { return p.softcap != 0 ? cap.in : Real(p.scale * log2_e); }

    void task(const Task& t) {
        const Place q = queries(t.head, t.row);
        const int32_t head_kind = args.layout.kind_of_head[t.head];
        if (t.take > 0)
            pack_panels<bq>(elements, args.q, q, int(p.head_dim), score_factor(), lane.q, lane.k);
        for (is_anew = false;; is_anew = true) {
            start();
            const ListsView& lists = args.layout.by_query;
            Walk w = walk(lists, slice_of(lists, head_kind, t.row), t.skip, t.take);
            for (bool more = w.next(); more;) {
                const Block block{keys(q, head_kind, w.block), w.block, w.mask};
                more = w.next();
                visit(block, more ? keys(q, head_kind, w.block) : Place{});
            }
            if (!met_mask || is_anew || all_finite(state.out, p.head_dim_v * bq) || !may_be_spoilt()) break;
        }
        t.part == whole_row ? finish(q) : keep(t.part);
    }

    // Whether a value that a query does not see may have made its sums NaN. Where l is NaN, scores of its own did.
    SPATTN_RARE bool may_be_spoilt() const {
        for (int64_t i = 0; i < p.head_dim_v * bq; ++i)
            if (!is_finite(state.out[i]) && is_finite(state.l[i % bq])) return true;
        return false;
    }

    struct Block {
        Place at;
        int32_t index, mask;
    };

    // Keys and values of a block, and what is fetched of the next one while scores and while sums are made.
    struct Visit {
        Rows k, v;
        const uint64_t* bits;
        Fetch next_k, next_v;
    };

    // next: the block after, without rows where there is none.
    void visit(const Block& block, const Place& next) {
        const Place& at = block.at;
        const uint64_t* bits = mask_bits(args.layout, block.mask);
        met_mask |= bits != nullptr;
        const int columns = int(p.head_dim_v), panels = bq / panel;
        const uint64_t apart = is_anew && bits ? rows_not_finite(v_from, at, columns) : 0;
        const Rows k = load_keys(k_from, at, int(p.head_dim), lane.k, load_rows);
        const auto load_values = [&](const Elements&, const TensorView&, const Place& rows, int, Real* to) {
            return load_keys(v_from, rows, columns, to, load_swept);
        };
        const Rows v = values.rows(v_from.elements, args.v, without(at, apart), block.index, columns, load_values);
        Visit now{k, v, bits, {k_from.elements, args.k, next, int(p.head_dim), panels * at.count / tile_m},
                  {v_from.elements, args.v, next, columns, panels * columns / tile_m}};
        if (!bits && bq > strip_lanes) {  // one call for tiles of one strip: with two they took 2 to 6 % longer
            attend<width>(now, {0, at.count}, 0);
        } else {
            for (int first = 0; first < bq; first += strip_lanes) {
                const Span keys = bits ? rows_kept<bq>(bits, at.count, first) : Span{0, at.count};
                if (keys.count > 0) attend<strip_lanes / lanes>(now, keys, first);
            }
        }
        if (apart != 0) add_apart(at, apart, bits);
    }

    // Where lane `first`, at most a panel of lanes from there on, lies in qT and sT.
    Real* q_at(int first) const { return lane.q + first / panel * panel * p.head_dim + first % panel; }
    Real* s_at(int key, int first) const {
        return lane.s + first / panel * panel * bk + key * panel + first % panel;
    }

    // Values that the product left out go to the queries that see their keys.
    SPATTN_RARE void add_apart(const Place& at, uint64_t apart, const uint64_t* bits) {
        each_bit(apart, [&](int key) {
            const char* v = v_from.elements.address(args.v, at, key);
            const Real scale = v_from.scale(at, key);
            for (int64_t d = 0; d < p.head_dim_v; ++d)
                for (int i = 0; i < bq; i += lanes) {
                    Real* out = state.out + d * bq + i;
                    const Vec value = set1(scale * v_from.elements.to_real(v + d * args.v.column * v_from.elements.bytes));
                    const Vec more = fma(value, load(s_at(key, i)), load(out));
                    store(out, select(bits_at(bits, key * bq + i), more, load(out)));
                }
        });
    }

    // How far vector w of a strip that starts a panel, or is within one, lies from its first in sT.
    static constexpr int apart(int w) { return w * lanes / panel * panel * bk + w * lanes % panel; }

    // n vectors of queries, from lane `first` on, meet some keys of a block.
    template <int n>
    void attend(Visit& v, Span keys, int first) {
        constexpr int step = least(n * lanes, panel), end = n * lanes;
        const Real* k_x = v.k.x + keys.first * v.k.ld;
        for (int at = first; at < first + end; at += step) {
            Real* s = s_at(keys.first, at);
            multiply<Left::rows, Store::set>({k_x, v.k.ld, q_at(at), panel, s, panel, int(p.head_dim)}, keys.count,
                                             step / lanes, v.next_k);
            for (int i = 0; p.softcap != 0 && i < keys.count; ++i) cap_scores(s + i * panel, step, cap.out);
        }
        constexpr int strip = least(4, n);  // vectors that softmax holds at once
        for (int at = first; at < first + end; at += strip * lanes)
            v.bits ? softmax<true, strip>(keys, at, v.bits) : softmax<false, strip>(keys, at, v.bits);
        const Real* v_x = v.v.x + keys.first * v.v.ld;
        for (int at = first; at < first + end; at += step)
            multiply<Left::transposed, Store::add>(
                {v_x, v.v.ld, s_at(keys.first, at), panel, state.out + at, bq, keys.count}, int(p.head_dim_v),
                step / lanes, v.next_v);
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
                Real* s = s_at(r, first) + apart(w);
                Vec x = load(s);
                if (masked) {
                    x = select(bits_at(bits, r * bq + first + w * lanes), x, set1(-INFINITY));
                    store(s, x);
                }
                top[w] = max(x, top[w]);
            }
        raise<strip>(first, top);
        for (int r = keys.first; r < end; ++r)
#pragma GCC unroll 4
            for (int w = 0; w < strip; ++w) {
                Real* x = s_at(r, first) + apart(w);
                const Vec e = exp2(load(x) - load(state.m + first + w * lanes));
                sum[w] = sum[w] + e;
                store(x, e);
            }
        for (int w = 0; w < strip; ++w) {
            Real* l = state.l + first + w * lanes;
            store(l, load(l) + sum[w]);
        }
    }

    template <int strip>
    void raise(int first, const Vec* top) {
        if (meet_top<strip>(first, top)) rescale<strip>(first, top);
    }

    // Whether a maximum is beyond the lag.
    template <int strip>
    bool meet_top(int first, const Vec* top) {
        bool needed = false;
        for (int w = 0; w < strip; ++w) {
            Real* highest = state.top + first + w * lanes;
            store(highest, max(top[w], load(highest)));
        }
        for (int w = 0; w < strip; ++w) needed |= any(above(top[w], load(state.m + first + w * lanes) + set1(lag)));
        return needed;
    }

    // Moves the maximum of the queries whose new one is beyond the lag, and rescales what was summed under the old one.
    // The others of the strip keep theirs: bits of a query's result must not depend on what only its neighbours see.
    template <int strip>
    void rescale(int first, const Vec* top, bool has_sums = true) {
        for (int w = 0; w < strip; ++w) {
            const int at = first + w * lanes;
            const Vec old = load(state.m + at), m = select(above(top[w], old + set1(lag)), top[w], old);
            const Vec keep = exp2(old - m);
            store(state.m + at, m);
            store(state.l + at, load(state.l + at) * keep);
            for (int64_t d = 0; has_sums && d < p.head_dim_v; ++d)
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
            const State part = state_at(space.parts + (j.first_part + i) * state_floats(p, bq), bq);
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
        transpose({state.out, bq}, columns, at.count, 1.f, lane.k, ld);
        for (int i = 0; i < at.count; ++i) {
            if (!(at.owned >> i & 1)) continue;
            Real* out = lane.k + i * ld;
            RowState row{state.m[i], state.l[i], state.top[i]};
            if (!args.piece.is_first) take_on(at, i, row, out);
            args.piece.is_last ? finish_row(at, i, row, end_row(row.m, row.l, sink), out) : hand_on(at, i, row, out);
        }
    }

    struct RowState {
        Real m, l, top;
    };

    void finish_row(const Place& at, int i, const RowState& row, const RowEnd& end, const Real* out) {
        elements.store_row(out, int(p.head_dim_v), end.factor, args.out, at, i);
        finish_row(at, i, row, end);
    }
    void finish_row(const Place& at, int i, const RowState& row, const RowEnd& end) {
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

template <class Lane>
struct ForwardCall {
    const ForwardArgs* args;
    const Elements* elements;
    typename Lane::Space space;
    int64_t next_queue, next_join;
};

template <class Lane>
inline void forward_tasks(void* argument, int64_t index) {
    auto& call = *(ForwardCall<Lane>*)argument;
    const TasksView& tasks = call.args->tasks;
    Lane lane(*call.args, *call.elements, call.space, index);
    for (int64_t w; (w = next_of(call.next_queue, *call.args->parallel)) < tasks.queues;)
        for (int32_t t = tasks.begin[w]; t < tasks.begin[w + 1]; ++t) lane.task(tasks.tasks[t]);
    end_streams();
}

template <class Lane>
inline void forward_joins(void* argument, int64_t index) {
    auto& call = *(ForwardCall<Lane>*)argument;
    Lane lane(*call.args, *call.elements, call.space, index);
    for (int64_t j; (j = next_of(call.next_join, *call.args->parallel)) < call.args->tasks.num_joins;)
        lane.join(call.args->tasks.joins[j]);
    end_streams();
}

template <class Lane>
inline void run_forward(const ForwardArgs& args, const Elements& elements, const typename Lane::Space& space) {
    ForwardCall<Lane> call{&args, &elements, space, 0, 0};
    args.parallel->run(forward_tasks<Lane>, &call);
    if (args.tasks.num_joins > 0) args.parallel->run(forward_joins<Lane>, &call);
}

template <int bq, int bk>
inline void block_forward_of(const ForwardArgs& args, const Elements& elements) {
    Carver carver{(uintptr_t)args.workspace};
    const int num_lanes = args.parallel->lanes();
    run_forward<ForwardLane<bq, bk>>(args, elements,
                                     carve_forward<bq, bk>(carver, *args.problem, args.tasks, num_lanes));
}

template <class T, int bq, int bk>
void block_forward(const ForwardArgs& args) {
    block_forward_of<bq, bk>(args, elements_of<T>);
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
