# SPDX-License-Identifier: MIT
"""The two operators that graphs of torch hold, torch.ops.sparseattn.forward and .backward, and .decoded, by which calls
on caches tell dispatch modes what they did."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any, Sequence

import torch

from .._core import ArgumentError, Context, UnsupportedError, default_context
from .._patterns import Pattern, load, pattern_named
from .._plans import find, find_plan
from .._problem import sizes_of
from ._tensors import TensorPlan, context_of, in_documents, with_mask

if TYPE_CHECKING:
    from .._patterns import AnyPattern

_OPERANDS = "Tensor q, Tensor k, Tensor? v, Tensor? sink_logits, Tensor? indices, Tensor? index_counts, Tensor? mask"
_SCALARS = (
    "str pattern, str axes, float? scale, float? softcap, SymInt? q_offset, SymInt? head_dim_v, bool deterministic, "
    "bool reference, bool tf32"
)
NUM_OPERANDS, NUM_SCALARS = 7, 9
SCALES = ("q_scales", "k_scales", "v_scales")
FLOAT8_GRADIENTS = (  # where they are
    "sparseattn.torch.float8_attention of tensors that are not rounded yet, or a call under torch.no_grad()"
)

_library = torch.library.Library("sparseattn", "DEF")
_LATER = (*SCALES, "cu_q", "cu_k")  # operands behind the scalars, which calls may leave out
_OF_LATER = ", ".join(f"Tensor? {name}=None" for name in _LATER)
_library.define(f"forward({_OPERANDS}, {_SCALARS}, bool backward, {_OF_LATER}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_OPERANDS}, {_SCALARS}, {_OF_LATER}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink_logits)"
)
# A cache is no tensor, and no graph holds a call on one: this computes nothing, and says what has been computed.
_library.define(
    "decoded(Tensor q, Tensor out, str pattern, str axes, int[] begins, int[] ends, int heads_kv, int capacity) -> ()"
)


def plan_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    mask: torch.Tensor | None,
    pattern: Any,
    scalars: Sequence[Any],
    backward: bool,
    context: Context | None = None,
    documents: Sequence[Any] = (None, None),
) -> Any:
    """The plan of a call, found again.

    mask       a bool tensor that cuts the pattern
    scalars    those of the schema
    documents  cu_q and cu_k, of whose documents the pattern is
    """
    axes, scale, softcap, q_offset, head_dim_v, deterministic, reference, tf32 = scalars
    pattern = in_documents(pattern, *documents)
    if mask is not None:
        pattern = with_mask(pattern, mask, sizes_of(q.shape, k.shape, None if v is None else v.shape, axes, head_dim_v))
    return find_plan(
        TensorPlan,
        context_of(q) if context is None else context,
        pattern,
        q.device,
        q.dtype,
        (q.shape, k.shape, None if v is None else v.shape),
        axes,
        scale,
        softcap,
        q_offset,
        head_dim_v,
        sink_logits is not None,
        backward,
        deterministic,
        reference,
        tf32,
    )


def _forward(
    q: Any, k: Any, v: Any, sink_logits: Any, indices: Any, index_counts: Any, mask: Any, *more: Any
) -> Any:
    """The operator; more is what else its schema has, without the last operands where they are None."""
    pattern, *options, backward = more[: NUM_SCALARS + 1]
    later = more[NUM_SCALARS + 1 :]
    plan = plan_for(q, k, v, sink_logits, mask, found_by(pattern), options, backward, documents=later[len(SCALES) :])
    lists = {"indices": indices, "index_counts": index_counts, **dict(zip(SCALES, later))}
    return plan.run(q, k, v, sink_logits=sink_logits, return_lse=True, **lists)


def _backward(dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *more: Any) -> Any:
    """The operator; more as in _forward. What a call has no gradient of, dv or dsink_logits, has no elements."""
    sink_logits, indices, index_counts, mask, pattern, *options = more
    scalars, later = options[: NUM_SCALARS - 1], options[NUM_SCALARS - 1 :]
    plan = plan_for(q, k, v, sink_logits, mask, found_by(pattern), scalars, True, documents=later[len(SCALES) :])
    lists = {"indices": indices, "index_counts": index_counts, **dict(zip(SCALES, later))}
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, *dsink = plan.backward(q, k, v, out, lse, dout, dlse=dlse, sink_logits=sink_logits, **lists)
    return dq, dk, dq.new_empty(0) if dv is None else dv, dsink[0] if dsink else lse.new_empty(0)


# ---- patterns in graphs ----

# A graph has a pattern's name alone, and may be run when nobody else holds the pattern any more.
_kept_by_graphs: dict[str, Pattern] = {}
_BYTES, _DIGEST = "#bytes:", "#sha256:"


def _name_in_graph(name: str, is_exporting: bool) -> str:
    """What a graph that is being made is to hold of the pattern with this _name.

    A text is its own name. Of a pattern with arrays, a graph that may go to another process has all bytes. One that
    torch.compile makes has their digest, which is short, and by which another process finds the compiled code again.
    """
    if not name.startswith("#"):
        return name
    pattern = pattern_named(name)
    saved = pattern.save()
    name = _BYTES + base64.b64encode(saved).decode() if is_exporting else _DIGEST + hashlib.sha256(saved).hexdigest()
    _kept_by_graphs[name] = pattern
    return name


def cut_to_causal(pattern: AnyPattern) -> Pattern:
    """The pattern cut to "causal", found again, and its plans with it."""
    found: Pattern = find(_make_causal, default_context(), pattern, ())
    return found


def _make_causal(context: Context, pattern: Pattern) -> Pattern:
    return pattern & "causal"


def _causal_name_in_graph(name: str, is_exporting: bool) -> str:
    """What a graph is to hold of that pattern, cut to "causal"."""
    cut = cut_to_causal(pattern_named(name))  # which is to live until the graph keeps it
    return _name_in_graph(cut._name, is_exporting)


# torch.compile calls it while it traces, and has the result for a constant.
as_constant: Any = torch.compiler.assume_constant_result
name_in_graph = as_constant(_name_in_graph)
causal_name_in_graph = as_constant(_causal_name_in_graph)


def pattern_of(name: str) -> Pattern:
    """The pattern of a graph's constant. Raises FormatError for the name of a pattern that another process had."""
    pattern = _kept_by_graphs.get(name)
    if pattern is not None:
        return pattern
    if name.startswith(_BYTES):  # kept, because plans are found again for the same pattern alone
        return _kept_by_graphs.setdefault(name, load(base64.b64decode(name[len(_BYTES) :])))
    return pattern_named(name)


