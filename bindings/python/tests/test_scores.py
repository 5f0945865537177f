# SPDX-License-Identifier: MIT
"""What changes scores: softcap, learned sinks, float64, against the oracle."""

import numpy as np
import oracle
import pytest

import sparseattn as sa

TEXT = "causal & (sink(2) | window(20,0)) - global_keys(0)"  # the first query sees nothing


def operands(dtype=np.float32):
    """q, k, v, dout [batch, seq, heads, head_dim], dlse, sink_logits."""
    rng = np.random.default_rng(3)
    shapes = [(2, 50, 4, 24), (2, 50, 2, 24), (2, 50, 2, 16), (2, 50, 4, 16)]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return *arrays, rng.standard_normal((2, 4, 50)).astype(np.float32), np.array([0.5, -2, -np.inf, 3], np.float32)


def truth(q, k, v, dout, dlse, scale=None, **options):
    """out, lse, max_logits, dq, dk, dv and dsink, in bshd."""
    swap = lambda x: x.swapaxes(1, 2)  # noqa: E731
    q, k, v, dout = (swap(x.astype(np.float64)) for x in (q, k, v, dout))
    mask, scale = oracle.to_mask(TEXT, oracle.Extent(50, 50, 2, 4)), 24**-0.5 if scale is None else scale
    out, lse = oracle.attention_forward(q, k, v, mask, scale, **options)
    largest = oracle.scores(q, k, mask, scale, options.get("softcap")).max(-1)
    dq, dk, dv, *dsink = oracle.attention_backward(q, k, v, mask, scale, dout, dlse, **options)
    return swap(out), lse, largest, swap(dq), swap(dk), swap(dv), *dsink


def run(q, k, v, dout, dlse, sink_logits=None, **options):
    given = dict(sink_logits=sink_logits, **options)
    out, lse, largest = sa.attention(q, k, v, TEXT, return_lse=True, return_max_logits=True, **given)
    return out, lse, largest, *sa.attention_backward(q, k, v, out, lse, dout, TEXT, dlse=dlse, **given)


def assert_close(found, expected, bound=2e-5):
    assert len(found) == len(expected)
    for name, one, other in zip(("out", "lse", "max_logits", "dq", "dk", "dv", "dsink_logits"), found, expected):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound, err_msg=name)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("softcap, scale", [(1.5, None), (20.0, 1.0), (0.01, None), (1e6, None)])
def test_softcap(reference, softcap, scale):
    *arrays, _ = operands()
    found = run(*arrays, softcap=softcap, scale=scale, reference=reference)
    assert_close(found, truth(*arrays, softcap=softcap, scale=scale))
    assert np.abs(found[2][np.isfinite(found[2])]).max() <= softcap * 1.000001


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_sink_logits(reference, softcap):
    *arrays, sink_logits = operands()
    found = run(*arrays, sink_logits, softcap=softcap, reference=reference)
    assert_close(found, truth(*arrays, sink=sink_logits, softcap=softcap))
    assert (found[0][:, 0] == 0).all() and found[-1].shape == (4,) and found[-1].dtype == np.float32
    np.testing.assert_array_equal(found[1][:, :, 0], np.broadcast_to(sink_logits, (2, 4)))  # a row without keys


def test_a_sink_of_minus_infinity_is_none():
    *arrays, sink_logits = operands()
    found = run(*arrays, np.full_like(sink_logits, -np.inf))
    assert_close(found[:6], run(*arrays), 2e-6)
    assert (found[6] == 0).all()


def test_float64():
    *arrays, dlse, sink_logits = operands(np.float64)
    for sink in (None, sink_logits):
        found = run(*arrays, dlse, sink, softcap=4.0)
        assert {x.dtype for x in (found[0], *found[3:6])} == {np.dtype(np.float64)}
        expected = truth(*arrays, dlse, softcap=4.0, **({} if sink is None else {"sink": sink}))
        assert_close([found[0]], [expected[0]], 1e-12)
        assert_close(found, expected, 1e-6)  # lse is float32, and gradients come from it


Q, K, V, DOUT, DLSE, SINK = operands()


@pytest.mark.parametrize(
    "call, kind, argument",
    [
        (lambda: sa.attention(Q, K, V, TEXT, softcap=-1.0), sa.ArgumentError, "problem.softcap"),
        (lambda: sa.attention(Q, K, V, TEXT, softcap=float("nan")), sa.ArgumentError, "problem.softcap"),
        (lambda: sa.attention(Q, K, V, TEXT, sink_logits=SINK[:3]), sa.ShapeError, "sink_logits"),
        (lambda: sa.attention(Q, K, V, TEXT, sink_logits=SINK[None]), sa.ShapeError, "sink_logits"),
        (lambda: sa.attention(Q, K, V, TEXT, sink_logits=SINK.astype(float)), sa.DTypeError, "sink_logits"),
        (lambda: sa.plan(TEXT, Q, K, V).forward(Q, K, V, sink_logits=SINK), sa.ArgumentError, "sink_logits"),
        (lambda: sa.plan(TEXT, Q, K, V, sink_logits=True).forward(Q, K, V), sa.ArgumentError, "sink_logits"),
    ],
)
def test_errors_are_typed_and_name_the_argument(call, kind, argument):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.argument == argument
