# SPDX-License-Identifier: MIT
"""Lists that come with a call mean what the oracle says: multisets, cut to the pattern; through the C ABI, on the row
that the plan chooses and on the reference."""
import numpy as np
import pytest
from oracle import Extent, attention_backward, attention_forward, listed, scores, to_mask

FLOATS = ("lse", "max_logits", "dsink_logits")  # in any dtype

# (leaf, block_q, block_k, the known part or None, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v)
CASES = [
    ("runtime_tokens(6)", 1, 1, None, 1, 1, 1, 5, 9, 4, 4),
    ("runtime_tokens(40)", 1, 1, None, 2, 4, 2, 7, 50, 20, 12),
    ("runtime_tokens(9)", 1, 1, "causal", 1, 6, 1, 30, 20, 16, 16),          # the first rows are empty
    ("runtime_tokens(70)", 1, 1, "window(3,0) | sink(2)", 1, 70, 1, 9, 40, 24, 16),
    ("runtime_tokens(12)", 1, 1, "per_head([0,1,0,1], causal, full)", 1, 4, 2, 12, 12, 8, 8),
    ("runtime_blocks(4,3,6)", 4, 3, None, 1, 2, 1, 10, 17, 8, 8),
    ("runtime_blocks(16,8,4)", 16, 8, "causal", 2, 4, 4, 33, 70, 16, 8),
    ("runtime_blocks(64,64,9)", 64, 64, "causal", 1, 4, 2, 150, 150, 16, 8),     # by rows that read layouts
    ("runtime_blocks(128,64,12)", 128, 64, None, 2, 2, 1, 200, 260, 8, 8),
    ("runtime_blocks(64,32,9)", 64, 32, "causal", 1, 4, 2, 150, 150, 16, 8),     # whose tiles join blocks
]


