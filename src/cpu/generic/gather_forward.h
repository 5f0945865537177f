// SPDX-License-Identifier: MIT
// Attention over token lists, forward: one query row at a time, its keys gathered where they lie. Nothing is visited
// that is not listed. Two forms, for what fills the vector lanes:
//
//     heads    a tile of up to 64 query heads shares a list (multi-query latent attention: 128 heads on one key):
//                  sT[key][head] = K . qT      oT[head_dim_v][head] += VT . pT      small products, K and V packed once
//     dims     a head, or a few:
//                  s[key] = q . k              a dot product a key, `lanes` keys at once
//                  out[dim] += p[key] v[key]   a running sum in registers
//
// Softmax is that of the block kernels: online, base 2, the maximum lags. heads takes 64 keys at once, dims `lanes`:
// while it works on these, the rows of the next are on their way from memory, which is what binds there, for a key moves
// 4 (head_dim + head_dim_v) bytes for as many flops.
#pragma once

#include "cpu/generic/gather_lists.h"
#include "cpu/generic/sums.h"

namespace spattn::cpu {
namespace {

inline int columns_of(const Problem& p) { return round_up(p.head_dim, lanes); }
inline int values_of(const Problem& p) { return round_up(p.head_dim_v, lanes); }
inline int most_tile_heads(const Problem& p) { return least(most_heads, p.group()); }
inline int64_t list_tokens(const Problem& p) { return p.run_lists.at_run_time() ? p.run_lists.tokens() : 0; }

// What each head's softmax has come to. m, l and top are [heads]; what a form keeps out in is its own matter.
struct GatherState {
    Real *out, *m, *l, *top;
};

// Writes lse and the largest logit; returns what out is multiplied by.
inline Real end_head(const ForwardArgs& args, const HeadTile& t, int head, const GatherState& state) {
    const auto cell = [&](const TensorView& x) {
        return (float*)x.data + t.batch * x.batch + (t.head + head) * x.head + t.row * x.row;
    };
    const RowEnd end = end_row(state.m[head], state.l[head], sink_of(args.sink_logits, t.head + head));
    if (args.lse.data) *cell(args.lse) = end.lse();
    if (args.max_logits.data) *cell(args.max_logits) = float(double(state.top[head]) * ln_2);
    return end.factor;
}

// What queries are multiplied by: products are then scores in units of log2, or what capped_tanh takes.
inline Real query_factor(const Problem& p) {
    return p.softcap != 0 ? softcap_factors(p).in : Real(p.scale * log2_e);
}

// ---- heads in lanes -----------------------------------------------------------------------------------------------

template <class T>
struct HeadsForward {
    struct Scratch {
        Real *q, *s, *k, *v;  // [head_dim][width], [chunk][width], [chunk][columns], [chunk][columns_v]
        GatherState state;    // out [head_dim_v][width]
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p) {
        const int64_t width = round_up(most_tile_heads(p), lanes);
        const int widest = columns_of(p) > values_of(p) ? columns_of(p) : values_of(p);
        Scratch lane;
        lane.q = carver.take<Real>(p.head_dim * width);
        lane.s = carver.take<Real>(gather_chunk * width);
        lane.k = carver.take<Real>(gather_chunk * widest);
        lane.v = carver.take<Real>(gather_chunk * values_of(p));
        lane.state.out = carver.take<Real>(p.head_dim_v * width);
        lane.state.m = carver.take<Real>(3 * width);
        lane.state.l = lane.state.m + width, lane.state.top = lane.state.l + width;
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    const ForwardArgs& args;
    const Problem& p;
    Scratch lane;
    TensorView q_heads, out_heads;
    int width = 0;  // of the tile at hand, whole vectors

    HeadsForward(const ForwardArgs& a, uintptr_t scratch)
        : args(a), p(*a.problem), q_heads(heads_as_rows(a.q)), out_heads(heads_as_rows(a.out)) {
        Carver carver{scratch};
        lane = carve(carver, p);
    }

    void tile(const HeadTile& t) {
        const Keys keys = read_keys(args, t.batch * p.heads_q + t.head, t.row, lane.keys);
        const GatherState& state = lane.state;
        width = round_up(t.heads, lanes);
        for (int64_t i = 0; i < p.head_dim_v * width; ++i) state.out[i] = 0.f;
        for (int i = 0; i < width; ++i) state.m[i] = lowest, state.l[i] = 0.f, state.top[i] = -INFINITY;
        if (keys.count > 0)
            pack_transposed<T>(q_heads, place_of(t), int(p.head_dim), query_factor(p), lane.q, width, lane.k);
        for (int64_t i = 0; i < keys.count; i += gather_chunk)
            visit(place_of(t, keys.at + i, least(gather_chunk, keys.count - i)));
        finish(t);
    }

    void visit(const Place& at) {
        const Rows k = load_rows<T>(args.k, at, int(p.head_dim), lane.k);
        multiply<Left::rows, Store::set>({k.x, k.ld, lane.q, width, lane.s, width, int(p.head_dim)}, at.count,
                                         width / lanes);
        if (p.softcap != 0) cap_scores(lane.s, int64_t(at.count) * width, softcap_factors(p).out);
        for (int i = 0; i < width; i += lanes) softmax(at.count, i);
        const Rows v = p.value_in_key ? k : load_rows<T>(args.v, at, int(p.head_dim_v), lane.v);
        multiply<Left::transposed, Store::add>({v.x, v.ld, lane.s, width, lane.state.out, width, at.count},
                                               int(p.head_dim_v), width / lanes);
    }

    // Of one vector of heads.
    void softmax(int count, int first) {
        const GatherState& state = lane.state;
        Vec top = set1(-INFINITY), sum = set1(0.f);
        for (int r = 0; r < count; ++r) top = max(load(lane.s + r * width + first), top);
        store(state.top + first, max(top, load(state.top + first)));
        if (any_above(top, load(state.m + first) + set1(lag))) raise(first, top);
        const Vec m = load(state.m + first);
        for (int r = 0; r < count; ++r) {
            Real* x = lane.s + r * width + first;
            const Vec e = exp2(load(x) - m);
            sum = sum + e;
            store(x, e);
        }
        store(state.l + first, load(state.l + first) + sum);
    }

    void raise(int first, Vec top) {
        const GatherState& state = lane.state;
        const Vec old = load(state.m + first), m = max(top, old), keep = exp2(old - m);
        store(state.m + first, m);
        store(state.l + first, load(state.l + first) * keep);
        for (int64_t d = 0; d < p.head_dim_v; ++d)
            store(state.out + d * width + first, load(state.out + d * width + first) * keep);
    }

    void finish(const HeadTile& t) {
        const GatherState& state = lane.state;
        const int ld = values_of(p);
        for (int i = 0; i < width; ++i) lane.s[i] = i < t.heads ? end_head(args, t, i, state) : 0.f;
        for (int64_t d = 0; d < p.head_dim_v; ++d)
            for (int i = 0; i < width; i += lanes)
                store(state.out + d * width + i, load(state.out + d * width + i) * load(lane.s + i));
        transpose({state.out, width}, int(p.head_dim_v), t.heads, 1.f, lane.k, ld);
        store_rows<T>(lane.k, ld, 1.f, int(p.head_dim_v), out_heads, place_of(t));
    }
};

// ---- dims in lanes ------------------------------------------------------------------------------------------------

// Rows of up to `lanes` listed keys: where they lie, or copied. The last row fills up what is missing.
template <class T>
struct GatheredRows {
    const Real* row[lanes];
    int count = 0;

