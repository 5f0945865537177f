# SPDX-License-Identifier: MIT
"""`python -m sparseattn selftest`: is the installed library right on this machine?"""

from __future__ import annotations

import argparse

import numpy as np

from . import kernels, parse, version
from .demo import device
from .demo import run as demo

PATTERNS = [
    "full",
    "causal",
    "causal & (sink(4) | window(63,0))",
    "block_diagonal(48)",
    "causal & bigbird(32,3,1,1,7)",
    "causal & (dilated(96,0,3) | global_keys(5,150))",
]
BOUND = 1e-5  # float32, a few hundred keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    demo.add_device(parser, "float32")


def worst_error(
    text: str, where: device.Device, seq: int = 200, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 48
) -> float:
    """Largest relative error of out, lse, dq, dk and dv against dense masked attention in float64."""
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, seq, heads_q, head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, seq, heads_kv, head_dim), dtype=np.float32)
    return max(demo.check_layer(parse(text), q, k, v, dout, where).values())


def run(options: argparse.Namespace) -> int:
    """0 where all is right, else 1."""
    where = device.find(options.device).exact()
    rows = [name for name, runs_here in kernels().items() if runs_here]
    print(f"libsparseattn {version()} on {where}: {len(rows)} kernels run here, the best is {rows[0]}")
    errors = {text: worst_error(text, where) for text in PATTERNS}
    for text, error in errors.items():
        print(f"{'ok   ' if error < BOUND else 'WRONG'} {text:48} forward and backward, relative error {error:.1e}")
    return 0 if all(error < BOUND for error in errors.values()) else 1
