# SPDX-License-Identifier: MIT
"""Tensors of torch and gradients through autograd, against torch's own dense attention in float64."""

import functools
import gc
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import ROOT, Array, ctrl_c

import sparseattn as sa

torch = pytest.importorskip("torch")
import sparseattn.torch as sat  # noqa: E402

STREAMING = "causal & (sink(2) | window(9,0))"
TEXT = f"{STREAMING} - global_keys(0)"  # the first query sees nothing
IS_OLD = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 15)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def operands(dtype=torch.float32, heads_kv=2, seq=40):
    """q, k, v, dout [batch, seq, heads, head_dim] with gradients, except dout."""
    made = torch.Generator().manual_seed(3)
    shapes = [(2, seq, 4, 24), (2, seq, heads_kv, 24), (2, seq, heads_kv, 16), (2, seq, 4, 16)]
    q, k, v, dout = (torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes)
    return *(x.requires_grad_() for x in (q, k, v)), dout


def dense(q, k, v, mask, sink=None, softcap=None):
    """out and lse by torch in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = (softcap * torch.tanh(s / softcap) if softcap else s).masked_fill(~mask, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    return (torch.softmax(s, -1)[..., : k.shape[2]] @ v).transpose(1, 2), torch.logsumexp(s, -1)


def through_operators(q, k, v, pattern, sink_logits=None, indices=None, index_counts=None, mask=None, **options):
    """out of torch.ops.sparseattn.forward, what compiled code calls."""
    values = {"axes": "bshd", "scale": None, "softcap": None, "q_offset": None, "head_dim_v": None, **options}
    operands = (q, k, v, sink_logits, indices, index_counts, mask)
    return torch.ops.sparseattn.forward(*operands, pattern, *values.values(), False, False, False, True)[0]


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


def mask_of(text, seq=40):
    return torch.from_numpy(sa.parse(text).to_mask(sa.Extent(seq, batch=2, heads=4)))


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("text", [STREAMING, "full", "block_diagonal(7)"])
def test_gradients_are_those_of_dense_attention(dtype, bound, text):
    q, k, v, dout = operands(dtype)
    dlse = torch.linspace(-1, 1, 2 * 4 * 40).reshape(2, 4, 40)
    out, lse = sat.attention(q, k, v, text, return_lse=True)
    found = gradients((out * dout).sum() + (lse * dlse).sum(), q, k, v)
    right, right_lse = dense(q, k, v, mask_of(text))
    expected = gradients((right * dout).sum() + (right_lse * dlse).sum(), q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32 and [g.dtype for g in found] == [dtype] * 3
    for one, other in zip((out, lse, *found), (right, right_lse, *expected)):
        torch.testing.assert_close(one.double(), other.double(), rtol=bound, atol=bound)


def test_only_one_result_is_used():
    q, k, v, dout = operands()
    mask = mask_of("causal")
    for number in (0, 1):
        found = gradients(sat.attention(q, k, v, "causal", return_lse=True)[number].sum(), q, k)
        expected = gradients(dense(q, k, v, mask)[number].sum(), q, k)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_queries_without_keys():
    q, k, v, _ = operands()
    out, lse = sat.attention(q, k, v, TEXT, return_lse=True)
    assert (out[:, 0] == 0).all() and torch.isneginf(lse[:, :, 0]).all()
    dq, dk, dv = gradients(out.sum(), q, k, v)
    assert (dq[:, 0] == 0).all() and (dk[:, 0] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


def test_sinks_and_softcap_have_gradients():
    q, k, v, dout = operands()
    sink = torch.tensor([0.5, -2, 1, 3], requires_grad=True)
    out = sat.attention(q, k, v, "causal", sink_logits=sink, softcap=1.5)
    right, _ = dense(q, k, v, mask_of("causal"), sink, 1.5)
    for one, other in zip(gradients((out * dout).sum(), q, k, v, sink), gradients((right * dout).sum(), q, k, v, sink)):
        torch.testing.assert_close(one, other, rtol=3e-5, atol=3e-5)


def test_values_in_keys():
    q, k, _, dout = operands(heads_kv=1)
    out = sat.attention(q, k, None, "causal", head_dim_v=16)
    right, _ = dense(q, k, k[..., :16], mask_of("causal"))
    for one, other in zip(gradients((out * dout).sum(), q, k), gradients((right * dout).sum(), q, k)):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_lists():
    q, k, v, dout = operands()
    indices = torch.arange(5)[None, None, None, :] + torch.arange(40)[None, :, None, None] - 4
    indices = indices.expand(2, 40, 2, 5)
    found = sat.attention(q, k, v, sa.runtime_tokens(5), indices=indices)
    right = sat.attention(q, k, v, "causal & window(4,0)")
    for one, other in zip(gradients((found * dout).sum(), q, k, v), gradients((right * dout).sum(), q, k, v)):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("changed", ["indices", "index_counts"])
def test_lists_that_change_before_backward_are_noticed(changed):
    q, k, v, _ = operands()
    lists = {"indices": torch.zeros(2, 40, 2, 5, dtype=torch.int64), "index_counts": torch.full((2, 40, 2), 5)}
    out = sat.attention(q, k, v, sa.runtime_tokens(5), **lists)
    lists[changed].fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradcheck():
    q, k, v, _ = (x.detach()[:1, :6, :2, :3].clone().requires_grad_() for x in operands(torch.float64))
    assert torch.autograd.gradcheck(lambda *x: sat.attention(*x, TEXT), (q, k, v), atol=1e-5)


def test_axes_are_taken():
    q, k, v, _ = operands()
    by_head = sat.attention(*(x.transpose(1, 2) for x in (q, k, v)), TEXT, axes="bhsd")
    torch.testing.assert_close(by_head.transpose(1, 2), sat.attention(q, k, v, TEXT))
    packed = sat.attention(*(x[0] for x in (q, k, v)), sa.per_document("causal", [0, 15, 40]), axes="thd")
    torch.testing.assert_close(packed, sat.attention(q, k, v, sa.documents([0, 15, 40]) & sa.causal())[0])


def test_without_gradients_no_backward_is_planned():
    q, k, v, _ = operands()
    with torch.no_grad():
        out = sat.attention(q, k, v, TEXT)
    assert not out.requires_grad and sat.attention(q, k, v, TEXT).requires_grad
    np.testing.assert_array_equal(out.numpy(), sa.attention(*(x.detach() for x in (q, k, v)), TEXT))


def test_signs_that_a_view_owes_are_paid():
    q, k, v, _ = operands()
    owed = torch.complex(torch.zeros_like(q), -q.detach()).conj().imag
    assert owed.is_neg()
    torch.testing.assert_close(sat.attention(owed, k, v, TEXT), sat.attention(q, k, v, TEXT))


def test_what_is_no_tensor():
    q, k, v, _ = operands()
    with pytest.raises(TypeError, match="argument k is ndarray; accepted: a torch tensor"):
        sat.attention(q, k.detach().numpy(), v, TEXT)


@needs_cuda
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("head_dim", [24, 128])
def test_cuda_devices(dtype, bound, head_dim):
    made = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 300, heads, head_dim, generator=made).to(dtype) for heads in (4, 2, 2))
    expected = sat.attention(q, k, v, TEXT, return_lse=True)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            found = sat.attention(*(x.cuda() for x in (q, k, v)), TEXT, return_lse=True)
        stream.synchronize()
        for one, other in zip(found, expected):
            assert one.is_cuda
            torch.testing.assert_close(one.cpu().double(), other.double(), rtol=bound, atol=bound)
    with pytest.raises(sa.ArgumentError) as caught:
        sat.attention(q.cuda(), k, v.cuda(), TEXT)
    assert (caught.value.status, caught.value.argument) == ("SPATTN_E_DEVICE", "k")


@needs_cuda
def test_a_graph_keeps_the_lists_that_it_launches_with():
    """Plans that other calls have driven out of those that are found again are no longer there, but for graphs."""
    q, k, v = torch.randn(3, 1, 1024, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
    right = sat.attention(q, k, v, STREAMING).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sat.attention(q, k, v, STREAMING)
    for n in range(140):
        sat.attention(q[:, :700], k[:, :700], v[:, :700], f"causal & window({n},0)")
    others = [torch.full((1 << 19,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]
    graph.replay()
    assert torch.equal(out, right) and len(others) == 64


@needs_cuda
def test_compiled_code_may_be_graphs():
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 1, 512, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
    attend = torch.compile(lambda q, k, v: sat.attention(q * 2, k, v, TEXT) + 1, mode="reduce-overhead")
    for _ in range(4):
        torch.testing.assert_close(attend(q, k, v), sat.attention(q * 2, k, v, TEXT) + 1)


@needs_cuda
def test_a_plan_is_made_while_another_stream_is_captured():
    x, graph = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with torch.cuda.stream(torch.cuda.Stream()):
            sat.plan("causal & window(77,0)", x, x, x, backward=True)
        y = y + 1
    graph.replay()
    assert torch.equal(y, x + 1 + 1)


@needs_cuda
def test_a_call_on_the_cpu_leaves_gpus_to_forked_children():
    program = """
