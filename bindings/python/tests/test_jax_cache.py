# SPDX-License-Identifier: MIT
"""Queries of JAX on a cache: what a plan of NumPy gives for the same arrays, jitted, mapped, as a sequence grows."""

import functools

import numpy as np
import oracle
import pytest
from conftest import draw_parents

import sparseattn as sa

jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402

import sparseattn.jax as saj  # noqa: E402

STREAMING = "causal & (sink(2) | window(9,0))"
BATCH, SEQ_K, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM_V, PAGE = 3, 48, 4, 2, 16, 8, 6
STARTS = np.array([17, -2, 45])  # the first queries of the second entry, and the last of the third, are outside


def operands(seq_q=5, dtype=np.float32):
    """q, and pages of k and v in any order, among two that are nobody's; and their table."""
    rng = np.random.default_rng(1)
    pages = BATCH * SEQ_K // PAGE
    shapes = [(BATCH, seq_q, HEADS_Q, HEAD_DIM), *((pages + 2, PAGE, HEADS_KV, d) for d in (HEAD_DIM, HEAD_DIM_V))]
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v, rng.permutation(pages + 2)[:pages].reshape(BATCH, -1)


def in_one_piece(pool, table):
    """[batch, seq_k, heads_kv, ...]"""
    return pool[table].reshape(BATCH, SEQ_K, *pool.shape[2:])


def right(q, k, v, pattern, **given):
    """out and lse of a plan of NumPy."""
    axes, parents, table = given.pop("axes", "bshd"), given.get("parents"), given.get("page_table")
    options = {name: given.pop(name) for name in ("scale", "softcap", "head_dim_v") if name in given}
    options["sink_logits"] = given.get("sink_logits") is not None
    made = {"axes": axes, "starts": True, "parents": parents is not None, "page_table": table}
    return sa.plan(pattern, q, k, v, **made, **options).forward(q, k, v, **given, return_lse=True)


def check(q, k, v, pattern, starts, bound=1e-6, **given):
    """Traced and not; what is constant in a call stays so, and arrays are arguments of the jitted function."""
    constant = {name: given.pop(name) for name in ("axes", "scale", "softcap", "head_dim_v") if name in given}
    found = functools.partial(saj.decode, pattern=pattern, return_lse=True, **constant)
    expected = right(q, k, v, pattern, starts=starts, **given, **constant)
    arrays = {"q": q, "k": k, "v": v, "starts": starts, **given}
    arrays = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
    for results in (found(**arrays), jax.jit(lambda arrays: found(**arrays))(arrays)):
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=bound, atol=bound)


@pytest.mark.parametrize("axes", ["bshd", "bhsd"])
@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_a_cache_in_pages_and_in_one_piece(axes, integer):
    q, k, v, table = operands()
    swap = (lambda x: x.swapaxes(1, 2)) if axes == "bhsd" else (lambda x: x)
    starts, pages = STARTS.astype(integer), table.astype(integer)
    check(swap(q), swap(k), swap(v), STREAMING, starts, page_table=pages, axes=axes)
    whole = [swap(in_one_piece(x, table)) for x in (k, v)]
    check(swap(q), *whole, STREAMING, starts, axes=axes, scale=0.3, softcap=2.0)


@pytest.mark.parametrize("dtype, bound", [(jnp.float16, 1e-3), (jnp.bfloat16, 1e-2), (jnp.float64, 1e-6)])
def test_dtypes_and_sinks(dtype, bound):
    q, k, v, table = operands(dtype=dtype)
    sinks = np.array([0.5, -1, 2, -np.inf], np.float32)
    check(q, k, v, STREAMING, STARTS, bound, page_table=table, sink_logits=sinks)


def test_values_in_keys():
    q, k, _, table = operands()
    check(q, k, None, STREAMING, STARTS, page_table=table, head_dim_v=HEAD_DIM_V)


def test_queries_of_several_sequences_and_trees():
    q, k, v, table = operands()
    random = np.random.default_rng(2)
    packed, offsets = q.reshape(-1, *q.shape[2:])[:9], np.array([1, 6, 6, 8])
    check(packed, k, v, STREAMING, STARTS, page_table=table, query_offsets=offsets, axes="thd")
    check(q, k, v, STREAMING, STARTS, page_table=table, parents=draw_parents(random, BATCH, 5))
    parents = draw_parents(random, 1, 9)[0]
    check(packed, k, v, "full", STARTS, page_table=table, query_offsets=offsets, axes="thd", parents=parents)


