# SPDX-License-Identifier: MIT
"""Keys listed at run time, values that lie in keys, and the largest scores, against the oracle."""

import operator

import numpy as np
import oracle
import pytest

import sparseattn as sa

# pattern, the part known beforehand, block_q, block_k, most entries
CASES = [
    (sa.runtime_tokens(9), None, 1, 1, 9),
    (sa.runtime_tokens(30) & sa.causal(), "causal", 1, 1, 30),
    ("causal & runtime_tokens(12)", "causal", 1, 1, 12),
    (sa.runtime_blocks(8, 4, 3), None, 8, 4, 3),
    (
        sa.rows(sa.runtime_tokens(20) & sa.causal(), [(20, 37), (0, 16)], 40),
        "rows([20,37,0,16],40,causal)",
        1,
        1,
        20,
    ),
    (
        sa.per_head(["causal", "full", "sink(7)", "full"]) & sa.runtime_blocks(5, 16, 4),
        "per_head([0,1,2,1],causal,full,sink(7))",
        5,
        16,
        4,
    ),
]
SIZES = dict(batch=2, heads_q=4, heads_kv=2, seq_q=33, seq_k=45)


def operands(head_dim=24, head_dim_v=16, elements=np.float32):
    """q, k, v, dout [batch, seq, heads, head_dim] and dlse."""
    rng = np.random.default_rng(5)
    shapes = [(2, 33, 4, head_dim), (2, 45, 2, head_dim), (2, 45, 2, head_dim_v), (2, 33, 4, head_dim_v), (2, 4, 33)]
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    return [*(x.astype(elements) for x in arrays[:4]), arrays[4]]