import os, numpy, torch, sparseattn
x = numpy.ones((1, 8, 1, 8), numpy.float32)
sparseattn.attention(x, x, x, "causal")
child = os.fork()
if not child:
    os._exit(int(torch.ones(1, device="cuda").item() != 1))
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env={**os.environ})


def test_memory_that_torch_keeps_is_given_to_plans(monkeypatch):
    said = []

    def make(plan, pattern):
        said.append(pattern)
        if len(said) == 1:
            raise sa.ResourceError("argument context has no memory", "SPATTN_E_DEVICE_MEMORY", "context")

    monkeypatch.setattr(sa.Plan, "__init__", make)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("given back"))
    sat.TensorPlan("full", torch.device("cuda", 0))
    assert said == ["full", "given back", "full"]
    said.clear()
    with pytest.raises(sa.ResourceError):
        sat.TensorPlan("full", torch.device("cpu"))


def test_what_is_written_in_place_is_written_for_autograd():
    q, k, v = (x.detach() for x in operands()[:3])
    weight, plan = torch.ones((), requires_grad=True), sat.plan(TEXT, q, k, v)
    out = plan.forward(q, k, v)
    loss = (out * weight).sum()
    assert plan.forward(k.repeat(1, 1, 2, 1), k, v, out=out) is out
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    cache, new = torch.zeros(2, 64, 2, 24), torch.ones(2, 1, 2, 24)
    loss = (cache * weight).sum()
    sat.cache_append(new, new, cache, torch.zeros_like(cache), starts=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused():
    q, k, v, _ = operands()
    for call in (lambda: sat.attention(q, k, v, "full"), lambda: through_operators(q, k, v, "full")):
        (dq,) = torch.autograd.grad(call().square().sum(), q, create_graph=True)
        with pytest.raises(sa.UnsupportedError, match="second derivatives"):
            dq.sum().backward()
        torch.testing.assert_close(dq, gradients(call().square().sum(), q)[0])


@pytest.mark.parametrize(
    "change, kind, argument",
    [
        (dict(k=torch.zeros(2, 40, 2, 24, device="meta")), sa.ArgumentError, "k"),
        (dict(k=torch.zeros(2, 40, 2, 24).to_sparse()), sa.ArgumentError, "k"),
        (dict(q=torch.zeros(40, 4, 24)), sa.ShapeError, "q"),
        (dict(sink_logits=torch.zeros(4, dtype=torch.float64)), sa.DTypeError, "sink_logits"),
        (dict(k=torch.zeros(2, 40, 2, 24, dtype=torch.complex64)), sa.DTypeError, "k"),
        (dict(v=torch.zeros(2, 40, 2, 16, dtype=torch.bfloat16)), sa.DTypeError, "v"),
        (dict(v=torch.zeros(2, 41, 2, 16)), sa.ShapeError, "v"),
        (dict(sink_logits=torch.zeros(3)), sa.ShapeError, "sink_logits"),
        (dict(pattern="wind"), sa.FormatError, "text"),
        (dict(scale="large"), sa.DTypeError, "problem.scale"),
        (dict(scale=torch.ones((), requires_grad=True)), sa.ArgumentError, "scale"),
        (dict(softcap=torch.nn.Parameter(torch.ones(1))), sa.ArgumentError, "softcap"),
        (dict(q=torch.nested.nested_tensor([torch.zeros(40, 4, 24)] * 2)), sa.ArgumentError, "q"),
        (dict(k=torch.nested.nested_tensor([torch.zeros(40, 2, 24)] * 2)), sa.ArgumentError, "k"),
        (dict(q=torch.nested.nested_tensor([torch.zeros(40, 4, 24)] * 2, layout=torch.jagged)), sa.ArgumentError, "q"),
        (dict(pattern=torch.ones(40, 40, dtype=torch.bool, device="meta")), sa.ArgumentError, "mask"),
        (dict(pattern=torch.ones(2, 1, 1, 30, dtype=torch.bool)), sa.ShapeError, "mask"),
        (dict(pattern=torch.ones(1, 41, dtype=torch.bool)), sa.ShapeError, "mask"),
        (dict(pattern=torch.ones(3, 1, 1, 40, dtype=torch.bool)), sa.ShapeError, "mask"),
        (dict(q=None), sa.DTypeError, "q"),
        (dict(k=None), sa.DTypeError, "k"),
        (dict(v=None, head_dim_v=0), sa.ArgumentError, "head_dim_v"),
        (dict(v=torch.zeros(2, 40, 2, 0)), sa.ShapeError, "v"),
        (dict(context="cpu"), sa.DTypeError, "context"),
    ],
)
def test_errors_are_typed_and_name_the_argument(change, kind, argument):
    q, k, v, _ = operands()
    with pytest.raises(kind) as caught:
        sat.attention(**{"q": q, "k": k, "v": v, "pattern": TEXT, **change})
    assert caught.value.argument == argument


FLOATS = "torch.float32, torch.float16, torch.bfloat16, torch.float64"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e5m2])
def test_dtypes_that_are_refused_are_told_from_what_the_argument_takes(dtype):
    q, k, v, _ = operands()
    lists = torch.zeros(2, 40, 2, 5, dtype=torch.int32)
    plan = sat.plan(TEXT, q.detach(), k.detach(), v.detach())
    of = {"scale": lambda x: x.detach()[..., 0].to(dtype), "out": torch.empty(2, 40, 4, 16, dtype=dtype)}
    for argument, accepted, call in [
        ("q", f"{FLOATS}, torch.float8_e4m3fn", lambda: sat.attention(q.to(dtype), k, v, TEXT)),
        ("k", f"{FLOATS}, torch.float8_e4m3fn", lambda: sat.attention(q, k.to(dtype), v, TEXT)),
        ("v", f"{FLOATS}, torch.float8_e4m3fn", lambda: plan.run(q, k, v.to(dtype))),
        ("out", FLOATS, lambda: plan.run(q, k, v, out=of["out"])),
        ("sink_logits", "torch.float32", lambda: sat.attention(q, k, v, TEXT, sink_logits=torch.zeros(4).to(dtype))),
        ("k_scales", "torch.float32", lambda: plan.run(q, k, v, k_scales=of["scale"](k))),
        ("indices", "torch.int32, torch.int64",
         lambda: sat.attention(q, k, v, sa.runtime_tokens(5), indices=lists.to(dtype))),
        ("k_new", FLOATS, lambda: sa.cache_append(of["out"], v, k, v, starts=lists[:, 0, 0, 0])),
        ("starts", "torch.int32, torch.int64",
         lambda: sa.cache_append(*[x.detach() for x in (k, v, k, v)], starts=lists[:, 0, 0, 0].to(dtype))),
    ]:
        with pytest.raises(sa.DTypeError, match=f"argument {argument} is {dtype}; accepted: {accepted}$") as caught:
            call()
        assert caught.value.argument == argument


