# SPDX-License-Identifier: MIT
"""What a type checker says of programs that use the package: nothing where they are right, something where not."""

import importlib.util
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("mypy")
RIGHT = """
import ml_dtypes
import numpy as np
import sparseattn as sa
from numpy.typing import NDArray

def run(q: NDArray[np.float32]) -> NDArray[np.float32]:
    pattern: sa.Pattern = sa.causal() & (sa.sink(4) | sa.window(255, 0)) & sa.xref([1, 2], sa.symbols_of(str, [1, 2]))
    out, lse = sa.attention(q, q, q, "causal", return_lse=True, axes="bshd", scale=0.5)
    out, lse, largest = sa.attention(q, q, q, np.ones((16, 16), bool), return_lse=True, return_max_logits=True)
    plan: sa.Plan = sa.plan(pattern, q, q, q, backward=True)
    out = plan.forward(q, q, q, q_scales=largest)
    pairs: float = plan.stats().pairs + pattern.density((8, 16)) + float(largest.max())
    dq, dk, dv = sa.attention_backward(q, q, q, out, lse, out, pattern)
    try:
        sa.parse("nothing")
    except sa.FormatError as error:
        print(error.status.lower(), error.argument, pairs, sa.__version__)
    return sa.attention(q, q, q, pattern)

def of_float8(q: NDArray[ml_dtypes.float8_e4m3fn]) -> NDArray[ml_dtypes.bfloat16]:
    return sa.attention(q, q, q, "causal", scale=0.5 / 448)
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


TORCH = """
import sparseattn as sa
import sparseattn.torch as sat
import torch

def run(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out, lse = sat.attention(q, q, q, mask, return_lse=True)
    out, lse = sa.attention(sa.attention(q, out, None, mask, head_dim_v=8), q, q, mask, return_lse=True)
    out = sat.scaled_dot_product_attention(out, q, q, mask, is_causal=True, pattern="window(3,0)")
    plan: sat.TensorPlan = sat.plan("causal", q, q, q, backward=True)
    dq, dk, dv = plan.backward(q, q, q, sa.plan("causal", q, q, q).forward(q, q, q), lse, plan.forward(q, q, q))
    cache = sat.KVCache(2, 64, 2, 8, dtype=torch.float16)
    cache[1].append(q, q, counts=[1])
    cache.forget(4, mask.sum())
    cache[:1].forget([4], 9)
    cache.keep(sat.decode(q, cache, "causal", parents=mask).argmax(), 3, counts=[1, 2])
    out, lse = sat.decode(sat.decode(q, cache, "causal", axes="bhsd"), cache[:1], "causal", out=out, return_lse=True)
    reveal_type(out)
    return sat.attention(out, q, q, "causal", sink_logits=lse[0, :, 0], q_scales=lse)
"""
JAX = """
import jax
import sparseattn as sa

def run(q: jax.Array) -> jax.Array:
    out, lse = sa.attention(q, q, q, "causal", return_lse=True, scale=0.5)
    reveal_type(out)
    return sa.attention(out, q, q, "causal") + lse
"""
# The checker reads where others declare arrays, and classes that we derive from, and not a thousand modules more, nor
# what is not here. Older torch has no types for apply of autograd's functions.
CONFIG = """
[mypy]
strict = True
untyped_calls_exclude = sparseattn.torch._attention._Attention,sparseattn.torch._attention._Once
[mypy-torch.*,jax.*,transformers.*,matplotlib.*,tokenizers.*,gguf.*,ml_dtypes.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-torch,torch._tensor,torch._C,jax,jax._src.basearray]
follow_imports = normal
[mypy-torch.autograd,torch.autograd.function,torch.nn,torch.nn.modules,torch.nn.modules.module]
follow_imports = normal
"""


def check(folder, **programs):
    """What is said of all programs; one run, as reading NumPy takes most of the time."""
    files = [folder / f"{name}.py" for name in programs]
    for file, program in zip(files, programs.values()):
        file.write_text(program)
    return mypy(folder, *(file.name for file in files))


def mypy(folder, *arguments):
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--config-file=mypy.ini", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def test_right_programs_pass_strictly_and_wrong_ones_do_not(tmp_path):
    said = check(tmp_path, right=RIGHT, wrong=WRONG)
    assert "wrong.py" in said and "right.py" not in said, said
    assert [line for line in (5, 6, 7, 9, 10, 11, 12) if f"wrong.py:{line}: error" not in said] == [], said


def test_programs_of_tensors_pass_strictly(tmp_path):
    programs = {"torch": ("of_torch", TORCH, "torch._tensor.Tensor"), "jax": ("of_jax", JAX, "basearray.Array")}
    here = [programs[name] for name in programs if importlib.util.find_spec(name)]
    if not here:
        pytest.skip("neither torch nor JAX is here")
    said = check(tmp_path, **{name: program for name, program, _ in here})
    assert "Success" in said, said
    for name, _, kind in here:  # and not Any, of which nothing is wrong
        assert any(line.startswith(name) and f'{kind}"' in line for line in said.splitlines()), said


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")
def test_the_package_itself_passes_strictly(tmp_path):
    said = mypy(tmp_path, ROOT / "bindings" / "python" / "src" / "sparseattn")
    assert "Success" in said, said
    checked = int(said.split("no issues found in ")[1].split()[0])
    assert checked > 40, said
