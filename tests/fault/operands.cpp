// SPDX-License-Identifier: MIT
#include "fault/operands.h"

namespace fault {

namespace {
bool is_float8(const spattn_problem& p) { return p.dtype.code == SPATTN_FLOAT8_E4M3FN; }
}  // namespace

void fill(abi::Tensor& tensor, uint32_t seed) {
    const int32_t bits = tensor.view.dtype.bits;
    if (bits == 32) return tensor.fill(seed);
    for (size_t i = 0; i < tensor.bytes * 8 / size_t(bits); ++i) {
        seed = seed * 1664525u + 1013904223u;
        if (bits == 8)
            tensor.data[i] = static_cast<unsigned char>(0x30 | (seed >> 16 & 0x87));
        else if (bits == 16)
            tensor.as<uint16_t>()[i] = uint16_t(0x3800 | (seed >> 16 & 0x83ff));  // of float16 and of bfloat16 alike
        else
            tensor.as<double>()[i] = double(seed >> 8) / double(1 << 23) - 1;
    }
}

Operands::Operands(const spattn_plan* plan, const spattn_problem& p, int64_t listed)
    : plan(plan),
      q({p.batch, p.heads_q, p.seq_q, p.head_dim}, p.dtype),
      k({p.batch, p.heads_kv, p.seq_k, p.head_dim}, p.dtype),
      v({p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, p.dtype),
      out({p.batch, p.heads_q, p.seq_q, p.head_dim_v}, is_float8(p) ? abi::bf16 : p.dtype),
      lse({p.batch, p.heads_q, p.seq_q}, abi::f32),
      dout(out.shape, out.view.dtype),
      dq(q.shape, out.view.dtype),
      dk(k.shape, out.view.dtype),
      dv(v.shape, out.view.dtype),
      max_logits(lse.shape, abi::f32),
      sinks({p.heads_q}, abi::f32),
      dsinks({p.heads_q}, abi::f32),
      indices({p.batch, p.seq_q, p.heads_kv, listed}, abi::i32),
      q_scales(lse.shape, abi::f32),
      k_scales({p.batch, p.heads_kv, p.seq_k}, abi::f32),
      forward_space({bytes(SPATTN_OP_FORWARD)}, abi::u8),
      backward_space({bytes(SPATTN_OP_BACKWARD)}, abi::u8) {
    uint32_t seed = 1;
    for (abi::Tensor* t : {&q, &k, &v, &dout, &sinks, &k_scales}) fill(*t, seed++);
    for (size_t i = 0; i < q_scales.bytes / sizeof(float); ++i) q_scales.as<float>()[i] = 0.5f + float(i % 7);
    for (size_t i = 0; i < indices.bytes / 4; ++i)
        indices.as<int32_t>()[i] = int32_t(i * 7919 % size_t(p.seq_k + 9)) - 5;
    forward_args.q = &q.view, forward_args.k = &k.view, forward_args.v = &v.view;
    forward_args.out = &out.view, forward_args.lse = &lse.view;
    forward_args.workspace = forward_space.data, forward_args.workspace_bytes = forward_space.bytes;
    backward_args.q = &q.view, backward_args.k = &k.view, backward_args.v = &v.view;
    backward_args.out = &out.view, backward_args.lse = &lse.view, backward_args.dout = &dout.view;
    backward_args.dq = &dq.view, backward_args.dk = &dk.view, backward_args.dv = &dv.view;
    backward_args.workspace = backward_space.data, backward_args.workspace_bytes = backward_space.bytes;
    bring_options(p, listed);
}

void Operands::bring_options(const spattn_problem& p, int64_t listed) {
    forward_args.max_logits = &max_logits.view;
    if (listed > 0) forward_args.indices = backward_args.indices = &indices.view;
    if (p.flags & SPATTN_PLAN_VALUE_IN_KEY) forward_args.v = backward_args.v = backward_args.dv = nullptr;
    if (p.flags & SPATTN_PLAN_SINK_LOGITS) {
        forward_args.sink_logits = backward_args.sink_logits = &sinks.view;
        backward_args.dsink_logits = &dsinks.view;
    }
    if (!is_float8(p)) return;
    forward_args.q_scales = &q_scales.view, forward_args.k_scales = &k_scales.view;
    if (forward_args.v) forward_args.v_scales = &k_scales.view;
    backward_args.q_scales = forward_args.q_scales, backward_args.k_scales = forward_args.k_scales;
    backward_args.v_scales = forward_args.v_scales;
}

int64_t Operands::bytes(spattn_enum op) const {
    size_t bytes = 0, align = 1;
    const spattn_status status = spattn_plan_workspace(plan, op, &bytes, &align);
    return status == SPATTN_OK ? int64_t(bytes)
                               : 0;  // no CHECK: threads make operands; a call says what is missing
}

std::vector<std::vector<unsigned char>> Operands::results() const {
    return {out.content(), lse.content(), max_logits.content(), dq.content(), dk.content(), dv.content(),
            dsinks.content()};
}

}  // namespace fault