def hostile_lists(rng, shape, blocks):
    """Repeats, entries below 0, beyond the keys, unsorted; and counts from less than nothing to more than there is."""
    indices = rng.integers(-2, blocks + 2, shape)
    indices[..., shape[-1] // 2:] = np.where(rng.random((*shape[:-1], shape[-1] - shape[-1] // 2)) < 0.3,
                                             indices[..., :1], indices[..., shape[-1] // 2:])
    return indices, rng.integers(-1, shape[-1] + 2, shape[:-1])


def problem_of(case, rng):
    leaf, block_q, block_k, known, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v = case
    sizes = dict(batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim,
                 head_dim_v=head_dim_v)
    shape = (batch, -(-seq_q // block_q), heads_kv, int(leaf.strip(")").split(",")[-1].split("(")[-1]))
    return sizes, f"{leaf} & ({known})" if known else leaf, hostile_lists(rng, shape, -(-seq_k // block_k))


def times_of(case, sizes, indices, counts):
    block_q, block_k, known = case[1:4]
    batch, heads_q, seq_q, seq_k = (sizes[name] for name in ("batch", "heads_q", "seq_q", "seq_k"))
    times = listed(indices, counts, heads_q, seq_q, seq_k, block_q, block_k)
    return times * to_mask(known, Extent(seq_q, seq_k, batch, heads_q)) if known else times


# In double, lse and max_logits and the sinks' gradient are float32 all the same.
def close(got, want, name, dtype=np.float32):
    rtol, atol = (1e-12, 1e-13) if got.dtype == np.float64 else (2e-5, 3e-6) if dtype == np.float32 else (3e-7, 3e-7)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{case[3]}" for case in CASES])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("dtype, softcap, has_sinks", [(np.float32, 0, False), (np.float64, 0, False),
                                                       (np.float32, 1.5, True), (np.float64, 1.5, True)])
def test_lists_are_multisets(library, case, reference, wide, with_counts, dtype, softcap, has_sinks):
    rng = np.random.default_rng(7)
    sizes, text, (indices, counts) = problem_of(case, rng)
    counts = counts if with_counts else None
    times = times_of(case, sizes, indices, counts)
    assert times.max() > 1 and (times == 0).any()
    batch, heads_q, heads_kv, seq_q, seq_k, d, d_v = sizes.values()
    q, dout = (rng.standard_normal((batch, heads_q, seq_q, x)).astype(dtype) for x in (d, d_v))
    k, v = (rng.standard_normal((batch, heads_kv, seq_k, x)).astype(dtype) for x in (d, d_v))
    sinks = rng.normal(0, 2, heads_q).astype(np.float32) if has_sinks else None
    dlse = rng.standard_normal((batch, heads_q, seq_q)).astype(np.float32)
    unseen = times.reshape(batch, heads_kv, -1, seq_k).sum(2) == 0
    scale = d ** -0.5
    want_out, want_lse = attention_forward(q, k, v, times, scale, softcap, sinks)
    gradients = attention_backward(q, k, v, times, scale, dout.astype(np.float64), dlse, softcap, sinks)
    want = dict(zip(("dq", "dk", "dv", "dsink_logits"), gradients), out=want_out, lse=want_lse,
                max_logits=scores(q, k, times > 0, scale, softcap).max(-1))
    k[unseen], v[unseen] = np.nan, np.nan  # what nobody lists does not matter
    got = {name: np.full(value.shape, np.nan, np.float32 if name in FLOATS else dtype) for name, value in want.items()}
    index = np.int64 if wide else np.int32
    lists = dict(indices=indices.astype(index), index_counts=None if counts is None else counts.astype(index))
    flags = library.c.SPATTN_PLAN_BACKWARD | (library.c.SPATTN_PLAN_REFERENCE if reference else 0)
    flags |= library.c.SPATTN_PLAN_SINK_LOGITS if has_sinks else 0
    plan = library.plan(library.parse(text), flags, dtype=dtype, softcap=softcap, **sizes)
    inputs = dict(q=q, k=k, v=v, sink_logits=sinks, **lists)
    results = {name: value for name, value in got.items() if name != "max_logits"}
    library.run(plan, "forward", **inputs, **{x: got[x] for x in ("out", "lse", "max_logits")})
    library.run(plan, "backward", **inputs, dout=dout, dlse=dlse, **results)
    for name, value in want.items():
        close(got[name], value, name, dtype)


@pytest.mark.parametrize("text", ["causal", "runtime_tokens(8) & causal", "csr"])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_in_keys(library, text, reference, dtype):
    """v is k[..., :head_dim_v], and dk receives both gradients."""
    rng = np.random.default_rng(3)
    sizes = dict(batch=2, heads_q=4, heads_kv=1, seq_q=20, seq_k=24, head_dim=20, head_dim_v=12)
    indices = rng.integers(0, 24, (2, 20, 1, 8))
    mask = to_mask("causal", Extent(20, 24, 2, 4))
    if text.startswith("runtime"):
        mask = mask * listed(indices, None, 4, 20, 24)
    elif text == "csr":
        rows, columns = range(0, 63, 3), [i + x for i in range(20) for x in (0, 1, 3)]
        text = f"csr([{','.join(map(str, rows))}],[{','.join(map(str, columns))}],24)"
        mask = np.zeros_like(mask)
        for i in range(20):
            mask[:, :, i, [i, i + 1, i + 3]] = True
    q, dout = (rng.standard_normal((2, 4, 20, x)).astype(dtype) for x in (20, 12))
    k = rng.standard_normal((2, 1, 24, 20)).astype(dtype)
    v = k[..., :12]
    out, lse = attention_forward(q, k, v, mask, 20 ** -0.5)
    dq, dk, dv = attention_backward(q, k, v, mask, 20 ** -0.5, dout.astype(np.float64))
    dk[..., :12] += dv
    want = dict(out=out, lse=lse, dq=dq, dk=dk)
    got = {name: np.full(value.shape, np.nan, np.float32 if name in FLOATS else dtype) for name, value in want.items()}
    flags = library.c.SPATTN_PLAN_BACKWARD | library.c.SPATTN_PLAN_VALUE_IN_KEY
    flags |= library.c.SPATTN_PLAN_REFERENCE if reference else 0
    plan = library.plan(library.parse(text), flags, dtype=dtype, **sizes)
    lists = dict(indices=indices.astype(np.int32)) if text.startswith("runtime") else {}
    library.run(plan, "forward", q=q, k=k, out=got["out"], lse=got["lse"], **lists)
    library.run(plan, "backward", q=q, k=k, dout=dout, **got, **lists)
    for name, value in want.items():
        close(got[name], value, name, dtype)
