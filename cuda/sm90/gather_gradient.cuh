// SPDX-License-Identifier: MIT
// What the sm90 gather backward kernels are told, and the steps around them.
#pragma once

#include <cmath>
#include <type_traits>

#include "any/block_backward.h"
#include "any/gather_tile.cuh"
#include "any/key_gradients.h"
#include "any/key_sums.h"
#include "plan/call.h"

namespace spattn::sm90 {

using any::KeySums;

struct GatherBackwardParams {
    TensorView q, k, v, dout, dq;
    KeySums dk, dv;
    const float *lse, *delta;  // [batch, heads_q, seq_q]
    any::GatherLists lists;
    any::ListRows rows;
    int head_dim, head_dim_v;
    float scale, scale_log2;  // of gradients; from what stands for scores to powers of two
    float into_cap;           // scores become tanh(into_cap s) first, where the problem has a softcap
};

// tile: rows of one.
inline GatherBackwardParams make_gather_backward_params(const BackwardArgs& args, int tile) {
    const Problem& p = *args.problem;
    const any::KeySumsSpace space(p);
    const auto rows = any::BackwardSpace<float>::at(args.workspace, p, {}, {});
    const double scale = p.softcap != 0 ? p.softcap : p.scale;
    const any::GatherLists lists = any::GatherLists::of(args);
    return {args.q,
            args.k,
            args.v,
            args.dout,
            args.dq,
            space.dk_at(args.workspace, p),
            space.dv_at(args.workspace, p),
            rows.lse,
            rows.delta,
            lists,
            any::ListRows::of(p, lists.sizes, lists.known, tile),
            int(p.head_dim),
            int(p.head_dim_v),
            float(p.scale),
            float(scale * M_LOG2E),
            p.softcap != 0 ? float(p.scale / p.softcap) : 0};
}

// Gradients by a kernel that adds those of keys in memory. launch(an Adding as a constant): the kernel that does so.
template <Dtype D, class Launch>
void make_gradients(const BackwardArgs& args, Launch launch) {
    using any::Adding;
    any::KeyGradients<D>::clear(args);
    any::BlockBackward<D>::rows(args);
    if (args.problem->deterministic) {
        launch(std::integral_constant<Adding, Adding::bounds>{});
        any::KeyGradients<D>::find_quanta(args);
        launch(std::integral_constant<Adding, Adding::integers>{});
    } else {
        launch(std::integral_constant<Adding, Adding::floats>{});
    }
    any::KeyGradients<D>::write(args);
    any::BlockBackward<D>::sinks(args);
}

}  // namespace spattn::sm90
