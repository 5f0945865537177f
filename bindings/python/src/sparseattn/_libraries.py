# SPDX-License-Identifier: MIT
"""Whose an array is: attention of an array of torch, JAX, CuPy and others is that of their own module here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core import UnsupportedError


def module_of(array: Any) -> Any:
    """The module of this package for the library that the array is of; None for NumPy, and for what it alone can read.

    Imports no library: one that nobody has imported has made no array.
    """
    module = None
    if not TYPE_CHECKING and not isinstance(array, np.ndarray):  # checking a program with NumPy alone reads no torch
        # These are statements, and not importlib's function, because torch.compile follows them.
        if isinstance(array, getattr(sys.modules.get("torch"), "Tensor", ())):
            from . import torch as module
        elif isinstance(array, getattr(sys.modules.get("jax"), "Array", ())):
            from . import jax as module
        elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            from . import dlpack as module
    return module


def options_for(module: Any, context: Any, scales: dict[str, Any] | None = None, **only_numpy: Any) -> dict[str, Any]:
    """The context, and scales of float8 that are not None, as options of the module's functions.

    Raises UnsupportedError for what they have not, where it is given: .argument is its name.
    """
    takes_context = module.__name__ == f"{__package__}.torch"
    takes_scales = module.__name__ != f"{__package__}.dlpack"
    given = only_numpy if takes_context else {"context": context, **only_numpy}
    scales = {name: array for name, array in (scales or {}).items() if array is not None}
    for name, value in (given if takes_scales else {**scales, **given}).items():
        if value is not None and value is not False:
            message = f"argument {name} is given, and {module.__name__} has none; accepted: NumPy arrays with {name}"
            raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", name)
    return {"context": context, **scales} if takes_context else scales
