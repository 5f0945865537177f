// SPDX-License-Identifier: MIT
// Attention over token lists, backward, in the two forms of gather_forward.h and in waves (gather_space.h).
//
//     one tile of heads, one query row    s, p = exp2(scale_log2 s - lse log2(e)), dp = dO . v,
//                                         ds = scale p (dp - delta)
//                                         dQ += ds . K; p and ds go to the store
//     then, by owners                     dV[key] += p dO     dK[key] += ds q        row after row of the wave
//
// Scale is in ds, so that dK and dV may be summed into one where values are columns of keys.
//
// lse comes as float, which leaves p in double seven digits. But a row's p and its sink's share sum to 1: what they sum
// to instead is what rounding took, and all that was made of them is divided by it.
#pragma once

#include "cpu/generic/gather_space.h"

namespace spattn::cpu {
namespace {

inline void zero(Real* x, int64_t count) { __builtin_memset(x, 0, size_t(count) * sizeof(Real)); }

constexpr bool lse_is_rounded = sizeof(Real) > sizeof(float);

struct RowStats {
    Real minus_lse, delta;     // the former in units of log2
    double dsink, sink_share;  // the row's part; of the sums that softmax divides by

    // What p, and all that was made of it, is multiplied by.
    double correction(Real sum_of_p) const {
        const double sum = double(sum_of_p) + sink_share;
        return lse_is_rounded && sum > 0 ? 1 / sum : 1;
    }
};

// Statistics of query head t.head + head in row t.row. A row that saw nothing has p = 0, and its dout is not read; with
// a sink, its lse is z and dlse counts.
inline RowStats row_stats(const BackwardArgs& args, const Elements& elements, const HeadTile& t, int head,
                          bool is_empty) {
    const auto row = [&](const TensorView& x) {
        return t.batch * x.batch + (t.head + head) * x.head + t.row * x.row;
    };
    const float lse = usual_nan(((const float*)args.lse.data)[row(args.lse)]);
    if (lse == -INFINITY) return {-INFINITY, 0.f, 0, 0};
    const char* out = (const char*)args.out.data + row(args.out) * elements.bytes;
    const char* dout = (const char*)args.dout.data + row(args.dout) * elements.bytes;
    const int columns = int(args.problem->head_dim_v);
    Real delta = is_empty ? 0.f : elements.dot(out, args.out.column, dout, args.dout.column, columns);
    if (args.dlse.data) delta -= usual_nan(((const float*)args.dlse.data)[row(args.dlse)]);
    const double sink = sink_of(args.sink_logits, t.head + head);
    const double share = sink == -INFINITY ? 0 : exp(sink - double(lse));
    return {Real(-log2_e * lse), delta, share == 0 ? 0 : -share * double(delta), share};
}

// From products q . k and dO . v to p and ds.
struct Differentiation {
    const bool is_capped;
    const SoftcapFactors cap;
    const Real scale, scale_log2;

    explicit Differentiation(const Problem& p) : Differentiation(p, Real(p.scale)) {}
    // Another scale in ds, for who multiplies by what is left of the problem's later.
    Differentiation(const Problem& p, Real scale)
        : is_capped(p.softcap != 0),
          cap(softcap_factors(p)),
          scale(scale),
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

// ---- phases -------------------------------------------------------------------------------------------------------

template <class Lane>
struct GatherBackwardCall {
    const BackwardArgs* args;
    const Elements* elements;
    typename Lane::Map map;
    int64_t next;

    Lane lane(int64_t index) const {
        return {*args, *elements, map, (uintptr_t)(map.space.scratch + index * map.space.lane_bytes)};
    }
};

// Lanes take tiles of a kv head, as many at once as a form works on together.
template <class Lane>
inline void gather_backward_tiles(void* argument, int64_t index) {
    auto& call = *(GatherBackwardCall<Lane>*)argument;
    const auto& map = call.map;
    Lane lane = call.lane(index);
    const int64_t tiles = map.wave.rows * map.tiling.tiles(), at_once = Lane::tiles_at_once(map);
    const int64_t turns = (tiles + at_once - 1) / at_once;
    for (int64_t n; (n = next_of(call.next, *call.args->parallel)) < map.wave.planes * turns;) {
        const int64_t begin = n % turns * at_once;
        lane.take(map.wave.plane + n / turns, begin, least_of(begin + at_once, tiles));
    }
}

template <class Lane>
inline void gather_backward_owners(void* argument, int64_t index) {
    auto& call = *(GatherBackwardCall<Lane>*)argument;
    Lane lane = call.lane(index);
    const int64_t owners = Lane::owners(call.map);
    for (int64_t n; (n = next_of(call.next, *call.args->parallel)) < call.map.wave.planes * owners;)
        lane.own(call.map.wave.plane + n / owners, n % owners);
}

template <class Lane>
inline void gather_backward_of(const BackwardArgs& args, const Elements& elements) {
    const Problem& p = *args.problem;
    Carver carver{(uintptr_t)args.workspace};
    const auto space = carve_gather<Lane>(carver, p, args.parallel->lanes());
    const Tiling tiling(args, Lane::Pairs::heads_of_tile);
    GatherBackwardCall<Lane> call{&args, &elements, {args, p, space, tiling, {}}, 0};
    while (call.map.next()) {
        call.next = 0;
        args.parallel->run(gather_backward_tiles<Lane>, &call);
        call.next = 0;
        args.parallel->run(gather_backward_owners<Lane>, &call);
    }
    for (int64_t head = 0; args.dsink_logits.data && head < p.heads_q; ++head)
        ((float*)args.dsink_logits.data)[head * args.dsink_logits.head] = float(call.map.dsink_of(head));
}

template <class T, class Lane>
void gather_backward(const BackwardArgs& args) {
    gather_backward_of<Lane>(args, elements_of<T>);
}

template <class Lane>
size_t gather_backward_workspace(const Problem& p, const LayoutView&, const TasksView&, int num_lanes) {
    Carver carver{0};
    carve_gather<Lane>(carver, p, num_lanes);
    return carver.used;
}

}  // namespace
}  // namespace spattn::cpu
