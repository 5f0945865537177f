// SPDX-License-Identifier: MIT
// The form of gather_forward.h whose lanes are heads: one query row at a time, 64 of its keys at once.
#pragma once

#include "cpu/generic/gather_forward.h"

namespace spattn::cpu {
namespace {

struct HeadsForward {
    static constexpr int heads_of_tile = most_heads;
    static constexpr bool reads_float8 = true;
    struct Scratch {
        Real *q, *s, *k, *v;  // [head_dim][width], [chunk][width], [chunk][columns], [chunk][columns_v]
        GatherState state;    // out [head_dim_v][width]
        int32_t* keys;
    };
    static Scratch carve(Carver& carver, const Problem& p, int) {
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
    const Elements& elements;
    const KeySource k_from, v_from;
    Scratch lane;
    TensorView q_heads, out_heads;
    int width = 0;  // of the tile at hand, whole vectors

    HeadsForward(const ForwardArgs& a, const Elements& e, uintptr_t scratch)
        : args(a), p(*a.problem), elements(e), k_from(KeySource::keys(a, e)), v_from(KeySource::values(a, e)),
          q_heads(heads_as_rows(a.q)), out_heads(heads_as_rows(a.out)) {
        Carver carver{scratch};
        lane = carve(carver, p, a.parallel->lanes());
    }

    static int64_t tiles_at_once(const Problem&, const Tiling&, int) { return 1; }
    void take(const Tiling& tiling, int64_t plane, int64_t begin, int64_t end) {
        for (; begin < end; ++begin) tile(tiling.at(p, plane, 0, p.seq_q, begin));
    }

    void tile(const HeadTile& t) {
        const Keys keys = read_keys(args, t.batch * p.heads_q + t.head, t.row, lane.keys);
        const GatherState& state = lane.state;
        width = round_up(t.heads, lanes);
        for (int64_t i = 0; i < p.head_dim_v * width; ++i) state.out[i] = 0.f;
        for (int i = 0; i < width; ++i) state.m[i] = lowest, state.l[i] = 0.f, state.top[i] = -INFINITY;
        if (keys.count > 0)
            pack_transposed(elements, q_heads, place_of(t), int(p.head_dim), query_factor(p), lane.q, width, lane.k);
        for (int64_t i = 0; i < keys.count; i += gather_chunk)
            visit(place_of(t, keys.at + i, least(gather_chunk, keys.count - i)));
        finish(t);
    }

    void visit(const Place& at) {
        const Rows k = load_keys(k_from, at, int(p.head_dim), lane.k, load_rows);
        multiply<Left::rows, Store::set>({k.x, k.ld, lane.q, width, lane.s, width, int(p.head_dim)}, at.count,
                                         width / lanes);
        if (p.softcap != 0) cap_scores(lane.s, int64_t(at.count) * width, softcap_factors(p).out);
        for (int i = 0; i < width; i += lanes) softmax(at.count, i);
        const Rows v = p.value_in_key ? k : load_keys(v_from, at, int(p.head_dim_v), lane.v, load_rows);
        multiply<Left::transposed, Store::add>({v.x, v.ld, lane.s, width, lane.state.out, width, at.count},
                                               int(p.head_dim_v), width / lanes);
    }

    // Scores of one vector of heads become p.
    void softmax(int count, int first) {
        const GatherState& state = lane.state;
        Vec top = set1(-INFINITY), sum = set1(0.f);
        for (int r = 0; r < count; ++r) top = max(load(lane.s + r * width + first), top);
        store(state.top + first, max(top, load(state.top + first)));
        raise(first, top);
        const Vec m = load(state.m + first);
        for (int r = 0; r < count; ++r) {
            Real* x = lane.s + r * width + first;
            const Vec e = exp2(load(x) - m);
            sum = sum + e;
            store(x, e);
        }
        store(state.l + first, load(state.l + first) + sum);
    }

    // Moves the maximum of the heads whose new one is beyond the lag: of those alone, for bits of one head must not
    // depend on the scores of another.
    void raise(int first, Vec top) {
        const GatherState& state = lane.state;
        const Vec old = load(state.m + first);
        const Bits moved = above(top, old + set1(lag));
        if (!any(moved)) return;
        const Vec m = select(moved, top, old), keep = exp2(old - m);
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
        store_rows(elements, lane.k, ld, 1.f, int(p.head_dim_v), out_heads, place_of(t));
    }
};

}  // namespace
}  // namespace spattn::cpu
