// SPDX-License-Identifier: MIT
// Blocked attention, backward, column after column of key blocks, with keys (then dims) in vector lanes.
//
//     s[query][key]   = Q . kT            p  = exp2(scale_log2 s - lse log2(e))
//     dp[query][key]  = dO . vT           ds = p (dp - delta),  delta = rowsum(dO . O) - dlse
//     dV[key][dim]   += pT . dO           dK[key][dim]   += dsT . Q          a lane's scratch, for one column
//     dQ[query][dim] += ds . K                                               the queue's own buffer
//
// kT, vT and K are packed into panels once a column; Q and dO are read where they lie, unless listed, and those of the
// block after are fetched meanwhile. Scale enters dQ and dK once, at the end.
//
// There are three phases. The first makes delta and -lse of each query, and finds the dQ tiles that each queue of tasks
// reaches. The second runs the queues: each collects dQ in buffers of its own, for several queues of a head add to the
// same dQ, and sums by atomics would depend on timing. The third adds these buffers up, tile by tile and always in the
// sequence of the queues, and joins the parts of columns that were cut.
//
// The last two are repeated where the schedule has rounds (backward_space.h), each of which completes dQ of its queries.
//
// A queue has buffers only for the tiles that it reaches: with a window, all queues together have hardly more than dQ.
// A layout may list a query in a second tile (hot queries in a tile of their own). delta, lse and dQ of a query lie in
// its own tile alone, the one that owns it, and a second tile reads and adds its rows there one by one.
//
// What binds: FMA, 10 * head_dim flops a pair against one exp2.
#pragma once

#include <math.h>

#include "cpu/generic/backward_space.h"
#include "cpu/generic/beside.h"
#include "cpu/generic/held.h"
#include "cpu/generic/not_finite.h"
#include "cpu/generic/sink.h"
#include "cpu/generic/softcap.h"

namespace spattn::cpu {
namespace {

template <int bq, int bk>
struct BackwardLane {
    static constexpr int panel = least(bk, panel_lanes);  // lanes of a row of a panel of kT and vT

    const BackwardArgs& args;
    const Problem& p;
    const Elements& elements;
    const BackwardSpace& space;
    BackwardScratch lane;
    const SoftcapFactors cap;  // read where the problem has one
    const Real scale_log2;
    const int columns, columns_v;  // of rows in scratch and in dQ buffers
    int64_t queue = 0;
    Held held_q, held_dout;
    uint64_t keys_apart = 0;  // of the column at hand: keys that are not finite

    BackwardLane(const BackwardArgs& a, const Elements& e, const BackwardSpace& s, int64_t index)
        : BackwardLane(a, e, s, index, round_up(a.problem->head_dim, lanes)) {}

    BackwardLane(const BackwardArgs& a, const Elements& e, const BackwardSpace& s, int64_t index, int columns)
        : args(a),
          p(*a.problem),
          elements(e),
          space(s),
          cap(softcap_factors(p)),
          scale_log2(p.softcap != 0 ? cap.out : Real(p.scale * log2_e)),
          columns(columns),
          columns_v(round_up(p.head_dim_v, lanes)) {
        Carver carver{(uintptr_t)(s.scratch + index * s.lane_floats)};
        lane = carve_backward_lane<bq, bk>(carver, p);
        held_q.place(lane.q, lane.q + int64_t(bq) * columns);
        held_dout.place(lane.dout, lane.dout + int64_t(bq) * columns_v);
    }

    Place queries(int64_t head, int32_t row) const {  // head counts over the batch
        const LayoutView& layout = args.layout;
        const TileView tile = tile_at(layout.queries, bq, p.seq_q, row);
        const uint64_t alive = alive_of(layout.live_queries, layout.by_query.rows, layout.kind_of_head[head], row, tile);
        return {tile, head / p.heads_q, head % p.heads_q, alive, all_rows};
    }

    Place own(int64_t head, int32_t tile) const {
        const AxisView& axis = args.layout.queries;
        Place at = queries(head, repeating(axis) + tile);
        at.owned = owned_of(axis, at, repeating(axis) + tile);
        return at;
    }

