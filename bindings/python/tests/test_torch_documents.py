# SPDX-License-Identifier: MIT
"""Documents whose offsets come with the call, against the pattern that holds them."""

import pytest

import sparseattn as sa

torch = pytest.importorskip("torch")
import sparseattn.torch as sat  # noqa: E402
from sparseattn.torch._tensors import in_documents  # noqa: E402

PATTERN = "causal & (sink(2) | window(9,0))"
OFFSETS = torch.tensor([0, 7, 7, 30, 57, 64])  # an empty document, and six tokens that are padding


def operands(tokens=70, keys=None):
    shapes = (tokens, 4, 24), (keys or tokens, 2, 24), (keys or tokens, 2, 16)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def packed(q, k, v, pattern, **options):
    """out, lse and gradients."""
    out, lse = sat.attention(q, k, v, pattern, axes="thd", return_lse=True, **options)
    loss = out.sin().sum() + torch.where(lse > -torch.inf, lse, 0).sum()
    return out, lse, *torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents_are_those_of_the_pattern(dtype):
    q, k, v = operands()
    offsets = OFFSETS.to(dtype)
    sinks = torch.randn(4, requires_grad=True)
    for options in ({}, {"sink_logits": sinks}, {"deterministic": True, "reference": True}):
        found = packed(q, k, v, PATTERN, cu_q=offsets, **options)
        assert all(map(torch.equal, found, packed(q, k, v, sa.per_document(PATTERN, offsets), **options)))
    assert not found[0][64:].any() and found[0][:64].any()


def test_queries_and_keys_have_offsets_of_their_own():
    q, k, v = operands(keys=90)
    of_keys = torch.tensor([0, 20, 21, 50, 80, 90])
    found = packed(q, k, v, PATTERN, cu_q=OFFSETS, cu_k=of_keys)
    assert all(map(torch.equal, found, packed(q, k, v, sa.per_document(PATTERN, OFFSETS, of_keys))))


def test_a_mask_cuts_documents():
    q, k, v = operands()
    mask = torch.rand(70, 70) < 0.5
    expected = packed(q, k, v, sa.per_document("full", OFFSETS) & sa.mask(mask))
    assert all(map(torch.equal, packed(q, k, v, mask, cu_q=OFFSETS), expected))


def test_other_axes_float8_and_gradients_by_hand():
    q, k, v = operands()
    pattern = sa.per_document(PATTERN, OFFSETS)
    batches = [x.detach()[None].repeat(2, 1, 1, 1) for x in (q, k, v)]
    assert torch.equal(sat.attention(*batches, PATTERN, cu_q=OFFSETS), sat.attention(*batches, pattern))
    found = [sat.float8_attention(q, k, v, *x, axes="thd") for x in ((pattern,), (PATTERN,))]
    assert not torch.equal(*found)
    found[1] = sat.float8_attention(q, k, v, PATTERN, axes="thd", cu_q=OFFSETS)
    assert torch.equal(*found)
    gradients = [torch.autograd.grad(out.sum(), (q, k, v)) for out in found]
    assert all(map(torch.equal, *gradients))
    x = [y.detach() for y in (q, k, v)]
    out, lse = sat.attention(*x, pattern, axes="thd", return_lse=True)
    given = (*x, out, lse, torch.ones_like(out))
    by_hand = sat.attention_backward(*given, PATTERN, axes="thd", cu_q=OFFSETS)
    assert all(map(torch.equal, by_hand, sat.attention_backward(*given, pattern, axes="thd")))


def test_the_operator_is_what_torch_expects():
    q, k, v = operands()
    scalars = (PATTERN, "thd", None, None, None, None, False, False, False, True)
    later = (None, None, None, OFFSETS, OFFSETS)
    torch.library.opcheck(torch.ops.sparseattn.forward.default, (q, k, v, *[None] * 4, *scalars, *later))


def test_compiled_once_for_documents_of_any_lengths():
    torch._dynamo.reset()

    def layer(q, k, v, offsets):
        out, lse = sat.attention(q * 2, k, v, PATTERN, axes="thd", cu_q=offsets, return_lse=True)
        return out.sin().sum() + torch.where(lse > -torch.inf, lse, 0).sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    steps = (70, OFFSETS), (70, OFFSETS + 2), (33, torch.tensor([0, 33])), (50, torch.arange(0, 51, 5))
    for at, (tokens, offsets) in enumerate(steps):
        q, k, v = operands(tokens)
        with torch._dynamo.config.patch(error_on_recompile=at > 0):
            found = compiled(q, k, v, offsets)
        expected = layer(q, k, v, offsets)
        torch.testing.assert_close(found, expected)
        for one, other in zip(torch.autograd.grad(found, (q, k, v)), torch.autograd.grad(expected, (q, k, v))):
            torch.testing.assert_close(one, other)


def test_the_same_numbers_are_the_same_pattern():
    """So that plans of it are found again, by the layers of a step and by their backward."""
    offsets = OFFSETS.clone()
    made = in_documents(PATTERN, offsets)
    assert in_documents(PATTERN, offsets.int()) is made
    offsets.numpy()[1] = 5  # a write of which torch knows nothing
    assert in_documents(PATTERN, offsets) == sa.per_document(PATTERN, offsets) != made
    assert in_documents(PATTERN, offsets, offsets) == in_documents(PATTERN, offsets)


def test_flops_are_those_of_documents():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = operands()
    pairs = 4 * sa.per_document(PATTERN, OFFSETS).stats(70).pairs
    with FlopCounterMode(display=False) as counter:
        packed(q, k, v, PATTERN, cu_q=OFFSETS)
    assert counter.get_total_flops() == 7 * (24 + 16) * pairs


@pytest.mark.parametrize(
    "change, kind, argument",
    [
        ({"cu_q": [0, 70]}, sa.DTypeError, "cu_q"),
        ({"cu_q": OFFSETS.float()}, sa.DTypeError, "cu_q"),
        ({"cu_q": OFFSETS[None]}, sa.ShapeError, "cu_q"),
        ({"cu_q": OFFSETS.flip(0)}, sa.ArgumentError, "cu_q"),
        ({"cu_q": OFFSETS, "cu_k": OFFSETS[1:]}, sa.ArgumentError, "cu_k"),
        ({"cu_k": OFFSETS}, sa.DTypeError, "cu_q"),
    ],
)
def test_errors_are_typed_and_name_the_argument(change, kind, argument):
    q, k, v = operands()
    for call in (sat.attention, sat.float8_attention):
        with pytest.raises(kind, match=argument) as caught:
            call(q, k, v, PATTERN, axes="thd", **change)
        assert caught.value.argument == argument
