# SPDX-License-Identifier: MIT
"""Weights in bfloat16, by torch, for CPUs that have units for their products.

Operands are rounded, sums are float32; all else of the model, and attention, stays float32. Where weights came out of
four bits, as those of SmolLM2 here, that rounding is the smaller one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..demo.model import Model


class Bfloat16Matrix:
    """Weights [in, out] that stand to the right of `@`, as float32 arrays do."""

    __array_ufunc__ = None  # NumPy leaves `array @ this` to __rmatmul__

    def __init__(self, weights: np.ndarray):
        import torch

        self._torch = torch
        self._weights = torch.from_numpy(np.ascontiguousarray(weights)).bfloat16()

    def __rmatmul__(self, x: np.ndarray) -> Any:
        rows = self._torch.from_numpy(np.ascontiguousarray(x)).bfloat16()
        return (rows @ self._weights).float().numpy()


def round_weights(model: Model) -> Model:
    """The same model with products in bfloat16."""
    names = ("qkv", "attention_out", "gate_up", "down")
    layers = []
    for layer in model.layers:
        matrices: dict[str, Any] = {name: Bfloat16Matrix(getattr(layer, name)) for name in names}
        layers.append(replace(layer, **matrices))
    rounded = Model(model.shape, model.embedding, layers, model.norm)
    rounded.output = Bfloat16Matrix(model.output)
    return rounded
