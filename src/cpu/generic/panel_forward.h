// SPDX-License-Identifier: MIT
// Blocked attention, forward, by products of 16-bit elements: block_forward.h with its two products on panels.
//
//     sT[key][query] = K . qT                  K: left panel, qT: right panel
//     pT             = exp2(scale_log2 sT - m)  in float32, then rounded, two keys side by side: a right panel
//     oT[dim][query] += vT . pT                vT: left panel
//
// K and V are packed once a call, before the tasks, for every query block that meets them; those of tiles that list
// their keys where they are met, for few queries do. Scores, sums and the state are float32; l sums what pT was before
// it was rounded, and before it was lifted (lift.h), as oT is until a task ends.
//
// 32 queries of a block and those of its keys that they see, in steps of 32, are a unit of work. Tile products keep the
// vector units idle and the other way round. So several units are under way: while the scores of one are made, and p v
// of those that wait for it is added, the exponentials of the last are made in between.
//
// What binds: the products with the loads of their tiles. Without exponentials, 2/3 of the time is left on a Xeon with
// AMX at head_dim 128, 4,096 tokens: what is made beside products is not free yet.
#pragma once

#include "cpu/generic/block_forward.h"
#include "cpu/generic/lift.h"
#include "cpu/generic/panels.h"

namespace spattn::cpu {
namespace {

constexpr int unit_queries = 32, unit_tiles = unit_queries / tile_rows;
// Units of the same queries whose p . v is still to be added: oT is loaded and stored once for all of them.
constexpr int most_waiting_units = 4;

struct PanelSpace {
    ForwardSpace floats;
    Tile *k, *v;  // [batch * heads_kv][homes][tiles of a block]
    int64_t homes;
    Tile* scratch;
    int64_t lane_tiles;
};

template <int bq, int bk>
struct PanelScratch {
    Tile *q, *k, *v;           // [steps][bq / 16], [bk / 16][steps], [tiles of head_dim_v][bk / 32]
    Tile* p;                   // [bq / 32][most_waiting_units + 1][bk / 32][2]
    Element* rows;             // [bq or bk][staged columns]
    Real* s;                   // [2][bk][32]

    static constexpr int p_tiles = bk / step_terms * unit_tiles;  // of a unit
    static int64_t k_tiles(const Problem& p) { return int64_t(bk / tile_rows) * steps_of(p.head_dim); }
    static int64_t v_tiles(const Problem& p) { return int64_t(bk / step_terms) * tiles_of(p.head_dim_v); }

    PanelScratch(Carver& carver, const Problem& problem) {
        const int64_t columns = staged_columns(problem.head_dim), columns_v = staged_columns(problem.head_dim_v);
        q = carver.take<Tile>(int64_t(bq / tile_rows) * steps_of(problem.head_dim));
        k = carver.take<Tile>(k_tiles(problem));
        v = carver.take<Tile>(v_tiles(problem));
        p = carver.take<Tile>(int64_t(bq / unit_queries) * (most_waiting_units + 1) * p_tiles);
        s = carver.take<Real>(2 * bk * unit_queries);
        rows = carver.take<Element>((bq > bk ? bq : bk) * (columns > columns_v ? columns : columns_v));
    }
};

template <int bq, int bk>
inline PanelSpace carve_panels(Carver& carver, const Problem& p, const LayoutView& layout, const TasksView& tasks,
                               int num_lanes) {
    Carver lane{0};
    PanelScratch<bq, bk>(lane, p);
    PanelSpace space;
    space.floats = carve_forward<bq, bk>(carver, p, tasks, 2 * num_lanes);
    space.homes = layout.by_key.rows - layout.keys.listed;
    const int64_t blocks = p.batch * p.heads_kv * space.homes;
    space.k = carver.take<Tile>(blocks * PanelScratch<bq, bk>::k_tiles(p));
    space.v = carver.take<Tile>(blocks * PanelScratch<bq, bk>::v_tiles(p));
    space.lane_tiles = int64_t((lane.used + sizeof(Tile) - 1) / sizeof(Tile));
    space.scratch = carver.take<Tile>(space.lane_tiles * 2 * num_lanes);
    return space;
}

template <int bq, int bk>
struct PanelForwardLane : ForwardLane<bq, bk> {
    using Lane = ForwardLane<bq, bk>;
    using Scratch = PanelScratch<bq, bk>;
    using Lane::args, Lane::p, Lane::elements, Lane::state, Lane::cap, Lane::met_mask, Lane::is_anew;
    static constexpr int width = unit_queries / lanes;

