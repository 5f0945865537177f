# SPDX-License-Identifier: MIT
"""Sequences of several lengths, one after the other in arrays of tokens."""

import numpy as np
import oracle
import pytest

import sparseattn as sa

CU_Q, CU_K = [0, 5, 5, 40, 43, 70], [0, 9, 12, 50, 60, 83]


def operands(queries=70, keys=83, heads_q=4, heads_kv=2, head_dim=24, head_dim_v=16):
    """q, k, v, dout: [tokens, heads, head_dim]."""
    rng = np.random.default_rng(8)
    shapes = [
        (queries, heads_q, head_dim),
        (keys, heads_kv, head_dim),
        (keys, heads_kv, head_dim_v),
        (queries, heads_q, head_dim_v),
    ]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def of_each_document(q, k, v, dout, text, cu_q, cu_k, dlse):
    """out, lse, dq, dk, dv: the oracle's dense attention, a document at a time."""
    found = [np.zeros(x.shape) for x in (dout, q[..., 0].T, q, k, v)]
    found[1][:] = -np.inf
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        mask = oracle.to_mask(text, oracle.Extent(q1 - q0, k1 - k0, 1, q.shape[1]))
        one_q, one_dout = (x[None, q0:q1].swapaxes(1, 2) for x in (q, dout))
        one_k, one_v = (x[None, k0:k1].swapaxes(1, 2) for x in (k, v))
        if q0 == q1:
            continue
        scale = q.shape[-1] ** -0.5
        out, lse = oracle.attention_forward(one_q, one_k, one_v, mask, scale)
        gradients = oracle.attention_backward(one_q, one_k, one_v, mask, scale, one_dout, dlse[None, :, q0:q1])
        found[0][q0:q1], found[1][:, q0:q1] = out[0].swapaxes(0, 1), lse[0]
        for whole, part, (begin, end) in zip(found[2:], gradients, ((q0, q1), (k0, k1), (k0, k1))):
            whole[begin:end] = part[0].swapaxes(0, 1)
    return found


@pytest.mark.parametrize("text", ["full", "causal", "causal & (sink(2) | window(7,0))", "bigbird(4,3,1,1,9)"])
@pytest.mark.parametrize("reference", [False, True])
def test_documents_are_runs_of_their_own(text, reference):
    q, k, v, dout = operands()
    dlse = np.random.default_rng(1).standard_normal((4, 70), dtype=np.float32)
    expected = of_each_document(q, k, v, dout, text, CU_Q, CU_K, dlse)
    pattern, options = sa.per_document(text, CU_Q, CU_K), dict(axes="thd", reference=reference)
    out, lse = sa.attention(q, k, v, pattern, return_lse=True, **options)
    gradients = sa.attention_backward(q, k, v, out, lse, dout, pattern, dlse=dlse, **options)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), expected):
        assert one.shape == other.shape, name
        np.testing.assert_allclose(one, other, atol=2e-5, err_msg=name)


def test_self_attention_needs_one_list():
    q, k, v, _ = operands(70, 70)
    cu = np.array([0, 20, 30, 70], np.int32)
    packed = sa.attention(q, k, v, sa.per_document("causal", cu), axes="thd")
    np.testing.assert_allclose(packed, sa.attention(q, k, v, sa.documents(cu) & sa.causal(), axes="thd"), atol=2e-6)
    batched = sa.attention(q[None], k[None], v[None], sa.per_document("causal", cu))
    np.testing.assert_array_equal(packed, batched[0])


def test_out_and_views():
    q, k, v, _ = operands()
    pattern, out = sa.per_document("causal", CU_Q, CU_K), np.zeros((70, 8, 16), np.float32)
    assert sa.attention(q, k, v, pattern, axes="thd", out=out[:, ::2]).base is out
    plan = sa.Plan(pattern, heads_q=4, heads_kv=2, seq_q=70, seq_k=83, head_dim=24, head_dim_v=16, axes="thd")
    np.testing.assert_array_equal(plan.forward(np.asfortranarray(q), k, v[::-1].copy()[::-1]), out[:, ::2])
    assert (out[:, 1::2] == 0).all() and "per_document" in plan.explain()


@pytest.mark.parametrize(
    "call, kind, argument",
    [
        (lambda q, k, v: sa.attention(q[None], k, v, "full", axes="thd"), sa.ShapeError, "q"),
        (lambda q, k, v: sa.attention(q, k[:, 0], v, "full", axes="thd"), sa.ShapeError, "k"),
        (lambda q, k, v: sa.attention(q, k, v, "full"), sa.ShapeError, "q"),
        (lambda q, k, v: sa.attention(q, k, v[1:], "full", axes="thd"), sa.ShapeError, "v"),
        (lambda q, k, v: sa.attention(q, k, v, "full", axes="htd"), sa.ArgumentError, "problem.axes"),
        (
            lambda q, k, v: sa.Plan("full", batch=2, heads_q=1, seq_q=1, head_dim=1, axes="thd"),
            sa.ArgumentError,
            "problem.batch",
        ),
        (
            lambda q, k, v: sa.attention(q, k, v, sa.per_document("full", [0, 71], [0, 83]), axes="thd"),
            sa.ShapeError,
            "pattern",
        ),
    ],
)
def test_errors_are_typed_and_name_the_argument(call, kind, argument):
    with pytest.raises(kind) as caught:
        call(*operands()[:3])
    assert caught.value.argument == argument
