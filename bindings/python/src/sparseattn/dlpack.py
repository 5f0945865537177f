# SPDX-License-Identifier: MIT
"""Attention of arrays that know DLPack (https://dmlc.github.io/dlpack): CuPy's, and those of any other library.

    import sparseattn.dlpack as sad
    out = sad.attention(q, k, v, "causal & window(1023,0)")       # CuPy arrays in, a CuPy array out

A DLTensor is a spattn_tensor, so the library reads the arrays where they lie, on the CPU or a GPU, there in the stream
that their library has made current. What comes out is an array of the library that q came from: on a GPU it makes the
memory, on the CPU it takes over NumPy's. There are no gradients but those of attention_backward.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core import ArgumentError, Context, DTypeError, UnsupportedError, check, default_context, ffi, lib, own, sized
from ._indexed import pattern_of_call
from ._patterns import as_pattern
from ._problem import make_problem, row_axes, sizes_of

if TYPE_CHECKING:
    from ._patterns import AnyPattern

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_CPU = (lib.SPATTN_CPU, lib.SPATTN_CUDA_HOST)
_GPU = (lib.SPATTN_CUDA, lib.SPATTN_CUDA_MANAGED)


class _View:
    """An array's memory as a tensor, for as long as this lives."""

    def __init__(self, array: Any, argument: str, stream: int | None):
        if not hasattr(array, "__dlpack__"):
            message = f"argument {argument} is {type(array).__name__}; accepted: an array with __dlpack__"
            raise DTypeError(message, "SPATTN_E_DTYPE", argument)
        try:
            self._capsule = array.__dlpack__() if stream is None else array.__dlpack__(stream=stream or 1)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:  # gradients, dtypes, read-only memory
            message = f"argument {argument} cannot be read: {error}; accepted: an array that DLPack knows"
            raise DTypeError(message, "SPATTN_E_DTYPE", argument) from error
        # A DLManagedTensor begins with its DLTensor.
        self.tensor = ffi.cast("spattn_tensor *", _pointer(self._capsule, b"dltensor"))
        self.shape = tuple(self.tensor.shape[axis] for axis in range(self.tensor.ndim))
        self.ndim = self.tensor.ndim

    @property
    def dtype(self) -> tuple[int, int]:
        return self.tensor.dtype.code, self.tensor.dtype.bits