    // A key that any head of the group sees may be read: bits keep it from the heads that do not.
    Place keys(int32_t head, int32_t row) const {
        const LayoutView& layout = args.layout;
        const int64_t group = p.heads_q / p.heads_kv;
        const TileView tile = tile_at(layout.keys, bk, p.seq_k, row);
        uint64_t alive = 0;
        for (int64_t g = 0; g < group; ++g)
            alive |= alive_of(layout.live_keys, layout.by_key.rows, layout.kind_of_head[head * group + g], row, tile);
        return {tile, head / p.heads_kv, head % p.heads_kv, alive, owned_of(layout.keys, tile, row)};
    }

    void start_queue(int64_t w) {
        queue = w;
        const int64_t blocks = space.queues[w].tiles * (p.heads_q / p.heads_kv);
        __builtin_memset(space.touched + space.queues[w].block, 0, size_t(blocks));
    }

    void take_queue(int64_t w) {
        start_queue(w);
        for (int32_t t = args.tasks.begin[w]; t < args.tasks.begin[w + 1] && !args.parallel->is_cancelled(); ++t)
            column(args.tasks.tasks[t]);
    }

    void column(const Task& t) {
        const Place at = keys(t.head, t.row);
        if (t.take > 0) pack_column(at);
        zero(lane.dk, int64_t(bk) * columns);
        zero(lane.dv, int64_t(bk) * columns_v);
        Block last{};
        bool is_waiting = false;
        each_block(t, [&](int64_t head, int64_t g, int32_t row, int32_t mask) {
            const Block next{queries(head, row), head, g, row, mask};
            if (is_waiting) visit(last, next.at, at);
            last = next, is_waiting = true;
        });
        if (is_waiting) visit(last, {}, at);
        t.part == whole_row ? finish(at, t.head, t.row) : keep(t.part);
    }

    // dk and dv are where rows are staged until sums begin.
    void pack_column(const Place& at) {
        pack_panels<bk>(elements, args.k, at, int(p.head_dim), 1.f, lane.k_t, lane.dk);
        pack_panels<bk>(elements, args.v, at, int(p.head_dim_v), 1.f, lane.v_t, lane.dv);
        keys_apart = 0;
        if (!all_finite(lane.k_t, p.head_dim * bk))
            keys_apart = rows_not_finite(elements, args.k, at, int(p.head_dim));
        const Rows k = load_padded(elements, args.k, without(at, keys_apart), int(p.head_dim), lane.dk);
        for (int first = 0; first < columns; first += panel_lanes)
            for (int i = 0; i < at.count; ++i)
                for (int c = 0, width = panel_width(first); c < width; c += lanes)
                    store(lane.k + first * bk + i * width + c, load(k.x + i * k.ld + first + c));
    }

    // How many columns the panel of K has that starts at `first`.
    int panel_width(int first) const { return least(panel_lanes, columns - first); }

    // The column's blocks: those of the group's first head, then those of the next.
    template <class Visit>
    void each_block(const Task& t, Visit visit) {
        const int64_t group = p.heads_q / p.heads_kv;
        int32_t skip = t.skip, take = t.take;
        for (int64_t g = 0; g < group && take > 0; ++g) {
            const int64_t head = t.head * group + g;
            const ListsView& lists = args.layout.by_key;
            Walk w = walk_round(lists, slice_of(lists, args.layout.kind_of_head[head], t.row), space.round, skip, take);
            while (w.next()) visit(head, g, w.block, w.mask);
        }
    }

    struct Block {
        Place at;
        int64_t head, g;
        int32_t row, mask;
    };

