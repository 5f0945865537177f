# SPDX-License-Identifier: MIT
"""Figures that show what patterns are, not what they cost: the keys of one row, and masks beside each other. Their text
is this folder's paired.py, and their tokens words, so that they need neither a model nor its documents."""

import pathlib
import re

import figures
import numpy as np
import patterns
import sparseattn as sa
from links import ORDER, links_of
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

SOURCE = pathlib.Path(__file__).resolve().parent / "paired.py"
ROW = {"sinks": 8, "window": 16, "budget": 72}  # of the row that is shown, whose text is a page
QUERY = "positive = doubled[differences > 0].sum"  # the text ends with the query
SHOWN = {
    "sink": "#d9d9d9",
    "window": "#c6dbef",
    "last tokens": "#fcae91",
    "open identifier": "#fed976",
    "recent identifiers": "#a1d99b",
    "query": "#ff4040",
}
NAMES = dict(zip(ORDER, ("last tokens", "open identifier", "recent identifiers")))
MASKS = ("sink_window", "strided", "bigbird", "longnet", "longformer", "same_identifier", "outline", "xref")
BUDGET = 144  # of the masks


class Words:
    """A tokenizer of words, numbers, spaces and signs."""

    def __init__(self):
        self._words, self._numbers = [], {}

    def ids(self, text):
        words = re.findall(r"[A-Za-z]+|\d+|\n| +|\W|_", text)
        for word in words:
            if word not in self._numbers:
                self._numbers[word] = len(self._words)
                self._words.append(word)
        return np.array([self._numbers[word] for word in words])

    def decode(self, ids):
        return "".join(self._words[number] for number in ids)


def draw_all(folder, names=None):
    """The figures of these names, or all, as SVG files."""
    chosen = [draw for draw in (row, masks) if names is None or draw.__name__ in names]
    return [figures.save(draw(), folder / f"{draw.__name__}.svg") for draw in chosen]


def links(ids, symbols, query):
    """{name of SHOWN: keys} of a query's row, by what brought them."""
    keys = sa.xref(ids, symbols, **ROW).to_mask(len(ids))[0, 0, query]
    begin = query  # of the window, which ends at the query
    while keys[begin - 1]:
        begin -= 1
    found = links_of(ids, symbols, **ROW)[query]
    return {
        "sink": list(range(ROW["sinks"])),
        "window": list(range(begin, query)),
        **{NAMES[name]: sorted(key for key in found if found[key] == name and key < begin) for name in ORDER},
        "query": [query],
    }


def row():
    """The text before a query, each of its keys in the colour of what linked it."""
    tokenizer, source = Words(), SOURCE.read_text()
    ids = tokenizer.ids(source[: source.index(QUERY) + len(QUERY)])
    query = len(ids) - 1
    found = links(ids, sa.symbols_of(tokenizer, ids), query)
    colours = {key: SHOWN[name] for name, keys in found.items() for key in keys}
    pieces = [tokenizer.decode([number]) for number in ids.tolist()]
    lines = "".join(pieces).count("\n") + 1
    figure = Figure(figsize=(7.2, 0.5 + 0.115 * lines))
    axes = figure.add_axes((0.01, 0, 0.98, 1 - 0.3 / figure.get_figheight()))
    axes.set(xlim=(0, 120), ylim=(lines, 0))
    axes.axis("off")
    line = column = 0
    for place, piece in enumerate(pieces):
        if place in colours:
            width = max(len(piece.strip("\n")), 1)
            axes.add_patch(Rectangle((column, line), width, 1, color=colours[place], linewidth=0))
        if piece.strip():
            axes.text(column, line + 0.8, piece, family="monospace", fontsize=6.9)
        if "\n" in piece:
            line, column = line + 1, 0
        column += len(piece.strip("\n"))
    patches = [Patch(color=shade, label=name) for name, shade in SHOWN.items()]
    figure.legend(handles=patches, loc="upper left", ncols=len(patches), fontsize=7, frameon=False)
    return figure


def masks():
    """The masks of patterns with equally many keys a row: queries down, keys to the right."""
    tokenizer = Words()
    text = patterns.Text(tokenizer, tokenizer.ids(SOURCE.read_text()))
    figure, panels = figures.blank(width=7.2, height=3.4, nrows=2, ncols=4)
    for axes, name in zip(panels.flat, MASKS):
        keep = patterns.make(name, text, BUDGET)[0].to_mask(len(text))[0, 0]
        axes.imshow(keep, cmap=ListedColormap(["white", figures.colour(name)]), interpolation="nearest")
        axes.set_title(name, fontsize=8)
        axes.set(xticks=[], yticks=[])
    return figure
