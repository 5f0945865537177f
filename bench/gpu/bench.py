#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The GPU bench: rates of the library and of its peers on the same tensors, in the same run.

    python3 bench/gpu/bench.py --library build/libsparseattn.so [--case GLOB] [--pass forward|backward] [--no-flex]
                               [--out bench/results]

One JSON line for each case and peer goes to <out>/<gpu>.jsonl. Peers that this python has are measured here (torch, and
FA4 where its wheel is on PYTHONPATH); the best figure that was recorded elsewhere stands beside them and says so.
Inputs N(0,1). `tflops`: L2 cold, a pause before each call, median of 25 calls by events. `tflops_sustained`: warm, back
to back for 0.4 s, when the chip's power limit has lowered its clock, which is what a server sees.
"""
import argparse
import fnmatch
import json

import fa4
import torch
import torch_peers
from abi import Library
from cases import CASES, PASSES, load_mask
from measure import gemm_tflops, sustained_us, time_us
from report import ROOT, origin, results_file
from truth import Tensors, difference, max_error



def peers_here(case, what, mask, kept, use_flex, t):
    """Name, and a function that makes the call, of each peer that this python has for the case."""
    is_plain = case.dtype == torch.bfloat16 and case.head_dim == 128
    if case.deterministic:
        return  # none of them is, on sparse patterns
    if fa4.is_here() and is_plain and fa4.takes(case.name, mask):
        make = fa4.make_call if what == "forward" else fa4.make_gradients
        operands = [t.q, t.k, t.v] if what == "forward" else [t.q, t.k, t.v, t.dout]
        yield "FA4", lambda: make(case.name, mask, *operands)
    if case.pattern in ("full", "causal"):
        for peer, attention in torch_peers.dense(case.pattern == "causal"):
            yield peer, lambda attention=attention: torch_peers.of_pass(what, attention, t)
    if use_flex:
        yield "FlexAttention (Triton)", lambda: torch_peers.of_pass(what, torch_peers.make_flex(kept, case.seq), t)


def measure_peer(call, flops, results):
    """TFLOP/s, cold and sustained, of a peer that computes the same."""
    theirs = call()
    theirs = [theirs] if isinstance(theirs, torch.Tensor) else list(theirs)
    for name, result in results.items():
        difference(name, theirs.pop(0).float(), result.float())
    return round(flops / time_us(call) * 1e-6, 1), round(flops / sustained_us(call) * 1e-6, 1)


def run_case(library, case, passes, use_flex, common, write):
    mask, kept = None, case.kept
    if kept is None:
        mask = load_mask(case.mask()).bool()
        on_gpu = mask.cuda()
        kept = lambda i, j: on_gpu[i // 128, j // 128]  # noqa: E731
    t = Tensors(case)
    forward = dict(q=t.q, k=t.k, v=t.v, out=t.out, lse=t.lse)
    backward = dict(forward, dout=t.dout, dq=t.dq, dk=t.dk, dv=t.dv)
    lib = library.lib
    plan, pairs = library.plan(case, "backward" in passes)
    calls = {"forward": library.forward(plan, **forward)}
    calls["forward"]()
    flops = {"forward": 2 * pairs * (case.head_dim + case.head_dim_v)}
    if "backward" in passes:
        calls["backward"] = library.backward(plan, **backward)
        flops["backward"] = 2 * pairs * (3 * case.head_dim + 2 * case.head_dim_v)
    for what in passes:
        ours, size = calls[what], flops[what]
        us = time_us(ours)
        op = lib.SPATTN_OP_FORWARD if what == "forward" else lib.SPATTN_OP_BACKWARD
        line = {"case": case.name, "pass": what, "kernel": library.kernel(plan, op),
                "dtype": {torch.bfloat16: "bf16", torch.float16: "f16"}[case.dtype],
                "shape": [1, case.heads, case.heads, case.seq, case.head_dim], "head_dim_v": case.head_dim_v,
                "us": round(us, 1), "tflops": round(size / us * 1e-6, 1),
                "tflops_sustained": round(size / sustained_us(ours) * 1e-6, 1),
                "max_err": max_error(case, t, kept, what)}
        results = {name: getattr(t, name) for name in t.results[what]}
        peers = [(name + " (recorded)", tflops, None) for name, tflops in [case.recorded.get(what, ("none", None))]]
        for peer, make_call in peers_here(case, what, mask, kept, use_flex, t):
            try:
                peers.append((peer + " (same run)", *measure_peer(make_call(), size, results)))
            except Exception as e:  # a peer that cannot is a fact to record
                reason = (str(e).splitlines() or [repr(e)])[0]
                peers.append((f"{peer} (failed: {reason[:80]})", None, None))
        line["gemm"] = round(gemm_tflops(), 1)
        for peer, tflops, sustained in peers:
            ratio = round(line["tflops"] / tflops, 3) if tflops else None
            write({**line, "peer": peer, "peer_tflops": tflops, "peer_tflops_sustained": sustained, "ratio": ratio,
                   "goal": case.goals.get(what), **common})
    torch.compiler.reset()  # each case is a new shape: past eight, torch would stop compiling
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--case", default="*")
    parser.add_argument("--pass", dest="passes", choices=PASSES, action="append", help="both, unless given")
    parser.add_argument("--out", default=str(ROOT / "bench/results"))
    parser.add_argument("--toolkit", default="13.0", help="the nvcc that built the library")
    parser.add_argument("--no-flex", action="store_true")
    args = parser.parse_args()
    common, file = origin(args.toolkit), results_file(args.out)
    library = Library(args.library)
    with file.open("w") as stream:
        def write(line):
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            print(f"{line['case']:22} {line['pass']:8} {line['us']:9.1f} us {line['tflops']:6.1f} TFLOP/s "
                  f"({line['tflops_sustained']:.1f} sustained)  goal {line['goal']}  "
                  f"gemm {line['gemm']}  err {line['max_err']:.1e}  {line['peer']}: {line['peer_tflops']} "
                  f"({line['peer_tflops_sustained']})  {line['kernel']}",
                  flush=True)
        for case in CASES:
            if fnmatch.fnmatch(case.name, args.case):
                passes = [what for what in args.passes or PASSES if what == "backward" or not case.deterministic]
                run_case(library, case, passes, not args.no_flex, common, write)


if __name__ == "__main__":
    main()