    // next: queries of the block after, none where this is the last.
    void visit(const Block& block, const Place& next, const Place& keys) {
        const auto [at, head, g, row, mask] = block;
        const uint64_t* bits = mask_bits(args.layout, mask);
        bool is_first = true;
        Real* dq = repeats(row) ? lane.dq : touch(dq_block(queue, g, own_tile(row)), is_first);
        Visit v{{}, {}, statistics(head, row, at), bits, dq, keys.count, is_first};
        load_queries(v, at, row);
        const uint64_t apart = bits ? queries_apart(head, row, at) : 0;
        const bool is_apart = (apart | keys_apart) != 0;
        // One call, so that products stay inlined with their strides: two steps where rows are left out of gradients.
        for (Step step = is_apart ? Step::scores : Step::both;; step = Step::gradients) {
            if (step == Step::gradients) load_queries(v, without(at, apart), row);
            attend_all(v, at.count, step, next);
            if (step != Step::scores) break;
        }
        if (is_apart) add_apart(v, at, apart, keys);
        if (repeats(row)) scatter_dq(g, at);
    }

    struct RowStatistics {
        const Real *minus_lse, *delta;
    };
    struct Visit {
        Rows q, dout;
        RowStatistics rows;
        const uint64_t* bits;
        Real* dq;
        int keys;
        bool is_first;  // nothing was collected in dq so far
    };
    enum class Step { both, scores, gradients };

    void load_queries(Visit& v, const Place& at, int32_t row) {
        v.q = held_q.rows(elements, args.q, at, row, int(p.head_dim), load_padded);
        v.dout = held_dout.rows(elements, args.dout, at, row, int(p.head_dim_v), load_padded);
    }

    // What is fetched while scores, while dp and while dv are made.
    struct Fetches {
        Fetch dq, q, dout;
    };

    void attend_all(Visit& v, int queries, Step step, const Place& next) {
        constexpr int panels = bk / panel;
        const TensorView dq{v.dq, 0, 0, columns, 1};
        const Place rows{{0, 1, v.is_first ? 0 : queries, nullptr}, 0, 0, all_rows, 0};
        const int head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v), tiles = panels * queries / tile_m;
        Fetches fetches{{elements_of<Real>, dq, rows, columns, tiles},
                        {elements, args.q, next, head_dim, tiles},
                        {elements, args.dout, next, head_dim_v, v.keys / tile_m * columns_v / panel_lanes}};
        if (!v.bits || bk == strip_lanes) return attend<bk / lanes>(v, {0, queries}, 0, step, v.is_first, fetches);
        if (v.is_first) zero(v.dq, int64_t(bq) * columns);
        v.is_first = false;
        for (int first = 0; first < v.keys; first += strip_lanes) {
            const Span kept = rows_kept<bk>(v.bits, queries, first);
            if (kept.count > 0) attend<strip_lanes / lanes>(v, kept, first, step, false, fetches);
        }
    }

    // Where lane `first`, at most a panel of lanes from there on, lies in kT or vT.
    static const Real* panel_at(const Real* x, int first, int64_t terms) {
        return x + first / panel * panel * terms + first % panel;
    }

    // Some queries of a block meet n vectors of keys, from lane `first` on.
    template <int n>
    void attend(const Visit& v, Span queries, int first, Step step, bool is_first, Fetches& fetches) {
        const int at = queries.first, count = queries.count, keys = least(n * lanes, v.keys - first);
        const Real *q = v.q.x + at * v.q.ld, *dout = v.dout.x + at * v.dout.ld;
        Real *s = lane.s + at * bk + first, *dp = lane.dp + at * bk + first;
        if (step != Step::gradients) {
            // s = q kT, dp = dout vT
            const int head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v);
            constexpr int width = least(n * lanes, panel);
            for (int i = 0; i < n * lanes; i += width)
                multiply<Left::rows, Store::set>(
                    {q, v.q.ld, panel_at(lane.k_t, first + i, head_dim), panel, s + i, bk, head_dim}, count,
                    width / lanes, fetches.dq);
            for (int i = 0; i < n * lanes; i += width)
                multiply<Left::rows, Store::set>(
                    {dout, v.dout.ld, panel_at(lane.v_t, first + i, head_dim_v), panel, dp + i, bk, head_dim_v}, count,
                    width / lanes, fetches.q);
            differentiate<n>(v, queries, first);
        }
        if (step != Step::scores) {
            // out = p v: dv += pT dout
            Real *dk = lane.dk + first * columns, *dv = lane.dv + first * columns_v;
            multiply<Left::transposed, Store::add>({s, bk, dout, v.dout.ld, dv, columns_v, count}, keys,
                                                   columns_v / lanes, fetches.dout);
            // s = q kT: dk += dsT q, dq += ds k
            multiply<Left::transposed, Store::add>({dp, bk, q, v.q.ld, dk, columns, count}, keys, columns / lanes);
            for (int c = 0; c < columns; c += panel_lanes) {
                const int width = panel_width(c);
                const Product dq{dp, bk, lane.k + c * bk + first * width, width, v.dq + at * columns + c, columns,
                                 keys};
                is_first ? multiply<Left::rows, Store::set>(dq, count, width / lanes)
                         : multiply<Left::rows, Store::add>(dq, count, width / lanes);
            }
        }
    }

