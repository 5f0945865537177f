# SPDX-License-Identifier: MIT
"""Tensors of float8_e4m3fn, each row with a scale, against attention in float64 of what they stand for."""

import pytest

import sparseattn as sa

torch = pytest.importorskip("torch")
import sparseattn.torch as sat  # noqa: E402

FLOAT8 = torch.float8_e4m3fn
TEXT = "causal & (sink(2) | window(9,0)) - global_keys(0)"  # the first query sees nothing
BOUND = 2e-2  # products of elements and scales may be rounded to bfloat16, and out is of it
NAMES = ("q_scales", "k_scales", "v_scales")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def quantize(x):
    """Elements, and scales of rows: what is largest in a row becomes 448."""
    scales = x.abs().amax(-1) / 448
    return (x / scales[..., None]).to(FLOAT8), scales


def one_scale_a_head(x):
    """Elements, and scales whose strides are 0 but for the heads', bshd."""
    heads = torch.linspace(1 / 64, 1 / 16, x.shape[2], device=x.device)
    return (x / heads[:, None]).to(FLOAT8), heads.expand(x.shape[:3])


def without_scales(x):
    return x.to(FLOAT8), None


def stand_for(elements, scales):
    """float64, on the CPU."""
    return [e.double().cpu() * (1 if s is None else s.double().cpu()[..., None]) for e, s in zip(elements, scales)]


def operands(kind=quantize, device="cpu", batch=2, seq=40, heads_kv=2, head_dim=24, head_dim_v=16):
    """float8 q, k and v in bshd, and their scales by name."""
    made = torch.Generator().manual_seed(3)
    shapes = [(4, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v)]
    x = [torch.randn(batch, seq, *shape, generator=made).to(device) for shape in shapes]
    if kind is quantize:  # of many sizes, so that a scale of another row is seen
        sizes = [torch.randint(-6, 1, rows.shape[:3], generator=made).to(device) for rows in x]
        x = [rows * torch.exp2(size)[..., None] for rows, size in zip(x, sizes)]
    elements, scales = zip(*map(kind, x))
    return list(elements), dict(zip(NAMES, scales))


def assert_close(found, expected, bound=BOUND):
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=bound, atol=bound)


@on_devices
@pytest.mark.parametrize("kind", [quantize, one_scale_a_head, without_scales])
@pytest.mark.parametrize("text", [TEXT, "full", "residue(7,3) & causal", "dilated(20,0,3) | block_diagonal(8)"])
@pytest.mark.parametrize("sizes", [{}, {"seq": 300, "head_dim": 128, "head_dim_v": 128}])
def test_patterns(device, kind, text, sizes):
    x, scales = operands(kind, device, **sizes)
    found = sat.attention(*x, text, **scales, return_lse=True)
    assert all(one.device.type == device for one in found)
    assert_close(found, sat.attention(*stand_for(x, scales.values()), text, return_lse=True))


