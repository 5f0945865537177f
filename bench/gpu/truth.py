# SPDX-License-Identifier: MIT
"""The operands of a case, and what its results must be."""
import math

import torch

MOST_DIFFERENCE = 0.05  # of two results in bf16 that compute the same


def sampled(seq):
    return sorted({row for row in (0, 1, seq // 3, seq // 2 + 77, seq - 130, seq - 1) if 0 <= row < seq})


class Tensors:
    """Operands of a case, [batch, heads, seq, head_dim]; in memory [batch, seq, heads, head_dim], which every peer
    takes as it is."""

    def __init__(self, case, device="cuda"):
        torch.manual_seed(1)

        def normal(seq, heads, columns):
            x = torch.randn(case.batch, seq, heads, columns, device=device, dtype=case.dtype)
            return x.transpose(1, 2)
        self.q = normal(case.seq, case.heads, case.head_dim)
        self.k = normal(case.seq_k, case.heads_kv, case.head_dim)
        self.v = normal(case.seq_k, case.heads_kv, case.head_dim_v)
        self.dout = normal(case.seq, case.heads, case.head_dim_v)
        self.out, self.dq = torch.full_like(self.dout, math.nan), torch.full_like(self.q, math.nan)
        self.dk, self.dv = torch.full_like(self.k, math.nan), torch.full_like(self.v, math.nan)
        self.lse = torch.full((case.batch, case.heads, case.seq), math.nan, device=device)
        self.results = {"forward": ["out"], "backward": ["dq", "dk", "dv"]}

    def operands(self, what, is_packed=False):
        """Those of a pass by their names in the C ABI; packed ones are [tokens, heads, head_dim]."""
        names = ["q", "k", "v", "out", "lse"] + (["dout", "dq", "dk", "dv"] if what == "backward" else [])
        tensors = {name: getattr(self, name) for name in names}
        return {name: packed(x) for name, x in tensors.items()} if is_packed else tensors


def packed(x):
    return x[0].transpose(0, 1) if x.dim() == 4 else x[0]


def difference(name, result, truth):
    """The largest, of a result that must have no more than rounding explains. A NaN is no such result."""
    worst = (result.to(truth.dtype) - truth).abs().max().item()
    if not worst < MOST_DIFFERENCE * max(1.0, truth.abs().max().item()):
        raise AssertionError(f"{name} differs by {worst:.2g}")
    return worst


def agree(theirs, results):
    """Demands of what a peer made, a tensor or several in the order of `results`, that it is what the library made."""
    theirs = [theirs] if isinstance(theirs, torch.Tensor) else theirs
    for (name, result), other in zip(results.items(), theirs):
        difference(name, other.float(), result.float())


def finite(x):
    """In doubles, and with a number for the lse of a row that sees no key, of which differences can be taken."""
    return x.double().clamp(min=-2.0**100)


def max_error(case, t, kept, what):
    """Of what a pass made, against double precision on sampled rows; for the forward also of lse."""
    for name in t.results[what]:
        if not getattr(t, name).isfinite().all():
            raise AssertionError(f"{name} has rows that are not finite")
    group = case.heads // case.heads_kv
    errors = []
    for batch in {0, case.batch - 1}:
        for kv_head in {0, case.heads_kv - 1}:
            heads = range(kv_head * group, (kv_head + 1) * group)
            truth = HeadTruth(case, t, kept, batch, kv_head)
            for row in sampled(case.seq):
                head = heads[0] if kv_head == 0 else heads[-1]
                for name, x in (truth.forward(head, row) if what == "forward" else {"dq": truth.dq(head, row)}).items():
                    errors.append(difference(name, finite(getattr(t, name)[batch, head, row]), x))
            for row in sampled(case.seq_k) if what == "backward" else ():
                dk, dv = (sum(x) for x in zip(*(truth.dk_dv(head, row) for head in heads)))
                errors += [difference("dk", t.dk[batch, kv_head, row], dk),
                           difference("dv", t.dv[batch, kv_head, row], dv)]
    return max(errors)


class HeadTruth:
    """Attention of single rows and keys in double precision, of the query heads of one key head."""

    def __init__(self, case, t, kept, batch, kv_head):
        self.k, self.v = t.k[batch, kv_head].double(), t.v[batch, kv_head].double()
        self.q, self.dout, self.out, self.lse = t.q[batch], t.dout[batch], t.out[batch], t.lse[batch]
        self.kept, self.scale = kept, 1 / math.sqrt(case.head_dim)
        self.queries, self.keys = (torch.arange(seq, device=t.q.device) for seq in (case.seq, case.seq_k))

    def scores(self, head, queries, keys):
        s = (self.q[head, queries].double() @ self.k[keys].T) * self.scale
        return s.masked_fill(~self.kept(queries[:, None], keys[None, :]), -math.inf)

    def forward(self, head, row):
        s = self.scores(head, self.queries[row:row + 1], self.keys)
        lse = finite(s.logsumexp(1))
        return {"out": (torch.exp(s - lse) @ self.v)[0], "lse": lse[0]}

    def p_ds(self, head, queries, keys):
        p = torch.exp(self.scores(head, queries, keys) - finite(self.lse[head, queries])[:, None])
        dout = self.dout[head, queries].double()
        delta = (dout * self.out[head, queries].double()).sum(1, keepdim=True)
        return p, p * (dout @ self.v[keys].T - delta) * self.scale

    def dq(self, head, row):
        return (self.p_ds(head, self.queries[row:row + 1], self.keys)[1] @ self.k)[0]

    def dk_dv(self, head, row):
        p, ds = self.p_ds(head, self.queries, self.keys[row:row + 1])
        return (ds.T @ self.q[head].double())[0], (p.T @ self.dout[head].double())[0]
