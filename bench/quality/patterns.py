# SPDX-License-Identifier: MIT
"""The patterns of the study by name, all with the same number of keys a query, made for one text.

Static patterns are those of the library. One that spends less than the budget on a row gets a wider window there, until
the row has `budget` keys or all there are: no pattern is judged by keys that it did not use.
"""

import functools
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
    nearest_first = np.cumsum(left_out[:, ::-1], axis=1, dtype=np.int32)[:, ::-1]  # 1 at the nearest key that is left out
    return sa.mask(keep | (left_out & (nearest_first <= missing)))


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


@functools.lru_cache(16)
def strided(tokens, budget):
    """Every n-th key back from the query, n such that the longest row has no more of them than blocks or links get."""
    return filled(sa.causal() & sa.strided(-(-tokens // (budget - SINKS - WINDOW))), tokens, budget)


@functools.lru_cache(16)
def bigbird(tokens, budget):
    """BigBird's random blocks (https://arxiv.org/abs/2007.14062), all of them in the past: as many blocks of 16 as the
    budget holds, drawn for each block of 16 queries from a fixed seed."""
    blocks, rng = -(-tokens // 16), np.random.default_rng(0)
    drawn = np.zeros((blocks, blocks), dtype=bool)
    for row in range(1, blocks):
        drawn[row, rng.permutation(row)[: (budget - SINKS - WINDOW) // 16]] = True
    return filled(sa.mask(np.kron(drawn, np.ones((16, 16), bool))[:tokens, :tokens]), tokens, budget)


STATIC = {
    "window": lambda text, budget: sa.causal() & sa.window(budget - 1, 0),
    "sink_window": lambda text, budget: sa.causal() & (sa.sink(SINKS) | sa.window(budget - SINKS - 1, 0)),
    "strided": lambda text, budget: strided(len(text), budget),
    "bigbird": lambda text, budget: bigbird(len(text), budget),
    "xref": xref,
    "xref_ngrams": lambda text, budget: xref(text, budget, identifiers=False),
    "xref_identifiers": lambda text, budget: xref(text, budget, ngram_keys=0),
    "xref_all_links": lambda text, budget: xref(text, budget, links=budget - SINKS - WINDOW),
    "xref_no_stop": lambda text, budget: xref(text, budget, stop_ratio=0),
}
TOPK = [f"block_topk_{block}_{summary}" for block in (16, 32, 64) for summary in ("mean", "minmax")]
NAMES = [*STATIC, *TOPK, "oracle"]


def least_budget(name):
    """The keys of a row that the pattern needs at least."""
    block = re.fullmatch(r"block_topk_(\d+)_.*", name)
    return SINKS + WINDOW + (int(block[1]) if block else 16)


def make(name, text, budget):
    """(pattern, choose) of the pattern called `name`, one of NAMES, for this text; choose is None for what the text
    alone decides, and else makes lists of keys of a layer's q and k, as choices.BlockTopK does.

    Raises ValueError for a budget that is too small for it.
    """
    if budget < least_budget(name):
        raise ValueError(f"budget is {budget}; accepted for {name}: {least_budget(name)} or more")
    if name in STATIC:
        return STATIC[name](text, budget), None
    import choices  # torch is needed only where lists depend on q and k

    if name == "oracle":
        choose = choices.Oracle(budget)
    else:
        block, summary = re.fullmatch(r"block_topk_(\d+)_(mean|minmax)", name).groups()
        choose = choices.BlockTopK(budget, int(block), summary)
    return sa.runtime_tokens(choose.places), choose
