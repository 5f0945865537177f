# SPDX-License-Identifier: MIT
"""Attention whose operands are rounded to float8 on the way in, and whose gradients pass that by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from .._core import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ._attention import autocast, name_of, needs_gradients, with_numbers
from ._operators import found_by
from ._tensors import refuse_transforms, require_documents, require_tensor, split_mask, wide_sinks

if TYPE_CHECKING:
    from typing import Literal, TypedDict

    from typing_extensions import Unpack

    from .._patterns import AnyPattern

    class _Options(TypedDict, total=False):
        scales: Literal["heads", "rows"]
        axes: Literal["bshd", "bhsd", "thd"]
        scale: float | None
        softcap: float | None
        q_offset: int | None
        head_dim_v: int | None
        deterministic: bool
        reference: bool
        indices: torch.Tensor | None
        index_counts: torch.Tensor | None
        sink_logits: torch.Tensor | None
        cu_q: torch.Tensor | None
        cu_k: torch.Tensor | None

_ROUNDED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LARGEST, _LEAST_SCALE = 448.0, 2.0**-126
_FRACTION = 0x7FFFFF  # bits of a float32
_ROWS = {"bshd": 1, "bhsd": 2, "thd": 0}  # the axis of tokens


def to_float8(
    x: torch.Tensor, *, axes: str = "bshd", scales: Literal["heads", "rows"] = "heads"
) -> tuple[torch.Tensor, torch.Tensor]:
    """x as torch.float8_e4m3fn, and what its elements are to be multiplied by, as attention takes both.

    x       [batch, seq, heads, head_dim], or as axes says, float32, float16, bfloat16 or float64
    scales  "heads": each head of a batch entry has one, so that attention is fastest. "rows": each row of a token and
            head has one, so that a token that is loud takes no digits from others

    Returns the elements, shaped as x, and scales, float32, shaped as x without head_dim: the least powers of two in
    whose units nothing is above 448, the largest float8. So dividing rounds nothing, and bfloat16 has what elements
    stand for. What has no finite magnitude, or is zero, has a scale of 1; elements beyond 448 become 448, NaN stays
    NaN. Gradients end here.

    Raises ArgumentError, ShapeError, DTypeError.
    """
    return rounded_by(x, largest_of(x, axes, scales))


def largest_of(x: torch.Tensor, axes: str, scales: str) -> torch.Tensor:
    """The largest magnitude of what has a scale in common, float32, with axes of 1 in place of those that it goes over.

    Raises what to_float8 raises.
    """
    _require_floats(x, "x", takes_meta=True)
    if axes not in _ROWS:
        raise ArgumentError(f"argument axes is {axes!r}; accepted: {', '.join(_ROWS)}", "SPATTN_E_RANGE", "axes")
    if scales not in ("heads", "rows"):
        message = f"argument scales is {scales!r}; accepted: 'heads', 'rows'"
        raise ArgumentError(message, "SPATTN_E_RANGE", "scales")
    if x.dim() != len(axes):
        message = f"argument x has shape {list(x.shape)}; accepted: {len(axes)} axes, {axes}"
        raise ShapeError(message, "SPATTN_E_SHAPE", "x")
    x = x.detach()
    over = (_ROWS[axes], -1) if scales == "heads" else (-1,)
    if x.numel() == 0:
        return x.new_zeros([1 if i in over or i - x.dim() in over else n for i, n in enumerate(x.shape)]).float()
    x = x.float() if x.dtype == torch.float64 else x
    largest: torch.Tensor = torch.linalg.vector_norm(x, float("inf"), over, keepdim=True, dtype=torch.float32)
    return largest


def _require_floats(x: Any, argument: str, takes_meta: bool) -> None:
    """Raises DTypeError, ArgumentError for what is no tensor of floats that may be rounded."""
    require_tensor(x, argument, takes_meta)
    if x.dtype not in _ROUNDED:
        accepted = ", ".join(map(str, _ROUNDED))
        raise DTypeError(f"argument {argument} is {x.dtype}; accepted: {accepted}", "SPATTN_E_DTYPE", argument)


def rounded_by(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements and scales of to_float8, for magnitudes up to that of largest_of."""
    x = x.detach()
    if x.dtype in (torch.float16, torch.float64):  # float16 has not all of the powers
        x = x.float()
    is_scaled = (largest > 0) & (largest < float("inf"))
    bits = (largest / _LARGEST).clamp(min=_LEAST_SCALE).view(torch.int32)
    powers = ((bits + _FRACTION) & ~_FRACTION).view(torch.float32)  # the least that is as large
    factors = torch.where(is_scaled, powers, 1.0)
    elements = (x * (1 / factors).to(x.dtype)).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return elements, factors.squeeze(-1).expand(x.shape[:-1])


