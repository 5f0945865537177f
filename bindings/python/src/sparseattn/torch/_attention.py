# SPDX-License-Identifier: MIT
"""Attention of tensors: eager calls, as autograd sees them, and the way to the operators for all that looks on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional

from .._core import ArgumentError, Context, ShapeError, UnsupportedError, integer, real
from .._patterns import Pattern, as_pattern
from .._plans import find, make_plan
from .._problem import sizes_of
from ._operators import (
    FLOAT8_GRADIENTS,
    SCALES,
    causal_name_in_graph,
    cut_to_causal,
    gradients_of,
    name_in_graph,
    plan_for,
    refuse_again,
)
from ._tensors import (
    PLAIN,
    PlainCall,
    TensorPlan,
    broadcasts,
    context_of,
    functorch_level,
    in_documents,
    refuse_gradients,
    refuse_transforms,
    require_documents,
    require_mask,
    require_memory,
    require_tensor,
    split_mask,
    wide_sinks,
    with_mask,
)

if TYPE_CHECKING:
    from typing import Literal, TypedDict

    from typing_extensions import Unpack

    class _Options(TypedDict, total=False):
        axes: Literal["bshd", "bhsd", "thd"]
        scale: float | None
        softcap: float | None
        q_offset: int | None
        head_dim_v: int | None
        deterministic: bool
        reference: bool
        tf32: bool
        context: Context | None
        indices: torch.Tensor | None
        index_counts: torch.Tensor | None
        sink_logits: torch.Tensor | None
        q_scales: torch.Tensor | None
        k_scales: torch.Tensor | None
        v_scales: torch.Tensor | None
        cu_q: torch.Tensor | None
        cu_k: torch.Tensor | None


# ---- eager calls: an autograd function of its own takes a tenth of an operator's ----


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: TensorPlan | PlainCall, scalars: tuple[Any, ...] | None, *operands: Any) -> Any:
        q, k, v, sink_logits, indices, index_counts = operands
        if isinstance(found, PlainCall):
            out, lse = found.run(q, k, v)
            ctx.plan = found.plan
        else:
            more = {"sink_logits": sink_logits, "indices": indices, "index_counts": index_counts}
            out, lse = found.run(q, k, v, return_lse=True, **more)
            ctx.plan = found
        ctx.scalars = scalars
        ctx.save_for_backward(*operands, out, lse)  # the lists, too: autograd notices if one changes before backward
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, sink_logits, indices, index_counts, out, lse = ctx.saved_tensors
        if any(x is not None and _is_batch(x) for x in (dout, dlse)):
            message = "gradients of a batch at once, as by is_grads_batched or vectorize, are not offered"
            raise UnsupportedError(f"{message}; accepted: one after the other", "SPATTN_E_UNSUPPORTED", "dout")
        if dout is None and dlse is None:
            return (None,) * 8
        if num_dispatch_modes() and ctx.scalars is not None:  # somebody looks on who did not in forward
            operands, scalars = (q, k, v, sink_logits, indices, index_counts, None), ctx.scalars
            gradients = gradients_of(dout, dlse, out, lse, operands, (name_of(ctx.plan._pattern), *scalars))
            return None, None, *gradients, None, None
        more = {"sink_logits": sink_logits, "indices": indices, "index_counts": index_counts}
        zero = torch.zeros_like(out) if dout is None else dout
        gradients = ctx.plan.backward(q, k, v, out, lse, zero, dlse=dlse, **more)
        if torch.is_grad_enabled():  # somebody means to differentiate once more
            gradients = once(gradients, dout, dlse, q, k, v, sink_logits)
        return None, None, *gradients, *[None] * (6 - len(gradients))


class _Once(torch.autograd.Function):
    """Gradients that depend on their operands in a way that nobody knows."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[torch.Tensor | None, ...], *operands: torch.Tensor | None) -> Any:
        return tuple(x if x is None else x.detach() for x in gradients)

    backward = staticmethod(refuse_again)


