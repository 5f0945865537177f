// SPDX-License-Identifier: MIT
// The form of gather_backward.h whose lanes are heads, on panels. As in gather_forward_panels.h, keys are gathered some
// at a time and packed once for all heads of a tile:
//
//     sT[key][head]   = K . qT        dpT[key][head] = V . dOT      K, V: left panels       qT, dOT: right
//     dQ[head][dim]  += dS . K                                      dS:   left, transposed  K:       right
//     dK[key][dim]   += dST . q (+ pT . dO where values lie in keys), dV[key][dim] += pT . dO
//                                                                   dST, pT: left           q, dO:   right
//
// What waits in the store for dK and dV are the left panels dST and pT, rounded to elements: rows of 32 heads are a
// key's as they stand. While products are made, the unit of heads before is differentiated, the next keys are gathered,
// and what the last keys receive is added to their sums.
//
// In fp16, p and ds are lifted (lift.h), and scale is in the factors of sums and not in ds, for it may be tiny. Where
// ds of a head goes beyond fp16, its row is made once more with a smaller lift for that head. Owners add heads of equal
// lifts together.
#pragma once

#include "cpu/generic/gather_columns.h"
#include "cpu/generic/gather_forward_panels.h"

namespace spattn::cpu {
namespace {

struct PanelsBackward {
    static constexpr bool owns_ranges = false;
    struct Pairs : PairStore<Element, panel_heads, step_terms, tile_rows> {
        static constexpr bool lifts_ds = is_f16;
    };
    using Map = WaveMap<Pairs>;
    static constexpr int unit_heads = 32, unit_tiles = unit_heads / tile_rows;
    static constexpr int owned_keys = 64, owned_tiles = owned_columns / tile_rows;
    struct Scratch {
        Tile *q, *dout, *k, *v;        // [steps][head tiles] twice, [chunk / 16][steps] twice
        Tile *k_right[2], *ds;         // [chunk / 32][tiles of head_dim], [head tiles][chunk / 32]
        Element *rows, *gathered;      // [16][staged columns] or [32][owned_columns]; [3][staged columns]
        Real *s, *dp, *dq;             // [2][chunk][32] twice, [heads][sums_columns]
        Real *minus_lse, *delta;       // [heads], as are
        Real *ds_lift, *most_ds;       // what ds is multiplied by, and the largest that it became
        RowStats* stats;               // [heads]
        Tile *q_terms, *dout_terms;    // owners': [heads / 32][4]
        Real* added;                   // [2][owned_keys][owned_columns]
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p) {
        const int64_t tiles = most_tiles_of_heads(p), heads = tiles * tile_rows;
        const int64_t columns = most_staged_columns(p);
        Scratch lane;
        lane.q = carver.take<Tile>(tiles * steps_of(p.head_dim));
        lane.dout = carver.take<Tile>(tiles * steps_of(p.head_dim_v));
        lane.k = carver.take<Tile>(panel_chunk / tile_rows * steps_of(p.head_dim));
        lane.v = carver.take<Tile>(reads_v_in_k(p) ? 0 : panel_chunk / tile_rows * steps_of(p.head_dim_v));
        for (Tile*& k : lane.k_right) k = carver.take<Tile>(chunk_steps * tiles_of(p.head_dim));
        lane.ds = carver.take<Tile>(tiles * chunk_steps);
        lane.rows = carver.take<Element>(most_of(tile_rows * columns, step_terms * owned_columns));
        lane.gathered = carver.take<Element>(3 * columns);
        lane.s = carver.take<Real>(2 * panel_chunk * unit_heads);
        lane.dp = carver.take<Real>(2 * panel_chunk * unit_heads);
        lane.dq = carver.take<Real>(heads * sums_columns(p.head_dim));
        lane.minus_lse = carver.take<Real>(2 * heads);
        lane.delta = lane.minus_lse + heads;
        lane.ds_lift = carver.take<Real>(is_f16 ? 2 * heads : 0);
        lane.most_ds = lane.ds_lift + heads;
        lane.stats = carver.take<RowStats>(heads);
        lane.q_terms = carver.take<Tile>(steps_of(heads) * owned_tiles);
        lane.dout_terms = carver.take<Tile>(steps_of(heads) * owned_tiles);
        lane.added = carver.take<Real>(2 * owned_keys * owned_columns);
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }
    // Values that are whole steps of a key's columns are read in the panel of keys.
    static bool reads_v_in_k(const Problem& p) { return p.value_in_key && p.head_dim_v % step_terms == 0; }

