# SPDX-License-Identifier: MIT
"""The patterns of the study by name, all with the same number of keys a query, made for one text.

Static patterns are those of the library. One that spends less than the budget on a row gets a wider window there, until
the row has `budget` keys or all there are: no pattern is judged by keys that it did not use.
"""

import re

import numpy as np
import sparseattn as sa

SINKS, WINDOW = 32, 64  # what every pattern here has in common


def filled(pattern, tokens, budget):
    """pattern, causal, with sinks and the widest window that leaves each row at most `budget` keys.

    Raises ValueError where a row has more than that already.
    """
    causal = np.tri(tokens, dtype=bool)
    keep = (pattern | sa.sink(SINKS) | sa.window(WINDOW - 1, 0)).to_mask(tokens)[0, 0] & causal
    missing = budget - keep.sum(axis=1, keepdims=True)
    if missing.min() < 0:
        raise ValueError(f"{pattern} has rows of {budget - missing.min()} keys; accepted: at most {budget}")
    left_out = causal & ~keep
    nearest_first = np.cumsum(left_out[:, ::-1], axis=1)[:, ::-1]  # 1 at the nearest key that is left out
    return sa.mask(keep | (left_out & (nearest_first <= missing)))


# ---- block top-k ----


class BlockTopK:
    """Sinks, a window, and the blocks of keys whose summary suits the query best: NSA and MoBA take the mean of a
    block's keys (https://arxiv.org/abs/2502.11089, https://arxiv.org/abs/2502.13189), Quest bounds q k by their
    smallest and largest coordinates (https://arxiv.org/abs/2406.10774). Each head and query chooses for itself, which
    is more than those methods may afford. Keys that a block shares with sinks or window widen the window instead.
    """

    def __init__(self, budget, block, summary):
        if (budget - SINKS - WINDOW) // block < 1:
            raise ValueError(f"budget is {budget}; accepted: {SINKS + WINDOW + block} or more, for a block of {block}")
        self.budget, self.block, self.summary = budget, block, summary
        self.count = (budget - SINKS - WINDOW) // block
        self.places = budget + self.count * block  # of a list, most of those for the window empty

    def __call__(self, q, k):
        """int32 [tokens, heads, places]: the keys of each query and head, at most `budget`; -1 where there is none."""
        tokens = len(q)
        scores = self._scores(q.transpose(1, 0, 2), k.transpose(1, 0, 2))  # [heads, tokens, blocks]
        first = np.arange(scores.shape[2], dtype=np.int32) * self.block
        row = np.arange(tokens, dtype=np.int32)[:, None]
        # A block counts where it has keys that neither sinks nor the least window show.
        useful = (first + self.block > SINKS) & (first <= row - WINDOW)
        scores = np.where(useful, scores, -np.inf)
        best = np.argpartition(scores, -self.count, axis=2)[..., -self.count :]
        blocks = np.where(np.take_along_axis(scores, best, 2) == -np.inf, -1, best)
        return self._with_window(np.ascontiguousarray(blocks.transpose(1, 0, 2), np.int32))

    def _scores(self, q, k):
        heads, tokens, dim = k.shape
        q = np.ascontiguousarray(q)
        padded = np.concatenate([k, np.repeat(k[:, -1:], -tokens % self.block, axis=1)], axis=1)
        blocks = padded.reshape(heads, -1, self.block, dim)

        def against(summary):
            return np.ascontiguousarray(summary.transpose(0, 2, 1))  # [heads, head_dim, blocks]

        if self.summary == "mean":
            return q @ against(blocks.mean(axis=2))
        positive, negative = np.maximum(q, 0), np.minimum(q, 0)
        return positive @ against(blocks.max(axis=2)) + negative @ against(blocks.min(axis=2))

    def _with_window(self, blocks):
        """Keys of blocks [tokens, heads, count], -1 for none, with sinks, and with the widest window that leaves a row
        `budget` keys."""
        tokens, heads, _ = blocks.shape
        row = np.arange(tokens, dtype=np.int32)[:, None]
        apart = np.ascontiguousarray(blocks.transpose(2, 0, 1))  # NumPy is slow where the last axis is short
        begin, end = np.maximum(apart * self.block, SINKS), (apart + 1) * self.block
        width = np.full((tokens, heads), self.budget - SINKS, dtype=np.int32)
        while True:  # a narrower window covers fewer of the keys, so widths only fall, and never below WINDOW
            outside = np.maximum(np.minimum(end, row - width + 1) - begin, 0)
            fits = self.budget - SINKS - outside.sum(axis=0, where=apart >= 0, dtype=np.int32)
            if (width <= fits).all():
                break
            width = np.minimum(width, fits)
        row, width = row[..., None], width[..., None]
        keys = (blocks[..., None] * self.block + np.arange(self.block, dtype=np.int32)).reshape(tokens, heads, -1)
        keys = np.where((keys >= SINKS) & (keys <= row - width), keys, -1)
        back = np.arange(self.budget - SINKS, dtype=np.int32)
        window = np.where((back < width) & (row - back >= SINKS), row - back, -1)
        first = np.arange(SINKS, dtype=np.int32)
        sinks = np.broadcast_to(np.where(first <= row, first, -1), (tokens, heads, SINKS))
        return np.concatenate([sinks, keys, window], axis=2)


