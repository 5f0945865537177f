// SPDX-License-Identifier: MIT
// Blocked attention, backward, by products of 16-bit elements: block_backward.h with its five products on panels.
//
//     s[query][key]    = Q . kT          Q:   left panel     kT: right
//     dp[query][key]   = dO . vT         dO:  left           vT: right
//     dvT[dim][key]   += dOT . P         dOT: left           P:  right, two queries side by side
//     dkT[dim][key]   += QT . dS         QT:  left           dS: right, in the same way
//     dQ[query][dim]  += dS . K          dS:  left           K:  right
//
// Q and dO of a round are packed before its tasks, each in both ways; K and V once a column. p and ds are made in
// float32 and rounded to elements as they become panels; all sums are float32. Products that sum over queries wait until
// there are some for the same 32 keys: dvT and dkT are then read and written once for all of them.
//
// p and ds are lifted (lift.h), and so are the sums of gradients. Pairs whose ds goes beyond fp16 are left out of the
// products, and what they add is added one by one: that is slow, but gradients of such scores hardly fit fp16, either.
//
// Two columns of a queue take turns (PanelBackwardPair): a block of 64 queries has 64 KiB of panels and 32 KiB of dQ at
// head_dim 128, which come from L3 where a head has more than L2 holds. Its sums of dQ are fetched from there while its
// scores are made; products waited for them for a tenth of the time.
//
// Tried and dropped, for attention backward took as long: p and ds of the first half of a block made beside the scores
// of the second, as the forward does it; panels of the next block fetched, too.
//
// Everything else is block_backward.h: phases, buffers of dQ, statistics, isolation, pieces.
#pragma once

#include "cpu/generic/ahead.h"
#include "cpu/generic/block_backward.h"
#include "cpu/generic/lift.h"
#include "cpu/generic/panels.h"

namespace spattn::cpu {
namespace {

constexpr int unit_keys = 32;
// Units of the same keys whose gradients are still to be added. Halves of a block take turns, so one has one more.
constexpr int many_waiting_gradients = 4, most_waiting_gradients = many_waiting_gradients + 1;

// A tile of queries, packed: where its four panels begin.
struct QueryPanels {
    const Tile *q, *dout;      // [bq / 16][steps]
    const Tile *q_t, *dout_t;  // [tiles of head_dim][bq / 32]
};

template <int bq>
struct QueryTile {
    static int64_t q(const Problem& p) { return int64_t(bq / tile_rows) * steps_of(p.head_dim); }
    static int64_t dout(const Problem& p) { return int64_t(bq / tile_rows) * steps_of(p.head_dim_v); }
    static int64_t q_t(const Problem& p) { return int64_t(bq / step_terms) * tiles_of(p.head_dim); }
    static int64_t dout_t(const Problem& p) { return int64_t(bq / step_terms) * tiles_of(p.head_dim_v); }
    static int64_t all(const Problem& p) { return q(p) + dout(p) + q_t(p) + dout_t(p); }
};

struct PanelBackwardSpace {
    Tile* queries;  // [batch * heads_q][rows][QueryTile::all]
    Tile* scratch;
    int64_t lane_tiles, rows;  // rows: own tiles of a round at most
};

template <int bq, int bk>
struct PanelBackwardScratch {
    Tile *k_t, *v_t, *k;       // [steps][bk / 16] twice, [bk / 32][tiles of head_dim]
    Tile *p, *ds;              // [bk / 32][most_waiting_gradients][bq / 32][2]
    Tile* ds_left;             // [bq / 16][bk / 32]
    Tile* queries;             // of one tile
    Real *dk_t, *dv_t;         // [dims, in tiles of 16][bk]
    Element* rows;

