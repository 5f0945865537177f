// SPDX-License-Identifier: MIT
// What a backward kernel is told, and where a gradient ends: in what the next piece of the pattern takes on, or in the
// tensors.
#pragma once

#include "any/block_backward.h"
#include "any/element.cuh"

namespace spattn::any {

template <class Real>
struct BackwardParams {
    TensorView q, k, v, out, lse, dout, dlse, dq, dk, dv, sink_logits, dsink_logits;
    LayoutView layout;
    TasksView tasks;  // of the pass at hand
    BackwardSpace<Real> space;
    BackwardCarried<Real> carried;
    PieceView piece;
    int64_t batch, heads_q, heads_kv, seq_q, seq_k;
    int group, head_dim, head_dim_v, row_parts, column_parts, room;  // room: columns of one sum
    Real scale, softcap;
    bool value_in_key;
    MaskOrder order;

    __device__ int64_t row_q(int64_t batch, int64_t head, int64_t token) const {
        return (batch * heads_q + head) * seq_q + token;
    }
    __device__ int64_t row_k(int64_t batch, int64_t head, int64_t token) const {
        return (batch * heads_kv + head) * seq_k + token;
    }
    __device__ double sink(int64_t head) const {
        if (!sink_logits.data) return -INFINITY;
        return static_cast<const float*>(sink_logits.data)[head * sink_logits.head];
    }
    __host__ __device__ bool is_whole() const { return piece.is_first && piece.is_last; }
};

template <Dtype D>
BackwardParams<RealOf<D>> make_params(const BackwardArgs& args, MaskOrder order) {
    using Real = RealOf<D>;
    const Problem& p = *args.problem;
    return {args.q,
            args.k,
            args.v,
            args.out,
            args.lse,
            args.dout,
            args.dlse,
            args.dq,
            args.dk,
            args.dv,
            args.sink_logits,
            args.dsink_logits,
            args.layout,
            args.tasks,
            BackwardSpace<Real>::at(args.workspace, p, args.layout, args.tasks),
            BackwardCarried<Real>::at(args.piece.carried, p),
            args.piece,
            p.batch,
            p.heads_q,
            p.heads_kv,
            p.seq_q,
            p.seq_k,
            int(p.group()),
            int(p.head_dim),
            int(p.head_dim_v),
            1,
            1,
            0,
            Real(p.scale),
            Real(p.softcap),
            p.value_in_key,
            order};
}

// ---- where gradients end ----
template <Dtype D>
struct Gradients {
    using T = ElementOf<D>;
    using Real = RealOf<D>;
    const BackwardParams<Real>& params;

    // Adds what pieces before left. True where x is final.
    __device__ bool join_pieces(Real& x, Real* carried, int64_t at) const {
        if (params.is_whole()) return true;
        if (!params.piece.is_first) x += carried[at];
        if (!params.piece.is_last) carried[at] = x;
        return params.piece.is_last;
    }
    __device__ void write_query(int64_t batch, int64_t head, int64_t token, int column, Real dq) const {
        if (!join_pieces(dq, params.carried.dq, params.row_q(batch, head, token) * params.head_dim + column)) return;
        from_real(params.scale * dq, row_of<T>(params.dq, batch, head, token)[column * params.dq.column]);
    }
    // Where only one of both has a column, the other counts as 0.
    __device__ void write_key(int64_t batch, int64_t head, int64_t token, int column, Real dk, Real dv) const {
        const int64_t row = params.row_k(batch, head, token);
        if (column < params.head_dim_v) {
            if (join_pieces(dv, params.carried.dv, row * params.head_dim_v + column) && !params.value_in_key)
                from_real(dv, row_of<T>(params.dv, batch, head, token)[column * params.dv.column]);
        }
        if (column < params.head_dim && join_pieces(dk, params.carried.dk, row * params.head_dim + column)) {
            const Real sum = params.value_in_key ? params.scale * dk + dv : params.scale * dk;
            from_real(sum, row_of<T>(params.dk, batch, head, token)[column * params.dk.column]);
        }
    }
};

}  // namespace spattn::any
