# SPDX-License-Identifier: MIT
"""Dense attention at the shapes of a case, which its sparse pattern must beat."""
import torch_peers
from measure import peer_us
from products import Products
from report import first_line
from truth import Tensors

LARGEST_HEAD_DIM = 512  # of dense kernels; ours beyond that are plain ones, which take seconds


class Dense:
    """The best dense kernel of this run for any shapes, ours or torch's, measured when first asked for."""

    def __init__(self, library):
        self.library = library
        self.known = {}

    def best(self, case, what):
        """Microseconds and name of the fastest: a causal one where that does, which takes half the work. And what the
        others say that cannot."""
        is_causal = case.seq == case.seq_k and self.library.is_causal(case)
        shapes = (case.batch, case.heads, case.heads_kv, case.seq, case.seq_k, case.head_dim, case.head_dim_v)
        key = (what, is_causal, case.dtype, shapes)
        if key not in self.known:
            pattern = "causal" if is_causal else "full"
            dense = case.but(pattern, pattern=pattern, is_packed=False, deterministic=False)
            self.known[key] = self.measure(dense, what)
        return self.known[key]

    def measure(self, case, what):
        t, times, refusals = Tensors(case), [], []
        for name, time in self.kernels(case, what, t):
            try:
                times.append((time(), f"{name}, {case.pattern}"))
            except Exception as e:  # one that cannot is not the best
                refusals.append(f"{name}: {first_line(e)}")
                print(f"dense {what} at the shapes {case.shape()}: {refusals[-1]}", flush=True)
        if not times:
            raise RuntimeError(f"no dense {what} at the shapes {case.shape()}")
        return *min(times), refusals

    def kernels(self, case, what, t):
        """Name of each dense kernel, and what times it. Where no kernel takes the shapes, products do."""
        is_large = case.head_dim > LARGEST_HEAD_DIM
        if not is_large:
            yield "sparseattn", lambda: peer_us(self.library.calls(case, t, [what])[0][what])
        for name, attention in torch_peers.dense(case.pattern == "causal", case.dtype, case.head_dim):
            yield name, lambda attention=attention: peer_us(torch_peers.of_pass(what, attention, t))
        if is_large and case.batch == case.heads_kv == 1:
            q, dout = (x[0].transpose(0, 1) for x in (t.q, t.dout))
            yield "torch products", lambda: Products(q, t.k[0, 0], t.v[0, 0], dout).us(what)
