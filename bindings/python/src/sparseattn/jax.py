# SPDX-License-Identifier: MIT
"""Attention of JAX arrays, with gradients, under jit, grad and vmap; and of queries on a cache.

    import sparseattn.jax as saj
    out = saj.attention(q, k, v, "causal & window(1023,0)")       # inside jit, too
    dq = jax.grad(lambda q: saj.attention(q, k, v, "causal").sum())(q)
    out = saj.decode(q, k_pages, v_pages, "causal & window(1023,0)", starts, page_table=table)

Calls are XLA's custom calls (https://docs.jax.dev/en/latest/ffi.html), on the CPU and on NVIDIA GPUs; there they run in
XLA's stream, with its memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.export import is_symbolic_dim

from ._arrays import FLOATS, dtype_code, read_dtype
from ._core import ArgumentError, DTypeError, ShapeError, UnsupportedError, default_context, ffi, lib, own
from ._indexed import pattern_of_call
from ._jax_calls import OPTIONAL, SCALES, Call, invoke, register, vary_alike, which
from ._patterns import as_pattern
from ._problem import as_bytes, make_problem, row_axes, shape_of_lists, sizes_of

if TYPE_CHECKING:
    from ._patterns import AnyPattern, Pattern


class _Operands(NamedTuple):
    """Arrays, in the order in which the handlers read them; None is absent."""

    q: Any
    k: Any
    v: Any
    sink_logits: Any
    indices: Any = None  # from here on as in OPTIONAL
    index_counts: Any = None
    q_scales: Any = None
    k_scales: Any = None
    v_scales: Any = None

    def dense(self) -> dict[str, Any]:
        return {name: array for name, array in zip(self._fields[:4], self) if array is not None}

    def optional(self) -> dict[str, Any]:
        return {name: array for name, array in zip(self._fields[4:], self[4:]) if array is not None}


def _with_backward(call: Call) -> Call:
    """The call whose plan has a backward: one plan then serves both passes."""
    return call.changed(flags=call.read_problem().flags | lib.SPATTN_PLAN_BACKWARD)


def _refuse(primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(
        "second derivatives of attention are not offered; accepted: first ones, by jax.grad, jax.vjp or jax.jacrev. "
        "jax.nn.dot_product_attention has second ones",
        "SPATTN_E_UNSUPPORTED",
        "dout",
    )


def _refuse_of_cache(primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(
        "decode has no derivatives; accepted: attention, which has first ones", "SPATTN_E_UNSUPPORTED", "q"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: Call, operands: _Operands) -> tuple[jax.Array, jax.Array]:
    return _compute(call, operands)


def _compute(call: Call, operands: _Operands) -> tuple[jax.Array, jax.Array]:
    out, lse = invoke("forward", call, _results(call, operands.q), operands.dense() | operands.optional(), _refuse)
    return out, lse


def _compute_and_keep(call: Call, operands: _Operands) -> tuple[jax.Array, jax.Array]:
    """What a backward reads, under names for policies of jax.checkpoint: those that a caller gives to results are of
    what comes after them."""
    out, lse = _compute(_with_backward(call), operands)
    return checkpoint_name(out, "sparseattn_out"), checkpoint_name(lse, "sparseattn_lse")


def _results(call: Call, q: Any) -> dict[str, Any]:
    """What out and lse are."""
    problem = call.read_problem()
    axes = {lib.SPATTN_BSHD: "bshd", lib.SPATTN_BHSD: "bhsd", lib.SPATTN_THD: "thd"}[problem.axes]
    return {
        "out": jax.ShapeDtypeStruct((*q.shape[:-1], problem.head_dim_v), jnp.bfloat16 if _is_float8(q) else q.dtype),
        "lse": jax.ShapeDtypeStruct(tuple(q.shape[axis] for axis in row_axes(axes)), jnp.float32),
    }


def _attention_forward(call: Call, operands: _Operands) -> Any:
    if _is_float8(operands.q):
        message = "attention of float8_e4m3fn has no derivatives, which would be of float8, too; accepted: float8_attention"
        raise UnsupportedError(f"{message} of arrays that are not rounded yet", "SPATTN_E_UNSUPPORTED", "q")
    out, lse = _compute_and_keep(call, operands)
    return (out, lse), (operands, out, lse)


def _attention_backward(call: Call, saved: Any, gradients: Any) -> tuple[_Operands]:
    (operands, out, lse), (dout, dlse) = saved, gradients
    dense = operands.dense()
    dtypes = dict.fromkeys(dense, out.dtype) | {"sink_logits": jnp.float32}
    results = {f"d{name}": jax.ShapeDtypeStruct(x.shape, dtypes[name]) for name, x in dense.items()}
    arrays = {**dense, "out": out, "lse": lse, "dout": dout, "dlse": dlse, **operands.optional()}
    left = iter(invoke("backward", _with_backward(call), results, arrays, _refuse))
    return (_Operands(*(None if array is None else next(left) for array in operands[:4])),)


_attention.defvjp(_attention_forward, _attention_backward)


_NEEDED = ("q", "k", "x", "out", "lse", "dout")


def _read(values: Any, name: str) -> Any:
    """A JAX array, or what stands for one while JAX traces. Raises DTypeError for what is none, and None where one is
    needed."""
    if isinstance(values, jax.Array) or values is None and name not in _NEEDED:
        return values
    found = type(values).__name__
    if isinstance(values, np.ndarray):
        try:
            return jnp.asarray(values)
        except TypeError:
            found = f"an array of {values.dtype}"
    message = f"argument {name} is {found}; accepted: an array of JAX or NumPy, of a dtype that JAX has"
    raise DTypeError(message, "SPATTN_E_DTYPE", name)


def _read_as(values: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """The same for an array that must have this shape and this dtype."""
    array = _read(values, name)
    if array is not None and array.shape != shape:
        message = f"argument {name} has shape {list(array.shape)}; accepted: {list(shape)}"
        raise ShapeError(message, "SPATTN_E_SHAPE", name)
    if array is not None and array.dtype != dtype:
        raise DTypeError(f"argument {name} is {array.dtype}; accepted: {dtype}", "SPATTN_E_DTYPE", name)
    return array


def _is_float8(array: Any) -> bool:
    return bool(array is not None and array.dtype == jnp.float8_e4m3fn)


def _read_integers(values: Any, name: str, shape: tuple[int, ...]) -> Any:
    array = _read(values, name)
    if array is not None and array.dtype not in (np.int32, np.int64):
        raise DTypeError(f"argument {name} is {array.dtype}; accepted: int32, int64", "SPATTN_E_DTYPE", name)
    return _read_as(array, name, shape, None if array is None else array.dtype)


def _check(operands: _Operands, sizes: dict[str, int], axes: str) -> None:
    """Raises what the library would say of these operands, while the user's own lines are still being traced."""
    letters = {"b": "batch", "s": "seq_k", "t": "seq_k", "h": "heads_kv", "d": "head_dim"}
    k_shape = tuple(sizes[letters[axis]] for axis in axes)
    wanted = {"k": (k_shape, operands.q.dtype), "sink_logits": ((sizes["heads_q"],), np.dtype(np.float32))}
    wanted["v"] = (*k_shape[:-1], sizes["head_dim_v"]), operands.q.dtype
    for name, (shape, dtype) in wanted.items():
        _read_as(getattr(operands, name), name, shape, dtype)
    _check_scales(operands._asdict())