# ---- operators ----

LISTS = {"indices": torch.randint(-1, 41, (2, 40, 2, 5)), "index_counts": torch.randint(0, 6, (2, 40, 2))}
OPERATOR_CALLS = {
    "plain": ({}, {}),
    "sinks": ({"sink_logits": torch.tensor([0.5, -2, 1, 3])}, {"softcap": 2.0, "scale": 0.3}),
    "lists": (LISTS, {"pattern": "causal & runtime_tokens(5)"}),
    "mask": ({"mask": torch.rand(2, 1, 40, 40) < 0.7}, {"pattern": "full"}),
    "padding": ({"mask": torch.arange(40)[None, None, None] < torch.tensor([40, 17])[:, None, None, None]}, {}),
    "values in keys": ({"v": None}, {"head_dim_v": 16}),
    "heads before tokens": ({"q": torch.randn(2, 4, 40, 24), "k": torch.randn(2, 4, 40, 24)}, {"axes": "bhsd"}),
    "packed": (
        {"q": torch.randn(40, 4, 24), "k": torch.randn(40, 4, 24), "v": torch.randn(40, 4, 16)},
        {"axes": "thd"},
    ),
}


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_operators_are_what_torch_expects(name):
    given, options = OPERATOR_CALLS[name]
    q, k, v, _ = operands()
    if options.get("axes") == "bhsd":
        v = v.detach().transpose(1, 2).repeat(1, 2, 1, 1).requires_grad_()
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "sink_logits": None,
        "indices": None,
        "index_counts": None,
        "mask": None,
        **given,
    }
    for operand in ("q", "k", "v", "sink_logits"):
        if tensors[operand] is not None:
            tensors[operand] = tensors[operand].detach().clone().requires_grad_()
    scalars = {"pattern": "causal & window(9,0)", "axes": "bshd", "scale": None, "softcap": None, "q_offset": None}
    scalars = {**scalars, "head_dim_v": None, **options}
    arguments = (*tensors.values(), *scalars.values(), False, False, False, True)
    torch.library.opcheck(torch.ops.sparseattn.forward.default, arguments)


def test_operators_and_the_short_way_agree():
    q, k, v, dout = operands()
    padding = OPERATOR_CALLS["padding"][0]["mask"]
    for given in ({}, {"mask": padding}, {"mask": torch.rand(2, 4, 40, 40) < 0.5}):
        mine = sat.attention(q, k, v, given.get("mask", TEXT))
        other = through_operators(q, k, v, "full" if given else TEXT, **given)
        assert torch.equal(mine, other)
        for one, two in zip(gradients((mine * dout).sum(), q, k, v), gradients((other * dout).sum(), q, k, v)):
            assert torch.equal(one, two)


