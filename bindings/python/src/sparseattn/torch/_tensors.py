# SPDX-License-Identifier: MIT
"""Tensors as the library's, plans of tensors, and masks and documents that lie in tensors."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import increment_version

from .._arrays import FLOAT8, accepted_dtypes, as_array, make_tensor
from .._core import (
    ArgumentError,
    Context,
    DTypeError,
    ResourceError,
    ShapeError,
    UnsupportedError,
    context_with,
    default_context,
    ffi,
    lib,
)
from .._frames import FORWARD, Frame
from .._indexed import mask_of_keys
from .._patterns import Pattern, as_pattern, per_document, stands_for_pattern
from .._plans import Plan, find
from .._step import OTHER_NUMBERS

_DTYPES = {
    torch.float32: (lib.SPATTN_FLOAT, 32),
    torch.float16: (lib.SPATTN_FLOAT, 16),
    torch.float64: (lib.SPATTN_FLOAT, 64),
    torch.bfloat16: (lib.SPATTN_BFLOAT, 16),
    torch.float8_e4m3fn: FLOAT8,
    torch.int32: (lib.SPATTN_INT, 32),
    torch.int64: (lib.SPATTN_INT, 64),
}
_DEVICES = {"cpu": lib.SPATTN_CPU, "cuda": lib.SPATTN_CUDA}


def context_of(tensor: torch.Tensor) -> Context:
    """The context of calls that name none, on the tensor's device: on the CPU one with as many threads as torch has now."""
    if tensor.is_cpu:
        return context_with("cpu", torch.get_num_threads())
    device = tensor.device
    if device.type != "cuda":
        raise ArgumentError(f"argument q lies on {device}; accepted: cpu, cuda", "SPATTN_E_DEVICE", "q")
    return default_context(f"cuda:{device.index}")


def code_of(dtype: torch.dtype, argument: str) -> tuple[int, int]:
    """The code and bits that the library knows a dtype by. Raises DTypeError where there is none."""
    if dtype not in _DTYPES or argument in ("q", "problem.dtype") and not dtype.is_floating_point:
        accepted = ", ".join(f"torch.{name}" for name in accepted_dtypes(argument))
        raise DTypeError(f"argument {argument} is {dtype}; accepted: {accepted}", "SPATTN_E_DTYPE", argument)
    return _DTYPES[dtype]


def struct_of(tensor: torch.Tensor, argument: str, address: int = 0) -> Any:
    """A spattn_tensor* of the tensor's form; without an address, which is to be set, then. Raises DTypeError for dtypes of
    no use."""
    device = _DEVICES[tensor.device.type], tensor.device.index or 0
    owner = tensor if address else None
    return make_tensor(owner, address, code_of(tensor.dtype, argument), tensor.shape, tensor.stride(), device)


def require_tensor(tensor: Any, argument: str, takes_meta: bool = False) -> None:
    """Raises DTypeError for what is no tensor, or of no use, ArgumentError for one that has no memory of rows.

    takes_meta  meta tensors will do, which have no memory at all
    """
    if not (takes_meta and isinstance(tensor, torch.Tensor) and tensor.is_meta):
        require_memory(tensor, argument)
    code_of(tensor.dtype, argument)


def require_memory(tensor: Any, argument: str) -> None:
    """The same for a tensor whose dtype the caller knows more of."""
    if not isinstance(tensor, torch.Tensor):
        message = f"argument {argument} is {type(tensor).__name__}; accepted: a torch tensor"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type not in _DEVICES:
        layout = "nested" if tensor.is_nested else tensor.layout
        message = f"argument {argument} is {layout} on {tensor.device}; accepted: strided on cpu or cuda"
        raise ArgumentError(message, "SPATTN_E_DEVICE", argument)