    PanelBackwardScratch(Carver& carver, const Problem& problem) {
        const int64_t columns = staged_columns(problem.head_dim), columns_v = staged_columns(problem.head_dim_v);
        const int64_t units = int64_t(bk / unit_keys) * most_waiting_gradients * (bq / step_terms) * 2;
        k_t = carver.take<Tile>(int64_t(bk / tile_rows) * steps_of(problem.head_dim));
        v_t = carver.take<Tile>(int64_t(bk / tile_rows) * steps_of(problem.head_dim_v));
        k = carver.take<Tile>(int64_t(bk / step_terms) * tiles_of(problem.head_dim));
        p = carver.take<Tile>(units);
        ds = carver.take<Tile>(units);
        ds_left = carver.take<Tile>(int64_t(bq / tile_rows) * (bk / step_terms));
        queries = carver.take<Tile>(QueryTile<bq>::all(problem));
        dk_t = carver.take<Real>(int64_t(tiles_of(problem.head_dim)) * tile_rows * bk);
        dv_t = carver.take<Real>(int64_t(tiles_of(problem.head_dim_v)) * tile_rows * bk);
        rows = carver.take<Element>((bq > bk ? bq : bk) * (columns > columns_v ? columns : columns_v));
    }
};

template <int bq, int bk>
inline PanelBackwardSpace carve_panel_backward(Carver& carver, const Problem& p, const LayoutView& layout,
                                               const TasksView& tasks, int num_lanes) {
    Carver lane{0};
    PanelBackwardScratch<bq, bk>(lane, p);
    PanelBackwardSpace space;
    space.rows = 0;
    for (int32_t i = 0; i < rounds_of(tasks); ++i) {
        const Round round = round_at(tasks, layout.by_query.rows - repeating(layout.queries), i);
        if (round.end_row - round.first_row > space.rows) space.rows = round.end_row - round.first_row;
    }
    space.queries = carver.take<Tile>(p.batch * p.heads_q * space.rows * QueryTile<bq>::all(p));
    space.lane_tiles = int64_t((lane.used + sizeof(Tile) - 1) / sizeof(Tile));
    space.scratch = carver.take<Tile>(space.lane_tiles * num_lanes);
    return space;
}

template <int bq, int bk>
struct PanelBackwardLane : BackwardLane<bq, bk> {
    using Lane = BackwardLane<bq, bk>;
    using Lane::args, Lane::p, Lane::elements, Lane::lane, Lane::cap, Lane::scale_log2, Lane::columns, Lane::columns_v;
    using Lane::keys_apart;
    using typename Lane::RowStatistics;
    static constexpr int halves = bk / unit_keys, unit_tiles = unit_keys / tile_rows, width = unit_keys / lanes;

    // The sums over queries that 32 keys wait for, one for each gradient.
    struct Waiting {
        Terms dv[most_waiting_gradients], dk[most_waiting_gradients];
        int count;
    };
    // 32 keys of a block, and those of its queries that see any of them, in steps of 32.
    struct Unit {
        Span steps;
        int first;  // key
        const uint64_t* bits;
        RowStatistics rows;
        Tile *p, *ds;
        bool keeps_floats;  // p and ds are left in lane.s and lane.dp, too
    };

    const PanelBackwardSpace& panels;
    PanelBackwardScratch<bq, bk> scratch;
    Waiting waiting[halves];
    Place column;              // of the task
    Ahead* ahead;              // of dQ, which lanes that take turns share
    bool is_beyond = false;    // some ds of the unit at hand is beyond fp16, or infinite
    uint64_t keys_beyond = 0;  // of the block at hand, those of units in which some ds is

    static Carver at(const PanelBackwardSpace& s, int64_t index) {
        return {(uintptr_t)(s.scratch + index * s.lane_tiles)};
    }
    PanelBackwardLane(const BackwardArgs& a, const BackwardSpace& s, const PanelBackwardSpace& panels, int64_t index,
                      Carver carver)
        : Lane(a, elements_of<Element>, s, index), panels(panels), scratch(carver, *a.problem) {}
    PanelBackwardLane(const BackwardArgs& a, const BackwardSpace& s, const PanelBackwardSpace& panels, int64_t index)
        : PanelBackwardLane(a, s, panels, index, at(panels, index)) {}

    // ---- panels of queries ----

