# SPDX-License-Identifier: MIT
"""A case: the library, dense attention at the same shapes, and peers, one after the other."""
import fa4
import torch
import torch_peers
from measure import gemm_tflops, sustained_us, time_us
from report import digits, first_line
from truth import Tensors, agree, max_error

LONG = 2e5  # us; in so long a call the clock has come down by itself


def peers_here(library, case, what, flops, use_flex, t):
    """Name, and a function that makes the call, of each peer that this python has for the case."""
    if case.deterministic:
        return  # none of them is, on sparse patterns
    is_bf16 = case.dtype == torch.bfloat16
    mask = case.tables()[0] if case.block == 128 else None
    if fa4.is_here() and is_bf16 and case.head_dim == 128 and case.seq == case.seq_k and fa4.takes(case.name, mask):
        make = fa4.make_call if what == "forward" else fa4.make_gradients
        operands = [t.q, t.k, t.v] if what == "forward" else [t.q, t.k, t.v, t.dout]
        yield "FA4", lambda: make(case.name, mask, *operands)
    attentions = []
    if case.pattern == "full" or case.pattern == "causal" and case.seq == case.seq_k:
        attentions += torch_peers.dense(case.pattern == "causal", case.dtype, case.head_dim)
    if case.documents:
        attentions.append(("torch nested SDPA", torch_peers.of_documents(case.documents, t.q.device)))
    for peer, attention in attentions:
        yield peer, lambda attention=attention: torch_peers.of_pass(what, attention, t)
    if what == "forward" and is_bf16 and not case.is_dense() and flops <= torch_peers.MOST_SPARSE:
        yield "torch.sparse, float32", lambda: torch_peers.sparse(library.csr(case), t)
    if use_flex:
        yield "FlexAttention (Triton)", lambda: torch_peers.of_pass(
            what, torch_peers.make_flex(case.keeps("cuda"), case.seq, case.seq_k), t)


def measure_peer(call, flops, results):
    """TFLOP/s, cold and sustained, of a peer that computes the same."""
    agree(call(), results)
    us = time_us(call)
    sustained = sustained_us(call) if us < LONG else us
    return digits(flops / us * 1e-6), digits(flops / sustained * 1e-6)


def run_case(library, dense, case, passes, use_flex, common, write):
    t = Tensors(case)
    calls, plan, pairs = library.calls(case, t, passes)
    for what in passes:
        ours, flops = calls[what], case.flops(what, pairs)
        us = time_us(ours)
        line = {"case": case.name, "pass": what, "kernel": library.kernel(plan, what),
                "dtype": {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[case.dtype], "shape": case.shape(),
                "seq_k": case.seq_k, "head_dim_v": case.head_dim_v, "us": digits(us, 5),
                "tflops": digits(flops / us * 1e-6), "tflops_sustained": digits(flops / sustained_us(ours) * 1e-6),
                "max_err": max_error(case, t, case.keeps("cuda"), what)}
        dense_us, dense_name, _ = dense.best(case, what)
        line |= {"dense": dense_name, "dense_us": digits(dense_us, 5), "speedup_dense": digits(dense_us / us),
                 "goal_dense": case.goal_dense, "goal_us": case.goal_us if what == "forward" else None}
        results = {name: getattr(t, name) for name in t.results[what]}
        peers = [(name + " (recorded)", tflops, None) for name, tflops in [case.recorded.get(what, ("none", None))]]
        for peer, make_call in peers_here(library, case, what, flops, use_flex, t):
            try:
                peers.append((peer + " (same run)", *measure_peer(make_call(), flops, results)))
            except Exception as e:  # a peer that cannot is a fact to record
                peers.append((f"{peer} (failed: {first_line(e)})", None, None))
        line["gemm"] = digits(gemm_tflops())
        for peer, tflops, sustained in peers:
            ratio = round(line["tflops"] / tflops, 3) if tflops else None
            write({**line, "peer": peer, "peer_tflops": tflops, "peer_tflops_sustained": sustained, "ratio": ratio,
                   "goal": case.goals.get(what), **common})