    // 32 heads, or the last 16, whose products are made and which are not differentiated.
    struct Unit {
        Real *s, *dp;              // [chunk][32]
        Tile *p, *ds;              // of the store, of these heads and keys: [chunk / 16][stored_steps]
        Tile* ds_terms;            // [2][chunk / 32]
        int first, tiles, count, next;  // head; tiles of heads; keys, and of these those that are done
    };

    const BackwardArgs& args;
    const Problem& p;
    const Elements& elements;
    const Map& map;
    Scratch lane;
    const Differentiation differentiation;
    const int64_t ld;  // of dq
    TensorView q_heads, dout_heads, dq_heads;
    RowPanels operands[2];
    GatheredPanels gathered;
    Unit unit{};
    uint64_t present[panel_heads / 64];  // bits of the heads of a tile, not of those that fill it up
    int head_tiles = 0, stored_steps = 0, turn = 0;
    bool is_first = true;  // chunk of a list

    PanelsBackward(const BackwardArgs& a, const Elements& e, const Map& m, uintptr_t scratch)
        : args(a),
          p(*a.problem),
          elements(e),
          map(m),
          differentiation(p, is_f16 ? 1 : Real(p.scale)),
          ld(sums_columns(p.head_dim)),
          q_heads(heads_as_rows(a.q)),
          dout_heads(heads_as_rows(a.dout)),
          dq_heads(heads_as_rows(a.dq)) {
        Carver carver{scratch};
        lane = carve(carver, p);
        operands[0] = {a.k, int(p.head_dim), int(p.head_dim), lane.k, nullptr};
        operands[1] = {p.value_in_key ? a.k : a.v, int(p.head_dim_v), 0, lane.v, nullptr};
        gathered.place(operands, reads_v_in_k(p) ? 1 : 2, lane.gathered, most_staged_columns(p));
    }

    static int64_t tiles_at_once(const Map&) { return 1; }

    void take(int64_t plane, int64_t begin, int64_t end) {
        begin_products();
        for (int64_t n = begin; n < end; ++n) {
            const HeadTile t = map.tile(plane, n);
            tile(t, map.read_list(t, lane.keys));
        }
        end_products();
    }

    void tile(const HeadTile& t, Keys keys) {
        head_tiles = tiles_of(t.heads), stored_steps = steps_of(t.heads);
        for (int i = 0; i < panel_heads / 64; ++i) {
            const int rest = t.heads - 64 * i;
            present[i] = rest >= 64 ? all_rows : rest > 0 ? (uint64_t(1) << rest) - 1 : 0;
        }
        for (int i = 0; i < head_tiles * tile_rows; ++i) lane.minus_lse[i] = -INFINITY, lane.delta[i] = 0.f;
        for (int i = 0; i < t.heads; ++i) {
            lane.stats[i] = row_stats(args, elements, t, i, keys.count == 0);
            lane.minus_lse[i] = lane.stats[i].minus_lse, lane.delta[i] = lane.stats[i].delta;
            map.keep_dsink(t, i, lane.stats[i].dsink);
        }
        if (keys.count > 0) {
            pack_heads_right(q_heads, t, int(p.head_dim), lane.rows, lane.q);
            pack_heads_right(dout_heads, t, int(p.head_dim_v), lane.rows, lane.dout);
        } else {
            zero(lane.dq, t.heads * ld);
        }
        if constexpr (is_f16) begin_lifts();
        do attend_all(t, keys);
        while (is_f16 && has_lowered_lifts());
        for (int i = 0; i < t.heads; ++i) {
            if constexpr (is_f16) lift_of(t, i) = lane.ds_lift[i];
            const Real factor = is_f16 ? Real(p.scale) / lane.ds_lift[i] : 1;
            elements.store_row(lane.dq + i * ld, int(p.head_dim), factor, dq_heads, place_of(t), i);
        }
    }

    void attend_all(const HeadTile& t, Keys keys) {
        is_first = true;
        if (keys.count > 0) {
            gather(t, keys, 0);
            gathered.pack(panel_chunk);
        }
        const int64_t first = map.first_pair(t);
        for (int64_t i = 0; i < keys.count; i += panel_chunk) {
            const int count = least(panel_chunk, keys.count - i);
            attend(count, first + i * stored_steps * step_terms);
            gather(t, keys, i + panel_chunk);
            is_first ? add_dq<Store::set>(count) : add_dq<Store::add>(count);
            is_first = false;
        }
    }