class _Float8Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        sink_logits: Any,
        indices: Any,
        index_counts: Any,
        mask: Any,
        cu_q: Any,
        cu_k: Any,
        pattern: str,
        scalars: tuple[Any, ...],
        scales: Any,
        backward: bool,
    ) -> Any:
        rounded = [(None, None) if x is None else to_float8(x, axes=scalars[0], scales=scales) for x in (q, k, v)]
        elements, factors = zip(*rounded)
        more = (sink_logits, indices, index_counts, mask)
        out, lse = torch.ops.sparseattn.forward(*elements, *more, pattern, *scalars, backward, *factors, cu_q, cu_k)
        ctx.save_for_backward(*elements, *more, *factors, cu_q, cu_k, out, lse)
        ctx.pattern, ctx.scalars = pattern, scalars
        if not torch.compiler.is_compiling():  # else the graph keeps the pattern
            ctx.kept = found_by(pattern)  # until backward, which has its name alone
        ctx.dtypes = [x if x is None else x.dtype for x in (q, k, v)]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        if dout is None and dlse is None:
            return (None,) * 13
        saved = ctx.saved_tensors
        operands, later, (out, lse) = saved[:7], saved[7:-2], saved[-2:]
        *gradients, dsink = torch.ops.sparseattn.backward(
            dout, dlse, out, lse, *operands, ctx.pattern, *ctx.scalars, *later
        )
        found = [None if dtype is None else x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes)]
        return *found, None if operands[3] is None else dsink, *[None] * 9


@overload
def float8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pattern: AnyPattern,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def float8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pattern: AnyPattern,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def float8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pattern: AnyPattern,
    *,
    scales: Literal["heads", "rows"] = "heads",
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    deterministic: bool = False,
    reference: bool = False,
    indices: torch.Tensor | None = None,
    index_counts: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """attention of operands that are rounded to float8_e4m3fn first, for training, too: out, or (out, lse).

    Gradients are those of the rounded operands, handed on as if nothing had been rounded: a straight-through estimator
    (https://arxiv.org/abs/1308.3432). Of q, k and v, backward keeps a byte an element, and scales.

    q       [batch, seq_q, heads_q, head_dim], as in attention, float32, float16, bfloat16 or float64, as are k and v;
            out has its dtype, too, computed in bfloat16. What is of float8 already goes to attention
    scales  of to_float8, which rounds

    All else as in attention, under torch.compile, too. DTensors are refused.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v), ("sink_logits", sink_logits)):
        check = require_tensor if name == "sink_logits" else _require_floats
        if tensor is not None or name in ("q", "k"):
            check(tensor, name, takes_meta=True)
        if hasattr(tensor, "device_mesh"):
            message = f"argument {name} is a DTensor; accepted: the tensor of a device, as of to_local()"
            raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", name)
    require_documents(cu_q, cu_k)
    refuse_transforms(q=q, k=k, v=v, sink_logits=sink_logits)
    q, k, v = autocast(q, k, v)
    pattern, mask = split_mask(pattern)
    name = name_of(pattern)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    scalars = with_numbers((axes, scale, softcap, q_offset, head_dim_v, deterministic, reference, False))
    sink_logits = wide_sinks(sink_logits)
    backward = needs_gradients(q, k, v, sink_logits)
    operands = [q, k, v, sink_logits, indices, index_counts, mask, cu_q, cu_k]
    if torch.compiler.is_compiling():  # torch.compile refuses a tensor that is two operands of an autograd function
        operands = [x if x is None else x.view_as(x) for x in operands]
    out, lse = _Float8Attention.apply(*operands, name, scalars, scales, backward)
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out