    static QueryPanels panels_at(const Problem& p, const Tile* tile) {
        const Tile *dout = tile + QueryTile<bq>::q(p), *q_t = dout + QueryTile<bq>::dout(p);
        return {tile, dout, q_t, q_t + QueryTile<bq>::q_t(p)};
    }
    Tile* own_panels(int64_t head, int64_t tile) const {
        return panels.queries + (head * panels.rows + tile - Lane::space.round.first_row) * QueryTile<bq>::all(p);
    }

    // Both ways: products that sum over queries leave those out that `apart` names.
    void pack_queries(const Place& at, uint64_t apart, Tile* out) {
        const QueryPanels to = panels_at(p, out);
        pack_both(args.q, at, apart, int(p.head_dim), (Tile*)to.q, (Tile*)to.q_t);
        pack_both(args.dout, at, apart, int(p.head_dim_v), (Tile*)to.dout, (Tile*)to.dout_t);
    }
    void pack_both(const TensorView& x, const Place& at, uint64_t apart, int count, Tile* rows, Tile* terms) {
        Staged staged = stage(x, at, count, bq, scratch.rows);
        pack_left(staged, bq, count, rows);
        if (apart != 0) staged = stage(x, without(at, apart), count, bq, scratch.rows);
        pack_terms_left(staged, bq, count, terms);
    }
    void pack_own(int64_t head, int32_t tile) {
        const Place at = Lane::own(head, tile);
        if (at.alive != 0 && at.count > 0) pack_queries(at, 0, own_panels(head, tile));
    }

    // ---- columns ----

    void open(const Task& t) {
        column = Lane::keys(t.head, t.row);
        Lane::zero(scratch.dk_t, int64_t(columns) * bk);
        Lane::zero(scratch.dv_t, int64_t(columns_v) * bk);
        for (Waiting& w : waiting) w.count = 0;
        if (t.take > 0) pack_keys(column);
    }
    void close(const Task& t) {
        drain();
        transpose({scratch.dk_t, bk}, columns, bk, ds_unlift, lane.dk, columns);
        transpose({scratch.dv_t, bk}, columns_v, bk, p_unlift, lane.dv, columns_v);
        t.part == whole_row ? Lane::finish(column, t.head, t.row) : Lane::keep(t.part);
    }

    void pack_keys(const Place& at) {
        pack_right(stage(args.v, at, int(p.head_dim_v), bk, scratch.rows), bk, int(p.head_dim_v), scratch.v_t);
        Staged k = stage(args.k, at, int(p.head_dim), bk, scratch.rows);
        pack_right(k, bk, int(p.head_dim), scratch.k_t);
        keys_apart = all_finite(k, bk, int(p.head_dim)) ? 0 : rows_not_finite(elements, args.k, at, int(p.head_dim));
        if (keys_apart != 0) k = stage(args.k, without(at, keys_apart), int(p.head_dim), bk, scratch.rows);
        pack_terms_right(k, bk, int(p.head_dim), scratch.k);
    }

    // A tile of queries that a column has met: what is left to do for dq.
    struct Met {
        Place at;
        const uint64_t* bits;
        int64_t g;
        int32_t row;
        uint64_t apart;
        bool in_scratch, is_first;  // is_first: nothing was collected in dq so far
        Real* dq;
        Terms ds_k;
    };

    void visit(int64_t head, int64_t g, int32_t row, int32_t mask) {
        const Met met = meet_tile(head, g, row, mask);
        add_dq(&met.ds_k, 1, met);
        end_tile(met);
    }

