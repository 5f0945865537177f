# SPDX-License-Identifier: MIT
"""Attention in one call, of the arrays of any library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ._arrays import as_array
from ._core import Context, default_context
from ._indexed import pattern_of_call
from ._libraries import module_of, options_for
from ._patterns import Pattern
from ._plans import Plan, find_plan
from ._problem import sizes_of

if TYPE_CHECKING:
    from typing import Literal, Protocol, TypeVar

    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._patterns import AnyPattern
    from ._plans import Lists

    class _KnowsDLPack(Protocol):
        @property
        def __dlpack__(self) -> Any: ...

    _Array = TypeVar("_Array", bound=_KnowsDLPack)  # of torch, JAX, CuPy: what comes out is of the kind of q
    # Of float8 out is bfloat16: both are of ml_dtypes, whose dtypes type checkers take for Any.
    _Number = TypeVar("_Number", bound=np.generic)

    class _Options(Lists, total=False):
        axes: Literal["bshd", "bhsd", "thd"]
        scale: float | None
        softcap: float | None
        q_offset: int | None
        head_dim_v: int | None
        deterministic: bool
        reference: bool
        tf32: bool
        context: Context | None

    class _NumPyOptions(_Options, total=False):
        out: Any


@overload
def attention(
    q: NDArray[_Number],
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[_NumPyOptions],
) -> NDArray[_Number]: ...


@overload
def attention(
    q: NDArray[_Number],
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[_NumPyOptions],
) -> tuple[NDArray[_Number], NDArray[np.float32]]: ...


@overload
def attention(
    q: NDArray[_Number],
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[True],
    **options: Unpack[_NumPyOptions],
) -> tuple[NDArray[_Number], NDArray[np.float32]]: ...


@overload
def attention(
    q: NDArray[_Number],
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
    **options: Unpack[_NumPyOptions],
) -> tuple[NDArray[_Number], NDArray[np.float32], NDArray[np.float32]]: ...


@overload
def attention(
    q: _Array,
    k: _Array,
    v: _Array | None,
    pattern: AnyPattern,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> _Array: ...


@overload
def attention(
    q: _Array,
    k: _Array,
    v: _Array | None,
    pattern: AnyPattern,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[_Array, _Array]: ...


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
    context: Context | None = None,
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    q_scales: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    out: NDArray[Any] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Any:
    """Sparse attention in one call: Plan.forward of plan(pattern, q, k, v, ...).

    The library that q is an array of says who computes, and the result is an array of it: sparseattn.torch.attention,
    with gradients, where q is a tensor; sparseattn.jax.attention for JAX's arrays, also under its transformations;
    sparseattn.dlpack.attention for those of CuPy and others that know DLPack. All else is read by NumPy, and NumPy's
    arrays alone may have out and return_max_logits.

    q        [batch, seq_q, heads_q, head_dim], float32, float16, float64 or bfloat16 (ml_dtypes). Mind the order: an
             array [batch, heads, seq, head_dim] is taken for one of few tokens and many heads unless axes says "bhsd".
             Or float8_e4m3fn (ml_dtypes), as k and v then: out is bfloat16
    k        [batch, seq_k, heads_kv, head_dim]
    v        [batch, seq_k, heads_kv, head_dim_v]; None: its values are the first head_dim_v of k
    pattern  a Pattern, its text, or a mask: bool [seq_q, seq_k], [heads, seq_q, seq_k] or [batch, heads, seq_q, seq_k],
             True where a key is seen. seq_q may be 1 in a mask of keys alone, as of padding [batch, 1, 1, seq_k]
    axes     "bshd"; "bhsd" for heads before seq; "thd" for packed [tokens, heads, head_dim]
    q_scales, k_scales, v_scales  with float8: float32, shaped as q, k and v without head_dim, what the elements of each
             row are multiplied by; None is 1. v_scales is None where v is. A scale that all rows of q, or of k, share
             is best a factor of the option scale, and no array: then no scales are read

    The other options are those of Plan, and indices, index_counts, sink_logits, out and return_... those of
    Plan.forward. Returns out [batch, seq_q, heads_q, head_dim_v], or a tuple such as (out, lse). The context remembers
    plans, so equal calls plan once.

    Raises ShapeError, DTypeError, ArgumentError, UnsupportedError: .argument names what was wrong.

        out = attention(q, k, v, causal() & (sink(4) | window(1023, 0)))
    """
    scales = {"q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
    if type(q) is not np.ndarray and (module := module_of(q)) is not None:
        return module.attention(
            q,
            k,
            v,
            pattern,
            axes=axes,
            scale=scale,
            softcap=softcap,
            q_offset=q_offset,
            head_dim_v=head_dim_v,
            deterministic=deterministic,
            reference=reference,
            tf32=tf32,
            indices=indices,
            index_counts=index_counts,
            sink_logits=sink_logits,
            return_lse=return_lse,
            **options_for(module, context, scales, out=out, return_max_logits=return_max_logits),
        )
    options = (axes, scale, softcap, q_offset, head_dim_v)
    flags = (sink_logits is not None, False, deterministic, reference, tf32)
    made, q, k, v = _plan_of(q, k, v, pattern, options, flags, context)
    return made.forward(
        q,
        k,
        v,
        indices=indices,
        index_counts=index_counts,
        sink_logits=sink_logits,
        **scales,
        out=out,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    pattern: AnyPattern,
    *,
    dlse: Any = None,
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
    context: Context | None = None,
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    q_scales: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
) -> tuple[Any, ...]:
    """Gradients (dq, dk, dv) of attention(q, k, v, pattern, return_lse=True, ...), which gave out and lse.

    With sink_logits (dq, dk, dv, dsink_logits); with v None dv is None; with float8 all three are bfloat16:
    Plan.backward. Arrays of torch, JAX and others as in attention; options and errors, too.
    """
    scales = {"q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
    if type(q) is not np.ndarray and (module := module_of(q)) is not None:
        found: tuple[Any, ...] = module.attention_backward(
            q,
            k,
            v,
            out,
            lse,
            dout,
            pattern,
            dlse=dlse,
            axes=axes,
            scale=scale,
            softcap=softcap,
            q_offset=q_offset,
            head_dim_v=head_dim_v,
            deterministic=deterministic,
            reference=reference,
            tf32=tf32,
            indices=indices,
            index_counts=index_counts,
            sink_logits=sink_logits,
            **options_for(module, context, scales),
        )
        return found
    options = (axes, scale, softcap, q_offset, head_dim_v)
    flags = (sink_logits is not None, True, deterministic, reference, tf32)
    made, q, k, v = _plan_of(q, k, v, pattern, options, flags, context)
    more = {"dlse": dlse, "indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
    return made.backward(q, k, v, out, lse, dout, **more, **scales)


def _plan_of(
    q: Any, k: Any, v: Any, pattern: AnyPattern, options: tuple[Any, ...], flags: tuple[bool, ...], context: Any
) -> tuple[Plan, Any, Any, Any]:
    """The plan of a call, found again, and q, k and v as NumPy's arrays; options and flags are those of find_plan."""
    q, k, v = as_array(q, "q"), as_array(k, "k"), v if v is None else as_array(v, "v")
    shapes = q.shape, k.shape, None if v is None else v.shape
    if not isinstance(pattern, (Pattern, str)):
        sizes = sizes_of(*shapes, options[0], options[-1])
        pattern = pattern_of_call(pattern, sizes["seq_q"], sizes["seq_k"])
    context = default_context() if context is None else context
    return find_plan(Plan, context, pattern, None, q.dtype, shapes, *options, *flags), q, k, v
