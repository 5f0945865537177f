// SPDX-License-Identifier: MIT
// Blocked attention, forward, by products of 16-bit elements: block_forward.h with its two products on panels.
//
//     sT[key][query] = K . qT                  K: left panel, qT: right panel
//     pT             = exp2(scale_log2 sT - m)  in float32, then rounded, two keys side by side: a right panel
//     oT[dim][query] += vT . pT                vT: left panel
//
// K and V are packed once a call, before the tasks, for every query block that meets them. Where one block alone meets
// them, as few queries do, they are packed there, so that panels stay in L1 and L2; so are those of tiles that list their
// keys. Where an arch takes rows, K is not packed if its rows lie side by side, or for one use if they are whole lines.
// Scores, sums and the state are float32; l sums what pT was before it was rounded, and before it was lifted (lift.h),
// as oT is until a task ends.
//
// 32 queries of a block and those of its keys that they see, in steps of 32, are a unit of work. Tile products keep the
// vector units idle and the other way round. So several units are under way: while the scores of one are made, and p v
// of those that wait for it is added, the exponentials of the last are made in between, inlined into the loops of
// products. Panels of the next block are brought into L2 meanwhile.
//
// What binds, on a Xeon with AMX at head_dim 128, 4,096 tokens: four tile products and 8 vectors of exponentials take
// 64 clocks each, and where there are products the clock falls from 3.3 to 2.5 GHz. Were all keys the same block, which
// L2 holds, 0.80 of the time would be left, and 0.53 without exponentials. Beside products fused multiply-adds of 512
// bits begin one a clock, not two, so eleven operations of a vector's exponentials are as long there as tile products.
//
// Tried and dropped (time of dense attention, one thread): p v of each unit at once, 10 % more, as oT comes from L2
// each time; a quarter of the p v that is due beside each unit, for exponentials to be spread evenly, as long; maxima
// of scores without their factor, as long; fewer exponentials beside each step or none, as long.
#pragma once

#include "cpu/generic/ahead.h"
#include "cpu/generic/block_forward.h"
#include "cpu/generic/lift.h"
#include "cpu/generic/panels.h"

namespace spattn::cpu {
namespace {

constexpr int unit_queries = 32, unit_tiles = unit_queries / tile_rows;
// Units of the same queries whose p . v is still to be added: oT is loaded and stored once for all of them.
constexpr int most_waiting_units = 4;
// Tasks of a lane that take turns, and how many bytes of panels a task reads that leave L2 before the next reads them.
constexpr int most_in_turn = 4;
constexpr int64_t far_bytes = 1 << 20;
constexpr int32_t no_block = INT32_MAX;

struct PanelSpace {
    ForwardSpace floats;
    Tile* keys;             // [batch * heads_kv][homes][tiles of K, then of V, of a block]
    const Tile** key_rows;  // [batch * heads_kv][homes]: rows of K that stand for its tiles, or null
    int64_t homes;
    Tile* scratch;
    int64_t lane_tiles;
};

// Whether blocks of keys meet one tile of queries.
inline bool keys_meet_once(const Problem& p, int bq) { return p.seq_q <= bq && p.group() == 1; }

template <int bq, int bk>
struct PanelScratch {
    Tile *q, *k, *v;           // [steps][bq / 16], [bk / 16][steps], [tiles of head_dim_v][bk / 32]
    Tile* p;                   // [bq / 32][most_waiting_units + 1][bk / 32][2]
    Element* rows;             // [bq or bk][staged columns]
    Real* s;                   // [2][bk][32]

