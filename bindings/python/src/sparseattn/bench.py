# SPDX-License-Identifier: MIT
"""`python -m sparseattn bench`: time of patterns beside dense attention, by length, as a table and a plot."""

from __future__ import annotations

import argparse
import json
from typing import Callable

import numpy as np

from . import Extent, Pattern, parse, version
from .demo import device, screen, speed
from .demo import run as demo
from .demo.reading import Operands
from .questions import pair

PATTERNS = ["causal & (sink(4) | window(255,0))", "causal & bigbird(64,3,1,2,0)", "causal & block_diagonal(256)"]
MOST_TOKENS = 1 << 20
DRAWN_TOKENS = 4096  # longer sequences repeat them: drawing millions would take seconds that Ctrl-C cannot cut short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pattern",
        action="append",
        metavar="TEXT",
        type=demo.parse_argument,
        help=f"repeatable; default {', '.join(PATTERNS)}",
    )
    parser.add_argument(
        "--dense", default="causal", metavar="TEXT", type=demo.parse_argument, help="beside what (default %(default)s)"
    )
    parser.add_argument("--least", type=tokens_argument, default=128, help="fewest tokens (default %(default)s)")
    parser.add_argument(
        "--most",
        type=tokens_argument,
        default=4096,
        help="most tokens; lengths double up to them (default %(default)s)",
    )
    parser.add_argument("--heads", type=heads_argument, default=(8, 8), help="8, or 32/8 for 32 on 8 (default 8)")
    parser.add_argument("--head-dim", type=dim_argument, default=64, help="1 to 1024 (default %(default)s)")
    parser.add_argument("--backward", action="store_true", help="times forward and backward together")
    parser.add_argument(
        "--out", type=demo.folder_argument, metavar="DIR", help="a folder: also speed.png and .svg there"
    )
    parser.add_argument("--json", action="store_true", help="a line for each time instead of the table")
    parser.add_argument(
        "--threads", type=demo.threads_argument, default=0, help="of the CPU (default: as many as cores)"
    )
    demo.add_device(parser)


def run(options: argparse.Namespace) -> int:
    """0, or the sentence why these lengths are none."""
    if options.least > options.most:
        raise SystemExit(f"--least is {options.least}; accepted: at most --most, {options.most}")
    if options.out:
        demo.require_packages("matplotlib")
    where = device.find(options.device, options.threads)
    sizes = lengths(options.least, options.most)
    patterns = list(dict.fromkeys([options.dense, *(options.pattern or map(parse, PATTERNS))]))
    operands = draw(min(sizes[-1], DRAWN_TOKENS), options.heads, options.head_dim)
    passes = "forward and backward" if options.backward else "forward"
    title = f"{passes}, batch 1, {options.heads[0]} heads of {options.head_dim}, {where.dtype}, {where}"
    if options.json:
        seconds = speed.measure(patterns, operands, sizes, where, lambda share: None, options.backward)
        return print_lines(patterns, sizes, seconds, title)
    print(f"sparseattn {version()}: {title}")
    with screen.Progress(f"{len(patterns)} patterns, {sizes[0]:,} to {sizes[-1]:,} tokens") as progress:
        seconds = speed.measure(patterns, operands, sizes, where, progress, options.backward)
    print_tables(patterns, sizes, seconds, options.heads[0])
    if options.out:
        from .demo import files

        for path in files.save_speed(list(map(str, patterns)), sizes, seconds, title, options.out):
            print(path)
    return 0


def lengths(least: int, most: int) -> list[int]:
    """least, twice that, ... and most."""
    result = [least]
    while 2 * result[-1] < most:
        result.append(2 * result[-1])
    return result if result[-1] == most else [*result, most]


def draw(seq: int, heads: tuple[int, int], head_dim: int) -> Operands:
    rng = np.random.default_rng(0)
    return Operands(*(rng.standard_normal((seq, count, head_dim), np.float32) for count in (*heads, heads[1])))


def print_tables(patterns: list[Pattern], sizes: list[int], seconds: np.ndarray, heads: int) -> None:
    if len(sizes) > 1:
        print()
        screen.chart(sizes, seconds)
    widths = [42, *[8] * len(sizes)]
    names = [f"{screen.letter(n)}  {pattern}" for n, pattern in enumerate(patterns)]
    tables: dict[str, Callable[[int, int], str]] = {
        "milliseconds": lambda n, column: f"{1e3 * seconds[n, column]:.3g}",
        "times faster than a": lambda n, column: f"{seconds[0, column] / seconds[n, column]:.2f}",
        "share of pairs": lambda n, column: f"{100 * patterns[n].density(Extent(sizes[column], heads=heads)):.2g} %",
    }
    for heading, cell in tables.items():
        print()
        screen.row([heading, *map(screen.tokens, sizes)], widths)
        for n, name in enumerate(names):
            screen.row([name, *(cell(n, column) for column in range(len(sizes)))], widths)


def print_lines(patterns: list[Pattern], sizes: list[int], seconds: np.ndarray, title: str) -> int:
    for n, pattern in enumerate(patterns):
        for column, size in enumerate(sizes):
            line = {"pattern": str(pattern), "tokens": size, "seconds": seconds[n, column], "what": title}
            print(json.dumps(line), flush=True)
    return 0


def tokens_argument(text: str) -> int:
    return demo.number_argument(text, 1, MOST_TOKENS)


def dim_argument(text: str) -> int:
    return demo.number_argument(text, 1, 1024)


def heads_argument(text: str) -> tuple[int, int]:
    return pair(text, 1)
