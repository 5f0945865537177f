// SPDX-License-Identifier: MIT
// What parts of split forward rows, or of split lists, leave for those who join them.
#pragma once

#include "any/shape.h"
#include "plan/call.h"

namespace spattn::any {

template <class Real>
struct Partials {
    Real* out;  // [part][row of a tile][head_dim_v], normalised
    Real* lse;  // [part][row]
    Real* top;  // [part][row] the largest score: read where a call asks for max_logits

    static size_t bytes(size_t rows, int64_t head_dim_v) { return rows * size_t(head_dim_v + 2) * sizeof(Real); }
    static size_t bytes(const Problem& p, const LayoutView& layout, const TasksView& tasks) {
        return bytes(rows(layout, tasks), p.head_dim_v);
    }
    static Partials at(void* memory, const Problem& p, const LayoutView& layout, const TasksView& tasks) {
        return at(memory, rows(layout, tasks), p.head_dim_v);
    }
    static Partials at(void* memory, size_t rows, int64_t head_dim_v) {
        Real* const out = static_cast<Real*>(memory);
        return {out, out + rows * size_t(head_dim_v), out + rows * size_t(head_dim_v + 1)};
    }
    static size_t rows(const LayoutView& layout, const TasksView& tasks) {
        return size_t(tasks.num_parts) * size_t(layout.block_q) * size_t(tasks.tile_heads);
    }
};

}  // namespace spattn::any