def refuse_gradients(who: str, accepted: str, **tensors: Any) -> None:
    """Raises ArgumentError for a tensor whose gradient autograd would wait for; who keeps none."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                message = f"argument {name} requires a gradient, which a {who} does not keep; accepted: {accepted}"
                raise ArgumentError(message, "SPATTN_E_ARGUMENT", name)


functorch_level = torch._C._functorch.maybe_current_level


def refuse_transforms(**tensors: Any) -> None:
    """Raises UnsupportedError inside of a transform of torch.func, and for a tensor with a tangent, which would be lost."""
    if not torch.compiler.is_compiling() and functorch_level() is not None:  # torch.compile cannot trace it
        message = "transforms of torch.func are not offered; accepted: autograd, torch.compile, torch.export"
        raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "q")
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            message = f"argument {name} has a tangent, and derivatives that go forward are not offered"
            raise UnsupportedError(f"{message}; accepted: backward() and grad()", "SPATTN_E_UNSUPPORTED", name)


def wide_sinks(sink_logits: Any) -> Any:
    """Learned sinks as the library takes them: those of 16 bits, as of a model that was cast as a whole, as float32."""
    if isinstance(sink_logits, torch.Tensor) and sink_logits.dtype in (torch.bfloat16, torch.float16):
        return sink_logits.float()  # whose gradient autograd casts back
    return sink_logits


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


# Calls a function where torch.compile does not look: it would follow what the host does, and remember it as it was in
# the first call.
outside_of_graphs: Any = torch.compiler.disable(_call)

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # tensors whose attributes and memory are their own
_KEEPS_GRADIENTS = "sparseattn.torch.attention, or a call under torch.no_grad()"


class TensorPlan(Plan):
    """A plan whose arrays are tensors of one device; else as Plan.

    Autograd does not see it: forward refuses tensors that require a gradient, but for torch.no_grad(), those with a
    tangent, and transforms of torch.func.
    """

    _float32 = torch.float32

    def __init__(self, pattern: Any, device: torch.device, **options: Any):
        self._lie_on(device)
        try:
            super().__init__(pattern, **options)
        except ResourceError:
            if self._on_cpu:
                raise
            torch.cuda.empty_cache()  # what torch has of the device and nobody uses, as its own allocations do
            super().__init__(pattern, **options)

    @classmethod
    def adopt_on(cls, device: torch.device, *made: Any) -> TensorPlan:
        """A handle that the library has made: see Plan._adopt."""
        plan = cls._adopt(*made)
        plan._lie_on(device)
        return plan

    def _lie_on(self, device: torch.device) -> None:
        self._device, self._on_cpu = device, device.type == "cpu"
        self._templates: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        indices: Any = None,
        index_counts: Any = None,
        sink_logits: Any = None,
        starts: Any = None,
        parents: Any = None,
        page_table: Any = None,
        query_offsets: Any = None,
        q_scales: Any = None,
        k_scales: Any = None,
        v_scales: Any = None,
        step: Any = None,
        out: Any = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Any:
        scales = {"q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
        refuse_gradients("plan", _KEEPS_GRADIENTS, q=q, k=k, v=v, sink_logits=sink_logits, out=out, **scales)
        refuse_transforms(q=q, k=k, v=v, sink_logits=sink_logits, out=out, **scales)
        lists = {"indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
        lists |= {"starts": starts, "parents": parents, "page_table": page_table, "query_offsets": query_offsets}
        results = {"out": out, "return_lse": return_lse, "return_max_logits": return_max_logits}
        return self.run(q, k, v, **lists, **scales, step=step, **results)

    run = Plan.forward  # whatever autograd has to do with the operands, it is somebody else's concern

    @staticmethod
    def _read_dtype(dtype: torch.dtype, argument: str) -> tuple[Any, tuple[int, int]]:
        return dtype, code_of(dtype, argument)

    def _bfloat16(self) -> Any:
        return torch.bfloat16

    def _stream(self) -> Any:
        return stream_on(self._device)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(self.template(shape, dtype))

    def template(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """For torch.empty_like, which takes half of the time of torch.empty. It has no memory: that may be a graph's, which
        does not let others keep any of it."""
        template = self._templates.get(shape)
        if template is None or template.dtype != dtype:
            template = torch.empty((), dtype=dtype, device=self._device).expand(shape)
            template.untyped_storage().resize_(0)
            self._templates[shape] = template
        return template

    def _place(self, frame: Frame, name: str, tensor: Any, writes: bool = False, is_ours: bool = False) -> Any:
        if tensor is None:
            return frame.clear(name)
        if writes and not is_ours:
            note_write(tensor)
        known = frame.tensors.get(name)
        if is_ours and known is not None and known[0] is None:  # made by _empty, as the one before
            known[2][0] = tensor.data_ptr()
            return None
        if known is None or not isinstance(tensor, torch.Tensor):
            require_tensor(tensor, name)
        copy = None
        if tensor.is_neg():  # the imaginary part of a conjugate is a view with a sign to come
            if writes:
                message = f"argument {name} has a sign to come; accepted: tensor.resolve_neg()"
                raise ArgumentError(message, "SPATTN_E_LAYOUT", name)
            copy = tensor = tensor.detach().resolve_neg()
        try:
            form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        except RuntimeError:  # a sparse tensor has no strides
            require_tensor(tensor, name)
            raise
        if known is not None and known[0] == form:
            known[2][0] = tensor.data_ptr()
            return copy
        require_tensor(tensor, name)
        struct = struct_of(tensor, name)
        frame.set(name, None if is_ours else form, struct)[0] = tensor.data_ptr()
        return copy

    def _forms(self, frame: Frame) -> None:
        return None  # attention(), which would be quicker by them, asks for a PlainCall

    def _call(self, frame: Frame, scratch: Any = None) -> int:
        if self._on_cpu:
            return super()._call(frame, scratch)
        if scratch is None:  # freed when this returns, and given out again in the order of the stream
            scratch = self._make_scratch(frame.size)
        keep_for_graphs(self, self._device)
        frame.args.stream = self._stream()
        return frame.run_with(scratch.data_ptr(), self._handle)

    def _queue(self) -> Any:
        """A stream, and whether its calls are captured, which then come with each replay and not now."""
        if self._on_cpu:
            return None
        return int(ffi.cast("uintptr_t", self._stream())), is_capturing(self._device)

    def _note(self, name: str, numbers: Any) -> Any:
        return numbers.detach().clone() if self._on_cpu else note_of(numbers)

    def _differs(self, name: str, noted: Any, numbers: Any) -> str:
        if not self._on_cpu:
            return change_of(numbers, noted, is_unknown_same=name == "page_table")
        is_same = noted.shape == numbers.shape and bool((noted == numbers).all())
        return "" if is_same else OTHER_NUMBERS

    def _make_scratch(self, size: int) -> Any:
        return super()._make_scratch(size) if self._on_cpu else torch.empty(size, dtype=torch.uint8, device=self._device)


class PlainCall:
    """A plan of forward for tensors of known forms, of which only the addresses are new in each call."""

    def __init__(self, plan: TensorPlan, return_lse: bool):
        self.plan, self._return_lse = plan, return_lse
        self._frames: list[tuple[Frame, Any]] = []  # each with where its addresses are
        self._out = plan.template(plan._out_shape, plan._out_dtype)
        self._lse = plan.template(plan._lse_shape, torch.float32)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = torch.empty_like(self._out), torch.empty_like(self._lse) if self._return_lse else None
        try:  # taken, not shared, as the frames of a plan
            frame, (of_q, of_k, of_v, of_out, of_lse) = taken = self._frames.pop()
            of_q[0], of_k[0], of_v[0], of_out[0] = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
            if lse is not None:
                of_lse[0] = lse.data_ptr()
        except IndexError:
            frame, _ = taken = self._make_frame(q, k, v, out, lse)
        status = self.plan._call(frame)
        if status:
            self.plan._raise(status, None, None)
        self._frames.append(taken)
        return out, lse

    def _make_frame(self, *tensors: torch.Tensor | None) -> tuple[Frame, Any]:
        frame = self.plan._make_frame(FORWARD)
        given = dict(zip(("q", "k", "v", "out", "lse"), tensors))
        for name, tensor in given.items():
            self.plan._place(frame, name, tensor)
        return frame, [tensor if tensor is None else frame.tensors[name][2] for name, tensor in given.items()]


# A public call makes a Stream object first, which takes longer than a kernel's launch.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_on(device: torch.device) -> Any:
    """torch's current stream on a device, as the library takes it."""
    if device.type != "cuda":
        return ffi.NULL
    stream = _raw_stream(device.index) if _raw_stream else torch.cuda.current_stream(device).cuda_stream
    return ffi.cast("void *", stream)