    static constexpr int p_tiles = bk / step_terms * unit_tiles;  // of a unit
    static int64_t k_tiles(const Problem& p) { return int64_t(bk / tile_rows) * steps_of(p.head_dim); }
    static int64_t v_tiles(const Problem& p) { return int64_t(bk / step_terms) * tiles_of(p.head_dim_v); }
    static int64_t key_tiles(const Problem& p) { return k_tiles(p) + v_tiles(p); }

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
    space.floats = carve_forward<bq, bk>(carver, p, tasks, most_in_turn * num_lanes, true);
    space.homes = layout.by_query.rows == 1 && keys_meet_once(p, bq) ? 0 : layout.by_key.rows - layout.keys.listed;
    const int64_t blocks = p.batch * p.heads_kv * space.homes;
    space.keys = carver.take<Tile>(blocks * PanelScratch<bq, bk>::key_tiles(p));
    space.key_rows = carver.take<const Tile*>(blocks);
    space.lane_tiles = int64_t((lane.used + sizeof(Tile) - 1) / sizeof(Tile));
    space.scratch = carver.take<Tile>(space.lane_tiles * most_in_turn * num_lanes);
    return space;
}

template <int bq, int bk>
struct PanelForwardLane : ForwardLane<bq, bk> {
    using Lane = ForwardLane<bq, bk>;
    using Scratch = PanelScratch<bq, bk>;
    using Lane::args, Lane::p, Lane::elements, Lane::state, Lane::cap, Lane::met_mask, Lane::is_anew;
    static constexpr int width = unit_queries / lanes;

    // Less than 64 bytes: GCC copies as many by one vector, which loads that follow wait for if it crosses a line of
    // the cache. Dense attention took 6 % longer.
    struct Whole {
        constexpr operator int() const { return step_terms; }
    };
    struct Unit {
        Span steps;             // of 32 keys
        int first;              // query
        const uint64_t* bits;
        const Tile* v;          // of the block
        Real* s;                // [bk][32]
        Tile* p = nullptr;      // [bk / 32][2], once its scores are made
        int half() const { return first / unit_queries; }
    };
    // Tiles of K: a panel, or rows of the tensor, sixteen of which lie where a tile would.
    struct KeyTiles {
        const Tile* first;
        int64_t below, row_bytes, step_bytes;  // below: tiles, from a row of them to the next
    };
    // A unit's sT becomes pT: a share of the pairs of keys each call, and at the end what is left. Inlined into loops
    // of products, all that changes lies in registers.
    template <bool masked>
    struct Exponentials {
        Vec scale, minus_m[width], even[width], odd[width];  // sums over even keys and over odd ones
        Real* s;                // of the first key
        Element* p;             // panels [bk / 32][2]
        const uint64_t* bits;   // of the first key and query
        int bit;                // of the first key
        int pair = 0, end;      // of keys
        int share;              // pairs a call
        bool keeps_floats;      // p is left in s, too
        Ahead ahead;

        SPATTN_INLINE Exponentials(const Unit& u, Vec factor, const Real* m, bool keeps, int calls,
                                   const Ahead& next)
            : scale(factor), s(u.s + u.steps.first * step_terms * unit_queries), p(u.p->rows[0]), bits(u.bits),
              bit(u.steps.first * step_terms * bq + u.first), end(u.steps.count * step_terms / 2),
              share(calls > 0 ? (end + calls - 1) / calls : 0), keeps_floats(keeps), ahead(next) {
#pragma GCC unroll 8
            for (int w = 0; w < width; ++w) {
                minus_m[w] = set1(0.f) - load(m + u.first + w * lanes);
                even[w] = odd[w] = set1(0.f);
            }
        }
        SPATTN_INLINE void operator()() {
            for (int i = share; i > 0 && pair < end; --i) next();
            ahead();
        }
        SPATTN_INLINE void finish(Real* l) {
            while (pair < end) next();
#pragma GCC unroll 8
            for (int w = 0; w < width; ++w) store(l + w * lanes, load(l + w * lanes) + (even[w] + odd[w]));
        }

