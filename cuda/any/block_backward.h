// SPDX-License-Identifier: MIT
// Plain CUDA for every dtype, head_dim, stride and order, backward; the same bits in every call.
#pragma once

#include "any/mask_order.h"
#include "any/shape.h"
#include "core/math.h"
#include "plan/call.h"

namespace spattn::any {

// Blocks of 16, 32, and multiples of 64 tokens. args.tasks go by key, args.second_tasks by query. The steps before and
// after the products also serve rows of other folders that lay out a workspace as BackwardSpace does.
template <Dtype D>
struct BlockBackward {
    static void run(const BackwardArgs& args);
    static void rows(const BackwardArgs& args);          // lse and delta
    static void by_query(const BackwardArgs& args);      // dq with its parts, of masks as MaskOrder::key_fragments
    static void join_keys(const BackwardArgs& args);     // parts of dk and dv; launches nothing where there are none
    static void join_queries(const BackwardArgs& args);  // of dq
    static void sinks(const BackwardArgs& args);         // dsink_logits; launches nothing where they are absent
    static void prepare(int32_t device);
};

// What a call lays out in its workspace, and what pieces hand on: compact rows of Real by tokens.
template <class Real>
struct BackwardSpace {
    Real *lse, *delta;              // [batch, heads_q, seq_q]
    Real *parts_key, *parts_query;  // [part][block][head_dim + head_dim_v], [part][block][head_dim]

    static size_t rows_q(const Problem& p) { return size_t(p.batch * p.heads_q * p.seq_q); }
    static size_t bytes(const Problem& p, const LayoutView& layout, const TasksView& by_key,
                        const TasksView& by_query) {
        return (row_sums(p) + key_parts(p, layout, by_key) +
                size_t(by_query.num_parts) * size_t(layout.block_q) * size_t(p.head_dim)) *
               sizeof(Real);
    }
    static BackwardSpace at(void* memory, const Problem& p, const LayoutView& layout, const TasksView& by_key) {
        Real* rows = static_cast<Real*>(memory);
        Real* parts = rows + row_sums(p);
        return {rows, rows + rows_q(p), parts, parts + key_parts(p, layout, by_key)};
    }

private:
    // lse and delta, and a gap where their number is odd: kernels write four columns of a part at once.
    static size_t row_sums(const Problem& p) { return size_t(round_up(int64_t(2 * rows_q(p)), 4)); }
    static size_t key_parts(const Problem& p, const LayoutView& layout, const TasksView& by_key) {
        return size_t(by_key.num_parts) * size_t(layout.block_k) * size_t(p.head_dim + p.head_dim_v);
    }
};

template <class Real>
struct BackwardCarried {
    Real *dq, *dk, *dv;
    Real* lse;  // doubles only

    static size_t bytes(const Problem& p) {
        const size_t rows_k = size_t(p.batch * p.heads_kv * p.seq_k), rows_q = BackwardSpace<Real>::rows_q(p);
        const size_t lse = sizeof(Real) == sizeof(double) ? rows_q : 0;
        return (rows_q * size_t(p.head_dim) + rows_k * size_t(p.head_dim + p.head_dim_v) + lse) * sizeof(Real);
    }
    static BackwardCarried at(void* memory, const Problem& p) {
        const size_t rows_k = size_t(p.batch * p.heads_kv * p.seq_k);
        Real* dq = static_cast<Real*>(memory);
        Real* dk = dq + BackwardSpace<Real>::rows_q(p) * size_t(p.head_dim);
        Real* dv = dk + rows_k * size_t(p.head_dim);
        return {dq, dk, dv, dv + rows_k * size_t(p.head_dim_v)};
    }
};

}  // namespace spattn::any