def lists(block_q, block_k, most, dtype):
    """Repeats, entries below 0 and beyond the keys, unsorted; and counts from less than nothing to more than all."""
    rng = np.random.default_rng(6)
    shape = (2, -(-33 // block_q), 2)
    indices = rng.integers(-2, -(-45 // block_k) + 2, (*shape, most))
    return indices.astype(dtype), rng.integers(-1, most + 2, shape).astype(dtype)


def truth(q, k, v, dout, dlse, times):
    """out, lse, max_logits, dq, dk, dv in bshd of how often each key is seen."""
    swap = lambda x: x.swapaxes(1, 2)  # noqa: E731
    q, k, v, dout = (swap(x.astype(np.float64)) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    out, lse = oracle.attention_forward(q, k, v, times, scale)
    gradients = oracle.attention_backward(q, k, v, times, scale, dout, dlse)
    largest = oracle.scores(q, k, times > 0, scale).max(-1)
    return swap(out), lse, largest, *map(swap, gradients)


def assert_close(found, expected, atol=2e-5):
    for name, one, other in zip(("out", "lse", "max_logits", "dq", "dk", "dv"), found, expected):
        assert one.shape == other.shape, name
        bound = 1e-12 if one.dtype == np.float64 else atol
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=1e-7, atol=bound, err_msg=name)


@pytest.mark.parametrize("pattern, known, block_q, block_k, most", CASES, ids=[str(case[0]) for case in CASES])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("elements", [np.float32, np.float64])
def test_lists_are_multisets(pattern, known, block_q, block_k, most, dtype, with_counts, reference, elements):
    q, k, v, dout, dlse = operands(elements=elements)
    indices, counts = lists(block_q, block_k, most, dtype)
    given = dict(indices=indices, index_counts=counts if with_counts else None)
    times = oracle.listed(indices, given["index_counts"], 4, 33, 45, block_q, block_k)
    if known:
        times = times * oracle.to_mask(known, oracle.Extent(33, 45, 2, 4))
    assert times.max() > 1
    wanted = dict(return_lse=True, return_max_logits=True)
    out, lse, largest = sa.attention(q, k, v, pattern, reference=reference, **wanted, **given)
    gradients = sa.attention_backward(q, k, v, out, lse, dout, pattern, dlse=dlse, reference=reference, **given)
    assert_close((out, lse, largest, *gradients), truth(q, k, v, dout, dlse, times))


def test_a_plan_runs_with_new_lists_each_time():
    q, k, v, *_ = operands()
    plan = sa.plan(sa.runtime_tokens(5), q, k, v)
    for first in (0, 20, 40):
        indices = np.broadcast_to(np.arange(first, first + 5), (2, 33, 2, 5))  # strides of 0
        out = plan.forward(q, k, v, indices=indices)
        window = sa.global_keys(range(first, first + 5))
        np.testing.assert_allclose(out, sa.attention(q, k, v, window), atol=2e-6)
    nothing = plan.forward(q, k, v, indices=indices, index_counts=np.zeros((2, 33, 2), int), return_lse=True)
    assert (nothing[0] == 0).all() and np.isneginf(nothing[1]).all()


def test_packed_lists_have_no_batch():
    q, k, v, *_ = operands()
    indices, counts = lists(1, 1, 9, np.int64)
    given = dict(indices=indices, index_counts=counts)
    expected = sa.attention(q, k, v, "runtime_tokens(9)", **given)
    for b in range(2):
        own = {**given, "indices": indices[b], "index_counts": counts[b]}
        found = sa.attention(q[b], k[b], v[b], "runtime_tokens(9)", axes="thd", **own)
        np.testing.assert_allclose(found, expected[b], atol=2e-6)


@pytest.mark.parametrize("axes", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("reference", [False, True])
def test_values_in_keys(axes, reference):
    q, k, _, dout, dlse = operands()
    order = {"bshd": lambda x: x, "bhsd": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)), "thd": lambda x: x[0]}[axes]
    back = {"bshd": lambda x: x, "bhsd": lambda x: x.swapaxes(1, 2), "thd": lambda x: x[None]}[axes]
    only = slice(0, 1) if axes == "thd" else slice(None)
    mask = oracle.to_mask("causal", oracle.Extent(33, 45, 2, 4))
    out, lse, largest, dq, dk, dv = truth(*(x[only] for x in (q, k, k[..., :16], dout, dlse)), mask[only])
    dk[..., :16] += dv
    options = dict(axes=axes, head_dim_v=16, reference=reference)
    found = sa.attention(order(q), order(k), None, "causal", return_lse=True, return_max_logits=True, **options)
    given = dlse[0] if axes == "thd" else dlse
    gradients = sa.attention_backward(
        order(q), order(k), None, *found[:2], order(dout), "causal", dlse=given, **options
    )
    assert gradients[2] is None
    rows = [x[None] if axes == "thd" else x for x in found[1:]]
    assert_close((back(found[0]), *rows, *map(back, gradients[:2])), (out, lse, largest, dq, dk))


def test_results_come_as_asked():
    q, k, v, *_ = operands()
    out, largest = sa.attention(q, k, v, "causal - sink(13)", return_max_logits=True)
    assert out.shape == (2, 33, 4, 16) and largest.shape == (2, 4, 33) and np.isneginf(largest[:, :, 0]).all()
    assert isinstance(sa.attention(q, k, v, "causal"), np.ndarray)


def test_runtime_patterns_are_patterns():
    pattern = sa.causal() & sa.runtime_blocks(64, 32, 5)
    assert pattern == sa.parse("runtime_blocks(64,32,5) & causal") == sa.load(pattern.save())
    assert sa.runtime_tokens(3) == sa.parse("runtime_tokens(3)") != sa.runtime_tokens(4)


Q, K, V, *_ = operands()
INDICES = np.zeros((2, 33, 2, 4), np.int64)


def run(pattern, **given):
    return sa.attention(Q, K, V, pattern, **given)


@pytest.mark.parametrize(
    "call, kind, argument",
    [
        (lambda: sa.runtime_tokens(0), sa.ArgumentError, "max_tokens_per_row"),
        (lambda: sa.runtime_blocks(0, 1, 1), sa.ArgumentError, "block_q"),
        (lambda: sa.runtime_tokens(4).to_mask(9), sa.UnsupportedError, "pattern"),
        (lambda: sa.runtime_tokens(4) | sa.causal(), sa.UnsupportedError, "parts[0]"),
        (lambda: sa.runtime_tokens(4) & sa.runtime_tokens(4), sa.UnsupportedError, "parts[1]"),
        (lambda: sa.parse("runtime_tokens(4) | causal"), sa.FormatError, "text"),
        (lambda: run("runtime_tokens(4)"), sa.ArgumentError, "indices"),
        (lambda: run("causal", indices=INDICES), sa.ArgumentError, "indices"),
        (lambda: run("runtime_tokens(5)", indices=INDICES), sa.ShapeError, "indices"),
        (lambda: run("runtime_tokens(4)", indices=INDICES[0]), sa.ShapeError, "indices"),
        (lambda: run("runtime_tokens(4)", indices=INDICES.astype("f4")), sa.DTypeError, "indices"),
        (lambda: run("runtime_tokens(4)", indices=INDICES.astype(">i4")), sa.DTypeError, "indices"),
        (lambda: run("runtime_tokens(4)", indices=INDICES, index_counts=INDICES), sa.ShapeError, "index_counts"),
        (lambda: sa.plan("causal", Q, K, None, head_dim_v=16).forward(Q, K, V), sa.ArgumentError, "v"),
        (lambda: sa.plan("causal", Q, K, V).forward(Q, K), sa.ArgumentError, "v"),
        (lambda: sa.plan("causal", Q, K, None, head_dim_v=25), sa.ArgumentError, "problem.head_dim_v"),
    ],
)
def test_errors_are_typed_and_name_the_argument(call, kind, argument):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.argument == argument and argument in str(caught.value)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_topk_lists_the_largest(library):
    scores = np.random.default_rng(8).standard_normal((2, 33, 2, 45)).astype(np.float32)
    scores[:, :, :, 30:] = -np.inf
    scores[0, 3, 1, 4:] = -np.inf
    largest = np.sort(scores, -1)[..., -7:]
    make = {"numpy": "array", "torch": "from_numpy", "jax": "numpy.array"}[library]
    given = operator.attrgetter(make)(pytest.importorskip(library))(scores)
    found = sa.topk(given, np.int64(7))
    assert type(found) is type(given) and str(found.dtype).endswith("int32" if library == "jax" else "int64")
    indices = np.asarray(found)
    values = np.where(indices < 0, -np.inf, np.take_along_axis(scores, indices.clip(0), -1))
    np.testing.assert_array_equal(np.sort(values, -1), largest)
    assert (indices[0, 3, 1] == -1).sum() == 3
    q, k, v, *_ = operands()
    kept = (scores >= largest[..., :1]) & (scores > -np.inf)
    by_head = np.repeat(kept.swapaxes(1, 2), 2, axis=1)
    out = sa.attention(q, k, v, sa.runtime_tokens(7), indices=indices)
    np.testing.assert_allclose(out, sa.attention(q, k, v, by_head), atol=2e-6)


def test_topk_is_traced():
    jax = pytest.importorskip("jax")
    q, k, v, *_ = (jax.numpy.asarray(x) for x in operands())
    scores = jax.random.normal(jax.random.key(8), (2, 33, 2, 45))
    attend = lambda q, s: sa.attention(q, k, v, "causal & runtime_tokens(7)", indices=sa.topk(s, 7))  # noqa: E731
    right = sa.attention(q, k, v, "causal & runtime_tokens(7)", indices=sa.topk(np.asarray(scores), 7))
    np.testing.assert_allclose(jax.jit(attend)(q, scores), right, atol=2e-6)
    dq, dscores = jax.grad(lambda q, s: attend(q, s).sum(), (0, 1))(q, scores)
    assert dq.shape == q.shape and not dscores.any()
    assert sorted(sa.topk(jax.numpy.asarray([2, -np.inf, 1], "bfloat16"), 3).tolist()) == [-1, 0, 2]
    with pytest.raises(sa.DTypeError, match="scores is int32"):
        sa.topk(jax.numpy.arange(4, dtype="int32"), 2)


def test_topk_is_compiled():
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")  # for whose arrays topk looks, too
    compiled = torch.compile(lambda scores: sa.topk(scores, 2), backend="eager", fullgraph=True)
    assert sorted(compiled(torch.tensor([2.0, -torch.inf, 1.0])).tolist()) == [0, 2]


@pytest.mark.parametrize(
    "scores, k, kind, argument",
    [
        (np.float32(3), 1, sa.ShapeError, "scores"),
        (np.zeros((3, 4), int), 1, sa.DTypeError, "scores"),
        (np.zeros((3, 4)), 5, sa.ArgumentError, "k"),
        (np.zeros((3, 4)), 0, sa.ArgumentError, "k"),
        (np.zeros((3, 4)), 2.0, sa.DTypeError, "k"),
    ],
)
def test_topk_refuses(scores, k, kind, argument):
    with pytest.raises(kind) as caught:
        sa.topk(scores, k)
    assert caught.value.argument == argument


def test_lists_that_are_missing_or_too_many_are_named_with_the_pattern():
    q, lists = np.zeros((1, 8, 2, 8), np.float32), np.zeros((1, 8, 2, 4), np.int32)
    with pytest.raises(sa.ArgumentError, match="indices is given, and no part of causal is .*: None") as caught:
        sa.attention(q, q, q, "causal", indices=lists)
    assert caught.value.argument == "indices" and caught.value.status == "SPATTN_E_STATE"
    for given in ({}, {"index_counts": lists[..., 0]}):
        with pytest.raises(sa.ArgumentError, match=r"indices is missing; accepted: an array \[1, 8, 2, 4\]") as caught:
            sa.attention(q, q, q, "causal & runtime_tokens(4)", **given)
        assert caught.value.argument == "indices" and caught.value.status == "SPATTN_E_NULL"
    with pytest.raises(sa.ArgumentError, match="sink_logits is None"):
        sa.plan("causal", q, q, q, sink_logits=True).forward(q, q, q)