def _check_cache(arrays: dict[str, Any], sizes: dict[str, Any], axes: str) -> None:
    """The same of queries on a cache, before the library names the fields of a plan."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if q.dtype.name not in FLOATS:
        message = f"argument q is {q.dtype}; accepted: {', '.join(FLOATS)}"
        raise DTypeError(message, "SPATTN_E_DTYPE", "q")
    if k.dtype != q.dtype and not _is_float8(k):
        message = f"argument k is {k.dtype}; accepted: {q.dtype}, as q, or float8_e4m3fn"
        raise DTypeError(message, "SPATTN_E_DTYPE", "k")
    if not sizes["heads_q"] or not sizes["heads_kv"] or sizes["heads_q"] % sizes["heads_kv"]:
        message = f"argument q has {sizes['heads_q']} heads; accepted: multiples of those of k, {sizes['heads_kv']}"
        raise ShapeError(message, "SPATTN_E_SHAPE", "q")
    in_pages = arrays["page_table"] is not None
    rows = k.shape[:-1] if in_pages else (sizes["batch"], *k.shape[1:-1])
    _read_as(k, "k", (*rows, sizes["head_dim"]), k.dtype)
    _read_as(v, "v", (*rows, sizes["head_dim_v"]), k.dtype)
    if in_pages and not k.shape[0] and sizes["batch"] and sizes["seq_q"] and sizes["seq_k"]:
        raise ShapeError(f"argument k has shape {list(k.shape)}; accepted: pages, 1 or more", "SPATTN_E_SHAPE", "k")
    _read_as(arrays["sink_logits"], "sink_logits", (sizes["heads_q"],), np.dtype(np.float32))
    _check_scales(arrays)


def _check_scales(arrays: dict[str, Any]) -> None:
    for name in SCALES:
        scales, rows = arrays.get(name), arrays[name[0]]
        if scales is not None and not _is_float8(rows):
            message = f"argument {name} is given where {name[0]} is not float8_e4m3fn; accepted: None"
            raise ArgumentError(message, "SPATTN_E_STATE", name)
        _read_as(scales, name, () if scales is None else rows.shape[:-1], np.dtype(np.float32))


def _check_lists(pattern: Pattern, arrays: dict[str, Any], sizes: dict[str, Any], axes: str) -> None:
    """The same of the lists that come with a call."""
    given = {name: arrays[name] for name in ("indices", "index_counts") if arrays[name] is not None}
    for name, array in given.items():
        _read_integers(array, name, array.shape)  # those that are no integers are no lists at all
    shape = shape_of_lists(str(pattern), given, sizes, axes)
    if shape is None:
        return
    for name, array in given.items():
        _read_integers(array, name, shape if name == "indices" else shape[:-1])


def _require_constants(**options: Any) -> None:
    for name, value in options.items():
        is_symbol = is_symbolic_dim(value)
        if is_symbol or isinstance(value, jax.core.Tracer):
            found = f"{value}, a symbol of jax.export" if is_symbol else "an array that JAX traces"
            message = f"argument {name} is {found}; accepted: a number, constant in what is jitted"
            raise DTypeError(message, "SPATTN_E_DTYPE", name)


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    axes: str = "bshd",
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    q_scales: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    return_lse: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
) -> Any:
    """sparseattn.attention of JAX arrays: out, or (out, lse), which reverse-mode differentiation knows, once: a second
    derivative, as of jax.hessian, is refused.

    q [batch, seq_q, heads_q, head_dim], k [batch, seq_k, heads_kv, head_dim], v [batch, seq_k, heads_kv, head_dim_v] or
    None, float32, float16, bfloat16, or float64 where JAX has it enabled; axes as in sparseattn.attention. q, k, v,
    sink_logits and the lse that is returned have gradients. The pattern and the options are constants of a jitted
    function; scale, softcap, q_offset, head_dim_v, deterministic, reference and tf32 are those of sparseattn.Plan.
    indices and index_counts, the lists of runtime_tokens and runtime_blocks, are those of Plan.forward, and may be
    traced: sparseattn.topk makes such lists there, too. sink_logits is float32 [heads_q].
    Returns out [batch, seq_q, heads_q, head_dim_v], and lse float32 [batch, heads_q, seq_q].

    Where q, k and v are float8_e4m3fn, out is bfloat16, and float8_attention has gradients. Each row of a token and head stands
    for its elements times a scale: q_scales, k_scales and v_scales are float32, shaped as q, k and v without head_dim,
    and None is 1. v_scales is None where v is.

    vmap makes one larger batch of its calls, or one call after the other where the pattern differs between batch
    entries, with sinks, and with "thd". A mask for a pattern is read while JAX traces: it is a constant, too.

    Where jit finds arrays on several devices, each computes the batch entries and heads that it has, heads of keys with
    those of their queries. Where those of queries are divided further than heads_kv can be, each device has all heads
    of keys that are left, and gradients of these are added up. What is divided otherwise, say along tokens, is gathered
    first, as are batch entries or heads that a pattern tells apart. In jax.shard_map every device has batch entries, or
    heads, of its own; what lies along axes of the mesh that its axis_names leave out is gathered. Programs of jax.export
    gather what calls read that are outside of jax.shard_map.

    What the backward reads of the forward has names for policies of jax.checkpoint: save_only_these_names of
    "sparseattn_out" and "sparseattn_lse" keeps it, and attention does not run again.

    batch, seq_q and seq_k may be symbols of jax.export where the pattern has no sizes of its own, and outside of
    jax.shard_map: one program then serves all of these sizes, and makes a plan for each that it meets.

    Raises ShapeError, DTypeError, ArgumentError and UnsupportedError while JAX traces, by what a CPU would say. What a
    GPU alone refuses comes as XLA's error when the program runs.
    """
    more = {"indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
    more |= {"q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "q_offset": q_offset, "head_dim_v": head_dim_v}
    options |= {"deterministic": deterministic, "reference": reference, "tf32": tf32}
    out, lse = _attention(*_prepare({"q": q, "k": k, "v": v, **more}, pattern, axes, **options))
    return (out, lse) if return_lse else out


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
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    q_scales: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
) -> tuple[Any, ...]:
    """Gradients (dq, dk, dv) of attention(q, k, v, pattern, return_lse=True, ...), which gave out and lse.

    This is what jax.grad calls, for loops that differentiate by hand. With sink_logits (dq, dk, dv, dsink_logits), and
    dv is None where v is. dout is shaped as out, dlse as lse; None is 0. Where q, k and v are float8, gradients are
    bfloat16, of elements times scales. Shapes, options and errors as in attention.
    """
    lists = {"indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
    lists |= {"q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "q_offset": q_offset, "head_dim_v": head_dim_v}
    options |= {"deterministic": deterministic, "reference": reference, "tf32": tf32, "backward": True}
    call, operands = _prepare({"q": q, "k": k, "v": v, **lists}, pattern, axes, **options)
    dense, rows = ((form.shape, form.dtype) for form in _results(call, operands.q).values())
    given = {"out": (out, *dense), "lse": (lse, *rows), "dout": (dout, *dense), "dlse": (dlse, *rows)}
    out, lse, dout, dlse = (_read_as(array, name, *form) for name, (array, *form) in given.items())
    dlse = jnp.zeros(*rows) if dlse is None else dlse
    (found,) = _attention_backward(call, (operands, out, lse), (dout, dlse))
    return (found.q, found.k, found.v) if sink_logits is None else (found.q, found.k, found.v, found.sink_logits)


def _prepare(
    arrays: dict[str, Any],
    pattern: Any,
    axes: str,
    *,
    scale: float | None,
    softcap: float | None,
    q_offset: int | None,
    head_dim_v: int | None,
    **flags: Any,
) -> tuple[Call, _Operands]:
    """What is constant in a call, and its operands, checked; flags are deterministic, reference, tf32 and backward."""
    register()
    operands = _Operands(**{name: _read(values, name) for name, values in arrays.items()})
    q, k, v = operands[:3]
    _require_constants(scale=scale, softcap=softcap, q_offset=q_offset, head_dim_v=head_dim_v)
    sizes = _read_sizes(operands._asdict(), axes, head_dim_v)
    made, problem = _plan(
        pattern,
        read_dtype(q.dtype, "q")[1],
        sizes,
        sizes["seq_q"],
        scale=scale,
        softcap=softcap,
        q_offset=q_offset,
        sink_logits=operands.sink_logits is not None,
        **flags,
    )
    _check(operands, sizes, axes)
    _check_lists(made, operands._asdict(), sizes, axes)
    return Call(made.save(), as_bytes(problem), which(operands._asdict())), vary_alike(operands)


_OPEN = ("batch", "seq_q", "seq_k")  # sizes that may be symbols of jax.export


def _read_sizes(
    arrays: dict[str, Any], axes: str, head_dim_v: int | None, page_table: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """The sizes of a call. Raises as sizes_of, and ShapeError for a symbol of jax.export that must be a number."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    sizes = sizes_of(q.shape, k.shape, None if v is None else v.shape, axes, head_dim_v, page_table)
    for name, size in sizes.items():
        if is_symbolic_dim(size) and name not in _OPEN:
            argument = {"heads_kv": "k", "page_size": "k", "head_dim_v": "v"}.get(name, "q")
            message = f"argument {argument} has {name} {size}, a symbol of jax.export; accepted: a number, and symbols "
            raise ShapeError(f"{message}as {', '.join(_OPEN)}", "SPATTN_E_SHAPE", argument)
    return sizes


