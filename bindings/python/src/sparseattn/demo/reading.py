# SPDX-License-Identifier: MIT
"""What a pattern costs, and what it keeps, while a model reads a text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable

import numpy as np

from .. import Pattern
from .device import Device, Run
from .model import Model, Shape

Progress = Callable[[float], None]
SETTLE = 0.15  # seconds: OpenBLAS's threads spin for a tenth of a second after a product, on the cores that we time


@dataclass
class Entry:
    """A pattern and what was found out about it."""

    pattern: Pattern
    device: Device
    run: Run
    density: float
    seconds: list[float] = field(default_factory=list)  # attention of each layer
    mass: list[float] = field(default_factory=list)  # share of the dense attention's weight, mean of each layer
    perplexity: float = float("nan")

    def title(self) -> str:
        """Its text; dense causal attention is said to be dense."""
        return f"{self.pattern} (dense)" if str(self.pattern) == "causal" else str(self.pattern)


@dataclass
class Operands:
    """q [tokens, heads_q, head_dim] and k, v [tokens, heads_kv, head_dim] of one layer, as the model made them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def make_entry(pattern: Pattern, shape: Shape, tokens: int, device: Device) -> Entry:
    """Plans the pattern for one text of this length."""
    heads = {"heads_q": shape.heads_q, "heads_kv": shape.heads_kv, "head_dim": shape.head_dim}
    return Entry(pattern, device, device.plan(pattern, seq_q=tokens, **heads), pattern.density(tokens))


def forward(entry: Entry, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """out [tokens, heads_q, head_dim], lse [heads_q, tokens] and the seconds that they took."""
    (out, lse), seconds = entry.device.timed(entry.run, *map(entry.device.place, (q, k, v)))
    return entry.device.fetch(out), entry.device.fetch(lse), seconds


def read_dense(
    model: Model, tokens: np.ndarray, dense: Entry, others: list[Entry], kept_layer: int, progress: Progress
) -> Operands:
    """The model reads with dense attention; every pattern is tried on the q, k and v of each layer as it goes by.

    So all times are of the same numbers, side by side, and the mass is exact: a pattern's softmax differs from the
    dense one only in its denominator, exp(lse), hence exp(lse of the pattern - lse of dense) of the dense weight lies
    on its keys.
    """
    kept: list[Operands] = []

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        if layer == kept_layer:
            kept.append(Operands(q, k, v))
        time.sleep(SETTLE)
        out, dense_lse, seconds = forward(dense, q, k, v)
        dense.seconds.append(seconds)
        dense.mass.append(1.0)
        for entry in others:
            _, lse, seconds = forward(entry, q, k, v)
            entry.seconds.append(seconds)
            entry.mass.append(float(np.exp(lse - dense_lse).mean(dtype=np.float64)))
        return out

    dense.perplexity = float(np.exp(model.read(tokens, attend, progress)))
    return kept[0]


def read_sparse(model: Model, tokens: np.ndarray, entry: Entry, progress: Progress) -> None:
    """The model reads with this pattern in all of its layers: how much worse does it guess the next token?"""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return forward(entry, q, k, v)[0]

    entry.perplexity = float(np.exp(model.read(tokens, attend, progress)))
