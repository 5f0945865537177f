# SPDX-License-Identifier: MIT
"""Arrays of JAX, jitted, mapped and differentiated, against dense attention that JAX itself differentiates."""

import functools
import pathlib
import re
import shutil
import subprocess
import sys
from importlib.metadata import version

import cffi
import numpy as np
import pytest
from conftest import ROOT

import sparseattn as sa

jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import sparseattn.jax as saj  # noqa: E402

STREAMING = "causal & (sink(2) | window(9,0))"
TEXT = f"{STREAMING} - global_keys(0)"  # the first query sees nothing
BOUNDS = {jnp.float64: 1e-5, jnp.float32: 2e-5, jnp.float16: 4e-3, jnp.bfloat16: 4e-2}  # lse is float32 everywhere


def operands(dtype=jnp.float32, heads_kv=2, seq=40, batch=2):
    """q, k, v, dout [batch, seq, heads, head_dim]."""
    rng = np.random.default_rng(3)
    shapes = [(batch, seq, 4, 24), (batch, seq, heads_kv, 24), (batch, seq, heads_kv, 16), (batch, seq, 4, 16)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def dense(q, k, v, mask, sink=None, softcap=None):
    """out and lse in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (jnp.swapaxes(x.astype(jnp.float64), 1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, 1) for x in (k, v))
    s = q @ jnp.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
    s = softcap * jnp.tanh(s / softcap) if softcap else s
    # Finite in the place of -infinity, whose gradients would be NaN where a query sees nothing.
    s = jnp.where(mask, s, -1e30)
    if sink is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], -1)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.where(s > -1e29, jnp.exp(s - lse[..., None]), 0)[..., : k.shape[2]]
    return jnp.swapaxes(p @ v, 1, 2), lse


def mask_of(text, seq=40, batch=2):
    return sa.parse(text).to_mask(sa.Extent(seq, batch=batch, heads=4))


def close(found, expected, bound=2e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("text", [STREAMING, "full", "block_diagonal(7)"])
def test_gradients_are_those_of_dense_attention(dtype, text):
    q, k, v, dout = operands(dtype)
    dlse = jnp.linspace(-1, 1, 2 * 4 * 40).reshape(2, 4, 40)

    def loss(attend, *x):
        out, lse = attend(*x)
        return (out * dout).sum(dtype=jnp.float64) + (lse * dlse).sum()

    attend = functools.partial(saj.attention, pattern=text, return_lse=True)
    found = jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2)))(q, k, v)
    expected = jax.grad(functools.partial(loss, lambda *x: dense(*x, mask_of(text))), (0, 1, 2))(q, k, v)
    out, lse = jax.jit(attend)(q, k, v)
    assert out.dtype == dtype and lse.dtype == jnp.float32 and [g.dtype for g in found] == [dtype] * 3
    close((out, lse, *found), (*dense(q, k, v, mask_of(text)), *expected), BOUNDS[dtype])


@pytest.mark.parametrize("attend", [saj.attention, saj.float8_attention])
def test_checkpoint_may_keep_what_the_backward_reads(attend):
    *x, dout = operands()

    def differentiate(policy, *x):
        def layer(q, k, v):
            return jnp.pad(attend(jnp.sin(q), k, v, STREAMING), [(0, 0)] * 3 + [(0, 8)])

        def loss(q, k, v):
            layers = jax.lax.scan(lambda q, _: (jax.checkpoint(layer, policy=policy)(q, k, v), None), q, length=3)
            return (layers[0][..., :16] * dout).sum()

        return jax.grad(loss, (0, 1, 2))(*x)

    found, counts = [], []
    for names in ((), ("sparseattn_out", "sparseattn_lse")):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        program = jax.jit(functools.partial(differentiate, policy)).lower(*x).compile()
        counts.append(program.as_text().count('custom_call_target="sparseattn_forward"'))
        found.append(program(*x))
    assert counts == [2, 1]
    close(*found)


def test_check_grads():
    q, k, v, _ = operands(jnp.float64, seq=6, batch=1)
    attend = functools.partial(saj.attention, pattern=TEXT)
    check_grads(attend, (q, k, v), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_queries_without_keys():
    q, k, v, _ = operands()
    out, lse = saj.attention(q, k, v, TEXT, return_lse=True)
    assert (out[:, 0] == 0).all() and jnp.isneginf(lse[:, :, 0]).all()
    gradients = jax.grad(lambda *x: saj.attention(*x, TEXT).sum(), (0, 1, 2))(q, k, v)
    assert (gradients[0][:, 0] == 0).all() and all(jnp.isfinite(x).all() for x in gradients)


def test_sinks_and_softcap_have_gradients():
    q, k, v, dout = operands()
    sink = jnp.asarray([0.5, -2, 1, 3], jnp.float32)
    found = jax.grad(
        lambda q, k, v, sink: (saj.attention(q, k, v, "causal", sink_logits=sink, softcap=1.5) * dout).sum(),
        (0, 1, 2, 3),
    )(q, k, v, sink)
    expected = jax.grad(lambda *x: (dense(*x[:3], mask_of("causal"), x[3], 1.5)[0] * dout).sum(), (0, 1, 2, 3))(
        q, k, v, sink
    )
    close(found, expected, 3e-5)


def test_values_in_keys():
    q, k, _, dout = operands(heads_kv=1)
    found = jax.grad(lambda q, k: (saj.attention(q, k, None, "causal", head_dim_v=16) * dout).sum(), (0, 1))(q, k)
    expected = jax.grad(lambda q, k: (dense(q, k, k[..., :16], mask_of("causal"))[0] * dout).sum(), (0, 1))(q, k)
    close(found, expected)


FLOAT8_FORMS = {
    "a scale for each row": {},
    "one for each head": {"of_heads": True},
    "without scales": {"names": ()},
    "with some": {"names": ("q_scales", "v_scales")},
    "heads first": {"axes": "bhsd"},
    "packed": {"axes": "thd"},
    "values in keys": {"names": ("q_scales", "k_scales"), "head_dim_v": 16},
    "sinks and softcap": {"sink_logits": jnp.asarray([0.5, -2, 1, 3], jnp.float32), "softcap": 2.0},
    "lists": {"pattern": sa.runtime_tokens(5), "indices": True},
}


def float8(axes="bshd", names=("q_scales", "k_scales", "v_scales"), of_heads=False, head_dim_v=None):
    """q, k, v of float8 with their scales, and the numbers of bfloat16 that they stand for, which it has: scales are
    powers of 2. v is None with head_dim_v."""
    rng = np.random.default_rng(5)
    swap = {"bshd": lambda x: x, "bhsd": lambda x: jnp.swapaxes(x, 1, 2), "thd": lambda x: x[0]}[axes]
    given, numbers = {}, []
    for name, x in zip("qkv", operands()):
        x = (x / 2.0 ** rng.integers(0, 8, x.shape)).astype(jnp.float8_e4m3fn)  # denormals, too
        scales = jnp.asarray(2.0 ** rng.integers(-1, 2, x.shape[2:3] if of_heads else x.shape[:3]), jnp.float32)
        scales = jnp.broadcast_to(scales, x.shape[:3]) if f"{name}_scales" in names else None
        given |= {name: swap(x)} | ({} if scales is None else {f"{name}_scales": swap(scales)})
        x = x.astype(jnp.float32) * (1 if scales is None else scales[..., None])
        numbers.append(swap(x.astype(jnp.bfloat16)))
    return (given | {"v": None}, [*numbers[:2], None]) if head_dim_v else (given, numbers)


@pytest.mark.parametrize("form", FLOAT8_FORMS)
def test_float8(form):
    """As bfloat16 of what the elements stand for: jitted, and not."""
    options = {"pattern": TEXT, "axes": "bshd", **FLOAT8_FORMS[form]}
    made = {name: options.pop(name) for name in ("names", "of_heads") if name in options}
    given, numbers = float8(options["axes"], head_dim_v=options.get("head_dim_v"), **made)
    if "indices" in options:
        options["indices"] = windows()
    attend = functools.partial(saj.attention, return_lse=True, **options)
    expected = attend(*numbers)
    for out, lse in (attend(**given), jax.jit(lambda given: attend(**given))(given)):
        assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
        close([out], expected[:1], BOUNDS[jnp.bfloat16])
        close([lse], expected[1:], 2e-3)


@pytest.mark.parametrize("sinks", [None, jnp.asarray([0.5, -2, 1, 3], jnp.float32)], ids=["folded", "sinks"])
def test_vmap_of_float8(sinks):
    given, _ = float8()
    many = {name: jnp.stack([x, x[::-1], x]) for name, x in given.items()}
    many["k_scales"] = given["k_scales"]  # the same in all calls

    def attend(given):
        return saj.attention(**given, pattern=TEXT, sink_logits=sinks, return_lse=True)

    axes = {name: None if name == "k_scales" else 0 for name in many}
    found = jax.jit(jax.vmap(attend, (axes,)))(many)
    for n in range(3):
        one = {name: x if name == "k_scales" else x[n] for name, x in many.items()}
        close([x[n] for x in found], attend(one), BOUNDS[jnp.bfloat16])


def test_programs_of_float8_may_be_exported():
    pytest.importorskip("flatbuffers")
    given, _ = float8()
    call = jax.jit(lambda given: saj.attention(**given, pattern=TEXT))
    disabled = [jax.export.DisabledSafetyCheck.custom_call("sparseattn_forward")]
    program = jax.export.export(call, disabled_checks=disabled)(given)
    close([jax.export.deserialize(program.serialize()).call(given)], [call(given)], BOUNDS[jnp.bfloat16])


def test_float8_has_no_derivatives():
    given, numbers = float8()

    def loss(q):
        return saj.attention(**(given | {"q": q.astype(jnp.float8_e4m3fn)}), pattern=TEXT).astype(jnp.float32).sum()

    for differentiate in (jax.grad, jax.value_and_grad, lambda loss: jax.jit(jax.grad(loss))):
        with pytest.raises(sa.UnsupportedError, match="attention of float8_e4m3fn has no derivatives") as caught:
            differentiate(loss)(numbers[0])
        assert caught.value.argument == "q"
    beside = jax.grad(lambda scale: jax.lax.stop_gradient(loss(numbers[0])) * scale)
    assert jnp.isfinite(beside(2.0))  # what is a constant to a derivative may be of float8


@pytest.mark.parametrize("form", FLOAT8_FORMS)
def test_backward_of_float8(form):
    """As of bfloat16 of what the elements stand for: jitted, and not."""
    options = {"pattern": TEXT, "axes": "bshd", **FLOAT8_FORMS[form]}
    made = {name: options.pop(name) for name in ("names", "of_heads") if name in options}
    given, numbers = float8(options["axes"], head_dim_v=options.get("head_dim_v"), **made)
    if "indices" in options:
        options["indices"] = windows()
    out, lse = saj.attention(*numbers, return_lse=True, **options)
    more = {"out": out, "lse": lse, "dout": jnp.cos(out), "dlse": jnp.sin(lse), **options}
    expected = [x for x in saj.attention_backward(*numbers, **more) if x is not None]

    def differentiate(given):
        return [x for x in saj.attention_backward(**given, **more) if x is not None]

    for found in (differentiate(given), jax.jit(differentiate)(given)):
        assert [x.dtype for x in found[:2]] == [jnp.bfloat16] * 2
        close(found, expected, BOUNDS[jnp.bfloat16])


@pytest.mark.parametrize("axes", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("scales", ["heads", "rows"])
def test_to_float8(axes, scales):
    x = operands()[0] * jnp.asarray([0, 1, 1e4, 1e-3])[:, None]  # by heads
    x = {"bshd": x, "bhsd": jnp.swapaxes(x, 1, 2), "thd": x[0]}[axes]
    elements, factors = saj.to_float8(x, axes=axes, scales=scales)
    assert elements.dtype == jnp.float8_e4m3fn and elements.shape == x.shape
    assert factors.dtype == jnp.float32 and factors.shape == x.shape[:-1]
    wide = elements.astype(jnp.float32)
    seq = {"bshd": 1, "bhsd": 2, "thd": 0}[axes]
    largest = jnp.max(jnp.abs(wide), -1 if scales == "rows" else (seq, x.ndim - 1))
    assert bool(((224 <= largest) & (largest <= 448) | (largest == 0)).all())
    assert set(np.unique(np.frexp(np.asarray(factors))[0])) == {0.5}
    units = factors[..., None]
    assert bool((jnp.abs(wide * units - x) <= 2**-4 * jnp.abs(x) + 2**-9 * units).all())  # 2^-9: the least float8


def test_to_float8_of_what_has_no_size():
    x = jnp.asarray([[0.0, 0], [1, jnp.inf], [500, jnp.nan], [2, -4]])[:, None]  # thd
    elements, factors = saj.to_float8(x, axes="thd", scales="rows")
    assert factors[:, 0].tolist() == [1, 1, 1, 2**-6]
    wide = elements.astype(jnp.float32)[:, 0]
    assert wide[1].tolist() == [1, 448] and wide[3].tolist() == [128, -256] and wide[2][0] == 448
    assert bool(jnp.isnan(wide[2][1]))
    assert saj.to_float8(jnp.zeros((2, 0, 3, 8)))[1].shape == (2, 0, 3)
    for argument, call in (
        ("x", lambda: saj.to_float8(x)),
        ("x", lambda: saj.to_float8([1.0])),
        ("x", lambda: saj.to_float8(jnp.ones((1, 4, 2, 8), int))),
        ("x", lambda: saj.float8_attention(*(jnp.ones((1, 4, 2, 8), complex) for _ in "qkv"), "full")),
        ("axes", lambda: saj.to_float8(x, axes="shd")),
        ("scales", lambda: saj.to_float8(x, axes="thd", scales="row")),
    ):
        with pytest.raises(sa.SparseAttentionError, match="accepted: ") as caught:
            call()
        assert caught.value.argument == argument


@pytest.mark.parametrize("scales", ["heads", "rows"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("in_keys", [False, True])
def test_float8_attention_hands_gradients_on(scales, dtype, in_keys):
    x = [one.astype(dtype) for one in operands()[:3]]
    x[2] = None if in_keys else x[2]
    sinks = jnp.asarray([0.5, -2, 1, 3], jnp.float32)
    options = {"pattern": TEXT, "return_lse": True, "head_dim_v": 16 if in_keys else None}

    def attend(*x):
        return saj.float8_attention(*x[:3], sink_logits=x[3], scales=scales, **options)

    rounded = [(None, None) if one is None else saj.to_float8(one, scales=scales) for one in x]
    elements, factors = zip(*rounded)
    given = dict(zip(("q_scales", "k_scales", "v_scales"), factors)) | {"sink_logits": sinks}
    right, lse = saj.attention(*elements, **given, **options)
    (out, found_lse), differentiate = jax.vjp(jax.jit(attend), *x, sinks)
    assert out.dtype == dtype
    close([out.astype(jnp.bfloat16), found_lse], [right, lse], 2e-3)
    dout, dlse = jnp.cos(out), jnp.sin(lse)
    options.pop("return_lse")
    more = {"out": right, "lse": lse, "dout": dout.astype(jnp.bfloat16), "dlse": dlse}
    expected = saj.attention_backward(*elements, **more, **given, **options)
    found = differentiate((dout, dlse))
    for one, other, leaf in zip(found, expected, (*x, sinks)):
        assert (one is None) == (leaf is None)
        if one is not None:
            assert one.dtype == leaf.dtype
            close([one], [other], BOUNDS[jnp.bfloat16])


def test_vmap_of_float8_attention():
    q, k, v, _ = operands()
    many = [jnp.stack([x, x[::-1]]) for x in (q, k, v)]

    def loss(*x):
        return saj.float8_attention(*x, TEXT).sum()

    found = jax.vmap(jax.grad(loss, (0, 1, 2)))(*many)
    for n in range(2):
        close([x[n] for x in found], jax.grad(loss, (0, 1, 2))(*(x[n] for x in many)), BOUNDS[jnp.bfloat16])


@pytest.mark.parametrize(
    "change, kind, argument",
    [
        (dict(k=np.zeros((2, 40, 2, 24), np.float32)), sa.DTypeError, "k"),
        (dict(q_scales=np.ones((2, 40, 2), np.float32)), sa.ShapeError, "q_scales"),
        (dict(k_scales=np.ones((2, 40, 2), np.float64)), sa.DTypeError, "k_scales"),
        (dict(v_scales=np.ones((2, 2, 40), np.float32)), sa.ShapeError, "v_scales"),
        (dict(v=None, v_scales=np.ones((2, 40, 2), np.float32)), sa.ArgumentError, "v_scales"),
    ],
)
def test_errors_of_float8(change, kind, argument):
    given = float8()[0] | change
    with pytest.raises(kind) as caught:
        saj.attention(**given, pattern=TEXT)
    assert caught.value.argument == argument


def test_scales_belong_to_float8():
    q, k, v, _ = operands()
    with pytest.raises(sa.ArgumentError, match="argument q_scales is given where q is not float8_e4m3fn") as caught:
        saj.attention(q, k, v, TEXT, q_scales=jnp.ones(q.shape[:-1]))
    assert caught.value.status == "SPATTN_E_STATE"


def windows():
    """Lists of runtime_tokens(5): the query itself and the four before it."""
    indices = np.arange(5)[None, None, None, :] + np.arange(40)[None, :, None, None] - 4
    return jnp.asarray(np.broadcast_to(indices, (2, 40, 2, 5)))


def test_lists():
    q, k, v, dout = operands()
    lists = sa.runtime_tokens(5)
    found = jax.grad(lambda *x: (saj.attention(*x, lists, indices=windows()) * dout).sum(), (0, 1, 2))(q, k, v)
    expected = jax.grad(lambda *x: (saj.attention(*x, "causal & window(4,0)") * dout).sum(), (0, 1, 2))(q, k, v)
    close(found, expected)
    counts = jnp.full((2, 40, 2), 4)
    found = saj.attention(q, k, v, lists, indices=windows(), index_counts=counts)
    close([found], [saj.attention(q, k, v, "window(4,0) - window(0,0)")])  # the last entry is the query itself


def test_axes_are_taken():
    q, k, v, _ = operands()
    by_head = saj.attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), TEXT, axes="bhsd")
    close([jnp.swapaxes(by_head, 1, 2)], [saj.attention(q, k, v, TEXT)])
    packed = saj.attention(*(x[0] for x in (q, k, v)), sa.per_document("causal", [0, 15, 40]), axes="thd")
    close([packed], [saj.attention(q, k, v, sa.documents([0, 15, 40]) & sa.causal())[0]])


@pytest.mark.parametrize(
    "pattern, options",
    [
        (TEXT, {}),
        (sa.per_batch(["causal", "window(3,3)"], [0, 1]), {}),
        (TEXT, {"sink_logits": jnp.asarray([0.5, -2, 1, 3], jnp.float32)}),
    ],
    ids=["folded into the batch", "another pattern for each batch entry", "sinks"],
)
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (1, None, 2)])
def test_vmap_is_a_loop(pattern, options, in_axes):
    q, k, v, dout = operands()
    grown = [x if axis is None else jnp.stack([x, x * 2, x[::-1]], axis) for x, axis in zip((q, k, v), in_axes)]

    def both(*x):
        out, pull = jax.vjp(lambda *y: saj.attention(*y, pattern, **options), *x)
        return out, *pull(dout)

    found = jax.jit(jax.vmap(both, in_axes))(*grown)
    for n in range(3):
        one = [x if axis is None else jnp.take(x, n, axis) for x, axis in zip(grown, in_axes)]
        close([x[n] for x in found], both(*one), 1e-6)


def test_more_calls_than_a_plan_has_batch_entries():
    q = jnp.arange(2.0**20 + 1).reshape(-1, 1, 1, 1, 1)
    assert (jax.jit(jax.vmap(lambda v: saj.attention(jnp.ones_like(v), v, v, "full")))(q) == q).all()


def test_sinks_may_be_mapped():
    q, k, v, _ = operands()
    sinks = jnp.asarray([[0.5, -2, 1, 3], [0, 1, 2, 3]], jnp.float32)

    def loss(sink):
        return saj.attention(q, k, v, TEXT, sink_logits=sink).sum()

    close(jax.vmap(jax.grad(loss))(sinks), [jax.grad(loss)(sink) for sink in sinks])


def test_two_maps_of_packed_sequences():
    q, k, v, _ = (x[0] for x in operands())
    pattern = sa.per_document("causal", [0, 15, 40])
    many = [jnp.stack([jnp.stack([x, x + 1]), jnp.stack([x * 2, -x])]) for x in (q, k, v)]
    found = jax.vmap(jax.vmap(lambda *x: saj.attention(*x, pattern, axes="thd")))(*many)
    for i in range(2):
        close(found[i], [saj.attention(*(x[i, j] for x in many), pattern, axes="thd") for j in range(2)], 1e-6)


def test_programs_may_be_exported():
    pytest.importorskip("flatbuffers")  # with which JAX writes programs
    q, k, v, _ = operands()
    lists = sa.csr(*sa.parse(STREAMING).to_csr(40), 40)  # too long for a text
    program = jax.export.export(
        jax.jit(lambda *x: saj.attention(*x, lists)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("sparseattn_forward")],
    )(q, k, v)
    again = jax.export.deserialize(program.serialize())
    close([again.call(q, k, v)], [saj.attention(q, k, v, STREAMING)], 1e-6)


SAFE = [jax.export.DisabledSafetyCheck.custom_call(f"sparseattn_{op}") for op in ("forward", "backward")]


def exported(call, *arrays, derivatives=0):
    """The program of a file. Arrays are pairs of a shape, whose sizes may be letters, and a dtype."""
    pytest.importorskip("flatbuffers")
    scope = jax.export.SymbolicScope()
    forms = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype) for shape, dtype in arrays]
    program = jax.export.export(jax.jit(call), disabled_checks=SAFE)(*forms)
    return jax.export.deserialize(program.serialize(vjp_order=derivatives)).call


def floats(*shapes):
    return [(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize("mapped", [False, True])
def test_an_exported_program_serves_all_sizes(mapped):
    """So do its gradients, and numbers of queries that are not those of keys."""
    attend = functools.partial(saj.attention, pattern=STREAMING)
    call = (lambda *x: jax.vmap(attend)(*(one[:, None] for one in x))[:, 0]) if mapped else attend
    program = exported(call, *floats("b, s, 4, 24", "b, t, 2, 24", "b, t, 2, 16"), derivatives=1)
    for batch, seq_q, seq_k in [(2, 40, 40), (1, 17, 40), (3, 33, 129)]:
        q, k, v, dout = operands(seq=seq_k, batch=batch)
        q, dout = q[:, :seq_q], dout[:, :seq_q]
        mask = sa.parse(STREAMING).to_mask(sa.Extent(seq_q, seq_k))
        out, pull = jax.vjp(program, q, k, v)
        expected, pull_dense = jax.vjp(lambda *x: dense(*x, mask)[0], q, k, v)
        close((out, *pull(dout)), (expected, *pull_dense(dout.astype(jnp.float64))))


OPEN_FORMS = {
    "packed": (dict(axes="thd"), ["s, 4, 24", "s + 2, 2, 24", "s + 2, 2, 24"]),
    "heads first": (dict(axes="bhsd"), ["b, 4, s, 24", "b, 2, s, 24", "b, 2, s, 24"]),
    "values in keys": (dict(head_dim_v=16), ["b, s, 4, 24", "b, s, 1, 24"]),
    "a mask of keys": (dict(pattern=np.arange(40)[None] < 13), ["b, s, 4, 24", "b, 40, 2, 24", "b, 40, 2, 24"]),
    "sinks": (dict(), ["b, s, 4, 24", "b, s, 2, 24", "b, s, 2, 24", "4"]),
}


@pytest.mark.parametrize("form", OPEN_FORMS)
@pytest.mark.parametrize("attend", [saj.attention, saj.float8_attention])
def test_exported_programs_of_all_kinds_serve_all_sizes(form, attend):
    options, shapes = OPEN_FORMS[form]

    def loss(q, k, v=None, sink=None):
        return attend(q, k, v, sink_logits=sink, **({"pattern": TEXT} | options)).sum()

    call = jax.value_and_grad(loss, range(len(shapes)))
    program = exported(call, *floats(*shapes))
    for sizes in ({"b": 2, "s": 40}, {"b": 1, "s": 33}):
        rng = np.random.default_rng(7)
        given = [jnp.asarray(rng.normal(size=eval(f"[{shape}]", sizes)), jnp.float32) for shape in shapes]
        close(jax.tree.leaves(program(*given)), jax.tree.leaves(call(*given)), 1e-6)


def test_lists_of_an_exported_program_have_all_sizes():
    lists = [("b, floordiv(s + 15, 16), 2, 1", jnp.int32)]
    forms = floats("b, s, 4, 24", "b, s, 2, 24", "b, s, 2, 16") + lists

    def call(q, k, v, lists):
        return saj.attention(q, k, v, "causal & runtime_blocks(16,16,1)", indices=lists)

    program = exported(call, *forms)
    for batch, seq in [(2, 40), (1, 32)]:
        blocks = jnp.arange(-(-seq // 16), dtype=jnp.int32)[None, :, None, None]
        q, k, v, _ = operands(seq=seq, batch=batch)
        found = program(q, k, v, jnp.broadcast_to(blocks, (batch, blocks.size, 2, 1)))
        close([found], [saj.attention(q, k, v, "causal & block_diagonal(16)")])


@pytest.mark.parametrize(
    "pattern, shapes, argument, symbol",
    [
        (sa.csr(*sa.parse(STREAMING).to_csr(40), 40), ("b, s, 4, 24", "b, s, 2, 24"), "pattern", "seq_q s, seq_k s"),
        (np.ones((1, 1), bool), ("2, s, 4, 24", "2, s, 2, 24"), "pattern", "s keys"),
        (np.ones((2, 2), bool), ("2, 2, 4, 24", "2, s, 2, 24"), "pattern", "seq_k s"),
        (np.ones((1, 4, 1, 40), bool), ("b, s, 4, 24", "b, 40, 2, 24"), "pattern", "batch b, seq_q s"),
        (np.ones((2, 1, 1, 40), bool), ("2, 40, 4, 24", "2, s, 2, 24"), "pattern", "s keys"),
        (sa.per_batch(["causal", "full"], [0, 1]), ("b, 40, 4, 24", "b, 40, 2, 24"), "pattern", "batch b"),
        (TEXT, ("b, s, h, 24", "b, s, 2, 24"), "q", "heads_q h"),
        (TEXT, ("b, s, 4, 24", "b, s, h, 24"), "k", "heads_kv h"),
        (TEXT, ("b, s, 4, d", "b, s, 2, d"), "q", "head_dim d"),
        (TEXT, ("b, s, 4, 24", "c, s, 2, 24"), "k", "c, s, 2, 24"),
    ],
)
def test_sizes_that_an_exported_program_cannot_leave_open(pattern, shapes, argument, symbol):
    q, k = floats(*shapes)
    with pytest.raises(sa.ShapeError, match=symbol) as caught:
        exported(lambda q, k, v: saj.attention(q, k, v, pattern), q, k, k)
    assert caught.value.argument == argument


@pytest.mark.parametrize("name", ["q_offset", "scale", "head_dim_v"])
def test_options_of_an_exported_program_are_numbers(name):
    def call(q, k):
        return saj.attention(q, k, None, TEXT, **{name: q.shape[1]})

    with pytest.raises(sa.DTypeError, match=f"argument {name} is s, a symbol of jax.export; accepted: a ") as caught:
        exported(call, *floats("b, s, 4, 24", "b, s, 1, 24"))
    assert caught.value.argument == name


RUN = """
import sys
import jax, numpy as np
import sparseattn.jax as saj

saj.register()
program, operands, out = sys.argv[1:]
np.save(out, jax.export.deserialize(bytearray(open(program, "rb").read())).call(*np.load(operands)))
"""


def test_an_exported_program_runs_in_another_process(tmp_path):
    pytest.importorskip("flatbuffers")
    q = np.random.default_rng(6).standard_normal((3, 2, 40, 4, 24), np.float32)
    disabled = [jax.export.DisabledSafetyCheck.custom_call("sparseattn_forward")]
    program = jax.export.export(jax.jit(lambda *x: saj.attention(*x, TEXT)), disabled_checks=disabled)(*q)
    paths = [tmp_path / name for name in ("program", "operands.npy", "out.npy")]
    paths[0].write_bytes(program.serialize())
    np.save(paths[1], q)
    subprocess.run([sys.executable, "-c", RUN, *map(str, paths)], check=True, timeout=300)
    close([np.load(paths[2])], [saj.attention(*q, TEXT)], 1e-6)


def test_a_mask_of_keys_serves_all_queries():
    q, k, v, _ = operands()
    mask = np.arange(40) < np.array([40, 13])[:, None, None, None]
    expected = saj.attention(q, k, v, np.broadcast_to(mask, (2, 4, 40, 40)))
    close([saj.attention(q, k, v, mask)], [expected], 1e-6)


def test_sizes_of_zero():
    q, k, v, _ = operands()
    assert saj.attention(q[:0], k[:0], v[:0], "causal").shape == (0, 40, 4, 16)
    assert (saj.attention(q, k[:, :0], v[:, :0], "full") == 0).all()


@pytest.mark.parametrize("attend", [saj.attention, saj.float8_attention])
def test_a_second_derivative_is_refused(attend):
    q, k, v, _ = operands(jnp.float64, seq=6, batch=1)

    def loss(q):
        return attend(q, k, v, "full").sum()

    twice = {
        "grad of grad": jax.grad(lambda q: jax.grad(loss)(q).sum()),
        "jit": jax.jit(jax.grad(lambda q: jax.grad(loss)(q).sum())),
        "hessian": jax.hessian(loss),
        "product with a hessian": lambda q: jax.jvp(jax.grad(loss), (q,), (q,)),
        "gradients by hand": jax.grad(
            lambda q: saj.attention_backward(
                q, k, v, *saj.attention(q, k, v, "full", return_lse=True), jnp.ones((1, 6, 4, 16)), "full"
            )[0].sum()
        ),
    }
    for name, second in twice.items():
        with pytest.raises(sa.UnsupportedError, match="second derivatives") as caught:
            second(q)
        assert caught.value.argument == "dout", name
    with pytest.raises(TypeError, match="jvp"):  # JAX's own words for what has reverse mode alone
        jax.jvp(loss, (q,), (q,))
    outer = jax.grad(lambda scale: (jax.lax.stop_gradient(jax.grad(loss)(q)) * scale).sum())
    assert jnp.isfinite(outer(2.0))  # what only stands beside a second derivative goes on


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "change, kind, argument",
    [
        (dict(q=np.zeros((40, 4, 24), np.float32)), sa.ShapeError, "q"),
        (dict(k=np.zeros((2, 40, 2, 23), np.float32)), sa.ShapeError, "k"),
        (dict(k=np.zeros((2, 40, 3, 24), np.float32)), sa.ArgumentError, "problem.heads_kv"),
        (dict(v=np.zeros((2, 41, 2, 16), np.float32)), sa.ShapeError, "v"),
        (dict(v=np.zeros((2, 40, 2, 16), np.float16)), sa.DTypeError, "v"),
        (dict(q=np.zeros((2, 40, 4, 24), np.int32)), sa.DTypeError, "q"),
        (dict(sink_logits=np.zeros(3, np.float32)), sa.ShapeError, "sink_logits"),
        (dict(indices=np.zeros((2, 40, 2, 3), np.float32)), sa.DTypeError, "indices"),
        (dict(pattern="wind"), sa.FormatError, "text"),
        (dict(pattern=sa.csr([0, 1], [0], 4)), sa.ShapeError, None),
    ],
)
def test_errors_are_typed_while_jax_traces(jit, change, kind, argument):
    q, k, v, _ = operands()
    given = {"q": q, "k": k, "v": v, **change}
    pattern = given.pop("pattern", TEXT)
    call = functools.partial(saj.attention, pattern=pattern)
    with pytest.raises(kind) as caught:
        (jax.jit(call) if jit else call)(**given)
    assert argument is None or caught.value.argument == argument


def test_what_is_no_array():
    q, k, v, _ = operands()
    with pytest.raises(TypeError, match="argument k is list"):
        saj.attention(q, k.tolist(), v, TEXT)
    for dtype in (object, np.longdouble, "U1"):
        with pytest.raises(sa.DTypeError, match="argument k is an array of") as caught:
            saj.attention(q, np.zeros(k.shape, dtype), v, TEXT)
        assert caught.value.argument == "k"
    for call in (saj.attention, saj.float8_attention, functools.partial(saj.decode, starts=np.zeros(2, np.int32))):
        for name in ("q", "k"):
            with pytest.raises(sa.DTypeError, match=f"argument {name} is NoneType") as caught:
                call(**{"q": q, "k": k, "v": v, "pattern": TEXT, name: None})
            assert caught.value.argument == name
    out, lse = saj.attention(q, k, v, TEXT, return_lse=True)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": out, "pattern": TEXT}
    for name in ("out", "lse", "dout"):
        with pytest.raises(sa.DTypeError, match=f"argument {name} is NoneType"):
            saj.attention_backward(**given | {name: None})


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "pattern, argument, shapes",
    [
        ("runtime_tokens(5)", "indices", [(2, 39, 2, 5)]),
        ("full & runtime_tokens(5)", "indices", [(2, 40, 4, 5)]),
        ("runtime_blocks(16,8,5)", "indices", [(2, 40, 2, 5)]),
        ("runtime_blocks(16,8,5)", "index_counts", [(2, 3, 2, 5), (2, 2, 2)]),
        ("runtime_tokens(5)", "indices", []),
        ("causal", "indices", [(2, 40, 2, 5)]),
    ],
)
def test_lists_are_checked_while_jax_traces(jit, pattern, argument, shapes):
    q, k, v, _ = operands()
    lists = dict(zip(("indices", "index_counts"), (jnp.zeros(shape, jnp.int32) for shape in shapes)))
    call = functools.partial(saj.attention, q, k, v, pattern)
    with pytest.raises(sa.ArgumentError) as caught:
        (jax.jit(call) if jit else call)(**lists)
    assert caught.value.argument == argument


def structs(header):
    """Struct -> its fields in ffi.h."""
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\n\} (xla_\w+);", header, flags=re.S):
        plain = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        yield name, re.findall(r"(\w+)(?:\)\([^)]*\)|\[\d+\])?(?=[;,])", plain)


# Our struct, what XLA has called its own since jaxlib 0.5, the newest name last, and our fields with other names there.
LAYOUTS = [
    ("xla_extension", ("Extension_Base", "InternalExtension"), {"kind": "type"}),
    ("xla_version", ("Api_Version",), {"major": "major_version", "minor": "minor_version"}),
    ("xla_metadata", ("Metadata",), {"version": "api_version"}),
    ("xla_metadata_extension", ("Metadata_Extension",), {"base": "extension_base"}),
    ("xla_buffer", ("Buffer",), {"sizes": "dims"}),
    ("xla_span", ("ByteSpan",), {"text": "ptr", "length": "len"}),
    ("xla_array", ("Array",), {}),
    ("xla_buffers", ("Args",), {"kinds": "types", "items": "args"}),
    ("xla_buffers", ("Rets",), {"kinds": "types", "items": "rets"}),
    ("xla_attributes", ("Attrs",), {"kinds": "types", "items": "attrs"}),
    ("xla_error_create", ("Error_Create_Args",), {"code": "errc"}),
    ("xla_stream_get", ("Stream_Get_Args",), {"execution": "ctx"}),
    (
        "xla_memory_allocate",
        ("DeviceMemory_Allocate_Args",),
        {"execution": "ctx", "bytes": "size", "align": "alignment"},
    ),
    ("xla_memory_free", ("DeviceMemory_Free_Args",), {"execution": "ctx", "bytes": "size"}),
    ("xla_device_get", ("DeviceOrdinal_Get_Args",), {"execution": "ctx", "ordinal": "device_ordinal"}),
    (
        "xla_call",
        ("CallFrame",),
        {"execution": "ctx", "operands": "args", "results": "rets", "attributes": "attrs"},
    ),
    (
        "xla_api",
        ("Api",),
        {
            "version": "api_version",
            "internal": "internal_api",
            "create_error": "XLA_FFI_Error_Create",
            "get_stream": "XLA_FFI_Stream_Get",
            "allocate_memory": "XLA_FFI_DeviceMemory_Allocate",
            "free_memory": "XLA_FFI_DeviceMemory_Free",
            "get_device": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
]
ONLY_FIRST_FIELDS = ("xla_call", "xla_api", "xla_metadata")
SINCE_JAXLIB_0_6 = ("xla_device_get",)  # handlers for GPUs refuse to run where it is missing
NUMBERS = {
    "XLA_CANCELLED": "Error_Code_CANCELLED",
    "XLA_INVALID_ARGUMENT": "Error_Code_INVALID_ARGUMENT",
    "XLA_RESOURCE_EXHAUSTED": "Error_Code_RESOURCE_EXHAUSTED",
    "XLA_UNIMPLEMENTED": "Error_Code_UNIMPLEMENTED",
    "XLA_INTERNAL": "Error_Code_INTERNAL",
    "XLA_METADATA": "Extension_Metadata",
    "XLA_ARRAY": "AttrType_ARRAY",
    **{f"XLA_{name}": f"DataType_{name}" for name in ("S32", "S64", "U8", "F16", "F32", "F64", "BF16", "F8E4M3FN")},
}
FFI_H = ROOT / "bindings" / "python" / "xla" / "ffi.h"


def xlas_header():
    return pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"


def compile_beside_xlas_header(folder, statements):
    """Each of these is to hold where XLA's declarations and ours stand one after the other."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler here")
    program = folder / "layout.c"
    asserted = [f'_Static_assert({statement}, "");' for statement in statements]
    program.write_text("\n".join([f'#include "{xlas_header()}"', f'#include "{FFI_H}"', *asserted]) + "\n")
    done = subprocess.run([compiler, "-std=c11", "-fsyntax-only", program], capture_output=True, text=True)
    assert asserted and done.returncode == 0, done.stderr


@pytest.mark.parametrize("ours, names, renamed", LAYOUTS, ids=["-".join((row[0], *row[1])) for row in LAYOUTS])
def test_our_declarations_have_the_layout_of_xlas_header(tmp_path, ours, names, renamed):
    header = xlas_header().read_text()
    declared = [f"XLA_FFI_{name}" for name in names if re.search(rf"\bXLA_FFI_{name}\b", header)]
    if not declared and ours in SINCE_JAXLIB_0_6:
        pytest.skip(f"jaxlib {version('jaxlib')} has no XLA_FFI_{names[0]}, so no GPU is served with it")
    assert declared, f"jaxlib {version('jaxlib')} has none of {names}: what is it called there?"
    theirs, statements = declared[-1], []
    for field in dict(structs(FFI_H.read_text()))[ours]:
        other = renamed.get(field, {"extensions": "extension_start"}.get(field, field))
        if ours == "xla_api" and field == "get_device" and not re.search(rf"\b{other}\b", header):
            statements.append(f"sizeof({theirs}) < sizeof({ours})")  # which is how the handler notices
        elif not field.startswith("before_"):
            statements.append(f"offsetof({ours}, {field}) == offsetof({theirs}, {other})")
    if ours not in ONLY_FIRST_FIELDS:
        statements.append(f"sizeof({ours}) == sizeof({theirs})")
    compile_beside_xlas_header(tmp_path, statements)


def test_our_numbers_are_those_of_xlas_header(tmp_path):
    compile_beside_xlas_header(tmp_path, [f"(int){ours} == (int)XLA_FFI_{NUMBERS[ours]}" for ours in NUMBERS])


def test_nothing_is_declared_that_is_not_compared():
    header = FFI_H.read_text()
    assert {name for name, _ in structs(header)} == {ours for ours, *_ in LAYOUTS}
    assert set(NUMBERS) == set(re.findall(r"(XLA_[A-Z0-9_]+) =", header))


@pytest.mark.parametrize("api, version", [(None, (0, 1)), ((0, 3), (0, 3))], ids=["jaxlib 0.5", "jaxlib 0.10"])
def test_handlers_answer_with_the_version_that_asks(api, version):
    """The XLA of jaxlib up to 0.8.0 asks without a word on itself."""
    ffi = cffi.FFI()
    names = [f"spattn_xla_{op}_{device}" for op in ("forward", "backward") for device in ("cpu", "cuda")]
    ffi.cdef("\n".join(line for line in FFI_H.read_text().splitlines() if not line.startswith("#")))
    ffi.cdef("\n".join(f"xla_error* {name}(const xla_call* call);" for name in names))
    handlers = ffi.dlopen(str(pathlib.Path(sa.__file__).with_name("_xla.so")))
    for name in names:
        metadata = ffi.new("xla_metadata *")
        asked = ffi.new("xla_metadata_extension *", {"base": {"kind": handlers.XLA_METADATA}, "metadata": metadata})
        asking = api and ffi.new("xla_api *", {"version": {"major": api[0], "minor": api[1]}})
        call = ffi.new("xla_call *", {"extensions": ffi.addressof(asked, "base"), "api": asking or ffi.NULL})
        assert getattr(handlers, name)(call) == ffi.NULL
        assert (metadata.version.major, metadata.version.minor) == version


def has_gpu():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@pytest.mark.skipif(not has_gpu(), reason="JAX has no CUDA device here")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("vmap", [False, True])
def test_cuda_devices(dtype, vmap):
    """Against float32 on the CPU, whose error is nothing beside that of bfloat16. Two results in bfloat16 would differ
    by the errors of both, and larger operands have larger ones: of scores four times as large, beyond the bound."""
    *attended, dout = operands(dtype, seq=300)
    gpu, cpu = jax.devices("cuda")[0], jax.devices("cpu")[0]

    def both(dout, *x):
        out, pull = jax.vjp(lambda *y: saj.attention(*y, TEXT), *x)
        return out, *pull(dout)

    call = jax.jit(jax.vmap(both, (None, 0, 0, 0))) if vmap else jax.jit(both)
    given = [dout, *([jnp.stack([x, x / 2]) if vmap else x for x in attended])]
    found = call(*(jax.device_put(x, gpu) for x in given))
    assert all(x.devices() == {gpu} and x.dtype == dtype for x in found)
    close(found, call(*(jax.device_put(x.astype(jnp.float32), cpu) for x in given)), BOUNDS[dtype])


@pytest.mark.skipif(not has_gpu(), reason="JAX has no CUDA device here")
@pytest.mark.parametrize("vmap", [False, True])
def test_cuda_devices_take_float8(vmap):
    """Against float32 on the CPU, as above."""
    given, numbers = float8()
    gpu, cpu = jax.devices("cuda")[0], jax.devices("cpu")[0]
    attend = functools.partial(saj.attention, pattern=TEXT)
    many = {name: jax.device_put(jnp.stack([x, x[::-1]]) if vmap else x, gpu) for name, x in given.items()}
    found = jax.jit(jax.vmap(lambda x: attend(**x)) if vmap else lambda x: attend(**x))(many)
    expected = attend(*(jax.device_put(x.astype(jnp.float32), cpu) for x in numbers))
    assert found.devices() == {gpu} and found.dtype == jnp.bfloat16
    close([found], [jnp.stack([expected, expected[::-1]]) if vmap else expected], BOUNDS[jnp.bfloat16])


def test_the_wheel_has_the_handlers():
    assert (pathlib.Path(sa.__file__).parent / "_xla.so").is_file()