    // Told apart: inlined, GCC 12 takes all of it for as rare as what happens to rows that are not finite.
    __attribute__((noinline, hot)) Met meet_tile(int64_t head, int64_t g, int32_t row, int32_t mask) {
        const Place at = Lane::queries(head, row);
        const uint64_t* bits = mask_bits(args.layout, mask);
        const uint64_t apart = bits ? Lane::queries_apart(head, row, at) : 0;
        const bool in_scratch = Lane::repeats(row) || apart != 0, is_apart = (apart | keys_apart) != 0;
        if (in_scratch) pack_queries(at, apart, scratch.queries);
        const QueryPanels q = panels_at(p, in_scratch ? scratch.queries : own_panels(head, Lane::own_tile(row)));
        bool is_first = true;
        Real* dq = lane.dq;
        if (!Lane::repeats(row)) dq = Lane::touch(Lane::dq_block(Lane::queue, g, Lane::own_tile(row)), is_first);
        if (!is_first && !Lane::repeats(row)) *ahead = {(const char*)dq, (const char*)(dq + int64_t(bq) * columns)};
        const RowStatistics rows = Lane::statistics(head, row, at);
        constexpr size_t left_tiles = (bq / tile_rows) * (bk / step_terms);
        if (bits) __builtin_memset((void*)scratch.ds_left, 0, left_tiles * sizeof(Tile));
        if constexpr (is_f16) keys_beyond = 0;
        for (int first = 0; first < bk; first += unit_keys) {
            const Span steps = bits ? steps_kept<bk>(bits, bq, first) : Span{0, bq / step_terms};
            if (steps.count > 0) meet(q, steps, first, bits, rows, is_apart);
        }
        return {at, bits, g, row, apart, in_scratch, is_first, dq, {scratch.ds_left, scratch.k, bk / step_terms}};
    }

    // s = q kT: dq += ds k
    void add_dq(const Terms* terms, int count, const Met& met) {
        const TileProduct product{terms, count, bk / step_terms, tiles_of(p.head_dim), met.dq, columns};
        met.is_first ? multiply_panels<Store::set>(product, 0, bq / tile_rows, tiles_of(p.head_dim), *ahead)
                     : multiply_panels<Store::add>(product, 0, bq / tile_rows, tiles_of(p.head_dim), *ahead);
    }

    void end_tile(const Met& met) {
        if ((met.apart | keys_apart) != 0) add_apart(met.at, met.apart, column, met.bits, met.dq);
        if (is_f16 && keys_beyond != 0) add_beyond(met.at, met.apart, column, met.bits, met.dq);
        if (met.in_scratch) drain();
        if (Lane::repeats(met.row)) Lane::scatter_dq(met.g, met.at);
    }

    void meet(const QueryPanels& q, Span steps, int first, const uint64_t* bits, const RowStatistics& rows,
              bool keeps_floats) {
        // s = q kT, dp = dout vT
        multiply_scores(q.q, scratch.k_t, steps_of(p.head_dim), steps, first, lane.s);
        multiply_scores(q.dout, scratch.v_t, steps_of(p.head_dim_v), steps, first, lane.dp);
        Waiting& w = waiting[first / unit_keys];
        const int64_t slot = (first / unit_keys * most_waiting_gradients + w.count) * (bq / step_terms) * unit_tiles;
        const Unit unit{steps, first, bits, rows, scratch.p + slot, scratch.ds + slot, keeps_floats};
        differentiate(unit);
        if (is_f16 && is_beyond) take_out(q, unit);
        w.dv[w.count] = {q.dout_t + steps.first, unit.p, steps.count};
        w.dk[w.count] = {q.q_t + steps.first, unit.ds, steps.count};
        ++w.count;
        if (w.count == most_waiting_gradients || waiting[halves - 1].count >= many_waiting_gradients) drain();
    }

    void multiply_scores(const Tile* a, const Tile* b, int terms_steps, Span steps, int first, Real* s) {
        const Terms terms{a + steps.first * 2 * terms_steps, b + first / tile_rows, terms_steps};
        Real* c = s + steps.first * step_terms * bk + first;
        const TileProduct product{&terms, 1, terms_steps, bk / tile_rows, c, bk};
        multiply_panels<Store::set>(product, 0, steps.count * 2, unit_tiles, *ahead);
    }

