# SPDX-License-Identifier: MIT
"""What attention of any array library is called with, as a spattn_problem: shapes, dtype and options."""

from __future__ import annotations

from typing import Any

from ._core import ffi, lib, sized
from ._plans import _read_axes, sizes_of

_SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim", "head_dim_v")


def sizes_with(arrays: dict[str, Any], axes: str, head_dim_v: int | None) -> dict[str, Any]:
    """Sizes of q, k and, where there is one, v; head_dim_v is that of values that lie in keys."""
    sizes = sizes_of({name: array for name, array in arrays.items() if array is not None}, axes)
    return {**sizes, "head_dim_v": sizes.get("head_dim_v", head_dim_v or sizes["head_dim"])}


def make_problem(
    sizes: dict[str, Any],
    dtype: tuple[int, int],
    *,
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    value_in_key: bool = False,
    sink_logits: bool = False,
    backward: bool = False,
    deterministic: bool = False,
    reference: bool = False,
) -> Any:
    """A spattn_problem*; dtype is code and bits. The options are those of Plan."""
    flags = {
        lib.SPATTN_PLAN_BACKWARD: backward,
        lib.SPATTN_PLAN_DETERMINISTIC: deterministic,
        lib.SPATTN_PLAN_REFERENCE: reference,
        lib.SPATTN_PLAN_Q_OFFSET: q_offset is not None,
        lib.SPATTN_PLAN_SCALE: scale is not None,
        lib.SPATTN_PLAN_VALUE_IN_KEY: value_in_key,
        lib.SPATTN_PLAN_SINK_LOGITS: sink_logits,
    }
    problem = sized(
        "spattn_problem",
        flags=sum(flag for flag, is_set in flags.items() if is_set),
        scale=scale or 0.0,
        softcap=softcap or 0.0,
        q_offset=q_offset or 0,
        axes=_read_axes(axes),
        **{name: sizes[name] for name in _SIZES},
    )
    problem.dtype.code, problem.dtype.bits, problem.dtype.lanes = *dtype, 1
    return problem


def row_axes(axes: str) -> tuple[int, ...]:
    """The axes of q whose sizes, in this order, are those of lse."""
    return {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "thd": (1, 0)}[axes]


def as_bytes(problem: Any) -> bytes:
    return bytes(ffi.buffer(problem))