class Layer(torch.nn.Module):
    def __init__(self, pattern):
        super().__init__()
        self.linear, self.pattern = torch.nn.Linear(24, 24), pattern

    def forward(self, q, k, v):
        return sat.attention(self.linear(q), k, v, self.pattern).sin()


def test_compiled_without_a_break_for_all_lengths():
    torch._dynamo.reset()
    layer, graphs = Layer(sa.causal() & (sa.sink(2) | sa.window(9, 0))), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for seq in (40, 50, 77):
        q, k, v, _ = operands(seq=seq)
        assert torch.equal(compiled(q, k, v), layer(q, k, v))
    assert len(graphs) == 1
    for pattern in (sa.parse("window(1,1)"), sa.mask(torch.eye(77, dtype=torch.bool)), "full"):
        layer.pattern = pattern  # seen, though the graph is another's
        assert torch.equal(compiled(q, k, v), layer(q, k, v))
    assert len(graphs) == 4


def test_compiled_gradients_are_the_same():
    torch._dynamo.reset()
    layer = Layer(TEXT)
    q, k, v, dout = operands()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parameters = (q, k, v, *layer.parameters())
    found = gradients((compiled(q, k, v) * dout).sum(), *parameters)
    for one, other in zip(found, gradients((layer(q, k, v) * dout).sum(), *parameters)):
        torch.testing.assert_close(one, other)


def test_numbers_of_any_kind_are_compiled():
    q = torch.randn(1, 40, 4, 16)
    for call in (
        lambda scale: sat.attention(q, q, q, "causal", scale=scale),
        lambda scale: sat.attention(q, q, q, "causal", softcap=1 / scale),
        lambda scale: sat.scaled_dot_product_attention(q, q, q, scale=scale),
        lambda scale: sat.float8_attention(q, q, q, "causal", scale=scale),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for scale in (0.1, 0.2, 0.3):  # the second is the first that has a symbol
            assert torch.equal(compiled(scale), call(scale))
    def of_length(q, power):
        return sat.attention(q, q, q, "causal", scale=power(q.shape[1]))

    for power in (lambda seq: seq**-0.5, lambda seq: 1 / np.sqrt(seq), lambda seq: np.float32(0.25)):
        torch._dynamo.reset()
        compiled = torch.compile(of_length, fullgraph=True, dynamic=False, backend="aot_eager")
        assert torch.equal(compiled(q, power), of_length(q, power))
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: of_length(q, lambda seq: seq**-0.5), fullgraph=True, backend="aot_eager")
    for seq in (40, 30, 20):
        assert torch.equal(compiled(q[:, :seq]), of_length(q[:, :seq], lambda seq: seq**-0.5))


def test_a_learned_scale_is_refused_in_compiled_code():
    torch._dynamo.reset()
    q, scale = torch.randn(1, 8, 1, 8), torch.tensor(0.5, requires_grad=True)
    compiled = torch.compile(lambda scale: sat.attention(q, q, q, "full", scale=scale), backend="eager")
    with pytest.raises(sa.ArgumentError, match="argument scale requires a gradient"):
        compiled(scale)
    assert torch.equal(compiled(scale.detach()), sat.attention(q, q, q, "full", scale=0.5))
    with pytest.raises(sa.ArgumentError, match="argument scale requires a gradient"):
        sat.float8_attention(q, q, q, "full", scale=scale)


@pytest.mark.parametrize("library", [np.asarray, Array])
def test_masks_of_other_libraries_are_those_of_torch(library):
    q, k, v, _ = operands()
    for shape in ((40, 40), (2, 1, 1, 40), (2, 4, 1, 40), (2, 4, 40, 40)):
        values = np.random.default_rng(8).random(shape) < 0.6
        mask, of_torch = library(values), torch.from_numpy(values)
        expected = sat.attention(q, k, v, of_torch)
        assert torch.equal(sat.attention(q, k, v, mask), expected)
        x = [operand.detach() for operand in (q, k, v)]
        assert torch.equal(sat.plan(mask, *x).forward(*x), expected)
        assert torch.equal(sat.float8_attention(*x, mask), sat.float8_attention(*x, of_torch))


def test_masks_are_compiled_as_operands():
    torch._dynamo.reset()

    def masked(q, k, v, mask):
        return sat.scaled_dot_product_attention(q, k, v, mask, pattern="causal")

    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    q, k, v = torch.randn(3, 2, 4, 40, 16).unbind()
    for lengths in ([40, 3], [7, 20]):
        mask = torch.arange(40) < torch.tensor(lengths)[:, None, None, None]
        assert torch.equal(compiled(q, k, v, mask), masked(q, k, v, mask))


def test_exported_for_all_lengths():
    layer = Layer(sa.parse(STREAMING))
    q, k, v, _ = (x.detach() for x in operands())
    seq = torch.export.Dim("seq", min=2, max=4096)
    program = torch.export.export(layer, (q, k, v), dynamic_shapes=({1: seq}, {1: seq}, {1: seq}))
    for length in (40, 65):
        q, k, v, _ = (x.detach() for x in operands(seq=length))
        assert torch.equal(program.module()(q, k, v), layer(q, k, v))


LOAD = """
import sys
import torch
import sparseattn as sa, sparseattn.torch

others = [sa.mask(torch.ones(40, 40, dtype=torch.bool)) for _ in range(20)]
program, operands, out = sys.argv[1:]
torch.save(torch.export.load(program).module()(*torch.load(operands)), out)
"""


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_take_patterns_of_arrays_to_other_processes(tmp_path, strict):
    layer = Layer(sa.causal() & sa.mask(torch.rand(40, 40) < 0.5))
    q, k, v = (x.detach() for x in operands()[:3])
    program, given, out = (str(tmp_path / name) for name in ("program.pt2", "operands.pt", "out.pt"))
    exported = torch.export.export(layer, (q, k, v), strict=strict)
    assert torch.equal(exported.module()(q, k, v), layer(q, k, v))
    torch.export.save(exported, program)
    torch.save([q, k, v], given)
    subprocess.run([sys.executable, "-c", LOAD, program, given, out], check=True, timeout=300)
    assert torch.equal(torch.load(out), layer(q, k, v))