def test_float8_with_scales_and_without():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v, table = operands()
    k, v = (x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v))
    scales = [np.random.default_rng(n).uniform(0.1, 2, k.shape[:3]).astype(np.float32) for n in range(2)]
    check(q, k, v, STREAMING, STARTS, page_table=table)
    check(q, k, v, STREAMING, STARTS, page_table=table, k_scales=scales[0], v_scales=scales[1])
    check(q, k, v, STREAMING, STARTS, page_table=table, v_scales=scales[1])


def test_lists_of_a_call():
    q, k, v, table = operands()
    random = np.random.default_rng(3)
    indices, counts = random.integers(-2, SEQ_K, (BATCH, 5, HEADS_KV, 7)), random.integers(0, 8, (BATCH, 5, HEADS_KV))
    check(q, k, v, sa.runtime_tokens(7), STARTS, page_table=table, indices=indices)
    check(q, k, v, sa.runtime_tokens(7), STARTS, page_table=table, indices=indices, index_counts=counts)


def test_packed_lists_of_a_call():
    q, k, v, table = operands()
    packed, offsets = q.reshape(-1, *q.shape[2:]), np.array([0, 5, 10, 15])
    lists = np.random.default_rng(4).integers(-2, SEQ_K, (15, HEADS_KV, 7)).astype(np.int32)
    of_call = {"page_table": table, "query_offsets": offsets, "axes": "thd"}
    check(packed, k, v, "runtime_blocks(1,1,7) & causal", STARTS, **of_call, indices=lists)
    with pytest.raises(sa.ShapeError, match=r"argument indices .*; accepted: \[15, 2, 8\]"):
        saj.decode(packed, k, v, sa.runtime_tokens(8), STARTS, **of_call, indices=lists)


def test_one_trace_serves_a_sequence_as_it_grows():
    rng = np.random.default_rng(4)
    q, k, v = (
        rng.standard_normal((2, SEQ_K, heads, d)).astype(np.float32)
        for heads, d in ((HEADS_Q, HEAD_DIM), (HEADS_KV, HEAD_DIM), (HEADS_KV, HEAD_DIM_V))
    )
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_cache, v_cache, q, k, v, starts):
        traces.append(1)
        rows = jnp.arange(len(starts)), starts
        k_cache, v_cache = k_cache.at[rows].set(k), v_cache.at[rows].set(v)
        return saj.decode(q[:, None], k_cache, v_cache, STREAMING, starts), k_cache, v_cache

    caches = [jnp.full(x.shape, jnp.nan, x.dtype) for x in (k, v)]  # nothing sees what was not written
    found = []
    for token in range(SEQ_K):
        out, *caches = step(*caches, q[:, token], k[:, token], v[:, token], jnp.full(2, token, jnp.int32))
        found.append(out[:, 0])
    mask = oracle.to_mask(STREAMING, oracle.Extent(SEQ_K, SEQ_K, 2, HEADS_Q))
    whole, _ = oracle.attention_forward(*(x.swapaxes(1, 2) for x in (q, k, v)), mask, HEAD_DIM**-0.5)
    np.testing.assert_allclose(np.stack(found, 2), whole, rtol=2e-5, atol=2e-5)
    assert len(traces) == 1


def test_vmap_is_one_call_after_the_other():
    q, k, v, table = operands()
    many = jnp.stack([jnp.asarray(STARTS), jnp.asarray(STARTS) - 3])
    decode = functools.partial(saj.decode, q, k, v, STREAMING, page_table=table)
    for starts, out in zip(many, jax.jit(jax.vmap(decode))(many)):
        expected, _ = right(q, k, v, STREAMING, starts=np.array(starts), page_table=table)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_a_program_that_was_exported_runs():
    pytest.importorskip("flatbuffers")  # with which JAX writes programs
    q, k, v, table = (jnp.asarray(x) for x in operands())
    starts = jnp.asarray(STARTS)
    decode = jax.jit(lambda *x: saj.decode(*x[:3], STREAMING, x[3], page_table=x[4]))
    disabled = [jax.export.DisabledSafetyCheck.custom_call("sparseattn_forward")]
    exported = jax.export.export(decode, disabled_checks=disabled)(q, k, v, starts, table)
    again = jax.export.deserialize(exported.serialize())
    found, expected = again.call(q, k, v, starts, table), decode(q, k, v, starts, table)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["pages", "one piece", "packed"])
