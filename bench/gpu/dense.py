# SPDX-License-Identifier: MIT
"""Dense attention at the shapes of a case, which its sparse pattern must beat."""
import torch_peers
from measure import time_us
from report import first_line
from truth import Tensors


class Dense:
    """The best dense kernel of this run for any shapes, ours or torch's, measured when first asked for."""

    def __init__(self, library):
        self.library = library
        self.known = {}

    def best(self, case, what):
        """Microseconds and name of the fastest: a causal one where that does, which takes half the work."""
        is_causal = case.seq == case.seq_k and self.library.is_causal(case)
        shapes = (case.batch, case.heads, case.heads_kv, case.seq, case.seq_k, case.head_dim, case.head_dim_v)
        key = (what, is_causal, case.dtype, shapes)
        if key not in self.known:
            pattern = "causal" if is_causal else "full"
            dense = case.but(pattern, pattern=pattern, is_packed=False, deterministic=False)
            self.known[key] = self.measure(dense, what)
        return self.known[key]

    def measure(self, case, what):
        t, times = Tensors(case), []
        for name, make in self.kernels(case, what, t):
            try:
                times.append((time_us(make(), calls=9, seconds=0.3), f"{name}, {case.pattern}"))
            except Exception as e:  # one that cannot is not the best
                print(f"dense {what} at the shapes {case.shape()}: {name} failed: {first_line(e)}", flush=True)
        if not times:
            raise RuntimeError(f"no dense {what} at the shapes {case.shape()}")
        return min(times)

    def kernels(self, case, what, t):
        """Name, and what makes the call, of each dense kernel."""
        yield "sparseattn", lambda: self.library.calls(case, t, [what])[0][what]
        for name, attention in torch_peers.dense(case.pattern == "causal"):
            yield name, lambda attention=attention: torch_peers.of_pass(what, attention, t)
