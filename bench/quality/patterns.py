# SPDX-License-Identifier: MIT
"""The patterns of the study by name, all with the same number of keys a query, made for one text.

Static patterns are those of the library. One that spends less than the budget on a row gets a wider window there, until
the row has `budget` keys or all there are: no pattern is judged by keys that it did not use.
"""

import functools
import re

import numpy as np
import sparseattn as sa
from links import links_of

SINKS, WINDOW = 32, 64  # what every pattern here has in common


def filled(pattern, tokens, budget):
    """pattern, causal, with sinks and the widest window that leaves each row at most `budget` keys.

    pattern  one of the library's, or a bool array [tokens, tokens]

    Raises ValueError where a row has more than that already.
    """
    causal = np.tri(tokens, dtype=bool)
    keep = pattern if isinstance(pattern, np.ndarray) else pattern.to_mask(tokens)[0, 0]
    keep = (keep | (sa.sink(SINKS) | sa.window(WINDOW - 1, 0)).to_mask(tokens)[0, 0]) & causal
    missing = budget - keep.sum(axis=1, keepdims=True)
    if missing.min() < 0:
        name = "the array" if isinstance(pattern, np.ndarray) else pattern
        raise ValueError(f"{name} has rows of {budget - missing.min()} keys; accepted: at most {budget}")
    left_out = causal & ~keep
    # 1 at the nearest key that is left out
    nearest_first = np.cumsum(left_out[:, ::-1], axis=1, dtype=np.int32)[:, ::-1]
    return sa.mask(keep | (left_out & (nearest_first <= missing)))


# ---- by name ----


class Text:
    """What patterns are made from: a text's tokens and identifiers."""

    def __init__(self, tokenizer, ids, symbols=None):
        """symbols: as sparseattn.symbols_of returns them; None: they are read here"""
        self.ids, self._tokenizer = np.asarray(ids), tokenizer
        self.symbols = sa.symbols_of(tokenizer, self.ids) if symbols is None else symbols

    def __len__(self):
        return len(self.ids)

    def lines(self):
        """[(begin, end, text)]: the tokens of each line. A token belongs to the line in which it ends."""
        decode = functools.cache(lambda token: self._tokenizer.decode([token]))
        lines, begin = [], 0
        for place, token in enumerate(self.ids.tolist()):
            if "\n" in decode(token) or place == len(self.ids) - 1:
                text = self._tokenizer.decode(self.ids[begin : place + 1].tolist())
                lines.append((begin, place + 1, text.strip("\n")))
                begin = place + 1
        return lines


def xref(text, budget, identifiers=True, **more):
    found = text.symbols if identifiers else None
    return sa.xref(text.ids, found, sinks=SINKS, window=WINDOW, budget=budget, **more)