    void differentiate(const Unit& u) {
        if (p.softcap != 0)
            u.bits ? differentiate<true, true>(u) : differentiate<false, true>(u);
        else
            u.bits ? differentiate<true, false>(u) : differentiate<false, false>(u);
    }
    // s becomes p and dp becomes ds, as panels. Masked pairs are selected away, so what they held does not matter.
    // The unit is a copy, for its fields to lie in registers whatever is stored.
    template <bool masked, bool is_capped>
    void differentiate(const Unit u) {
        Real *const scores = lane.s, *const slopes = lane.dp;
        Tile* const left = scratch.ds_left + u.first / step_terms;
        const Vec factor = set1(scale_log2), in = set1(cap.in);
        Vec most = set1(0.f);  // of |ds|
        const unsigned first = unsigned(u.steps.first) * step_terms, end = first + unsigned(u.steps.count) * step_terms;
        for (unsigned i = first; i < end; i += 2) {
            const unsigned tile = (i - first) / step_terms * unit_tiles, pair = i % step_terms / 2;
            Vec ds[2][width];
#pragma GCC unroll 2
            for (int w = 0; w < width; ++w) {
                Vec both[2];
#pragma GCC unroll 2
                for (unsigned odd = 0; odd < 2; ++odd) {
                    const int at = int(i + odd) * bk + u.first + w * lanes;
                    const Vec x = load(scores + at);
                    const Capped capped = is_capped ? capped_tanh(x * in) : Capped{x, x};
                    Vec probability = exp2(fma(capped.tanh, factor, set1(u.rows.minus_lse[i + odd])));
                    Vec slope = probability * (load(slopes + at) - set1(u.rows.delta[i + odd]));
                    if (is_capped) slope = slope * capped.slope;
                    if (masked) {
                        const Bits kept = bits_at(u.bits, at);
                        probability = select(kept, probability, set1(0.f));
                        slope = select(kept, slope, set1(0.f));
                    }
                    probability = lifted(probability, p_lift), slope = lifted(slope, ds_lift);
                    if (is_f16) most = max(size_of(slope), most);
                    if (u.keeps_floats) store(scores + at, probability), store(slopes + at, slope);
                    both[odd] = probability, ds[odd][w] = slope;
                }
                store_pairs(u.p[tile + unsigned(w)].rows[pair], both[0], both[1]);
                store_pairs(u.ds[tile + unsigned(w)].rows[pair], ds[0][w], ds[1][w]);
            }
#pragma GCC unroll 2
            for (unsigned odd = 0; odd < 2; ++odd) {
                Tile& to = left[i / tile_rows * (bk / step_terms)];
                store_terms(to.rows[(i + odd) % tile_rows], ds[odd][0], ds[odd][1]);
            }
        }
        if (is_f16) is_beyond = any(above(most, set1(largest_f16)));
    }

    // out = p v: dv += pT dout. s = q kT: dk += dsT q. Halves read the same tiles of Q and dO, so they take turns.
    void drain() {
        add_waiting(&Waiting::dv, scratch.dv_t, tiles_of(p.head_dim_v));
        add_waiting(&Waiting::dk, scratch.dk_t, tiles_of(p.head_dim));
        for (Waiting& w : waiting) w.count = 0;
    }
    void add_waiting(Terms (Waiting::*terms)[most_waiting_gradients], Real* sums, int tiles) {
        for (int tile = 0; tile < tiles; tile += 2)
            for (int half = 0; half < halves; ++half) {
                const Waiting& w = waiting[half];
                const TileProduct product{w.*terms, w.count, bq / step_terms, unit_tiles, sums + half * unit_keys, bk};
                const int end = least(tiles, tile + 2);
                if (w.count > 0) multiply_panels<Store::add>(product, tile, end, unit_tiles, *ahead);
            }
    }

    // ---- rows that are not finite: products of gradients left them out, pairs that are kept receive them ----

    SPATTN_RARE void add_apart(const Place& at, uint64_t apart, const Place& keys, const uint64_t* bits, Real* dq) {
        each_pair(apart, all_rows, at.count, keys.count, bits, [&](int query, int key) {
            const int pair = query * bk + key;
            Lane::add_row(args.dout, at, query, int(p.head_dim_v), lane.s[pair], scratch.dv_t + key, bk);
            Lane::add_row(args.q, at, query, int(p.head_dim), lane.dp[pair], scratch.dk_t + key, bk);
        });
        each_pair(all_rows, keys_apart, at.count, keys.count, bits, [&](int query, int key) {
            Lane::add_row(args.k, keys, key, int(p.head_dim), lane.dp[query * bk + key], dq + query * columns);
        });
    }

