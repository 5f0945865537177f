# SPDX-License-Identifier: MIT
"""Models of Hugging Face transformers (5 or newer), with a pattern in the place of their attention.

    import sparseattn as sa, sparseattn.huggingface
    sa.huggingface.register("streaming", sa.sink(4) | sa.window(1023, 0))
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="streaming")   # or, of one that is there:
    model.set_attn_implementation("streaming")

A query sees the keys that both the pattern and the model let it see: causal models stay causal, sliding windows stay,
padding and other sequences of a packed row stay unseen. Training, and generation with dynamic, static and sliding
caches, run as with the model's own attention. torch.compile breaks its graphs at each layer's attention.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from ._analytic import causal, window
from ._core import ArgumentError, UnsupportedError
from ._indexed import mask
from ._patterns import Pattern, as_pattern, columns, per_batch, per_document
from .torch import attention

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., Any])


def register(name: str, pattern: Pattern | str) -> str:
    """Makes attn_implementation=name the attention of this pattern, in every model that is made or set to it. Returns
    the name.

    name     a word of letters, digits, `_` and `-`, none of transformers' own; later calls of it replace the pattern
    pattern  a Pattern or its text, of positions in the sequence: in a padded row they count from its first real token,
             and tokens that are masked behind it are counted; in a packed row from the first token of each sequence;
             under a mask with four axes from the first token of the row

    transformers reads of position_ids which sequences are packed in a row, but only in calls that have no
    attention_mask and no cache, as with use_cache=False.

    Raises ArgumentError for the name, FormatError for a text that is no pattern, UnsupportedError for one whose lists
    come with each call. The model's calls raise UnsupportedError for what attention here does not know: dropout, biases
    on scores, cross attention, paged caches, and sequences of which cu_seq_lens_q alone tells.
    """
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise ArgumentError(f"argument name is {name!r}; accepted: letters, digits, _ and -", argument="name")
    taken = AttentionInterface._global_mapping.get(name)
    if name == "eager" or taken is not None and getattr(taken, "func", None) is not _attend:
        raise ArgumentError(f"argument name is {name!r}, which transformers has; accepted: others", argument="name")
    made = as_pattern(pattern)
    if "runtime_" in (text := str(made)):
        message = f"argument pattern is {text}, whose lists no model brings; accepted: patterns known beforehand"
        raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "pattern")
    AttentionInterface.register(name, functools.partial(_attend, made))
    AttentionMaskInterface.register(name, functools.partial(_make_mask, made))
    return name


class _Mask(torch.Tensor):
    """What the layers of one kind get for a mask: the pattern of this call, with all that the model says in it.

    transformers hands masks on as tensors [batch, 1, q, k], and takes one with four axes for a mask that is made; this
    one has the shape, and no memory.
    """

    pattern: Pattern
    is_packed: bool  # of which sequences are packed in a row

    @staticmethod
    def __new__(cls, pattern: Pattern, shape: tuple[int, ...], device: Any, is_packed: bool) -> _Mask:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.pattern, made.is_packed = pattern, is_packed
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # nobody prints the elements of this one
        return f"_Mask({self.pattern}, {tuple(self.shape)})"

    def contiguous(self, *_: Any, **__: Any) -> _Mask:
        return self

    def to(self, *_: Any, **__: Any) -> _Mask:
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, *call: Any) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # as checkpoints of layers do
            _, (itself,), *_ = call
            return itself
        message = f"{function} of a mask that is a pattern, by a model that computes with masks itself"
        raise UnsupportedError(f"{message}; accepted: models that leave them to an attention function of transformers")


def _outside_of_graphs(function: _Function) -> _Function:
    """The function, which torch.compile calls between its graphs: what it reads of masks is new in each call."""
    made: _Function = torch.compiler.disable(function)
    return made


# ---- once a call of the model: what a query may see ----


@_outside_of_graphs
def _make_mask(
    pattern: Pattern,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **more: Any,
) -> _Mask:
    """The mask function that transformers calls: queries stand at q_offset + [0, q_length), keys at kv_offset +
    [0, kv_length), and attention_mask [batch, tokens] is True for those that are no padding."""
    q_offset, end_k = int(q_offset), kv_offset + kv_length
    is_causal = mask_function is not bidirectional_mask_function
    if not is_causal and q_length != kv_length:
        raise _cross_attention()
    end = q_offset + q_length if is_causal else kv_length  # a static cache is longer than what it holds
    packed = _packed_rows(mask_function)
    rows, has_holes = (packed, False) if packed else _padded_rows(attention_mask, batch_size, end)
    seen = _model_pattern(mask_function)
    made = _in_rows(pattern if seen is None else pattern & seen, rows, q_offset, q_length, end_k)
    if kv_offset:
        made = columns(made, [(kv_offset, end_k)], end_k)
    if seen is None or has_holes:  # pair by pair
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
        options = {"mask_function": mask_function, "attention_mask": attention_mask, "config": config, **more}
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made = made & mask(sdpa_mask(**sizes, **offsets, **options).cpu().numpy())
    return _Mask(made, (batch_size, 1, q_length, kv_length), more.get("device", "cpu"), packed is not None)


def _model_pattern(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of transformers' function of indices, within one sequence where several are packed in a row; None for
    a function that is not known, which must be evaluated."""
    if mask_function is causal_mask_function:
        return causal()
    if mask_function is bidirectional_mask_function:
        return as_pattern("full")
    parts: tuple[Any, ...] = _closed_over(mask_function, "mask_functions") or ()
    if len(parts) != 2:
        return None
    if parts[1] is causal_mask_function:  # sliding_window_causal_mask_function
        width = _closed_over(parts[0], "sliding_window")
        return None if width is None else causal() & window(width - 1, 0)
    if _closed_over(parts[1], "packed_sequence_mask") is not None:  # after remap_positions_for_packed_sequence
        of_sequence = _closed_over(parts[0], "mask_function")
        return None if of_sequence is None else _model_pattern(of_sequence)
    return None


