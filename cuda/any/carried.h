// SPDX-License-Identifier: MIT
// What forward pieces of a pattern hand on.
#pragma once

#include "any/shape.h"
#include "plan/call.h"

namespace spattn::any {

// Sums of out [batch, heads_q, seq_q, head_dim_v], and behind them states [batch, heads_q, seq_q, copies, state]: of
// each row one for each CTA that shares it, for what one writes no other may be reading. Sums stand alone so that 32
// floats of a row are a line of the cache; a state has a place more than numbers, so that it starts at 16 bytes.
template <class Real>
struct ForwardCarried {
    static constexpr int state = 4;
    static int copies(const Problem& p) { return column_parts<Real>(p.head_dim_v); }
    static int64_t rows(const Problem& p) { return p.batch * p.heads_q * p.seq_q; }
    static size_t bytes(const Problem& p) {
        return size_t(rows(p) * (p.head_dim_v + state * copies(p))) * sizeof(Real);
    }
};

}  // namespace spattn::any
