// SPDX-License-Identifier: MIT
// The form of gather_backward.h whose lanes are heads. Owners are columns of dK or dV: a row's heads are summed by a
// product [keys][heads] x [heads][64], whose rows are added where the keys lie.
#pragma once

#include "cpu/generic/gather_columns.h"

namespace spattn::cpu {
namespace {

struct HeadsBackward {
    static constexpr bool owns_ranges = false;
    using Pairs = HeadPairs;
    using Map = WaveMap<Pairs>;
    struct Scratch {
        Real *q, *dout, *k, *v;  // [head_dim][width], [head_dim_v][width], [chunk][columns], [chunk][columns_v]
        Real *dq, *row;          // [head_dim][width], [width][widest]
        Real *lse, *delta;       // [width]
        RowStats* stats;         // [heads]
        Real* sums;              // [chunk][owned_columns]
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p) {
        const int64_t width = round_up(most_tile_heads(p), lanes);
        const int64_t widest = most_of(most_of(columns_of(p), values_of(p)), owned_columns);
        Scratch lane;
        lane.q = carver.take<Real>(p.head_dim * width);
        lane.dout = carver.take<Real>(p.head_dim_v * width);
        lane.k = carver.take<Real>(int64_t(gather_chunk) * columns_of(p));
        lane.v = carver.take<Real>(int64_t(gather_chunk) * values_of(p));
        lane.dq = carver.take<Real>(p.head_dim * width);
        lane.row = carver.take<Real>(width * widest);
        lane.lse = carver.take<Real>(2 * width);
        lane.delta = lane.lse + width;
        lane.stats = carver.take<RowStats>(width);
        lane.sums = carver.take<Real>(int64_t(gather_chunk) * owned_columns);
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    const BackwardArgs& args;
    const Problem& p;
    const Elements& elements;
    const Map& map;
    Scratch lane;
    const Differentiation differentiation;
    TensorView q_heads, dout_heads, dq_heads;

    HeadsBackward(const BackwardArgs& a, const Elements& e, const Map& m, uintptr_t scratch)
        : args(a),
          p(*a.problem),
          elements(e),
          map(m),
          differentiation(p),
          q_heads(heads_as_rows(a.q)),
          dout_heads(heads_as_rows(a.dout)),
          dq_heads(heads_as_rows(a.dq)) {
        Carver carver{scratch};
        lane = carve(carver, p);
    }

    static int64_t tiles_at_once(const Map&) { return 1; }

    void take(int64_t plane, int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const HeadTile t = map.tile(plane, n);
            tile(t, map.read_list(t, lane.keys));
        }
    }

    void tile(const HeadTile& t, Keys keys) {
        const int width = round_up(t.heads, lanes), ld = columns_of(p);
        zero(lane.dq, p.head_dim * width);
        if (keys.count > 0) {
            const Place heads = place_of(t);
            pack_transposed(elements, q_heads, heads, int(p.head_dim), 1.f, lane.q, width, lane.row);
            pack_transposed(elements, dout_heads, heads, int(p.head_dim_v), 1.f, lane.dout, width, lane.row);
        }
        for (int i = 0; i < width; ++i) lane.lse[i] = -INFINITY, lane.delta[i] = 0.f;
        for (int i = 0; i < t.heads; ++i) {
            lane.stats[i] = row_stats(args, elements, t, i, keys.count == 0);
            lane.lse[i] = lane.stats[i].minus_lse, lane.delta[i] = lane.stats[i].delta;
        }
        const int64_t first = map.first_pair(t);
        for (int64_t i = 0; i < keys.count; i += gather_chunk)
            visit(place_of(t, keys.at + i, least(gather_chunk, keys.count - i)), width, first + i * width);
        for (int i = 0; i < width; i += lanes) correct(t, i, first + i, keys.count, width);
        transpose({lane.dq, width}, int(p.head_dim), t.heads, 1.f, lane.row, ld);
        store_rows(elements, lane.row, ld, 1.f, int(p.head_dim), dq_heads, place_of(t));
    }

