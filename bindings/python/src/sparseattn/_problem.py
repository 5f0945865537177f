# SPDX-License-Identifier: MIT
"""What attention of any array library is called with, as a spattn_problem: shapes, dtype and options."""

from __future__ import annotations

import re
from typing import Any, Collection

from ._core import ArgumentError, DTypeError, ShapeError, ffi, lib, sized

_AXES = {"bshd": lib.SPATTN_BSHD, "bhsd": lib.SPATTN_BHSD, "thd": lib.SPATTN_THD}
_AXIS_NAMES = {"b": "batch", "s": "seq", "t": "tokens", "h": "heads", "d": "head_dim"}


def read_axes(axes: str) -> int:
    if not isinstance(axes, str) or axes not in _AXES:
        accepted = ", ".join(map(repr, _AXES))
        raise ArgumentError(f"axes is {axes!r}; accepted: {accepted}", "SPATTN_E_RANGE", "problem.axes")
    code: int = _AXES[axes]
    return code


def sizes_of(
    q: Any, k: Any, v: Any, axes: str, head_dim_v: int | None = None, page_table: Any = None
) -> dict[str, Any]:
    """The options of make_problem, and of a Plan, that the shapes of q, k and v determine.

    v           None where values lie in keys
    head_dim_v  of such values; None is head_dim
    page_table  the shape of that, where k and v are pools of pages: their batch and seq are pages and page_size. With
                "thd" they are as with "bshd", and entries those of page_table

    Raises ArgumentError for axes that are not known and for a head_dim_v of 0, ShapeError for a shape that has not as
    many of them, and for a v whose last is 0 or not head_dim_v: .argument names it.
    """
    read_axes(axes)
    axes_k = "bshd" if axes == "thd" and page_table is not None else axes
    sizes = {}
    for name, shape, order in (("q", q, axes), ("k", k, axes_k), ("v", v, axes_k)):
        if shape is not None and len(shape) != len(order):
            names = ", ".join(_AXIS_NAMES[axis] for axis in order)
            message = f"argument {name} has shape {list(shape)}; accepted: [{names}]"
            raise ShapeError(message, "SPATTN_E_SHAPE", name)
        sizes[name] = dict(zip(order, shape or ()))
    of_q, of_k = sizes["q"], sizes["k"]
    seq_q, seq_k = (of.get("t", of.get("s")) for of in (of_q, of_k))
    if v is None:
        head_dim_v = of_q["d"] if head_dim_v is None else head_dim_v
    elif head_dim_v is None or head_dim_v == sizes["v"]["d"]:
        head_dim_v = sizes["v"]["d"]
    else:
        message = f"argument v has shape {list(v)}; accepted: head_dim_v {head_dim_v} as its last size"
        raise ShapeError(message, "SPATTN_E_SHAPE", "v")
    if head_dim_v == 0 and of_q["d"] != 0:  # which a problem takes for head_dim
        if v is None:
            raise ArgumentError("argument head_dim_v is 0; accepted: 1 or more", "SPATTN_E_RANGE", "head_dim_v")
        raise ShapeError(f"argument v has shape {list(v)}; accepted: 1 or more as its last size", "SPATTN_E_SHAPE", "v")
    found = {
        "batch": of_q.get("b", 1),
        "heads_q": of_q["h"],
        "heads_kv": of_k["h"],
        "seq_q": seq_q,
        "seq_k": seq_k,
        "head_dim": of_q["d"],
        "head_dim_v": head_dim_v,
        "value_in_key": v is None,
        "axes": axes,
    }
    if page_table is not None:
        if len(page_table) != 2:
            message = f"argument page_table has shape {list(page_table)}; accepted: [batch, seq_k / page_size]"
            raise ShapeError(message, "SPATTN_E_SHAPE", "page_table")
        found |= {"page_size": seq_k, "seq_k": page_table[1] * seq_k}
        found |= {"batch": page_table[0]} if axes == "thd" else {}
    return found


