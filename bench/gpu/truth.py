# SPDX-License-Identifier: MIT
"""The operands of a case, and what its results must be."""
import math

import torch

MOST_DIFFERENCE = 0.05  # of two results in bf16 that compute the same


def sampled(seq):
    return (0, 1, seq // 3, seq // 2 + 77, seq - 130, seq - 1)


class Tensors:
    """Operands of a case; in memory [batch, seq, heads, head_dim], which every peer takes as it is."""

    def __init__(self, case):
        torch.manual_seed(1)
        def normal(columns):
            x = torch.randn(1, case.seq, case.heads, columns, device="cuda", dtype=case.dtype)
            return x.transpose(1, 2)
        self.q, self.k, self.v = normal(case.head_dim), normal(case.head_dim), normal(case.head_dim_v)
        self.dout = normal(case.head_dim_v)
        self.out, self.dq, self.dk, self.dv = (torch.full_like(x, math.nan) for x in (self.v, self.q, self.k, self.v))
        self.lse = torch.empty(1, case.heads, case.seq, device="cuda")
        self.results = {"forward": ["out"], "backward": ["dq", "dk", "dv"]}


def difference(name, result, truth):
    """The largest, of a result that must have no more than rounding explains. A NaN is no such result."""
    worst = (result.to(truth.dtype) - truth).abs().max().item()
    if not worst < MOST_DIFFERENCE * max(1.0, truth.abs().max().item()):
        raise AssertionError(f"{name} differs by {worst:.2g}")
    return worst


def finite(x):
    """In doubles, and with a number for the lse of a row that sees no key, of which differences can be taken."""
    return x.double().clamp(min=-2.0**100)


def max_error(case, t, kept, what):
    """Of what a pass made, against double precision on sampled rows; for the forward also of lse."""
    worst, everyone = 0.0, torch.arange(case.seq, device="cuda")
    scale = 1 / math.sqrt(case.head_dim)

    def scores(head, queries, keys):
        s = (t.q[0, head, queries].double() @ t.k[0, head, keys].double().T) * scale
        return s.masked_fill(~kept(queries[:, None], keys[None, :]), -math.inf)

    def softmax(head, queries, keys):
        return torch.exp(scores(head, queries, keys) - finite(t.lse[0, head, queries])[:, None])

    def ds(head, queries, keys, p):
        dp = t.dout[0, head, queries].double() @ t.v[0, head, keys].double().T
        delta = (t.dout[0, head, queries].double() * t.out[0, head, queries].double()).sum(1, keepdim=True)
        return p * (dp - delta) * scale

    for name in t.results[what]:
        if not getattr(t, name).isfinite().all():
            raise AssertionError(f"{name} has rows that are not finite")
    for head in (0, case.heads - 1):
        for row in sampled(case.seq):
            row = torch.tensor([row], device="cuda")
            if what == "forward":
                s = scores(head, row, everyone)
                lse = finite(s.logsumexp(1))
                truths = {"out": torch.exp(s - lse) @ t.v[0, head].double(), "lse": lse}
            else:
                by_query, by_key = softmax(head, row, everyone), softmax(head, everyone, row)
                truths = {"dq": ds(head, row, everyone, by_query) @ t.k[0, head].double(),
                          "dk": ds(head, everyone, row, by_key).T @ t.q[0, head].double(),
                          "dv": by_key.T @ t.dout[0, head].double()}
            for name, truth in truths.items():
                worst = max(worst, difference(name, finite(getattr(t, name)[0, head, row]), truth))
    return worst
