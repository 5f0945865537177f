# SPDX-License-Identifier: MIT
"""What torch.utils.flop_counter counts of the operators: FLOPs on the pairs that a call keeps, as Plan.stats has them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .._core import Context, default_context
from .._patterns import Pattern, Stats
from .._plans import Plan, find
from .._problem import sizes_of
from ._operators import pattern_of
from ._tensors import PLAIN, with_mask


def _flops_forward(*arguments: Any, out_val: Any = None, **options: Any) -> int:
    return int(_stats_of(*arguments).flops_forward)


def _flops_backward(dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any, out_val: Any = None, **options: Any) -> int:
    return int(_stats_of(*arguments).flops_backward)


def _stats_of(
    q: Any, k: Any, v: Any, sink_logits: Any, indices: Any, index_counts: Any, mask: Any, *scalars: Any
) -> Stats:
    """Of a call of an operator; scalars are those of its schema. Lists of a call count with all entries that they have
    room for, and so do masks whose numbers are not there, as of fake tensors."""
    name, axes, _, _, q_offset, head_dim_v, *_ = scalars
    pattern: Any = pattern_of(name)
    if mask is not None and type(mask) in PLAIN and not mask.is_meta:
        pattern = with_mask(pattern, mask, q.shape[axes.index("t" if axes == "thd" else "s")])
    shapes = tuple(None if x is None else tuple(map(int, x.shape)) for x in (q, k, v))
    key = (shapes, axes, *(n if n is None else int(n) for n in (q_offset, head_dim_v)))
    found: Stats = find(_make_stats, default_context(), pattern, key)
    return found


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


register_flop_formula(torch.ops.sparseattn.forward, get_raw=True)(_flops_forward)
register_flop_formula(torch.ops.sparseattn.backward, get_raw=True)(_flops_backward)
