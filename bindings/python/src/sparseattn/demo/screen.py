# SPDX-License-Identifier: MIT
"""Progress, pictures and plots with characters, at most 100 columns; plain lines where the output is no terminal."""

from __future__ import annotations

import sys
import time
from itertools import zip_longest
from textwrap import wrap

import numpy as np

WIDTH = 100


class Progress:
    """One step of the work: a bar while it runs in a terminal, and what stays is one line with the seconds it took."""

    def __init__(self, title: str):
        self._title = title
        self._begin = time.perf_counter()
        self._last = 0.0
        self._live = sys.stdout.isatty()

    def __enter__(self) -> "Progress":
        self(0.0)
        return self

    def __call__(self, share: float) -> None:
        """share of the step that is done, 0..1."""
        now = time.perf_counter()
        if not self._live or now - self._last < 0.1:
            return
        self._last = now
        done = int(24 * share)
        print(
            f"\r{self._title[:60]:60} [{'#' * done}{'.' * (24 - done)}] {now - self._begin:4.0f} s", end="", flush=True
        )

    def __exit__(self, kind: object, *_: object) -> None:
        start = "\r" if self._live else ""
        end = "stopped" if kind else f"{time.perf_counter() - self._begin:.1f} s"
        print(f"{start}{self._title[:60]:60} {end:>10}" + " " * 24 * self._live, flush=True)


def shorten(text: str, width: int) -> str:
    """text, its middle left out where it is longer than width."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return text[: width - 3 - tail] + "..." + text[len(text) - tail :]


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def row(cells: list[str], widths: list[int]) -> None:
    """One line of a table: the first column to the left, the others to the right."""
    print(
        f"{shorten(cells[0], widths[0]):{widths[0]}}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:])),
        flush=True,
    )


def side_by_side(pictures: list[list[str]], captions: list[str], width: int) -> None:
    """Pictures of that many columns, as many in a row as fit, each above its caption."""
    per_row = max(1, (WIDTH + 2) // (width + 2))
    columns = [[*picture, *wrap(caption, width)] for picture, caption in zip(pictures, captions)]
    for begin in range(0, len(columns), per_row):
        for line in zip_longest(*columns[begin : begin + per_row], fillvalue=""):
            print("  ".join(f"{part:{width}}" for part in line).rstrip())
        print()


def chart(sizes: list[int], seconds: np.ndarray, height: int = 16, width: int = 72) -> None:
    """Times [patterns, sizes] as curves on two logarithmic axes, pattern n drawn with the n-th letter."""
    low, high = np.log(seconds.min()), np.log(seconds.max()) + 1e-9
    canvas = np.full((height, width), " ")
    columns = np.arange(width)
    knots = np.linspace(0, width - 1, len(sizes))  # lengths double, so they stand evenly
    for n in reversed(range(len(seconds))):  # the first pattern is drawn last, on top
        curve = np.interp(columns, knots, np.log(seconds[n]))
        canvas[((high - curve) / (high - low) * (height - 1)).round().astype(int), columns] = letter(n)
    for y, line in enumerate(canvas):
        value = 1e3 * np.exp(high - (high - low) * y / (height - 1))
        label = f"{value:.{0 if value >= 100 else 1}f} ms" if y % 5 == 0 else ""
        print(f"{label:>11} |{''.join(line)}".rstrip())
    print(" " * 12 + "+" + "-" * width)
    labels = [tokens(size) for size in sizes]
    axis = [" "] * (width + 8)
    for knot, label in zip(knots.astype(int), labels):
        axis[knot : knot + len(label)] = label
    print(" " * 13 + "".join(axis).rstrip() + " tokens")


def tokens(count: int) -> str:
    """512, 1K, 1.5K, 64K."""
    return str(count) if count < 1024 else f"{count / 1024:.4g}K"


def letter(n: int) -> str:
    """a, b, c, ... as the name of the n-th pattern."""
    return chr(ord("a") + n % 26)
