# SPDX-License-Identifier: MIT
"""Rows that lie so far apart that their places count beyond 32 bits: the same results as side by side."""
import mmap

import numpy as np
import pytest
from capi import ffi

SIZES = dict(batch=1, heads_q=2, heads_kv=1, seq_q=150, seq_k=150, head_dim=16, head_dim_v=16)
APART = 2**24  # elements: 150 rows reach beyond 2^31
DTYPES = {"f32": np.float32, "f16": np.float16, "f64": np.float64}
MAP_NORESERVE = 0x4000  # Linux; a name of mmap's since Python 3.13
ROWS = ["block_forward", "gather_forward", "reference_forward"]


def far(array):
    """The array once more, its rows APART: pages that nobody touches cost nothing."""
    item, (heads, rows, *columns) = array.itemsize, array.shape[1:]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, rows * APART * item, flags)
    except OSError as error:
        pytest.skip(f"no room for addresses: {error}")
    strides = (0, int(np.prod(columns)) * item, APART * item, *[item for _ in columns])
    apart = np.ndarray(array.shape, array.dtype, memory, strides=strides)
    apart[...] = array
    return apart


def names_of(library, dtype, row):
    """Rows that run here: those of a form have one name but for the pass."""
    count = library.c.spattn_kernel_count()
    names = {ffi.string(library.c.spattn_kernel_name(i)).decode() for i in range(count)
             if library.c.spattn_kernel_runs_here(i)}
    forward = sorted(name for name in names if row in name and f"_{dtype}" in name)
    assert forward and all(name.replace("forward", "backward") in names for name in forward)
    return [f"{name},{name.replace('forward', 'backward')}" for name in forward]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["causal & dilated(120,0,3)", "window(9,0) | global_tokens(3,70,140)"])
def test_places_beyond_32_bits(library, monkeypatch, dtype, row, text):
    random = np.random.default_rng(1)
    inputs = {name: random.standard_normal((1, heads, 150, 16)).astype(DTYPES[dtype])
              for name, heads in (("q", 2), ("k", 1), ("v", 1), ("dout", 2))}
    outputs = {"out": "q", "dq": "q", "dk": "k", "dv": "k"}
    flags = library.c.SPATTN_PLAN_BACKWARD | (library.c.SPATTN_PLAN_REFERENCE if "reference" in row else 0)
    for names in names_of(library, dtype, row):
        monkeypatch.setenv("SPATTN_FORCE_KERNEL", names)
        plan = library.plan(library.parse(text), flags, dtype=DTYPES[dtype], **SIZES)
        found = []
        for place in (np.array, far):
            given = {name: place(array) for name, array in inputs.items()}
            given |= {name: place(np.full_like(inputs[of], np.nan)) for name, of in outputs.items()}
            given["lse"] = place(np.full((1, 2, 150), np.nan, np.float32))
            library.run(plan, "forward", **{name: given[name] for name in ("q", "k", "v", "out", "lse")})
            library.run(plan, "backward", **given)
            found.append(given)
        for name in (*outputs, "lse"):
            np.testing.assert_array_equal(found[1][name], found[0][name], err_msg=f"{names} {name}")
