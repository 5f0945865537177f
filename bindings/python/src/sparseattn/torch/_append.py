# SPDX-License-Identifier: MIT
"""New tokens of a cache of tensors, written on their device."""

from __future__ import annotations

from typing import Any

import torch

from .._append import AppendCall, append_problem
from .._core import ArgumentError, Context, required_context
from ._tensors import (
    code_of,
    context_of,
    note_write,
    outside_of_graphs,
    refuse_gradients,
    refuse_transforms,
    require_tensor,
    stream_on,
    struct_of,
)

WITHOUT_GRADIENTS = "tensors without, or a call under torch.no_grad()"


def cache_append(
    k_new: torch.Tensor,
    v_new: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    starts: torch.Tensor,
    counts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    query_offsets: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    choose_scales: bool = False,
    axes: str = "bshd",
    context: Context | None = None,
) -> None:
    """sparseattn.cache_append of tensors on one device, in torch's current stream there.

    A float8 cache is of torch.float8_e4m3fn.

    On a GPU it is one kernel, and the host waits for nothing. CUDA graphs may capture it once it was called, or a plan
    of a cache was made, on that device.

    Raises ArgumentError where a tensor requires a gradient, but for torch.no_grad(), and as sparseattn.cache_append.
    """
    floats = {"k_new": k_new, "v_new": v_new, "k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales}
    numbers = {"starts": starts, "counts": counts, "page_table": page_table, "query_offsets": query_offsets}
    outside_of_graphs(_cache_append, floats, numbers, choose_scales, axes, context)


def _cache_append(
    floats: dict[str, Any], numbers: dict[str, Any], choose_scales: bool, axes: str, context: Context | None
) -> None:
    given = floats | numbers
    for name, x in given.items():
        if x is not None or name in ("k_new", "k"):
            require_tensor(x, name)
    for name in ("k", "v", "k_scales", "v_scales") if choose_scales else ("k", "v"):
        if given[name] is not None and given[name].is_neg():
            message = f"argument {name} has a sign to come; accepted: tensor.resolve_neg()"
            raise ArgumentError(message, "SPATTN_E_LAYOUT", name)
    refuse_gradients("cache", WITHOUT_GRADIENTS, **floats)
    refuse_transforms(**floats)
    given = {name: x if x is None else x.detach().resolve_neg() for name, x in given.items()}
    Append(given, axes, context, choose_scales).run(given)


class Append:
    """The call of tensors of these forms, or None; others of the same forms may take their places."""

    def __init__(self, given: dict[str, Any], axes: str, context: Context | None, choose_scales: bool):
        k_new, k, v, table = (given[name] for name in ("k_new", "k", "v", "page_table"))
        shapes = [x if x is None else tuple(x.shape) for x in (k_new, k, v, table)]
        problem = append_problem(shapes, axes, code_of(k_new.dtype, "k_new"), code_of(k.dtype, "k"))
        structs = {name: x if x is None else struct_of(x, name) for name, x in given.items()}
        context = context_of(k) if context is None else required_context(context)
        self._call = AppendCall(context, problem, structs, choose_scales)
        self._places = [(name, self._call.place(name)) for name, x in given.items() if x is not None]
        self._written = ("k", "v", "k_scales", "v_scales") if choose_scales else ("k", "v")
        self._device = k.device

    def run(self, given: dict[str, Any]) -> None:
        for name, place in self._places:
            place[0] = given[name].data_ptr()
        self._call.run(stream_on(self._device))
        for name in self._written:
            note_write(given[name])
