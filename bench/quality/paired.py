# SPDX-License-Identifier: MIT
"""Statistics of pairs. The unit is the document: all patterns read the same ones, so that a document gives one
difference, and tokens of one document, which depend on each other, are never counted as if they were many."""

import math

import numpy as np

DRAWS = 10_000


def bootstrap(differences, seed=0, draws=DRAWS, share=0.95):
    """(mean, low, high): the mean of the units' differences and its percentile interval, units drawn with replacement
    (Efron 1979). Raises ValueError for no unit."""
    differences = np.asarray(differences, np.float64)
    if not len(differences):
        raise ValueError("no units; accepted: at least one")
    drawn = np.random.default_rng(seed).integers(0, len(differences), (draws, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(differences.mean()), float(low), float(high)


def wilcoxon(differences):
    """Two-sided p of the signed-rank test (Wilcoxon 1945): how often would signs by coin leave so uneven sums of ranks?

    Exact, also with ties, which share their mean rank. Differences of 0 are left out; 1 where none is left.
    """
    differences = np.asarray(differences, np.float64)
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    doubled = 2 * ranks(np.abs(differences))  # mean ranks are halves: doubled they are whole numbers
    doubled = doubled.round().astype(int)
    ways = np.zeros(doubled.sum() + 1)  # share of sign choices by the sum of the positive ranks
    ways[0] = 1
    for rank in doubled:
        shifted = np.zeros_like(ways)
        shifted[rank:] = ways[: len(ways) - rank]
        ways = (ways + shifted) / 2
    positive = doubled[differences > 0].sum()
    lower = min(positive, doubled.sum() - positive)
    return min(1.0, 2 * float(ways[: lower + 1].sum()))


def ranks(values):
    """1 for the smallest; equal ones share the mean of their places."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


def holm(p_values):
    """p of each of several tests, raised so that any of them is below alpha by chance with probability alpha at most
    (Holm 1979)."""
    p_values = np.asarray(p_values, np.float64)
    order = np.argsort(p_values, kind="stable")
    raised = np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1))
    result = np.empty_like(p_values)
    result[order] = np.minimum(raised, 1)
    return result.tolist()


def cliffs_delta(one, other):
    """How often a value of one exceeds a value of other, less how often it falls short: -1 .. 1 (Cliff 1993)."""
    one, other = np.asarray(one)[:, None], np.asarray(other)[None, :]
    return float(np.sign(one - other).mean())


def mcnemar(one, other):
    """Two-sided exact p that two ways to answer the same questions, right or wrong, are equally good (McNemar 1947)."""
    one, other = np.asarray(one, bool), np.asarray(other, bool)
    if one.shape != other.shape:
        raise ValueError(f"{one.shape} and {other.shape} answers; accepted: answers to the same questions")
    better, worse = int((one & ~other).sum()), int((~one & other).sum())
    tail = sum(math.comb(better + worse, count) for count in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2 ** (better + worse))