# ---- graphs ----


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream on a device is captured."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


_captured: set[Any] = set()


def keep_for_graphs(used: Any, device: torch.device) -> None:
    """Keeps what a call uses as long as the process lives, where a graph captures the call: it launches with addresses
    of the plan's lists, and nobody tells when the graph is gone."""
    if is_capturing(device):
        _captured.add(used)


# ---- numbers that the host does not read ----


def note_write(tensor: Any) -> None:
    """Tells autograd that a tensor is written by the library: whoever has saved it has other numbers then."""
    if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
        increment_version(tensor)


def note_of(tensor: torch.Tensor) -> Any:
    """For change_of. It keeps the tensor, so that no other one comes to lie in its memory."""
    return tensor, None if tensor.is_inference() else tensor._version  # torch counts no writes to tensors of inference


def change_of(tensor: torch.Tensor, noted: Any, is_unknown_same: bool = False) -> str:
    """Why a tensor may have other numbers than when it, or a view of its memory, was noted; "" where it has the same.

    is_unknown_same  another tensor is taken to have the same numbers
    """
    known, writes = noted
    if _place_of(tensor) != _place_of(known):
        return "" if is_unknown_same else "is another tensor than in an earlier call of the step"
    return "" if note_of(tensor)[1] == writes else "was written to since an earlier call of the step"