@on_devices
@pytest.mark.parametrize("kind", [quantize, one_scale_a_head, without_scales])
def test_axes_and_options(device, kind):
    x, scales = operands(kind, device)
    right = sat.attention(*stand_for(x, scales.values()), TEXT, return_lse=True)
    swapped = {name: s if s is None else s.transpose(1, 2) for name, s in scales.items()}
    out, lse = sat.attention(*(e.transpose(1, 2) for e in x), TEXT, axes="bhsd", **swapped, return_lse=True)
    assert_close((out.transpose(1, 2), lse), right)

    first = [e[0] for e in x], {name: s if s is None else s[0] for name, s in scales.items()}
    packed = sa.per_document("causal", [0, 15, 40])
    expected = sat.attention(*stand_for(first[0], first[1].values()), packed, axes="thd", return_lse=True)
    assert_close(sat.attention(*first[0], packed, axes="thd", **first[1], return_lse=True), expected)

    sinks = torch.tensor([0.5, -2, 1, 3])
    options = {"scale": 0.3, "softcap": 1.5, "q_offset": 2, "return_lse": True}
    expected = sat.attention(*stand_for(x, scales.values()), TEXT, sink_logits=sinks, **options)
    assert_close(sat.attention(*x, TEXT, **scales, sink_logits=sinks.to(device), **options), expected)

    mask = torch.rand(2, 4, 40, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    expected = sat.attention(*stand_for(x, scales.values()), mask, return_lse=True)
    assert_close(sat.attention(*x, mask, **scales, return_lse=True), expected)


@on_devices
def test_values_in_keys(device):
    (q, k, _), scales = operands(device=device, heads_kv=1)
    del scales["v_scales"]
    expected = sat.attention(*stand_for((q, k), scales.values()), None, TEXT, head_dim_v=16, return_lse=True)
    assert_close(sat.attention(q, k, None, TEXT, head_dim_v=16, **scales, return_lse=True), expected)


@on_devices
def test_lists(device):
    x, scales = operands(device=device)
    made = torch.Generator().manual_seed(2)
    lists = {"indices": torch.randint(-1, 41, (2, 40, 2, 5), generator=made)}
    lists["index_counts"] = torch.randint(0, 6, (2, 40, 2), generator=made)
    pattern = "causal & runtime_tokens(5)"
    expected = sat.attention(*stand_for(x, scales.values()), pattern, **lists, return_lse=True)
    lists = {name: one.to(device) for name, one in lists.items()}
    assert_close(sat.attention(*x, pattern, **lists, **scales, return_lse=True), expected)


@on_devices
def test_plans_read_the_tensors_of_each_call(device):
    x, scales = operands(device=device)
    plan = sa.plan(TEXT, *x)
    assert isinstance(plan, sat.TensorPlan) and plan.dtype == FLOAT8
    right = sat.attention(*x, TEXT, **scales, return_lse=True)
    unscaled = sat.attention(*x, TEXT)
    for _ in range(2):
        for one, other in zip(plan.forward(*x, **scales, return_lse=True), right):
            assert torch.equal(one, other)
        assert torch.equal(plan.forward(*x), unscaled)
        out = torch.zeros_like(unscaled)
        assert plan.forward(*(e.clone() for e in x), **scales, out=out) is out and torch.equal(out, right[0])
    for _ in range(3):  # found again, among plans of the same shapes
        assert torch.equal(sat.attention(*x, TEXT), unscaled)
        assert sat.attention(*(e.half() for e in x), TEXT).dtype == torch.float16
    assert sa.attention(*x, TEXT, **scales).equal(right[0])


@on_devices
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scales_that_all_rows_share_are_a_factor_of_scale(device, softcap):
    x, _ = operands(without_scales, device)
    constant = {"q_scales": 0.5, "k_scales": 0.25}
    tensors = {name: torch.full(rows.shape[:3], constant[name], device=device) for name, rows in zip(constant, x)}
    given = {"softcap": softcap, "return_lse": True}
    expected = [one.double().cpu() for one in sat.attention(*x, TEXT, scale=0.4, **tensors, **given)]
    assert_close(sat.attention(*x, TEXT, scale=0.4 * 0.5 * 0.25, **given), expected)


def test_torchs_own_conventions_have_scales_of_1():
    x, _ = operands(without_scales)
    out = sat.scaled_dot_product_attention(*(e.transpose(1, 2) for e in x), is_causal=True, enable_gqa=True)
    assert torch.equal(out.transpose(1, 2), sat.attention(*x, "causal"))


def test_autocast_leaves_float8_as_it_is():
    x, scales = operands()
    right = sat.attention(*x, TEXT, **scales)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(sat.attention(*x, TEXT, **scales), right)
        with pytest.raises(sa.DTypeError) as caught:
            sat.attention(x[0], x[1].float(), x[2], TEXT)
    assert caught.value.argument == "k"


# ---- gradients ----


def gradients_of(x, text, dout, dlse, **options):
    """Those of attention in float64 of what x stands for."""
    leaves = [one if one is None else one.clone().requires_grad_() for one in x]
    out, lse = sat.attention(*leaves, text, return_lse=True, **options)
    return torch.autograd.grad((out, lse), [one for one in leaves if one is not None], (dout.double(), dlse))


def assert_gradients_are_close(found, expected, bound=3e-2):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        size = other.abs().max()
        torch.testing.assert_close(one.cpu().double(), other, rtol=bound, atol=bound * float(size))


def arriving(shape, device):
    made = torch.Generator().manual_seed(9)
    batch, seq, heads, _ = shape
    return torch.randn(shape, generator=made).bfloat16().to(device), torch.randn(batch, heads, seq, generator=made)


@on_devices
@pytest.mark.parametrize("kind", [quantize, one_scale_a_head, without_scales])
@pytest.mark.parametrize("text", [TEXT, "full", "residue(7,3) & causal", "dilated(20,0,3) | block_diagonal(8)"])
@pytest.mark.parametrize("sizes", [{}, {"seq": 300, "head_dim": 128, "head_dim_v": 128}])
def test_gradients(device, kind, text, sizes):
    x, scales = operands(kind, device, **sizes)
    out, lse = sat.attention(*x, text, **scales, return_lse=True)
    dout, dlse = arriving(out.shape, device)
    expected = gradients_of(stand_for(x, scales.values()), text, dout.cpu(), dlse)
    found = sat.attention_backward(*x, out, lse, dout, text, dlse=dlse.to(device), **scales)
    assert_gradients_are_close(found, expected)
    plan = sa.plan(text, *x, backward=True)
    assert_gradients_are_close(plan.backward(*x, out, lse, dout, dlse=dlse.to(device), **scales), expected)


@on_devices
def test_gradients_of_values_in_keys_and_of_sinks(device):
    (q, k, _), scales = operands(device=device, heads_kv=1)
    del scales["v_scales"]
    sinks = torch.tensor([0.5, -2, 1, 3])
    options = {"head_dim_v": 16, "sink_logits": sinks.to(device), **scales}
    out, lse = sat.attention(q, k, None, TEXT, **options, return_lse=True)
    dout, dlse = arriving(out.shape, device)
    dq, dk, dv, dsinks = sat.attention_backward(q, k, None, out, lse, dout, TEXT, dlse=dlse.to(device), **options)
    assert dv is None and dsinks.dtype == torch.float32
    stands_for = [*stand_for((q, k), scales.values()), None]
    right = gradients_of(stands_for, TEXT, dout.cpu(), dlse, head_dim_v=16, sink_logits=sinks)
    assert_gradients_are_close((dq, dk), right)


@on_devices
def test_gradients_of_lists(device):
    x, scales = operands(device=device)
    made = torch.Generator().manual_seed(2)
    lists = {"indices": torch.randint(-1, 41, (2, 40, 2, 5), generator=made)}
    pattern = "causal & runtime_tokens(5)"
    out, lse = sat.attention(*x, pattern, **{k: v.to(device) for k, v in lists.items()}, **scales, return_lse=True)
    dout, dlse = arriving(out.shape, device)
    expected = gradients_of(stand_for(x, scales.values()), pattern, dout.cpu(), dlse, **lists)
    lists = {name: one.to(device) for name, one in lists.items()}
    found = sat.attention_backward(*x, out, lse, dout, pattern, dlse=dlse.to(device), **lists, **scales)
    assert_gradients_are_close(found, expected)


# ---- what is rounded on the way in ----


@on_devices
@pytest.mark.parametrize("axes", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("kind", ["heads", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_to_float8(device, axes, kind, dtype):
    x = torch.randn(2, 40, 4, 24, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x = x.transpose(1, 2) if axes == "bhsd" else x[0] if axes == "thd" else x
    elements, scales = sat.to_float8(x, axes=axes, scales=kind)
    assert elements.dtype == FLOAT8 and elements.shape == x.shape
    assert scales.dtype == torch.float32 and scales.shape == x.shape[:-1]
    seq = {"bshd": 1, "bhsd": 2, "thd": 0}[axes]
    assert (scales.stride(seq) == 0) == (kind == "heads")
    largest = elements.float().abs().amax(-1 if kind == "rows" else (seq, -1))
    assert ((224 <= largest) & (largest <= 448)).all() and (torch.frexp(scales)[0] == 0.5).all()
    torch.testing.assert_close(elements.float() * scales[..., None], x.float(), rtol=2**-4, atol=2e-2)


def test_to_float8_of_what_has_no_size():
    x = torch.tensor([[0.0, 0], [1, float("inf")], [500, float("nan")], [1e-45, 0], [2, -4]])[:, None]  # thd
    elements, scales = sat.to_float8(x, axes="thd", scales="rows")
    assert scales[:3].flatten().tolist() == [1, 1, 1]
    assert elements[1].float().flatten().tolist() == [1, 448] and elements[2].isnan().sum() == 1
    assert scales[3] == 2.0**-126 and scales[4] == 2.0**-6 and elements[4].float().flatten().tolist() == [128, -256]
    exact, unit = sat.to_float8(torch.tensor([[[448.0, 1], [449, 1]]]), axes="thd", scales="rows")
    assert unit.tolist() == [[1, 2]] and exact.float().tolist() == [[[448, 1], [224, 0.5]]]
    empty, ones = sat.to_float8(torch.zeros(2, 0, 3, 8))
    assert empty.shape == (2, 0, 3, 8) and ones.shape == (2, 0, 3)
    for argument, call in (
        ("x", lambda: sat.to_float8(x)),
        ("x", lambda: sat.to_float8([1.0])),
        ("axes", lambda: sat.to_float8(x, axes="shd")),
        ("scales", lambda: sat.to_float8(x, axes="thd", scales="row")),
    ):
        with pytest.raises(sa.SparseAttentionError, match="accepted: ") as caught:
            call()
        assert caught.value.argument == argument


def leaves_of(device="cpu", dtype=torch.bfloat16, in_keys=False):
    made = torch.Generator().manual_seed(3)
    shapes = [(2, 40, 4, 24), (2, 40, 2, 24), (2, 40, 2, 16)]
    x = [torch.randn(shape, generator=made).to(device, dtype).requires_grad_() for shape in shapes]
    return [*x[:2], None] if in_keys else x


@on_devices
@pytest.mark.parametrize("kind", ["heads", "rows"])
@pytest.mark.parametrize("in_keys", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float8_attention_hands_gradients_on(device, kind, in_keys, dtype):
    x = leaves_of(device, dtype, in_keys)
    sinks = torch.tensor([0.5, -2, 1, 3], device=device, requires_grad=True)
    options = {"head_dim_v": 16 if in_keys else None, "scale": 0.2}
    out, lse = sat.float8_attention(*x, TEXT, scales=kind, sink_logits=sinks, return_lse=True, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    dout, dlse = arriving(out.shape, device)
    leaves = [one for one in (*x, sinks) if one is not None]
    found = torch.autograd.grad((out, lse), leaves, (dout.to(dtype), dlse.to(device)))

    rounded = [(None, None) if one is None else sat.to_float8(one, scales=kind) for one in x]
    elements, scales = zip(*rounded)
    given = {**dict(zip(NAMES, scales)), "sink_logits": sinks.detach(), **options}
    right, right_lse = sat.attention(*elements, TEXT, **given, return_lse=True)
    assert torch.equal(out, right.to(dtype)) and torch.equal(lse, right_lse)
    expected = sat.attention_backward(*elements, right, lse, dout, TEXT, dlse=dlse.to(device), **given)
    for one, other, leaf in zip(found, (g for g in expected if g is not None), leaves, strict=True):
        assert one.dtype == leaf.dtype
        assert torch.equal(one, other.to(leaf.dtype)) if device == "cpu" else torch.allclose(
            one.float(), other.float(), atol=1e-2, rtol=1e-2
        )


def test_float8_attention_keeps_bytes_for_its_backward():
    x = leaves_of()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        sat.float8_attention(*x, TEXT)
    sizes = [t.dtype.itemsize for t in kept if t.dim() == 4]
    assert sorted(sizes) == [1, 1, 1, 2]  # q, k, v; out


def test_float8_attention_compiles():
    torch._dynamo.reset()

    def step(q, k, v):
        return sat.float8_attention(q, k, v, TEXT, scales="rows").sin()

    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
        x = leaves_of()
        found, right = compiled(*x), step(*x)
        assert torch.equal(found, right)
        dout = torch.ones_like(right)
        for one, other in zip(torch.autograd.grad(found, x, dout), torch.autograd.grad(right, x, dout)):
            assert torch.equal(one, other)


def test_float8_attention_compiles_where_one_tensor_is_several_operands():
    torch._dynamo.reset()

    def step(x, cu):
        return sat.float8_attention(x, x, x, TEXT, axes="thd", cu_q=cu, cu_k=cu)

    x, cu = torch.randn(40, 2, 16, requires_grad=True), torch.tensor([0, 15, 40])
    found, right = torch.compile(step, fullgraph=True, backend="aot_eager")(x, cu), step(x, cu)
    assert torch.equal(found, right)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(right.sum(), x)[0])


def test_float8_attention_under_autocast_no_grad_and_lists():
    x = leaves_of(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = sat.float8_attention(*x, TEXT)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(one.grad.dtype == torch.float32 for one in x)
    with torch.no_grad():
        assert not sat.float8_attention(*x, TEXT).requires_grad
    indices = torch.randint(0, 40, (2, 40, 2, 5), generator=torch.Generator().manual_seed(2))
    out = sat.float8_attention(*x, "causal & runtime_tokens(5)", indices=indices, axes="bshd")
    assert torch.isfinite(torch.autograd.grad(out.sum(), x)[1]).all()
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    assert torch.equal(sat.float8_attention(*x, mask), sat.float8_attention(*x, "causal"))
    (dq,) = torch.autograd.grad(sat.float8_attention(*x, TEXT).sum(), x[:1], create_graph=True)
    with pytest.raises(sa.UnsupportedError, match="second derivatives"):
        dq.sum().backward()


def test_float8_attention_names_what_is_wrong():
    q, k, v = leaves_of()
    calls = [
        (sa.DTypeError, "q", lambda: sat.float8_attention([1.0], k, v, TEXT)),
        (sa.DTypeError, "v", lambda: sat.float8_attention(q, k, 3, TEXT)),
        (sa.DTypeError, "k", lambda: sat.float8_attention(q, k.int(), v, TEXT)),
        (sa.DTypeError, "q", lambda: sat.float8_attention(*(x.to(FLOAT8) for x in (q, k, v)), TEXT)),
        (sa.DTypeError, "x", lambda: sat.to_float8(q.int())),
        (sa.DTypeError, "x", lambda: sat.to_float8(q.to(FLOAT8))),
        (sa.ShapeError, "v", lambda: sat.float8_attention(q, k, v[:, 1:], TEXT)),
        (sa.ArgumentError, "scales", lambda: sat.float8_attention(q, k, v, TEXT, scales="tensor")),
        (sa.DTypeError, "sink_logits", lambda: sat.float8_attention(q, k, v, TEXT, sink_logits=torch.ones(4).double())),
    ]
    for kind, argument, call in calls:
        with pytest.raises(kind, match="accepted: ") as caught:
            call()
        assert caught.value.argument == argument


# ---- who looks on ----


class Layer(torch.nn.Module):
    """Queries, keys and values of two bytes, quantized for one call."""

    def __init__(self, pattern=TEXT):
        super().__init__()
        self.pattern = pattern

    def forward(self, q, k, v):
        elements, scales = zip(*(quantize(x.float()) for x in (q, k, v)))
        return sat.attention(*elements, self.pattern, **dict(zip(NAMES, scales))).sin()


def wide(seq=40):
    made = torch.Generator().manual_seed(3)
    shapes = [(2, seq, 4, 24), (2, seq, 2, 24), (2, seq, 2, 16)]
    return [torch.randn(shape, generator=made).bfloat16() for shape in shapes]


def test_compiled_without_a_break_for_all_lengths():
    torch._dynamo.reset()
    layer, graphs = Layer(sa.causal() & (sa.sink(2) | sa.window(9, 0))), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for way in (backend, "aot_eager"):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=way)
        for seq in (40, 50, 77):
            x = wide(seq)
            assert torch.equal(compiled(*x), layer(*x))
    assert len(graphs) == 1


def test_compiled_without_scales():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: sa.attention(*x, TEXT), fullgraph=True, backend="aot_eager")
    x, _ = operands(without_scales)
    assert torch.equal(compiled(*x), sat.attention(*x, TEXT))


def test_exported_for_all_lengths():
    layer, seq = Layer(sa.parse(TEXT)), torch.export.Dim("seq", min=2, max=4096)
    program = torch.export.export(layer, tuple(wide()), dynamic_shapes=({1: seq}, {1: seq}, {1: seq}))
    for length in (40, 65):
        assert torch.equal(program.module()(*wide(length)), layer(*wide(length)))


@pytest.mark.parametrize("axes", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("in_keys", [False, True])
def test_operators_are_what_torch_expects(axes, in_keys):
    x, scales = operands()
    x = [e[0] if axes == "thd" else e.transpose(1, 2) if axes == "bhsd" else e for e in x]
    scales = [s[0] if axes == "thd" else s.transpose(1, 2) if axes == "bhsd" else s for s in scales.values()]
    if in_keys:
        x[2] = scales[2] = None
    scalars = ("causal & window(9,0)", axes, None, None, None, 16 if in_keys else None, False, False, False, False)
    arguments = (*x, None, None, None, None, *scalars)
    # torch's test of schemas cannot copy float8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for given in (scales, scales[:1], ()):
        torch.library.opcheck(torch.ops.sparseattn.forward.default, (*arguments, *given), test_utils=checks)
    out, _ = torch.ops.sparseattn.forward(*arguments, *scales)
    options = {"axes": axes, "head_dim_v": 16 if in_keys else None}
    assert torch.equal(out, sat.attention(*x, "causal & window(9,0)", **options, **dict(zip(NAMES, scales))))


def test_meta_and_fake_tensors_have_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def attend(device):
        shapes = [(2, 40, 4, 24), (2, 40, 2, 24), (2, 40, 2, 16)]
        x = [torch.empty(shape, dtype=FLOAT8, device=device) for shape in shapes]
        scales = {name: torch.empty(shape[:3], device=device) for name, shape in zip(NAMES, shapes)}
        return sat.attention(*x, TEXT, **scales, return_lse=True)

    found = [attend("meta")]
    with FakeTensorMode():
        found.append(attend("cpu"))
    for out, lse in found:
        assert out.shape == (2, 40, 4, 16) and out.dtype == torch.bfloat16
        assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32
    x = leaves_of("meta")
    out = sat.float8_attention(*x, TEXT)
    assert out.is_meta and out.shape == (2, 40, 4, 16) and out.dtype == x[0].dtype
    assert [g.shape for g in torch.autograd.grad(out.sum(), x)] == [one.shape for one in x]
    with pytest.raises(sa.ArgumentError) as caught:
        sat.float8_attention(x[0].detach(), leaves_of()[1], x[2].detach(), TEXT)
    assert caught.value.argument == "k"


# ---- what is refused ----


@pytest.mark.parametrize("argument", ["q", "k", "v", "sink_logits", *NAMES])
def test_gradients_are_refused(argument):
    x, scales = operands()
    given = {**dict(zip("qkv", x)), **scales, "sink_logits": torch.zeros(4)}
    plain = sat.attention(**given, pattern=TEXT)
    given[argument] = given[argument].clone().requires_grad_()
    plan = sa.plan(TEXT, *x, sink_logits=True)
    compiled = torch.compile(lambda given: sat.attention(**given, pattern=TEXT), backend="eager")
    for call in (lambda: sat.attention(**given, pattern=TEXT), lambda: plan.forward(**given)):
        with pytest.raises(sa.ArgumentError, match=f"{argument} requires a gradient.*no_grad") as caught:
            call()
        assert caught.value.argument == argument
        with torch.no_grad():
            assert torch.equal(call(), plain)


def test_gradients_are_refused_in_compiled_code():
    torch._dynamo.reset()
    x, scales = operands()
    compiled = torch.compile(lambda q: sat.attention(q, *x[1:], TEXT, **scales), backend="eager")
    with pytest.raises(sa.ArgumentError, match="q requires a gradient.*no_grad"):
        compiled(x[0].requires_grad_())


def test_operators_refuse_to_round_gradients():
    x, scales = operands()
    scalars = ("causal", "bshd", None, None, None, None, False, False, False)
    out, _ = torch.ops.sparseattn.forward(
        x[0].requires_grad_(), *x[1:], None, None, None, None, *scalars, True, *scales.values()
    )
    with pytest.raises(sa.UnsupportedError, match="q is float8_e4m3fn.*accepted: sparseattn.torch.float8_attention"):
        out.sum().backward()


def test_what_is_wrong_is_named():
    x, scales = operands()
    q, k, v = x
    wide = [e.float() for e in x]
    plan = sat.plan(TEXT, *x)
    cache = sat.KVCache(2, 64, 2, 24, 16, dtype=torch.bfloat16, cache_dtype=FLOAT8)

    def attend(q=q, k=k, v=v, **changed):
        return sat.attention(q, k, v, TEXT, **{**scales, **changed})

    unscaled = dict.fromkeys(NAMES)
    calls = [
        (sa.DTypeError, "k", lambda: attend(k=k.bfloat16())),
        (sa.DTypeError, "v", lambda: attend(v=v.float())),
        (sa.DTypeError, "k", lambda: attend(q.bfloat16(), **unscaled)),
        (sa.DTypeError, "q", lambda: attend(q.to(torch.float8_e5m2), **unscaled)),
        (sa.DTypeError, "q_scales", lambda: attend(q_scales=scales["q_scales"].double())),
        (sa.DTypeError, "k_scales", lambda: attend(k_scales=[1.0])),
        (sa.ShapeError, "q_scales", lambda: attend(q_scales=scales["k_scales"])),
        (sa.ShapeError, "v_scales", lambda: attend(v_scales=scales["v_scales"][:, 1:])),
        (sa.ArgumentError, "v_scales", lambda: attend(v=None, head_dim_v=16)),
        (sa.ArgumentError, "q_scales", lambda: attend(*wide)),
        (sa.ArgumentError, "q_scales", lambda: attend(wide[0].clone().requires_grad_(), *wide[1:])),
        (sa.ArgumentError, "k_scales", lambda: attend(*wide, q_scales=None)),
        (sa.DTypeError, "q", lambda: plan.forward(*wide)),
        (sa.DTypeError, "out", lambda: plan.forward(*x, out=torch.zeros(2, 40, 4, 16))),
        (sa.DTypeError, "problem.cache_dtype", lambda: sat.plan(TEXT, q.bfloat16(), k, v)),
        (sa.UnsupportedError, "problem.dtype", lambda: sat.plan(TEXT, *x, starts=True)),
        (sa.DTypeError, "q", lambda: sat.decode(q, cache, TEXT)),
        (sa.DTypeError, "dtype", lambda: sat.KVCache(2, 64, 2, 24, dtype=FLOAT8)),
    ]
    for number, (kind, argument, call) in enumerate(calls):
        with pytest.raises(kind, match="accepted: ") as caught:
            call()
        assert caught.value.argument == argument, (number, caught.value)


@needs_cuda
def test_scales_lie_where_q_lies():
    x, scales = operands(device="cuda")
    for name, s in scales.items():
        with pytest.raises(sa.ArgumentError) as caught:
            sat.attention(*x, TEXT, **{**scales, name: s.cpu()})
        assert (caught.value.status, caught.value.argument) == ("SPATTN_E_DEVICE", name)


@needs_cuda
def test_graphs_capture_calls():
    x, scales = operands(device="cuda")
    plan = sat.plan(TEXT, *x)
    right = plan.forward(*x, **scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.forward(*x, **scales)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, right)
    scales["v_scales"].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, 2 * right)
