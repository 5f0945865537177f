# SPDX-License-Identifier: MIT
"""`python -m sparseattn selftest`: is the installed library right on this machine?"""

from __future__ import annotations

import numpy as np

from . import Context, Extent, attention, attention_backward, kernels, parse, version
from .demo import truth

PATTERNS = [
    "full",
    "causal",
    "causal & (sink(4) | window(63,0))",
    "block_diagonal(48)",
    "causal & bigbird(32,3,1,1,7)",
    "causal & (dilated(96,0,3) | global_keys(5,150))",
]
BOUND = 1e-5  # float32, a few hundred keys


def worst_error(
    text: str, context: Context, seq: int = 200, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 48
) -> float:
    """Largest relative error of out, lse, dq, dk and dv against dense masked attention in float64."""
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, seq, heads_q, head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, seq, heads_kv, head_dim), dtype=np.float32)
    out, lse = attention(q[None], k[None], v[None], text, return_lse=True, context=context)
    dq, dk, dv = attention_backward(q[None], k[None], v[None], out, lse, dout[None], text, context=context)
    mask = parse(text).to_mask(Extent(seq, heads=heads_q))[0]
    right = truth.forward_backward(q, k, v, dout, mask, head_dim**-0.5)
    found = {"out": out[0], "lse": lse[0], "dq": dq[0], "dk": dk[0], "dv": dv[0]}
    return max(truth.relative_errors(found, right, truth.floors(q, k, v, dout, head_dim**-0.5)).values())


def run() -> int:
    """0 where all is right, else 1."""
    rows = [name for name, runs_here in kernels().items() if runs_here]
    print(f"libsparseattn {version()}: {len(rows)} kernels run here, the best is {rows[0]}")
    context = Context("cpu")
    errors = {text: worst_error(text, context) for text in PATTERNS}
    for text, error in errors.items():
        print(f"{'ok   ' if error < BOUND else 'WRONG'} {text:48} forward and backward, relative error {error:.1e}")
    return 0 if all(error < BOUND for error in errors.values()) else 1
