// SPDX-License-Identifier: MIT
// Attention over token lists, backward, in the two forms of gather_forward.h and in waves (gather_space.h).
//
//     one tile of heads, one query row    s, p = exp2(scale_log2 s - lse log2(e)), dp = dO . v, ds = scale p (dp - delta)
//                                         dQ += ds . K; p and ds go to the store
//     then, by owners                     dV[key] += p dO     dK[key] += ds q        row after row of the wave
//
// Owners are, with heads in lanes, 64 columns of dK or dV: a row's heads are summed by a product [keys][heads] x
// [heads][64], whose rows are added where the keys lie. With dims in lanes they are ranges of keys whose dK and dV stay
// in the cache. Scale is in ds, so that dK and dV may be summed into one where values are columns of keys.
#pragma once

#include "cpu/generic/gather_space.h"
#include "cpu/generic/gathered_rows.h"

namespace spattn::cpu {
namespace {

constexpr int owned_columns = 64;
constexpr int64_t owned_bytes = 1 << 19;  // of dK and dV that a range of keys keeps in the cache

inline void zero(Real* x, int64_t count) { __builtin_memset(x, 0, size_t(count) * sizeof(Real)); }

struct RowStats {
    Real minus_lse, delta;  // the former in units of log2
    double dsink;           // the row's part
};

// Of query head t.head + head. A row that saw nothing has p = 0, and its dout is not read; with a sink, its lse is z and
// dlse counts.
template <class T>
inline RowStats row_stats(const BackwardArgs& args, const HeadTile& t, int head, bool is_empty) {
    const auto row = [&](const TensorView& x) {
        return t.batch * x.batch + (t.head + head) * x.head + t.row * x.row;
    };
    const float lse = ((const float*)args.lse.data)[row(args.lse)];
    if (lse == -INFINITY) return {-INFINITY, 0.f, 0};
    const T *out = (const T*)args.out.data + row(args.out), *dout = (const T*)args.dout.data + row(args.dout);
    Real delta = is_empty ? 0.f : dot(out, args.out.column, dout, args.dout.column, int(args.problem->head_dim_v));
    if (args.dlse.data) delta -= ((const float*)args.dlse.data)[row(args.dlse)];
    const double sink = sink_of(args.sink_logits, t.head + head);
    return {Real(-log2_e * lse), delta, sink == -INFINITY ? 0 : -exp(sink - double(lse)) * double(delta)};
}

// From products q . k and dO . v to p and ds.
struct Differentiation {
    const bool is_capped;
    const SoftcapFactors cap;
    const Real scale, scale_log2;

    explicit Differentiation(const Problem& p)
        : is_capped(p.softcap != 0),
          cap(softcap_factors(p)),
          scale(Real(p.scale)),
          scale_log2(is_capped ? cap.out : Real(p.scale * log2_e)) {}

    struct Result {
        Vec p, ds;
    };
    Result at(Vec s, Vec dp, Vec minus_lse, Vec delta) const {
        const Capped capped = is_capped ? capped_tanh(s * set1(cap.in)) : Capped{s, s};
        const Vec p = exp2(fma(capped.tanh, set1(scale_log2), minus_lse)), ds = set1(scale) * p * (dp - delta);
        return {p, is_capped ? ds * capped.slope : ds};
    }
};

// ---- heads in lanes -----------------------------------------------------------------------------------------------

template <class T>
struct HeadsBackward {
    static constexpr bool heads_in_lanes = true;
    using Map = WaveMap<heads_in_lanes>;
    struct Scratch {
        Real *q, *dout, *k, *v;  // [head_dim][width], [head_dim_v][width], [chunk][columns], [chunk][columns_v]
        Real *dq, *row;          // [head_dim][width], [width][widest]
        Real *lse, *delta;       // [width]
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
        lane.sums = carver.take<Real>(int64_t(gather_chunk) * owned_columns);
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    const BackwardArgs& args;
    const Problem& p;
    const Map& map;
    Scratch lane;
    const Differentiation differentiation;
    TensorView q_heads, dout_heads, dq_heads;

    HeadsBackward(const BackwardArgs& a, const Map& m, uintptr_t scratch)
        : args(a),
          p(*a.problem),
          map(m),
          differentiation(p),
          q_heads(heads_as_rows(a.q)),
          dout_heads(heads_as_rows(a.dout)),
          dq_heads(heads_as_rows(a.dq)) {
        Carver carver{scratch};
        lane = carve(carver, p);
    }

