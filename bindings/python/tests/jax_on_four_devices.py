# SPDX-License-Identifier: MIT
"""Tests that test_jax_sharding.py runs on four devices: results are those of one, and what fits stays where it lies."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparseattn as sa
import sparseattn.jax as saj

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
OWN = P("data", None, "model")  # batch entries and heads
HEADS = P(None, None, ("data", "model"))
LINE = Mesh(np.array(jax.devices()), ("model",))  # which divides heads that MESH leaves


def operands(heads_q=4, heads_kv=2, batch=4):
    """q, k, v, dout [batch, seq, heads, head_dim]."""
    heads = (heads_q, heads_kv, heads_kv, heads_q)
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (batch, 40, h, 16)) for key, h in zip(keys, heads)]


def differentiate(q, k, v, dout, sinks=None, **options):
    """out and lse, and gradients of all."""

    def loss(q, k, v, sinks):
        out, lse = saj.attention(q, k, v, sink_logits=sinks, return_lse=True, **options)
        return (out * dout).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    given = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    return jax.grad(loss, given, has_aux=True)(q, k, v, sinks)


def check(call, arrays, specs, mesh=MESH, bound=2e-5):
    """What moves between devices where arrays lie so, if the results are those of one device."""
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(call).lower(*placed).compile()
    for one, other in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(call(*arrays)), strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound)
    return set(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text()))


def causal(**options):
    return functools.partial(differentiate, pattern="causal & (sink(2) | window(9,0))", **options)


@pytest.mark.parametrize("spec", [OWN, P("data"), P(None, None, "model"), P(("data", "model"))])
@pytest.mark.parametrize("heads_kv", [2, 4])
def test_batch_entries_and_heads_stay_where_they_lie(spec, heads_kv):
    assert check(causal(), operands(4, heads_kv), [spec] * 4) == set()


@pytest.mark.parametrize("axes", ["bhsd", "thd"])
def test_other_axes(axes):
    order, spec = {"bhsd": ((0, 2, 1, 3), P("data", "model")), "thd": (None, P(None, "model"))}[axes]
    arrays = [x.transpose(order) if order else x[0] for x in operands()]
    assert check(causal(axes=axes), arrays, [spec] * 4) == set()


def test_sinks_add_up_their_gradients():
    sinks = jnp.asarray([0.5, -2, 1, 3], jnp.float32)
    assert check(causal(), [*operands(), sinks], [*[OWN] * 4, P("model")]) == {"all-reduce"}


@pytest.mark.parametrize("heads_q, heads_kv, of_q, of_k", [(4, 1, OWN, P("data")), (8, 2, HEADS, P(None, None, "data"))])
def test_queries_of_a_group_on_several_devices(heads_q, heads_kv, of_q, of_k):
    """Gradients of their keys are the sums of what devices have."""
    assert check(causal(), operands(heads_q, heads_kv), [of_q, of_k, of_k, of_q]) == {"all-reduce"}


ON_LINE = P(None, None, "model")
FINER = [(8, 2), (12, 3), (12, 6), (24, 3)]  # four devices have a part of a group, or of two


@pytest.mark.parametrize("heads_q, heads_kv", FINER)
def test_heads_that_those_of_keys_cannot_follow(heads_q, heads_kv):
    """Each device has all key heads, and computes a part of their gradients."""
    sinks = jnp.linspace(-1, 1, heads_q, dtype=jnp.float32)
    specs = [ON_LINE, P(), P(), ON_LINE, P("model")]
    assert check(causal(), [*operands(heads_q, heads_kv), sinks], specs, LINE) == {"all-reduce"}
    assert "all-gather" not in check(jax.vmap(causal(), (0, None, None, 0)), *mapped(heads_q, heads_kv), LINE)
    if heads_kv == 3:
        assert check(causal(), operands(heads_q, heads_kv), [HEADS, P(), P(), HEADS]) == {"all-reduce"}


def mapped(heads_q, heads_kv):
    """operands, of which vmap maps those of queries, and how they lie on LINE."""
    q, k, v, dout = operands(heads_q, heads_kv)
    return [jnp.stack([q, -q]), k, v, jnp.stack([dout, dout])], [P(None, *ON_LINE), P(), P(), P(None, *ON_LINE)]


def test_keys_that_lie_elsewhere():
    """Key heads that are divided otherwise, and those that a projection makes, are brought to where they are needed."""
    q, k, v, dout = operands(16, 4)
    on_both = [HEADS, P(None, None, "model"), P(None, None, "model"), HEADS]
    check(causal(), [q, k, v, dout], on_both)
    weights = jax.random.normal(jax.random.key(2), (16, 2 * 16)) / 4

    def call(q, x, weights, dout):
        k = (x @ weights).reshape(4, 40, 2, 16)
        return differentiate(q, k, k, dout, pattern="causal")

    check(call, [q, k[:, :, 0], weights, dout], [ON_LINE, P(), P(None, "model"), ON_LINE], LINE)


@pytest.mark.parametrize("axes", ["bhsd", "thd"])
def test_finer_heads_of_other_axes_and_lists(axes):
    order, spec = {"bhsd": ((0, 2, 1, 3), P(None, "model")), "thd": (None, P(None, "model"))}[axes]
    q, k, v, dout = (x.transpose(order) if order else x[0] for x in operands(12, 3))
    shape = (40, 3, 8) if axes == "thd" else (4, 40, 3, 8)
    indices = jax.random.randint(jax.random.key(1), shape, 0, 40)
    counts = jax.random.randint(jax.random.key(2), shape[:-1], 0, 9)

    def call(indices, counts, *x):
        options = {"indices": indices, "index_counts": counts, "axes": axes}
        return differentiate(*x, pattern=sa.causal() & sa.runtime_tokens(8), **options)

    arrays, specs = [indices, counts, q, k, v, dout], [P(), P(), spec, P(), P(), spec]
    assert "all-gather" not in check(call, arrays, specs, LINE)


def test_finer_heads_of_float8():
    def call(q, k, v, dout):
        return jax.grad(lambda *x: (saj.float8_attention(*x, "causal") * dout).sum(), (0, 1, 2))(q, k, v)

    # What devices have of a gradient is of bfloat16 before it is added up.
    assert check(call, operands(8, 2), [ON_LINE, P(), P(), ON_LINE], LINE, bound=2e-2) == {"all-reduce"}


def test_lists_of_a_call():
    q, k, v, dout = operands()
    indices = jax.random.randint(jax.random.key(1), (4, 40, 2, 8), 0, 40)

    def call(indices, *x):
        return differentiate(*x, pattern=sa.causal() & sa.runtime_tokens(8), indices=indices)

    assert check(call, [indices, q, k, v, dout], [OWN] * 5) == set()


def test_float8():
    def call(q, k, v, dout):
        return jax.grad(lambda *x: (saj.float8_attention(*x, "causal") * dout).sum(), (0, 1, 2))(q, k, v)

    assert check(call, operands(), [OWN] * 4) == set()


@pytest.mark.parametrize("in_axes", [0, (0, None, None, 0)])
def test_vmap(in_axes):
    arrays = operands()
    mapped = [True] * 4 if in_axes == 0 else [True, False, False, True]
    given = [jnp.stack([x, -x]) if is_mapped else x for x, is_mapped in zip(arrays, mapped)]
    for spec in (P("model", "data"), P(None, "data")):
        specs = [spec if is_mapped else P("data") for is_mapped in mapped]
        assert "all-gather" not in check(jax.vmap(causal(), in_axes), given, specs)


@pytest.mark.parametrize(
    "pattern",
    [
        sa.per_head(["causal", "full", "window(3,3)", "sink(1)"]),
        sa.per_batch(["causal", "full", "window(3,3)", "sink(1)"]),
        np.random.default_rng(0).random((4, 4, 40, 40)) < 0.5,
    ],
    ids=["heads", "batch entries", "both"],
)
def test_patterns_that_differ_are_not_applied_to_a_part(pattern):
    assert "all-gather" in check(functools.partial(differentiate, pattern=pattern), operands(), [OWN] * 4)


@pytest.mark.parametrize("spec", [P("data", "model"), P(None, None, None, "model")])
def test_what_lies_otherwise_is_gathered(spec):
    assert "all-gather" in check(causal(), operands(), [spec] * 4)


def test_heads_that_no_axis_divides():
    """A projection of two heads by four devices halves an axis of the mesh."""
    weights = jax.random.normal(jax.random.key(2), (16, 2 * 16))

    def call(x, weights, q):
        k = (x @ weights).reshape(4, 40, 2, 16)
        return saj.attention(q, k, k, "causal")

    q = operands(8)[0]
    check(call, [q[:, :, 0], weights, q], [P(), P(None, ("data", "model")), HEADS])


def test_a_layer_in_a_loop():
    def call(q, k, v, dout):
        step = jax.checkpoint(lambda x, _: (saj.attention(x, k, v, "causal"), None))
        return jax.grad(lambda q: (jax.lax.scan(step, q, None, 3)[0] * dout).sum())(q)

    assert check(call, operands(), [OWN] * 4) == set()


@pytest.mark.parametrize("mapped", [False, True])
def test_shard_map(mapped):
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None or "check_vma" not in inspect.signature(shard_map).parameters:
        pytest.skip("this JAX has another shard_map")
    call = jax.vmap(causal()) if mapped else causal()
    arrays, spec = operands(), P(None, *OWN) if mapped else OWN
    rows = P(None, "data", "model") if mapped else P("data", "model")
    arrays = [x[None] for x in arrays] if mapped else arrays
    results = (spec, spec, spec), (spec, rows)
    found = shard_map(call, mesh=MESH, in_specs=(spec,) * 4, out_specs=results, check_vma=False)
    assert check(found, arrays, [spec] * 4) == set()


def shard_map_of_types():
    """shard_map as JAX has it by default, where types say along which axes of a mesh arrays differ."""
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None or "check_vma" not in inspect.signature(shard_map).parameters:
        pytest.skip("this JAX has another shard_map")
    return shard_map


@pytest.mark.parametrize("heads_kv, of_k", [(2, OWN), (1, P("data"))])
def test_shard_map_adds_up_gradients_of_what_devices_have_in_common(heads_kv, of_k):
    shard_map, arrays, specs = shard_map_of_types(), operands(4, heads_kv), (OWN, of_k, of_k, OWN)
    results = (OWN, of_k, of_k), (OWN, P("data", "model"))
    check(shard_map(causal(), mesh=MESH, in_specs=specs, out_specs=results), arrays, specs)

    def outside(q, k, v, dout):
        attend = functools.partial(saj.float8_attention, pattern="causal")
        attend = shard_map(attend, mesh=MESH, in_specs=specs[:3], out_specs=OWN)
        return jax.grad(lambda *x: (attend(*x) * dout).sum(), (0, 1, 2))(q, k, v)

    check(outside, arrays, specs, bound=2e-2)


def test_shard_map_knows_that_results_differ():
    """A weight behind attention of what has no gradients gets one from all devices."""
    shard_map, (q, k, v, _) = shard_map_of_types(), operands()
    weights, starts = jnp.linspace(-1, 1, 16), jnp.asarray([3, 5, 30, 20])

    def differentiate(attend, weights, *x):
        return jax.grad(lambda weights: (attend(*x) @ weights).sum())(weights)

    attention = functools.partial(saj.attention, pattern="causal")
    for attend, arrays, specs in (
        (attention, (q, k, v), (OWN, OWN, OWN)),
        (jax.vmap(attention), (q[None], k[None], v[None]), (P(None, *OWN),) * 3),
        (lambda q, k, v, starts: saj.decode(q, k, v, "causal", starts), (q, k, v, starts), (OWN, OWN, OWN, P("data"))),
    ):
        call = functools.partial(differentiate, attend)
        shared = jax.jit(shard_map(call, mesh=MESH, in_specs=(P(), *specs), out_specs=P()))
        np.testing.assert_allclose(shared(weights, *arrays), call(weights, *arrays), rtol=1e-3, atol=1e-3)


def test_programs_of_other_patterns_are_others():
    """JAX's cache of compiled programs found one of another pattern, where it had been at the same address."""
    q, k, v, _ = (jax.device_put(x, NamedSharding(MESH, OWN)) for x in operands())

    def write(pattern):
        text = jax.jit(lambda *x: saj.attention(*x, pattern)).lower(q, k, v).as_text()
        text, addresses = re.subn(r'backend_config = "\d+"', "", text)
        assert addresses
        return text

    assert write("causal") == write("causal") != write("full")


