# SPDX-License-Identifier: MIT
"""Tensors of torch and gradients through autograd, against torch's own dense attention in float64."""

import numpy as np
import pytest

import sparseattn as sa

torch = pytest.importorskip("torch")
import sparseattn.torch as sat  # noqa: E402

STREAMING = "causal & (sink(2) | window(9,0))"
TEXT = f"{STREAMING} - global_keys(0)"  # the first query sees nothing


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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


def test_second_derivatives_are_refused():
    q, k, v, _ = operands()
    (dq,) = torch.autograd.grad(sat.attention(q, k, v, "full").square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dq.sum().backward()


@pytest.mark.parametrize(
    "change, kind, argument",
    [
        (dict(q=torch.zeros(2, 40, 4, 24, device="meta")), sa.ArgumentError, "q"),
        (dict(k=torch.zeros(2, 40, 2, 24).to_sparse()), sa.ArgumentError, "k"),
        (dict(q=torch.zeros(40, 4, 24)), sa.ShapeError, "q"),
        (dict(sink_logits=torch.zeros(4, dtype=torch.float16)), sa.DTypeError, "sink_logits"),
        (dict(k=torch.zeros(2, 40, 2, 24, dtype=torch.complex64)), sa.DTypeError, "k"),
        (dict(v=torch.zeros(2, 40, 2, 16, dtype=torch.bfloat16)), sa.DTypeError, "v"),
        (dict(v=torch.zeros(2, 41, 2, 16)), sa.ShapeError, "v"),
        (dict(sink_logits=torch.zeros(3)), sa.ShapeError, "sink_logits"),
        (dict(pattern="wind"), sa.FormatError, "text"),
    ],
)
def test_errors_are_typed_and_name_the_argument(change, kind, argument):
    q, k, v, _ = operands()
    with pytest.raises(kind) as caught:
        sat.attention(**{"q": q, "k": k, "v": v, "pattern": TEXT, **change})
    assert caught.value.argument == argument