    // ---- rows that are not finite: products of gradients leave them out, pairs that are kept receive them ----

    SPATTN_RARE void add_apart(const Visit& v, const Place& at, uint64_t apart, const Place& keys) {
        each_bit(apart, [&](int query) { add_query(v, at, query); });
        each_bit(keys_apart, [&](int key) { add_key(v, keys, key, at.count); });
    }

    static bool is_kept(const Visit& v, int query, int key) {
        const int bit = query * bk + key;
        return !v.bits || (v.bits[bit / 64] >> (bit % 64) & 1);
    }

    void add_query(const Visit& v, const Place& at, int query) {
        for (int key = 0; key < v.keys; ++key) {
            if (!is_kept(v, query, key)) continue;
            const int pair = query * bk + key;
            add_row(args.dout, at, query, int(p.head_dim_v), lane.s[pair], lane.dv + key * columns_v);
            add_row(args.q, at, query, int(p.head_dim), lane.dp[pair], lane.dk + key * columns);
        }
    }

    void add_key(const Visit& v, const Place& at, int key, int queries) {
        for (int query = 0; query < queries; ++query)
            if (is_kept(v, query, key))
                add_row(args.k, at, key, int(p.head_dim), lane.dp[query * bk + key], v.dq + query * columns);
    }

    void add_row(const TensorView& x, const Place& at, int i, int count, Real factor, Real* sum, int64_t step = 1) {
        const char* row = elements.address(x, at, i);
        for (int c = 0; c < count; ++c) sum[c * step] += factor * elements.to_real(row + c * x.column * elements.bytes);
    }

    // The queries of a tile that space.not_finite names: those of a repeating tile are gathered.
    uint64_t queries_apart(int64_t head, int32_t row, const Place& at) const {
        const uint64_t* named = space.not_finite + head * space.rows;
        if (!repeats(row)) return named[own_tile(row)] & at.alive;
        uint64_t apart = 0;
        for (int i = 0; i < at.count; ++i) {
            if (!(at.alive >> i & 1)) continue;
            const int64_t home = home_of(args.layout.queries, bq, at.tokens[i]);
            apart |= (named[home / bq] >> (home % bq) & 1) << i;
        }
        return apart;
    }

    bool repeats(int32_t row) const { return row < repeating(args.layout.queries); }
    int32_t own_tile(int32_t row) const { return row - repeating(args.layout.queries); }

    // They lie by own places: those of a repeating tile are gathered.
    RowStatistics statistics(int64_t head, int32_t row, const Place& at) {
        const AxisView& axis = args.layout.queries;
        const int64_t head_at = head * space.rows * bq, first = head_at + int64_t(own_tile(row)) * bq;
        if (!repeats(row)) return {space.minus_lse + first, space.delta + first};
        for (int i = 0; i < at.count; ++i) {
            const bool alive = at.alive >> i & 1;
            const int64_t home = head_at + (alive ? home_of(axis, bq, at.tokens[i]) : 0);
            lane.minus_lse[i] = alive ? space.minus_lse[home] : -INFINITY;
            lane.delta[i] = alive ? space.delta[home] : 0.f;
        }
        return {lane.minus_lse, lane.delta};
    }

