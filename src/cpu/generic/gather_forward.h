// SPDX-License-Identifier: MIT
// Attention over token lists, forward: the keys of a query row are gathered where they lie. Nothing is visited
// that is not listed. Two forms, for what fills the vector lanes:
//
//     heads    a tile of up to 64 query heads shares a list (multi-query latent attention: 128 heads on one key):
//                  sT[key][head] = K . qT      oT[head_dim_v][head] += VT . pT      small products, K and V packed once
//     dims     a head, or a few:
//                  s[key] = q . k              a dot product a key
//                  out[dim] += p[key] v[key]   a running sum in registers
//
// heads takes one query row at a time, 64 keys at once, with the softmax of the block kernels: online, base 2, the
// maximum lags. Where units multiply bf16, its tiles are larger and its products those of panels
// (gather_forward_panels.h). dims works on waves of query rows (gather_forward_dims.h).
#pragma once

#include "cpu/generic/block_forward.h"
#include "cpu/generic/gather_lists.h"

namespace spattn::cpu {
namespace {

inline int most_tile_heads(const Problem& p) { return least(most_heads, p.group()); }
inline int64_t list_tokens(const Problem& p) { return p.call_lists.at_run_time() ? p.call_lists.tokens() : 0; }

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

// ---- phases -------------------------------------------------------------------------------------------------------

// Lanes take tiles of a kv head, as many at once as a form works on together.
struct GatherForwardCall {
    const ForwardArgs* args;
    const Elements* elements;
    Tiling tiling;
    int64_t tiles, at_once, lane_bytes, next;  // tiles of a kv head
};

template <class Lane>
inline int64_t gather_lane_bytes(const Problem& p, int num_lanes) {
    Carver carver{0};
    Lane::carve(carver, p, num_lanes);
    return int64_t(carver.used);
}

template <class Lane>
inline void gather_forward_tiles(void* argument, int64_t index) {
    GatherForwardCall& call = *(GatherForwardCall*)argument;
    const ForwardArgs& args = *call.args;
    const int64_t turns = (call.tiles + call.at_once - 1) / call.at_once;
    Lane lane(args, *call.elements, (uintptr_t)args.workspace + uintptr_t(index * call.lane_bytes));
    for (int64_t n; (n = next_of(call.next, *args.parallel)) < args.problem->batch * args.problem->heads_kv * turns;) {
        const int64_t begin = n % turns * call.at_once;
        lane.take(call.tiling, n / turns, begin, least_of(begin + call.at_once, call.tiles));
    }
}

template <class Lane>
inline void gather_forward_of(const ForwardArgs& args, const Elements& elements) {
    const Problem& p = *args.problem;
    const Tiling tiling(args, Lane::heads_of_tile);
    const int num_lanes = args.parallel->lanes();
    GatherForwardCall call{&args, &elements, tiling, p.seq_q * tiling.tiles(),
                           Lane::tiles_at_once(p, tiling, num_lanes), gather_lane_bytes<Lane>(p, num_lanes), 0};
    args.parallel->run(gather_forward_tiles<Lane>, &call);
}

template <class T, class Lane>
void gather_forward(const ForwardArgs& args) {
    gather_forward_of<Lane>(args, elements_of<T>);
}

template <class Lane>
size_t gather_forward_workspace(const Problem& p, const LayoutView&, const TasksView&, int num_lanes) {
    return size_t(gather_lane_bytes<Lane>(p, num_lanes) * num_lanes);
}

}  // namespace
}  // namespace spattn::cpu
