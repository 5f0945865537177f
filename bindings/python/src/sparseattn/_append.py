# SPDX-License-Identifier: MIT
"""New tokens of a cache, of any array library: the structs of a call, and calls of NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import FLOAT8, integers, tensor_in, tensor_out
from ._core import Context, ShapeError, UnsupportedError, check, default_context, ffi, lib, required_context, sized
from ._libraries import module_of
from ._problem import make_problem, sizes_of


def append_problem(shapes: list[Any], axes: str, dtype: tuple[int, int], cache_dtype: tuple[int, int]) -> Any:
    """The spattn_problem* of a call; shapes of k_new, k, v and page_table, None where there is none of the last two.

    dtype is that of k_new, cache_dtype that of k: code and bits. Raises ShapeError and ArgumentError as sizes_of.
    """
    k_new, k, v, page_table = shapes
    if axes in ("bshd", "bhsd", "thd") and len(k_new) != len(axes):
        message = f"argument k_new has shape {list(k_new)}; accepted: as many axes as {axes!r} has letters"
        raise ShapeError(message, "SPATTN_E_SHAPE", "k_new")
    sizes = sizes_of(k_new, k, v, axes, None, page_table)
    sizes |= {"heads_q": sizes["heads_kv"], "head_dim": k[-1]}
    sizes |= {"head_dim_v": k[-1]} if v is None else {}
    # Where rows are written as they are, those of another dtype than the cache are to blame.
    return make_problem(dtype if cache_dtype == FLOAT8 else cache_dtype, **sizes, starts=True, cache_dtype=cache_dtype)


class AppendCall:
    """The structs of a call, which live as long as it does; tensors: argument -> its spattn_tensor*, or None."""

    def __init__(self, context: Context, problem: Any, tensors: dict[str, Any], choose_scales: bool):
        self._context, self._problem, self._tensors = context, problem, tensors
        self._args = sized("spattn_cache_append_args", **{name: x for name, x in tensors.items() if x is not None})
        self._args.flags = lib.SPATTN_APPEND_SCALES if choose_scales else 0

    def place(self, name: str) -> Any:
        """Where a tensor has its address, which may be that of another one in the next run."""
        return ffi.cast("uintptr_t *", self._tensors[name])  # data is its first field

    def run(self, stream: Any = ffi.NULL) -> None:
        self._args.stream = stream
        check(lib.spattn_cache_append(self._context._handle, self._problem, self._args))


def cache_append(
    k_new: Any,
    v_new: Any,
    k: Any,
    v: Any,
    *,
    starts: Any,
    counts: Any = None,
    page_table: Any = None,
    query_offsets: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    choose_scales: bool = False,
    axes: str = "bshd",
    context: Context | None = None,
) -> None:
    """Writes new tokens into a cache, where plans with starts read them: row i of entry b is token starts[b] + i.

    k_new   [batch, n, heads_kv, head_dim] in these axes; with "thd" [tokens, heads_kv, head_dim] of all entries
    v_new   as k_new, with head_dim_v; None where values lie in keys
    k       [batch, seq_k, heads_kv, head_dim], or [pages, page_size, heads_kv, head_dim] with a page_table, as
            Plan.forward has them. Written in place. Of the dtype of k_new and v_new, or float8_e4m3fn of ml_dtypes
    v       as k, with head_dim_v; None where values lie in keys
    starts  int32 or int64 [batch]
    counts  int32 or int64 [batch]: only the last counts[b] rows of entry b are written, as where texts of several
            lengths are padded in front. None: all. Not with "thd"
    page_table     int32 or int64 [batch, seq_k / page_size]: token t of entry b is token t % page_size of page
                   page_table[b, t // page_size]
    query_offsets  int32 or int64 [batch + 1], with "thd": rows query_offsets[b] up to query_offsets[b + 1] are those of
                   entry b, none or any number; those around all are not written
    k_scales       float32 [batch, seq_k, heads_kv], or [pages, page_size, heads_kv], as k without head_dim: of a float8
                   cache, which receives k_new divided by the scale of each row. What is beyond 448 becomes 448. None: 1
    v_scales       as k_scales; None where values lie in keys
    choose_scales  the call chooses the scale of each row that it writes, its largest magnitude divided by 448, or 1
                   where all are 0 or one is not finite, and writes it to k_scales and v_scales

    What has no place is not written: tokens outside [0, seq_k), and those of pages outside [0, pages). Tensors of torch
    are written on their device, in torch's current stream. PagedAttention (https://arxiv.org/abs/2309.06180).

    Raises ShapeError, DTypeError, ArgumentError: .argument is the name above; UnsupportedError for arrays of other
    libraries.
    """
    if type(k) is not np.ndarray and (module := module_of(k)) is not None:
        if not hasattr(module, "cache_append"):
            kind = f"{type(k).__module__}.{type(k).__name__}"
            message = f"argument k is {kind}; accepted: arrays of NumPy, tensors of torch"
            raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "k")
        numbers = {"counts": counts, "page_table": page_table, "query_offsets": query_offsets}
        scales = {"k_scales": k_scales, "v_scales": v_scales, "choose_scales": choose_scales}
        module.cache_append(k_new, v_new, k, v, starts=starts, **numbers, **scales, axes=axes, context=context)
        return
    rows, written = {"k_new": k_new, "v_new": v_new}, {"k": k, "v": v}
    numbers = {"starts": starts, "counts": counts, "page_table": page_table, "query_offsets": query_offsets}
    tensors: dict[str, Any] = {}
    tensors |= {name: x if x is None and name == "v_new" else tensor_in(x, name) for name, x in rows.items()}
    tensors |= {name: x if x is None and name == "v" else tensor_out(x, name) for name, x in written.items()}
    tensors |= {name: x if x is None else integers(x, name) for name, x in numbers.items()}
    for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
        tensors[name] = x if x is None else (tensor_out if choose_scales else tensor_in)(x, name)
    of_shapes = (tensors[name] for name in ("k_new", "k", "v", "page_table"))
    shapes = [x if x is None else tuple(x.shape[0 : x.ndim]) for x in of_shapes]
    dtypes = [(x.dtype.code, x.dtype.bits) for x in (tensors["k_new"], tensors["k"])]
    problem = append_problem(shapes, axes, *dtypes)
    context = default_context() if context is None else required_context(context)
    AppendCall(context, problem, tensors, choose_scales).run()