    struct Unit {
        Span steps;             // of 32 keys
        int first;              // query
        const uint64_t* bits;
        const Tile *k, *v;      // of the block
        Real* s;                // [bk][32]
        Tile* p = nullptr;      // [bk / 32][2], once its scores are made
        int half() const { return first / unit_queries; }
    };
    // Units of 32 queries that are done but for p . v.
    struct Waiting {
        Terms terms[most_waiting_units];
        int count, turn;        // turn: which of one more panels of p the next unit has
    };
    const PanelSpace& panels;
    Scratch scratch;
    Task task;
    Place queries;             // of the task
    Walk left;                 // blocks that the task has still to meet
    const Real factor;         // from products to scores in units of log2, where no cap lies between
    Unit unit;                 // whose scores are made and whose exponentials are not
    bool has_unit = false;
    int next_key = 0;          // of the unit: exponentials before it are made
    Vec sums[2][width];        // over even keys and over odd ones
    Waiting waiting[bq / unit_queries] = {};
    int turn = 0;              // which of two scores the next unit has

    static Carver at(const PanelSpace& s, int64_t index) { return {(uintptr_t)(s.scratch + index * s.lane_tiles)}; }
    PanelForwardLane(const ForwardArgs& a, const PanelSpace& s, int64_t index, Carver carver)
        : Lane(a, elements_of<Element>, s.floats, index),
          panels(s),
          scratch(carver, *a.problem),
          factor(Real(p.scale * log2_e)) {}
    PanelForwardLane(const ForwardArgs& a, const PanelSpace& s, int64_t index)
        : PanelForwardLane(a, s, index, at(s, index)) {}

    // ---- panels of keys ----

    // A key that any head of the group sees is packed for all: bits keep it from the heads that do not.
    Place shared_keys(int64_t plane, int32_t block) const {
        const LayoutView& layout = args.layout;
        const int64_t group = p.heads_q / p.heads_kv;
        uint64_t alive = 0;
        for (int64_t g = 0; g < group; ++g)
            alive |= alive_of(layout.live_keys, layout.by_key.rows, layout.kind_of_head[plane * group + g], block);
        return {tile_at(layout.keys, bk, p.seq_k, block), plane / p.heads_kv, plane % p.heads_kv, alive, 0};
    }

    Tile* home_k(int64_t plane, int64_t home) const {
        return panels.k + (plane * panels.homes + home) * Scratch::k_tiles(p);
    }
    Tile* home_v(int64_t plane, int64_t home) const {
        return panels.v + (plane * panels.homes + home) * Scratch::v_tiles(p);
    }

    void pack_k(const Place& at, Tile* out) {
        pack_left(stage(args.k, at, int(p.head_dim), bk, scratch.rows), bk, int(p.head_dim), out);
    }
    void pack_v(const Place& at, Tile* out) {
        pack_terms_left(stage(args.v, at, int(p.head_dim_v), bk, scratch.rows), bk, int(p.head_dim_v), out);
    }

    void pack_home(int64_t index) {
        const int64_t plane = index / panels.homes, home = index % panels.homes;
        const Place at = shared_keys(plane, int32_t(args.layout.keys.listed + home));
        if (at.alive == 0 || at.count == 0) return;
        pack_k(at, home_k(plane, home));
        pack_v(at, home_v(plane, home));
    }

