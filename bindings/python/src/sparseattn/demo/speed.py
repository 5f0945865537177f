# SPDX-License-Identifier: MIT
"""Attention time of one layer against the length of the text."""

from __future__ import annotations

import time
from typing import Callable

import numpy as np

from .. import Context, Pattern, Plan
from .reading import Operands

SHORTEST, LONG = 1024, 8192
ENOUGH = 0.3  # seconds of repetitions after which a time is believed


def lengths(tokens: int) -> list[int]:
    """1K, 2K, 4K, ... to 8K, or to the length of the text where that is more."""
    result = [SHORTEST]
    while result[-1] < max(LONG, tokens):
        result.append(2 * result[-1])
    return result


def stretch(x: np.ndarray, length: int) -> np.ndarray:
    """[1, length, heads, head_dim]: x, repeated where it is shorter. Time does not depend on the numbers."""
    return np.ascontiguousarray(np.resize(x, (length, *x.shape[1:])))[None]


def best_time(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls; the first warms up."""
    call()
    times: list[float] = []
    while sum(times) < ENOUGH or len(times) < 3:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(
    patterns: list[Pattern], operands: Operands, sizes: list[int], context: Context, progress: Callable[[float], None]
) -> np.ndarray:
    """float64 [patterns, sizes]: seconds of a forward pass."""
    seconds = np.empty((len(patterns), len(sizes)))
    for column, size in enumerate(sizes):
        q, k, v = (stretch(x, size) for x in (operands.q, operands.k, operands.v))
        for row, pattern in enumerate(patterns):
            plan = Plan(
                pattern,
                batch=1,
                heads_q=q.shape[2],
                heads_kv=k.shape[2],
                seq_q=size,
                head_dim=q.shape[3],
                context=context,
            )
            out = np.empty_like(q)
            seconds[row, column] = best_time(lambda: plan.forward(q, k, v, out=out))
            progress((column * len(patterns) + row + 1) / seconds.size)
    return seconds