def xref_blocks(text, budget, block):
    """xref in whole blocks of keys, which is how block top-k chooses: each row sees the blocks that hold most of its
    linked keys, the nearest among equals, as many as sinks and window leave room for."""
    tokens = len(text)
    keep, places = xref(text, budget).to_mask(tokens)[0, 0], np.arange(tokens)
    # Behind the last key that a row leaves out lies its window, and before it what is linked.
    left_out = np.where(~keep & np.tri(tokens, dtype=bool), places, -1).max(axis=1)
    linked = keep & (places < left_out[:, None]) & (places >= SINKS)
    held = np.add.reduceat(linked, np.arange(0, tokens, block), axis=1, dtype=np.int32)
    nearest_first = np.argsort(-held[:, ::-1], axis=1, kind="stable")[:, : (budget - SINKS - WINDOW) // block]
    chosen = np.zeros_like(held, bool)
    np.put_along_axis(chosen, held.shape[1] - 1 - nearest_first, True, axis=1)
    return filled(np.repeat(chosen & (held > 0), block, axis=1)[:, :tokens], tokens, budget)


def xref_in_order(text, budget, order):
    """xref whose links are appended in another order, so that others are left out where there are too many."""
    keep = np.zeros((len(text), len(text)), bool)
    for row, linked in zip(keep, links_of(text.ids, text.symbols, SINKS, WINDOW, budget, order)):
        row[list(linked)] = True
    return filled(keep, len(text), budget)


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
    return filled(np.kron(drawn, np.ones((16, 16), bool))[:tokens, :tokens], tokens, budget)


@functools.lru_cache(16)
def longnet(tokens, budget):
    """LongNet (https://arxiv.org/abs/2307.02486): in segments that grow by four, every n-th key with n growing as fast,
    so that each segment has as many. A query sees the keys of its own residue, as LongNet's heads together let it."""
    share = (budget - SINKS - WINDOW) // 4
    parts = [sa.block_diagonal(share * 4**n) & sa.strided(4**n) for n in range(1, 5)]
    return filled(sa.causal() & sa.union(parts), tokens, budget)


@functools.lru_cache(16)
def longformer(tokens, budget):
    """Longformer (https://arxiv.org/abs/2004.05150): a window, one with gaps of three keys that reaches four times as
    far, and global tokens, which are the sinks that every pattern here has."""
    keys = budget - SINKS - WINDOW
    return filled(sa.causal() & sa.dilated(4 * (keys - 1), 0, 4), tokens, budget)


# ---- what code is known to need: for each row the latest of some tokens, as many as blocks or links get ----


def same_identifier(text, budget):
    """As the identifier attention of SparseCoder (https://arxiv.org/abs/2401.14727): earlier tokens of the identifier
    that is open at the query."""
    symbols, keep = text.symbols[:, 0], np.zeros((len(text), len(text)), bool)
    for symbol in np.unique(symbols[symbols >= 0]):
        places = np.flatnonzero(symbols == symbol)
        for number, row in enumerate(places):
            keep[row, places[max(0, number - (budget - SINKS - WINDOW)) : number]] = True
    return filled(keep, len(text), budget)


def code_memory(text, budget):
    """As the memory tokens of LongCoder (https://arxiv.org/abs/2306.14893): lines that import or define, which all that
    follows sees. Its bridge tokens are learned and not here."""
    memory = re.compile(r"\s*(export |async |public |static )*(import|from|def|class|function|interface|#include)\b")
    return latest_lines(text, budget, lambda line, next_line: memory.match(line))


def call_graph(text, budget):
    """As the graph of SabreCoder (https://github.com/DeepSoftwareAnalytics/SabreCoder), key by key: a token sees the
    definitions that its own definition has named, the latest name first and each from its beginning on, and then import
    lines. SabreCoder parses the text, links whole blocks, and makes links of the whole text; here a definition ends
    where the next one begins, and a name links from where it has been written."""
    begins = re.compile(r"\s*((?:[a-z]{3,} )*)(?:def|class|function|interface) [A-Za-z_]\w\w")
    imports = re.compile(r"\s*(import|from|#include)\b|.*\brequire\(")
    completed, tokens, most = text.symbols[:, 1].tolist(), len(text), budget - SINKS - WINDOW
    # The places where the first line of each definition begins and ends; what stands before all of them is the first.
    begun, known, named, imported = [0], [0], {}, []
    for begin, end, line in text.lines():
        if end < tokens and (match := begins.match(line)):  # a line that goes on is none yet
            symbols = [symbol for symbol in completed[begin : end + 1] if symbol >= 0]
            named.setdefault(symbols[len(match[1].split()) + 1], []).append(len(begun))
            begun.append(begin)
            known.append(end)
        if imports.match(line):
            imported.insert(0, (begin, end))
    keep = np.zeros((tokens, tokens), bool)
    for number, (first, last) in enumerate(zip(known, [*known[1:], tokens])):
        seen = []  # definitions that this one has named, the latest name first
        for row in range(first, last):
            if before := [one for one in named.get(completed[row], []) if one < number]:
                seen = [before[-1], *(one for one in seen if one != before[-1])]
            spans = [(begun[one], begun[one + 1]) for one in seen] + [span for span in imported if span[1] <= row]
            keys = [key for span in spans for key in range(*span) if SINKS <= key <= row - WINDOW]
            keep[row, keys[:most]] = True
    return filled(keep, tokens, budget)


def outline(text, budget):
    """The headings of a document: lines under which others are indented, and those that Markdown and HTML have. Where
    a tokenizer brings a line's indentation together with the line break before it, but for one space, as the study's
    does, lines are outermost or indented, and only outermost ones are headings."""
    heading = re.compile(r"#{1,6} |\s*<h[1-6]\b")

    def begins(line, next_line):
        return heading.match(line) or (line.strip() and indent(next_line) > indent(line))

    return latest_lines(text, budget, begins)


def indent(line):
    return len(line) - len(line.lstrip()) if line.strip() else 0


def latest_lines(text, budget, wanted):
    """Each row sees the last tokens of lines for which wanted(line, next line) is true."""
    lines = text.lines()
    marked = np.zeros(len(text), bool)
    for (begin, end, line), (_, _, next_line) in zip(lines, [*lines[1:], (0, 0, "")]):
        marked[begin:end] = bool(wanted(line, next_line))
    # A heading is known to be one where the next line begins: what reads it before would see the future.
    known = marked_before(marked, lines)
    count = np.cumsum(marked)
    keep = marked & (count > known[:, None] - (budget - SINKS - WINDOW)) & (count <= known[:, None])
    return filled(keep, len(text), budget)


def marked_before(marked, lines):
    """For each token, how many marked ones there are in lines whose next line has ended before it."""
    known, seen, last = np.zeros(len(marked), np.int64), 0, 0
    for begin, end, _ in lines:
        known[begin:end] = seen
        seen, last = seen + last, int(marked[begin:end].sum())
    return known


STATIC = {
    "window": lambda text, budget: sa.causal() & sa.window(budget - 1, 0),
    "sink_window": lambda text, budget: sa.causal() & (sa.sink(SINKS) | sa.window(budget - SINKS - 1, 0)),
    "strided": lambda text, budget: strided(len(text), budget),
    "bigbird": lambda text, budget: bigbird(len(text), budget),
    "longnet": lambda text, budget: longnet(len(text), budget),
    "longformer": lambda text, budget: longformer(len(text), budget),
    "same_identifier": same_identifier,
    "code_memory": code_memory,
    "call_graph": call_graph,
    "outline": outline,
    "xref": xref,
    "xref_ngrams": lambda text, budget: xref(text, budget, identifiers=False),
    "xref_identifiers": lambda text, budget: xref(text, budget, ngram_keys=0),
    "xref_all_links": lambda text, budget: xref(text, budget, links=budget - SINKS - WINDOW),
    "xref_no_stop": lambda text, budget: xref(text, budget, stop_ratio=0),
    "xref_short_spans": lambda text, budget: xref(text, budget, ngram_keys=3, symbol_before=1, symbol_after=5),
    "xref_long_spans": lambda text, budget: xref(text, budget, ngram_keys=14, symbol_before=6, symbol_after=20),
    "xref_identifiers_first": lambda text, budget: xref_in_order(text, budget, ("open", "recent", "ngrams")),
    "xref_blocks_16": lambda text, budget: xref_blocks(text, budget, 16),
    "xref_blocks_64": lambda text, budget: xref_blocks(text, budget, 64),
}
TOPK = [f"block_topk_{block}_{summary}" for block in (16, 32, 64) for summary in ("mean", "minmax")]
NAMES = [*STATIC, *TOPK, "oracle"]


def least_budget(name):
    """The keys of a row that the pattern needs at least."""
    block = re.fullmatch(r"(?:block_topk|xref_blocks)_(\d+).*", name)
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