    void visit(const Place& at, int width, int64_t first) {
        Real *s = map.space.p + first, *ds = map.space.ds + first;
        const Rows k = load_rows(elements, args.k, at, int(p.head_dim), lane.k);
        const Rows v = p.value_in_key ? k : load_rows(elements, args.v, at, int(p.head_dim_v), lane.v);
        const int n = width / lanes;
        multiply<Left::rows, Store::set>({k.x, k.ld, lane.q, width, s, width, int(p.head_dim)}, at.count, n);
        multiply<Left::rows, Store::set>({v.x, v.ld, lane.dout, width, ds, width, int(p.head_dim_v)}, at.count, n);
        for (int i = 0; i < width; i += lanes) {
            const Vec lse = load(lane.lse + i), delta = load(lane.delta + i);
            for (int r = 0; r < at.count; ++r) {
                const int64_t pair = r * width + i;
                const auto [e, de] = differentiation.at(load(s + pair), load(ds + pair), lse, delta);
                store(s + pair, e);
                store(ds + pair, de);
            }
        }
        multiply<Left::transposed, Store::add>({k.x, k.ld, ds, width, lane.dq, width, at.count}, int(p.head_dim), n);
    }

    // One vector of heads, whose pairs with each key lie `width` from those with the next.
    void correct(const HeadTile& t, int head, int64_t first, int64_t count, int width) {
        Real each[lanes];
        Vec sum = set1(0.f);
        for (int64_t r = 0; lse_is_rounded && r < count; ++r) sum = sum + load(map.space.p + first + r * width);
        store(each, sum);
        for (int i = 0; i < lanes; ++i) {
            const double factor = head + i < t.heads ? lane.stats[head + i].correction(each[i]) : 1;
            if (head + i < t.heads) map.keep_dsink(t, head + i, lane.stats[head + i].dsink * factor);
            each[i] = Real(factor);
        }
        if (!lse_is_rounded) return;
        scale_columns(load(each), map.space.p + first, count, width);
        scale_columns(load(each), map.space.ds + first, count, width);
        scale_columns(load(each), lane.dq + head, p.head_dim, width);
    }
    static void scale_columns(Vec factors, Real* x, int64_t rows, int ld) {
        for (int64_t r = 0; r < rows; ++r) store(x + r * ld, load(x + r * ld) * factors);
    }

    // ---- owners: columns of dk, then of dv ----

    static int64_t most_owners(const Problem& p) { return most_column_owners(p); }
    static int64_t owners(const Map& map) { return most_column_owners(map.p); }

    void own(int64_t plane, int64_t owner) {
        own_columns(args, elements, map, plane, owner, [&](int64_t row, const OwnedColumns& c) {
            if (c.of_keys) add_row(plane, row, q_heads, map.space.ds, c.first, c.count, c.sums, c.ld);
            if (c.values > 0) add_row(plane, row, dout_heads, map.space.p, c.first, c.values, c.sums, c.ld);
        });
    }

    // sums[key] += weights[key][head] x[head], the columns of one slice.
    void add_row(int64_t plane, int64_t row, TensorView x, const Real* weights, int first, int columns, Real* sums,
                 int64_t ld) {
        x.data = (char*)x.data + first * x.column * elements.bytes;
        const int64_t tiles = map.tiling.tiles();
        const int vectors = (columns + lanes - 1) / lanes, width = vectors * lanes;
        for (int64_t n = 0; n < tiles; ++n) {
            const HeadTile t = map.tiling.at(p, plane, map.wave.row + row, 1, n);
            const Keys keys = map.keys(t);
            if (keys.count == 0) continue;
            const Rows right = load_padded(elements, x, place_of(t), columns, lane.row);
            const int pairs = round_up(t.heads, lanes);
            const Real* left = weights + map.first_pair(t);
            for (int64_t i = 0; i < keys.count; i += gather_chunk) {
                const int count = least(gather_chunk, keys.count - i);
                multiply<Left::rows, Store::set>(
                    {left + i * pairs, pairs, right.x, right.ld, lane.sums, width, t.heads}, count, vectors);
                for (int r = 0; r < count; ++r) {
                    Real* sum = sums + keys.at[i + r] * ld;
                    for (int c = 0; c < width; c += lanes)
                        store(sum + c, load(sum + c) + load(lane.sums + r * width + c));
                }
            }
        }
    }
};

}  // namespace
}  // namespace spattn::cpu