    void tile(const HeadTile& t, Keys keys) {
        const int width = round_up(t.heads, lanes), ld = columns_of(p);
        zero(lane.dq, p.head_dim * width);
        if (keys.count > 0) {
            pack_transposed<T>(q_heads, place_of(t), int(p.head_dim), 1.f, lane.q, width, lane.row);
            pack_transposed<T>(dout_heads, place_of(t), int(p.head_dim_v), 1.f, lane.dout, width, lane.row);
        }
        for (int i = 0; i < width; ++i) lane.lse[i] = -INFINITY, lane.delta[i] = 0.f;
        for (int i = 0; i < t.heads; ++i) {
            const RowStats stats = row_stats<T>(args, t, i, keys.count == 0);
            lane.lse[i] = stats.minus_lse, lane.delta[i] = stats.delta;
            map.keep_dsink(t, i, stats.dsink);
        }
        const int64_t first = map.first_pair(t);
        for (int64_t i = 0; i < keys.count; i += gather_chunk)
            visit(place_of(t, keys.at + i, least(gather_chunk, keys.count - i)), width, first + i * width);
        transpose({lane.dq, width}, int(p.head_dim), t.heads, 1.f, lane.row, ld);
        store_rows<T>(lane.row, ld, 1.f, int(p.head_dim), dq_heads, place_of(t));
    }