def test_graphs_name_patterns_by_their_bytes():
    torch._dynamo.reset()
    names = []

    def backend(graph, inputs):
        names.extend(node.args[7] for node in graph.graph.nodes if "sparseattn" in str(node.target))
        return graph

    mask = torch.eye(40, dtype=torch.bool)
    q, k, v, _ = operands()
    for pattern in (sa.mask(mask), sa.mask(mask), sa.mask(~mask)):
        compiled = torch.compile(Layer(pattern), fullgraph=True, backend=backend)
        compiled(q, k, v)
        del pattern, compiled
        gc.collect()
    first, second, third = names
    assert first == second != third and (len(first) < 80 or IS_OLD)
    assert torch.equal(through_operators(q, k, v, first), sat.attention(q, k, v, mask))
    for foreign in ("#1", "#" + 16 * "0" + ".1", "#sha256:" + 64 * "0"):
        with pytest.raises(sa.FormatError, match="arrays that this process has not"):
            through_operators(q, k, v, foreign)


def test_compiled_code_takes_no_context():
    torch._dynamo.reset()
    context = sa.Context("cpu", threads=1)
    compiled = torch.compile(lambda q: sat.attention(q, q, q, "full", context=context), backend="eager")
    x = torch.randn(1, 8, 1, 8)
    assert torch.equal(compiled(x), sat.attention(x, x, x, "full"))  # by a break of the graph, or not at all
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(1, 8, 1, 8)
        with pytest.raises(sa.ArgumentError, match="accepted in compiled code: None"):
            sat.attention(x, x, x, "full", context=context)
        assert sat.attention(x, x, x, "full").shape == (1, 8, 1, 8)


def test_errors_of_compiled_code_are_ours():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, v: sat.attention(q, q, v, "full"), backend="eager")
    with pytest.raises(sa.DTypeError, match="argument v is list") as caught:
        compiled(torch.randn(1, 8, 1, 8), [1.0])
    assert caught.value.argument == "v" and caught.value.status == "SPATTN_E_DTYPE"


def test_compiled_code_makes_patterns_between_its_graphs():
    """Without fullgraph, torch.compile leaves calls of the library to Python, which has the numbers of each call."""
    torch._dynamo.reset()

    def attend(x, offsets):
        return sat.attention(2 * x, x, x, sa.per_document("causal", offsets), axes="thd")

    compiled, x = torch.compile(attend, backend="eager"), torch.randn(12, 1, 8)
    for offsets in ([0, 4, 12], [0, 7, 12]):
        assert torch.equal(compiled(x, offsets), attend(x, offsets))


def test_dispatch_modes_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **(options or {}))

    q, k, v, _ = operands()
    with Look():
        sat.attention(q, k, v, TEXT)
    assert "sparseattn.forward.default" in seen
    with FlopCounterMode(display=False):
        sat.attention(q, k, v, TEXT)


def test_torchs_wish_for_determinism_is_heard():
    from torch.utils._python_dispatch import TorchDispatchMode

    heard = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if "sparseattn" in str(function):
                heard.append(arguments[13])
            return function(*arguments, **(options or {}))

    q, k, v, _ = operands()
    layer = sat.BlockSparseMultiHeadAttention(24, 4, pattern=TEXT)
    for wish in (False, True):
        torch.use_deterministic_algorithms(wish)
        with Look():
            sat.attention(q, k, v, TEXT)
            sat.attention(q, k, v, TEXT, deterministic=True)
            sat.scaled_dot_product_attention(k, k, k)
            sat.float8_attention(q, k, v, TEXT)
            layer(*[torch.randn(40, 2, 24)] * 3)
    torch.use_deterministic_algorithms(False)
    assert heard == [False, True, False, False, False, True, True, True, True, True]


def test_inference_mode_leaves_nothing_behind():
    q, k, v, dout = operands(seq=41)
    with torch.inference_mode():
        right = sat.attention(q, k, v, TEXT)
    out = sat.attention(q.detach(), k.detach(), v.detach(), TEXT)
    assert torch.equal(out, right) and not out.is_inference()
    out.requires_grad_().sum().backward()


def test_checkpoints_compute_again():
    from torch.utils.checkpoint import checkpoint

    q, k, v, dout = operands()
    call = lambda *x: sat.attention(*x, TEXT)  # noqa: E731
    again = checkpoint(call, q, k, v, use_reentrant=False)
    for one, other in zip(gradients((again * dout).sum(), q, k, v), gradients((call(q, k, v) * dout).sum(), q, k, v)):
        assert torch.equal(one, other)


def test_transforms_of_torch_func_are_refused():
    """A function that serves them takes three times as long in every other call."""
    q = torch.randn(2, 8, 2, 8)
    gradient = torch.func.grad(lambda x: sat.attention(x, x, x, TEXT).sum())
    plan, (out, lse) = sat.plan(TEXT, q, q, q), sat.attention(q, q, q, TEXT, return_lse=True)
    for transform in (
        gradient,
        torch.vmap(lambda x: sat.attention(x, x, x, TEXT, axes="thd")),
        torch.vmap(lambda x: plan.forward(q, q, x.expand(2, -1, -1, -1))),
        torch.vmap(lambda x: sat.attention_backward(q, q, q, out, lse, x.expand(2, -1, -1, -1), TEXT)[0]),
        lambda x: torch.func.jvp(lambda y: plan.forward(q, y, q), (x,), (x,)),
    ):
        with pytest.raises(sa.UnsupportedError, match="torch.func"):
            transform(q)


def test_gradients_of_a_batch_at_once_are_refused():
    q, k, v, dout = operands()
    out = sat.attention(q, k, v, TEXT)
    with pytest.raises(sa.UnsupportedError, match="is_grads_batched or vectorize, are not offered; accepted") as caught:
        torch.autograd.grad(out, q, torch.stack([dout, dout]), is_grads_batched=True, retain_graph=True)
    assert caught.value.argument == "dout"
    with pytest.raises(sa.UnsupportedError, match="is_grads_batched or vectorize"):
        torch.autograd.functional.jacobian(lambda q: sat.attention(q, k, v, TEXT).sum((1, 2)), q, vectorize=True)
    torch.autograd.grad(out, q, dout)


