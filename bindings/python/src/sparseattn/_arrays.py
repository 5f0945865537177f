# SPDX-License-Identifier: MIT
"""NumPy arrays as the library's tensors, without a copy wherever the library can read the memory as it lies."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ._core import DTypeError, ffi, lib

_CODES = {"f": lib.SPATTN_FLOAT, "i": lib.SPATTN_INT, "u": lib.SPATTN_UINT, "b": lib.SPATTN_BOOL}


# A tensor's struct -> the array, and what its pointers point to: they must live as long as it does.
_kept: WeakKeyDictionary = WeakKeyDictionary()


def _tensor(array: np.ndarray, argument: str) -> Any:
    """A spattn_tensor* over the array's memory."""
    code, bits = dtype_code(array.dtype, argument)
    shape = ffi.new("int64_t[]", array.shape)
    strides = ffi.new("int64_t[]", [stride // array.itemsize for stride in array.strides])
    tensor = ffi.new("spattn_tensor *")
    tensor.data = ffi.cast("void *", array.ctypes.data)
    tensor.device.type = lib.SPATTN_CPU
    tensor.ndim = array.ndim
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
    tensor.shape, tensor.strides = shape, strides
    _kept[tensor] = (array, shape, strides)
    return tensor


def dtype_code(dtype: np.dtype, argument: str) -> tuple[int, int]:
    """The code and bits that the library knows a dtype by. bfloat16 is that of PyPI's ml_dtypes.

    Raises DTypeError where there is none: texts, objects, bytes in foreign order.
    """
    if dtype.name == "bfloat16":
        return lib.SPATTN_BFLOAT, 16
    if dtype.kind not in _CODES or not dtype.isnative or dtype.itemsize > 31:
        raise DTypeError(
            f"argument {argument} is an array of {dtype!r}; accepted: float32 or bfloat16 (ml_dtypes) operands, "
            "int32 or int64 lists, in the machine's byte order",
            "SPATTN_E_DTYPE",
            argument,
        )
    return _CODES[dtype.kind], 8 * dtype.itemsize


def tensor_in(array: Any, argument: str) -> Any:
    """A tensor to read. Copied only where strides are negative or no whole elements, or data is misaligned."""
    array = np.asarray(array)
    readable = array.flags.aligned and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return _tensor(array if readable else array.copy(order="C"), argument)


def tensor_out(array: np.ndarray, argument: str) -> Any:
    """A tensor to write. Raises ValueError for an array that is read-only."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"argument {argument} is {type(array).__name__}; accepted: a NumPy array to write to")
    if not array.flags.writeable:
        raise ValueError(f"argument {argument} is read-only; accepted: an array that may be written")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(
            f"argument {argument} has strides of {array.strides} bytes; accepted: multiples of {array.itemsize}"
        )
    return _tensor(array, argument)


def integers(values: Any, argument: str) -> Any:
    """A list of positions: an int32 or int64 array as it is, any sequence of integers as int64."""
    if not isinstance(values, np.ndarray):
        values = np.array(list(values), dtype=np.int64) if not np.size(values) else np.asarray(values)
    return tensor_in(values, argument)
