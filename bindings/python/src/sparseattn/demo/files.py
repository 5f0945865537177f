# SPDX-License-Identifier: MIT
"""The pictures as files, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .. import Extent, Pattern
from .screen import shorten, tokens

CELLS = 256  # a side of a picture; fewer would blur blocks, more would make lines too thin to see


def _figure(**options: Any) -> Any:
    """A figure without pyplot, which would look for a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def save_patterns(patterns: list[Pattern], seq: int, heads: int, folder: Path) -> list[Path]:
    """patterns.png: all of them side by side, queries downwards, keys to the right, darker where more is kept."""
    columns = min(3, len(patterns))
    rows = -(-len(patterns) // columns)
    figure = _figure(figsize=(4.2 * columns, 4.5 * rows), dpi=150)
    for n, pattern in enumerate(patterns):
        axes = figure.add_subplot(rows, columns, n + 1)
        image = pattern.to_image(Extent(seq, heads=heads), CELLS, CELLS)
        # The root lifts thin lines, a key in many, out of the white.
        axes.imshow(np.sqrt(image), cmap="Blues", vmin=0, vmax=1, extent=(0, seq, seq, 0), interpolation="antialiased")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_position(("outward", 4))  # clear of the first keys
        axes.set_title(shorten(str(pattern), 44), fontsize=9)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
    return _save(figure, folder, "patterns", ["png"])


def save_speed(names: list[str], sizes: list[int], seconds: np.ndarray, title: str, folder: Path) -> list[Path]:
    """speed.png and speed.svg: time, and speed-up over the first pattern, against length."""
    figure = _figure(figsize=(11, 4.6), dpi=150)
    time_axes, ratio_axes = figure.subplots(1, 2)
    for n, name in enumerate(names):
        style = {"marker": "o", "label": shorten(name, 44), "color": f"C{n % 10}", "linestyle": "--" if n == 0 else "-"}
        time_axes.plot(sizes, 1e3 * seconds[n], **style)
        ratio_axes.plot(sizes, seconds[0] / seconds[n], **style)
    for axes, label in ((time_axes, "milliseconds (less is better)"), (ratio_axes, f"times faster than {names[0]}")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [tokens(size) for size in sizes])
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(True, which="both", alpha=0.3)
    time_axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    return _save(figure, folder, "speed", ["png", "svg"])


def _save(figure: Any, folder: Path, name: str, endings: list[str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in endings]
    for path in paths:
        figure.savefig(path)
    return paths