    // ---- lifts of ds ----

    Real& lift_of(const HeadTile& t, int head) const {
        return map.space.ds_lifts[(t.batch * p.heads_q + t.head + head) * p.seq_q + t.row];
    }
    void begin_lifts() {
        for (int i = 0; i < head_tiles * tile_rows; ++i) lane.ds_lift[i] = ds_lift, lane.most_ds[i] = 0.f;
    }
    bool has_lowered_lifts() {
        bool has_lowered = false;
        for (int i = 0; i < head_tiles * tile_rows; ++i) {
            const Real most = lane.most_ds[i];
            lane.most_ds[i] = 0.f;
            if (most <= largest_f16) continue;
            lane.ds_lift[i] *= reduction(most);
            has_lowered = true;
        }
        return has_lowered;
    }

    // Begins with the chunk of keys from number `first` on, or with none. Terms of dq that are still read lie in the
    // other panel.
    void gather(const HeadTile& t, Keys keys, int64_t first) {
        turn ^= 1;
        operands[0].right = lane.k_right[turn];
        gathered.begin(place_of(t, keys.at + first, first < keys.count ? least(panel_chunk, keys.count - first) : 0));
    }

    // p and ds of all heads, for the keys whose pairs begin at `pair`.
    void attend(int count, int64_t pair) {
        const int steps = steps_of(p.head_dim), steps_v = steps_of(p.head_dim_v), key_tiles = steps_of(count) * 2;
        for (int tile = 0; tile < head_tiles; tile += unit_tiles) {
            const int tiles = least(unit_tiles, head_tiles - tile), step = tile / unit_tiles;
            const int64_t half = step % 2 * panel_chunk * unit_heads;
            const Unit next{lane.s + half, lane.dp + half, (Tile*)(map.space.p + pair) + step,
                            (Tile*)(map.space.ds + pair) + step, lane.ds + tile * chunk_steps, tile * tile_rows,
                            tiles, count, 0};
            Pace pace((count + 1) / 2, key_tiles / 2 * (steps + steps_v));
            const auto meanwhile = [&] { differentiate(unit.next + 2 * pace.next()); };
            // s = q kT, dp = dout vT
            multiply_scores({lane.k, lane.q + tile, steps}, steps, next.s, key_tiles, tiles, meanwhile);
            multiply_scores({reads_v_in_k(p) ? lane.k : lane.v, lane.dout + tile, steps_v},
                            reads_v_in_k(p) ? steps : steps_v, next.dp, key_tiles, tiles, meanwhile);
            complete();
            unit = next;
        }
        complete();
    }

    template <class Meanwhile>
    void multiply_scores(const Terms& terms, int a_row, Real* out, int key_tiles, int tiles, Meanwhile& meanwhile) {
        const TileProduct product{&terms, 1, a_row, head_tiles, out, unit_heads};
        multiply_panels<Store::set>(product, 0, key_tiles, tiles, meanwhile);
    }