    // A queue's dQ buffer for an own tile of queries that it reaches.
    int64_t dq_block(int64_t w, int64_t g, int64_t tile) const {
        return space.queues[w].block + g * space.queues[w].tiles + place_of(space, w, tile);
    }

    // The buffer, and whether nothing was collected in it so far.
    Real* touch(int64_t block, bool& is_first) {
        is_first = !space.touched[block];
        space.touched[block] = 1;
        return space.dq + block * bq * columns;
    }

    // Rows of a repeating tile go home one by one.
    void scatter_dq(int64_t g, const Place& at) {
        for (int i = 0; i < at.count; ++i) {
            if (!(at.alive >> i & 1)) continue;
            const int64_t home = home_of(args.layout.queries, bq, at.tokens[i]);
            bool is_first;
            Real* dq = touch(dq_block(queue, g, home / bq), is_first);
            if (is_first) zero(dq, int64_t(bq) * columns);
            add(lane.dq + i * columns, dq + home % bq * columns, columns);
        }
    }

    template <int n>
    void differentiate(const Visit& v, Span queries, int first) {
        if (p.softcap != 0)
            v.bits ? differentiate<true, true, n>(v, queries, first) : differentiate<false, true, n>(v, queries, first);
        else
            v.bits ? differentiate<true, false, n>(v, queries, first)
                   : differentiate<false, false, n>(v, queries, first);
    }

    // s becomes p, dp becomes ds; capped scores have a slope. Masked pairs are selected away, so what they held does
    // not matter.
    template <bool masked, bool is_capped, int n>
    void differentiate(const Visit& v, Span queries, int first) {
        for (int i = queries.first; i < queries.first + queries.count; ++i) {
            const Vec lse = set1(v.rows.minus_lse[i]), delta = set1(v.rows.delta[i]);
#pragma GCC unroll 4
            for (int j = first; j < first + n * lanes; j += lanes) {
                Real *s = lane.s + i * bk + j, *dp = lane.dp + i * bk + j;
                const Vec x = load(s);
                const Capped capped = is_capped ? capped_tanh(x * set1(cap.in)) : Capped{x, x};
                Vec probability = exp2(fma(capped.tanh, set1(scale_log2), lse));
                Vec ds = probability * (load(dp) - delta);
                if (is_capped) ds = ds * capped.slope;
                if (masked) {
                    const Bits kept = bits_at(v.bits, i * bk + j);
                    probability = select(kept, probability, set1(0.f));
                    ds = select(kept, ds, set1(0.f));
                }
                store(s, probability);
                store(dp, ds);
            }
        }
    }

    static void zero(Real* x, int64_t count) { __builtin_memset(x, 0, size_t(count) * sizeof(Real)); }

    void finish(const Place& at, int32_t head, int32_t row) {
        const Between between = around_column(head, row);
        sum_pieces(space.carried.dk, between, at, int(p.head_dim), lane.dk, columns);
        sum_pieces(space.carried.dv, between, at, int(p.head_dim_v), lane.dv, columns_v);
        if (between.has_after) return;
        if (p.value_in_key) return finish_sum(at);
        store_rows(elements, lane.dk, columns, Real(p.scale), int(p.head_dim), args.dk, at);
        store_rows(elements, lane.dv, columns_v, 1.f, int(p.head_dim_v), args.dv, at);
    }

    // Values are the first columns of keys, and so are their gradients.
    void finish_sum(const Place& at) {
        for (int i = 0; i < at.count; ++i)
            for (int c = 0; c < columns; c += lanes) {
                Real* dk = lane.dk + i * columns + c;
                const Vec scaled = load(dk) * set1(Real(p.scale));
                store(dk, c < columns_v ? scaled + load(lane.dv + i * columns_v + c) : scaled);
            }
        store_rows(elements, lane.dk, columns, 1.f, int(p.head_dim), args.dk, at);
    }