    // ---- tasks ----

    void open(const Task& t) {
        task = t;
        queries = Lane::queries(t.head, t.row);
        if (t.take > 0)
            pack_right(stage(args.q, queries, int(p.head_dim), bq, scratch.rows), bq, int(p.head_dim), scratch.q);
        is_anew = false;
        begin();
    }

    // Meets the next block; false where none is left.
    bool advance() {
        if (!left.next()) return false;
        visit(Lane::keys(queries, args.layout.kind_of_head[task.head], left.block), left.block, left.mask);
        return true;
    }

    void close() {
        drain();
        if (met_mask && !all_finite(state.out, p.head_dim_v * bq) && Lane::may_be_spoilt()) {
            is_anew = true;
            begin();
            while (advance()) {}
            drain();
        }
        if constexpr (is_f16) unlift();
        task.part == whole_row ? Lane::finish(queries) : Lane::keep(task.part);
    }

    void unlift() {
        for (int64_t i = 0; i < p.head_dim_v * bq; i += lanes)
            store(state.out + i, load(state.out + i) * set1(forward_unlift));
    }

    void begin() {
        const ListsView& lists = args.layout.by_query;
        left = walk(lists, slice_of(lists, args.layout.kind_of_head[task.head], task.row), task.skip, task.take);
        Lane::start();
        for (int64_t i = p.head_dim_v * bq; i < tiles_of(p.head_dim_v) * tile_rows * bq; ++i) state.out[i] = 0.f;
    }

    void visit(const Place& at, int32_t block, int32_t mask) {
        const uint64_t* bits = mask_bits(args.layout, mask);
        met_mask |= bits != nullptr;
        const uint64_t apart = is_anew && bits ? rows_not_finite(elements, args.v, at, int(p.head_dim_v)) : 0;
        const int32_t home = block - args.layout.keys.listed;
        const bool is_home = home >= 0 && !(is_anew && bits);
        const int64_t plane = at.batch * p.heads_kv + at.head;
        if (!is_home) {
            pack_k(at, scratch.k);
            pack_v(without(at, apart), scratch.v);
        }
        const Tile *k = is_home ? home_k(plane, home) : scratch.k, *v = is_home ? home_v(plane, home) : scratch.v;
        for (int first = 0; first < bq; first += unit_queries) {
            const Span steps = bits ? steps_kept<bq>(bits, bk, first) : Span{0, bk / step_terms};
            if (steps.count == 0) continue;
            meet({steps, first, bits, k, v, scratch.s + turn * bk * unit_queries});
            if (is_anew) drain();
            if (apart != 0) add_apart(at, apart, bits, unit);
        }
        if (!is_home) drain();
    }

    // ---- a unit ----

    // Scores of a unit, and p . v of queries for which enough units wait, both beside the exponentials of the last.
    void meet(const Unit& next) {
        const int steps = steps_of(p.head_dim);
        const Terms terms{next.k + next.steps.first * unit_tiles * steps, scratch.q + next.first / tile_rows, steps};
        Real* s = next.s + next.steps.first * step_terms * unit_queries;
        const TileProduct product{&terms, 1, steps, bq / tile_rows, s, unit_queries};
        const auto meanwhile = beside(next.steps.count * steps + calls_of_waiting(most_waiting_units));
        multiply_panels<Store::set>(product, 0, next.steps.count * unit_tiles, unit_tiles, meanwhile);
        add_waiting(most_waiting_units, meanwhile);
        complete();
        unit = next, has_unit = true, turn ^= 1;
        begin_unit();
    }

    // A share of the last unit's exponentials for each of so many calls.
    auto beside(int calls) {
        const int keys = has_unit ? unit.steps.count * step_terms : 0;
        const int share = calls > 0 ? round_up((keys + calls - 1) / calls, 2) : 0;
        return [this, share] { if (has_unit) exponentiate(next_key + share); };
    }

