# SPDX-License-Identifier: MIT
"""What type checkers know of the module that cffi makes: its two names, and that a callback is called as what it is."""

from typing import Any, Callable, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

class _FFI:
    NULL: Any
    def callback(self, cdecl: str, *, error: Any = ..., onerror: Any = ...) -> Callable[[_Function], _Function]: ...
    def __getattr__(self, name: str) -> Any: ...

ffi: _FFI
lib: Any
