# SPDX-License-Identifier: MIT
"""What a type checker says of programs that use the package: nothing where they are right, something where not."""

import subprocess
import sys

import pytest

pytest.importorskip("mypy")
RIGHT = """
import numpy as np
import sparseattn as sa
from numpy.typing import NDArray

def run(q: NDArray[np.float32]) -> NDArray[np.float32]:
    pattern: sa.Pattern = sa.causal() & (sa.sink(4) | sa.window(255, 0)) & sa.xref([1, 2], sa.symbols_of(str, [1, 2]))
    out, lse = sa.attention(q, q, q, "causal", return_lse=True, axes="bshd", scale=0.5)
    out, lse, largest = sa.attention(q, q, q, np.ones((16, 16), bool), return_lse=True, return_max_logits=True)
    plan: sa.Plan = sa.plan(pattern, q, q, q, backward=True)
    pairs: float = plan.stats().pairs + pattern.density((8, 16)) + largest.max()
    dq, dk, dv = sa.attention_backward(q, q, q, out, lse, out, pattern)
    try:
        sa.parse("nothing")
    except sa.FormatError as error:
        print(error.status.lower(), error.argument, pairs, sa.__version__)
    return sa.attention(q, q, q, pattern)
"""
WRONG = """
import numpy as np
import sparseattn as sa
q = np.zeros((1, 16, 2, 8), np.float32)
sa.attention(q, q, q, None)
sa.attention(q, q, q, "causal", scal=2.0)
sa.attention(q, q, q, "causal", axes="hbsd")
sa.attention(q, q, q, "causal") + "text"
sa.window("x", 0)
sa.no_such_name()
sa.attention(q, q, q, "causal", return_lse=True, return_max_logits=True)[3]
sa.attention("q", q, q, "causal")
"""


def check(tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "program.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout


def test_right_programs_pass_strictly(tmp_path):
    assert "Success" in check(tmp_path, RIGHT)


def test_wrong_programs_are_seen(tmp_path):
    said = check(tmp_path, WRONG)
    assert [line for line in (5, 6, 7, 9, 10, 11, 12) if f"program.py:{line}: error" not in said] == []


def test_torch_programs_pass_strictly(tmp_path):
    pytest.importorskip("torch")
    program = """
import sparseattn as sa
import sparseattn.torch as sat
import torch

def run(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out, lse = sat.attention(q, q, q, mask, return_lse=True)
    out, lse = sa.attention(sa.attention(q, out, None, mask, head_dim_v=8), q, q, mask, return_lse=True)
    out = sat.scaled_dot_product_attention(out, q, q, mask, is_causal=True, pattern="window(3,0)")
    return sat.attention(out, q, q, "causal", sink_logits=lse[0, :, 0])
"""
    assert "Success" in check(tmp_path, program)


def test_jax_programs_pass_strictly(tmp_path):
    pytest.importorskip("jax")
    program = """
import jax
import sparseattn as sa

def run(q: jax.Array) -> jax.Array:
    out, lse = sa.attention(q, q, q, "causal", return_lse=True, scale=0.5)
    return sa.attention(out, q, q, "causal") + lse
"""
    assert "Success" in check(tmp_path, program)