    Between pieces_around() const { return {!args.piece.is_first, !args.piece.is_last}; }
    // A column has sums of other pieces and portions, and in other rounds where it has blocks in them.
    Between around_column(int32_t head, int32_t row) const {
        const ListsView& lists = args.layout.by_key;
        const int64_t group = p.heads_q / p.heads_kv;
        Between between = pieces_around();
        between.has_before |= args.has_keys_before, between.has_after |= args.has_keys_after;
        for (int64_t g = 0; g < group && args.tasks.num_rounds > 0; ++g) {
            const Slice slice = slice_of(lists, args.layout.kind_of_head[head * group + g], row);
            if (slice.begin == slice.end) continue;
            const Run& last = lists.runs[slice.end - 1];
            between.has_before |= lists.runs[slice.begin].first < space.round.first_row;
            between.has_after |= last.first + last.count > space.round.end_row;
        }
        return between;
    }

    // Adds what was left of these rows, and leaves the sum for the next.
    void sum_pieces(const TensorView& carried, const Between& between, const Place& at, int count, Real* rows,
                    int ld) const {
        if (!between.has_before && !between.has_after) return;
        for (int i = 0; i < at.count; ++i) {
            if (!(at.owned >> i & 1)) continue;
            Real *row = rows + i * ld, *left = address<Real>(carried, at, i);
            if (between.has_before)
                for (int c = 0; c < count; ++c) row[c] += left[c * carried.column];
            if (between.has_after)
                for (int c = 0; c < count; ++c) left[c * carried.column] = row[c];
        }
    }

    // dk and dv lie one after the other in scratch, as in a part.
    void keep(int32_t part) {
        __builtin_memcpy(space.parts + part * space.part_floats, lane.dk, size_t(space.part_floats) * sizeof(Real));
    }

    void join(const Join& j) {
        zero(lane.dk, space.part_floats);
        for (int i = 0; i < j.parts; ++i)
            add(space.parts + (j.first_part + i) * space.part_floats, lane.dk, space.part_floats);
        finish(keys(j.head, j.row), j.head, j.row);
    }

    static void add(const Real* x, Real* sum, int64_t count) {  // count is a multiple of lanes
        for (int64_t i = 0; i < count; i += lanes) store(sum + i, load(sum + i) + load(x + i));
    }

    // dq of one own tile: what the head's queues collected, in the order of their indices.
    void collect(int64_t head, int32_t tile) {
        const Place at = own(head, tile);
        sum_queues(head, tile);
        for (int64_t i = 0; space.dq_factor != 1 && i < int64_t(bq) * columns; i += lanes)
            store(lane.q + i, load(lane.q + i) * set1(space.dq_factor));
        sum_pieces(space.carried.dq, pieces_around(), at, int(p.head_dim), lane.q, columns);
        if (!args.piece.is_last) return;
        store_rows(elements, lane.q, columns, Real(p.scale), int(p.head_dim), args.dq, at);
    }

    void sum_queues(int64_t head, int32_t tile) {
        const int64_t group = p.heads_q / p.heads_kv, g = head % group;
        zero(lane.q, int64_t(bq) * columns);
        for (int32_t w = space.first_queue[head / group]; w >= 0; w = space.queues[w].next) {
            if (place_of(space, w, tile) < 0) continue;
            const int64_t block = dq_block(w, g, tile);
            if (space.touched[block]) add(space.dq + block * bq * columns, lane.q, int64_t(bq) * columns);
        }
    }

