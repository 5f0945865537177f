# SPDX-License-Identifier: MIT
"""Plans of several pieces, through the C ABI, against the oracle; and what such a plan says of itself."""
import functools

import numpy as np
import pytest

from capi import ffi, sized
from oracle import Extent, attention_backward, attention_forward, to_mask
from test_options import BOUNDS, run

# (text, q_offset, softcap, with sinks)
CASES = [
    ("causal & (window(40,0) | strided(24))", None, 0, False),
    ("(window(30,9) | strided(20)) - sink(90)", -50, 2, True),  # the first rows see nothing
    ("documents(0,290) & (window(40,0) | strided(16))", None, 0, True),
    ("block_diagonal(32) | block_diagonal(128) & residue(4,1) | block_diagonal(320) & residue(8,1)", 0, 0.5, False),
]
SIZES = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 320, "seq_k": 330, "head_dim": 40, "head_dim_v": 24}


@functools.cache
def mask_of(text, q_offset):
    return to_mask(text, Extent(320, 330, 2, 4, q_offset))


def draw(random, dtype):
    query, key = (2, 4, 320), (2, 2, 330)
    shapes = {"q": query + (40,), "k": key + (40,), "v": key + (24,), "dout": query + (24,)}
    arrays = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return arrays | {"dlse": random.standard_normal(query).astype(np.float32)}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_pieces_compute_attention(library, monkeypatch, dtype, case):
    text, q_offset, softcap, has_sinks = CASES[case]
    random = np.random.default_rng(case)
    arrays = draw(random, dtype)
    options = {"softcap": softcap, "sink": random.normal(0, 3, 4).astype(np.float32) if has_sinks else None}
    sizes = SIZES | ({} if q_offset is None else {"q_offset": q_offset})
    pin_blocks(library, monkeypatch, dtype)
    plan = library.plan(library.parse(text), library.c.SPATTN_PLAN_BACKWARD, dtype=dtype, **sizes)
    for op in (library.c.SPATTN_OP_FORWARD, library.c.SPATTN_OP_BACKWARD):
        kernels = ffi.string(library.c.spattn_plan_kernel(plan, op)).decode()
        assert kernels.count(",") in (1, 2)
    mask = mask_of(text, q_offset)
    assert stats_of(library, plan) == stats_of_mask(mask)
    inputs = [arrays["q"], arrays["k"], arrays["v"], mask, 0.2]
    want = attention_forward(*inputs, **options)
    want += attention_backward(*inputs, arrays["dout"].astype(np.float64), arrays["dlse"], **options)
    got = run(library, text, sizes, arrays, 0.2, options, dtype, 0)
    for n, (one, other) in enumerate(zip(got, want, strict=True)):
        bound = max(BOUNDS[dtype], BOUNDS[one.dtype.type])
        size = max(1, np.abs(other[np.isfinite(other)]).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * size, err_msg=f"result {n} of {text}")


def pin_blocks(library, monkeypatch, dtype):
    """Lists of tokens would win on so few of them."""
    name = {"f4": "f32", "f2": "f16", "f8": "f64"}[np.dtype(dtype).str[1:]]
    names = [ffi.string(library.c.spattn_kernel_name(i)).decode() for i in range(library.c.spattn_kernel_count())
             if library.c.spattn_kernel_runs_here(i)]
    wanted = tuple(f"_block_{direction}_{name}_" for direction in ("forward", "backward"))
    monkeypatch.setenv("SPATTN_FORCE_KERNEL", ",".join(n for n in names if any(w in n for w in wanted)))


def stats_of(library, plan):
    stats = sized("spattn_stats")
    library.check(library.c.spattn_plan_stats(plan, stats))
    return stats.pairs, stats.row_min, stats.row_max, stats.rows_empty


def stats_of_mask(mask):
    rows = mask.sum(axis=-1)
    return rows.sum(), rows.min(), rows.max(), (rows == 0).sum()