        SPATTN_INLINE void next() {
            const unsigned row = unsigned(pair) + unsigned(pair) / tile_rows * tile_rows;  // two tiles a step
            next_of_vector<0>(s + pair * 2 * unit_queries, p + row * step_terms);
            ++pair;
        }
        // Vector after vector by recursion: a loop's arrays would lie in memory.
        template <int w>
        SPATTN_INLINE void next_of_vector(Real* x, Element* row) {
            Vec a = exp2(fma(load(x), scale, minus_m[w])), b = exp2(fma(load(x + unit_queries), scale, minus_m[w]));
            if constexpr (masked) {
                const int at = bit + pair * 2 * bq + w * lanes;
                a = select(bits_at(bits, at), a, set1(0.f));
                b = select(bits_at(bits, at + bq), b, set1(0.f));
            }
            even[w] = even[w] + a, odd[w] = odd[w] + b;
            a = lifted(a, forward_lift), b = lifted(b, forward_lift);
            store_pairs(row, a, b);
            if (masked && keeps_floats) store(x, a), store(x + unit_queries, b);
            constexpr int tile = sizeof(Tile) / sizeof(Element);
            if constexpr (w + 1 < width) next_of_vector<w + 1>(x + lanes, row + tile);
        }
    };
    // Units of 32 queries that are done but for p . v.
    struct Waiting {
        Terms terms[most_waiting_units];
        int count, turn;        // turn: which of one more panels of p the next unit has
        bool has_sums;          // oT of these queries holds some; before the first p . v, what lies there is not read
    };
    const PanelSpace& panels;
    Scratch scratch;
    Task task;
    Place queries;             // of the task
    Walk left;                 // blocks that the task has still to meet
    const Real factor;         // from products to scores in units of log2, where no cap lies between
    Unit unit;                 // whose scores are made and whose exponentials are not
    bool has_unit = false;
    Waiting waiting[bq / unit_queries] = {};
    int turn = 0;              // which of two scores the next unit has
    Ahead ahead;               // of the next block, and later of the next task
    int turns = 1, place_in_turn = 0;  // tasks that meet the same blocks take turns, and fetch a share each

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
        const TileView tile = tile_at(layout.keys, bk, p.seq_k, block);
        uint64_t alive = 0;
        for (int64_t g = 0; g < group; ++g)
            alive |= alive_of(layout.live_keys, layout.by_key.rows, layout.kind_of_head[plane * group + g], block, tile);
        return {tile, plane / p.heads_kv, plane % p.heads_kv, alive, 0};
    }

    Tile* home_k(int64_t plane, int64_t home) const {
        return panels.keys + (plane * panels.homes + home) * Scratch::key_tiles(p);
    }
    Tile* home_v(int64_t plane, int64_t home) const { return home_k(plane, home) + Scratch::k_tiles(p); }
    const Tile*& key_rows(int64_t plane, int64_t home) const { return panels.key_rows[plane * panels.homes + home]; }

    void pack_k(const Place& at, Tile* out) {
        pack_left(stage(args.k, at, int(p.head_dim), bk, scratch.rows), bk, int(p.head_dim), out);
    }
    void pack_v(const Place& at, Tile* out) {
        pack_terms_left(stage(args.v, at, int(p.head_dim_v), bk, scratch.rows), bk, int(p.head_dim_v), out);
    }

    KeyTiles panel_of(const Tile* first) const {
        return {first, steps_of(p.head_dim), tile_row_bytes, int64_t(sizeof(Tile))};
    }
    static KeyTiles rows_of_keys(const void* first, int64_t row_bytes) {
        return {(const Tile*)first, tile_rows * row_bytes / int64_t(sizeof(Tile)), row_bytes, tile_row_bytes};
    }
    KeyTiles tiles_of_home(int64_t plane, int64_t home) const {
        const Tile* const rows = key_rows(plane, home);
        return rows ? rows_of_keys(rows, p.head_dim * int64_t(sizeof(Element))) : panel_of(home_k(plane, home));
    }
    // For one use rows are not worth packing, though they lie apart.
    KeyTiles tiles_met_once(const Place& at) {
        const int64_t row_bytes = args.k.row * at.stride * int64_t(sizeof(Element));
        if (takes_rows && are_steps(args.k, at, int(p.head_dim), bk) && row_bytes > 0) {
            const Element* const rows = address<Element>(args.k, at);
            if ((uintptr_t(rows) | uintptr_t(row_bytes)) % line_bytes == 0) return rows_of_keys(rows, row_bytes);
        }
        pack_k(at, scratch.k);
        return panel_of(scratch.k);
    }