    // Products become p and ds, for pairs of keys up to `end` or the last key.
    void differentiate(int end) {
        end = least(end, unit.count);
        if (unit.next >= end) return;
        unit.tiles == unit_tiles ? differentiate<unit_tiles>(end) : differentiate<1>(end);
    }
    template <int tiles>
    void differentiate(const int end) {
        const Unit u = unit;
        Vec minus_lse[tiles], delta[tiles], most[tiles], lift[tiles];
        Bits kept[tiles];
        for (int w = 0; w < tiles; ++w) {
            const int first = u.first + w * lanes;
            minus_lse[w] = load(lane.minus_lse + first), delta[w] = load(lane.delta + first);
            kept[w] = bits_at(present, first);
            if constexpr (is_f16) lift[w] = load(lane.ds_lift + first), most[w] = load(lane.most_ds + first);
        }
        const Vec nothing = set1(0.f);
        int key = u.next;
        for (; key < end; key += 2) {
            Vec e[2][unit_tiles], de[2][unit_tiles];
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; ++odd)
#pragma GCC unroll 2
                for (int w = 0; w < unit_tiles; ++w) {
                    e[odd][w] = de[odd][w] = nothing;
                    if (w >= tiles || key + odd >= u.count) continue;
                    const int at = (key + odd) * unit_heads + w * lanes;
                    const auto x = differentiation.at(load(u.s + at), load(u.dp + at), minus_lse[w], delta[w]);
                    e[odd][w] = select(kept[w], x.p, nothing), de[odd][w] = select(kept[w], x.ds, nothing);
                    if constexpr (is_f16) {
                        e[odd][w] = lifted(e[odd][w], p_lift), de[odd][w] = de[odd][w] * lift[w];
                        const Vec size = size_of(de[odd][w]);
                        most[w] = select(above(set1(INFINITY), size), max(size, most[w]), most[w]);
                    }
                }
            const int in_tile = key % tile_rows;
            const int stored = key / tile_rows * stored_steps;
            Tile *const to = u.p + stored, *const slope = u.ds + stored;
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; ++odd) {
                store_terms(to->rows[in_tile + odd], e[odd][0], e[odd][1]);
                store_terms(slope->rows[in_tile + odd], de[odd][0], de[odd][1]);
            }
            Tile* const terms = u.ds_terms + key / step_terms;
#pragma GCC unroll 2
            for (int w = 0; w < tiles; ++w)
                store_pairs(terms[w * chunk_steps].rows[key % step_terms / 2], de[0][w], de[1][w]);
            if ((key + 2) % step_terms == 0)
                for (int w = 0; w < tiles; ++w) transpose_tile(terms[w * chunk_steps]);
        }
        unit.next = key;
        if constexpr (is_f16)
            for (int w = 0; w < tiles; ++w) store(lane.most_ds + u.first + w * lanes, most[w]);
    }

    // Differentiates what is left of a unit. Terms of dq are zero up to the next whole step of keys.
    void complete() {
        if (unit.tiles == 0) return;
        differentiate(unit.count);
        for (int w = 0; w < unit.tiles && unit.next % step_terms != 0; ++w) {
            Tile& terms = unit.ds_terms[w * chunk_steps + unit.next / step_terms];
            const int pairs = unit.next % step_terms / 2;
            __builtin_memset((void*)terms.rows[pairs], 0, size_t(tile_rows - pairs) * sizeof terms.rows[0]);
            transpose_tile(terms);
        }
        unit.tiles = unit.count = 0;
    }

    // s = q kT: dq += ds k
    template <Store mode>
    void add_dq(int count) {
        const int steps = steps_of(count), tiles = tiles_of(p.head_dim);
        const Tile* k = lane.k_right[turn ^ 1];
        Pace pace(gathered.pairs_left(), (head_tiles + 1) / 2 * ((tiles + 1) / 2) * steps);
        const auto meanwhile = [&] { gathered.pack(pace.next()); };
        for (int tile = 0; tile < tiles; tile += 2) {
            const Terms terms{lane.ds, k + tile, steps};
            const TileProduct product{&terms, 1, chunk_steps, tiles, lane.dq + tile * tile_rows, ld};
            multiply_panels<mode>(product, 0, head_tiles, least(2, tiles - tile), meanwhile);
        }
        gathered.pack(panel_chunk);
    }

    // ---- owners: columns of dk, then of dv ----

    static int64_t most_owners(const Problem& p) { return most_column_owners(p); }
    static int64_t owners(const Map& map) { return most_column_owners(map.p); }

    void own(int64_t plane, int64_t owner) {
        begin_products();
        own_columns(args, elements, map, plane, owner, [&](int64_t row, const OwnedColumns& c) {
            for (int64_t n = 0; n < map.tiling.tiles(); ++n)
                add_tile(map.tiling.at(p, plane, map.wave.row + row, 1, n), c);
        });
        end_products();
    }

    // Rows of a product [keys][columns], which wait to be added where the keys lie.
    struct Added {
        const Real* rows;
        const int32_t* keys;
        int count, next;
        Real factor;  // of fp16's
    };

    // s = q kT: dk += dsT q. out = p v: dv += pT dout.
    void add_tile(const HeadTile& t, const OwnedColumns& c) {
        const Keys keys = map.keys(t);
        if (keys.count == 0) return;
        const int steps = steps_of(t.heads), tiles = tiles_of(c.count);
        const int64_t first = map.first_pair(t);
        Terms terms[2];
        int num_terms = 0;
        const auto add_terms = [&](const TensorView& x, const Element* pairs, int columns, Tile* out) {
            pack_terms_of_heads(x, t, all_heads, c.first, columns, tiles, out);
            terms[num_terms++] = {(const Tile*)(pairs + first), out, steps};
        };
        if (c.of_keys && is_f16)
            add_lifted(t, keys, c);
        else if (c.of_keys)
            add_terms(q_heads, map.space.ds, c.count, lane.q_terms);
        if (c.values > 0) add_terms(dout_heads, map.space.p, c.values, lane.dout_terms);
        if (num_terms > 0) add_products(terms, num_terms, keys, c, steps, p_unlift);
    }