def _plan(
    pattern: AnyPattern, dtype: tuple[int, int], sizes: dict[str, Any], seq_q: Any, **options: Any
) -> tuple[Pattern, Any]:
    """The pattern of a call, which is one of seq_q queries, and its problem. A plan is made here, too: so the library
    says what it would say when the program runs. Symbols are -1 in the problem, and the handlers read these sizes from
    their buffers. In the plan two numbers stand for them: of these, a pattern that has sizes of its own refuses one."""
    symbols = {name: sizes[name] for name in _OPEN if is_symbolic_dim(sizes[name])}
    made = as_pattern(pattern_of_call(pattern, 2 if is_symbolic_dim(seq_q) else seq_q, sizes["seq_k"]))
    pages = {"seq_k": sizes.get("page_size", 1)}  # whole ones
    stand_ins = [{name: size * pages.get(name, 1) for name in symbols} for size in (1, 2)] if symbols else [{}]
    try:
        for numbers in stand_ins:
            problem = make_problem(dtype, **sizes | numbers, **options)
            own("spattn_plan", lib.spattn_plan_create, default_context()._handle, made._handle, problem, ffi.NULL)
    except ShapeError as error:
        if not symbols:
            raise
        given = ", ".join(f"{name} {symbol}" for name, symbol in symbols.items())
        message = f"{error}, or a number for a symbol of jax.export: here {given}, for which 1 and 2 stood"
        raise ShapeError(message, error.status, error.argument) from error
    return made, make_problem(dtype, **sizes | dict.fromkeys(symbols, -1), **options)