    // ---- pairs whose ds is beyond fp16 ----

    // Makes the unit's p and ds anew, as floats too, and zeros of what is beyond in the panels of ds.
    SPATTN_RARE void take_out(const QueryPanels& q, Unit u) {
        multiply_scores(q.q, scratch.k_t, steps_of(p.head_dim), u.steps, u.first, lane.s);
        multiply_scores(q.dout, scratch.v_t, steps_of(p.head_dim_v), u.steps, u.first, lane.dp);
        u.keeps_floats = true;
        differentiate(u);
        keys_beyond |= uint64_t(0xffffffff) << u.first;
        const int first = u.steps.first * step_terms, end = first + u.steps.count * step_terms;
        for (int i = first; i < end; ++i)
            for (int j = 0; j < unit_keys; ++j) {
                if (!is_beyond_f16(lane.dp[i * bk + u.first + j])) continue;
                Tile* const right = u.ds + (i - first) / step_terms * unit_tiles + j / tile_rows;
                Tile* const left = scratch.ds_left + i / tile_rows * (bk / step_terms) + u.first / step_terms;
                right->rows[i % step_terms / 2][j % tile_rows * 2 + i % 2] = {};
                left->rows[i % tile_rows][j] = {};
            }
    }

    SPATTN_RARE void add_beyond(const Place& at, uint64_t apart, const Place& keys, const uint64_t* bits, Real* dq) {
        each_pair(all_rows, keys_beyond, at.count, keys.count, bits, [&](int query, int key) {
            const Real ds = lane.dp[query * bk + key];
            if (!is_beyond_f16(ds)) return;
            const bool has_added_q = apart >> query & 1, has_added_k = keys_apart >> key & 1;
            if (!has_added_q) Lane::add_row(args.q, at, query, int(p.head_dim), ds, scratch.dk_t + key, bk);
            if (!has_added_k) Lane::add_row(args.k, keys, key, int(p.head_dim), ds, dq + query * columns);
        });
    }

    template <class Body>
    static void each_pair(uint64_t queries, uint64_t keys, int count_q, int count_k, const uint64_t* bits, Body body) {
        for (int query = 0; query < count_q; ++query)
            for (int key = 0; key < count_k; ++key) {
                const int bit = query * bk + key;
                const bool is_kept = !bits || (bits[bit / 64] >> (bit % 64) & 1);
                if (is_kept && (queries >> query & 1) && (keys >> key & 1)) body(query, key);
            }
    }
};

// ---- phases -------------------------------------------------------------------------------------------------------

struct PanelBackwardCall {
    BackwardCall floats;
    PanelBackwardSpace panels;
    int64_t next_tile;
};

// Two columns of a queue that follow each other take turns, tile by tile of queries. Panels of queries are then read
// once for both, and sums of dQ are loaded and stored once.
template <int bq, int bk>
struct PanelBackwardPair {
    PanelBackwardLane<bq, bk> a, b;
    Ahead ahead;

    PanelBackwardPair(const BackwardArgs& args, const BackwardSpace& space, const PanelBackwardSpace& panels,
                      int64_t index)
        : a(args, space, panels, 2 * index), b(args, space, panels, 2 * index + 1) {
        a.ahead = b.ahead = &ahead;
    }

    void take_queue(int64_t w) {
        const BackwardArgs& args = a.args;
        a.start_queue(w), b.queue = w;
        const Task *t = args.tasks.tasks + args.tasks.begin[w], *end = args.tasks.tasks + args.tasks.begin[w + 1];
        while (t < end && !args.parallel->is_cancelled()) {
            const auto is_whole = [&](const Task* one) { return one < end && one->part == whole_row; };
            const bool are_two = is_whole(t) && is_whole(t + 1) && t[0].head == t[1].head;
            are_two ? run(t[0], t[1]) : run(t[0]);
            t += are_two ? 2 : 1;
        }
    }