    // Moves the maxima, so that exponentials may be made.
    void begin_unit() {
        Vec top[width];
        if (p.softcap != 0) cap_unit();
        unit.bits ? find_top<true>(top) : find_top<false>(top);
        Waiting& same = waiting[unit.half()];
        if (Lane::template meet_top<width>(unit.first, top)) {
            add(same, unit.first, nothing);
            Lane::template rescale<width>(unit.first, top);
        }
        unit.p = scratch.p + (unit.half() * (most_waiting_units + 1) + same.turn) * Scratch::p_tiles;
        same.turn = (same.turn + 1) % (most_waiting_units + 1);
        next_key = unit.steps.first * step_terms;
        for (auto& sum : sums)
            for (Vec& x : sum) x = set1(0.f);
    }

    void cap_unit() {
        Real* s = unit.s + unit.steps.first * step_terms * unit_queries;
        for (int64_t i = 0; i < unit.steps.count * step_terms * unit_queries; i += lanes)
            store(s + i, capped_tanh(load(s + i) * set1(cap.in)).tanh * set1(cap.out));
    }
    Vec score_factor() const { return set1(p.softcap != 0 ? Real(1) : factor); }

    template <bool masked>
    void find_top(Vec* top) const {
        const Vec scale = score_factor(), nothing = set1(-INFINITY);
        Vec tops[2][width];
        for (auto& pair : tops)
            for (Vec& x : pair) x = nothing;
        const int end = (unit.steps.first + unit.steps.count) * step_terms;
        for (int key = unit.steps.first * step_terms; key < end; key += 2)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; ++odd)
#pragma GCC unroll 2
                for (int w = 0; w < width; ++w) {
                    Vec x = load(unit.s + (key + odd) * unit_queries + w * lanes) * scale;
                    if (masked) x = select(bits_at(unit.bits, (key + odd) * bq + unit.first + w * lanes), x, nothing);
                    tops[odd][w] = max(x, tops[odd][w]);
                }
        for (int w = 0; w < width; ++w) top[w] = max(tops[1][w], tops[0][w]);
    }

    // sT becomes pT, up to the key `end` or the last.
    void exponentiate(int end) { unit.bits ? exponentiate<true>(end) : exponentiate<false>(end); }

    // What the loop reads lies in locals: its stores could change members for all that the compiler knows.
    template <bool masked>
    void exponentiate(int end) {
        const int first = unit.steps.first * step_terms, last = first + unit.steps.count * step_terms;
        end = end < last ? end : last;
        const Vec scale = score_factor();
        Vec minus_m[width], even[width], odd[width];
        for (int w = 0; w < width; ++w) {
            minus_m[w] = set1(0.f) - load(state.m + unit.first + w * lanes);
            even[w] = sums[0][w], odd[w] = sums[1][w];
        }
        const uint64_t* const bits = unit.bits;
        Real* const scores = unit.s;
        Tile* const to = unit.p;
        const int first_query = unit.first;
        const bool keeps_floats = is_anew;
        for (unsigned key = unsigned(next_key); key < unsigned(end); key += 2) {
            const unsigned in_unit = key - unsigned(first);
            Tile* const tile = to + in_unit / step_terms * unit_tiles;
#pragma GCC unroll 2
            for (int w = 0; w < width; ++w) {
                Real* s = scores + key * unit_queries + w * lanes;
                Vec a = exp2(fma(load(s), scale, minus_m[w])), b = exp2(fma(load(s + unit_queries), scale, minus_m[w]));
                if (masked) {
                    const int bit = int(key) * bq + first_query + w * lanes;
                    a = select(bits_at(bits, bit), a, set1(0.f));
                    b = select(bits_at(bits, bit + bq), b, set1(0.f));
                }
                even[w] = even[w] + a, odd[w] = odd[w] + b;
                a = lifted(a, forward_lift), b = lifted(b, forward_lift);
                store_pairs(tile[w].rows[in_unit % step_terms / 2], a, b);
                if (keeps_floats) store(s, a), store(s + unit_queries, b);
            }
        }
        next_key = end > next_key ? end : next_key;
        for (int w = 0; w < width; ++w) sums[0][w] = even[w], sums[1][w] = odd[w];
    }

