// SPDX-License-Identifier: MIT
// The form of gather_backward.h whose lanes are dims. Owners are ranges of keys, whose dK and dV stay in the cache.
#pragma once

#include "cpu/generic/gather_backward.h"
#include "cpu/generic/gathered_rows.h"

namespace spattn::cpu {
namespace {

constexpr int64_t owned_bytes = 1 << 19;  // of dK and dV that a range of keys keeps in the cache

template <class T>
struct DimsBackward {
    static constexpr bool heads_in_lanes = false;
    using Map = WaveMap<heads_in_lanes>;
    struct Scratch {
        Real *q, *dout, *k, *v;  // [heads][columns], [heads][columns_v], [lanes][columns], [lanes][columns_v]
        Real *dq, *weights;      // [heads][columns], [lanes]
        RowStats* stats;         // [heads]
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p) {
        const int64_t heads = most_tile_heads(p);
        Scratch lane;
        lane.q = carver.take<Real>(heads * columns_of(p));
        lane.dout = carver.take<Real>(heads * values_of(p));
        lane.k = carver.take<Real>(int64_t(lanes) * columns_of(p));
        lane.v = carver.take<Real>(int64_t(lanes) * values_of(p));
        lane.dq = carver.take<Real>(heads * columns_of(p));
        lane.weights = carver.take<Real>(lanes);
        lane.stats = carver.take<RowStats>(heads);
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    const BackwardArgs& args;
    const Problem& p;
    const Map& map;
    Scratch lane;
    GatheredRows<T> k, v;
    const int columns, columns_v;
    const Differentiation differentiation;

    DimsBackward(const BackwardArgs& a, const Map& m, uintptr_t scratch)
        : args(a), p(*a.problem), map(m), columns(columns_of(p)), columns_v(values_of(p)), differentiation(p) {
        Carver carver{scratch};
        lane = carve(carver, p);
    }

    void load_queries(const HeadTile& t) {
        copy_rows<T>(heads_as_rows(args.q), place_of(t), int(p.head_dim), lane.q);
        copy_rows<T>(heads_as_rows(args.dout), place_of(t), int(p.head_dim_v), lane.dout);
    }

    void tile(const HeadTile& t, Keys keys) {
        prefetch_keys<T>(args, args.k, args.v, t, keys, 0);
        zero(lane.dq, int64_t(t.heads) * columns);
        if (keys.count > 0) load_queries(t);
        for (int i = 0; i < t.heads; ++i) lane.stats[i] = row_stats<T>(args, t, i, keys.count == 0);
        const int64_t first = map.first_pair(t);
        for (int64_t i = 0; i < keys.count; i += lanes) {
            prefetch_keys<T>(args, args.k, args.v, t, keys, i + lanes);
            visit(t, place_of(t, keys.at + i, least(lanes, keys.count - i)), first + i, keys.count);
        }
        for (int i = 0; i < t.heads; ++i) correct(t, i, first + i * keys.count, keys.count);
        store_rows<T>(lane.dq, columns, 1.f, int(p.head_dim), heads_as_rows(args.dq), place_of(t));
    }

    // One vector of keys; a head's pairs lie `stride` apart from the next head's.
    void visit(const HeadTile& t, const Place& at, int64_t first, int64_t stride) {
        k.load(args.k, at, int(p.head_dim), lane.k);
        if (!p.value_in_key) v.load(args.v, at, int(p.head_dim_v), lane.v);
        const GatheredRows<T>& values = p.value_in_key ? k : v;
        for (int head = 0; head < t.heads; ++head) {
            const RowStats stats = lane.stats[head];
            Real weights[lanes] = {};
            dots(lane.q + head * columns, k, columns, weights);
            dots(lane.dout + head * columns_v, values, columns_v, lane.weights);
            const auto [e, de] =
                differentiation.at(load(weights), load(lane.weights), set1(stats.minus_lse), set1(stats.delta));
            store(weights, e);
            store(lane.weights, de);
            const int64_t to = first + head * stride;
            __builtin_memcpy(map.space.p + to, weights, size_t(at.count) * sizeof(Real));
            __builtin_memcpy(map.space.ds + to, lane.weights, size_t(at.count) * sizeof(Real));
            add_weighted_rows(lane.weights, k, columns, lane.dq + head * columns);
        }
    }

    void correct(const HeadTile& t, int head, int64_t first, int64_t count) {
        const RowStats& stats = lane.stats[head];
        const double factor = stats.correction(lse_is_rounded ? sum(map.space.p + first, count) : 0);
        map.keep_dsink(t, head, stats.dsink * factor);
        if (!lse_is_rounded) return;
        scale(Real(factor), map.space.p + first, count);
        scale(Real(factor), map.space.ds + first, count);
        scale(Real(factor), lane.dq + head * columns, columns);
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

    static int64_t range(const Problem& p) {
        const int64_t row = (columns_of(p) + values_of(p)) * int64_t(sizeof(Real));
        return most_of(64, owned_bytes / row);
    }
    static int64_t owners(const Problem& p) { return (p.seq_k + range(p) - 1) / range(p); }

    void own(int64_t plane, int64_t owner) {
        const int64_t begin = owner * range(p), end = least_of(begin + range(p), p.seq_k);
        const int64_t slot = plane - map.wave.plane;
        Real *dk = map.space.dk + slot * p.seq_k * columns, *dv = map.space.dv + slot * p.seq_k * columns_v;
        if (map.wave.row == 0) {
            zero(dk + begin * columns, (end - begin) * columns);
            if (!p.value_in_key) zero(dv + begin * columns_v, (end - begin) * columns_v);
        }
        const int64_t tiles = map.tiling.tiles();
        for (int64_t n = 0; n < map.wave.rows * tiles; ++n)
            add_tile(map.tiling.at(p, plane, map.wave.row, map.wave.rows, n), begin, end, dk, dv);
        if (map.wave.row + map.wave.rows == p.seq_q) write(plane, begin, end, dk, dv);
    }

    void add_tile(const HeadTile& t, int64_t begin, int64_t end, Real* dk, Real* dv) {
        const Keys keys = map.keys(t);
        // The plan's lists increase: the range is one piece of them. A run's are searched from end to end.
        const bool sorted = !p.run_lists.at_run_time();
        const int64_t from = sorted ? lower_bound(keys, begin) : 0, to = sorted ? lower_bound(keys, end) : keys.count;
        Rows q{}, dout{};
        const int64_t first = map.first_pair(t);
        for (int64_t i = from; i < to; ++i) {
            const int64_t key = keys.at[i];
            if (key < begin || key >= end) continue;
            if (!q.x) {
                q = load_padded<T>(heads_as_rows(args.q), place_of(t), int(p.head_dim), lane.q);
                dout = load_padded<T>(heads_as_rows(args.dout), place_of(t), int(p.head_dim_v), lane.dout);
            }
            for (int head = 0; head < t.heads; ++head) {
                const int64_t pair = first + head * keys.count + i;
                add_scaled(map.space.ds[pair], q.x + head * q.ld, dk + key * columns, columns);
                Real* values = p.value_in_key ? dk + key * columns : dv + key * columns_v;
                add_scaled(map.space.p[pair], dout.x + head * dout.ld, values, columns_v);
            }
        }
    }

    static int64_t lower_bound(Keys keys, int64_t key) {
        int64_t low = 0, high = keys.count;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            keys.at[middle] < key ? low = middle + 1 : high = middle;
        }
        return low;
    }

    static void add_scaled(Real factor, const Real* x, Real* sum, int count) {
        const Vec f = set1(factor);
        for (int c = 0; c < count; c += lanes) store(sum + c, fma(f, load(x + c), load(sum + c)));
    }

    void write(int64_t plane, int64_t begin, int64_t end, const Real* dk, const Real* dv) {
        const Place at{{0, 1, 0, nullptr}, plane / p.heads_kv, plane % p.heads_kv, 0, 0};
        for (int64_t key = begin; key < end; ++key) {
            store_row(dk + key * columns, int(p.head_dim), 1.f, address<T>(args.dk, at, int(key)), args.dk.column);
            if (p.value_in_key) continue;
            store_row(dv + key * columns_v, int(p.head_dim_v), 1.f, address<T>(args.dv, at, int(key)), args.dv.column);
        }
    }
};

}  // namespace
}  // namespace spattn::cpu
