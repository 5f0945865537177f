# SPDX-License-Identifier: MIT
"""Arrays as the library's tensors, without a copy wherever the library can read the memory as it lies."""

from __future__ import annotations

from typing import Any, NoReturn, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from ._core import ArgumentError, DTypeError, ffi, lib

_HOST = (lib.SPATTN_CPU, lib.SPATTN_CUDA_HOST)
_CODES = {"f": lib.SPATTN_FLOAT, "i": lib.SPATTN_INT, "u": lib.SPATTN_UINT, "b": lib.SPATTN_BOOL}
FLOAT8 = (lib.SPATTN_FLOAT8_E4M3FN, 8)  # code and bits: of q, k and v, or of a cache
_OF_ML_DTYPES = {"bfloat16": (lib.SPATTN_BFLOAT, 16), "float8_e4m3fn": FLOAT8}

# What arguments accept, by their names. All others are positions, or lists of them.
FLOATS = ("float32", "float16", "bfloat16", "float64")
_ACCEPTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("problem.dtype", "problem.cache_dtype", "q", "k", "v", "seen_k", "seen_v"), (*FLOATS, "float8_e4m3fn")
    ),
    **dict.fromkeys(("k_new", "v_new", "out", "dout"), FLOATS),
    **dict.fromkeys(("lse", "dlse", "sink_logits"), ("float32",)),
    **dict.fromkeys(("q_scales", "k_scales", "v_scales", "seen_k_scales", "seen_v_scales"), ("float32",)),
    "mask": ("bool", "uint8"),
}


# A tensor's struct -> the array, and what its pointers point to: they must live as long as it does.
_kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _tensor(array: Any, argument: str) -> Any:
    """A spattn_tensor* over the array's memory, which it keeps alive."""
    tensor = form_tensor(array, argument)
    tensor.data = ffi.cast("void *", array.ctypes.data)
    _kept[tensor] = (array, _kept[tensor])
    return tensor


def form_tensor(array: Any, argument: str) -> Any:
    """A spattn_tensor* of the array's shape, strides and dtype, whose address is to be set."""
    strides = [stride // array.itemsize for stride in array.strides]
    return make_tensor(None, 0, dtype_code(array.dtype, argument), array.shape, strides)


def make_tensor(
    owner: Any,
    address: int,
    dtype: tuple[int, int],
    shape: Sequence[int],
    strides: Sequence[int],
    device: tuple[int, int] = (lib.SPATTN_CPU, 0),
) -> Any:
    """A spattn_tensor* that keeps the memory's owner alive; dtype is code and bits, strides are elements."""
    tensor = ffi.new("spattn_tensor *")
    tensor.data = ffi.cast("void *", address)
    tensor.device.type, tensor.device.index = device
    tensor.ndim = len(shape)
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = *dtype, 1
    tensor.shape, tensor.strides = kept = ffi.new("int64_t[]", list(shape)), ffi.new("int64_t[]", list(strides))
    _kept[tensor] = (owner, kept)
    return tensor


def dtype_code(dtype: np.dtype[Any], argument: str) -> tuple[int, int]:
    """The code and bits that the library knows a dtype by. bfloat16 and float8_e4m3fn are those of PyPI's ml_dtypes.

    Raises DTypeError where there is none: texts, objects, bytes in foreign order.
    """
    if dtype.name in _OF_ML_DTYPES:
        return _OF_ML_DTYPES[dtype.name]
    is_of_others = dtype.isbuiltin == 2  # as those of ml_dtypes, some of which claim to be floats
    if dtype.kind not in _CODES or is_of_others or not dtype.isnative or dtype.itemsize > 31:
        _refuse_dtype(dtype, argument)
    return _CODES[dtype.kind], 8 * dtype.itemsize


def _refuse_dtype(dtype: np.dtype[Any], argument: str) -> NoReturn:
    names = (f"{name} of ml_dtypes" if name in _OF_ML_DTYPES else name for name in accepted_dtypes(argument))
    message = f"argument {argument} is an array of {dtype!r}; accepted: {', '.join(names)}, in the machine's order"
    raise DTypeError(message, "SPATTN_E_DTYPE", argument)


def accepted_dtypes(argument: str) -> tuple[str, ...]:
    """Names of what an argument may be, of one plan or another."""
    return _ACCEPTED.get(argument, ("int32", "int64"))


def read_dtype(dtype: Any, argument: str) -> tuple[Any, tuple[int, int]]:
    """What NumPy makes of a dtype, and its code and bits. Raises DTypeError."""
    try:
        if dtype is None:
            raise TypeError  # NumPy takes it for float64
        dtype = np.dtype(dtype)
    except TypeError:
        message = f"argument {argument} is {dtype!r}; accepted: a dtype of NumPy"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument) from None
    code = dtype_code(dtype, argument)
    return (dtype, code) if dtype.name in accepted_dtypes(argument) else _refuse_dtype(dtype, argument)


