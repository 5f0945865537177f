# SPDX-License-Identifier: MIT
"""A text read with dense attention, and what patterns make of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Sequence

import numpy as np

from .. import Context, Pattern, attention, parse
from ..demo.model import Model

Progress = Callable[[float], None]
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
ROWS_AT_ONCE = 256  # rows of logits in memory at a time, beside those of dense attention: 50 MB
# The keys that a sink and a window of 256 tokens do not reach. Most weight lies on those that they do reach, in every
# text: how much of the rest a pattern finds says more about it.
FAR = "causal - (sink(32) | window(255,0))"


class Attention:
    """How each layer attends: with one pattern, or with lists of keys that depend on the layer's q and k.

    choose  of q [tokens, heads_q, head_dim] and k [tokens, heads_q, head_dim] the listed keys, int32 or int64
            [tokens, heads_q, keys], each once, -1 for none; pattern is then runtime_tokens(keys)
    """

    def __init__(self, pattern: Pattern | str, choose: Choose | None = None, context: Context | None = None):
        self.pattern = parse(pattern) if isinstance(pattern, str) else pattern
        self._choose, self._context = choose, context

    def lists(self, q: np.ndarray, k: np.ndarray) -> np.ndarray | None:
        """What `choose` makes of a layer's operands; None for a pattern."""
        return None if self._choose is None else self._choose(q, _for_each_head(k, q))[None]

    def forward(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, lists: np.ndarray | None, cut: Pattern | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """out [tokens, heads_q, head_dim] and lse [heads_q, tokens], of those keys alone that are in cut as well."""
        if lists is not None:  # lists belong to key heads: each query head gets one of its own
            k, v = _for_each_head(k, q), _for_each_head(v, q)
        pattern = self.pattern if cut is None else self.pattern & cut
        out, lse = attention(q[None], k[None], v[None], pattern, indices=lists, return_lse=True, context=self._context)
        return out[0], lse[0]


def _for_each_head(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.repeat(x, q.shape[1] // x.shape[1], axis=1))


@dataclass
class Kept:
    """What a pattern keeps of dense attention on the operands that dense reading makes; a number for each layer."""

    output_error: list[float] = field(default_factory=list)  # ||out - dense out|| / ||dense out||
    mass: list[float] = field(default_factory=list)  # share of the dense weight that lies on the pattern's keys
    far_mass: list[float] = field(default_factory=list)  # the same of the weight on far keys


@dataclass
class Dense:
    """A text as dense attention reads it. Rows are the queries from `first` on, but for the last, which predicts
    nothing that is known."""

    tokens: np.ndarray  # [tokens]
    first: int
    log_p: np.ndarray  # float32 [rows, vocabulary]
    nll: np.ndarray  # float32 [rows]
    right: np.ndarray  # bool [rows]: the likeliest token is the true one
    far_mass: list[float]  # share of the weight that lies on far keys, a number for each layer
    kept: dict[str, Kept]


@dataclass
class Reading:
    """A text as a pattern in all layers reads it; rows as in Dense."""

    nll: np.ndarray  # float32 [rows], nats
    kl: np.ndarray  # float32 [rows]: KL(dense || this), nats
    right: np.ndarray  # bool [rows]
    same: np.ndarray  # bool [rows]: the likeliest token is that of dense attention
    watched: np.ndarray  # float32 [rows, watched]: log p of the watched tokens


def read_dense(model: Model, tokens: np.ndarray, first: int, others: dict[str, Attention], progress: Progress) -> Dense:
    """Reads with dense attention, and tries each of others on the q, k and v of each layer as it goes by.

    A softmax over some of the keys differs from that over all in its denominator exp(lse) alone, so the share of the
    dense weight on those keys is exp(lse of them - lse of all). This is exact.
    """
    causal, far = Attention("causal"), parse(FAR)
    kept = {name: Kept() for name in others}
    far_mass: list[float] = []

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        dense_out, dense_lse = causal.forward(q, k, v, None)

        def share(lse: np.ndarray) -> float:
            return float(np.exp(lse - dense_lse)[:, first:].mean(dtype=np.float64))

        all_far = share(causal.forward(q, k, v, None, far)[1]) if others else float("nan")
        far_mass.append(all_far)
        for name, other in others.items():
            lists = other.lists(q, k)
            out, lse = other.forward(q, k, v, lists)
            _, far_lse = other.forward(q, k, v, lists, far)
            error = np.linalg.norm((out - dense_out)[first:]) / np.linalg.norm(dense_out[first:])
            kept[name].output_error.append(float(error))
            kept[name].mass.append(share(lse))
            kept[name].far_mass.append(share(far_lse) / all_far if all_far > 0 else float("nan"))
        return dense_out

    hidden = model.hidden(tokens, attend, lambda done: progress(0.9 * done))[first:-1]
    log_p = np.concatenate([_log_softmax(model.logits(rows)) for rows in _chunks(hidden)])
    progress(1.0)
    targets = tokens[first + 1 :]
    return Dense(tokens, first, log_p, -_take(log_p, targets), log_p.argmax(axis=1) == targets, far_mass, kept)


def read_beside(
    model: Model, dense: Dense, other: Attention, progress: Progress, watched: Sequence[int] = ()
) -> Reading:
    """Reads the same text with another attention in all of its layers. watched are token ids, any."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return other.forward(q, k, v, other.lists(q, k))[0]

    hidden = model.hidden(dense.tokens, attend, lambda done: progress(0.9 * done))[dense.first : -1]
    targets = dense.tokens[dense.first + 1 :]
    parts = []
    for rows, true_log_p, wanted in zip(_chunks(hidden), _chunks(dense.log_p), _chunks(targets)):
        log_p = _log_softmax(model.logits(rows))
        kl = np.einsum("rv,rv->r", np.exp(true_log_p), true_log_p - log_p)
        top = log_p.argmax(axis=1)
        same = top == true_log_p.argmax(axis=1)
        parts.append((-_take(log_p, wanted), kl, top == wanted, same, log_p[:, list(watched)]))
    progress(1.0)
    return Reading(*(np.concatenate(part) for part in zip(*parts)))


def _chunks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(rows), ROWS_AT_ONCE)]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def _take(log_p: np.ndarray, targets: np.ndarray) -> np.ndarray:
    taken: np.ndarray = log_p[np.arange(len(log_p)), targets]
    return taken