    // dk += dsT q in fp16, of heads of one lift after those of another.
    void add_lifted(const HeadTile& t, Keys keys, const OwnedColumns& c) {
        const int steps = steps_of(t.heads);
        HeadBits left{};
        for (int i = 0; i < t.heads; ++i) left.words[i / 64] |= uint64_t(1) << (i % 64);
        for (int head = 0; head < t.heads; ++head) {
            if (!left.has(head)) continue;
            const Real lift = lift_of(t, head);
            HeadBits equal{};
            for (int i = head; i < t.heads; ++i)
                if (left.has(i) && lift_of(t, i) == lift) equal.words[i / 64] |= uint64_t(1) << (i % 64);
            for (int i = 0; i < panel_heads / 64; ++i) left.words[i] &= ~equal.words[i];
            pack_terms_of_heads(q_heads, t, equal, c.first, c.count, tiles_of(c.count), lane.q_terms);
            Terms terms{(const Tile*)(map.space.ds + map.first_pair(t)), lane.q_terms, steps};
            add_products(&terms, 1, keys, c, steps, Real(p.scale) / lift);
        }
    }

    void add_products(Terms* terms, int num_terms, Keys keys, const OwnedColumns& c, int steps, Real factor) {
        const int tiles = tiles_of(c.count);
        Added added{nullptr, nullptr, 0, 0, factor};
        for (int64_t i = 0; i < keys.count; i += owned_keys) {
            const int count = least(owned_keys, keys.count - i), key_tiles = tiles_of(count);
            Real* sums = lane.added + i / owned_keys % 2 * owned_keys * owned_columns;
            const TileProduct product{terms, num_terms, steps, tiles, sums, owned_columns};
            Pace pace(added.count, (key_tiles + 1) / 2 * ((tiles + 1) / 2) * steps * num_terms);
            multiply_panels<Store::set>(product, 0, key_tiles, tiles, [&] { add_rows(added, pace.next(), c); });
            add_rows(added, owned_keys, c);
            added = {sums, keys.at + i, count, 0, factor};
            for (int n = 0; n < num_terms; ++n) terms[n].a += owned_keys / tile_rows * steps;
        }
        add_rows(added, owned_keys, c);
    }

    static void add_rows(Added& added, int rows, const OwnedColumns& c) {
        for (const int end = least(added.next + rows, added.count); added.next < end; ++added.next) {
            Real* sum = c.sums + added.keys[added.next] * c.ld;
            const Real* row = added.rows + added.next * owned_columns;
            for (int i = 0; i < c.count; i += lanes)
                store(sum + i, load(sum + i) + lifted(load(row + i), added.factor));
        }
    }

    // Heads of a tile.
    struct HeadBits {
        uint64_t words[panel_heads / 64];
        bool has(int head) const { return words[head / 64] >> (head % 64) & 1; }
    };
    static constexpr HeadBits all_heads{{all_rows, all_rows}};

    // `columns` of rows of `heads` from `first` on, as a right panel whose terms are heads: [steps][tiles]. Other
    // heads, and tiles beyond these columns, are zero.
    void pack_terms_of_heads(TensorView x, const HeadTile& t, const HeadBits& heads, int first, int columns, int tiles,
                             Tile* out) {
        x.data = (Element*)x.data + first * x.column;
        const int used = tiles_of(columns);
        for (int step = 0; step < steps_of(t.heads); ++step, out += tiles) {
            Place at = place_of(t);
            at.first += step * step_terms, at.count = least(step_terms, t.heads - step * step_terms);
            if (is_f16) at.alive &= heads.words[step * step_terms / 64] >> (step * step_terms % 64);
            pack_terms_right(stage(x, at, columns, step_terms, lane.rows), step_terms, columns, out);
            __builtin_memset((void*)(out + used), 0, size_t(tiles - used) * sizeof(Tile));
        }
    }
};

}  // namespace
}  // namespace spattn::cpu