def _packed_rows(mask_function: Callable[..., Any]) -> list[tuple[int, ...]] | None:
    """Of each row the first tokens of the sequences that are packed in it, and its end; None where none are."""
    parts = _closed_over(mask_function, "mask_functions") or (None,)
    numbers = _closed_over(parts[-1], "packed_sequence_mask")  # [batch, tokens], the same within a sequence
    if numbers is None:
        return None
    rows = numbers.cpu().numpy()
    return [(0, *(int(place) + 1 for place in np.flatnonzero(np.diff(row))), len(row)) for row in rows]


def _closed_over(function: Any, name: str) -> Any:
    """What a function has of the one that made it, by its name there; None where it has no such thing."""
    return inspect.getclosurevars(function).nonlocals.get(name) if inspect.isfunction(function) else None


def _padded_rows(attention_mask: torch.Tensor | None, batch: int, end: int) -> tuple[list[tuple[int, ...]], bool]:
    """Of each row the first real token and the one after its last, at most end; whether there is padding between."""
    if attention_mask is None:
        return [(0, end)] * batch, False
    real = attention_mask[:, :end].cpu().numpy().astype(bool)
    places = [np.flatnonzero(row) for row in real]
    rows: list[tuple[int, ...]] = [(int(x[0]), int(x[-1]) + 1) if len(x) else (0, 0) for x in places]
    return rows, any(last - first != len(x) for (first, last), x in zip(rows, places))


def _in_rows(pattern: Pattern, rows: list[tuple[int, ...]], q_offset: int, q_length: int, end_k: int) -> Pattern:
    """The pattern within the sequences of each row, which begin and end at the tokens that rows names: positions count
    from their first. Queries stand at q_offset + [0, q_length), keys at [0, end_k)."""

    def row(edges: tuple[int, ...]) -> Pattern:
        return per_document(pattern, [min(max(edge - q_offset, 0), q_length) for edge in edges], list(edges))

    if set(rows) == {(0, end_k)}:
        return pattern
    forms = {edges: row(edges) for edges in rows}
    number = {edges: n for n, edges in enumerate(forms)}
    return forms[rows[0]] if len(forms) == 1 else per_batch(list(forms.values()), [number[edges] for edges in rows])


# ---- once a layer ----