    // Makes what is left of a unit's exponentials. Its p . v waits for more.
    void complete() {
        if (!has_unit) return;
        has_unit = false;
        exponentiate(bk);
        for (int w = 0; w < width; ++w) {
            Real* l = state.l + unit.first + w * lanes;
            store(l, load(l) + (sums[0][w] + sums[1][w]));
        }
        Waiting& same = waiting[unit.half()];
        same.terms[same.count++] = {unit.v + unit.steps.first, unit.p, unit.steps.count};
    }

    // oT += vT pT
    template <class Meanwhile>
    void add(Waiting& w, int first, const Meanwhile& meanwhile) {
        if (w.count == 0) return;
        const TileProduct product{w.terms, w.count, bk / step_terms, unit_tiles, state.out + first, bq};
        multiply_panels<Store::add>(product, 0, tiles_of(p.head_dim_v), unit_tiles, meanwhile);
        w.count = 0;
    }

    // For queries that so many units wait for, or more.
    template <class Meanwhile>
    void add_waiting(int fewest, const Meanwhile& meanwhile) {
        for (int half = 0; half < bq / unit_queries; ++half)
            if (waiting[half].count >= fewest) add(waiting[half], half * unit_queries, meanwhile);
    }
    // How often that calls meanwhile.
    int calls_of_waiting(int fewest) const {
        int steps = 0;
        for (const Waiting& w : waiting)
            for (int i = 0; w.count >= fewest && i < w.count; ++i) steps += w.terms[i].steps;
        return (tiles_of(p.head_dim_v) + 1) / 2 * steps;
    }

    void drain() {
        add_waiting(1, beside(calls_of_waiting(1)));
        complete();
        add_waiting(1, nothing);
    }

    // Values that the product left out go to the queries that see their keys.
    SPATTN_RARE void add_apart(const Place& at, uint64_t apart, const uint64_t* bits, const Unit& u) {
        const int begin = u.steps.first * step_terms, end = begin + u.steps.count * step_terms;
        each_bit(apart, [&](int key) {
            if (key < begin || key >= end) return;
            const Element* v = address<Element>(args.v, at, key);
            for (int64_t d = 0; d < p.head_dim_v; ++d)
                for (int i = 0; i < unit_queries; i += lanes) {
                    Real* out = state.out + d * bq + u.first + i;
                    const Vec share = load(u.s + key * unit_queries + i);
                    const Vec more = fma(set1(to_real(v[d * args.v.column])), share, load(out));
                    store(out, select(bits_at(bits, key * bq + u.first + i), more, load(out)));
                }
        });
    }
};

// ---- phases -------------------------------------------------------------------------------------------------------

struct PanelForwardCall {
    const ForwardArgs* args;
    PanelSpace space;
    int64_t next_home, next_queue, next_join;
};

template <int bq, int bk>
inline void panel_forward_homes(void* argument, int64_t index) {
    PanelForwardCall& call = *(PanelForwardCall*)argument;
    PanelForwardLane<bq, bk> lane(*call.args, call.space, 2 * index);
    const int64_t end = call.args->problem->batch * call.args->problem->heads_kv * call.space.homes;
    for (int64_t i; (i = next_of(call.next_home, *call.args->parallel)) < end;) lane.pack_home(i);
}

// Two tasks that meet the same blocks take turns, block by block: panels that come from L3 are then read once for both.
template <int bq, int bk>
struct PanelForwardPair {
    PanelForwardLane<bq, bk> a, b;

