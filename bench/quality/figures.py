# SPDX-License-Identifier: MIT
"""The report's figures, drawn from the numbers of summary.py alone; pictures.py has those that show patterns."""

import matplotlib
import tables
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from summary import BETTER, LABELS, MAIN, OURS, SAME_PAGES

# The same numbers give the same file, byte by byte: text stays text, and nothing is drawn from the clock.
matplotlib.rcParams.update({"svg.hashsalt": "sparseattn", "svg.fonttype": "none", "font.size": 9})
COLOURS = {"xref": "#d62728", "xref_ngrams": "#ff9896", "block_topk": "#1f77b4", "sink_window": "#7f7f7f"}
COLOURS |= {"oracle": "#2ca02c", "dense": "#000000", "xref_long_spans": "#8c1414"}
PERPLEXITY = "perplexity above dense, %"


def draw_all(values, folder, names=None):
    """The figures of these names, or all, for which there are numbers, as SVG files."""
    drawn = []
    for draw in (losses, kinds, budgets, mass, identifiers, answers, training, speed):
        figure = draw(values) if names is None or draw.__name__ in names else None
        if figure:
            drawn.append(save(figure, folder / f"{draw.__name__}.svg"))
    return drawn


def save(figure, path):
    path.parent.mkdir(exist_ok=True)
    FigureCanvasSVG(figure)
    figure.savefig(path, metadata={"Date": None})
    return path


def colour(name):
    return COLOURS.get(name, "#bcbd22" if name.startswith("xref") else "#17becf")


def blank(width=6.4, height=3.4, **panels):
    """A figure and its axes, one or several beside each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(**panels)
    for panel in axes.flat if panels else [axes]:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend(figure, *panels):
    """The names of some panels, each once, above all panels."""
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=7, frameon=False)


def main_patterns(values):
    return [name for name in MAIN if f"s1.{name}.delta" in values]


def losses(values):
    """What each pattern costs, with the interval of the bootstrap."""
    names = tables.found_patterns(values, "more.*.percent")
    if not names:
        return None
    figure, axes = blank(height=1 + 0.2 * len(names))
    for place, name in enumerate(reversed(names)):
        middle, low, high = (values[f"more.{name}.percent{end}"] for end in ("", ".low", ".high"))
        axes.plot([low, high], [place, place], color=colour(name), linewidth=2)
        axes.plot(middle, place, "o", color=colour(name))
    axes.set_yticks(range(len(names)), reversed(names))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(
        f"{PERPLEXITY} (logarithmic), with {values['budget']} keys a query; {values['more.documents']} documents"
    )
    return figure


def kinds(values):
    """Losses by kind of document, and, with lines, those of the same pages in three formats."""
    names, found = main_patterns(values), tables.kinds_of(values)
    if not names:
        return None
    pages = [kind for kind in SAME_PAGES if kind in found]
    figure, panels = blank(width=7.2, height=2.8, ncols=2, sharey=True, width_ratios=[2, 1])
    for axes, shown, line in zip(panels, ([kind for kind in found if kind not in pages], pages), ("o", "o-")):
        for name in names:
            places = [place for place, kind in enumerate(shown) if f"s1.{name}.{kind}" in values]
            heights = [values[f"s1.{name}.{shown[place]}"] for place in places]
            axes.plot(places, heights, line, color=colour(name), label=name, markersize=4)
        axes.set_xticks(range(len(shown)), shown)
        axes.margins(x=0.15)
    panels[0].set_yscale("log")
    panels[0].set_ylabel("loss above dense, nats a token")
    legend(figure, panels[0])
    panels[1].set_xlabel("the same pages of a manual")
    return figure


def budgets(values):
    """Losses against the number of keys, a panel for each length."""
    lengths = tables.found_numbers(values, "s1.length")
    found = {tokens: sizes for tokens in lengths if (sizes := tables.found_numbers(values, f"s1.size.{tokens}"))}
    if not found:
        return None
    figure, panels = blank(width=7.2, height=2.6, ncols=len(found), sharey=True, squeeze=False)
    for axes, (tokens, sizes) in zip(panels[0], found.items()):
        for name in (*MAIN, BETTER):
            there = [one for one in sizes if f"s1.size.{tokens}.{one}.{name}.percent" in values]
            key = f"s1.size.{tokens}.{{}}.{name}.percent"
            if there:
                middle, low, high = ([values[key.format(one) + end] for one in there] for end in ("", ".low", ".high"))
                axes.plot(there, middle, "o-", color=colour(name), label=name, markersize=4)
                axes.fill_between(there, low, high, color=colour(name), alpha=0.15, linewidth=0)
        axes.set_xticks(sizes)
        axes.set_xlabel("keys a query")
        axes.set_title(f"{tokens} tokens, {values[f's1.size.{tokens}.{sizes[0]}.documents']} documents", fontsize=8)
    panels[0, 0].set_yscale("log")
    panels[0, 0].yaxis.set_major_formatter("{x:g}")
    panels[0, 0].set_ylabel(PERPLEXITY)
    legend(figure, *panels[0])
    return figure


def mass(values):
    """What each pattern costs, against the share of the dense weight it keeps and the error of a layer's output."""
    names = tables.found_patterns(values, "more.*.percent")
    if not names:
        return None
    figure, panels = blank(width=7.2, ncols=2, sharey=True)
    for axes, number in zip(panels, ("mass", "output_error")):
        for name in names:
            at = values[f"more.{name}.{number}"], values[f"more.{name}.delta"]
            axes.plot(*at, "o", color=colour(name), markersize=5)
            if name in COLOURS or name == "window":  # the others are told by their colours
                axes.annotate(name, at, xytext=(4, 3), textcoords="offset points", fontsize=7)
        axes.margins(x=0.2)
        axes.set_yscale("log")
    panels[0].set_xlabel("share of the dense weight on the pattern's keys")
    panels[1].set_xlabel("error of a layer's output")
    panels[0].set_ylabel("loss above dense, nats a token")
    return figure


