# SPDX-License-Identifier: MIT
"""Attention as everybody writes it down first: dense scores, a mask, softmax; NumPy in float64, one head at a time."""

from __future__ import annotations

import numpy as np


def attend_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float) -> tuple[np.ndarray, ...]:
    """q [seq_q, head_dim], k, v [seq_k, head_dim], mask [seq_q, seq_k] -> out, p [seq_q, seq_k], lse [seq_q]."""
    s = np.where(mask, scale * (q @ k.T), -np.inf)
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(m), m, 0))  # a row without keys becomes a row of zeros
    l = p.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[:, 0]
    p /= np.where(l > 0, l, 1)
    return p @ v, p, lse


def forward_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, mask: np.ndarray, scale: float
) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv of [seq, heads, head_dim] arrays and a mask [heads_q, seq_q, seq_k]; heads of q share kv."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    result = {
        "out": np.empty_like(dout),
        "lse": np.empty((q.shape[1], q.shape[0])),
        "dq": np.empty_like(q),
        "dk": np.zeros_like(k),
        "dv": np.zeros_like(v),
    }
    for head in range(q.shape[1]):
        shared = head // group
        one_q, one_k, one_v, one_dout = q[:, head], k[:, shared], v[:, shared], dout[:, head]
        # out = p v
        out, p, result["lse"][head] = attend_head(one_q, one_k, one_v, mask[head], scale)
        result["out"][:, head] = out
        result["dv"][:, shared] += p.T @ one_dout
        dp = one_dout @ one_v.T
        # p = softmax(s), so ds = p (dp - delta) with delta the row sums of dout out
        ds = p * (dp - (one_dout * out).sum(axis=1, keepdims=True))
        # s = scale q kT
        result["dq"][:, head] = scale * (ds @ one_k)
        result["dk"][:, shared] += scale * (ds.T @ one_q)
    return result


def floors(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, scale: float) -> dict[str, float]:
    """Sizes below which a true array counts as nothing: where products cancel, as in the gradient of a query that sees
    one key, only their rounding is left. A hundredth of what the products may reach."""

    def longest(x: np.ndarray) -> float:
        return float(np.linalg.norm(x.astype(np.float64), axis=-1).max())

    dp = longest(dout) * longest(v)
    reach = {
        "out": np.abs(v).max(),
        "lse": scale * longest(q) * longest(k),
        "dq": scale * dp * np.abs(k).max(),
        "dk": scale * dp * np.abs(q).max(),
        "dv": np.abs(dout).max(),
    }
    return {name: 0.01 * float(size) for name, size in reach.items()}


def relative_errors(
    found: dict[str, np.ndarray], truth: dict[str, np.ndarray], floor: dict[str, float]
) -> dict[str, float]:
    """For each array of found, its largest error over the largest magnitude in the true one, or over the floor where
    that is more. Infinities must be the true ones; any other, and NaN, count as infinite errors."""
    errors = {}
    for name, array in found.items():
        right = truth[name]
        finite = np.isfinite(right)
        if not np.array_equal(array[~finite], right[~finite]):
            errors[name] = float("inf")
            continue
        error = np.abs(array[finite] - right[finite]).max(initial=0)
        size = max(np.abs(right[finite]).max(initial=0), floor[name], np.finfo(np.float64).tiny)
        errors[name] = float(error / size) if np.isfinite(error) else float("inf")
    return errors