class Oracle:
    """The keys of the largest weights of dense attention: no set of as many keys keeps more mass."""

    def __init__(self, budget):
        self.places = budget

    def __call__(self, q, k):
        tokens = len(q)
        chosen = np.full((tokens, q.shape[1], self.places), -1, np.int32)
        ahead = ~np.tri(tokens, dtype=bool)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head].T
            scores[ahead] = -np.inf
            most = min(self.places, tokens)
            chosen[:, head, :most] = sa.topk(scores, most)
        return chosen


# ---- by name ----


class Text:
    """What patterns are made from: a text's tokens and identifiers."""

    def __init__(self, tokenizer, ids):
        self.ids = np.asarray(ids)
        self.symbols = sa.symbols_of(tokenizer, self.ids)

    def __len__(self):
        return len(self.ids)


def xref(text, budget, identifiers=True, **more):
    found = text.symbols if identifiers else None
    return sa.xref(text.ids, found, sinks=SINKS, window=WINDOW, budget=budget, **more)


def strided(text, budget):
    """Every n-th key back from the query, n such that the longest row has no more of them than blocks or links get."""
    return filled(sa.causal() & sa.strided(-(-len(text) // (budget - SINKS - WINDOW))), len(text), budget)


def bigbird(text, budget):
    """BigBird's random blocks (https://arxiv.org/abs/2007.14062), all of them in the past: as many blocks of 16 as the
    budget holds, drawn for each block of 16 queries from a fixed seed."""
    blocks, rng = -(-len(text) // 16), np.random.default_rng(0)
    drawn = np.zeros((blocks, blocks), dtype=bool)
    for row in range(1, blocks):
        drawn[row, rng.permutation(row)[: (budget - SINKS - WINDOW) // 16]] = True
    return filled(sa.mask(np.kron(drawn, np.ones((16, 16), bool))[: len(text), : len(text)]), len(text), budget)


STATIC = {
    "window": lambda text, budget: sa.causal() & sa.window(budget - 1, 0),
    "sink_window": lambda text, budget: sa.causal() & (sa.sink(SINKS) | sa.window(budget - SINKS - 1, 0)),
    "strided": strided,
    "bigbird": bigbird,
    "xref": xref,
    "xref_ngrams": lambda text, budget: xref(text, budget, identifiers=False),
    "xref_identifiers": lambda text, budget: xref(text, budget, ngram_keys=0),
    "xref_all_links": lambda text, budget: xref(text, budget, links=budget - SINKS - WINDOW),
    "xref_no_stop": lambda text, budget: xref(text, budget, stop_ratio=0),
}
TOPK = [f"block_topk_{block}_{summary}" for block in (16, 32, 64) for summary in ("mean", "minmax")]
NAMES = [*STATIC, *TOPK, "oracle"]


def make(name, text, budget):
    """(pattern, choose) of the pattern called `name`, one of NAMES, for this text: what quality.beside.Attention takes.

    Raises ValueError for a budget that is too small for it.
    """
    if name in STATIC:
        return STATIC[name](text, budget), None
    if name == "oracle":
        choose = Oracle(budget)
    else:
        block, summary = re.fullmatch(r"block_topk_(\d+)_(mean|minmax)", name).groups()
        choose = BlockTopK(budget, int(block), summary)
    return sa.runtime_tokens(choose.places), choose
