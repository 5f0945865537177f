# SPDX-License-Identifier: MIT
"""Attention time of one layer against the length of the text."""

from __future__ import annotations

import functools
from typing import Callable

import numpy as np

from .. import Pattern
from .device import Device
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
    """[length, heads, head_dim]: x, repeated where it is shorter. Time does not depend on the numbers."""
    return np.ascontiguousarray(np.resize(x, (length, *x.shape[1:])))


def best_time(device: Device, call: Callable[..., object], *operands: object) -> float:
    """Seconds of the fastest of several calls; the first warms up."""
    call(*operands)
    times: list[float] = []
    while sum(times) < ENOUGH or len(times) < 3:
        times.append(device.timed(call, *operands)[1])
    return min(times)


def measure(
    patterns: list[Pattern],
    operands: Operands,
    sizes: list[int],
    device: Device,
    progress: Callable[[float], None],
    backward: bool = False,
) -> np.ndarray:
    """float64 [patterns, sizes]: seconds of a forward pass, or of forward and backward."""
    seconds = np.empty((len(patterns), len(sizes)))
    for column, size in enumerate(sizes):
        q, k, v = (device.place(stretch(x, size)) for x in (operands.q, operands.k, operands.v))
        sizes_of_heads = {"heads_q": q.shape[2], "heads_kv": k.shape[2], "head_dim": q.shape[3]}
        for row, pattern in enumerate(patterns):
            run = device.plan(pattern, seq_q=size, **sizes_of_heads)
            out, _ = run(q, k, v)
            call = functools.partial(device.gradients, pattern) if backward else run
            seconds[row, column] = best_time(device, call, q, k, v, out)
            progress((column * len(patterns) + row + 1) / seconds.size)
    return seconds