def explicit_mesh():
    """A mesh whose axes types of arrays name, as those of jax.make_mesh are since JAX 0.9."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    if {kind.name for kind in mesh.axis_types or ()} != {"Explicit"}:
        pytest.skip("meshes of this JAX have other axes by themselves")
    return mesh


@pytest.mark.parametrize(
    "heads_kv, of_q, of_k, moves",
    [(2, OWN, OWN, set()), (1, OWN, P("data"), {"all-reduce"}), (2, *[P("data", "model")] * 2, {"all-gather"})],
    ids=["own", "keys in common", "tokens"],
)
def test_axes_that_types_name(heads_kv, of_q, of_k, moves):
    """A gradient must lie as what it is of."""
    arrays, specs, mesh = operands(4, heads_kv), (of_q, of_k, of_k, of_q), explicit_mesh()
    with jax.set_mesh(mesh):
        assert check(causal(), arrays, specs, mesh) == moves
        many = [jnp.stack([x, -x]) for x in arrays]
        assert check(jax.vmap(causal()), many, [P(None, *spec) for spec in specs], mesh) == moves


def test_axes_that_types_name_beside_those_of_shard_map():
    arrays, mesh, spec = operands(), explicit_mesh(), P("data")
    expected = causal()(*arrays)
    with jax.set_mesh(mesh):
        call = jax.shard_map(causal(), in_specs=(spec,) * 4, out_specs=((spec,) * 3, (spec,) * 2), axis_names={"data"})
        found = jax.jit(call)(*(jax.device_put(x, NamedSharding(mesh, OWN)) for x in arrays))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def exported(call, arrays, specs):
    """The program of a file, for four devices, on arrays that lie so."""
    pytest.importorskip("flatbuffers")  # with which JAX writes programs
    if not jax.config.jax_use_shardy_partitioner:
        pytest.skip("JAX runs no program for several devices without Shardy, whatever is in it")
    disabled = [jax.export.DisabledSafetyCheck.custom_call(f"sparseattn_{op}") for op in ("forward", "backward")]
    forms = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, p)) for x, p in zip(arrays, specs))
    program = jax.export.export(jax.jit(call), disabled_checks=disabled)(*forms)
    assert program.nr_devices == 4
    return jax.export.deserialize(program.serialize()).call


@pytest.mark.parametrize("mapped", [False, True])
def test_an_exported_program_computes_the_same(mapped):
    """XLA gathers what its calls read, as no file can say how devices share them."""
    call = jax.vmap(causal()) if mapped else causal()
    arrays = [x[None] for x in operands()] if mapped else operands()
    specs = [P(None, *OWN) if mapped else OWN] * 4
    program = exported(call, arrays, specs)
    placed = [jax.device_put(x, NamedSharding(MESH, spec)) for x, spec in zip(arrays, specs)]
    for one, other in zip(jax.tree.leaves(program(*placed)), jax.tree.leaves(call(*arrays)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_an_exported_program_shares_what_shard_map_does():
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None or "check_vma" not in inspect.signature(shard_map).parameters:
        pytest.skip("this JAX has another shard_map")
    results = (OWN, OWN, OWN), (OWN, P("data", "model"))
    call = shard_map(causal(), mesh=MESH, in_specs=(OWN,) * 4, out_specs=results, check_vma=False)
    arrays = operands()
    program = exported(call, arrays, [OWN] * 4)
    placed = [jax.device_put(x, NamedSharding(MESH, OWN)) for x in arrays]
    compiled = jax.jit(program).lower(*placed).compile()
    assert "all-gather" not in compiled.as_text()
    for one, other in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(causal()(*arrays)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_symbols_of_export():
    """Outside of shard_map; JAX itself gives no numbers to symbols within."""
    disabled = [jax.export.DisabledSafetyCheck.custom_call("sparseattn_forward")]
    batch, seq = jax.export.symbolic_shape("b, s")
    own = NamedSharding(MESH, OWN)
    forms = [jax.ShapeDtypeStruct((2 * batch, seq, heads, 16), jnp.float32, sharding=own) for heads in (4, 2, 2)]

    def attend(q, k, v):
        return saj.attention(q, k, v, "causal")

    if jax.config.jax_use_shardy_partitioner:
        program = jax.export.export(jax.jit(attend), disabled_checks=disabled)(*forms)
        arrays = operands()[:3]
        found = jax.jit(program.call)(*(jax.device_put(x, own) for x in arrays))
        np.testing.assert_allclose(found, attend(*arrays), rtol=2e-5, atol=2e-5)
    if hasattr(jax, "shard_map"):
        manual = jax.shard_map(attend, mesh=MESH, in_specs=OWN, out_specs=OWN)
        with pytest.raises(sa.UnsupportedError, match="a size b, a symbol of jax.export, inside of jax.shard_map"):
            jax.export.export(jax.jit(manual), disabled_checks=disabled)(*forms)


def test_finer_heads_on_a_cache():
    """No device copies its heads of a cache in each call: queries are gathered."""
    q, k, v, _ = operands(8, 2)
    starts = jnp.asarray([3, 5, 30, 20])
    call = functools.partial(saj.decode, pattern="causal")
    given = [q[:, :2], k, v, starts]
    found = check(lambda q, k, v, starts: call(q, k, v, starts=starts), given, [ON_LINE, P(), P(), P()], LINE)
    assert found == {"all-gather"}


def test_decode():
    q, k, v, _ = operands()
    starts, table = jnp.asarray([3, 5, 30, 20]), jnp.arange(20).reshape(4, 5)
    pages = [x.reshape(20, 8, 2, 16) for x in (k, v)]

    def in_pages(q, k, v, starts, table):
        return saj.decode(q, k, v, "causal", starts, page_table=table)

    def whole(q, k, v, starts):
        return saj.decode(q, k, v, "causal", starts)

    q = q[:, :2]
    assert check(whole, [q, k, v, starts], [*[OWN] * 3, P("data")]) == set()
    of_heads = P(None, None, "model")
    assert check(in_pages, [q, *pages, starts, table], [OWN, of_heads, of_heads, P("data"), P("data")]) == set()
