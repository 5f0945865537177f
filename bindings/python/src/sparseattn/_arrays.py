# SPDX-License-Identifier: MIT
"""NumPy arrays as the library's tensors, without a copy wherever the library can read the memory as it lies."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._core import DTypeError, ffi, lib

_CODES = {"f": lib.SPATTN_FLOAT, "i": lib.SPATTN_INT, "u": lib.SPATTN_UINT, "b": lib.SPATTN_BOOL}


class Tensor:
    """A view of an array for the length of a call. It keeps the array, and what the struct points to, alive."""

    __slots__ = ("pointer", "_shape", "_strides", "_array")

    def __init__(self, array: np.ndarray, argument: str):
        self._array = array
        self._shape = ffi.new("int64_t[]", array.shape)
        self._strides = ffi.new("int64_t[]", [stride // array.itemsize for stride in array.strides])
        self.pointer = ffi.new("spattn_tensor *")
        self.pointer.data = ffi.cast("void *", array.ctypes.data)
        self.pointer.device.type = lib.SPATTN_CPU
        self.pointer.ndim = array.ndim
        code, bits = dtype_code(array.dtype, argument)
        self.pointer.dtype.code, self.pointer.dtype.bits, self.pointer.dtype.lanes = code, bits, 1
        self.pointer.shape, self.pointer.strides = self._shape, self._strides


def dtype_code(dtype: np.dtype, argument: str) -> tuple[int, int]:
    """The code and bits that the library knows a dtype by. bfloat16 is that of PyPI's ml_dtypes.

    Raises DTypeError where there is none: texts, objects, bytes in foreign order.
    """
    if dtype.name == "bfloat16":
        return lib.SPATTN_BFLOAT, 16
    if dtype.kind not in _CODES or not dtype.isnative or dtype.itemsize > 31:
        raise DTypeError(f"argument {argument} is an array of {dtype!r}; accepted: float32 or bfloat16 (ml_dtypes) operands, "
                         "int32 or int64 lists, in the machine's byte order", "SPATTN_E_DTYPE", argument)
    return _CODES[dtype.kind], 8 * dtype.itemsize


def tensor_in(array: Any, argument: str) -> Tensor:
    """A tensor to read. Copied only where strides are negative or no whole elements, or data is misaligned."""
    array = np.asarray(array)
    readable = array.flags.aligned and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return Tensor(array if readable else np.ascontiguousarray(array), argument)


def tensor_out(array: np.ndarray, argument: str) -> Tensor:
    """A tensor to write. Raises ValueError for an array that is read-only."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"argument {argument} is {type(array).__name__}; accepted: a NumPy array to write to")
    if not array.flags.writeable:
        raise ValueError(f"argument {argument} is read-only; accepted: an array that may be written")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"argument {argument} has strides of {array.strides} bytes; accepted: multiples of {array.itemsize}")
    return Tensor(array, argument)


def integers(values: Any, argument: str) -> Tensor:
    """A list of positions: an int32 or int64 array as it is, any sequence of integers as int64."""
    if not isinstance(values, np.ndarray):
        values = np.array(list(values), dtype=np.int64) if not np.size(values) else np.asarray(values)
    return tensor_in(values, argument)