class _Library:
    """The array library of q, its device and its current stream."""

    def __init__(self, q: Any):
        if not hasattr(q, "__dlpack_device__"):
            message = f"argument q is {type(q).__name__}; accepted: an array with __dlpack__ and __dlpack_device__"
            raise DTypeError(message, "SPATTN_E_DTYPE", "q")
        kind, self._index = (int(part) for part in q.__dlpack_device__())
        if kind not in (*_CPU, *_GPU):
            message = f"argument q lies on a device of DLPack type {kind}; accepted: memory of the CPU and of CUDA"
            raise ArgumentError(message, "SPATTN_E_DEVICE", "q")
        self._on_gpu, self._q = kind in _GPU, q
        namespace = getattr(q, "__array_namespace__", None)
        self._module = namespace() if namespace else sys.modules[type(q).__module__.partition(".")[0]]
        self.stream: int | None = self._current_stream() if self._on_gpu else None
        self._convert = None if self._on_gpu or isinstance(q, np.ndarray) else self._find_convert()

    def _find_convert(self) -> Any:
        convert = getattr(self._module, "from_dlpack", None) or getattr(self._module, "asarray", None)
        if convert is None:
            message = (
                f"argument q is {type(self._q).__name__}, and {self._module.__name__} has neither from_dlpack nor "
                "asarray to make one of; accepted: arrays of a library that has, and those of np.from_dlpack"
            )
            raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "q")
        return convert

    def _current_stream(self) -> int:
        cuda: Any = getattr(self._module, "cuda", None)
        if not hasattr(cuda, "get_current_stream") or not hasattr(self._module, "empty"):
            message = (
                f"argument q lies on a GPU, in an array of {self._module.__name__}; accepted there: CuPy's arrays, "
            )
            raise UnsupportedError(message + "and sparseattn.torch and sparseattn.jax for theirs", argument="q")
        return int(cuda.get_current_stream().ptr)

    def context(self) -> Context:
        return default_context(f"cuda:{self._index}" if self._on_gpu else "cpu")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory to write to: the library's own on a GPU, else NumPy's."""
        if not self._on_gpu:
            return np.empty(shape, dtype)
        return self._module.empty(shape, dtype=dtype)

    def give(self, array: Any) -> Any:
        """The array of empty(), in the library that q came from."""
        return array if array is None or self._convert is None else self._convert(array)


_DTYPES = {(lib.SPATTN_FLOAT, bits): f"float{bits}" for bits in (16, 32, 64)}


def _call(
    library: _Library, op: int, pattern: Any, problem: Any, inputs: dict[str, Any], outputs: dict[str, Any]
) -> None:
    """One pass: inputs and outputs are _View, or None for what is not there."""
    made = as_pattern(pattern_of_call(pattern, problem.seq_q, problem.seq_k))
    handles = library.context()._handle, made._handle
    stream = ffi.cast("void *", library.stream or 0)
    plan = own("spattn_plan", lib.spattn_plan_create, *handles, problem, stream)
    needed, align = ffi.new("size_t *"), ffi.new("size_t *")
    check(lib.spattn_plan_workspace(plan, op, needed, align))
    scratch = _View(library.empty((needed[0] + align[0],), "uint8"), "workspace", library.stream)
    address = int(ffi.cast("uintptr_t", scratch.tensor.data)) + scratch.tensor.byte_offset
    is_forward = op == lib.SPATTN_OP_FORWARD
    args = sized("spattn_forward_args" if is_forward else "spattn_backward_args", workspace_bytes=needed[0])
    args.workspace, args.stream = ffi.cast("void *", address + -address % align[0]), stream
    for name, view in (*inputs.items(), *outputs.items()):
        if view is not None:
            setattr(args, name, view.tensor)
    check((lib.spattn_forward if is_forward else lib.spattn_backward)(plan, args))


def _prepare(
    library: _Library, arrays: dict[str, Any], axes: str, head_dim_v: int | None, options: dict[str, Any]
) -> Any:
    """The views of what was given, the sizes of the problem, the problem, and NumPy's name of its dtype."""
    views: dict[str, Any] = {
        name: None if array is None and name not in ("q", "k") else _View(array, name, library.stream)
        for name, array in arrays.items()
    }
    dtype = views["q"].dtype
    if dtype not in _DTYPES:
        message = f"argument q is of DLPack's type {dtype[0]} with {dtype[1]} bits; accepted: float16, float32, float64"
        raise DTypeError(message, "SPATTN_E_DTYPE", "q")
    q, k, v = (views[name] and views[name].shape for name in ("q", "k", "v"))
    sizes = sizes_of(q, k, v, axes, head_dim_v)
    problem = make_problem(dtype, **sizes, sink_logits=views["sink_logits"] is not None, **options)
    return views, problem, sizes, _DTYPES[dtype]


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    axes: str = "bshd",
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    return_lse: bool = False,
    head_dim_v: int | None = None,
    **options: Any,
) -> Any:
    """sparseattn.attention of arrays with __dlpack__: out, or (out, lse), arrays of the library that q came from.

    q [batch, seq_q, heads_q, head_dim], k [batch, seq_k, heads_kv, head_dim], v [batch, seq_k, heads_kv, head_dim_v] or
    None, float32, float16 or float64, all on one device; any strides that are not negative. options: scale, softcap,
    q_offset, deterministic, reference, tf32, as in sparseattn.Plan.

    Raises ShapeError, DTypeError, ArgumentError, UnsupportedError, NoGPUError; DTypeError for tensors that require a
    gradient, which sparseattn.torch takes.
    """
    library = _Library(q)
    arrays = {"q": q, "k": k, "v": v, "sink_logits": sink_logits, "indices": indices, "index_counts": index_counts}
    views, problem, sizes, dtype = _prepare(library, arrays, axes, head_dim_v, options)
    out = library.empty((*views["q"].shape[:-1], sizes["head_dim_v"]), dtype)
    lse = library.empty(tuple(views["q"].shape[axis] for axis in row_axes(axes)), "float32")
    results = {"out": _View(out, "out", library.stream), "lse": _View(lse, "lse", library.stream)}
    _call(library, lib.SPATTN_OP_FORWARD, pattern, problem, views, results)
    return (library.give(out), library.give(lse)) if return_lse else library.give(out)


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    pattern: AnyPattern,
    *,
    dlse: Any = None,
    axes: str = "bshd",
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    head_dim_v: int | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Gradients (dq, dk, dv) of attention(q, k, v, pattern, return_lse=True, ...), which gave out and lse; with
    sink_logits (dq, dk, dv, dsink_logits), and dv None where v is. Shapes, options and errors as in attention."""
    library = _Library(q)
    arrays = {"q": q, "k": k, "v": v, "sink_logits": sink_logits, "indices": indices, "index_counts": index_counts}
    views, problem, _, dtype = _prepare(library, arrays, axes, head_dim_v, {"backward": True, **options})
    more = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    views |= {name: None if x is None else _View(x, name, library.stream) for name, x in more.items()}
    gradients = {
        f"d{name}": views[name] and library.empty(views[name].shape, "float32" if name == "sink_logits" else dtype)
        for name in ("q", "k", "v", "sink_logits")
    }
    results = {name: None if array is None else _View(array, name, library.stream) for name, array in gradients.items()}
    _call(library, lib.SPATTN_OP_BACKWARD, pattern, problem, views, results)
    found = tuple(library.give(gradients[name]) for name in ("dq", "dk", "dv"))
    return found if sink_logits is None else (*found, library.give(gradients["dsink_logits"]))