def test_an_exported_program_serves_caches_of_all_sizes(form):
    pytest.importorskip("flatbuffers")
    q, k, v, table = operands()
    entries, pages = "b, 5, 4, 16", ["p, 6, 2, 16", "p, 6, 2, 8"]
    shapes = {
        "pages": dict(q=entries, k=pages[0], v=pages[1], starts="b", page_table="b, c"),
        "one piece": dict(q=entries, k="b, t, 2, 16", v="b, t, 2, 8", starts="b"),
        "packed": dict(q="n, 4, 16", k=pages[0], v=pages[1], starts="b", page_table="b, c", query_offsets="b + 1"),
    }[form]
    options = {"pattern": STREAMING, "axes": "thd" if form == "packed" else "bshd"}
    scope = jax.export.SymbolicScope()
    symbols = {
        name: jax.ShapeDtypeStruct(
            jax.export.symbolic_shape(shape, scope=scope), np.float32 if name in "qkv" else np.int32
        )
        for name, shape in shapes.items()
    }
    decode = jax.jit(lambda given: saj.decode(**given, **options))
    disabled = [jax.export.DisabledSafetyCheck.custom_call("sparseattn_forward")]
    program = jax.export.deserialize(jax.export.export(decode, disabled_checks=disabled)(symbols).serialize())
    for batch, columns in [(3, 8), (1, 8), (2, 7)]:
        given = {"q": q[:batch], "k": k, "v": v, "starts": STARTS[:batch], "page_table": table[:batch, :columns]}
        if form == "one piece":
            part = given.pop("page_table")
            given |= {name: pool[part].reshape(batch, -1, *pool.shape[2:]) for name, pool in (("k", k), ("v", v))}
        if form == "packed":
            given |= {"q": given["q"].reshape(-1, 4, 16), "query_offsets": np.arange(batch + 1) * 5}
        expected, _ = right(**given, **options)
        arrays = {name: jnp.asarray(x, symbols[name].dtype) for name, x in given.items()}
        np.testing.assert_allclose(program.call(arrays), expected, rtol=1e-6, atol=1e-6)