def identifiers(values):
    """Share of identifiers that are read right, by where they occurred last."""
    names = main_patterns(values)
    if not names:
        return None
    figure, axes = blank(height=2.8)
    bars(axes, {name: [values[f"s1.{name}.{label}.right"] for label in LABELS] for name in names})
    for x, label in enumerate(LABELS):
        dense = values[f"s1.{OURS}.{label}.dense_right"]
        axes.plot([x - 0.45, x + 0.45], [dense, dense], color="black", label=None if x else "dense")
    axes.set_xticks(range(len(LABELS)), LABELS)
    axes.set_ylabel("share of identifiers read right")
    legend(figure, axes)
    return figure


def bars(axes, heights):
    """A bar for each name beside the others, at each of the whole numbers."""
    width = 0.8 / len(heights)
    for place, (name, numbers) in enumerate(heights.items()):
        at = [x + (place + 0.5) * width - 0.4 for x in range(len(numbers))]
        axes.bar(at, numbers, width, color=colour(name), label=name, edgecolor="white")


def answers(values):
    """Share of right answers of S2, a panel for each task, against the length of the text."""
    found = tables.tasks_of(values)
    if not found:
        return None
    figure, panels = blank(width=7.2, height=2.4, ncols=len(found), sharey=True, squeeze=False)
    for axes, task in zip(panels[0], found):
        lengths = tables.found_numbers(values, f"s2.{task}", ".texts")
        for name in ("dense", *MAIN):
            heights = [values.get(f"s2.{task}.{length}.{name}.right") for length in lengths]
            if None not in heights:
                axes.plot(range(len(lengths)), heights, "o-", color=colour(name), label=name, markersize=3)
        axes.set_xticks(range(len(lengths)), [f"{length / 1024:.0f}K" for length in lengths])
        axes.set_title(task, fontsize=8)
    panels[0, 0].set_ylim(0, 1)
    panels[0, 0].set_ylabel("share of right answers")
    legend(figure, panels[0, 0])
    return figure


def training(values):
    """Losses of S3 while models learn, means over seeds and ten neighbours, of which a batch's chance is less."""
    names = tables.found_patterns(values, "s3.*.nll")
    if not names:
        return None
    figure, axes = blank(height=2.8)
    for name in names:
        curve = values[f"s3.{name}.curve"]
        tens = [curve[begin : begin + 10] for begin in range(0, len(curve), 10)]
        steps, nll = ([sum(pair[part] for pair in ten) / len(ten) for ten in tens] for part in (0, 1))
        axes.plot(steps, nll, color=colour(name), label=f"{name}: {values[f's3.{name}.nll']:.3f} of held-out files")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.legend(fontsize=7, frameon=False)
    return figure


def speed(values):
    """Times of a layer as shares of dense attention's, a panel for each machine and pass."""
    devices = [device for device in ("cpu", "cuda") if f"speed.{device}.machine" in values]
    if not devices:
        return None
    shown = [(device, part) for device in devices for part in ("layer", "backward")]
    figure, panels = blank(width=7.2, height=2.6, ncols=len(shown), sharey=True, squeeze=False)
    for axes, (device, part) in zip(panels[0], shown):
        lengths = tables.found_numbers(values, f"speed.{device}", ".batch")
        for name in MAIN:
            there = [tokens for tokens in lengths if f"speed.{device}.{tokens}.{name}.{part}" in values]
            shares = [values[f"speed.{device}.{tokens}.{name}.{part}"] for tokens in there]
            if there:
                axes.plot(there, shares, "o-", color=colour(name), label=name, markersize=4)
        axes.axhline(1, color=colour("dense"), linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{tokens / 1024:.0f}K" for tokens in lengths])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{values[f'speed.{device}.machine']}\n{'forward' if part == 'layer' else part}", fontsize=7)
        axes.set_xlabel("tokens")
    panels[0, 0].set_ylabel("share of dense attention's time")
    legend(figure, panels[0, 0])
    return figure