@_outside_of_graphs
def _attend(
    pattern: Pattern,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query [batch, heads_q, seq_q, head_dim], key and value
    [batch, heads_kv, seq_k, ...]; returns [batch, seq_q, heads_q, head_dim] and no weights, which are never made."""
    _refuse(dropout=dropout, **more)
    if _may_be_cross(module):
        raise _cross_attention()
    if attention_mask is None or isinstance(attention_mask, _Mask) and not attention_mask.is_packed:
        _refuse_packed(more.get("cu_seq_lens_q"))
    if attention_mask is None:  # a model that asks for no mask, or says by None that there is nothing to mask
        causal_here = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal_here and query.shape[2] != key.shape[2]:
            raise _cross_attention()
        made = pattern & causal() if causal_here else pattern
        width = more.get("sliding_window")
        made = made & window(width - 1, 0) if width else made
    elif isinstance(attention_mask, _Mask):
        made = attention_mask.pattern
    else:
        allowed, q_length, kv_length = _read_mask(attention_mask).cpu().numpy(), query.shape[2], key.shape[2]
        q_offset = _offset_under(allowed, q_length, kv_length, more.get("position_ids"))
        made = _in_rows(pattern, [(0, q_offset + q_length)], q_offset, q_length, kv_length) & mask(allowed)
    sinks = None if s_aux is None else s_aux.float()
    operands = (query, key, value)
    out = attention(*operands, made, axes="bhsd", scale=scaling, softcap=softcap, sink_logits=sinks)
    return out.transpose(1, 2).contiguous(), None


def _read_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """A mask of a user's own, [batch, 1 or heads, q, k], as bool."""
    if attention_mask.dtype == torch.bool:
        return attention_mask
    hidden = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
    if not (hidden | (attention_mask == 0)).all():
        message = (
            "attention_mask adds biases to scores; accepted: bool, or 0 where seen and the lowest number elsewhere"
        )
        raise UnsupportedError(message, argument="attention_mask")
    seen: torch.Tensor = ~hidden
    return seen


def _offset_under(allowed: NDArray[np.bool_], q_length: int, kv_length: int, position_ids: torch.Tensor | None) -> int:
    """Where the first query stands among the keys under a mask of a user's own, with which transformers tells nothing
    of the cache.

    The queries are the last tokens. Behind them a static cache has a tail that none of them sees, and a sliding cache
    has dropped its first keys. The call's position_ids [..., q] tell the place, unless they are a user's own as well:
    they have to agree with the mask, by which no key behind the queries is seen.
    """
    if q_length == kv_length:
        return 0
    seen = np.flatnonzero(allowed.any(axis=(0, 1, 2)))
    least, most = (int(seen[-1]) + 1 if len(seen) else 0) - q_length, kv_length - q_length
    if position_ids is None:
        first, is_run = least, False
    else:
        first = int(position_ids.min())
        is_run = bool((position_ids == first + torch.arange(q_length, device=position_ids.device)).all())
    if least == most >= first:
        return most
    if is_run and least <= first <= most:
        return first
    message = (
        f"attention_mask has four axes, and where among the cache's {kv_length} keys the {q_length} queries stand is "
        "not known; accepted: a mask [batch, tokens], a dynamic cache, position_ids that count the tokens of the cache"
    )
    raise UnsupportedError(message, argument="attention_mask")


def _may_be_cross(module: torch.nn.Module) -> bool:
    """Whether the keys of a layer may be another sequence's, which their number does not tell. Some models say it of
    the layer; others have one class for both, whose decoders are causal where they attend to themselves."""
    known = getattr(module, "is_cross_attention", None)
    if known is not None:
        return bool(known)
    is_other = not getattr(module, "is_causal", False) and getattr(module, "is_decoder", True)
    return "CrossAttention" in type(module).__name__ or is_other and _takes_another_sequence(type(module).forward)


@functools.lru_cache(maxsize=None)
def _takes_another_sequence(forward: Any) -> bool:
    names = inspect.signature(forward).parameters
    return "key_value_states" in names or "encoder_hidden_states" in names


def _cross_attention() -> UnsupportedError:
    message = (
        "cross attention, or a layer that cannot be told from it: its queries have no positions among the keys; "
        "accepted: self attention"
    )
    return UnsupportedError(message, argument="k")


def _refuse(dropout: float, position_bias: Any = None, cache: Any = None, **_: Any) -> None:
    """Raises for what would be silently left out."""
    if dropout:
        message = f"attention dropout is {dropout}; accepted: 0, by attention_dropout=0 in the model's config or eval()"
        raise UnsupportedError(message, argument="dropout")
    if position_bias is not None:
        raise UnsupportedError("the model adds a position bias to scores; accepted: models that do not")
    if cache is not None:
        raise UnsupportedError("a paged cache of continuous batching; accepted: dynamic, static and sliding caches")


def _refuse_packed(offsets: torch.Tensor | None) -> None:
    """Raises where a data collator says to attention functions that read it, as flash attention, that sequences are
    packed in a row, and the mask does not know it."""
    if offsets is not None and len(offsets) > 2:
        message = (
            f"cu_seq_lens_q tells of {len(offsets) - 1} sequences in a row, and the model's mask does not; accepted: "
            "position_ids that begin anew with each, without attention_mask and with use_cache=False"
        )
        raise UnsupportedError(message, argument="cu_seq_lens_q")