    // delta and -lse log2(e) of one own tile. A row that saw nothing has p = 0, and its dout is not read; its dlse is
    // the sink's.
    void prepare(int64_t head, int32_t tile) {
        const Place at = own(head, tile);
        uint64_t& not_finite = space.not_finite[head * space.rows + tile] = 0;
        const uint64_t seeing =
            p.has_sink_logits ? space.seeing[args.layout.kind_of_head[head] * space.rows + tile] : all_rows;
        for (int i = 0; i < at.count; ++i) {
            const int64_t to = (head * space.rows + tile) * bq + i;
            space.minus_lse[to] = -INFINITY, space.delta[to] = 0.f;
            if (!(at.owned >> i & 1)) continue;
            const float lse = usual_nan(*address<float>(args.lse, at, i));
            const bool is_empty = lse == -INFINITY || !(seeing >> i & 1);
            if (!is_empty) {
                space.minus_lse[to] = args.piece.sweep == 0 ? Real(-log2_e * lse)
                                                            : *address<Real>(space.carried.minus_lse, at, i);
                space.delta[to] = elements.dot(elements.address(args.out, at, i), args.out.column,
                                               elements.address(args.dout, at, i), args.dout.column,
                                               int(p.head_dim_v));
            }
            if (lse != -INFINITY && args.dlse.data) space.delta[to] -= usual_nan(*address<float>(args.dlse, at, i));
            if (!shows_finite(space.minus_lse[to], space.delta[to], at, i)) not_finite |= uint64_t(1) << i;
            if (carries_delta() && (args.piece.is_first || !is_empty))
                *address<Real>(space.carried.delta, at, i) = space.delta[to];
        }
    }

    // Whether q and dout of a query that sees keys are finite. Where dout is not, delta is not; where q is not, lse is
    // not, unless a cap makes numbers of infinite scores or a sink is a score that stays.
    bool shows_finite(Real minus_lse, Real delta, const Place& at, int i) const {
        if (!is_finite(minus_lse) || !is_finite(delta)) return false;
        return (p.softcap == 0 && !p.has_sink_logits) || is_row_finite(elements, args.q, at, i, int(p.head_dim));
    }

    // Sinks are in every row, and a row may see a key in one piece and none in another.
    bool carries_delta() const { return p.has_sink_logits && !args.piece.is_whole(); }

    // dz of one head, over the batch and its own tiles in their order. Where a row saw nothing, lse is z.
    void sum_sink(int64_t head) {
        const double sink = sink_of(args.sink_logits, head);
        double sum = 0;
        for (int64_t b = 0; b < p.batch && sink > -INFINITY; ++b)
            for (int32_t tile = 0; tile < space.rows; ++tile) {
                const Place at = own(b * p.heads_q + head, tile);
                const Real* deltas = space.delta + ((b * p.heads_q + head) * space.rows + tile) * bq;
                for (int i = 0; i < at.count; ++i) {
                    if (!(at.owned >> i & 1)) continue;
                    const Real delta = carries_delta() ? *address<Real>(space.carried.delta, at, i) : deltas[i];
                    sum -= exp(sink - double(*address<float>(args.lse, at, i))) * double(delta);
                }
            }
        float& dsink = ((float*)args.dsink_logits.data)[head * args.dsink_logits.head];
        dsink = float(args.adds_dsink ? double(dsink) + sum : sum);
    }
};

// ---- phases -------------------------------------------------------------------------------------------------------

struct BackwardCall {
    const BackwardArgs* args;
    const Elements* elements;
    BackwardSpace space;
    int64_t next_row, next_queue, next_result;
};

template <int bq, int bk>
inline void backward_rows(void* argument, int64_t index) {
    BackwardCall& call = *(BackwardCall*)argument;
    BackwardLane<bq, bk> lane(*call.args, *call.elements, call.space, index);
    const int64_t rows = call.space.rows, queues = call.args->tasks.queues, end = queues + call.space.heads * rows;
    for (int64_t i; (i = next_of(call.next_row, *call.args->parallel)) < end;)
        if (i < queues) find_reached(call.space, *call.args->problem, call.args->layout, call.args->tasks, i);
        else lane.prepare((i - queues) / rows, int32_t((i - queues) % rows));
}

template <int bq, int bk>
inline void backward_tasks(void* argument, int64_t index) {
    BackwardCall& call = *(BackwardCall*)argument;
    BackwardLane<bq, bk> lane(*call.args, *call.elements, call.space, index);
    const int64_t end = call.space.round.end_queue;
    for (int64_t w; (w = next_of(call.next_queue, *call.args->parallel)) < end;) lane.take_queue(w);
    end_streams();
}

