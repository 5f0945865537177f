#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Lines of one of the benches of this folder as a picture. It needs matplotlib alone.

    python3 bench/gpu/plot.py PICTURE.svg LINES.jsonl [LINES.jsonl...]

Those of bench.py: patterns of several lengths over the length, all other cases as a list. Those of lists.py: bars.
Those of crossings.py: times over the share of tokens kept. Those of torch_op.py: times over the length.
"""
import argparse
import json
import pathlib
import re

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

PASSES = {"forward": "C0", "backward": "C1"}
LEAST_LENGTHS = 3  # of a pattern that is drawn over the length
LENGTH = re.compile(r"_(\d+)k(?=_|$)")
BARS = {"dense": "over dense attention", "naive": "over gather-then-matmul"}  # of lists.py
STYLES = {  # of crossings.py
    "gathered rows": dict(color="C0", marker="o"),
    "shared lists": dict(color="C4", marker="o"),
    "listed tiles": dict(color="C2", marker="o"),
    "blocks": dict(color="C1", marker="o"),
    "plan": dict(color="black", marker="o", markersize=11, markerfacecolor="none", linestyle="none"),
    "torch.sparse": dict(color="C3", marker="x", linestyle="--"),
    "FlexAttention": dict(color="C5", marker="x", linestyle="--"),
    "dense": dict(color="C7", marker="x", linestyle="--"),
}
STEPS = {  # of torch_op.py
    "ours": "sparseattn.torch", "flex": "FlexAttention", "fa4": "FA4", "sdpa": "dense SDPA, causal"}
RATE, SPEEDUP = "TFLOP/s on kept pairs", "times as fast as the best dense kernel"


# ---- bench.py ----

def by_case(lines):
    """(case, pass) -> its line, with the best peer of the same run as `best_tflops`, and torch's as `torch_tflops`."""
    results = {}
    for line in lines:
        if "failed" in line:
            continue
        result = results.setdefault((line["case"], line["pass"]), line | {"best_tflops": None, "torch_tflops": None})
        if line["peer"].endswith("(same run)"):
            kinds = ["best_tflops"] + ["torch_tflops"] * line["peer"].startswith(("torch", "Flex"))
            for kind in kinds:
                result[kind] = max(result[kind] or 0, line["peer_tflops"])
    return results


def families(results):
    """Pattern -> {tokens: case}, of those with several lengths."""
    found = {}
    for case, _ in results:
        if match := LENGTH.search(case):
            found.setdefault(LENGTH.sub("", case), {})[int(match[1])] = case
    return {name: cases for name, cases in found.items() if len(cases) >= LEAST_LENGTHS}