def make_problem(
    dtype: tuple[int, int],
    *,
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    head_dim: int,
    head_dim_v: int,
    axes: str,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    value_in_key: bool = False,
    sink_logits: bool = False,
    backward: bool = False,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
    starts: bool = False,
    parents: bool = False,
    page_size: int | None = None,
    cache_dtype: tuple[int, int] | None = None,
) -> Any:
    """A spattn_problem*; dtype and cache_dtype are code and bits. The options are those of Plan.

    Raises DTypeError for an array where the options say that calls will bring one: .argument names it.
    """
    for name, will_come in (("sink_logits", sink_logits), ("starts", starts), ("parents", parents)):
        if getattr(will_come, "ndim", 0):
            message = f"argument {name} is an array; accepted: True, and the array in each call of the plan"
            raise DTypeError(message, "SPATTN_E_DTYPE", name)
    flags = {
        lib.SPATTN_PLAN_BACKWARD: backward,
        lib.SPATTN_PLAN_DETERMINISTIC: deterministic,
        lib.SPATTN_PLAN_REFERENCE: reference,
        lib.SPATTN_PLAN_Q_OFFSET: q_offset is not None,
        lib.SPATTN_PLAN_SCALE: scale is not None,
        lib.SPATTN_PLAN_VALUE_IN_KEY: value_in_key,
        lib.SPATTN_PLAN_SINK_LOGITS: sink_logits,
        lib.SPATTN_PLAN_TF32: tf32,
        lib.SPATTN_PLAN_STARTS: starts,
        lib.SPATTN_PLAN_PARENTS: parents,
    }
    problem = sized(
        "spattn_problem",
        flags=sum(flag for flag, is_set in flags.items() if is_set),
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_k=seq_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        axes=read_axes(axes),
        scale=0.0 if scale is None else scale,
        softcap=0.0 if softcap is None else softcap,
        q_offset=0 if q_offset is None else q_offset,
        page_size=page_size or 0,
    )
    problem.dtype.code, problem.dtype.bits, problem.dtype.lanes = *dtype, 1
    if cache_dtype is not None:
        problem.cache_dtype.code, problem.cache_dtype.bits, problem.cache_dtype.lanes = *cache_dtype, 1
    return problem


def shape_of_lists(pattern: str, given: Collection[str], sizes: dict[str, Any], axes: str) -> tuple[int, ...] | None:
    """The shape of indices in a call of a pattern with this text; None where it has no lists, or several kinds of them.

    given  which of indices and index_counts the call brings

    Raises ArgumentError where it should bring others: .argument names it.
    """
    # A text has each leaf under its name, whatever it is composed of. A plan reads the lists of one of them.
    leaves = set(re.findall(r"\bruntime_(?:tokens\(|blocks\((\d+),\d+,)(\d+)\)", pattern))
    if len(leaves) > 1:
        return None
    if not leaves:
        for name in given:
            message = f"argument {name} is given, and no part of {pattern} is runtime_tokens or runtime_blocks"
            raise ArgumentError(f"{message}; accepted: None", "SPATTN_E_STATE", name)
        return None
    block_q, most = (int(number or 1) for number in leaves.pop())
    rows = (sizes["seq_q"] + block_q - 1) // block_q  # as most people write it: JAX compares symbols by their texts
    shape = (sizes["batch"], rows, sizes["heads_kv"], most)[axes == "thd" :]
    if "indices" not in given:
        message = f"argument indices is missing; accepted: an array {list(shape)}, the lists of {pattern}"
        raise ArgumentError(message, "SPATTN_E_NULL", "indices")
    return shape


def row_axes(axes: str) -> tuple[int, ...]:
    """The axes of q whose sizes, in this order, are those of lse."""
    return {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "thd": (1, 0)}[axes]


def as_bytes(problem: Any) -> bytes:
    return bytes(ffi.buffer(problem))
