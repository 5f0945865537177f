# SPDX-License-Identifier: MIT
"""Handles, statuses and texts of the C ABI: the floor that the other modules stand on."""

from __future__ import annotations

import operator
import os
import re
import threading
from types import SimpleNamespace
from typing import Any, Callable

from ._native import ffi as ffi
from ._native import lib as _lib

# The functions and numbers of the header. cffi's own object says of itself that it is a module, but takes no weak
# references, which torch.compile makes of modules: it fails where a function that it follows calls the library.
lib: Any = SimpleNamespace(**{name: getattr(_lib, name) for name in dir(_lib)})


class SparseAttentionError(Exception):
    """A call that the library refused.

    The text is the library's: which argument, what was given, what is accepted.
    """

    status: str  #: the name in the header, "SPATTN_E_SHAPE"
    argument: str  #: the C name of what was wrong, "q" or "problem.head_dim"; "" where no argument is to blame

    def __init__(self, message: str, status: str = "SPATTN_E_ARGUMENT", argument: str = ""):
        self.args = (message,)  # and not super().__init__(message), which torch.compile of torch 2.11 cannot follow
        self.status = status
        self.argument = argument


class ArgumentError(SparseAttentionError, ValueError):
    """A value out of range, a layout that cannot be, a state that does not allow the call."""


class ShapeError(ArgumentError):
    """An array whose axes or sizes are not those of the plan."""


class DTypeError(SparseAttentionError, TypeError):
    """A value of a type, an array or a plan of a dtype, that is not accepted."""


class FormatError(SparseAttentionError, ValueError):
    """A text, or saved bytes, that are no pattern."""


class UnsupportedError(SparseAttentionError, NotImplementedError):
    """Legal, but not offered by this build on this machine."""


class NoGPUError(UnsupportedError):
    """A GPU was asked for and there is none, or none with kernels in this build."""


class ResourceError(SparseAttentionError, MemoryError):
    """Memory ran out."""


class CudaError(SparseAttentionError, RuntimeError):
    """CUDA reported a failure; the text has its name."""


class InternalError(SparseAttentionError, RuntimeError):
    """A callback failed, or the library has a bug: please report the text."""


# The nearest entry counts: the status itself, else its family (the thousands).
_ERRORS = {
    lib.SPATTN_E_ARGUMENT: ArgumentError,
    lib.SPATTN_E_SHAPE: ShapeError,
    lib.SPATTN_E_DTYPE: DTypeError,
    lib.SPATTN_E_UNSUPPORTED: UnsupportedError,
    lib.SPATTN_E_NO_GPU: NoGPUError,
    lib.SPATTN_E_RESOURCE: ResourceError,
    lib.SPATTN_E_CUDA: CudaError,
    lib.SPATTN_E_FORMAT: FormatError,
    lib.SPATTN_E_CALLBACK: InternalError,
    lib.SPATTN_E_INTERNAL: InternalError,
}


class _Raised(threading.local):
    """What a signal handler raised while a call of this thread was under way."""

    error: BaseException | None = None


_raised = _Raised()


def _keep_raised(kind: Any, error: BaseException, traceback: Any) -> None:
    _raised.error = error


@ffi.callback("spattn_cancel_fn", error=1, onerror=_keep_raised)
def handle_signals(user: Any) -> int:
    """Lets a call go on. Python runs the handlers of pending signals when this is entered on its main thread: Ctrl-C
    raises KeyboardInterrupt, and the call ends."""
    return 0


_OTHER_NAMES = {"inner": "pattern"}  # of arguments of C, here


def check(status: int) -> None:
    """Raises what the library says of the call that just ended on this thread with this status."""
    if status == lib.SPATTN_OK:
        return
    if status == lib.SPATTN_E_CANCELLED and _raised.error is not None:
        error, _raised.error = _raised.error, None
        raise error
    error = sized("spattn_error")
    lib.spattn_last_error(error)
    kind = _ERRORS.get(status) or _ERRORS.get(status // 1000 * 1000) or SparseAttentionError
    named = string(error.argument)
    argument = _OTHER_NAMES.get(named, named)
    message = string(error.message).replace("NULL", "None")  # Python's name of what is not there
    message = message.replace(f"argument {named} ", f"argument {argument} ")
    raise kind(message, string(lib.spattn_status_name(status)), argument)


def string(text: Any) -> str:
    """A char* of the library as str."""
    decoded: str = ffi.string(text).decode()
    return decoded


def integer(value: Any, argument: str) -> int:
    """The value as a C integer of 64 bits.

    Raises DTypeError for what is no integer, ArgumentError for one that needs more bits.
    """
    try:
        number = operator.index(value)
    except TypeError:
        message = f"argument {argument} is {value!r}; accepted: an integer"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument) from None
    if not -(1 << 63) <= number < 1 << 63:
        message = f"argument {argument} is {number}; accepted: integers of 64 bits"
        raise ArgumentError(message, "SPATTN_E_RANGE", argument)
    return number


def real(value: Any, argument: str) -> float:
    """The value as a C double. Raises DTypeError for what is no number."""
    try:
        if not isinstance(value, (str, bytes)):  # which float reads
            return float(value)
    except (TypeError, ValueError):
        pass
    raise DTypeError(f"argument {argument} is {value!r}; accepted: a number", "SPATTN_E_DTYPE", argument)


def integers_of(**values: Any) -> list[int]:
    """Arguments of a C function that are integers, under their names there. Raises as integer()."""
    return [integer(value, name) for name, value in values.items()]