template <int bq, int bk>
inline void backward_results(void* argument, int64_t index) {
    BackwardCall& call = *(BackwardCall*)argument;
    BackwardLane<bq, bk> lane(*call.args, *call.elements, call.space, index);
    const Round& round = call.space.round;
    const int64_t tiles = call.space.tiles(), blocks = call.space.heads * tiles;
    const int64_t joins = blocks + round.end_join - round.first_join;
    const bool is_last = call.args->piece.is_last && round.end_row == call.args->layout.by_query.rows;
    const bool has_dsink = call.args->dsink_logits.data && is_last;
    const int64_t sinks = joins + (has_dsink ? call.args->problem->heads_q : 0);
    for (int64_t i; (i = next_of(call.next_result, *call.args->parallel)) < sinks;)
        if (i < blocks) lane.collect(i / tiles, int32_t(round.first_row + i % tiles));
        else if (i < joins) lane.join(call.args->tasks.joins[round.first_join + i - blocks]);
        else lane.sum_sink(i - joins);
    end_streams();
}

template <int bq, int bk>
inline BackwardCall begin_backward(const BackwardArgs& args, const Elements& elements, Carver carver, int num_lanes) {
    const BackwardSpace space = carve_backward<bq, bk>(carver, *args.problem, args.layout, args.tasks, num_lanes);
    BackwardCall call{&args, &elements, space, 0, 0, 0};
    Carver carried{(uintptr_t)args.piece.carried};
    if (!args.piece.is_whole()) call.space.carried = carve_carried(carried, *args.problem);
    if (!call.space.carried.dk.data) call.space.carried.dk = args.dk;
    if (!call.space.carried.dv.data) call.space.carried.dv = args.dv;
    if (args.problem->has_sink_logits) find_seeing<bq>(call.space, args.layout);
    args.parallel->run(backward_rows<bq, bk>, &call);
    carve_dq<bq>(carver, call.space, *args.problem,
                 place_queues(call.space, *args.problem, args.layout, args.tasks));
    return call;
}

inline void begin_round(BackwardCall& call, int32_t i) {
    const BackwardArgs& args = *call.args;
    call.space.begin_round(*args.problem, args.layout, args.tasks, i);
    call.next_row = call.next_result = 0;
    call.next_queue = call.space.round.first_queue;
}

template <int bq, int bk>
inline void complete_backward(BackwardCall& call) {
    for (int32_t i = 0; i < rounds_of(call.args->tasks); ++i) {
        begin_round(call, i);
        call.args->parallel->run(backward_tasks<bq, bk>, &call);
        call.args->parallel->run(backward_results<bq, bk>, &call);
    }
}

template <int bq, int bk>
inline void block_backward_of(const BackwardArgs& args, const Elements& elements) {
    BackwardCall call = begin_backward<bq, bk>(args, elements, {(uintptr_t)args.workspace}, args.parallel->lanes());
    complete_backward<bq, bk>(call);
}

template <class T, int bq, int bk>
void block_backward(const BackwardArgs& args) {
    block_backward_of<bq, bk>(args, elements_of<T>);
}

template <int bq, int bk>
inline size_t count_backward(Carver carver, const Problem& p, const LayoutView& layout, const TasksView& tasks,
                             int num_lanes) {
    BackwardSpace space = carve_backward<bq, bk>(carver, p, layout, tasks, num_lanes);
    carve_dq<bq>(carver, space, p, dq_blocks(p, layout, tasks, space.rows));
    return carver.used;
}

template <int bq, int bk>
size_t backward_workspace(const Problem& p, const LayoutView& layout, const TasksView& tasks, int num_lanes) {
    return count_backward<bq, bk>({0}, p, layout, tasks, num_lanes);
}

inline size_t backward_carries(const Problem& p) {
    Carver carver{0};
    carve_carried(carver, p);
    return carver.used;
}

}  // namespace
}  // namespace spattn::cpu