def draw_lengths(axes, results, families, what):
    rate, speedup = axes
    for number, (name, cases) in enumerate(sorted(families.items())):
        points = [(tokens, results[case, what]) for tokens, case in sorted(cases.items()) if (case, what) in results]
        for axis, key, style, label in ((rate, "tflops", "o-", name), (rate, "torch_tflops", "x--", f"{name}, torch"),
                                        (speedup, "speedup_dense", "o-", name)):
            drawn = [(tokens, line[key]) for tokens, line in points if line.get(key)]
            if drawn:
                axis.plot(*zip(*drawn), style, color=f"C{number % 10}", label=label)
    ticks = sorted({tokens for cases in families.values() for tokens in cases})
    for axis, label in ((rate, RATE), (speedup, SPEEDUP)):
        axis.set(xscale="log", xlabel="tokens", ylabel=label, title=what)
        axis.set_xticks(ticks, [f"{tokens}K" for tokens in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    rate.set_ylim(bottom=0)
    speedup.set_yscale("log")
    speedup.axhline(1, color="black", linewidth=1)
    rate.legend(fontsize="x-small")


def draw_cases(axes, results, names):
    rate, speedup = axes
    for what, colour in PASSES.items():
        lines = [(row, results[name, what]) for row, name in enumerate(names) if (name, what) in results]
        for axis, key, marker, label in ((rate, "tflops", "o", what), (rate, "best_tflops", "x", f"{what}, best peer"),
                                         (speedup, "speedup_dense", "o", what), (speedup, "goal_dense", "|", "goal")):
            drawn = [(line[key], row) for row, line in lines if line.get(key)]
            if drawn:
                axis.plot(*zip(*drawn), marker, color="black" if marker == "|" else colour, label=label)
    for axis, label in ((rate, RATE), (speedup, SPEEDUP)):
        axis.set(xscale="log", xlabel=label, ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), names, fontsize="x-small")
        axis.grid(alpha=0.3)
    speedup.axvline(1, color="black", linewidth=1)
    speedup.tick_params(labelleft=False)
    rate.legend(fontsize="x-small")


def draw_rates(lines):
    results = by_case(lines)
    over_length = families(results)
    in_family = {case for cases in over_length.values() for case in cases.values()}
    names = list(dict.fromkeys(case for case, _ in results if case not in in_family))
    passes = [what for what in PASSES if any((case, what) in results for case in in_family)]
    heights = [4.0] * len(passes) + [1 + 0.16 * len(names)] * bool(names)
    figure, axes = pyplot.subplots(len(heights), 2, figsize=(12, sum(heights)), height_ratios=heights, squeeze=False)
    for row, what in zip(axes, passes):
        draw_lengths(row, results, over_length, what)
    if names:
        draw_cases(axes[-1], results, names)
    return figure


# ---- lists.py ----

def draw_lists(lines):
    """A panel a pass; a case has a bar for each peer, from where both are as fast to how much faster the library is."""
    of_pass = {what: [line for line in lines if line["pass"] == what] for what in PASSES}
    panels = {what: cases for what, cases in of_pass.items() if cases}
    heights = [1 + 0.4 * len(cases) for cases in panels.values()]
    figure, axes = pyplot.subplots(len(panels), figsize=(9, sum(heights)), height_ratios=heights, squeeze=False)
    for axis, (what, cases) in zip(axes[:, 0], panels.items()):
        for number, (name, label) in enumerate(BARS.items()):
            drawn = [(row + 0.38 * (number - 0.5), line[f"speedup_{name}"]) for row, line in enumerate(cases)
                     if line.get(f"speedup_{name}")]
            rows, times = [row for row, _ in drawn], [x for _, x in drawn]
            bars = axis.barh(rows, [x - 1 for x in times], left=1, height=0.36, color=f"C{number}", label=label)
            axis.bar_label(bars, [f"{x:.3g}" for x in times], padding=2, fontsize="x-small")
        axis.set(xscale="log", title=what, xlabel="times as fast", ylim=(len(cases) - 0.5, -0.5))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_yticks(range(len(cases)), [line["case"] for line in cases], fontsize="small")
        axis.margins(x=0.12)
        axis.axvline(1, color="black", linewidth=1)
        axis.grid(alpha=0.3, axis="x")
        axis.set_axisbelow(True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper left", fontsize="x-small")
    return figure


# ---- crossings.py ----

def draw_crossings(lines):
    """A panel a mask and pass, with a line for each family and, dashed, each peer; the plan's choice is ringed."""
    lines = [line for line in lines if "us" in line]
    masks = list(dict.fromkeys(line["mask"] for line in lines))
    passes = [what for what in PASSES if any(line["pass"] == what for line in lines)]
    densities = sorted({line["density"] for line in lines})
    figure, axes = pyplot.subplots(len(passes), len(masks), figsize=(5.5 * len(masks), 4.5 * len(passes)), sharex=True,
                                   sharey="row", squeeze=False)
    for row, what in zip(axes, passes):
        for axis, mask in zip(row, masks):
            for name, style in STYLES.items():
                fastest = {}
                for line in lines:
                    if (line["family"], line["pass"], line["mask"]) == (name, what, mask):
                        fastest[line["density"]] = min(line["us"], fastest.get(line["density"], line["us"]))
                if fastest:
                    axis.plot(*zip(*sorted(fastest.items())), label=name, **style)
            axis.set(xscale="log", yscale="log", title=f"{mask}, {what}", xlabel="% of the tokens kept")
            axis.set_xticks(densities, [f"{density:g}" for density in densities])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel("us")
    axes[0, 0].legend(fontsize="x-small")
    return figure


# ---- torch_op.py ----

def draw_steps(lines):
    """A panel a pattern, with a line for each peer."""
    patterns, tokens = (sorted({line[key] for line in lines}) for key in ("pattern", "tokens"))
    figure, axes = pyplot.subplots(1, len(patterns), figsize=(10, 4), sharey=True, squeeze=False)
    for axis, pattern in zip(axes[0], patterns):
        for peer, label in STEPS.items():
            points = [(line["tokens"], line["us"] / 1e3) for line in lines
                      if (line["pattern"], line["peer"]) == (pattern, peer)]
            if points:
                axis.plot(*zip(*points), marker="o", label=label)
        axis.set(xscale="log", yscale="log", title=pattern, xlabel="tokens")
        axis.set_xticks(tokens, [f"{n >> 10}K" for n in tokens])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("forward and backward, ms")
    axes[0, 0].legend(fontsize="x-small")
    return figure


# ---- all of them ----

# By a key that only that bench's lines have, what draws them and what their rates were measured with.
DRAWINGS = {"speedup_naive": (draw_lists, "cold L2"), "family": (draw_crossings, "cold L2"),
            "first_ms": (draw_steps, "back to back"), "tflops_sustained": (draw_rates, "cold L2")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=pathlib.Path, metavar="PICTURE.svg")
    parser.add_argument("files", type=pathlib.Path, nargs="+", metavar="LINES.jsonl")
    options = parser.parse_args()
    lines = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    kinds = [drawing for key, drawing in DRAWINGS.items() if any(key in line for line in lines)]
    if not kinds:
        parser.error("no line of a bench of this folder")
    draw, how = kinds[0]
    # The same file for the same lines, and letters as letters.
    matplotlib.rcParams.update({"svg.hashsalt": "sparseattn", "svg.fonttype": "none"})
    figure = draw(lines)
    figure.suptitle(f"{lines[0]['gpu']}, {how}")
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(options.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