    void run(const Task& t) {
        a.open(t);
        a.each_block(t, [&](int64_t head, int64_t g, int32_t row, int32_t mask) { a.visit(head, g, row, mask); });
        a.close(t);
    }
    // Whole columns. Each meets its own tiles in order.
    void run(const Task& t, const Task& u) {
        a.open(t), b.open(u);
        const LayoutView& layout = a.args.layout;
        const int64_t group = a.p.heads_q / a.p.heads_kv;
        for (int64_t g = 0; g < group; ++g) {
            const int64_t head = t.head * group + g;
            const auto tiles = [&](int32_t row) {
                int32_t skip = 0, take = INT32_MAX;
                const Slice slice = slice_of(layout.by_key, layout.kind_of_head[head], row);
                return walk_round(layout.by_key, slice, a.space.round, skip, take);
            };
            Walk x = tiles(t.row), y = tiles(u.row);
            for (bool has_x = x.next(), has_y = y.next(); has_x || has_y;) {
                const bool with_x = has_x && !(has_y && y.block < x.block);
                const bool with_y = has_y && !(has_x && x.block < y.block);
                if (with_x && with_y && !a.repeats(x.block)) {
                    const auto first = a.meet_tile(head, g, x.block, x.mask);
                    const auto second = b.meet_tile(head, g, y.block, y.mask);
                    const Terms terms[] = {first.ds_k, second.ds_k};
                    a.add_dq(terms, 2, first);
                    a.end_tile(first), b.end_tile(second);
                } else {
                    if (with_x) a.visit(head, g, x.block, x.mask);
                    if (with_y) b.visit(head, g, y.block, y.mask);
                }
                if (with_x) has_x = x.next();
                if (with_y) has_y = y.next();
            }
        }
        a.close(t), b.close(u);
    }
};

template <int bq, int bk>
inline void panel_backward_queries(void* argument, int64_t index) {
    PanelBackwardCall& call = *(PanelBackwardCall*)argument;
    PanelBackwardLane<bq, bk> lane(*call.floats.args, call.floats.space, call.panels, 2 * index);
    const BackwardSpace& space = call.floats.space;
    const int64_t tiles = space.tiles(), end = space.heads * tiles;
    for (int64_t i; (i = next_of(call.next_tile, *call.floats.args->parallel)) < end;)
        lane.pack_own(i / tiles, int32_t(space.round.first_row + i % tiles));
}

template <int bq, int bk>
inline void panel_backward_tasks(void* argument, int64_t index) {
    PanelBackwardCall& call = *(PanelBackwardCall*)argument;
    BackwardCall& floats = call.floats;
    PanelBackwardPair<bq, bk> pair(*floats.args, floats.space, call.panels, index);
    begin_products();
    const int64_t end = floats.space.round.end_queue;
    for (int64_t w; (w = next_of(floats.next_queue, *floats.args->parallel)) < end;) pair.take_queue(w);
    end_products();
    end_streams();
}

template <int bq, int bk>
void panel_backward(const BackwardArgs& args) {
    Carver carver{(uintptr_t)args.workspace};
    const int num_lanes = 2 * args.parallel->lanes();
    const PanelBackwardSpace panels =
        carve_panel_backward<bq, bk>(carver, *args.problem, args.layout, args.tasks, num_lanes);
    PanelBackwardCall call{begin_backward<bq, bk>(args, elements_of<Element>, carver, num_lanes), panels, 0};
    call.floats.space.dq_factor = ds_unlift;
    for (int32_t i = 0; i < rounds_of(args.tasks); ++i) {
        begin_round(call.floats, i);
        call.next_tile = 0;
        args.parallel->run(panel_backward_queries<bq, bk>, &call);
        args.parallel->run(panel_backward_tasks<bq, bk>, &call);
        args.parallel->run(backward_results<bq, bk>, &call.floats);
    }
}

template <int bq, int bk>
size_t panel_backward_workspace(const Problem& p, const LayoutView& layout, const TasksView& tasks, int num_lanes) {
    Carver carver{0};
    carve_panel_backward<bq, bk>(carver, p, layout, tasks, 2 * num_lanes);
    return count_backward<bq, bk>(carver, p, layout, tasks, 2 * num_lanes);
}

}  // namespace
}  // namespace spattn::cpu
