# SPDX-License-Identifier: MIT
"""Attention of torch tensors, with gradients.

    import sparseattn.torch as sat
    out = sat.attention(q, k, v, "causal & window(1023,0)")       # tensors in, a tensor out
    out.sum().backward()

The library reads and writes the tensors' own memory, on the CPU and, as far as it has kernels there, on CUDA devices,
in torch's current stream.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import _plans
from ._arrays import make_tensor
from ._core import ArgumentError, Context, DTypeError, default_context, ffi, lib

_DTYPES = {
    torch.float32: (lib.SPATTN_FLOAT, 32),
    torch.float16: (lib.SPATTN_FLOAT, 16),
    torch.float64: (lib.SPATTN_FLOAT, 64),
    torch.bfloat16: (lib.SPATTN_BFLOAT, 16),
    torch.int32: (lib.SPATTN_INT, 32),
    torch.int64: (lib.SPATTN_INT, 64),
}
_DEVICES = {"cpu": lib.SPATTN_CPU, "cuda": lib.SPATTN_CUDA}
_contexts: dict[int, Context] = {}  # by index of the CUDA device
os.register_at_fork(after_in_child=_contexts.clear)


def _context_of(tensor: torch.Tensor) -> Context:
    if tensor.device.type not in _DEVICES:
        raise ArgumentError(f"argument q lies on {tensor.device}; accepted: cpu, cuda", "SPATTN_E_DEVICE", "q")
    if tensor.device.type == "cpu":
        return default_context()
    if tensor.device.index not in _contexts:
        _contexts[tensor.device.index] = Context(f"cuda:{tensor.device.index}")
    return _contexts[tensor.device.index]


def _require(tensor: Any, argument: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        message = f"argument {argument} is {type(tensor).__name__}; accepted: a torch tensor"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument)
    if tensor.layout != torch.strided or tensor.device.type not in _DEVICES:
        message = f"argument {argument} is {tensor.layout} on {tensor.device}; accepted: strided on cpu or cuda"
        raise ArgumentError(message, "SPATTN_E_DEVICE", argument)


def _code(dtype: torch.dtype, argument: str) -> tuple[int, int]:
    if dtype not in _DTYPES:
        accepted = ", ".join(map(str, _DTYPES))
        raise DTypeError(f"argument {argument} is {dtype}; accepted: {accepted}", "SPATTN_E_DTYPE", argument)
    return _DTYPES[dtype]


class _Plan(_plans.Plan):
    """A plan whose arrays are tensors of one device."""

    _float32 = torch.float32

    def __init__(self, pattern: Any, device: torch.device, **options: Any):
        self._device = device
        super().__init__(pattern, **options)

    def _read_dtype(self, dtype: torch.dtype) -> tuple[Any, int, int]:
        return dtype, *_code(dtype, "problem.dtype")

    def _stream(self) -> Any:
        return ffi.cast("void *", _stream_of(self._device)) if self._device.type == "cuda" else ffi.NULL

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _place(self, frame: _plans.Frame, name: str, tensor: Any, writes: bool = False) -> Any:
        if tensor is None:
            return frame.clear(name)
        known = frame.tensors.get(name)
        if known is None or not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            _require(tensor, name)
        copy = None
        if tensor.is_neg():  # the imaginary part of a conjugate is a view with a sign to come
            copy = tensor = tensor.detach().resolve_neg()
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if known is not None and known[0] == form:
            known[2][0] = tensor.data_ptr()
            return copy
        _require(tensor, name)
        device = _DEVICES[tensor.device.type], tensor.device.index or 0
        struct = make_tensor(None, 0, _code(tensor.dtype, name), tensor.shape, tensor.stride(), device)
        frame.set(name, form, struct)[0] = tensor.data_ptr()
        return copy

    def _call(self, frame: _plans.Frame) -> int:
        if self._device.type == "cpu":
            return super()._call(frame)
        # Freed when this returns, and given out again in the order of the stream.
        scratch = torch.empty(frame.size, dtype=torch.uint8, device=self._device)
        frame.use_scratch(scratch.data_ptr())
        frame.args.stream = self._stream()
        status: int = frame.function(self._handle, frame.args)
        return status


# A public call makes a Stream object first, which takes longer than a kernel's launch.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _stream_of(device: torch.device) -> int:
    stream: int = _raw_stream(device.index) if _raw_stream else torch.cuda.current_stream(device).cuda_stream
    return stream


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *operands: torch.Tensor | None) -> Any:
        q, k, v, sink_logits, indices, index_counts = operands
        more = {"sink_logits": sink_logits, "indices": indices, "index_counts": index_counts}
        out, lse = plan.forward(q, k, v, return_lse=True, **more)
        ctx.plan = plan
        ctx.save_for_backward(*operands, out, lse)  # the lists, too: autograd notices if one changes before backward
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, sink_logits, indices, index_counts, out, lse = ctx.saved_tensors
        more = {"sink_logits": sink_logits, "indices": indices, "index_counts": index_counts}
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = ctx.plan.backward(q, k, v, out, lse, dout, dlse=dlse, **more)
        return None, *gradients, *[None] * (6 - len(gradients))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pattern: Any,
    *,
    axes: str = "bshd",
    indices: torch.Tensor | None = None,
    index_counts: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    return_lse: bool = False,
    context: Context | None = None,
    **options: Any,
) -> Any:
    """sparseattn.attention of tensors: out, or (out, lse), which autograd knows how to differentiate once.

    q, k, v, sink_logits and the lse that is returned have gradients. Shapes, options and errors are those of
    sparseattn.attention; bfloat16 is torch's. context None is the CPU's default_context(), or one for the CUDA device
    where q lies.
    """
    operands = {"q": q, "k": k, "v": v, "sink_logits": sink_logits}
    given = {name: tensor for name, tensor in operands.items() if tensor is not None}
    for name, tensor in given.items():
        _require(tensor, name)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given.values())
    given.pop("sink_logits", None)
    plan = _Plan(
        pattern,
        q.device,
        backward=needs_gradient,
        sink_logits=sink_logits is not None,
        context=context or _context_of(q),
        **_plans.sizes_of(given, axes),
        **options,
    )
    out, lse = _Attention.apply(plan, *operands.values(), indices, index_counts)
    return (out, lse) if return_lse else out
