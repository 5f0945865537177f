// SPDX-License-Identifier: MIT
// Learned sinks: a logit z of each query head adds e^z to the softmax sum of each of its rows, and carries no value.
// Only where a row ends does it matter, once, after parts are joined:
//
//     lse = log(sum(e^s) + e^z)          dz = sum over rows of e^(z - lse) (dlse - rowsum(dO . O)) = -e^(z - lse) delta
//
// for lse grows by e^(z - lse) dz, and each p, so out, shrinks by that share.
#pragma once

#include <math.h>

#include "plan/call.h"
#include "cpu/generic/log2.h"
#include "cpu/generic/verbs.h"

namespace spattn::cpu {
namespace {

// -inf where the problem has none.
inline double sink_of(const TensorView& sink_logits, int64_t head) {
    return sink_logits.data ? double(((const float*)sink_logits.data)[head * sink_logits.head]) : -INFINITY;
}

// What a row's sums are multiplied by, and its lse: log2 of `sum` powers of two that are relative to `top`.
struct RowEnd {
    Real factor;
    double top, sum;
    float lse() const { return float((top + log2(sum)) * ln_2); }
};

// m, l: the maximum in units of log2, and the sum under it; 0 where the row saw nothing.
inline RowEnd end_row(Real m, Real l, double sink) {
    const double z = sink * log2_e;
    if (l == 0) return {0, z, 1};
    if (sink == -INFINITY) return {1 / l, m, l};
    const double top = z > m ? z : m, share = ::exp2(m - top), sum = l * share + ::exp2(z - top);
    return {Real(share / sum), top, sum};
}

}  // namespace
}  // namespace spattn::cpu