# ---- operands that are rounded to float8 ----

_LARGEST, _LEAST_SCALE = 448.0, 2.0**-126
_FRACTION = 0x7FFFFF  # bits of a float32


def to_float8(x: Any, *, axes: str = "bshd", scales: str = "heads") -> tuple[jax.Array, jax.Array]:
    """x as float8_e4m3fn, and what its elements are to be multiplied by, as attention takes both.

    x       [batch, seq, heads, head_dim], or as axes says, of any floating dtype
    scales  "heads": each head of a batch entry has one, so that attention is fastest. "rows": each row of a token and
            head has one, so that a token that is loud takes no digits from others

    Returns the elements, shaped as x, and scales, float32, shaped as x without head_dim: the least powers of two in
    whose units nothing is above 448, the largest float8. What has no finite magnitude, or is zero, has a scale of 1;
    elements beyond 448 become 448, NaN stays NaN. Gradients end here.

    Raises ArgumentError, ShapeError, DTypeError.
    """
    x = _read(x, "x")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise DTypeError(f"argument x is {x.dtype}; accepted: any floating dtype", "SPATTN_E_DTYPE", "x")
    tokens = {"bshd": 1, "bhsd": 2, "thd": 0}
    if axes not in tokens:
        raise ArgumentError(f"argument axes is {axes!r}; accepted: {', '.join(tokens)}", "SPATTN_E_RANGE", "axes")
    if scales not in ("heads", "rows"):
        message = f"argument scales is {scales!r}; accepted: 'heads', 'rows'"
        raise ArgumentError(message, "SPATTN_E_RANGE", "scales")
    if x.ndim != len(axes):
        message = f"argument x has shape {list(x.shape)}; accepted: {len(axes)} axes, {axes}"
        raise ShapeError(message, "SPATTN_E_SHAPE", "x")
    wide = jax.lax.stop_gradient(x).astype(jnp.float32)
    over = (tokens[axes], x.ndim - 1) if scales == "heads" else (x.ndim - 1,)
    largest = jnp.max(jnp.abs(wide), over, keepdims=True, initial=0)
    is_scaled = (largest > 0) & (largest < jnp.inf)
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest / _LARGEST, _LEAST_SCALE), jnp.int32)
    powers = jax.lax.bitcast_convert_type((bits + _FRACTION) & ~_FRACTION, jnp.float32)  # the least that is as large
    factors = jnp.where(is_scaled, powers, jnp.float32(1))
    elements = jnp.clip(wide / factors, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    return elements, jnp.broadcast_to(factors[..., 0], x.shape[:-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_attention(call: Call, given: tuple[Any, ...], operands: _Operands) -> tuple[jax.Array, jax.Array]:
    """attention of operands that stand for given, q, k, v and sink_logits, which receive the gradients."""
    return _compute(call, operands)


# The operands, which have no derivatives themselves: a second one of what was given would be zero, and not refused.
_stand_for = jax.custom_jvp(lambda given, operands: operands)
_stand_for.defjvp(_refuse)


def _rounded_forward(call: Call, given: tuple[Any, ...], operands: _Operands) -> Any:
    operands = _stand_for(given, operands)
    out, lse = _compute_and_keep(call, operands)
    nothing = tuple(x if x is None else jnp.zeros(0, x.dtype) for x in given)  # that knows its dtype
    return (out, lse), (nothing, operands, out, lse)


def _rounded_backward(call: Call, saved: Any, gradients: Any) -> Any:
    nothing, *kept = saved
    (found,) = _attention_backward(call, tuple(kept), gradients)
    return tuple(x if x is None else x.astype(of.dtype) for x, of in zip(found[:4], nothing)), None


_rounded_attention.defvjp(_rounded_forward, _rounded_backward)


def float8_attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: AnyPattern,
    *,
    scales: str = "heads",
    axes: str = "bshd",
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    return_lse: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    deterministic: bool = False,
    reference: bool = False,
) -> Any:
    """attention of operands that are rounded to float8_e4m3fn first, for training, too: out, or (out, lse).

    Gradients are those of the rounded operands, handed on as if nothing had been rounded: a straight-through estimator
    (https://arxiv.org/abs/1308.3432). Of q, k and v, the backward keeps a byte an element, and scales.

    q       [batch, seq_q, heads_q, head_dim], as in attention, of any floating dtype; out has it, too, computed in
            bfloat16
    scales  of to_float8, which rounds

    All else as in attention.
    """
    q, k, v, sink_logits = given = tuple(map(_read, (q, k, v, sink_logits), ("q", "k", "v", "sink_logits")))
    rounded = ((None, None) if x is None else to_float8(x, axes=axes, scales=scales) for x in (q, k, v))
    elements, factors = zip(*rounded)
    arrays = dict(zip(("q", "k", "v", *SCALES), (*elements, *factors)))
    arrays |= {"indices": indices, "index_counts": index_counts, "sink_logits": sink_logits}
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "q_offset": q_offset, "head_dim_v": head_dim_v}
    options |= {"deterministic": deterministic, "reference": reference, "tf32": False}
    call, operands = _prepare(arrays, pattern, axes, **options)
    out, lse = _rounded_attention(call, *vary_alike((given, operands)))
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


# ---- queries on a cache ----


def decode(
    q: Any,
    k: Any,
    v: Any,
    pattern: AnyPattern,
    starts: Any,
    *,
    page_table: Any = None,
    query_offsets: Any = None,
    parents: Any = None,
    axes: str = "bshd",
    indices: Any = None,
    index_counts: Any = None,
    sink_logits: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    return_lse: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    head_dim_v: int | None = None,
    reference: bool = False,
    tf32: bool = False,
) -> Any:
    """Attention of some queries of each sequence to a cache of keys that goes on growing: out, or (out, lse). A jitted
    function is traced once, and serves sequences of any length: where queries begin, and in which pages their keys lie,
    are arrays. New keys are brought to the cache by JAX's own updates, in place where the function donates it.

        @functools.partial(jax.jit, donate_argnums=(2, 3))
        def step(q, new, k, v, starts):                            # k, v [batch, capacity, heads_kv, head_dim]
            rows = jnp.arange(len(starts)), starts
            k, v = k.at[rows].set(new[0]), v.at[rows].set(new[1])
            return saj.decode(q, k, v, "causal & (sink(4) | window(1023,0))", starts), k, v

    q              [batch, seq_q, heads_q, head_dim]; [tokens, heads_q, head_dim] with axes "thd"
    k              [batch, seq_k, heads_kv, head_dim]: a cache with room for seq_k tokens of each entry, of q's dtype or
                   float8_e4m3fn; what was not written yet may hold anything. With a page_table pages, [pages,
                   page_size, heads_kv, head_dim], with "bhsd" [pages, heads_kv, page_size, head_dim]
    v              as k, with head_dim_v; None where values are k[..., :head_dim_v]
    pattern        that of the whole sequence, seq_k by seq_k; it is cut to what is causal
    starts         int32 or int64 [batch]: query i of an entry is row starts + i of the pattern
    page_table     [batch, seq_k / page_size]: token t of entry b is token t % page_size of page [b, t // page_size] of it
    query_offsets  [batch + 1], with "thd", which has pages: which queries are whose
    parents        [batch, seq_q], [tokens] with "thd", where queries are drafts that are trees: the number of each
                   query's parent among those of its entry, or -1 of a root
    indices, index_counts  lists of tokens of each query's own sequence, for runtime_tokens and runtime_blocks
    k_scales       float32, shaped as k without head_dim: what the rows of a float8 cache are multiplied by; None is 1
    v_scales       as k_scales, of v; None where values lie in keys

    The other options, and what is returned, are those of attention, but that there are no gradients. On several devices
    heads of queries are divided further than heads of keys only where each device has one of these. vmap makes one
    call after the other. Each operand is described further at sparseattn.Plan.forward. Raises as attention.
    """
    register()
    given = {"q": q, "k": k, "v": v, "sink_logits": sink_logits, "indices": indices, "index_counts": index_counts}
    given |= {"k_scales": k_scales, "v_scales": v_scales}
    arrays = {name: _read(values, name) for name, values in given.items()}
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    page_table = _read(page_table, "page_table")
    is_packed = axes == "thd"
    needed = {"starts": (starts, True), "query_offsets": (query_offsets, is_packed)}
    needed |= {"page_table": (page_table, True)} if is_packed else {}
    for name, (values, is_needed) in needed.items():
        if (values is not None) != is_needed:
            message = f"argument {name} is {'missing' if is_needed else 'given'}; accepted: with axes {axes!r} "
            message += "an array" if is_needed else "None"
            raise ArgumentError(message, "SPATTN_E_NULL" if is_needed else "SPATTN_E_STATE", name)
    _require_constants(scale=scale, softcap=softcap, head_dim_v=head_dim_v)
    table_shape = None if page_table is None else page_table.shape
    sizes = _read_sizes(arrays, axes, head_dim_v, table_shape)
    batch = sizes["batch"]
    numbers: dict[str, tuple[Any, tuple[int, ...]]] = {
        "starts": (starts, (batch,)),
        "page_table": (page_table, () if table_shape is None else (batch, table_shape[1])),
        "query_offsets": (query_offsets, (batch + 1,)),
        "parents": (parents, (sizes["seq_q"],) if is_packed else (batch, sizes["seq_q"])),
    }
    arrays |= {name: _read_integers(values, name, shape) for name, (values, shape) in numbers.items()}
    _check_cache(arrays, sizes, axes)
    made, problem = _plan(
        pattern,
        dtype_code(np.dtype(q.dtype), "problem.dtype"),
        sizes,
        sizes["seq_k"],
        scale=scale,
        softcap=softcap,
        sink_logits=arrays["sink_logits"] is not None,
        reference=reference,
        tf32=tf32,
        starts=True,
        parents=parents is not None,
        cache_dtype=None if k.dtype == q.dtype else dtype_code(np.dtype(k.dtype), "problem.cache_dtype"),
    )
    _check_lists(made, arrays, sizes, axes)
    call = Call(made.save(), as_bytes(problem), which(arrays))
    order = ("q", "k", "v", "sink_logits", "starts", "page_table", "query_offsets", "parents", *OPTIONAL)
    present = {name: arrays[name] for name in order if arrays.get(name) is not None}
    out, lse = invoke("forward", call, _results(call, q), present, _refuse_of_cache)
    return (out, lse) if return_lse else out
