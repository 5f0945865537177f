// SPDX-License-Identifier: MIT
// The form of gather_backward.h whose lanes are dims. Owners are ranges of keys, whose dK and dV stay in the cache.
//
// Rows of scattered keys come from where they lie, so query rows are worked on together here too, range by range: while
// an owner's keys are near, each row meets those that it lists. A row's keys in a range are a cell:
//
//     rows of a lane:  for each range: for each row: p, ds, dQ += ds . K      K and V of a range pass through the cache
//     owners:          for each row: dK[key] += ds q, dV[key] += p dO         q and dO of a row wait in registers
//
// Where cells end is written down, so that owners find theirs, and have them come, without a look into the list.
#pragma once

#include "cpu/generic/gather_backward.h"
#include "cpu/generic/gathered_rows.h"

namespace spattn::cpu {
namespace {

constexpr int64_t owned_bytes = 1 << 20;          // of dK and dV that a range of keys keeps in the cache
constexpr int64_t least_owned = 8;                // keys of a list in a range on average: fewer do not pay for q, dO
constexpr int64_t owners_a_lane = 4;              // at least, if ranges need not be too small for it
constexpr int64_t rows_bytes = int64_t(1) << 21;  // of q, dout and dq of rows that are worked on together
constexpr int64_t turns_a_lane = 4;               // at least, so that lanes end together
constexpr int64_t cells_ahead = 2;                // that are on their way

struct DimsBackward {
    static constexpr bool owns_ranges = true;  // of keys
    using Pairs = DimPairs;
    using Map = WaveMap<Pairs>;
    // A query row that is worked on with others: where its pairs lie, and the first among their heads.
    struct Row {
        Keys keys;
        int64_t pair, tile;
        int32_t heads, at, done;  // done: keys below the range
    };
    struct Scratch {
        Real *q, *dout, *k, *v;   // [heads][columns], [heads][columns_v], [lanes][columns], [lanes][columns_v]
        Real *dq, *weights, *ds;  // [heads][columns], [lanes], [lanes]
        RowStats* stats;          // [heads]
        Row* rows;                // [heads]
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p) {
        const int64_t heads = heads_at_once(p);
        Scratch lane;
        lane.q = carver.take<Real>(heads * columns_of(p));
        lane.dout = carver.take<Real>(heads * values_of(p));
        lane.k = carver.take<Real>(int64_t(lanes) * columns_of(p));
        lane.v = carver.take<Real>(int64_t(lanes) * values_of(p));
        lane.dq = carver.take<Real>(heads * columns_of(p));
        lane.weights = carver.take<Real>(lanes);
        lane.ds = carver.take<Real>(lanes);
        lane.stats = carver.take<RowStats>(heads);
        lane.rows = carver.take<Row>(heads);
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    // There is scratch for one list of a call: rows that bring their lists go one by one.
    static int64_t heads_at_once(const Problem& p) {
        const int64_t heads = most_tile_heads(p), bytes = (2 * columns_of(p) + values_of(p)) * int64_t(sizeof(Real));
        return p.call_lists.at_run_time() ? heads : most_of(heads, least_of(p.group() * p.seq_q, rows_bytes / bytes));
    }
    static int64_t tiles_at_once(const Map& map) {
        if (map.p.call_lists.at_run_time()) return 1;
        const int64_t tiles = map.wave.planes * map.wave.rows * map.tiling.tiles();
        const int64_t share = tiles / (map.args.parallel->lanes() * turns_a_lane);
        return most_of(1, least_of(share, heads_at_once(map.p) / map.tiling.heads(0)));
    }

    const BackwardArgs& args;
    const Problem& p;
    const Elements& elements;
    const Map& map;
    Scratch lane;
    GatheredRows k, v;
    const int columns, columns_v;
    const Differentiation differentiation;
    const int64_t range;  // keys that an owner has
    HeadTile place{};     // of rows that are worked on: their batch entry and kv head
    int64_t rows = 0;

    DimsBackward(const BackwardArgs& a, const Elements& e, const Map& m, uintptr_t scratch)
        : args(a),
          p(*a.problem),
          elements(e),
          map(m),
          columns(columns_of(p)),
          columns_v(values_of(p)),
          differentiation(p),
          range(range_of(m)) {
        Carver carver{scratch};
        lane = carve(carver, p);
    }

    // Tiles [begin, end) of a kv head.
    void take(int64_t plane, int64_t begin, int64_t end) {
        place = map.tile(plane, begin);
        rows = 0;
        int heads = 0;
        for (int64_t n = begin; n < end; ++n) {
            const HeadTile t = map.tile(plane, n);
            add_row(t, heads);
            heads += t.heads;
        }
        if (p.call_lists.at_run_time()) visit(lane.rows[0], 0, int(lane.rows[0].keys.count));
        else each_cell();
        for (int64_t n = begin; n < end; ++n) finish(map.tile(plane, n), lane.rows[n - begin]);
    }

    void add_row(const HeadTile& t, int at) {
        const Keys keys = map.read_list(t, lane.keys);
        lane.rows[rows++] = {keys, map.first_pair(t), map.tile_of(t), t.heads, at, 0};
        zero(lane.dq + int64_t(at) * columns, int64_t(t.heads) * columns);
        for (int i = 0; i < t.heads; ++i) lane.stats[at + i] = row_stats(args, elements, t, i, keys.count == 0);
        if (keys.count == 0) return;
        const Place heads = place_of(t);
        copy_rows(elements, heads_as_rows(args.q), heads, int(p.head_dim), lane.q + int64_t(at) * columns);
        copy_rows(elements, heads_as_rows(args.dout), heads, int(p.head_dim_v), lane.dout + int64_t(at) * columns_v);
    }

    void each_cell() {
        int32_t* ends = map.space.ends;
        for (int64_t end = range; end < p.seq_k + range; end += range, ends += map.space.tiles)
            for (int64_t i = 0; i < rows; ++i) {
                if (i + cells_ahead < rows) prefetch_cell(lane.rows[i + cells_ahead]);
                Row& row = lane.rows[i];
                const int from = row.done;
                row.done = ends[row.tile] = count_below(row.keys.at, from, int(row.keys.count), end);
                visit(row, from, row.done);
            }
    }

    void prefetch_cell(const Row& row) const {
        prefetch(row.keys.at + row.done);
        prefetch(row.keys.at + row.done + line_bytes / sizeof(int32_t));
        prefetch(map.space.p + row.pair + row.done);
        prefetch(map.space.ds + row.pair + row.done);
    }

    void visit(const Row& row, int from, int end) {
        if (p.call_lists.at_run_time()) prefetch_keys(args, elements, args.k, args.v, place, row.keys, from);
        for (int i = from; i < end; i += lanes) {
            if (p.call_lists.at_run_time()) prefetch_keys(args, elements, args.k, args.v, place, row.keys, i + lanes);
            const Place at = place_of(place, row.keys.at + i, least(lanes, end - i));
            k.load({elements, args.k, {}}, at, int(p.head_dim), lane.k);
            if (!p.value_in_key) v.load({elements, args.v, {}}, at, int(p.head_dim_v), lane.v);
            for (int head = 0; head < row.heads; ++head)
                meet(row.at + head, at.count, row.pair + head * row.keys.count + i);
        }
    }

    // One vector of keys.
    void meet(int64_t head, int count, int64_t to) {
        const RowStats stats = lane.stats[head];
        dots(lane.q + head * columns, k, columns, lane.weights);
        dots(lane.dout + head * columns_v, p.value_in_key ? k : v, columns_v, lane.ds);
        const auto [e, de] =
            differentiation.at(load(lane.weights), load(lane.ds), set1(stats.minus_lse), set1(stats.delta));
        store(lane.weights, e);
        store(lane.ds, de);
        __builtin_memcpy(map.space.p + to, lane.weights, size_t(count) * sizeof(Real));
        __builtin_memcpy(map.space.ds + to, lane.ds, size_t(count) * sizeof(Real));
        add_weighted_rows(lane.ds, k, columns, lane.dq + head * columns);
    }

    void finish(const HeadTile& t, const Row& row) {
        for (int i = 0; i < t.heads; ++i) correct(t, i, row);
        const Real* dq = lane.dq + int64_t(row.at) * columns;
        store_rows(elements, dq, columns, 1.f, int(p.head_dim), heads_as_rows(args.dq), place_of(t));
    }

    void correct(const HeadTile& t, int head, const Row& row) {
        const RowStats& stats = lane.stats[row.at + head];
        const int64_t count = row.keys.count, first = row.pair + head * count;
        const double factor = stats.correction(lse_is_rounded ? sum(map.space.p + first, count) : 0);
        map.keep_dsink(t, head, stats.dsink * factor);
        if (!lse_is_rounded) return;
        scale(Real(factor), map.space.p + first, count);
        scale(Real(factor), map.space.ds + first, count);
        scale(Real(factor), lane.dq + int64_t(row.at + head) * columns, columns);
    }

    static Real sum(const Real* x, int64_t count) {
        Vec parts = set1(0.f);
        int64_t i = 0;
        for (; i + lanes <= count; i += lanes) parts = parts + load(x + i);
        Real each[lanes], sum = 0.f;
        store(each, parts);
        for (Real part : each) sum += part;
        for (; i < count; ++i) sum += x[i];
        return sum;
    }
    static void scale(Real factor, Real* x, int64_t count) {
        for (int64_t i = 0; i < count; ++i) x[i] *= factor;
    }

    // ---- owners: ranges of keys ----

    static int64_t near_range(const Problem& p) {
        return most_of(64, owned_bytes / ((columns_of(p) + values_of(p)) * int64_t(sizeof(Real))));
    }
    static int64_t least_range(const Problem& p) { return (near_range(p) + 1) / 2; }
    static int64_t most_owners(const Problem& p) { return p.seq_k / least_range(p) + 1; }

    // The range of an owner, where so many kv heads are worked on together and their rows list so many keys on average.
    // Every owner searches lists of a call from end to end: there ranges are as large as the cache allows.
    static int64_t range_of(const Problem& p, int64_t planes, double listed, int num_lanes) {
        if (p.call_lists.at_run_time()) return near_range(p);
        const double filled = least_owned * double(p.seq_k) / (listed < least_owned ? least_owned : listed);
        const int64_t shared = planes * p.seq_k / (owners_a_lane * num_lanes);
        return most_of(least_range(p), least_of(shared, most_of(near_range(p), int64_t(filled))));
    }
    static int64_t range_of(const Map& map) {
        const Wave& wave = map.wave;
        const int64_t listed = map.listed(wave.plane * map.p.group(), wave.row, wave.rows);
        return range_of(map.p, wave.planes, double(listed) / double(wave.rows), map.args.parallel->lanes());
    }
    static int64_t owners(const Map& map) { return (map.p.seq_k + range_of(map) - 1) / range_of(map); }

    void own(int64_t plane, int64_t owner) {
        const int64_t begin = owner * range, end = least_of(begin + range, p.seq_k);
        const int64_t slot = plane - map.wave.plane;
        const Sums dk{map.space.dk + slot * p.seq_k * columns, columns};
        const Sums dv = p.value_in_key ? dk : Sums{map.space.dv + slot * p.seq_k * columns_v, columns_v};
        if (map.wave.row == 0) {
            zero(dk[begin], (end - begin) * columns);
            if (!p.value_in_key) zero(dv[begin], (end - begin) * columns_v);
        }
        Cell cells[cells_ahead];
        const int64_t tiles = map.wave.rows * map.tiling.tiles();
        for (int64_t n = 0; n < tiles + cells_ahead; ++n) {
            Cell& cell = cells[n % cells_ahead];
            if (n >= cells_ahead) add_cell(cell, begin, end, dk, dv);
            if (n >= tiles) continue;
            cell = cell_of(map.tile(plane, n), owner);
            prefetch_cell(cell);
        }
        if (map.wave.row + map.wave.rows == p.seq_q) write(plane, begin, end, dk, dv);
    }

    // Sums of each key, a row each.
    struct Sums {
        Real* x;
        int64_t ld;
        Real* operator[](int64_t key) const { return x + key * ld; }
    };

    // What an owner has of a tile's list: of a list of a call, all.
    struct Cell {
        HeadTile t;
        Keys keys;
        int64_t pair;  // of the list's first key and the first head
        int from, to;
    };
    Cell cell_of(const HeadTile& t, int64_t owner) const {
        const Keys keys = map.keys(t);
        const int64_t pair = map.first_pair(t);
        if (p.call_lists.at_run_time()) return {t, keys, pair, 0, int(keys.count)};
        const int32_t* end = map.space.ends + owner * map.space.tiles + map.tile_of(t);
        return {t, keys, pair, owner > 0 ? end[-map.space.tiles] : 0, *end};
    }
    void prefetch_cell(const Cell& cell) const {
        if (cell.from == cell.to) return;
        for (int i : {cell.from, cell.to - 1}) {
            prefetch(cell.keys.at + i);
            prefetch(map.space.p + cell.pair + i);
            prefetch(map.space.ds + cell.pair + i);
        }
        const TensorView q = heads_as_rows(args.q), dout = heads_as_rows(args.dout);
        const Place at = place_of(cell.t);
        if (q.column == 1) prefetch_row(elements.address(q, at), p.head_dim * elements.bytes);
        if (dout.column == 1) prefetch_row(elements.address(dout, at), p.head_dim_v * elements.bytes);
    }

    void add_cell(Cell cell, int64_t begin, int64_t end, Sums dk, Sums dv) {
        Rows q{}, dout{};
        for (const int last = cell.to; next_piece(cell, last, begin, end); cell.from = cell.to) {
            if (!q.x) {
                const Place heads = place_of(cell.t);
                q = load_padded(elements, heads_as_rows(args.q), heads, int(p.head_dim), lane.q);
                dout = load_padded(elements, heads_as_rows(args.dout), heads, int(p.head_dim_v), lane.dout);
            }
            if (cell.t.heads == 1) {
                add_products<true>(map.space.ds + cell.pair, cell, q, columns, dk);
                add_products<true>(map.space.p + cell.pair, cell, dout, columns_v, dv);
            } else {
                add_products<false>(map.space.ds + cell.pair, cell, q, columns, dk);
                add_products<false>(map.space.p + cell.pair, cell, dout, columns_v, dv);
            }
        }
    }

    // Keys from cell.from on that lie in [begin, end) one after the other.
    bool next_piece(Cell& cell, int last, int64_t begin, int64_t end) const {
        cell.to = last;
        if (!p.call_lists.at_run_time()) return cell.from < last;
        const auto owned = [&](int i) { return cell.keys.at[i] >= begin && cell.keys.at[i] < end; };
        while (cell.from < last && !owned(cell.from)) ++cell.from;
        for (cell.to = cell.from; cell.to < last && owned(cell.to);) ++cell.to;
        return cell.from < last;
    }

    // sums[key] += weight[head][key] x[head], N vectors of columns at a time, from `first` on. Those of the first head,
    // which may be alone, wait in registers. Several heads are added up before they meet the sum of earlier rows: each
    // rounding then is one of their small sum, not of the large one.
    template <bool is_alone, int N = 8>
    void add_products(const Real* weight, const Cell& cell, Rows x, int width, Sums sums, int first = 0) {
        for (; width - first >= N * lanes; first += N * lanes) {
            Vec part[N], sum[N];
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) part[j] = load(x.x + first + j * lanes);
            for (int i = cell.from; i < cell.to; ++i) {
                Real* to = sums[cell.keys.at[i]] + first;
                const Vec w = set1(weight[i]);
#pragma GCC unroll 8
                for (int j = 0; j < N; ++j) sum[j] = is_alone ? fma(w, part[j], load(to + j * lanes)) : w * part[j];
                for (int head = 1; !is_alone && head < cell.t.heads; ++head) {
                    const Vec w = set1(weight[head * cell.keys.count + i]);
                    const Real* row = x.x + head * x.ld + first;
#pragma GCC unroll 8
                    for (int j = 0; j < N; ++j) sum[j] = fma(w, load(row + j * lanes), sum[j]);
                }
#pragma GCC unroll 8
                for (int j = 0; j < N; ++j) store(to + j * lanes, is_alone ? sum[j] : load(to + j * lanes) + sum[j]);
            }
        }
        if constexpr (N > 1)
            if (first < width) add_products<is_alone, N / 2>(weight, cell, x, width, sums, first);
    }

    void write(int64_t plane, int64_t begin, int64_t end, Sums dk, Sums dv) {
        const Place at{{0, 1, 0, nullptr}, plane / p.heads_kv, plane % p.heads_kv, 0, 0};
        for (int64_t key = begin; key < end; ++key) {
            elements.store_row(dk[key], int(p.head_dim), 1.f, args.dk, at, int(key));
            if (p.value_in_key) continue;
            elements.store_row(dv[key], int(p.head_dim_v), 1.f, args.dv, at, int(key));
        }
    }
};

}  // namespace
}  // namespace spattn::cpu
