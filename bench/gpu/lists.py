#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Rates over lists of keys that come with each call, as top-k selections make them.

    python3 bench/gpu/lists.py --library build/libsparseattn.so [--case GLOB] [--pass forward|backward]
                               [--out bench/results]

Of a case: queries of so many heads on one key head, each query with a list of its own. 31 of 32 listed keys lie within
the last 20,000 before the query, as in DeepSeek's demonstration of its sparse attention. Inputs N(0,1); times as in
bench.py, and a JSON line for each case goes to <out>/<gpu>_lists.jsonl. FLOPs: 2 heads queries list (head_dim +
head_dim_v) forward, 2.5 times that backward. Cases with `_deterministic` behind their name have a backward of the same
bits in every call.

Beside each case, in the same run and once for each shape: `naive_us`, gather-then-matmul in torch, whose rows, scores
and gradients go through memory; and `dense_us`, the fastest of cuDNN, flash and our own kernel with every key seen.
None of these takes head_dim 576: `dense_refused` says so, and dense is then two products of torch with a softmax
between, by cuBLAS, at the very shapes. Both are in products.py, in chunks of queries. `speedup_dense` and
`speedup_naive` are their times over ours. A peer that cannot has no time, and its reason as its name.
"""
import fnmatch
import json
import typing

import cases
import torch
from abi import DTYPES, Library, ffi, sized
from cases import DETERMINISTIC, FORWARD
from dense import Dense
from measure import gemm_tflops, sustained_us, time_us
from options import PASSES, make_library_parser
from products import Products
from report import digits, first_line, origin, results_file
from truth import agree, difference, sampled


class Case(typing.NamedTuple):
    name: str
    heads: int
    seq_q: int
    seq_k: int
    most: int  # keys of a list
    head_dim: int = 576
    head_dim_v: int = 512
    value_in_key: bool = True
    deterministic: bool = False  # backward alone: the forward always is
    goals: dict = {}
    recorded: dict = {}
    passes: tuple = PASSES


GOALS, FLASH_MLA = {"forward": 640, "backward": 450}, {"forward": ("FlashMLA", 577), "backward": ("cuDNN DSA", 383)}
CASES = [
    *(Case(f"dsa_{k}k", 128, 4096, 1024 * k, 2048, goals=GOALS, recorded=FLASH_MLA) for k in (16, 32, 64, 128)),
    Case("dsa_32k_64_heads", 64, 4096, 32768, 2048, goals={"forward": 560}, recorded={"backward": ("cuDNN DSA", 330)}),
    Case("dsa_8k_top1k", 128, 2048, 8192, 1024),
    Case("dsa_small", 128, 1024, 4096, 512, goals={"forward": 560}, recorded={"forward": ("FlashMLA", 494)}),
    # Few queries, as decoding has them.
    *(Case(f"dsa_64k_{n}_queries", 128, n, 65536, 2048, passes=FORWARD) for n in (1, 4, 16, 64)),
    Case("mqa16_64k_1_query", 16, 1, 65536, 2048, 128, 128, False, passes=FORWARD),
    Case("mqa16_16k", 16, 4096, 16384, 2048, 128, 128, False, goals={"forward": 70}),
    Case("mqa64_16k", 64, 4096, 16384, 2048, 128, 128, False),
    Case("mqa64_d256_16k", 64, 4096, 16384, 2048, 256, 256, False),
]
CASES += [case._replace(name=case.name + DETERMINISTIC, deterministic=True, goals={}) for case in CASES
          if "backward" in case.passes]


def draw_lists(case):
    """[1, queries, 1, most] int32, in no order, of the last queries of the keys."""
    near = 20000
    lists = torch.randint(0, case.seq_k, (case.seq_q, case.most), device="cuda")
    end = torch.arange(case.seq_k - case.seq_q, case.seq_k, device="cuda")[:, None] + 1
    recent = end - 1 - (torch.rand(case.seq_q, case.most, device="cuda") * end.clamp(max=near)).long()
    is_recent = torch.arange(case.most, device="cuda") % 32 != 31
    return torch.where(is_recent, recent, lists % end).int()[None, :, None]


class Tensors:
    def __init__(self, case):
        torch.manual_seed(1)

        def normal(seq, heads, columns):
            return torch.randn(1, seq, heads, columns, device="cuda", dtype=torch.bfloat16)
        self.q, self.k = normal(case.seq_q, case.heads, case.head_dim), normal(case.seq_k, 1, case.head_dim)
        self.v = self.k[..., :case.head_dim_v] if case.value_in_key else normal(case.seq_k, 1, case.head_dim_v)
        self.dout = normal(case.seq_q, case.heads, case.head_dim_v)
        self.out, self.dq = torch.full_like(self.dout, torch.nan), torch.full_like(self.q, torch.nan)
        self.dk, self.dv = torch.full_like(self.k, torch.nan), torch.full_like(self.v, torch.nan)
        self.lse = torch.empty(1, case.heads, case.seq_q, device="cuda")
        self.lists = draw_lists(case)

    def operands(self, case, what):
        operands = dict(q=self.q, k=self.k, out=self.out, lse=self.lse, indices=self.lists)
        if what == "backward":
            operands |= dict(dout=self.dout, dq=self.dq, dk=self.dk)
        if not case.value_in_key:
            operands |= dict(v=self.v) | (dict(dv=self.dv) if what == "backward" else {})
        return operands


def max_error(case, t, what):
    """Of out, lse, dq and dk against double precision, on sampled queries and keys."""
    worst, scale = 0.0, case.head_dim**-0.5
    for query in sampled(case.seq_q):
        listed = t.lists[0, query, 0].long()
        k, v, q = t.k[0, listed, 0].double(), t.v[0, listed, 0].double(), t.q[0, query].double()
        s = q @ k.T * scale
        p = s.softmax(1)
        truths = {"out": p @ v} if what == "forward" else {}
        if what == "backward":
            dout = t.dout[0, query].double()
            delta = (dout * (p @ v)).sum(1, keepdim=True)
            truths["dq"] = p * (dout @ v.T - delta) @ k * scale
        for name, truth in truths.items():
            worst = max(worst, difference(name, getattr(t, name)[0, query], truth))
        worst = max(worst, difference("lse", t.lse[0, :, query], s.logsumexp(1)))
    for key in (0, case.seq_k // 2 + 7, case.seq_k - case.seq_q + 1) if what == "backward" else ():
        truth = key_gradient(case, t, key, scale)
        worst = max(worst, difference("dk", t.dk[0, key, 0], truth) / truth.abs().max().clamp(min=1).item())
    return worst


def key_gradient(case, t, key, scale):
    """What dk is of a key, of the queries that list it, as often as they do."""
    count = (t.lists[0, :, 0] == key).sum(1).double()
    queries = count.nonzero()[:, 0]
    q, dout, out = (x[0, queries].double() for x in (t.q, t.dout, t.out))
    weight = count[queries, None]
    p = weight * (q @ t.k[0, key, 0].double() * scale - t.lse[0, :, queries].T.double()).exp()
    ds = p * (dout @ t.v[0, key, 0].double() - (dout * out).sum(2))
    gradient = scale * torch.einsum("nh,nhd->d", ds, q)
    if case.value_in_key:
        gradient[:case.head_dim_v] += torch.einsum("nh,nhd->d", p, dout)
    return gradient


def make_plan(library, case, backward):
    lib = library.lib
    flags = (lib.SPATTN_PLAN_BACKWARD if backward else 0) | (lib.SPATTN_PLAN_VALUE_IN_KEY if case.value_in_key else 0)
    flags |= lib.SPATTN_PLAN_DETERMINISTIC if case.deterministic else 0
    problem = sized("spattn_problem", flags=flags, batch=1, heads_q=case.heads, heads_kv=1, seq_q=case.seq_q,
                    seq_k=case.seq_k, head_dim=case.head_dim, head_dim_v=case.head_dim_v,
                    dtype=DTYPES[torch.bfloat16], axes=lib.SPATTN_BSHD)
    pattern = library.make("spattn_pattern", lib.spattn_pattern_parse, f"runtime_tokens({case.most})".encode())
    return library.make("spattn_plan", lib.spattn_plan_create, library.context, pattern, problem, ffi.NULL)


class Peers:
    """Dense attention, and gather-then-matmul, at the shapes of a case: timed once for all cases that share them."""

    def __init__(self, library):
        self.dense, self.known = Dense(library), {}

    def beside(self, case, t, what, us):
        """What a line says of them, beside a pass that took so many microseconds."""
        key = (case.name.removesuffix(DETERMINISTIC), what)
        if key not in self.known:
            self.known[key] = {"dense_refused": []}
            for name, time in (("dense", self.dense_us), ("naive", self.naive_us)):
                try:
                    self.known[key] |= time(case, t, what)
                except Exception as e:  # a peer that cannot is a fact to record
                    self.known[key] |= {name: f"failed: {first_line(e)}", f"{name}_us": None}
                torch.cuda.empty_cache()
        line = self.known[key]
        return line | {f"speedup_{name}": line[f"{name}_us"] and digits(line[f"{name}_us"] / us)
                       for name in ("dense", "naive")}

    def dense_us(self, case, t, what):
        full = cases.Case("full", "full", case.heads, case.seq_q, cases.full, heads_kv=1, seq_k=case.seq_k,
                          head_dim=case.head_dim, head_dim_v=case.head_dim_v)
        us, name, refusals = self.dense.best(full, what)
        return {"dense": name, "dense_us": digits(us, 5), "dense_refused": refusals}

    def naive_us(self, case, t, what):
        """It has to make what the library made."""
        v = None if case.value_in_key else t.v[0, :, 0]
        naive = Products(t.q[0], t.k[0, :, 0], v, t.dout[0], t.lists[0, :, 0])
        if what == "forward":
            agree(naive.forward(), {"out": t.out[0]})
        else:
            keys = {"dk": t.dk[0, :, 0]} | ({} if case.value_in_key else {"dv": t.dv[0, :, 0]})
            agree(naive.step(), {"dq": t.dq[0], **keys})
        return {"naive": "torch gather and products", "naive_us": digits(naive.us(what), 5)}


def run_case(library, peers, case, passes, write):
    torch.cuda.empty_cache()
    t = Tensors(case)
    plan = make_plan(library, case, "backward" in passes)
    forward = library.forward(plan, **t.operands(case, "forward"))
    forward()
    flops = 2 * case.heads * case.seq_q * case.most * (case.head_dim + case.head_dim_v)
    for what in passes:
        call = forward if what == "forward" else library.backward(plan, **t.operands(case, "backward"))
        size = flops if what == "forward" else 2.5 * flops
        us = time_us(call)
        kernel = library.kernel(plan, what)
        peer, theirs = case.recorded.get(what, ("none", None))
        line = {"case": case.name, "pass": what, "kernel": kernel, "heads": case.heads, "seq_q": case.seq_q,
                "seq_k": case.seq_k, "most": case.most, "head_dim": case.head_dim, "head_dim_v": case.head_dim_v,
                "us": round(us, 1), "tflops": round(size / us * 1e-6, 1),
                "tflops_sustained": round(size / sustained_us(call) * 1e-6, 1),
                "max_err": max_error(case, t, what), "gemm": round(gemm_tflops(), 1),
                **peers.beside(case, t, what, us),
                "peer": f"{peer} (recorded)", "peer_tflops": theirs, "goal": case.goals.get(what)}
        write(line)
        print(f"{case.name:18} {what:8} {us:9.1f} us {line['tflops']:6.1f} TFLOP/s ({line['tflops_sustained']} "
              f"sustained)  goal {line['goal']}  gemm {line['gemm']}  err {line['max_err']:.1e}  "
              f"{line['speedup_dense']}x {line['dense']}  {line['speedup_naive']}x {line['naive']}  "
              f"{line['peer']}: {theirs}  {kernel}", flush=True)


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    options = parser.parse_args()
    library, common = Library(options.library), origin(options.toolkit)
    peers = Peers(library)
    with results_file(options.out, "_lists").open("w") as stream:
        def write(line):
            stream.write(json.dumps({**line, **common}) + "\n")
            stream.flush()
        for case in CASES:
            passes = [what for what in options.passes
                      if what in case.passes and (what == "backward" or not case.deterministic)]
            if passes and fnmatch.fnmatch(case.name, options.case):
                run_case(library, peers, case, passes, write)


if __name__ == "__main__":
    main()
