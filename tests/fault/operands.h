// SPDX-License-Identifier: MIT
#pragma once

#include "abi/abi.h"

namespace fault {

// Operands of forward and backward for one plan, with workspaces of the right size.
struct Operands {
    Operands(const spattn_plan* plan, const spattn_problem& p)
        : plan(plan),
          q({p.batch, p.heads_q, p.seq_q, p.head_dim}, abi::f32),
          k({p.batch, p.heads_kv, p.seq_k, p.head_dim}, abi::f32),
          v({p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, abi::f32),
          out({p.batch, p.heads_q, p.seq_q, p.head_dim_v}, abi::f32),
          lse({p.batch, p.heads_q, p.seq_q}, abi::f32),
          dout(out.shape, abi::f32),
          dq(q.shape, abi::f32),
          dk(k.shape, abi::f32),
          dv(v.shape, abi::f32),
          forward_space({bytes(SPATTN_OP_FORWARD)}, abi::u8),
          backward_space({bytes(SPATTN_OP_BACKWARD)}, abi::u8) {
        uint32_t seed = 1;
        for (abi::Tensor* t : {&q, &k, &v, &dout}) t->fill(seed++);
        forward_args.q = &q.view, forward_args.k = &k.view, forward_args.v = &v.view;
        forward_args.out = &out.view, forward_args.lse = &lse.view;
        forward_args.workspace = forward_space.data, forward_args.workspace_bytes = forward_space.bytes;
        backward_args.q = &q.view, backward_args.k = &k.view, backward_args.v = &v.view;
        backward_args.out = &out.view, backward_args.lse = &lse.view, backward_args.dout = &dout.view;
        backward_args.dq = &dq.view, backward_args.dk = &dk.view, backward_args.dv = &dv.view;
        backward_args.workspace = backward_space.data, backward_args.workspace_bytes = backward_space.bytes;
    }
    int64_t bytes(spattn_enum op) const {
        size_t bytes = 0, align = 1;
        const spattn_status status = spattn_plan_workspace(plan, op, &bytes, &align);
        return status == SPATTN_OK ? int64_t(bytes) : 0;  // no CHECK: threads make operands; a run says what is missing
    }
    spattn_status forward() { return spattn_forward(plan, &forward_args); }
    spattn_status backward() { return spattn_backward(plan, &backward_args); }
    std::vector<std::vector<unsigned char>> results() const {
        return {out.content(), lse.content(), dq.content(), dk.content(), dv.content()};
    }

    const spattn_plan* plan;
    abi::Tensor q, k, v, out, lse, dout, dq, dk, dv, forward_space, backward_space;
    spattn_forward_args forward_args = abi::sized<spattn_forward_args>();
    spattn_backward_args backward_args = abi::sized<spattn_backward_args>();
};

}  // namespace fault
