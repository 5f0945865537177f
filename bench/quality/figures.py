# SPDX-License-Identifier: MIT
"""The report's figures, drawn from the numbers of summary.py alone."""

import matplotlib
import summary
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# The same numbers give the same file, byte by byte: text stays text, and nothing is drawn from the clock.
matplotlib.rcParams.update({"svg.hashsalt": "sparseattn", "svg.fonttype": "none", "font.size": 9})
COLOURS = {"xref": "#d62728", "block_topk": "#1f77b4", "sink_window": "#7f7f7f"}


def draw_all(values, folder, names=None):
    """The figures of these names, or all, for which there are numbers, as SVG files."""
    folder.mkdir(exist_ok=True)
    drawn = []
    for draw in (losses, kinds, mass, identifiers, answers):
        figure = draw(values) if names is None or draw.__name__ in names else None
        if figure:
            FigureCanvasSVG(figure)
            path = folder / f"{draw.__name__}.svg"
            figure.savefig(path, metadata={"Date": None})
            drawn.append(path)
    return drawn


def colour(name):
    return COLOURS.get(name, "#bcbd22" if name.startswith("xref") else "#17becf")


def blank(width=6.4, height=3.4):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def losses(values):
    """What each pattern costs, with the interval of the bootstrap."""
    names = summary.found_patterns(values, "s1.*.loss")
    if not names:
        return None
    figure, axes = blank()
    for place, name in enumerate(reversed(names)):
        middle, low, high = (values[f"s1.{name}.loss{end}"] for end in ("", "_low", "_high"))
        axes.plot([low, high], [place, place], color=colour(name), linewidth=2)
        axes.plot(middle, place, "o", color=colour(name))
    axes.set_yticks(range(len(names)), reversed(names))
    axes.set_xlim(left=0)
    axes.set_xlabel(
        f"perplexity above dense, %, with {values['budget']} keys a query ({values['s1.documents']} documents)"
    )
    return figure


def kinds(values):
    """The same by kind of document; markdown, html and json are the same pages."""
    names, found = summary.found_patterns(values, "s1.*.loss"), summary.kinds_of(values)
    if not names:
        return None
    figure, axes = blank()
    for name in names:
        there = [kind for kind in found if f"s1.{name}.{kind}" in values]
        axes.plot(
            [found.index(kind) for kind in there],
            [values[f"s1.{name}.{kind}"] for kind in there],
            "o-" if name in COLOURS else "o:",
            color=colour(name),
            label=name,
            markersize=4,
        )
    axes.set_xticks(range(len(found)), found)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("loss above dense, nats a token")
    axes.legend(fontsize=7, frameon=False)
    return figure


def mass(values):
    """Share of the dense weight that is kept, against what the pattern costs."""
    names = summary.found_patterns(values, "s1.*.loss")
    if not names:
        return None
    figure, axes = blank()
    for name in names:
        at = values[f"s1.{name}.mass"], values[f"s1.{name}.delta"]
        axes.plot(*at, "o", color=colour(name))
        axes.annotate(name, at, xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of the dense weight on the pattern's keys")
    axes.set_ylabel("loss above dense, nats a token")
    return figure


def identifiers(values):
    """Share of identifiers that are read right, by where they occurred last."""
    names = summary.found_patterns(values, "s1.*.far.right") or [
        name for name in summary.found_patterns(values, "s1.*.loss") if f"s1.{name}.far.right" in values
    ]
    if not names:
        return None
    figure, axes = blank()
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        heights = [values[f"s1.{name}.{label}.right"] for label in summary.LABELS]
        axes.bar(
            [x + place * width for x in range(3)], heights, width, color=colour(name), label=name, edgecolor="white"
        )
    for x, label in enumerate(summary.LABELS):
        dense = values[f"s1.{names[0]}.{label}.dense_right"]
        axes.plot(
            [x - width / 2, x + 0.8 - width / 2],
            [dense, dense],
            color="black",
            linewidth=1,
            label="dense" if x == 0 else None,
        )
    axes.set_xticks([x + 0.4 - width / 2 for x in range(3)], summary.LABELS)
    axes.set_ylabel("share of identifiers read right")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    return figure


def answers(values):
    """Share of right answers of S2."""
    tasks = [key.split(".")[1] for key in values if key.startswith("s2.") and key.endswith(".texts")]
    names = list(dict.fromkeys(key.split(".")[2] for key in values if key.startswith("s2.") and key.endswith(".right")))
    if not tasks:
        return None
    figure, axes = blank()
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        heights = [values.get(f"s2.{task}.{name}.choice", values.get(f"s2.{task}.{name}.right", 0)) for task in tasks]
        shade = "black" if name == "dense" else colour(name)
        axes.bar(
            [x + place * width for x in range(len(tasks))], heights, width, color=shade, label=name, edgecolor="white"
        )
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(tasks))], tasks)
    axes.set_ylabel("share of right answers (facts: of four)")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    return figure
