# SPDX-License-Identifier: MIT
"""The structs of calls, kept for the next ones, and the scratch of the host."""

from __future__ import annotations

import threading
from typing import Any

from ._core import ffi, lib, sized


_new = ffi.new_allocator(should_clear_after_alloc=False)


class HostMemory:
    """Scratch of the host, and where it begins."""

    def __init__(self, size: int):
        self.size = size
        self._bytes = _new("char[]", size)
        self.address = int(ffi.cast("uintptr_t", self._bytes))


# Bytes. To take a larger piece from the system anew is nothing beside the calls that need one, and nobody wants as much
# kept for each thread.
MOST_KEPT = 256 << 20


class _Scratch(threading.local):
    """Memory for the calls of one thread: it grows to the largest workspace up to MOST_KEPT that a call there needed."""

    memory: HostMemory | None = None


_of_thread = _Scratch()

FORWARD, BACKWARD = lib.SPATTN_OP_FORWARD, lib.SPATTN_OP_BACKWARD
_CALLS = {
    FORWARD: ("spattn_forward_args", lib.spattn_forward),
    BACKWARD: ("spattn_backward_args", lib.spattn_backward),
}


class Frame:
    """The structs of one call, kept for the next: of an array whose form is that of the last, only the address is new.

    args      the struct of the call, and function, which takes it
    size      bytes of scratch that it takes, those for its alignment included
    tensors   argument -> the form that the array had, its spattn_tensor*, or None, and where that has its address
    forms     the forms of q, k and v one after the other, and what takes their addresses, where the last call had no
              other array to read and read these in place; None after all other calls
    """

    __slots__ = ("args", "function", "size", "tensors", "forms", "_align", "_structs", "_workspace", "_scratch")

    def __init__(self, op: int, size: int, align: int):
        name, self.function = _CALLS[op]
        self.args = sized(name, workspace_bytes=size)
        self.size, self._align = size + align, align
        self.tensors: dict[str, tuple[Any, Any, Any]] = {}
        self.forms: tuple[tuple[Any, ...], tuple[Any, Any, Any]] | None = None
        self._scratch = 0  # where that of the last call began
        self._structs: dict[str, Any] = {}
        self._workspace = ffi.cast("uintptr_t *", ffi.addressof(self.args, "workspace"))

    def set(self, name: str, form: Any, tensor: Any, is_buffer: bool = False) -> Any:
        """Makes the tensor an argument, and returns where its address is to be put; is_buffer: ffi.from_buffer may."""
        place = ffi.cast("uintptr_t *", tensor)  # data is its first field
        self._structs[name] = tensor
        self.tensors[name] = (form, tensor if is_buffer else None, place)
        setattr(self.args, name, tensor)
        return place

    def together(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The forms of q, k and v one after the other, and their tensors."""
        forms, structs, _ = zip(*(self.tensors[name] for name in ("q", "k", "v")))
        return sum(forms, ()), structs

    def clear(self, name: str) -> None:
        if name in self.tensors:
            del self.tensors[name], self._structs[name]
            setattr(self.args, name, ffi.NULL)

    def use_scratch(self, address: int) -> None:
        """Where the call's scratch begins: size bytes of the plan's device."""
        if address != self._scratch:
            self._scratch = address
            self._workspace[0] = address + -address % self._align

    def run_with(self, address: int, plan: Any) -> int:
        """The status of the call, of a plan's handle, with the scratch that begins there."""
        self.use_scratch(address)
        status: int = self.function(plan, self.args)
        return status

    def run_on_host(self, plan: Any) -> int:
        """The same with the scratch of this thread."""
        # Taken, not shared: should Python code run on this thread before it is given back, that gets memory of its own.
        kept, _of_thread.memory = _of_thread.memory, None
        memory = kept if kept is not None and kept.size >= self.size else HostMemory(self.size)
        status = self.run_with(memory.address, plan)
        _of_thread.memory = memory if memory.size <= MOST_KEPT else kept
        return status
