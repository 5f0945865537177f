// SPDX-License-Identifier: MIT
// Where a forward row ends: with its sink, in what the next piece of the pattern takes on, or in the tensors.
#pragma once

#include "any/carried.h"
#include "any/element.cuh"

namespace spattn::any {

// m, top: the largest score so far, and what sums are relative to: the same, but for rows put together from parts.
// l: the sum of exp(s - m). A row that saw nothing has l = 0.
template <class Real>
struct RowState {
    Real m, l, top;
};

struct ForwardOutputs {
    TensorView out, lse, max_logits, sink_logits;
    PieceView piece;
    int64_t carried_row, heads_q, seq_q;
    int head_dim_v;
};
template <class Real>
ForwardOutputs make_outputs(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    return {args.out,  args.lse, args.max_logits,  args.sink_logits, args.piece, ForwardCarried<Real>::row(p),
            p.heads_q, p.seq_q,  int(p.head_dim_v)};
}

// exp(m - base); 0 for what saw nothing.
template <class Real>
__device__ __forceinline__ Real weight(Real m, Real base) {
    return m == -INFINITY ? Real(0) : exp(m - base);
}

// One query row at its end. Threads that work on it together read what was handed on, all of them, before one writes.
template <Dtype D>
struct RowEnd {
    using T = ElementOf<D>;
    using Real = RealOf<D>;

    const ForwardOutputs& to;
    int64_t batch, head, token;
    Real* carried;             // null where the pass has one piece
    Real mine = 1, share = 0;  // factors of the sums at hand and of those handed on

    __device__ RowEnd(const ForwardOutputs& to, int64_t batch, int64_t head, int64_t token)
        : to(to),
          batch(batch),
          head(head),
          token(token),
          carried(to.piece.is_first && to.piece.is_last
                      ? nullptr
                      : static_cast<Real*>(to.piece.carried) +
                            ((batch * to.heads_q + head) * to.seq_q + token) * to.carried_row) {}

    __device__ const Real* state(int copy) const {
        return carried + to.head_dim_v + copy * ForwardCarried<Real>::state;
    }

    // Brings in what was handed on.
    __device__ void take_on(RowState<Real>& row, int copy) {
        if (to.piece.is_first) return;
        const Real m = state(copy)[0], l = state(copy)[1], top = state(copy)[2], base = fmax(row.m, m);
        mine = weight(row.m, base), share = weight(m, base);
        row = {base, row.l * mine + l * share, fmax(row.top, top)};
    }

    // After which factor(row) holds for sums that are to be written.
    __device__ void finish(const RowState<Real>& row) {
        if (!to.piece.is_last) return;
        const Real z = sink();
        const Real base = fmax(row.m, z), sum = row.l * weight(row.m, base) + weight(z, base);
        const Real factor = row.l == 0 ? 0 : weight(row.m, base) / sum;
        mine *= factor, share *= factor;
    }

    __device__ void write(int column, Real x) const {
        x *= mine;
        if (!to.piece.is_first) x += carried[column] * share;
        if (!to.piece.is_last)
            carried[column] = x;
        else
            from_real(x, row_of<T>(to.out, batch, head, token)[column * to.out.column]);
    }

    __device__ void write_state(const RowState<Real>& row, int copy) const {
        if (!to.piece.is_last) {
            Real* at = carried + to.head_dim_v + copy * ForwardCarried<Real>::state;
            at[0] = row.m, at[1] = row.l, at[2] = row.top;
        } else if (copy == 0) {
            const Real z = sink(), base = fmax(row.m, z);
            const Real sum = row.l * weight(row.m, base) + weight(z, base);
            if (to.lse.data) *row_of<float>(to.lse, batch, head, token) = float(row.l == 0 ? z : base + log(sum));
            if (to.max_logits.data) *row_of<float>(to.max_logits, batch, head, token) = float(row.top);
        }
    }

    __device__ Real sink() const {
        return to.sink_logits.data ? Real(static_cast<const float*>(to.sink_logits.data)[head * to.sink_logits.head])
                                   : Real(-INFINITY);
    }
};

}  // namespace spattn::any