    void pack_home(int64_t index) {
        const int64_t plane = index / panels.homes, home = index % panels.homes;
        const Place at = shared_keys(plane, int32_t(args.layout.keys.listed + home));
        if (at.alive == 0 || at.count == 0) return;
        const Element* rows = takes_rows && all_of(at) ? adjacent_rows(args.k, at, p.head_dim, bk) : nullptr;
        if (uintptr_t(rows) % line_bytes != 0) rows = nullptr;
        key_rows(plane, home) = (const Tile*)rows;
        if (!rows) pack_k(at, home_k(plane, home));
        pack_v(at, home_v(plane, home));
    }

    // ---- tasks ----

    // after: the task that this lane opens next, as far as it is known.
    void open(const Task& t, const Task* after) {
        task = t;
        const Ahead q = after ? rows_of(args.q, Lane::queries(after->head, after->row), p.head_dim) : Ahead{};
        ahead.later = q.at, ahead.later_end = q.end;
        queries = Lane::queries(t.head, t.row);
        if (t.take > 0)
            pack_right(stage(args.q, queries, int(p.head_dim), bq, scratch.rows), bq, int(p.head_dim), scratch.q);
        is_anew = false;
        begin();
    }

    int32_t next_block() const {
        Walk next = left;
        return next.next() ? next.block : no_block;
    }
    // Meets it; false where none is left.
    bool advance() {
        if (!left.next()) return false;
        visit(Lane::keys(queries, args.layout.kind_of_head[task.head], left.block), left.block, left.mask);
        return true;
    }

    void close() {
        end();
        if (met_mask && !all_finite(state.out, p.head_dim_v * bq) && Lane::may_be_spoilt()) {
            is_anew = true;
            begin();
            while (advance()) {}
            end();
        }
        if constexpr (is_f16) unlift();
        task.part == whole_row ? finish(queries) : Lane::keep(task.part);
    }

    // out = oT / l, rounded before it is transposed: pairs of dims are words then, half as many as numbers.
    void finish(const Place& at) {
        const bool is_whole = args.piece.is_first && args.piece.is_last && at.count > 0;
        if (!is_whole || args.out.column != 1) return Lane::finish(at);
        const uint64_t owned = at.owned & all_rows >> (64 - at.count);
        const double sink = sink_of(args.sink_logits, at.head);
        Real factors[bq] = {};
        each_bit(owned, [&](int i) {
            const typename Lane::RowState row{state.m[i], state.l[i], state.top[i]};
            const RowEnd end = end_row(row.m, row.l, sink);
            factors[i] = end.factor;
            Lane::finish_row(at, i, row, end);
        });
        for (int first = 0; first < bq; first += tile_rows)
            for (int64_t d = 0; d < p.head_dim_v; d += step_terms)
                p.head_dim_v - d < step_terms
                    ? store_result(at, owned, first, d, int(p.head_dim_v - d), load(factors + first))
                    : store_result(at, owned, first, d, Whole(), load(factors + first));
    }
    // columns: a number, or a whole tile of them, which the compiler knows.
    template <class Columns>
    void store_result(const Place& at, uint64_t owned, int first, int64_t d, Columns columns, Vec factor) {
        Tile tile;
        for (int pair = 0; pair < (columns + 1) / 2; ++pair) {
            const Real* x = state.out + (d + 2 * pair) * bq + first;
            store_pairs_to_even(tile.rows[pair], load(x) * factor, load(x + bq) * factor);
        }
        transpose_tile(tile);
        for (int i = 0; i < tile_rows; ++i)
            if (owned >> (first + i) & 1)
                copy_elements(tile.rows[i], columns, address<Element>(args.out, at, first + i) + d);
    }

    void unlift() {
        for (int64_t i = 0; i < p.head_dim_v * bq; i += lanes)
            store(state.out + i, load(state.out + i) * set1(forward_unlift));
    }

