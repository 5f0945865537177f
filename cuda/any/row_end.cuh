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
    int64_t rows, heads_q, seq_q;
    int head_dim_v, copies;  // of a row's state

    __device__ int64_t row(int64_t batch, int64_t head, int64_t token) const {
        return (batch * heads_q + head) * seq_q + token;
    }
    // What a piece hands on of a row.
    template <class Real>
    __device__ Real* sums(int64_t row) const {
        return static_cast<Real*>(piece.carried) + row * head_dim_v;
    }
    template <class Real>
    __device__ Real* state(int64_t row, int copy) const {
        return sums<Real>(rows) + (row * copies + copy) * ForwardCarried<Real>::state;
    }
};
template <class Real>
ForwardOutputs make_outputs(const ForwardArgs& args) {
    const Problem& p = *args.problem;
    using Carried = ForwardCarried<Real>;
    return {args.out,         args.lse,  args.max_logits, args.sink_logits,  args.piece,
            Carried::rows(p), p.heads_q, p.seq_q,         int(p.head_dim_v), Carried::copies(p)};
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
    int64_t row;
    Real* sums;                // handed on; nowhere if the pass has one piece
    Real mine = 1, share = 0;  // factors of the sums at hand and of those handed on

    __device__ RowEnd(const ForwardOutputs& to, int64_t batch, int64_t head, int64_t token)
        : to(to),
          batch(batch),
          head(head),
          token(token),
          row(to.row(batch, head, token)),
          sums(to.piece.is_first && to.piece.is_last ? nullptr : to.sums<Real>(row)) {}

    // Brings in what was handed on.
    __device__ void take_on(RowState<Real>& own, int copy) {
        if (to.piece.is_first) return;
        const Real* const at = to.state<Real>(row, copy);
        take_on(own, {at[0], at[1], at[2]});
    }
    __device__ void take_on(RowState<Real>& own, const RowState<Real>& handed_on) {
        const Real base = fmax(own.m, handed_on.m);
        mine = weight(own.m, base), share = weight(handed_on.m, base);
        own = {base, own.l * mine + handed_on.l * share, fmax(own.top, handed_on.top)};
    }

    // After which mine and share hold for sums that are to be written.
    __device__ void finish(const RowState<Real>& own) {
        if (!to.piece.is_last) return;
        const Real z = sink();
        const Real base = fmax(own.m, z), sum = own.l * weight(own.m, base) + weight(z, base);
        const Real factor = own.l == 0 ? 0 : weight(own.m, base) / sum;
        mine *= factor, share *= factor;
    }

    __device__ void write(int column, Real x) const {
        x *= mine;
        if (!to.piece.is_first) x += sums[column] * share;
        if (!to.piece.is_last)
            sums[column] = x;
        else
            from_real(x, row_of<T>(to.out, batch, head, token)[column * to.out.column]);
    }

    __device__ void write_state(const RowState<Real>& own, int copy) const {
        if (!to.piece.is_last) {
            Real* const at = to.state<Real>(row, copy);
            at[0] = own.m, at[1] = own.l, at[2] = own.top;
        } else if (copy == 0) {
            const Real z = sink(), base = fmax(own.m, z);
            const Real sum = own.l * weight(own.m, base) + weight(z, base);
            if (to.lse.data) *row_of<float>(to.lse, batch, head, token) = float(own.l == 0 ? z : base + log(sum));
            if (to.max_logits.data) *row_of<float>(to.max_logits, batch, head, token) = float(own.top);
        }
    }

    __device__ Real sink() const {
        return to.sink_logits.data ? Real(static_cast<const float*>(to.sink_logits.data)[head * to.sink_logits.head])
                                   : Real(-INFINITY);
    }
};

}  // namespace spattn::any