def test_numbers_that_are_tensors_are_numbers():
    """Their gradients would be lost, and so they are asked for what has none; torch.no_grad() is that, too."""
    q, k, v, _ = operands()
    scale = torch.nn.Parameter(torch.tensor(0.25))
    right = sat.attention(q, k, v, TEXT, scale=0.25)
    assert torch.equal(sat.attention(q, k, v, TEXT, scale=scale.detach()), right)
    with torch.no_grad():
        assert torch.equal(sat.attention(q, k, v, TEXT, scale=scale), right)


@pytest.mark.parametrize("number", [torch.tensor(0), np.array(0)])
def test_a_number_may_be_another_one_in_the_next_call(number):
    """As of a loop that counts in place: plans are found again by what the number was in the call."""
    q, k, v, _ = operands()
    for offset in range(3):
        found = sat.attention(q[:, :5], k, v, STREAMING, q_offset=number)
        assert torch.equal(found, sat.attention(q[:, :5], k, v, STREAMING, q_offset=offset))
        number += 1
    for call in (sat.attention, sat.float8_attention):
        with pytest.raises(sa.DTypeError, match=r"q_offset is 2.0; accepted: an integer"):
            call(q[:, :5], k, v, STREAMING, q_offset=2.0)  # an equal integer was there before


def test_offsets_are_symbols_in_compiled_code():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    q, counter = torch.randn(1, 40, 4, 16), CompileCounter()

    def call(first):
        return sat.attention(q[:, :5], q, q, "causal", q_offset=first)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for first in range(2, 9):  # the second is the first that has a symbol
        assert torch.equal(compiled(first), call(first))
    assert counter.frame_count == 2


def test_derivatives_that_go_forward_are_refused():
    """Not dropped without a word, as by a call that reads the memory of what it is given."""
    from torch.autograd import forward_ad

    q = torch.randn(2, 8, 2, 8)
    plan, (out, lse) = sat.plan(TEXT, q, q, q), sat.attention(q, q, q, TEXT, return_lse=True)

    def backward(**given):
        return sat.attention_backward(**given, out=out, lse=lse, dout=out, pattern=TEXT)

    with forward_ad.dual_level():
        assert torch.equal(sat.attention(q, q, q, TEXT), out) and torch.equal(plan.forward(q, q, q), out)
        for name in ("q", "k", "v"):
            given = {"q": q, "k": q, "v": q, name: forward_ad.make_dual(q, torch.ones_like(q))}
            for call in (functools.partial(sat.attention, pattern=TEXT), plan.forward, backward):
                with pytest.raises(sa.UnsupportedError, match="has a tangent") as caught:
                    call(**given)
                assert caught.value.argument == name


@pytest.mark.skipif(IS_OLD, reason="compiled code of this torch does not see tangents")
@pytest.mark.parametrize(
    "attend", [sat.attention, sat.float8_attention, lambda *x: sat.scaled_dot_product_attention(*x[:3])]
)
def test_derivatives_that_go_forward_are_refused_in_compiled_code(attend):
    """They were zeros there."""
    from torch.autograd import forward_ad

    def call(x):
        return attend(x, x, x, TEXT)

    def by_levels(x, tangent):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent))).tangent

    q = torch.randn(2, 8, 2, 8)
    by_jvp, by_jacfwd = (lambda x, t: torch.func.jvp(call, (x,), (t,))), (lambda x, t: torch.func.jacfwd(call)(x))
    for derivative in (by_jvp, by_jacfwd, by_levels):
        for fullgraph, kind in ((False, sa.UnsupportedError), (True, torch._dynamo.exc.Unsupported)):
            torch._dynamo.reset()
            with pytest.raises(kind):
                torch.compile(derivative, backend="eager", fullgraph=fullgraph)(q, q)


def test_meta_tensors_have_shapes():
    q = torch.empty(2, 40, 4, 24, device="meta")
    out, lse = sat.attention(q, q, q, TEXT, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 4, 40)


# ---- autocast ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_does(dtype):
    q, k, v, dout = operands()
    with torch.autocast("cpu", dtype):
        out = sat.attention(q, k, v, TEXT)
        assert sat.attention(*(x.double() for x in (q, k, v)), TEXT).dtype == torch.float64
    assert out.dtype == dtype
    expected = sat.attention(*(x.to(dtype) for x in (q, k, v)), TEXT)
    assert torch.equal(out, expected)
    found = gradients((out * dout).sum(), q, k, v)
    assert [g.dtype for g in found] == [torch.float32] * 3


def test_sinks_of_16_bits_are_read_as_float32():
    q, k, v, dout = operands()
    for dtype in (torch.bfloat16, torch.float16):
        sinks = torch.randn(4).to(dtype).requires_grad_()
        wide = sinks.detach().float().requires_grad_()
        out, lse = sat.attention(q, k, v, TEXT, sink_logits=sinks, return_lse=True)
        assert torch.equal(out, sat.attention(q, k, v, TEXT, sink_logits=wide))
        (found,) = gradients((out * dout).sum(), sinks)
        (expected,) = gradients((sat.attention(q, k, v, TEXT, sink_logits=wide) * dout).sum(), wide)
        assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
        given = [x.detach() for x in (q, k, v, out, lse, dout)]
        assert torch.equal(sat.attention_backward(*given, TEXT, sink_logits=sinks.detach())[3], found)


def test_autocast_is_compiled():
    torch._dynamo.reset()
    q, k, v, _ = operands()
    compiled = torch.compile(lambda *x: sat.attention(*x, TEXT), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(q, k, v), sat.attention(q, k, v, TEXT))


# ---- torch's own conventions ----