    void begin() {
        const ListsView& lists = args.layout.by_query;
        left = walk(lists, slice_of(lists, args.layout.kind_of_head[task.head], task.row), task.skip, task.take);
        Lane::start_rows();
        for (Waiting& w : waiting) w.has_sums = false;
    }

    // Queries that saw no block have sums of zero.
    void end() {
        drain();
        for (int half = 0; half < bq / unit_queries; ++half)
            for (int64_t d = 0; !waiting[half].has_sums && d < p.head_dim_v; ++d)
                for (int i = 0; i < unit_queries; i += lanes)
                    store(state.out + d * bq + half * unit_queries + i, set1(0.f));
    }

    void visit(const Place& at, int32_t block, int32_t mask) {
        const uint64_t* bits = mask_bits(args.layout, mask);
        met_mask |= bits != nullptr;
        const uint64_t apart = is_anew && bits ? rows_not_finite(elements, args.v, at, int(p.head_dim_v)) : 0;
        const int32_t home = block - args.layout.keys.listed;
        const bool is_home = home >= 0 && panels.homes > 0 && !(is_anew && bits);
        const int64_t plane = at.batch * p.heads_kv + at.head;
        if (!is_home) pack_v(without(at, apart), scratch.v);
        if (panels.homes == 0) fetch_next();
        const Ahead next = after_block(plane);
        ahead.at = next.at, ahead.end = next.end;
        const KeyTiles k = is_home ? tiles_of_home(plane, home) : tiles_met_once(at);
        const Tile* const v = is_home ? home_v(plane, home) : scratch.v;
        for (int first = 0; first < bq; first += unit_queries) {
            const Span steps = bits ? steps_kept<bq>(bits, bk, first) : Span{0, bk / step_terms};
            if (steps.count == 0) continue;
            meet({steps, first, bits, v, scratch.s + turn * bk * unit_queries}, k);
            if (is_anew) drain();
            if (apart != 0) add_apart(at, apart, bits, unit);
        }
        if (!is_home) drain();
    }

    // Rows of the next block, which none has packed.
    void fetch_next() const {
        const int32_t next = next_block();
        if (next == no_block) return;
        const Place at = Lane::keys(queries, args.layout.kind_of_head[task.head], next);
        each_bit(at.alive, [&](int i) {
            fetch_row(address<Element>(args.k, at, i), p.head_dim);
            fetch_row(address<Element>(args.v, at, i), p.head_dim_v);
        });
    }
    static void fetch_row(const Element* row, int64_t columns) {
        for (int64_t c = 0; c < columns; c += step_terms) prefetch_far(row + c);
    }

    // Panels of the block after this one, or this lane's share of them; after the last, rows of out.
    Ahead after_block(int64_t plane) const {
        const int32_t next = next_block();
        if (next == no_block) return rows_of(args.out, queries, p.head_dim_v);
        const int64_t home = next - args.layout.keys.listed;
        if (home < 0 || panels.homes == 0) return {};
        const Tile* const begin = key_rows(plane, home) ? home_v(plane, home) : home_k(plane, home);
        const Tile* const end = home_v(plane, home) + Scratch::v_tiles(p);
        const int64_t bytes = (end - begin) * int64_t(sizeof(Tile)) / turns;
        const char* first = (const char*)begin + place_in_turn * bytes;
        return {first, first + bytes};
    }

    // Rows of a tile, where they lie side by side, else null.
    static const Element* adjacent_rows(const TensorView& x, const Place& at, int64_t columns, int rows) {
        const bool are_adjacent = !at.tokens && x.column == 1 && x.row * at.stride == columns;
        return are_adjacent && at.count == rows && columns % step_terms == 0 ? address<Element>(x, at) : nullptr;
    }
    static Ahead rows_of(const TensorView& x, const Place& at, int64_t columns) {
        const char* const first = (const char*)adjacent_rows(x, at, columns, bq);
        return first ? Ahead{first, first + bq * columns * int64_t(sizeof(Element))} : Ahead{};
    }

    // ---- a unit ----