def _place_of(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


# ---- patterns whose numbers lie in tensors ----


def split_mask(pattern: Any) -> tuple[Any, torch.Tensor | None]:
    """A pattern, and the bool tensor that stands for one, which may be an array of any library: then the pattern is
    "full"."""
    if not isinstance(pattern, (Pattern, str, torch.Tensor, np.ndarray)) and stands_for_pattern(pattern):
        pattern = as_array(pattern, "pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_:
        pattern = torch.from_numpy(pattern.copy())  # torch warns of arrays that may not be written
    return ("full", pattern) if isinstance(pattern, torch.Tensor) else (pattern, None)


def with_mask(pattern: Any, mask: torch.Tensor, sizes: dict[str, Any]) -> Pattern:
    """The pattern cut to what a bool tensor keeps, which the host reads.

    mask   [seq_q, seq_k], [heads, seq_q, seq_k] or [batch, heads, seq_q, seq_k]; a seq_q of 1 serves all queries, as of
           padding masks [batch, 1, 1, seq_k]
    sizes  those of sizes_of

    Raises what require_memory and require_mask raise: .argument is "mask".
    """
    require_memory(mask, "mask")
    require_mask(mask, sizes)
    if not mask.numel():  # there are no pairs to cut
        return as_pattern(pattern)
    values = mask.detach().cpu().numpy()
    kept = mask_of_keys(values, sizes["seq_q"]) if mask.shape[-2] == 1 else as_pattern(values, "mask")
    return kept if pattern == "full" else as_pattern(pattern) & kept


def require_mask(mask: torch.Tensor, sizes: dict[str, Any]) -> None:
    """Raises DTypeError, ShapeError for a mask of another dtype or shape than with_mask reads: .argument is "mask"."""
    if mask.dtype != torch.bool:
        message = f"argument mask is {mask.dtype}; accepted: torch.bool, True where a key is seen"
        raise DTypeError(message, "SPATTN_E_DTYPE", "mask")
    if not 2 <= mask.ndim <= 4:
        message = f"argument mask has shape {list(mask.shape)}; accepted: 2 to 4 axes, the last two [seq_q, seq_k]"
        raise ShapeError(message, "SPATTN_E_SHAPE", "mask")
    accepted = [sizes[name] for name in ("batch", "heads_q", "seq_q", "seq_k")]
    if mask.shape[-1] != sizes["seq_k"] or not broadcasts(mask.shape, accepted):
        message = f"argument mask has shape {list(mask.shape)}; accepted: {accepted}, of which all but keys may be 1"
        raise ShapeError(message, "SPATTN_E_SHAPE", "mask")


def broadcasts(shape: Sequence[Any], to: Sequence[Any]) -> bool:
    """Whether a tensor of the shape may be expanded to the other one."""
    return len(shape) <= len(to) and all(n in (1, size) for n, size in zip(reversed(shape), reversed(to)))


def in_documents(pattern: Any, cu_q: torch.Tensor | None = None, cu_k: torch.Tensor | None = None) -> Any:
    """per_document(pattern, cu_q, cu_k) of tensors, which the host reads; the pattern itself where cu_q is None.

    The same numbers give the same Pattern, whose plans are found again: a step's layers, and their backward, bring them.

    Raises DTypeError, ShapeError, ArgumentError: .argument is "cu_q" or "cu_k".
    """
    if cu_q is None and cu_k is None:
        return pattern
    require_documents(cu_q, cu_k)
    read = (None if x is None else x.long().cpu().numpy().tobytes() for x in (cu_q, cu_k))
    return find(_make_documents, default_context(), pattern, tuple(read))


def require_documents(cu_q: Any, cu_k: Any) -> None:
    """Raises DTypeError, ShapeError, ArgumentError for what in_documents would not read; None is no document."""
    for argument, offsets in (("cu_q", cu_q), ("cu_k", cu_k)):
        if offsets is None and (cu_k is None or argument == "cu_k"):
            continue
        require_memory(offsets, argument)
        if offsets.dtype not in (torch.int32, torch.int64):
            message = f"argument {argument} is {offsets.dtype}; accepted: torch.int32, torch.int64"
            raise DTypeError(message, "SPATTN_E_DTYPE", argument)
        if offsets.dim() != 1:
            message = f"argument {argument} has shape {list(offsets.shape)}; accepted: [documents + 1]"
            raise ShapeError(message, "SPATTN_E_SHAPE", argument)


def _make_documents(context: Context, pattern: Pattern, cu_q: bytes, cu_k: bytes | None) -> Pattern:
    return per_document(pattern, *(x if x is None else np.frombuffer(x, np.int64) for x in (cu_q, cu_k)))
