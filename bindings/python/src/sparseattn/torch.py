# SPDX-License-Identifier: MIT
"""Attention of torch tensors on the CPU, with gradients.

    import sparseattn.torch as sat
    out = sat.attention(q, k, v, "causal & window(1023,0)")       # tensors in, a tensor out
    out.sum().backward()

Tensors and what the library reads and writes are the same memory: nothing is copied on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from . import _plans
from ._core import DTypeError
from ._patterns import Pattern


def _array(tensor: torch.Tensor | None, argument: str) -> Any:
    """The tensor's memory for NumPy, which knows bfloat16 by PyPI's ml_dtypes only."""
    if tensor is None or tensor.dtype != torch.bfloat16:
        return tensor if tensor is None else tensor.detach()
    try:
        import ml_dtypes
    except ImportError as error:
        message = f"argument {argument} is bfloat16, which needs PyPI's ml_dtypes; accepted without: float32, float16"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument) from error
    return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _tensor(array: np.ndarray | None) -> torch.Tensor | None:
    if array is None or array.dtype.name != "bfloat16":
        return array if array is None else torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _plans.Plan, lists: dict[str, Any], *operands: torch.Tensor | None) -> Any:
        q, k, v, sink_logits = (_array(tensor, name) for tensor, name in zip(operands, ("q", "k", "v", "sink_logits")))
        out, lse = map(_tensor, plan.forward(q, k, v, sink_logits=sink_logits, return_lse=True, **lists))
        ctx.plan, ctx.lists = plan, lists
        ctx.save_for_backward(*operands, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        *operands, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        q, k, v, sink_logits = (_array(tensor, name) for tensor, name in zip(operands, ("q", "k", "v", "sink_logits")))
        results = (_array(tensor, name) for tensor, name in ((out, "out"), (lse, "lse"), (dout, "dout")))
        more = {"dlse": _array(dlse, "dlse"), "sink_logits": sink_logits, **ctx.lists}
        gradients = tuple(map(_tensor, ctx.plan.backward(q, k, v, *results, **more)))
        return None, None, *gradients, *[None] * (4 - len(gradients))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pattern: Pattern | str,
    *,
    indices: torch.Tensor | None = None,
    index_counts: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """sparseattn.attention of tensors on the CPU: out, or (out, lse), which autograd knows how to differentiate once.

    q, k, v, sink_logits and the lse that is returned have gradients. Shapes, dtypes, options and errors are those of
    sparseattn.attention; bfloat16 needs PyPI's ml_dtypes.
    """
    operands = (q, k, v, sink_logits)
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    arrays = (_array(tensor, name) for tensor, name in ((q, "q"), (k, "k"), (v, "v")))
    plan = _plans.plan(pattern, *arrays, backward=needs_gradient, sink_logits=sink_logits is not None, **options)
    out, lse = _Attention.apply(plan, {"indices": indices, "index_counts": index_counts}, *operands)
    return (out, lse) if return_lse else out