    void visit(const Place& at, int width, int64_t first) {
        Real *s = map.space.p + first, *ds = map.space.ds + first;
        const Rows k = load_rows<T>(args.k, at, int(p.head_dim), lane.k);
        const Rows v = p.value_in_key ? k : load_rows<T>(args.v, at, int(p.head_dim_v), lane.v);
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

    // ---- owners: columns of dk, then of dv ----

    static int64_t slices(int64_t columns) { return (columns + owned_columns - 1) / owned_columns; }
    static int64_t owners(const Problem& p) {
        return slices(p.head_dim) + (p.value_in_key ? 0 : slices(p.head_dim_v));
    }

    void own(int64_t plane, int64_t owner) {
        const bool of_keys = owner < slices(p.head_dim);
        const int first = int(of_keys ? owner : owner - slices(p.head_dim)) * owned_columns;
        const int64_t ld = of_keys ? columns_of(p) : values_of(p), slot = plane - map.wave.plane;
        const int count = least(owned_columns, (of_keys ? p.head_dim : p.head_dim_v) - first);
        Real* sums = (of_keys ? map.space.dk : map.space.dv) + slot * p.seq_k * ld + first;
        if (map.wave.row == 0)
            for (int64_t key = 0; key < p.seq_k; ++key) zero(sums + key * ld, round_up(count, lanes));
        for (int64_t row = 0; row < map.wave.rows; ++row) {
            if (of_keys) add_row(plane, row, q_heads, map.space.ds, first, count, sums, ld);
            const int values = least(count, p.head_dim_v - first);
            if ((!of_keys || p.value_in_key) && values > 0)
                add_row(plane, row, dout_heads, map.space.p, first, values, sums, ld);
        }
        if (map.wave.row + map.wave.rows == p.seq_q)
            write(of_keys ? args.dk : args.dv, plane, first, count, sums, ld);
    }

    // sums[key] += weights[key][head] x[head], the columns of one slice.
    void add_row(int64_t plane, int64_t row, TensorView x, const Real* weights, int first, int columns, Real* sums,
                 int64_t ld) {
        x.data = (T*)x.data + first * x.column;
        const int64_t tiles = map.tiling.tiles();
        const int vectors = (columns + lanes - 1) / lanes, width = vectors * lanes;
        for (int64_t n = 0; n < tiles; ++n) {
            const HeadTile t = map.tiling.at(p, plane, map.wave.row + row, 1, n);
            const Keys keys = map.keys(t);
            if (keys.count == 0) continue;
            const Rows right = load_padded<T>(x, place_of(t), columns, lane.row);
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

    void write(TensorView x, int64_t plane, int first, int count, const Real* sums, int64_t ld) {
        x.data = (T*)x.data + first * x.column;
        const Place at{{0, 1, 0, nullptr}, plane / p.heads_kv, plane % p.heads_kv, 0, 0};
        for (int64_t key = 0; key < p.seq_k; ++key)
            store_row(sums + key * ld, count, 1.f, address<T>(x, at, int(key)), x.column);
    }
};

// ---- dims in lanes ------------------------------------------------------------------------------------------------

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
        for (int i = 0; i < t.heads; ++i) {
            lane.stats[i] = row_stats<T>(args, t, i, keys.count == 0);
            map.keep_dsink(t, i, lane.stats[i].dsink);
        }
        const int64_t first = map.first_pair(t);
        for (int64_t i = 0; i < keys.count; i += lanes) {
            prefetch_keys<T>(args, args.k, args.v, t, keys, i + lanes);
            visit(t, place_of(t, keys.at + i, least(lanes, keys.count - i)), first + i, keys.count);
        }
        store_rows<T>(lane.dq, columns, 1.f, int(p.head_dim), heads_as_rows(args.dq), place_of(t));
    }

    // One vector of keys; a head's pairs lie `stride` apart from the next head's.
    void visit(const HeadTile& t, const Place& at, int64_t first, int64_t stride) {
        k.load(args.k, at, int(p.head_dim), lane.k);
        if (!p.value_in_key) v.load(args.v, at, int(p.head_dim_v), lane.v);
        const Real* const* values = p.value_in_key ? k.row : v.row;
        for (int head = 0; head < t.heads; ++head) {
            const RowStats stats = lane.stats[head];
            Real weights[lanes] = {};
            dots(lane.q + head * columns, k.row, at.count, columns, weights);
            dots(lane.dout + head * columns_v, values, at.count, columns_v, lane.weights);
            const auto [e, de] =
                differentiation.at(load(weights), load(lane.weights), set1(stats.minus_lse), set1(stats.delta));
            store(weights, e);
            store(lane.weights, de);
            const int64_t to = first + head * stride;
            __builtin_memcpy(map.space.p + to, weights, size_t(at.count) * sizeof(Real));
            __builtin_memcpy(map.space.ds + to, lane.weights, size_t(at.count) * sizeof(Real));
            add_weighted_rows(lane.weights, k.row, at.count, columns, lane.dq + head * columns);
        }
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

// ---- phases -------------------------------------------------------------------------------------------------------

template <class Lane>
struct GatherBackwardRun {
    const BackwardArgs* args;
    typename Lane::Map map;
    int64_t next;

    Lane lane(int64_t index) const {
        return {*args, map, (uintptr_t)(map.space.scratch + index * map.space.lane_bytes)};
    }
};

template <class Lane>
inline void gather_backward_tiles(void* argument, int64_t index) {
    auto& run = *(GatherBackwardRun<Lane>*)argument;
    const auto& map = run.map;
    const Problem& p = map.p;
    Lane lane = run.lane(index);
    const int64_t tiles = map.wave.planes * map.wave.rows * map.tiling.tiles();
    for (int64_t n; (n = next_of(run.next)) < tiles;) {
        const HeadTile t = map.tiling.at(p, map.wave.plane, map.wave.row, map.wave.rows, n);
        const Keys keys = read_keys(*run.args, t.batch * p.heads_q + t.head, t.row, lane.lane.keys);
        if (map.writes_list(t)) map.write_list(t, keys);
        lane.tile(t, keys);
    }
}

template <class Lane>
inline void gather_backward_owners(void* argument, int64_t index) {
    auto& run = *(GatherBackwardRun<Lane>*)argument;
    Lane lane = run.lane(index);
    const int64_t owners = Lane::owners(run.map.p);
    for (int64_t n; (n = next_of(run.next)) < run.map.wave.planes * owners;)
        lane.own(run.map.wave.plane + n / owners, n % owners);
}

template <class Lane>
void gather_backward(const BackwardArgs& args) {
    const Problem& p = *args.problem;
    Carver carver{(uintptr_t)args.workspace};
    const GatherSpace space = carve_gather<Lane>(carver, p, args.parallel->lanes());
    const Tiling tiling(args);
    GatherBackwardRun<Lane> run{&args, {args, p, space, tiling, {}}, 0};
    while (run.map.next()) {
        run.next = 0;
        args.parallel->run(gather_backward_tiles<Lane>, &run);
        run.next = 0;
        args.parallel->run(gather_backward_owners<Lane>, &run);
    }
    for (int64_t head = 0; args.dsink_logits.data && head < p.heads_q; ++head)
        ((float*)args.dsink_logits.data)[head * args.dsink_logits.head] = float(run.map.dsink_of(head));
}

template <class Lane>
size_t gather_backward_workspace(const Problem& p, const LayoutView&, const TasksView&, int num_lanes) {
    Carver carver{0};
    carve_gather<Lane>(carver, p, num_lanes);
    return carver.used;
}

}  // namespace
}  // namespace spattn::cpu