# The C name of the argument that such a struct is.
_ARGUMENTS = {
    "spattn_problem": "problem",
    "spattn_extent": "extent",
    "spattn_context_options": "options",
    "spattn_bigbird": "params",
    "spattn_xref": "params",
    "spattn_sharding_options": "options",
}


def sized(struct: str, **fields: Any) -> Any:
    """A struct that starts with its size; fields that are not given are 0, the default of all of them.

    Raises DTypeError, ArgumentError for what is no number of the field's kind: .argument is "problem.heads_q".
    """
    result = ffi.new(f"{struct} *")
    result.struct_size = ffi.sizeof(struct)
    for name, value in fields.items():
        try:
            setattr(result, name, value)
        except (TypeError, OverflowError):
            read = real if isinstance(getattr(result, name), float) else integer
            argument = f"{_ARGUMENTS.get(struct, struct)}.{name}"
            try:
                setattr(result, name, read(value, argument))
            except OverflowError:
                message = f"argument {argument} is {value!r}; accepted: integers that its C field can hold"
                raise ArgumentError(message, "SPATTN_E_RANGE", argument) from None
    return result


def own(kind: str, function: Callable[..., int], *arguments: Any) -> Any:
    """The handle that function makes, released when Python forgets it; kind is "spattn_plan" and the like."""
    result = ffi.new(f"{kind} **")
    check(function(*arguments, result))
    return ffi.gc(result[0], getattr(lib, f"{kind}_release"))


def read_bytes(function: Callable[..., int], handle: Any) -> bytes:
    """What a function in two-call form writes: the length first, then the bytes."""
    size = size_of_bytes(function, handle)
    buffer = ffi.new("char[]", size)
    check(function(handle, buffer, size, ffi.new("size_t *")))
    written: bytes = ffi.buffer(buffer)[:]
    return written


def size_of_bytes(function: Callable[..., int], handle: Any) -> int:
    """How many bytes it would write."""
    needed = ffi.new("size_t *")
    check(function(handle, ffi.NULL, 0, needed))
    size: int = needed[0]
    return size


def read_text(function: Callable[..., int], handle: Any) -> str:
    """The same for a text, without its final 0."""
    return read_bytes(function, handle)[:-1].decode()


class OfThisProcess:
    """What never changes, so that copies are the thing itself, and holds what no other process has."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        kind = type(self).__name__
        raise TypeError(f"a {kind} is not pickled; accepted: patterns, of which a process makes a {kind} of its own")


class Context(OfThisProcess):
    """Where plans are made and run: a device, its threads, and a cache of plans.

    device      "cpu", "cuda" or "cuda:1"; None is the first GPU that has kernels in this build, else the CPU
    threads     of the CPU; 0 is all that this process may use. Results never depend on it, bit for bit
    plan_cache  plans kept for equal patterns and problems; 0 is 64, -1 is none. Together they hold 256 MiB at most, or
                4 MiB for each of more than 64; where large ones are more, those that were used last are kept

    Ctrl-C, and any signal whose handler raises, ends what makes a plan, and a run on the CPU: the call raises what the
    handler raised. A copy is the context itself; it is not pickled.

    Raises ArgumentError for a device, a number of threads or a cache that cannot be, NoGPUError.
    """

    def __init__(self, device: str | None = None, threads: int = 0, plan_cache: int = 0):
        options = sized("spattn_context_options", cpu_threads=threads, plan_cache=plan_cache, cancel=handle_signals)
        if device is not None:
            options.device.type, options.device.index = _read_device(device)
        self._handle = own("spattn_context", lib.spattn_context_create, options)
        self._options = f"device={device!r}, threads={threads}, plan_cache={plan_cache}"
        self._plan_cache = plan_cache
        self._look_up: Callable[..., Any] | None = None  # the plans that attention() used last: _plans.find

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options})"


def _read_device(text: str) -> tuple[int, int]:
    found = re.fullmatch("(cpu|cuda)(?::([0-9]{1,9}))?", text) if isinstance(text, str) else None
    if found is None:
        raise ArgumentError(
            f"Context: device is {text!r}; accepted: 'cpu', 'cuda', 'cuda:N'", argument="options.device"
        )
    return lib.SPATTN_CPU if found[1] == "cpu" else lib.SPATTN_CUDA, int(found[2] or 0)


_defaults: dict[tuple[str, int], Context] = {}  # by device and threads
# A child made by fork has none of its parent's threads: it makes a context of its own.
os.register_at_fork(after_in_child=_defaults.clear)


def default_context(device: str = "cpu") -> Context:
    """The context of calls that name none, with all defaults, made on first use: the CPU's, or that of "cuda:0"."""
    return context_with(device, 0)


def context_with(device: str, threads: int) -> Context:
    """The context of calls that name none, and how many threads the CPU's has."""
    key = device, threads
    # Of two threads that make one at the same time, both get the one that setdefault has kept.
    return _defaults.get(key) or _defaults.setdefault(key, Context(device, threads))


def required_context(context: Any) -> Context:
    """The context. Raises DTypeError for what is none."""
    if not isinstance(context, Context):
        message = f"argument context is {type(context).__name__}; accepted: a sparseattn.Context, or None"
        raise DTypeError(message, "SPATTN_E_DTYPE", "context")
    return context


def version() -> str:
    """Version of the loaded library, "0.1.0"."""
    number = lib.spattn_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def build_json() -> str:
    """Compiler, kernels' architectures and features of the loaded library: one JSON object."""
    return string(lib.spattn_build_json())


def kernels() -> dict[str, bool]:
    """Names of the kernel rows, best first, and whether this machine can run each."""
    return {
        string(lib.spattn_kernel_name(row)): bool(lib.spattn_kernel_runs_here(row))
        for row in range(lib.spattn_kernel_count())
    }
