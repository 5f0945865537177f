// SPDX-License-Identifier: MIT
// The form of gather_forward.h whose lanes are heads, on panels: panel_forward.h with one list for all heads.
//
//     sT[key][head]   = K . qT                  K: left panel, qT: right panel
//     p[head][key]    = exp2(factor sT - m)     in float32, then rounded to elements: a left panel
//     o[head][dim]   += p . V                   V: right panel
//
// Keys are gathered some at a time and packed once for all heads of a tile. As rows of a left panel and as terms of a
// right one they are copied without being transposed; p is, but there are fewer heads than columns.
//
// Two tiles of heads are a unit. While the scores of one are made, the exponentials of the one before are; while p . V
// is added for all units, the next keys are gathered.
#pragma once

#include "cpu/generic/gather_forward.h"
#include "cpu/generic/gathered_panels.h"
#include "cpu/generic/lift.h"

namespace spattn::cpu {
namespace {

constexpr int panel_heads = 128;  // of a tile
constexpr int panel_chunk = 128;  // keys that are gathered at once
constexpr int chunk_steps = panel_chunk / step_terms;

// Heads of a tile, padded to tiles of 16.
inline int most_tiles_of_heads(const Problem& p) { return tiles_of(least(panel_heads, p.group())); }

inline int64_t most_staged_columns(const Problem& p) {
    return staged_columns(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v);
}

// Sums of rows of out start a line apart more than a power of two: rows of a tile lie in different places of a cache.
inline int64_t sums_columns(int64_t columns) { return int64_t(tiles_of(columns)) * tile_rows + tile_rows; }

struct PanelsForward {
    static constexpr int heads_of_tile = panel_heads;
    static constexpr bool reads_float8 = false;
    static constexpr int unit_heads = 32, unit_tiles = unit_heads / tile_rows;
    struct Scratch {
        Tile *q, *k, *v[2], *p;      // [steps][head tiles], [chunk / 16][steps], [chunk / 32][tiles of head_dim_v],
                                     // [head tiles][chunk / 32]
        Element *rows, *gathered;    // [16][staged columns], [3][staged columns]
        Real* s;                     // [2][chunk][32]
        GatherState state;           // out [heads][sums_columns]
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p, int) {
        const int64_t heads = most_tiles_of_heads(p), columns = most_staged_columns(p);
        Scratch lane;
        lane.q = carver.take<Tile>(heads * steps_of(p.head_dim));
        lane.k = carver.take<Tile>(panel_chunk / tile_rows * steps_of(p.head_dim));
        for (Tile*& v : lane.v) v = carver.take<Tile>(chunk_steps * tiles_of(p.head_dim_v));
        lane.p = carver.take<Tile>(heads * chunk_steps);
        lane.rows = carver.take<Element>(tile_rows * columns);
        lane.gathered = carver.take<Element>(3 * columns);
        lane.s = carver.take<Real>(2 * panel_chunk * unit_heads);
        lane.state.out = carver.take<Real>(heads * tile_rows * sums_columns(p.head_dim_v));
        lane.state.m = carver.take<Real>(3 * heads * tile_rows);
        lane.state.l = lane.state.m + heads * tile_rows, lane.state.top = lane.state.l + heads * tile_rows;
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    // 32 heads, or the last 16, whose scores are made and whose exponentials are not.
    struct Unit {
        Real* s;      // [chunk][32]
        Tile* p;      // [2][chunk / 32]
        int first, tiles, count, next;  // head; tiles of heads; keys, and of these those that are done
    };

    const ForwardArgs& args;
    const Problem& p;
    const Elements& elements;
    Scratch lane;
    const SoftcapFactors cap;
    const Real factor;  // from products to scores in units of log2, where no cap lies between
    const int64_t ld;   // of out
    TensorView q_heads, out_heads;
    RowPanels operands[2];
    GatheredPanels gathered;
    Unit unit{};
    Vec sums[2][unit_tiles];  // over even keys and over odd ones
    int head_tiles = 0, turn = 0;
    bool is_first = true;  // chunk of a list

    PanelsForward(const ForwardArgs& a, const Elements& e, uintptr_t scratch)
        : args(a),
          p(*a.problem),
          elements(e),
          cap(softcap_factors(p)),
          factor(Real(p.scale * log2_e)),
          ld(sums_columns(p.head_dim_v)),
          q_heads(heads_as_rows(a.q)),
          out_heads(heads_as_rows(a.out)) {
        Carver carver{scratch};
        lane = carve(carver, p, a.parallel->lanes());
        operands[0] = {a.k, int(p.head_dim), p.value_in_key ? int(p.head_dim_v) : 0, lane.k, nullptr};
        operands[1] = {a.v, 0, int(p.head_dim_v), nullptr, nullptr};
        gathered.place(operands, p.value_in_key ? 1 : 2, lane.gathered, most_staged_columns(p));
    }

    static int64_t tiles_at_once(const Problem&, const Tiling&, int) { return 1; }
    void take(const Tiling& tiling, int64_t plane, int64_t begin, int64_t end) {
        begin_products();
        for (; begin < end; ++begin) tile(tiling.at(p, plane, 0, p.seq_q, begin));
        end_products();
    }

    void tile(const HeadTile& t) {
        const Keys keys = read_keys(args, t.batch * p.heads_q + t.head, t.row, lane.keys);
        const GatherState& state = lane.state;
        head_tiles = tiles_of(t.heads), is_first = true;
        for (int i = 0; i < head_tiles * tile_rows; ++i)
            state.m[i] = lowest, state.l[i] = 0.f, state.top[i] = -INFINITY;
        if (keys.count > 0) {
            pack_heads_right(q_heads, t, int(p.head_dim), lane.rows, lane.q);
            gather(t, keys, 0);
            gathered.pack(panel_chunk);
        } else {
            for (int64_t i = 0; i < t.heads * ld; ++i) state.out[i] = 0.f;
        }
        for (int64_t i = 0; i < keys.count; i += panel_chunk) {
            const int count = least(panel_chunk, keys.count - i);
            attend(count);
            gather(t, keys, i + panel_chunk);
            add_values(count);
            is_first = false;
        }
        for (int i = 0; i < t.heads; ++i) {
            const Real share = end_head(args, t, i, state);
            elements.store_row(state.out + i * ld, int(p.head_dim_v), share * forward_unlift, out_heads, place_of(t),
                               i);
        }
    }

    // Begins with the chunk of keys from number `first` on, or with none. Values that are still read lie in the other
    // panel.
    void gather(const HeadTile& t, Keys keys, int64_t first) {
        turn ^= 1;
        operands[p.value_in_key ? 0 : 1].right = lane.v[turn];
        gathered.begin(place_of(t, keys.at + first, first < keys.count ? least(panel_chunk, keys.count - first) : 0));
    }

    // sT and p of all heads.
    void attend(int count) {
        const int steps = steps_of(p.head_dim), key_tiles = steps_of(count) * 2;
        for (int tile = 0; tile < head_tiles; tile += unit_tiles) {
            const int tiles = least(unit_tiles, head_tiles - tile);
            const Unit next{lane.s + tile / unit_tiles % 2 * panel_chunk * unit_heads, lane.p + tile * chunk_steps,
                            tile * tile_rows, tiles, count, 0};
            const Terms terms{lane.k, lane.q + tile, steps};
            const TileProduct product{&terms, 1, steps, head_tiles, next.s, unit_heads};
            Pace pace(count / 2, key_tiles / 2 * steps);
            const auto meanwhile = [&] { exponentiate(unit.next + 2 * pace.next()); };
            multiply_panels<Store::set>(product, 0, key_tiles, tiles, meanwhile);
            complete();
            begin(next);
        }
        complete();
    }

    // Moves the maxima, so that exponentials may be made.
    void begin(const Unit& next) {
        unit = next;
        if (p.softcap != 0)
            for (int i = 0; i < unit.count * unit_heads; i += lanes)
                store(unit.s + i, capped_tanh(load(unit.s + i) * set1(cap.in)).tanh * set1(cap.out));
        for (int w = 0; w < unit.tiles; ++w) {
            const Vec scale = set1(score_factor());
            Vec even = set1(-INFINITY), odd = even;
            const Real* s = unit.s + w * lanes;
            int key = 0;
            for (; key + 2 <= unit.count; key += 2) {
                even = max(load(s + key * unit_heads) * scale, even);
                odd = max(load(s + (key + 1) * unit_heads) * scale, odd);
            }
            if (key < unit.count) even = max(load(s + key * unit_heads) * scale, even);
            raise(unit.first + w * lanes, max(odd, even));
            sums[0][w] = sums[1][w] = set1(0.f);
        }
    }
    Real score_factor() const { return p.softcap != 0 ? Real(1) : factor; }

    // Moves the maximum of the heads whose new one is beyond the lag, as the form over floats does.
    void raise(int first, Vec top) {
        const GatherState& state = lane.state;
        store(state.top + first, max(top, load(state.top + first)));
        const Vec old = load(state.m + first);
        const Bits moved = above(top, old + set1(lag));
        if (!any(moved)) return;
        const Vec m = select(moved, top, old), keep = exp2(old - m);
        store(state.m + first, m);
        store(state.l + first, load(state.l + first) * keep);
        Real kept[lanes];
        store(kept, keep);
        for (int i = 0; i < lanes && !is_first; ++i) {
            Real* out = state.out + (first + i) * ld;
            for (int64_t d = 0; kept[i] != 1 && d < p.head_dim_v; d += lanes)
                store(out + d, load(out + d) * set1(kept[i]));
        }
    }

    // Scores become p, up to the key `end` or the last pair of keys.
    void exponentiate(int end) {
        end = least(end, unit.count & ~1);
        if (unit.next >= end) return;
        unit.tiles == unit_tiles ? exponentiate<unit_tiles>(end) : exponentiate<1>(end);
    }
    template <int tiles>
    void exponentiate(const int end) {
        const Vec scale = set1(score_factor());
        Vec minus_m[tiles], even[tiles], odd[tiles];
        for (int w = 0; w < tiles; ++w) {
            minus_m[w] = set1(0.f) - load(lane.state.m + unit.first + w * lanes);
            even[w] = sums[0][w], odd[w] = sums[1][w];
        }
        const Real* const scores = unit.s;
        Tile* const to = unit.p;
        int key = unit.next;
        for (; key < end; key += 2) {
            Tile* const tile = to + key / step_terms;
#pragma GCC unroll 2
            for (int w = 0; w < tiles; ++w) {
                const Real* s = scores + key * unit_heads + w * lanes;
                const Vec a = exp2(fma(load(s), scale, minus_m[w]));
                const Vec b = exp2(fma(load(s + unit_heads), scale, minus_m[w]));
                even[w] = even[w] + a, odd[w] = odd[w] + b;
                store_pairs(tile[w * chunk_steps].rows[key % step_terms / 2], lifted(a, forward_lift),
                            lifted(b, forward_lift));
            }
            if ((key + 2) % step_terms == 0)
                for (int w = 0; w < tiles; ++w) transpose_tile(tile[w * chunk_steps]);
        }
        unit.next = key;
        for (int w = 0; w < tiles; ++w) sums[0][w] = even[w], sums[1][w] = odd[w];
    }

    // Makes what is left of a unit's exponentials: a last key without a neighbour, and zeros up to the next whole step.
    void complete() {
        if (unit.tiles == 0) return;
        exponentiate(unit.count);
        const int last = unit.count / step_terms;
        for (int w = 0; w < unit.tiles; ++w) {
            Vec rest = set1(0.f);
            const Real* m = lane.state.m + unit.first + w * lanes;
            if (unit.count % step_terms != 0) {
                Tile& tile = unit.p[w * chunk_steps + last];
                for (int key = unit.next; key < (last + 1) * step_terms; key += 2) {
                    const Vec score = load(unit.s + key * unit_heads + w * lanes), minus_m = set1(0.f) - load(m);
                    const Vec e = key < unit.count ? exp2(fma(score, set1(score_factor()), minus_m)) : set1(0.f);
                    rest = rest + e;
                    store_pairs(tile.rows[key % step_terms / 2], lifted(e, forward_lift), set1(0.f));
                }
                transpose_tile(tile);
            }
            Real* l = lane.state.l + unit.first + w * lanes;
            store(l, load(l) + (sums[0][w] + sums[1][w]) + rest);
        }
        unit.tiles = unit.count = 0;
    }

    // o += p V, of all heads
    void add_values(int count) {
        is_first ? add_values<Store::set>(count) : add_values<Store::add>(count);
        gathered.pack(panel_chunk);
    }
    template <Store mode>
    void add_values(int count) {
        const int steps = steps_of(count), tiles = tiles_of(p.head_dim_v);
        const Tile* v = lane.v[turn ^ 1];
        Pace pace(gathered.pairs_left(), (head_tiles + 1) / 2 * ((tiles + 1) / 2) * steps);
        const auto meanwhile = [&] { gathered.pack(pace.next()); };
        for (int tile = 0; tile < tiles; tile += 2) {
            const Terms terms{lane.p, v + tile, steps};
            const TileProduct product{&terms, 1, chunk_steps, tiles, lane.state.out + tile * tile_rows, ld};
            multiply_panels<mode>(product, 0, head_tiles, least(2, tiles - tile), meanwhile);
        }
    }
};

}  // namespace
}  // namespace spattn::cpu