def as_array(values: Any, argument: str) -> np.ndarray[Any, Any]:
    """A NumPy array over the memory of any array on the host (__array__ or __dlpack__), or of a sequence's numbers.

    Raises ArgumentError for arrays on another device, DTypeError for those that NumPy cannot read.
    """
    if isinstance(values, np.ndarray):
        if type(values) is not np.ndarray and isinstance(values, np.ma.MaskedArray):
            message = f"argument {argument} is a masked array, whose mask nobody would read; accepted: arrays without"
            raise DTypeError(message, "SPATTN_E_DTYPE", argument)
        return values
    if values is None or isinstance(values, (str, bytes, dict, set)):
        message = f"argument {argument} is {type(values).__name__}; accepted: an array"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument)
    try:
        device = values.__dlpack_device__() if hasattr(values, "__dlpack_device__") else (lib.SPATTN_CPU, 0)
        if device[0] in _HOST:
            is_numpy = hasattr(values, "__array__") or not hasattr(values, "__dlpack__")
            return np.asarray(values) if is_numpy else np.from_dlpack(values)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # others' words for dtypes, gradients, layouts
        message = f"argument {argument} cannot be read as an array: {error}; accepted: arrays in the host's memory"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument) from error
    raise ArgumentError(
        f"argument {argument} lies on a device of DLPack type {int(device[0])}; accepted: arrays in the host's memory",
        "SPATTN_E_DEVICE",
        argument,
    )


def readable(array: Any, argument: str, borrow: bool = False) -> Any:
    """The array, or a copy where strides are negative or no whole elements, or data is misaligned.

    borrow raises ArgumentError instead of copying.
    """
    steps = [stride for size, stride in zip(array.shape, array.strides) if size > 1]
    if array.flags.aligned and all(step >= 0 and step % array.itemsize == 0 for step in steps):
        return array
    if borrow:
        raise ArgumentError(
            f"argument {argument} has strides of {array.strides} bytes, {'' if array.flags.aligned else 'mis'}aligned; "
            "accepted with borrow: an aligned array whose strides are not negative",
            "SPATTN_E_LAYOUT",
            argument,
        )
    return array.copy(order="C")


def tensor_in(values: Any, argument: str, borrow: bool = False) -> Any:
    """A tensor to read, of readable() memory, which it keeps alive."""
    return _tensor(readable(as_array(values, argument), argument, borrow), argument)


def writable(array: Any, argument: str) -> Any:
    """The array. Raises DTypeError for what is no NumPy array, ArgumentError for one that cannot be written."""
    if not isinstance(array, np.ndarray):
        message = f"argument {argument} is {type(array).__name__}; accepted: a NumPy array to write to"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument)
    if not array.flags.writeable:
        message = f"argument {argument} is read-only; accepted: an array that may be written"
        raise ArgumentError(message, "SPATTN_E_LAYOUT", argument)
    if any(stride % array.itemsize for stride in array.strides):
        message = f"argument {argument} has strides of {array.strides} bytes; accepted: multiples of {array.itemsize}"
        raise ArgumentError(message, "SPATTN_E_LAYOUT", argument)
    return array


def tensor_out(array: Any, argument: str) -> Any:
    """A tensor to write, of a writable() array. Keeps the array alive."""
    return _tensor(writable(array, argument), argument)


def integers(values: Any, argument: str, borrow: bool = False) -> Any:
    """A list of positions: an int32 or int64 array as it is, any sequence of integers as int64."""
    array = as_array(values, argument)
    if not array.size and not hasattr(values, "dtype"):
        array = array.astype(np.int64)  # NumPy takes an empty list for floats
    return tensor_in(array, argument, borrow)