def test_what_is_wrong_is_named():
    q, k, v, table = operands()
    decode = functools.partial(saj.decode, q, k, v, STREAMING)
    of_lists = functools.partial(saj.decode, q, k, v, "causal & runtime_tokens(4)")
    lists = np.zeros((BATCH, 5, HEADS_KV, 4), np.int32)
    packed, float8 = q[0], [x.astype(jnp.float8_e4m3fn) for x in (q, k, v)]
    calls = [
        (sa.ArgumentError, "starts", lambda: decode(None, page_table=table)),
        (sa.ShapeError, "starts", lambda: decode(STARTS[:2], page_table=table)),
        (sa.DTypeError, "starts", lambda: decode(STARTS.astype(np.float32), page_table=table)),
        (sa.DTypeError, "page_table", lambda: decode(STARTS, page_table=table.astype(np.float32))),
        (sa.ShapeError, "page_table", lambda: decode(STARTS, page_table=table[0])),
        (sa.ArgumentError, "query_offsets", lambda: decode(STARTS, page_table=table, query_offsets=np.arange(4))),
        (sa.ShapeError, "parents", lambda: decode(STARTS, page_table=table, parents=np.zeros((BATCH, 4), int))),
        (sa.DTypeError, "parents", lambda: decode(STARTS, page_table=table, parents=np.zeros((BATCH, 5)))),
        (sa.ShapeError, "v", lambda: saj.decode(q, k, v[1:], STREAMING, STARTS, page_table=table)),
        (sa.DTypeError, "v", lambda: saj.decode(q, k, v.astype(np.float16), STREAMING, STARTS, page_table=table)),
        (sa.DTypeError, "k", lambda: saj.decode(q, k.astype(np.float16), v, STREAMING, STARTS, page_table=table)),
        (sa.DTypeError, "k", lambda: saj.decode(q, k.astype(np.int8), v, STREAMING, STARTS, page_table=table)),
        (sa.DTypeError, "v", lambda: saj.decode(q, float8[1], v, STREAMING, STARTS, page_table=table)),
        (sa.DTypeError, "q", lambda: saj.decode(q.astype(np.int32), k, v, STREAMING, STARTS, page_table=table)),
        (sa.ShapeError, "q", lambda: saj.decode(q[:, :, :3], k, v, STREAMING, STARTS, page_table=table)),
        (sa.ShapeError, "k", lambda: saj.decode(q[..., :12], k, v, STREAMING, STARTS, page_table=table)),
        (sa.ShapeError, "k", lambda: saj.decode(q, k[:0], v[:0], STREAMING, STARTS, page_table=table)),
        (sa.ShapeError, "k", lambda: decode(STARTS)),
        (sa.ShapeError, "v", lambda: saj.decode(q, k, v[..., :0], STREAMING, STARTS, page_table=table)),
        (sa.ArgumentError, "head_dim_v",
         lambda: saj.decode(q, k, None, STREAMING, STARTS, page_table=table, head_dim_v=0)),
        (sa.ShapeError, "starts", lambda: decode(STARTS[:, None], page_table=table)),
        (sa.ShapeError, "page_table", lambda: decode(STARTS, page_table=table[:2])),
        (sa.ShapeError, "sink_logits", lambda: decode(STARTS, page_table=table, sink_logits=np.zeros(3, np.float32))),
        (sa.DTypeError, "sink_logits", lambda: decode(STARTS, page_table=table, sink_logits=np.zeros(4))),
        (sa.DTypeError, "k_scales",
         lambda: saj.decode(q, *float8[1:], STREAMING, STARTS, page_table=table, k_scales=np.ones(k.shape[:-1]))),
        (sa.ArgumentError, "indices", lambda: decode(STARTS, page_table=table, indices=lists)),
        (sa.ArgumentError, "index_counts", lambda: decode(STARTS, page_table=table, index_counts=lists[..., 0])),
        (sa.ArgumentError, "indices", lambda: of_lists(STARTS, page_table=table)),
        (sa.ShapeError, "indices", lambda: of_lists(STARTS, page_table=table, indices=lists[..., :3])),
        (sa.ShapeError, "indices", lambda: of_lists(STARTS, page_table=table, indices=lists[:, :, :1])),
        (sa.DTypeError, "indices", lambda: of_lists(STARTS, page_table=table, indices=lists.astype(np.float32))),
        (sa.ShapeError, "index_counts",
         lambda: of_lists(STARTS, page_table=table, indices=lists, index_counts=lists[:, :, :1, 0])),
        (sa.ShapeError, "k_scales",
         lambda: saj.decode(q, *float8[1:], STREAMING, STARTS, page_table=table, k_scales=np.ones(3, np.float32))),
        (sa.ArgumentError, "v_scales",
         lambda: decode(STARTS, page_table=table, v_scales=np.ones(v.shape[:-1], np.float32))),
        (sa.DTypeError, "q", lambda: saj.decode(*float8, STREAMING, STARTS, page_table=table)),
        (sa.ArgumentError, "query_offsets",
         lambda: saj.decode(packed, k, v, STREAMING, STARTS, page_table=table, axes="thd")),
        (sa.ArgumentError, "page_table",
         lambda: saj.decode(packed, k, v, STREAMING, STARTS, query_offsets=np.arange(4), axes="thd")),
        (sa.ShapeError, "k", lambda: saj.decode(packed, k[0], v[0], STREAMING, STARTS, page_table=table,
                                                query_offsets=np.arange(4), axes="thd")),
        (sa.DTypeError, "scale", lambda: jax.jit(lambda x: decode(STARTS, page_table=table, scale=x))(0.5)),
    ]
    for number, (kind, argument, call) in enumerate(calls):
        for traced in (call, lambda: jax.jit(call)()):  # while JAX traces, and not when the program runs
            with pytest.raises(kind) as raised:
                traced()
            assert raised.value.argument == argument, (number, raised.value)
            assert "problem." not in str(raised.value), raised.value


def test_derivatives_are_refused():
    q, k, v, table = (jnp.asarray(x) for x in operands())
    with pytest.raises(sa.UnsupportedError, match="decode has no derivatives"):
        jax.grad(lambda q: saj.decode(q, k, v, STREAMING, jnp.asarray(STARTS), page_table=table).sum())(q)
