# SPDX-License-Identifier: MIT
"""New tokens of a cache of tensors, written on their device."""

from __future__ import annotations

from typing import Any

import torch

from .._append import AppendCall, append_problem
from .._core import ArgumentError, Context, required_context
from ._attention import refuse_transforms
from ._tensors import (
    code_of,
    context_of,
    outside_of_graphs,
    refuse_gradients,
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
    axes: str = "bshd",
    context: Context | None = None,
) -> None:
    """sparseattn.cache_append of tensors on one device, in torch's current stream there.

    On a GPU it is one kernel, and the host waits for nothing. CUDA graphs may capture it once it was called, or a plan
    of a cache was made, on that device.

    Raises ArgumentError where a tensor requires a gradient, but for torch.no_grad(), and as sparseattn.cache_append.
    """
    outside_of_graphs(_cache_append, k_new, v_new, k, v, starts, counts, page_table, query_offsets, axes, context)


def _cache_append(k_new: Any, v_new: Any, k: Any, v: Any, *others: Any) -> None:
    *numbers, axes, context = others
    written = {"k_new": k_new, "v_new": v_new, "k": k, "v": v}
    given = written | dict(zip(("starts", "counts", "page_table", "query_offsets"), numbers))
    for name, x in given.items():
        if x is not None or name in ("k_new", "k"):
            require_tensor(x, name)
    for name in ("k", "v"):
        if given[name] is not None and given[name].is_neg():
            message = f"argument {name} has a sign to come; accepted: tensor.resolve_neg()"
            raise ArgumentError(message, "SPATTN_E_LAYOUT", name)
    refuse_gradients("cache", WITHOUT_GRADIENTS, **written)
    refuse_transforms(**written)
    given = {name: x if x is None else x.detach().resolve_neg() for name, x in given.items()}
    Append(given, axes, context).run(given)


class Append:
    """The call of tensors of these forms, or None; others of the same forms may take their places."""

    def __init__(self, given: dict[str, Any], axes: str, context: Context | None):
        k, v, table = given["k"], given["v"], given["page_table"]
        shapes = [x if x is None else tuple(x.shape) for x in (given["k_new"], k, v, table)]
        problem = append_problem(shapes, axes, code_of(k.dtype, "k"))
        structs = {name: x if x is None else struct_of(x, name) for name, x in given.items()}
        self._call = AppendCall(context_of(k) if context is None else required_context(context), problem, structs)
        self._places = [(name, self._call.place(name)) for name, x in given.items() if x is not None]
        self._device = k.device

    def run(self, given: dict[str, Any]) -> None:
        for name, place in self._places:
            place[0] = given[name].data_ptr()
        self._call.run(stream_on(self._device))
