// SPDX-License-Identifier: MIT
// How a forward row ends.
#pragma once

#include <cmath>

#include "layout/view.h"
#include "plan/call.h"
#include "ptx/convert.cuh"

namespace spattn::sm90 {

// What a row's sums of p v are multiplied by, and its lse.
struct RowEnd {
    float factor, lse;
};

// l, the sum of p, may be lifted by powers of two, as p v then is. scale brings m to natural units. sink: its logit, or
// -infinity where there is none.
__device__ __forceinline__ RowEnd end_row(float m, float l, float lift, float scale, float sink) {
    if (isnan(l)) return {l, l};  // by its own keys
    RowEnd end{l > 0 ? ptx::reciprocal_approx(l) : 0, m * scale + (ptx::log2_approx(l) - lift) * float(M_LN2)};
    if (sink == -INFINITY) return end;
    const float high = fmaxf(end.lse, sink), less = fabsf(end.lse - sink) * float(M_LOG2E);
    const float lse = high + ptx::log2_approx(1 + ptx::exp2_approx(-less)) * float(M_LN2);
    end.factor *= ptx::exp2_approx((end.lse - lse) * float(M_LOG2E));
    end.lse = lse;
    return end;
}

// The same of a row of a block forward; parts of one end without the sink.
template <class Params>
__device__ __forceinline__ RowEnd end_row(const Params& params, int head, int part, float m, float l, float lift,
                                          float scale) {
    const TensorView& sinks = params.to.sink_logits;
    const bool has_sink = sinks.data && part == whole_row;
    return end_row(m, l, lift, scale,
                   has_sink ? static_cast<const float*>(sinks.data)[head * sinks.head] : -INFINITY);
}

template <class Params>
__device__ __forceinline__ RowEnd end_row(const Params& params, int head, int part, float m, float l, float lift) {
    return end_row(params, head, part, m, l, lift, params.scale);
}

}  // namespace spattn::sm90