def once(gradients: tuple[torch.Tensor | None, ...], *operands: torch.Tensor | None) -> Any:
    """The gradients, which are refused when somebody differentiates them."""
    return _Once.apply(gradients, *operands)


num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_is_batch = torch._C._functorch.is_legacy_batchedtensor
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def _is_eager(
    q: Any, k: Any, v: Any, sink_logits: Any, scales: tuple[Any, Any, Any], documents: tuple[Any, Any]
) -> bool:
    """Whether nobody looks on: no subclass of tensors, no dispatch mode, no transform of torch.func, no tracer, no
    derivatives that go forward."""
    return (
        type(q) in PLAIN
        and not q.is_meta
        and type(k) in PLAIN
        and (v is None or type(v) in PLAIN)
        and (sink_logits is None or type(sink_logits) in PLAIN)
        and (scales[0] is scales[1] is scales[2] is None or all(x is None or type(x) in PLAIN for x in scales))
        and (documents[0] is None or type(documents[0]) in PLAIN)
        and (documents[1] is None or type(documents[1]) in PLAIN)
        and not num_dispatch_modes()
        and functorch_level() is None
        and not _is_tracing()
        and forward_ad._current_level < 0
    )


# ---- what users call ----


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pattern: AnyPattern,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    pattern: AnyPattern,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
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
    indices: torch.Tensor | None = None,
    index_counts: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """sparseattn.attention of tensors: out, or (out, lse), which autograd knows how to differentiate once.

    q        [batch, seq_q, heads_q, head_dim], float32, float16, bfloat16 or float64, on the CPU or a CUDA device.
             Mind the order: a tensor [batch, heads, seq, head_dim] is taken for one of few tokens and many heads
             unless axes is "bhsd"; scaled_dot_product_attention takes it as torch does. Or torch.float8_e4m3fn, as k
             and v then: out is bfloat16, and tensors that require a gradient are refused, but for torch.no_grad(), as
             autograd would round their gradients to float8. float8_attention has gradients
    pattern  a Pattern, its text, or a bool tensor, True where a key is seen: [seq_q, seq_k], [heads, seq_q, seq_k] or
             [batch, heads, seq_q, seq_k], and seq_q may be 1 in a mask of keys alone. The host reads a mask with every
             call: where it stays the same, sparseattn.mask makes a pattern of it once. In what torch.compile compiles,
             a pattern is a text, a mask, or was made outside
    cu_q, cu_k  int32 or int64 [documents + 1]: the pattern is that of each document of a packed sequence, as in
             sparseattn.per_document(pattern, cu_q, cu_k), with offsets that come with the call, so that code that was
             compiled once serves other documents. cu_k None is cu_q. The host reads them, at once on the CPU, where
             they are best kept; it waits for those that lie on a GPU. A mask is that of all tokens, cut to documents.
             Lists of a call are of no document: sparseattn.per_document(pattern, cu_q) & runtime_tokens(n), without
             cu_q, has lists that name tokens of the packed row
    deterministic  bit-equal gradients between calls, also where torch.use_deterministic_algorithms asks for them; on
             the CPU they always are
    context  None is one for the device where q lies, on the CPU with as many threads as torch.get_num_threads() says when
             the call begins; must be None in compiled code

    k, v, indices, index_counts, sink_logits, q_scales, k_scales, v_scales, and the other options and errors are those
    of sparseattn.attention: a scale of float8 that all rows of q, or of k, share is best a factor of the option scale.
    q, k, v, sink_logits and the lse that is returned have gradients; sink_logits may be bfloat16 or float16, too. Under
    autocast q, k and v are cast, as torch's own attention casts them, but for those of float8.

    Of DTensors, as tensor and data parallelism split them along heads and batch, each device attends to its part, and the
    results are split as q. Key heads that cannot be split as far as those of q are whole on each device; what else
    cannot be split so, such as tokens, is replicated first. q, k, v, sink_logits and scales are all DTensors of one
    mesh then, and other tensors may be plain ones, the same on all devices.
    """
    lists = (sink_logits, indices, index_counts)
    pattern, mask = split_mask(pattern)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    scalars = (axes, scale, softcap, q_offset, head_dim_v, deterministic, reference, tf32)
    scales = (q_scales, k_scales, v_scales)
    return _attend(q, k, v, lists, mask, pattern, scalars, return_lse, context, scales, (cu_q, cu_k))


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    pattern: AnyPattern,
    *,
    dlse: torch.Tensor | None = None,
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
    context: Context | None = None,
    indices: torch.Tensor | None = None,
    index_counts: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients (dq, dk, dv) of attention(q, k, v, pattern, return_lse=True, ...), which gave out and lse.

    This is what autograd calls, for loops that differentiate by hand. With sink_logits (dq, dk, dv, dsink_logits), and
    dv is None where v is. Where q, k and v are float8, gradients are bfloat16, of elements times scales.

    dout     the gradient that arrives at out, of its shape and dtype
    dlse     the gradient that arrives at lse, float32; None is 0

    The results have no gradients of their own. Not for compiled code. Options and errors as in attention.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is not None or name != "v":
            require_tensor(tensor, name)
    refuse_transforms(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, sink_logits=sink_logits)
    pattern, mask = split_mask(pattern)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = (axes, scale, softcap, q_offset, head_dim_v, deterministic, reference, tf32)
    plan = plan_for(q, k, v, sink_logits, mask, pattern, options, True, context, (cu_q, cu_k))
    more = {"dlse": dlse, "indices": indices, "index_counts": index_counts, "sink_logits": wide_sinks(sink_logits)}
    more |= {"q_scales": q_scales, "k_scales": k_scales, "v_scales": v_scales}
    dq, dk, dv, *dsink = plan.backward(q, k, v, out, lse, dout, **more)
    return (dq, dk, dv) if sink_logits is None else (dq, dk, dv, dsink[0].to(sink_logits.dtype))


