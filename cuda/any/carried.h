// SPDX-License-Identifier: MIT
// What forward pieces of a pattern hand on.
#pragma once

#include "any/shape.h"
#include "plan/kernel.h"

namespace spattn::any {

// A row has its sums of out, then its state for each CTA that shares it: what one writes no other may be reading. States
// are of four, so that rows of fours of columns start at multiples of 16 bytes.
template <class Real>
struct ForwardCarried {
    static constexpr int state = 4;
    static int64_t row(const Problem& p) { return p.head_dim_v + state * column_parts<Real>(p.head_dim_v); }
    static size_t bytes(const Problem& p) { return size_t(p.batch * p.heads_q * p.seq_q * row(p)) * sizeof(Real); }
};

}  // namespace spattn::any
