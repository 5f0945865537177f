# SPDX-License-Identifier: MIT
"""The lines of bench.py as a picture: patterns of several lengths over the length, all other cases as a list."""
import json
import re

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

PASSES = {"forward": "C0", "backward": "C1"}
LEAST_LENGTHS = 3  # of a pattern that is drawn over the length
LENGTH = re.compile(r"_(\d+)k(?=_|$)")
RATE, SPEEDUP = "TFLOP/s on kept pairs", "times as fast as the best dense kernel"


def read(files):
    """(case, pass) -> its line, with the best peer of the same run as `best_tflops`, and torch's as `torch_tflops`."""
    results = {}
    for line in (json.loads(line) for file in files for line in file.read_text().splitlines()):
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
            drawn = [(tokens, line[key]) for tokens, line in points if line[key]]
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
            drawn = [(line[key], row) for row, line in lines if line[key]]
            if drawn:
                axis.plot(*zip(*drawn), marker, color="black" if marker == "|" else colour, label=label)
    for axis, label in ((rate, RATE), (speedup, SPEEDUP)):
        axis.set(xscale="log", xlabel=label, ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), names, fontsize="x-small")
        axis.grid(alpha=0.3)
    speedup.axvline(1, color="black", linewidth=1)
    speedup.tick_params(labelleft=False)
    rate.legend(fontsize="x-small")


def draw(files, picture):
    results = read(files)
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
    figure.suptitle(f"{next(iter(results.values()))['gpu']}, cold L2")
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    # The same file for the same lines, and letters as letters.
    matplotlib.rcParams.update({"svg.hashsalt": "sparseattn", "svg.fonttype": "none"})
    figure.savefig(picture, metadata={"Date": None})