    // Scores of a unit, and p . v of queries for which enough units wait, both beside the exponentials of the last.
    void meet(const Unit& next, const KeyTiles& k) {
        const int steps = steps_of(p.head_dim);
        const Tile* const first_k = k.first + next.steps.first * unit_tiles * k.below;
        const Terms terms{first_k, scratch.q + next.first / tile_rows, steps};
        Real* s = next.s + next.steps.first * step_terms * unit_queries;
        const TileProduct product{&terms,       1,     k.below,     bq / tile_rows, s,
                                  unit_queries, false, k.row_bytes, k.step_bytes};
        const int calls = next.steps.count * steps + calls_of_waiting(most_waiting_units);
        exponentiate(calls, [&](auto& meanwhile) SPATTN_INLINE {
            multiply_panels<Store::set>(product, 0, next.steps.count * unit_tiles, unit_tiles, meanwhile);
            add_waiting(most_waiting_units, meanwhile);
        });
        unit = next, has_unit = true, turn ^= 1;
        begin_unit();
    }

    // Moves the maxima, so that exponentials may be made.
    void begin_unit() {
        Vec top[width];
        if (p.softcap != 0) cap_unit();
        unit.bits ? find_top<true>(top) : find_top<false>(top);
        Waiting& same = waiting[unit.half()];
        if (Lane::template meet_top<width>(unit.first, top)) {
            Nothing none;
            add(same, unit.first, none);
            Lane::template rescale<width>(unit.first, top, same.has_sums);
        }
        unit.p = scratch.p + (unit.half() * (most_waiting_units + 1) + same.turn) * Scratch::p_tiles;
        same.turn = (same.turn + 1) % (most_waiting_units + 1);
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

    // Makes the exponentials of the last unit, sT becomes pT, beside products that call meanwhile so often. Its p . v
    // waits for more.
    template <class Products>
    void exponentiate(int calls, const Products& products) {
        if (!has_unit) {
            Nothing none;
            products(none);
        } else {
            unit.bits ? exponentiate<true>(calls, products) : exponentiate<false>(calls, products);
            has_unit = false;
            Waiting& same = waiting[unit.half()];
            same.terms[same.count++] = {unit.v + unit.steps.first, unit.p, unit.steps.count};
        }
    }
    template <bool masked, class Products>
    void exponentiate(int calls, const Products& products) {
        Exponentials<masked> e(unit, score_factor(), state.m, is_anew, calls, ahead);
        products(e);
        ahead = e.ahead;
        e.finish(state.l + unit.first);
    }

    // oT += vT pT
    template <class Meanwhile>
    SPATTN_INLINE void add(Waiting& w, int first, Meanwhile& meanwhile) {
        if (w.count == 0) return;
        const TileProduct product{w.terms, w.count, bk / step_terms, unit_tiles, state.out + first, bq, !w.has_sums};
        multiply_panels<Store::add>(product, 0, tiles_of(p.head_dim_v), unit_tiles, meanwhile);
        w.count = 0, w.has_sums = true;
    }

    // For queries that so many units wait for, or more.
    template <class Meanwhile>
    SPATTN_INLINE void add_waiting(int fewest, Meanwhile& meanwhile) {
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
        exponentiate(calls_of_waiting(1), [&](auto& meanwhile) SPATTN_INLINE { add_waiting(1, meanwhile); });
        Nothing none;
        add_waiting(1, none);
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
    PanelForwardLane<bq, bk> lane(*call.args, call.space, most_in_turn * index);
    const int64_t end = call.args->problem->batch * call.args->problem->heads_kv * call.space.homes;
    for (int64_t i; (i = next_of(call.next_home, *call.args->parallel)) < end;) lane.pack_home(i);
}

// Some tasks of a head take turns: each meets the next of all their blocks if it has it. So panels that come from L3
// are read once for all of them.
template <int bq, int bk>
struct PanelForwardTurns {
    PanelForwardLane<bq, bk> lanes[most_in_turn];

    PanelForwardTurns(const ForwardArgs& args, const PanelSpace& space, int64_t index)
        : lanes{{args, space, most_in_turn * index},
                {args, space, most_in_turn * index + 1},
                {args, space, most_in_turn * index + 2},
                {args, space, most_in_turn * index + 3}} {}

    // A lane takes as many tasks further on what it opens next.
    void run(const Task* tasks, int count, const Task* end) {
        for (int i = 0; i < count; ++i) {
            lanes[i].turns = count, lanes[i].place_in_turn = i;
            lanes[i].open(tasks[i], tasks + i + count < end ? tasks + i + count : nullptr);
        }
        for (int32_t block; (block = next_block(count)) != no_block;)
            for (int i = 0; i < count; ++i)
                if (lanes[i].next_block() == block) lanes[i].advance();
        for (int i = 0; i < count; ++i) lanes[i].close();
    }

private:
    int32_t next_block(int count) const {
        int32_t next = no_block;
        for (int i = 0; i < count; ++i)
            if (lanes[i].next_block() < next) next = lanes[i].next_block();
        return next;
    }
};

// Whether it is worth it: for tasks that meet the same blocks, and for those of a head whose panels leave L2 before the
// next of them would read them again.
template <int bq, int bk>
inline bool take_turns(const ForwardArgs& args, const Task& t, const Task& u) {
    if (t.head != u.head) return false;
    const int64_t bytes = PanelScratch<bq, bk>::key_tiles(*args.problem) * int64_t(sizeof(Tile));
    if (t.take * bytes >= far_bytes && u.take * bytes >= far_bytes) return true;
    if (t.skip != u.skip || t.take != u.take) return false;
    const ListsView& lists = args.layout.by_query;
    const int32_t head_kind = args.layout.kind_of_head[t.head];
    const Slice a = slice_of(lists, head_kind, t.row), b = slice_of(lists, head_kind, u.row);
    return a.begin == b.begin && a.end == b.end;
}

// Queues are taken some at a time, for neighbours meet the same keys, and tasks in turns where that is worth it. The
// last are taken alone: lanes should end together.
template <int bq, int bk>
inline void panel_forward_tasks(void* argument, int64_t index) {
    PanelForwardCall& call = *(PanelForwardCall*)argument;
    const ForwardArgs& args = *call.args;
    const TasksView& tasks = args.tasks;
    const int64_t last = tasks.queues - 4 * args.parallel->lanes();
    PanelForwardTurns<bq, bk> turns(args, call.space, index);
    begin_products();
    for (;;) {
        const int64_t count = __atomic_load_n(&call.next_queue, __ATOMIC_RELAXED) < last ? most_in_turn : 1;
        const int64_t w = next_of(call.next_queue, *args.parallel, count);
        if (w >= tasks.queues) break;
        const Task* t = tasks.tasks + tasks.begin[w];
        const Task* const end = tasks.tasks + tasks.begin[w + count < tasks.queues ? w + count : tasks.queues];
        while (t < end) {
            int in_turn = 1;
            while (in_turn < most_in_turn && t + in_turn < end && take_turns<bq, bk>(args, *t, t[in_turn])) ++in_turn;
            turns.run(t, in_turn, end);
            t += in_turn;
        }
    }
    end_products();
    end_streams();
}

template <int bq, int bk>
inline void panel_forward_joins(void* argument, int64_t index) {
    PanelForwardCall& call = *(PanelForwardCall*)argument;
    PanelForwardLane<bq, bk> lane(*call.args, call.space, most_in_turn * index);
    for (int64_t j; (j = next_of(call.next_join, *call.args->parallel)) < call.args->tasks.num_joins;)
        lane.join(call.args->tasks.joins[j]);
    end_streams();
}

template <int bq, int bk>
void panel_forward(const ForwardArgs& args) {
    Carver carver{(uintptr_t)args.workspace};
    PanelForwardCall call{
        &args, carve_panels<bq, bk>(carver, *args.problem, args.layout, args.tasks, args.parallel->lanes()), 0, 0, 0};
    if (call.space.homes > 0) args.parallel->run(panel_forward_homes<bq, bk>, &call);
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