def plan(
    pattern: AnyPattern,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    axes: str = "bshd",
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: bool = False,
    q_offset: int | None = None,
    head_dim_v: int | None = None,
    backward: bool = False,
    deterministic: bool = False,
    reference: bool = False,
    tf32: bool = False,
    starts: bool = False,
    parents: bool = False,
    page_table: torch.Tensor | None = None,
    context: Context | None = None,
) -> TensorPlan:
    """sparseattn.plan for tensors of these shapes and dtypes and this device: what it computes are tensors.

    For loops that differentiate by hand or not at all: autograd does not see plan.forward, which refuses tensors that
    require a gradient, but for torch.no_grad(). attention has gradients, and finds its plans again. Options as in
    sparseattn.plan, errors as in attention.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v), ("page_table", page_table)):
        if tensor is not None or name in ("q", "k"):
            require_tensor(tensor, name)
    table = None if page_table is None else page_table.shape
    sizes = sizes_of(q.shape, k.shape, None if v is None else v.shape, axes, head_dim_v, table)
    pattern, mask = split_mask(pattern)
    if mask is not None:
        pattern = with_mask("full", mask, {**sizes, "seq_q": sizes["seq_k"]} if starts else sizes)
    return TensorPlan(
        pattern,
        q.device,
        **sizes,
        dtype=q.dtype,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        q_offset=q_offset,
        backward=backward,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        reference=reference,
        tf32=tf32,
        starts=starts,
        parents=parents,
        cache_dtype=k.dtype if k.dtype == torch.float8_e4m3fn != q.dtype else None,
        context=context_of(q) if context is None else context,
    )


def _attend(
    q: Any,
    k: Any,
    v: Any,
    more: tuple[Any, Any, Any],
    mask: torch.Tensor | None,
    pattern: Any,
    scalars: tuple[Any, ...],
    return_lse: bool = False,
    context: Context | None = None,
    scales: tuple[Any, Any, Any] = (None, None, None),
    documents: tuple[Any, Any] = (None, None),
) -> Any:
    """attention, with a mask beside the pattern.

    more is sink_logits, indices, index_counts; scales are those of q, k and v; documents are cu_q and cu_k
    """
    sink_logits, indices, index_counts = more
    sink_logits = wide_sinks(sink_logits)
    more = sink_logits, indices, index_counts
    scalars = with_numbers(scalars)
    is_eager = not torch.compiler.is_compiling() and _is_eager(q, k, v, sink_logits, scales, documents)
    if not is_eager and hasattr(q, "device_mesh"):  # a DTensor: who has one has imported torch's module
        from ._dtensor import attend

        return attend(q, k, v, more, mask, pattern, scalars, return_lse, context, scales, documents)
    if not is_eager:
        named = {"q": q, "k": k, "v": v, "sink_logits": sink_logits, **dict(zip(SCALES, scales))}
        for name, tensor in named.items():
            is_needed = tensor is not None or name in ("q", "k")
            if is_needed and (not isinstance(tensor, torch.Tensor) or tensor.is_nested):
                require_tensor(tensor, name)
        require_documents(*documents)
        refuse_transforms(**named)
    if not is_eager or _is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    if q.dtype == torch.float8_e4m3fn:
        of_scales = dict(zip(SCALES, scales))
        refuse_gradients("call of float8", FLOAT8_GRADIENTS, q=q, k=k, v=v, sink_logits=sink_logits, **of_scales)
    backward = needs_gradients(q, k, v, sink_logits)
    if not is_eager:
        if context is not None:
            raise ArgumentError("context is given; accepted in compiled code: None", "SPATTN_E_ARGUMENT", "context")
        name = name_of(pattern)
        out, lse = torch.ops.sparseattn.forward(q, k, v, *more, mask, name, *scalars, backward, *scales, *documents)
        return (out, lse) if return_lse else out
    pattern = in_documents(pattern, *documents)
    is_scaled = not scales[0] is scales[1] is scales[2] is None
    is_plain = v is not None and sink_logits is None and indices is None and index_counts is None and not is_scaled
    of_operator = scalars if context is None else None  # which runs in the default context
    if mask is None and is_plain:
        call = _find_plain_call(q, k, v, pattern, scalars, backward, return_lse or backward, context)
        if call is not None:
            out, lse = _Attention.apply(call, of_operator, q, k, v, *more) if backward else call.run(q, k, v)
            return (out, lse) if return_lse else out
    plan = plan_for(q, k, v, sink_logits, mask, pattern, scalars, backward, context)
    if not backward or is_scaled:  # float8 has no gradients here, and the library refuses scales of all else
        lists = {"indices": indices, "index_counts": index_counts, **dict(zip(SCALES, scales))}
        return plan.run(q, k, v, sink_logits=sink_logits, return_lse=return_lse, **lists)
    out, lse = _Attention.apply(plan, of_operator, q, k, v, *more)
    return (out, lse) if return_lse else out


def with_numbers(scalars: tuple[Any, ...]) -> tuple[Any, ...]:
    """The scalars of the schema as numbers of Python, whatever kinds of numbers they were: plans are found again by
    them, and a tensor may hold another number in the next call. Raises DTypeError for what is no number."""
    axes, scale, softcap, q_offset, head_dim_v, *others = scalars
    if scale is None and softcap is None and q_offset is None and head_dim_v is None:
        return scalars
    refuse_gradients("call", "a number; what is learned may be a factor of q", scale=scale, softcap=softcap)
    scale = scale if scale is None else real(scale, "problem.scale")
    softcap = softcap if softcap is None else real(softcap, "problem.softcap")
    q_offset, head_dim_v = _size(q_offset, "problem.q_offset"), _size(head_dim_v, "problem.head_dim_v")
    return (axes, scale, softcap, q_offset, head_dim_v, *others)


def _size(value: Any, argument: str) -> Any:
    # torch.compile takes what operator.index was asked about for a constant, and compiles again for each other one.
    return value if value is None or type(value) is int else integer(value, argument)


def needs_gradients(q: Any, k: Any, v: Any, sink_logits: Any) -> bool:
    """Whether autograd will ask for any."""
    needs: bool = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or (v is not None and v.requires_grad)
        or (sink_logits is not None and sink_logits.requires_grad)
    )
    return needs


def _find_plain_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    scalars: tuple[Any, ...],
    backward: bool,
    return_lse: bool,
    context: Context | None,
) -> PlainCall | None:
    """None for tensors whose memory is not all that there is to know of them."""
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    try:
        of_q, of_k = (q.shape, q.stride(), q.dtype, q.device), (k.shape, k.stride(), k.dtype, k.device)
        of_v = v.shape, v.stride(), v.dtype, v.device
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        for name, x in (("q", q), ("k", k), ("v", v)):
            require_tensor(x, name)
        raise
    key = (of_q, of_k, of_v, scalars, backward, return_lse)
    found: PlainCall = find(_make_plain_call, context_of(q) if context is None else context, pattern, key)
    return found


def _make_plain_call(
    context: Context,
    pattern: Pattern,
    of_q: tuple[Any, ...],
    of_k: tuple[Any, ...],
    of_v: tuple[Any, ...],
    scalars: tuple[Any, ...],
    backward: bool,
    return_lse: bool,
) -> PlainCall:
    (_, _, dtype, device), shapes = of_q, (of_q[0], of_k[0], of_v[0])
    axes, scale, softcap, q_offset, head_dim_v, deterministic, reference, tf32 = scalars
    options = axes, scale, softcap, q_offset, head_dim_v
    flags = False, backward, deterministic, reference, tf32  # False: without sink_logits
    plan: Any = make_plan(context, pattern, TensorPlan, device, dtype, shapes, *options, flags)
    return PlainCall(plan, return_lse)


# Older releases of torch do not tell graphs that are exported from those that are compiled.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def name_of(pattern: Any) -> str:
    """What the operator is given of a pattern."""
    if isinstance(pattern, str):
        return pattern
    name = _own_name(pattern)
    if torch.compiler.is_compiling():
        name = name_in_graph(name, _is_exporting())
    elif _is_tracing():
        name = name_in_graph(name, True)
    return name


def causal_of(pattern: AnyPattern) -> Pattern | str:
    """The pattern cut to "causal"; in compiled code, which cannot call the library, what name_of makes of that."""
    if not torch.compiler.is_compiling():
        return cut_to_causal(pattern)
    name: str = causal_name_in_graph(_own_name(pattern), _is_exporting())
    return name


def _own_name(pattern: AnyPattern) -> str:
    if isinstance(pattern, str):
        return pattern
    # A plain attribute, so that torch.compile can read it and compiles again where it is another.
    return pattern._name if isinstance(pattern, Pattern) else as_pattern(pattern)._name


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The operands in the dtype of an autocast around the call, if there is one for their device."""
    device = "cuda" if q.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    kept = (torch.float64, torch.float8_e4m3fn)
    casts = (x is not None and x.is_floating_point() and x.dtype not in kept for x in (q, k, v))
    q, k, v = (x.to(dtype) if is_cast else x for x, is_cast in zip((q, k, v), casts))
    return q, k, v


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: AnyPattern | None = None,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention over the pairs that a pattern keeps.

    query      [batch, heads_q, seq_q, head_dim]; fewer axes lack the batch, then the heads; more are batches
    key        [batch, heads_kv, seq_k, head_dim]
    value      [batch, heads_kv, seq_k, head_dim_v]
    attn_mask  bool, True where a key takes part, broadcast to [batch, heads_q, seq_q, seq_k]; intersected with pattern
    dropout_p  0: there is no dropout inside attention
    is_causal  query i sees keys up to i, counted from the first of each: torch's meaning. Patterns align the last
               query to the last key; where seq_q is not seq_k, only one of both can be asked for
    enable_gqa  heads_q may be a multiple of heads_kv; without it both are the same
    pattern    a Pattern, its text, or a mask; None is "full"

    Returns [batch, heads_q, seq_q, head_dim_v], the heads of a token side by side in memory, as torch does. A query
    without keys gets 0, where torch has NaN.

    Raises UnsupportedError for dropout and masks of floats; else as attention.
    """
    if dropout_p:
        message = f"argument dropout_p is {dropout_p}; accepted: 0, as there is no dropout inside attention"
        raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "dropout_p")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not _is_dense(tensor):
            require_tensor(tensor, name)
        if tensor.dim() < 2 or tensor.dim() != query.dim():
            message = f"argument {name} has shape {list(tensor.shape)}; accepted: [batch, heads, seq, head_dim]"
            raise ShapeError(message, "SPATTN_E_SHAPE", name)
    if query.dim() > 2 and not enable_gqa and query.shape[-3] != key.shape[-3]:
        message = f"argument key has {key.shape[-3]} heads; accepted: {query.shape[-3]}, or enable_gqa=True"
        raise ShapeError(message, "SPATTN_E_SHAPE", "key")
    seq_q, seq_k, q_offset = query.shape[-2], key.shape[-2], None
    kept, mask = split_mask(pattern)
    if is_causal:
        if pattern is None:
            kept, q_offset = "causal", 0
        elif seq_q == seq_k:
            kept = "causal" if mask is not None else causal_of(kept)
        else:
            message = f"is_causal counts from the first of {seq_q} queries and {seq_k} keys, a pattern from the last"
            raise ArgumentError(f"{message}; accepted: one of them", "SPATTN_E_ARGUMENT", "is_causal")
    q, k, v = (_four_axes(x).transpose(1, 2) for x in (query, key, value))
    if attn_mask is not None:
        if mask is not None:
            require_mask(mask, sizes_of(q.shape, k.shape, v.shape, "bshd"))
        own = _read_mask(attn_mask, [*[1] * (4 - query.dim()), *query.shape[:-1], seq_k])
        mask = own if mask is None else mask.to(own.device) & own  # NumPy's lies on the host
    scalars = ("bshd", scale, None, q_offset, None, torch.are_deterministic_algorithms_enabled(), False, False)
    found = _attend(q, k, v, (None, None, None), mask, "full" if kept is None else kept, scalars)
    out: torch.Tensor = found.transpose(1, 2)
    return out if query.dim() == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def _is_dense(x: Any) -> bool:
    """Whether x is a tensor that has views: none that is nested, or sparse."""
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested


def _four_axes(x: torch.Tensor) -> torch.Tensor:
    if x.dim() <= 4:
        return x[(None,) * (4 - x.dim())]
    return x.flatten(0, x.dim() - 4)


def _read_mask(mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The mask with all keys, and with one axis in place of several of the batch.

    sizes  [batch, heads_q, seq_q, seq_k], with all axes of the batch, to which the mask is broadcast
    """
    if not _is_dense(mask):
        require_memory(mask, "attn_mask")
    if mask.dtype != torch.bool:
        message = f"argument attn_mask is {mask.dtype}; accepted: torch.bool, True where a key takes part"
        raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "attn_mask")
    if not broadcasts(mask.shape, sizes):
        message = f"argument attn_mask has shape {list(mask.shape)}; accepted: what is broadcast to {sizes}"
        raise ShapeError(message, "SPATTN_E_SHAPE", "attn_mask")
    mask = mask[(None,) * max(0, 2 - mask.dim())]
    mask = mask.expand(*mask.shape[:-1], sizes[-1])
    if any(n > 1 for n in mask.shape[:-3]):  # a mask of each entry of one axis is repeated along the others
        mask = mask.expand(*sizes[:-3], *mask.shape[-3:])
    return mask.flatten(0, -4) if mask.dim() > 4 else mask


if TYPE_CHECKING:
    from .._patterns import AnyPattern
