// SPDX-License-Identifier: MIT
// What parts of split forward rows leave for combine.
#pragma once

#include "any/shape.h"
#include "plan/kernel.h"

namespace spattn::any {

template <class Real>
struct Partials {
    Real* out;  // [part][block_q][head_dim_v], normalised
    Real* lse;  // [part][block_q]
    Real* top;  // [part][block_q] the largest score: read where a call asks for max_logits

    static size_t bytes(const Problem& p, const LayoutView& layout, const TasksView& tasks) {
        return size_t(tasks.num_parts) * size_t(layout.block_q) * size_t(p.head_dim_v + 2) * sizeof(Real);
    }
    static Partials at(void* memory, const Problem& p, const LayoutView& layout, const TasksView& tasks) {
        const size_t rows = size_t(tasks.num_parts) * size_t(layout.block_q);
        Real* out = static_cast<Real*>(memory);
        return {out, out + rows * size_t(p.head_dim_v), out + rows * size_t(p.head_dim_v + 1)};
    }
};

}  // namespace spattn::any