@pytest.mark.parametrize("shape", [(2, 4, 30, 16), (4, 30, 16), (30, 16), (3, 2, 4, 30, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_has_torchs_conventions(shape, causal):
    made = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=made, requires_grad=True) for _ in range(3))
    mask = None if causal else torch.rand(30, 30, generator=made) < 0.7
    options = {"attn_mask": mask, "is_causal": causal, "scale": 0.2}
    mine = sat.scaled_dot_product_attention(q, k, v, **options)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(mine, right)
    for one, other in zip(gradients(mine.sin().sum(), q, k, v), gradients(right.sin().sum(), q, k, v)):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_sdpa_masks_are_broadcast():
    q, k, v = torch.randn(3, 2, 4, 30, 16).unbind()
    torch_has = torch.nn.functional.scaled_dot_product_attention
    for shape in ((1, 30), (2, 1, 1, 30), (4, 30, 30), (2, 4, 1, 30), (30, 1), (1, 1, 30, 30)):
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True  # torch has NaN where a query sees no key
        torch.testing.assert_close(sat.scaled_dot_product_attention(q, k, v, mask), torch_has(q, k, v, mask))
    q, k, v = torch.randn(3, 2, 3, 4, 9, 8).unbind()
    for shape in ((2, 3, 1, 9, 9), (1, 3, 1, 9, 9), (2, 1, 1, 9, 9), (3, 1, 9, 9), (1, 1, 4, 1, 9), (4, 9, 1)):
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True
        torch.testing.assert_close(sat.scaled_dot_product_attention(q, k, v, mask), torch_has(q, k, v, mask))
    with pytest.raises(sa.ShapeError, match=r"attn_mask has shape \[6, 1, 9, 9\]; accepted: .* \[2, 3, 4, 9, 9\]"):
        sat.scaled_dot_product_attention(q, k, v, torch.ones(6, 1, 9, 9, dtype=torch.bool))


def test_sdpa_takes_patterns():
    q, k, v = torch.randn(3, 2, 4, 30, 16).unbind()
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    torch_has = torch.nn.functional.scaled_dot_product_attention
    window = mask_of("causal & window(3,0)", 30)[0, 0]
    for pattern in ("window(3,-1)", sa.window(3, -1), mask_of("window(3,-1)", 30)[0, 0]):
        mine = sat.scaled_dot_product_attention(q, k, v, is_causal=True, pattern=pattern)
        torch.testing.assert_close(mine, torch_has(q, k, v, window))
        mine = sat.scaled_dot_product_attention(q, k, v, causal, pattern=pattern)
        torch.testing.assert_close(mine, torch_has(q, k, v, window))


def test_sdpa_takes_masks_for_patterns():
    """Of keys alone, too, under is_causal and beside attn_mask, of torch and of NumPy."""
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    padding = torch.arange(9) < torch.tensor([9, 6])[:, None, None, None]
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, causal & padding)
    for given in (
        {"is_causal": True, "pattern": padding},
        {"is_causal": True, "pattern": padding.numpy()},
        {"is_causal": True, "pattern": causal.numpy(), "attn_mask": padding},
        {"pattern": causal.numpy(), "attn_mask": padding},
        {"pattern": padding.numpy(), "attn_mask": causal},
    ):
        torch.testing.assert_close(sat.scaled_dot_product_attention(q, k, v, **given), right)
    with pytest.raises(sa.ShapeError) as caught:
        sat.scaled_dot_product_attention(q, k, v, padding, pattern=causal[:, :1])
    assert caught.value.argument == "mask"


@pytest.mark.parametrize("batch, seq_q, seq_k", [(0, 5, 7), (2, 5, 0), (2, 0, 7)])
def test_masks_without_elements_hide_nothing(batch, seq_q, seq_k):
    q, k = torch.randn(batch, seq_q, 2, 8), torch.randn(batch, seq_k, 2, 8)
    for shape in ((batch, 1, 1, seq_k), (batch, 2, seq_q, seq_k)):
        mask = torch.ones(shape, dtype=torch.bool)
        assert torch.equal(sat.attention(q, k, k, mask), sat.attention(q, k, k, "full"))
        out = sat.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, k)), mask, pattern="causal")
        assert out.shape == (batch, 2, seq_q, 8)


def test_sdpa_is_causal_within_patterns_in_compiled_code():
    torch._dynamo.reset()

    def masked(x, pattern):
        return sat.scaled_dot_product_attention(x, x, x, is_causal=True, pattern=pattern)

    x = torch.randn(1, 2, 40, 16)
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    for keys in (5, 9):
        right = sat.scaled_dot_product_attention(x, x, x, pattern=f"causal & window({keys},0)")
        window = sa.window(keys, 5)
        for pattern in (str(window), window, sa.csr(*window.to_csr(40), 40), mask_of(str(window))[0, 0]):
            assert torch.equal(compiled(x, pattern), right) and torch.equal(masked(x, pattern), right)


def test_sdpa_is_causal_from_the_first_token_of_each():
    q, k, v = torch.randn(2, 4, 10, 16), torch.randn(2, 4, 30, 16), torch.randn(2, 4, 30, 16)
    torch_has = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        sat.scaled_dot_product_attention(q, k, v, is_causal=True), torch_has(q, k, v, is_causal=True)
    )
    with pytest.raises(sa.ArgumentError, match="accepted: one of them"):
        sat.scaled_dot_product_attention(q, k, v, is_causal=True, pattern="full")


def test_sdpa_groups_of_heads():
    q, (k, v) = torch.randn(2, 4, 30, 16), torch.randn(2, 2, 2, 30, 16).unbind()
    torch_has = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        sat.scaled_dot_product_attention(q, k, v, enable_gqa=True), torch_has(q, k, v, enable_gqa=True)
    )
    with pytest.raises(sa.ShapeError, match="enable_gqa"):
        sat.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "change, kind, argument",
    [
        (dict(dropout_p=0.1), sa.UnsupportedError, "dropout_p"),
        (dict(attn_mask=torch.zeros(30, 30)), sa.UnsupportedError, "attn_mask"),
        (dict(attn_mask=torch.ones(7, 30, dtype=torch.bool)), sa.ShapeError, "attn_mask"),
        (dict(attn_mask=torch.ones(3, 1, 1, 30, dtype=torch.bool)), sa.ShapeError, "attn_mask"),
        (dict(attn_mask=torch.ones(30, 7, dtype=torch.bool)), sa.ShapeError, "attn_mask"),
        (dict(attn_mask=[[True]]), sa.DTypeError, "attn_mask"),
        (dict(scale=torch.ones((), requires_grad=True)), sa.ArgumentError, "scale"),
        (dict(key=torch.randn(4, 30, 16)), sa.ShapeError, "key"),
        (dict(query=np.zeros((2, 4, 30, 16))), sa.DTypeError, "query"),
        (dict(value=torch.nested.nested_tensor([torch.ones(4, 30, 16)] * 2)), sa.ArgumentError, "value"),
        (dict(key=torch.ones(2, 4, 30, 16).to_sparse()), sa.ArgumentError, "key"),
        (dict(attn_mask=torch.ones(30, 30, dtype=torch.bool).to_sparse()), sa.ArgumentError, "attn_mask"),
        (dict(pattern=3), sa.DTypeError, "pattern"),
        (dict(pattern=torch.ones(2, 1, 1, 29, dtype=torch.bool)), sa.ShapeError, "mask"),
    ],
)
def test_sdpa_refuses(change, kind, argument):
    q, k, v = torch.randn(3, 2, 4, 30, 16).unbind()
    with pytest.raises(kind) as caught:
        sat.scaled_dot_product_attention(**{"query": q, "key": k, "value": v, **change})
    assert caught.value.argument == argument