def found_by(name: str) -> Any:
    """The same for a plan: a text is as good as its pattern, and found again without a parse."""
    return pattern_of(name) if name.startswith("#") else name


def _forward_fake(
    q: Any, k: Any, v: Any, sink_logits: Any, indices: Any, index_counts: Any, mask: Any, *more: Any
) -> Any:
    pattern, axes, _, _, _, head_dim_v, *_ = more
    sizes = sizes_of(q.shape, k.shape, None if v is None else v.shape, axes, head_dim_v)
    for name, tensor in (("k", k), ("v", v)):
        if tensor is not None and tensor.device != q.device:
            message = f"argument {name} lies on {tensor.device}; accepted: {q.device}, where q lies"
            raise ArgumentError(message, "SPATTN_E_DEVICE", name)
    _kept_by_graphs[pattern] = pattern_of(pattern)
    out = [*q.shape[:-1], sizes["head_dim_v"]]
    lse = [sizes["heads_q"], sizes["seq_q"]] if axes == "thd" else [sizes["batch"], sizes["heads_q"], sizes["seq_q"]]
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty(out, dtype=dtype), q.new_empty(lse, dtype=torch.float32)


def _backward_fake(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, sink_logits: Any, *more: Any
) -> Any:
    gradients = (out.new_empty(shape) for shape in (q.shape, k.shape, 0 if v is None else v.shape))
    return *gradients, lse.new_empty(0 if sink_logits is None else sink_logits.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scalars = inputs[NUM_OPERANDS : NUM_OPERANDS + NUM_SCALARS]
    ctx.kept = found_by(ctx.scalars[0])  # the pattern, until backward, which has its name alone
    ctx.save_for_backward(*inputs[-2:], *inputs[:NUM_OPERANDS], *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> Any:
    cu_q, cu_k, *operands, out, lse = ctx.saved_tensors
    if operands[0].dtype == torch.float8_e4m3fn:
        message = "q is float8_e4m3fn, to which autograd would round its gradient"
        raise UnsupportedError(f"{message}; accepted: {FLOAT8_GRADIENTS}", "SPATTN_E_UNSUPPORTED", "q")
    num_inputs = NUM_OPERANDS + NUM_SCALARS + 1 + len(_LATER)
    if dout is None and dlse is None:
        return (None,) * num_inputs
    found = gradients_of(dout, dlse, out, lse, operands, ctx.scalars, None, None, None, cu_q, cu_k)
    return *found, *[None] * (num_inputs - len(found))


def gradients_of(
    dout: Any, dlse: Any, out: Any, lse: Any, operands: Sequence[Any], scalars: Sequence[Any], *later: Any
) -> Any:
    """Of q, k, v and sink_logits, by the operator, whose schema has the rest; None of what is None."""
    gradients = torch.ops.sparseattn.backward(dout, dlse, out, lse, *operands, *scalars, *later)
    return tuple(None if operand is None else x for operand, x in zip(operands, gradients))


def refuse_again(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(
        "second derivatives of attention are not offered; accepted: first ones, by backward() or grad() without "
        "create_graph. torch's own scaled_dot_product_attention has second ones under "
        "sdpa_kernel(SDPBackend.MATH)",
        "SPATTN_E_UNSUPPORTED",
        "dout",
    )


for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _device)
    _library.impl("backward", _backward, _device)
_library.impl("decoded", lambda *_: None, "CompositeExplicitAutograd")
torch.library.register_fake("sparseattn::forward", _forward_fake, lib=_library)
torch.library.register_fake("sparseattn::backward", _backward_fake, lib=_library)
torch.library.register_autograd("sparseattn::forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("sparseattn::backward", refuse_again, lib=_library)
