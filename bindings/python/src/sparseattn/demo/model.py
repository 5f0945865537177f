# SPDX-License-Identifier: MIT
"""A Llama-shaped language model in NumPy, as far as reading text needs it: tokens in, loss of each next token out.

The attention is not here: `read` hands q, k and v of each layer to a function of the caller. The shape (RMS norms,
rotary positions, grouped heads, gated feed-forward) is that of Llama 2 (https://arxiv.org/abs/2307.09288).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping

import numpy as np

Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
ROWS_AT_ONCE = 256  # rows of logits in memory at a time: 50 MB for a vocabulary of 49,152


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: heads_q query heads share heads_kv key heads; head_dim is the width of one."""

    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    rope_base: float
    norm_epsilon: float
    context: int


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, [in, out] each; qkv and gate_up lie side by side, so that one product makes them all."""

    attention_norm: np.ndarray
    qkv: np.ndarray
    attention_out: np.ndarray
    feed_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """x / sqrt(mean(x^2)) times weight, over the last axis."""
    mean_square = np.einsum("nd,nd->n", x, x)[:, None] / x.shape[1]
    normed: np.ndarray = x * (weight / np.sqrt(mean_square + epsilon))
    return normed


def rotations(tokens: int, head_dim: int, base: float) -> np.ndarray:
    """[tokens, head_dim / 2] unit complex numbers: position times frequency, as an angle."""
    frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
    turned: np.ndarray = np.exp(1j * np.outer(np.arange(tokens), frequency)).astype(np.complex64)
    return turned


def rotate(x: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Rotary positions (https://arxiv.org/abs/2104.09864). GGUF stores each pair side by side: a complex number."""
    pairs = np.ascontiguousarray(x).view(np.complex64)  # [tokens, heads, head_dim / 2]
    rotated: np.ndarray = (pairs * rotation[:, None, :]).view(np.float32)
    return rotated


def gated(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, of [tokens, 2 * width]."""
    gate, up = np.split(gate_up, 2, axis=1)
    with np.errstate(over="ignore"):  # exp(-gate) may be inf: the quotient is then the right 0
        product: np.ndarray = gate / (1 + np.exp(-gate)) * up
    return product


class Model:
    """A language model that reads."""

    def __init__(self, shape: Shape, embedding: np.ndarray, layers: list[Layer], norm: np.ndarray):
        self.shape = shape
        self.embedding = embedding  # [vocabulary, width]
        self.output: Any = embedding.T  # [width, vocabulary], to the right of `@`; the weights are tied
        self.layers = layers
        self.norm = norm

    @classmethod
    def from_gguf(cls, shape: Shape, weights: Mapping[str, np.ndarray]) -> "Model":
        """From the names and [out, in] matrices of a GGUF file, all float32."""

        def layer(n: int) -> Layer:
            def matrix(*names: str) -> np.ndarray:
                return np.ascontiguousarray(np.concatenate([weights[f"blk.{n}.{name}.weight"] for name in names]).T)

            return Layer(
                attention_norm=weights[f"blk.{n}.attn_norm.weight"],
                qkv=matrix("attn_q", "attn_k", "attn_v"),
                attention_out=matrix("attn_output"),
                feed_norm=weights[f"blk.{n}.ffn_norm.weight"],
                gate_up=matrix("ffn_gate", "ffn_up"),
                down=matrix("ffn_down"),
            )

        return cls(
            shape, weights["token_embd.weight"], [layer(n) for n in range(shape.layers)], weights["output_norm.weight"]
        )

    def read(self, tokens: np.ndarray, attend: Attend, progress: Callable[[float], None] = lambda share: None) -> float:
        """Mean loss, in nats, of tokens[1:], each predicted from those before it; attend and progress as in hidden."""
        x = self.hidden(tokens, attend, lambda share: progress(0.8 * share))
        loss = self._loss(x[:-1], tokens[1:])
        progress(1.0)
        return loss

    def hidden(
        self, tokens: np.ndarray, attend: Attend, progress: Callable[[float], None] = lambda share: None
    ) -> np.ndarray:
        """float32 [tokens, width]: what the model knows after each token, from which `logits` are made.

        attend(layer, q, k, v) gets q [tokens, heads_q, head_dim] and k, v [tokens, heads_kv, head_dim], float32,
        positions already in them, and returns [tokens, heads_q, head_dim]. progress hears the share that is done.
        """
        shape = self.shape
        x = self.embedding[tokens]  # [tokens, width]
        rotation = rotations(len(tokens), shape.head_dim, shape.rope_base)
        for n, layer in enumerate(self.layers):
            qkv = rms_norm(x, layer.attention_norm, shape.norm_epsilon) @ layer.qkv
            q, k, v = self._heads(qkv)
            seen = attend(n, rotate(q, rotation), rotate(k, rotation), np.ascontiguousarray(v))
            x = x + seen.reshape(len(tokens), -1) @ layer.attention_out
            x = x + gated(rms_norm(x, layer.feed_norm, shape.norm_epsilon) @ layer.gate_up) @ layer.down
            progress((n + 1) / len(self.layers))
        return rms_norm(x, self.norm, shape.norm_epsilon)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [rows, vocabulary] of rows of hidden."""
        found: np.ndarray = hidden @ self.output
        return found

    def _heads(self, qkv: np.ndarray) -> list[np.ndarray]:
        heads = qkv.reshape(len(qkv), -1, self.shape.head_dim)
        q_end = self.shape.heads_q
        return np.split(heads, [q_end, q_end + self.shape.heads_kv], axis=1)

    def _loss(self, x: np.ndarray, targets: np.ndarray) -> float:
        total = 0.0
        for begin in range(0, len(x), ROWS_AT_ONCE):
            logits = self.logits(x[begin : begin + ROWS_AT_ONCE])  # [rows, vocabulary]
            wanted = logits[np.arange(len(logits)), targets[begin : begin + ROWS_AT_ONCE]]
            peak = logits.max(axis=1)
            log_sum = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
            total += float((log_sum - wanted).sum(dtype=np.float64))
        return total / len(x)
