# SPDX-License-Identifier: MIT
"""Layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from .._analytic import bigbird, global_tokens
from .._core import ArgumentError, ShapeError, UnsupportedError, integers_of
from .._patterns import Pattern, as_pattern
from .._problem import sizes_of
from ._attention import _attend, causal_of
from ._tensors import require_memory, require_tensor, with_mask

if TYPE_CHECKING:
    from .._patterns import AnyPattern


class BlockSparseMultiHeadAttention(torch.nn.Module):
    """torch.nn.MultiheadAttention over the pairs that a pattern keeps: its parameters, names and conventions.

    embed_dim   of query, key and value; num_heads divides it
    block_size  tokens of a block in the patterns that have a name
    pattern     "local": each block sees itself and its neighbours; "global": the first block_size tokens see and are
                seen by all; "mixed": both; or any Pattern, its text, or a mask
    dropout     0: there is no dropout inside attention
    batch_first tensors are [batch, seq, embed_dim], else [seq, batch, embed_dim]

    A state_dict of MultiheadAttention of the same sizes loads. As self_attn of torch's TransformerEncoderLayer it is
    asked in both modes.

    Raises ArgumentError, UnsupportedError, DTypeError: .argument names what was wrong.
    """

    # Whether torch's encoder layers may compute attention by themselves in eval mode, from the parameters alone.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        block_size: int = 64,
        pattern: AnyPattern = "mixed",
        *,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        embed_dim, num_heads = integers_of(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            message = f"embed_dim is {embed_dim} and num_heads {num_heads}; accepted: a multiple, both positive"
            raise ArgumentError(message, "SPATTN_E_RANGE", "embed_dim")
        _refuse_dropout(dropout)
        self.embed_dim, self.num_heads, self.block_size = embed_dim, num_heads, block_size
        self.dropout, self.batch_first = dropout, batch_first
        self.pattern = _named_pattern(pattern, block_size)
        options = {"device": device, "dtype": dtype}
        self.in_proj_weight = torch.nn.Parameter(torch.empty((3 * embed_dim, embed_dim), **options))
        self.in_proj_bias = torch.nn.Parameter(torch.empty(3 * embed_dim, **options)) if bias else None
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias=bias, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The values that MultiheadAttention begins with."""
        torch.nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            torch.nn.init.zeros_(self.in_proj_bias)
            torch.nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """(out, None): out shaped as query. The weights, which nobody computes here, are never returned.

        query             [seq_q, batch, embed_dim], [batch, seq_q, embed_dim] with batch_first, or [seq_q, embed_dim]
        key, value        [seq_k, batch, embed_dim] and so on
        key_padding_mask  bool [batch, seq_k], True where a key is padding
        attn_mask         bool [seq_q, seq_k] or [batch * num_heads, seq_q, seq_k], True where a key must not be seen
        is_causal         cuts the pattern to "causal"

        A mask may be of floats that are 0 or -infinity, as torch's encoder makes them: -infinity is True. A query
        without keys gets the bias of out_proj alone. The host reads masks: what stays the same belongs into the
        pattern. In compiled code one mask of both may be given, and masks are bool.

        Raises UnsupportedError where need_weights is True or a mask holds other numbers, ShapeError, DTypeError.
        """
        if need_weights:
            message = "need_weights is True; accepted: False, as weights are never computed as a whole"
            raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "need_weights")
        for name, x in (("query", query), ("key", key), ("value", value)):
            require_tensor(x, name, takes_meta=True)
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                message = f"argument {name} has shape {list(x.shape)}; accepted: 2 axes, or 3 with a batch, as of query"
                raise ShapeError(message, "SPATTN_E_SHAPE", name)
        is_batch = query.dim() == 3
        if not is_batch:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in self._project(query, key, value))
        pattern, mask = self._pattern_of_call(q, k, key_padding_mask, attn_mask, is_causal)
        scalars = ("bshd", None, None, None, None, torch.are_deterministic_algorithms_enabled(), False, False)
        out = _attend(q, k, v, (None, None, None), mask, pattern, scalars)
        out = self.out_proj(out.flatten(-2))
        if not is_batch:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _project(self, query: Any, key: Any, value: Any) -> Any:
        if query is key and key is value:
            return linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [linear(*of) for of in zip((query, key, value), self.in_proj_weight.chunk(3), biases)]

    def _pattern_of_call(self, q: Any, k: Any, padding: Any, attn_mask: Any, is_causal: bool) -> tuple[Any, Any]:
        """The pattern, and a mask that remains beside it."""
        padding, attn_mask = _hidden(padding, "key_padding_mask"), _hidden(attn_mask, "attn_mask")
        batch, seq_q, seq_k = q.shape[0], q.shape[1], k.shape[1]
        if padding is not None and (padding.shape[-1] != seq_k or padding.numel() != batch * seq_k):
            message = f"argument key_padding_mask has shape {list(padding.shape)}; accepted: {[batch, seq_k]}"
            raise ShapeError(message, "SPATTN_E_SHAPE", "key_padding_mask")
        if attn_mask is not None:
            of_all = [batch * self.num_heads, seq_q, seq_k]
            has_axes = attn_mask.dim() == 2 or attn_mask.dim() == 3 and attn_mask.shape[0] == of_all[0]
            if not has_axes or attn_mask.shape[-1] != seq_k or attn_mask.shape[-2] not in (1, seq_q):
                message = f"argument attn_mask has shape {list(attn_mask.shape)}; accepted: {of_all[1:]}, or {of_all}"
                raise ShapeError(message, "SPATTN_E_SHAPE", "attn_mask")
        pattern = causal_of(self.pattern) if is_causal else self.pattern
        kept = None if padding is None else ~padding.reshape(batch, 1, 1, seq_k)
        if attn_mask is None:
            return pattern, kept
        allowed = ~attn_mask if attn_mask.dim() == 2 else ~attn_mask.unflatten(0, (-1, self.num_heads))
        if kept is not None:
            pattern = with_mask(pattern, kept, sizes_of(q.shape, k.shape, None, "bshd"))
        return pattern, allowed

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, pattern={str(self.pattern)!r}"


def _named_pattern(pattern: AnyPattern, block_size: int) -> Pattern:
    if not isinstance(pattern, str) or pattern not in ("local", "global", "mixed"):
        return as_pattern(pattern)
    local, first = bigbird(block_size, 3, 0, 0), global_tokens(range(block_size))
    return {"local": local, "global": first, "mixed": local | first}[pattern]


def _hidden(mask: Any, name: str) -> Any:
    """The mask as bools, True where nothing is seen."""
    if mask is None:
        return mask
    if not isinstance(mask, torch.Tensor):
        require_memory(mask, name)
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() and not torch.compiler.is_compiling():  # there nobody can look at its numbers
        hidden = mask == float("-inf")
        if bool((hidden | (mask == 0)).all()):
            return hidden
    message = f"argument {name} is {mask.dtype}; accepted: torch.bool, True where nothing is seen, "
    message += "or floats, all of them 0 or -infinity, in code that is not compiled"
    raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", name)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        message = f"dropout is {dropout}; accepted: 0, as there is no dropout inside attention"
        raise UnsupportedError(message, "SPATTN_E_UNSUPPORTED", "dropout")