    PanelForwardPair(const ForwardArgs& args, const PanelSpace& space, int64_t index)
        : a(args, space, 2 * index), b(args, space, 2 * index + 1) {}

    void run(const Task& t) {
        a.open(t);
        while (a.advance()) {}
        a.close();
    }
    void run(const Task& t, const Task& u) {
        a.open(t), b.open(u);
        while (a.advance()) b.advance();
        a.close(), b.close();
    }
};

// Whether two queues are a task each, and these meet the same blocks.
inline bool are_alike(const ForwardArgs& args, int64_t w, int64_t other) {
    const TasksView& tasks = args.tasks;
    if (tasks.begin[w + 1] - tasks.begin[w] != 1 || tasks.begin[other + 1] - tasks.begin[other] != 1) return false;
    const Task &t = tasks.tasks[tasks.begin[w]], &u = tasks.tasks[tasks.begin[other]];
    if (t.head != u.head || t.skip != u.skip || t.take != u.take) return false;
    const ListsView& lists = args.layout.by_query;
    const int32_t head_kind = args.layout.kind_of_head[t.head];
    const Slice a = slice_of(lists, head_kind, t.row), b = slice_of(lists, head_kind, u.row);
    return a.begin == b.begin && a.end == b.end;
}

// Queues that are alike are taken two at a time, but for the last: lanes should end together.
template <int bq, int bk>
inline void panel_forward_tasks(void* argument, int64_t index) {
    PanelForwardCall& call = *(PanelForwardCall*)argument;
    const ForwardArgs& args = *call.args;
    const TasksView& tasks = args.tasks;
    const int64_t last = tasks.queues - 4 * args.parallel->lanes();
    PanelForwardPair<bq, bk> pair(args, call.space, index);
    const auto next = [&] { return next_of(call.next_queue, *args.parallel); };
    const auto run = [&](int64_t w) {
        for (int32_t t = tasks.begin[w]; t < tasks.begin[w + 1]; ++t) pair.run(tasks.tasks[t]);
    };
    begin_products();
    for (int64_t w; (w = next()) < tasks.queues;) {
        const int64_t other = w < last && are_alike(args, w, w + 1) ? next() : tasks.queues;
        if (other >= tasks.queues) {
            run(w);
        } else if (are_alike(args, w, other)) {
            pair.run(tasks.tasks[tasks.begin[w]], tasks.tasks[tasks.begin[other]]);
        } else {
            run(w), run(other);
        }
    }
    end_products();
    end_streams();
}

template <int bq, int bk>
inline void panel_forward_joins(void* argument, int64_t index) {
    PanelForwardCall& call = *(PanelForwardCall*)argument;
    PanelForwardLane<bq, bk> lane(*call.args, call.space, 2 * index);
    for (int64_t j; (j = next_of(call.next_join, *call.args->parallel)) < call.args->tasks.num_joins;)
        lane.join(call.args->tasks.joins[j]);
    end_streams();
}

template <int bq, int bk>
void panel_forward(const ForwardArgs& args) {
    Carver carver{(uintptr_t)args.workspace};
    PanelForwardCall call{
        &args, carve_panels<bq, bk>(carver, *args.problem, args.layout, args.tasks, args.parallel->lanes()), 0, 0, 0};
    args.parallel->run(panel_forward_homes<bq, bk>, &call);
    args.parallel->run(panel_forward_tasks<bq, bk>, &call);
    if (args.tasks.num_joins > 0) args.parallel->run(panel_forward_joins<bq, bk>, &call);
}

template <int bq, int bk>
size_t panel_forward_workspace(const Problem& p, const LayoutView& layout, const TasksView& tasks, int num_lanes) {
    Carver carver{0};
    carve_panels<bq, bk>(carver, p, layout, tasks, num_lanes);
    return carver.used;
}

}  // namespace
}  // namespace spattn::cpu