def test_padding_masks_are_formulas():
    from sparseattn.torch._tensors import with_mask

    rows = {"full": [1, 1, 1, 1], "sink(2)": [1, 1, 0, 0], "full - sink(3)": [0, 0, 0, 1], "sink(0)": [0, 0, 0, 0]}
    rows |= {"sink(3) - sink(1)": [0, 1, 1, 0], "global_keys(0,2)": [1, 0, 1, 0]}
    sizes = {"batch": 2, "heads_q": 1, "seq_q": 9, "seq_k": 4}
    for text, row in rows.items():
        assert str(with_mask("full", torch.tensor([[row]], dtype=torch.bool), sizes)) == text
    both = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)[:, None, None]
    assert with_mask("causal", both, sizes) == sa.causal() & sa.per_batch(["sink(2)", "global_keys(0,2)"])


# ---- lifetimes, threads, processes, signals ----


def test_vectors_of_every_language():
    vectors = json.loads((ROOT / "tests" / "vectors" / "attention.json").read_text())
    assert len(vectors) > 20
    for case in vectors:

        def tensor(name, heads, seq, dim, case=case):
            return torch.tensor(case[name]).reshape(case["batch"], case[heads], case[seq], case[dim]).requires_grad_()

        q, k = tensor("q", "heads_q", "seq_q", "head_dim"), tensor("k", "heads_kv", "seq_k", "head_dim")
        v, dout = tensor("v", "heads_kv", "seq_k", "head_dim_v"), tensor("dout", "heads_q", "seq_q", "head_dim_v")
        options = {"scale": case["scale"], "q_offset": case["q_offset"], "softcap": case.get("softcap"), "axes": "bhsd"}
        inputs = [q, k, v]
        if "sink_logits" in case:
            inputs.append(torch.tensor([-np.inf if x is None else x for x in case["sink_logits"]], requires_grad=True))
            options["sink_logits"] = inputs[3]
        out, lse = sat.attention(q, k, v, case["text"], return_lse=True, **options)
        loss = (out * dout).sum()
        if "dlse" in case:
            dlse = torch.tensor(case["dlse"]).reshape(lse.shape)
            loss = loss + torch.where(dlse != 0, lse * dlse, 0).sum()
        found = (out, lse, *gradients(loss, *inputs))
        bound = 1e-5 if abs(case["scale"]) < 8 else 1e-4
        for name, one in zip(("out", "lse", "dq", "dk", "dv", "dsink_logits"), found):
            right = torch.tensor([-np.inf if x is None else x for x in case[name]], dtype=torch.float64)
            size = right[right.isfinite()].abs().max().clamp(min=1) if right.isfinite().any() else 1
            torch.testing.assert_close(
                one.flatten().double(), right, rtol=0, atol=float(bound * size), msg=case["text"]
            )


def test_operands_may_be_freed_before_backward():
    q, k, v, dout = operands()
    expected = gradients((sat.attention(q, k, v, TEXT) * dout).sum(), q, k, v)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = sat.attention(*(x * 1 for x in leaves), TEXT)
    gc.collect()
    [torch.full((2, 40, 4, 24), torch.nan) for _ in range(8)]
    for one, other in zip(torch.autograd.grad((out * dout).sum(), leaves), expected):
        torch.testing.assert_close(one, other)


def test_plans_hold_no_tensors():
    import weakref

    made = [torch.randn(1, 64, 2, 16) for _ in range(3)]
    alive = [weakref.ref(x) for x in made]
    out = sat.attention(*made, TEXT)
    alive.append(weakref.ref(out))
    del made, out
    assert [x() for x in alive] == [None] * 4


@pytest.mark.parametrize("compiled", [False, True])
def test_threads_share_plans(compiled):
    q, k, v, dout = operands()
    call = through_operators if compiled else sat.attention
    inputs = [[x.detach() * n for x in (q, k, v)] for n in range(1, 5)]
    right = [call(*x, TEXT) for x in inputs]
    wrong = []

    def work(n):
        for _ in range(30):
            leaves = [x.clone().requires_grad_() for x in inputs[n]]
            out = call(*leaves, TEXT)
            out.sum().backward()
            wrong.extend([n] * (not torch.equal(out, right[n]) or not leaves[0].grad.isfinite().all()))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_a_forked_child_computes_the_same():
    q, k, v, _ = (x.detach() for x in operands())
    right = sat.attention(q, k, v, TEXT)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(sat.attention(q, k, v, TEXT), right) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("backward", [False, True])
def test_ctrl_c_ends_a_run(backward):
    """The reference kernels would take a minute."""
    q = torch.zeros(1, 4096, 4, 24, requires_grad=True)
    out, lse = torch.zeros_like(q), torch.zeros(1, 4, 4096)
    again = torch.ops.sparseattn.backward
    scalars = ("full", "bshd", None, None, None, None, False, True, False)
    with ctrl_c():
        if backward:
            again(out, None, out, lse, q, q, q, None, None, None, None, *scalars)
        sat.attention(q, q, q, "full", reference=True)
    assert sat.attention(*operands()[:3], TEXT).isfinite().all()


def test_as_many_threads_as_torch_has():
    """The process has as many threads more after the first call of a context as that has beside the caller's."""
    program = """
import os, torch
import sparseattn.torch as sat
def started():
    return len(os.listdir("/proc/self/task"))
q = torch.zeros(1, 512, 8, 64)
torch.set_num_threads(1)
before = started()
one = sat.attention(q, q, q, "causal")
alone = started() - before
torch.set_num_threads(5)
before = started()
five = sat.attention(q, q, q, "causal")
together = started() - before
print(alone, together, torch.equal(one, five))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0 4 True\n", done.stderr