    void load(const TensorView& x, const Place& at, int columns, Real* scratch) {
        count = at.count;
        const bool in_place = __is_same(T, Real) && x.column == 1 && columns % lanes == 0;
        const Rows copy = in_place ? Rows{} : copy_rows<T>(x, at, columns, scratch);
        for (int i = 0; i < count; ++i) row[i] = in_place ? (const Real*)address<T>(x, at, i) : copy.x + i * copy.ld;
        for (int i = count; i < lanes; ++i) row[i] = row[count - 1];
    }
};

// a . b for `lanes` rows b.
inline Vec dots(const Real* a, const Real* const* b, int columns) {
    Vec acc[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) acc[i] = set1(0.f);
    for (int c = 0; c < columns; c += lanes) {
        const Vec x = load(a + c);
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) acc[i] = fma(x, load(b[i] + c), acc[i]);
    }
    return sums(acc);
}

// out += sum of weight[i] rows[i], N vectors of columns from `first` on.
template <int N>
inline void add_weighted(const Real* weight, const Real* const* rows, int count, int first, Real* out) {
    Vec acc[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[j] = set1(0.f);
    for (int i = 0; i < count; ++i) {
        const Vec w = set1(weight[i]);
        const Real* row = rows[i] + first;
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[j] = fma(w, load(row + j * lanes), acc[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(out + first + j * lanes, load(out + first + j * lanes) + acc[j]);
}

template <int N = 8>
inline void add_weighted_rows(const Real* weight, const Real* const* rows, int count, int columns, Real* out,
                              int first = 0) {
    for (; columns - first >= N * lanes; first += N * lanes) add_weighted<N>(weight, rows, count, first, out);
    if constexpr (N > 1)
        if (first < columns) add_weighted_rows<N / 2>(weight, rows, count, columns, out, first);
}

constexpr int line_bytes = 64;
inline void prefetch_row(const void* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += line_bytes) __builtin_prefetch((const char*)row + at);
}

// Of the keys [i, i + lanes) of a list, rows of k and v.
template <class T>
inline void prefetch_keys(const RunArgs& args, const TensorView& k, const TensorView& v, const HeadTile& t, Keys keys,
                          int64_t i) {
    const Problem& p = *args.problem;
    for (const int64_t end = i + lanes < keys.count ? i + lanes : keys.count; i < end; ++i) {
        const Place at = place_of(t, keys.at + i, 1);
        if (k.column == 1) prefetch_row(address<T>(k, at), p.head_dim * int64_t(sizeof(T)));
        if (v.column == 1 && !p.value_in_key) prefetch_row(address<T>(v, at), p.head_dim_v * int64_t(sizeof(T)));
    }
}

template <class T>
struct DimsForward {
    struct Scratch {
        Real *q, *s, *k, *v;       // [heads][columns], [lanes], [lanes][columns], [lanes][columns_v]
        GatherState state;         // out [heads][columns_v]
        Real *sum_each, *top_each;  // [heads][lanes]: l and top before lanes are taken together
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p) {
        const int64_t heads = most_tile_heads(p);
        Scratch lane;
        lane.q = carver.take<Real>(heads * columns_of(p));
        lane.s = carver.take<Real>(lanes);
        lane.k = carver.take<Real>(int64_t(lanes) * columns_of(p));
        lane.v = carver.take<Real>(int64_t(lanes) * values_of(p));
        lane.state.out = carver.take<Real>(heads * values_of(p));
        lane.state.m = carver.take<Real>(3 * heads);
        lane.state.l = lane.state.m + heads, lane.state.top = lane.state.l + heads;
        lane.sum_each = carver.take<Real>(heads * lanes);
        lane.top_each = carver.take<Real>(heads * lanes);
        lane.keys = carver.take<int32_t>(list_tokens(p));
        return lane;
    }

    const ForwardArgs& args;
    const Problem& p;
    Scratch lane;
    GatheredRows<T> k, v;
    const int columns, columns_v;
    const SoftcapFactors cap;  // read where the problem has one

    DimsForward(const ForwardArgs& a, uintptr_t scratch)
        : args(a), p(*a.problem), columns(columns_of(p)), columns_v(values_of(p)), cap(softcap_factors(p)) {
        Carver carver{scratch};
        lane = carve(carver, p);
    }

    void tile(const HeadTile& t) {
        const Keys keys = read_keys(args, t.batch * p.heads_q + t.head, t.row, lane.keys);
        const GatherState& state = lane.state;
        prefetch_keys<T>(args, args.k, args.v, t, keys, 0);
        for (int i = 0; i < t.heads * columns_v; ++i) state.out[i] = 0.f;
        for (int i = 0; i < t.heads; ++i) state.m[i] = lowest;
        for (int i = 0; i < t.heads * lanes; ++i) lane.sum_each[i] = 0.f, lane.top_each[i] = -INFINITY;
        if (keys.count > 0) load_queries(t);
        for (int64_t i = 0; i < keys.count; i += lanes) {
            prefetch_keys<T>(args, args.k, args.v, t, keys, i + lanes);
            visit(t, place_of(t, keys.at + i, least(lanes, keys.count - i)));
        }
        finish(t);
    }

    void load_queries(const HeadTile& t) {
        copy_rows<T>(heads_as_rows(args.q), place_of(t), int(p.head_dim), lane.q);
        const Vec scale = set1(query_factor(p));
        for (int i = 0; i < t.heads * columns; i += lanes) store(lane.q + i, load(lane.q + i) * scale);
    }

    // One vector of keys.
    void visit(const HeadTile& t, const Place& at) {
        k.load(args.k, at, int(p.head_dim), lane.k);
        if (!p.value_in_key) v.load(args.v, at, int(p.head_dim_v), lane.v);
        const Real* const* rows = p.value_in_key ? k.row : v.row;
        for (int head = 0; head < t.heads; ++head) {
            softmax(head, at.count, dots(lane.q + head * columns, k.row, columns));
            add_weighted_rows(lane.s, rows, at.count, columns_v, lane.state.out + head * columns_v);
        }
    }

    // scores becomes p, in lane.s.
    void softmax(int head, int count, Vec scores) {
        if (p.softcap != 0) scores = capped_tanh(scores).tanh * set1(cap.out);
        if (count < lanes) {
            store(lane.s, scores);
            for (int i = count; i < lanes; ++i) lane.s[i] = -INFINITY;
            scores = load(lane.s);
        }
        Real *sum = lane.sum_each + head * lanes, *top = lane.top_each + head * lanes, *m = lane.state.m + head;
        store(top, max(scores, load(top)));
        if (any_above(scores, set1(*m + lag))) raise(head, highest(top));
        const Vec e = exp2(scores - set1(*m));
        store(lane.s, e);
        store(sum, load(sum) + e);
    }

    static Real highest(const Real* x) {
        Real top = -INFINITY;
        for (int i = 0; i < lanes; ++i) top = x[i] > top ? x[i] : top;
        return top;
    }

    void raise(int head, Real top) {
        const Vec keep = exp2(set1(lane.state.m[head]) - set1(top));
        lane.state.m[head] = top;
        Real *sum = lane.sum_each + head * lanes, *out = lane.state.out + head * columns_v;
        store(sum, load(sum) * keep);
        for (int c = 0; c < columns_v; c += lanes) store(out + c, load(out + c) * keep);
    }

    void finish(const HeadTile& t) {
        const TensorView out = heads_as_rows(args.out);
        for (int i = 0; i < t.heads; ++i) {
            Real& l = lane.state.l[i] = 0.f;
            for (int j = 0; j < lanes; ++j) l += lane.sum_each[i * lanes + j];
            lane.state.top[i] = highest(lane.top_each + i * lanes);
            const Place at = {{t.head + i, 1, 1, nullptr}, t.batch, t.row, all_rows, all_rows};
            const Real factor = end_head(args, t, i, lane.state);
            store_rows<T>(lane.state.out + i * columns_v, columns_v, factor, int(p.head_dim_v), out, at);
        }
    }
};

// ---- phases -------------------------------------------------------------------------------------------------------

struct GatherForwardRun {
    const ForwardArgs* args;
    Tiling tiling;
    int64_t tiles, lane_bytes, next;
};

template <class Lane>
inline int64_t gather_lane_bytes(const Problem& p) {
    Carver carver{0};
    Lane::carve(carver, p);
    return int64_t(carver.used);
}

template <class Lane>
inline void gather_forward_tiles(void* argument, int64_t index) {
    GatherForwardRun& run = *(GatherForwardRun*)argument;
    const ForwardArgs& args = *run.args;
    Lane lane(args, (uintptr_t)args.workspace + uintptr_t(index * run.lane_bytes));
    for (int64_t n; (n = next_of(run.next)) < run.tiles;)
        lane.tile(run.tiling.at(*args.problem, 0, 0, args.problem->seq_q, n));
}

template <class Lane>
void gather_forward(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    const Tiling tiling(args);
    GatherForwardRun run{&args, tiling, p.batch * p.heads_kv * p.seq_q * tiling.tiles(), gather_lane_bytes<Lane>(p), 0};
    args.parallel->run(gather_forward_tiles<Lane>, &run);
}

template <class Lane>
size_t gather_forward_workspace(const Problem& p, const LayoutView&, const TasksView&, int num_lanes) {
    return size_t(gather_lane_bytes<Lane>(p) * num_lanes);
}

}  // namespace
}  // namespace spattn::cpu
