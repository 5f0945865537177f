# SPDX-License-Identifier: MIT
"""What torch.utils.flop_counter counts of the operators: FLOPs on the pairs that are kept, as Plan.stats has them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .._core import Context, ShapeError, default_context
from .._patterns import Pattern, Stats, per_batch, rows
from .._plans import Plan, find
from .._problem import sizes_of
from ._operators import NUM_OPERANDS, NUM_SCALARS, SCALES, pattern_of
from ._tensors import PLAIN, in_documents, with_mask

_FLAG = NUM_OPERANDS + NUM_SCALARS  # where forward's own scalar stands


def _flops_forward(*arguments: Any, out_val: Any = None, **options: Any) -> int:
    before, later = arguments[:_FLAG], arguments[_FLAG + 1 :]
    return int(_stats_of(*before, *later).flops_forward)


def _flops_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any, out_val: Any = None, **options: Any
) -> int:
    return int(_stats_of(*arguments).flops_backward)


def _stats_of(
    q: Any, k: Any, v: Any, sink_logits: Any, indices: Any, index_counts: Any, mask: Any, *more: Any
) -> Stats:
    """Of a call of an operator; more is what else its schema has, without the flag of forward.

    Lists of a call count with all entries that they have room for. Masks and documents whose numbers are not there, as
    those of fake tensors, count with all that they may keep.
    """
    name, axes, _, _, q_offset, head_dim_v = more[:6]
    documents = more[NUM_SCALARS + len(SCALES) :]
    pattern: Any = pattern_of(name)
    if all(x is None or _has_numbers(x) for x in documents):
        pattern = in_documents(pattern, *documents)
    if mask is not None and _has_numbers(mask):
        pattern = with_mask(pattern, mask, sizes_of(q.shape, k.shape, None if v is None else v.shape, axes, head_dim_v))
    shapes = tuple(None if x is None else tuple(map(int, x.shape)) for x in (q, k, v))
    key = (shapes, axes, *(n if n is None else int(n) for n in (q_offset, head_dim_v)))
    found: Stats = find(_make_stats, default_context(), pattern, key)
    return found


def _has_numbers(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and not tensor.is_meta


def _make_stats(
    context: Context,
    pattern: Pattern,
    shapes: tuple[Any, Any, Any],
    axes: str,
    q_offset: int | None,
    head_dim_v: int | None,
) -> Stats:
    # Pairs are the same on every device and in every dtype, and the CPU is there also where operands are fake.
    return Plan(pattern, **sizes_of(*shapes, axes, head_dim_v), q_offset=q_offset, context=context).stats()


# ---- calls on caches ----


def _flops_decoded(
    q: Any,
    out: Any,
    pattern: str,
    axes: str,
    begins: list[int],
    ends: list[int],
    heads_kv: int,
    capacity: int,
    out_val: Any = None,
    **options: Any,
) -> int:
    """What a call of decode has computed, whose queries of entry b are rows begins[b] up to ends[b] of the pattern,
    [capacity, capacity]."""
    sizes = {"heads_q": q.shape[axes.index("h")], "heads_kv": heads_kv, "seq_k": capacity}
    sizes |= {"head_dim": q.shape[-1], "head_dim_v": out.shape[-1]}
    key = (tuple(zip(begins, ends)), tuple(sizes.items()))
    found: int = find(_count_rows, default_context(), pattern_of(pattern), key)
    return found


def _count_rows(context: Context, pattern: Pattern, spans: tuple[Any, ...], sizes: tuple[Any, ...]) -> int:
    seen, options = pattern & "causal", {**dict(sizes), "context": context}
    capacity, asked = options["seq_k"], [(begin, end) for begin, end in spans if begin < end]
    if not asked:
        return 0
    try:
        made = Plan(rows(seen, asked, capacity), seq_q=sum(end - begin for begin, end in asked), **options)
        return int(made.stats().flops_forward)
    except ShapeError:  # the pattern tells batch entries apart: each entry's rows are its own
        pass
    flops = 0
    for n in {end - begin for begin, end in asked}:
        own = [rows(seen, [span], capacity) if span[1] - span[0] == n else "full - full" for span in spans]
        flops += int(Plan(per_batch(own), batch=len(own), seq_q=n, **options).stats().flops_forward)
    return flops


register_flop_formula(torch.ops.sparseattn.forward, get_raw=True)(_flops_forward)
register_flop_formula(torch.ops.sparseattn.backward, get_raw=True)(_flops_backward)
register_flop_formula(torch.ops.sparseattn.decoded, get_raw=True)(_flops_decoded)
