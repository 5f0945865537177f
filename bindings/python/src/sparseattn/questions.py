# SPDX-License-Identifier: MIT
"""`python -m sparseattn show`, `explain` and `info`: what is a pattern, what does a plan do, what is installed here?"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from . import Context, Extent, Plan, build_json, kernels, version
from ._core import check, ffi, lib
from .demo import device, screen
from .demo import run as demo

BESIDE = ["numpy", "torch", "jax", "cupy", "transformers", "matplotlib"]


# ---- show ----


def add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", type=demo.parse_argument, help='such as "causal & (sink(4) | window(255,0))"')
    parser.add_argument(
        "--tokens",
        type=tokens_argument,
        default=(64, 64),
        metavar="N",
        help="queries and keys: 4096, or 1/4096 for one query on 4,096 keys (default 64)",
    )
    parser.add_argument("--width", type=width_argument, default=32, help="characters a line (default %(default)s)")
    parser.add_argument("--head", type=head_argument, default=0, help="of a pattern that differs between heads")
    parser.add_argument("--heads", type=heads_argument, default=1, help="how many heads such a pattern has")
    parser.add_argument("--out", type=demo.folder_argument, metavar="DIR", help="a folder: also patterns.png there")


def show(options: argparse.Namespace) -> int:
    """The picture of a pattern and its numbers."""
    seq_q, seq_k = options.tokens
    extent = Extent(seq_q, seq_k, heads=options.heads)
    encoding = getattr(sys.stdout, "encoding", None)
    print("\n".join(options.pattern.drawing(extent, options.width, head=options.head, encoding=encoding)))
    stats = options.pattern.stats(extent)
    print(
        f"{options.pattern}\n{seq_q:,} queries x {seq_k:,} keys: {100 * stats.density:.4g} % kept, "
        f"{stats.row_min:,} to {stats.row_max:,} keys a query"
    )
    if options.out:
        demo.require_packages("matplotlib")
        from .demo import files

        print(files.save_patterns([options.pattern], seq_q, options.heads, options.out)[0])
    return 0


# ---- explain ----


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", type=demo.parse_argument, help='such as "causal & window(255,0)"')
    parser.add_argument(
        "--shape",
        type=shape_argument,
        default=shape_argument("1x4096x8x128"),
        metavar="SHAPE",
        help="batch x seq x heads x head_dim, as 2x4096x8x128; 1/4096 for queries/keys and 32/8 for their heads, as in "
        "2x1/4096x32/8x128; 192/128 for a head_dim of values of its own (default 1x4096x8x128)",
    )
    dtypes = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"]
    parser.add_argument("--dtype", choices=dtypes, default="float32")
    parser.add_argument("--backward", action="store_true", help="plans the backward, too")
    parser.add_argument("--deterministic", action="store_true", help="equal bits in every call, on GPUs too")
    parser.add_argument("--tf32", action="store_true", help="float32 may be rounded to TF32, on GPUs")
    parser.add_argument("--all", action="store_true", help="names every kernel that was considered")
    parser.add_argument("--device", type=demo.device_argument, default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument(
        "--threads", type=demo.threads_argument, default=0, help="of the CPU (default: as many as cores)"
    )


def explain(options: argparse.Namespace) -> int:
    """What the plan says of itself."""
    if options.dtype in ("bfloat16", "float8_e4m3fn"):
        demo.require_packages("ml_dtypes")
        import ml_dtypes  # noqa: F401, by which NumPy knows the name
    context = Context(options.device, threads=options.threads)
    made = Plan(
        options.pattern,
        **options.shape,
        dtype=np.dtype(options.dtype),
        backward=options.backward,
        deterministic=options.deterministic,
        tf32=options.tf32,
        context=context,
    )
    print(made.explain(all=options.all), end="")
    return 0


# ---- info ----


def info(_: Any = None) -> int:
    """What is installed, what it found, what runs here."""
    count = ffi.new("int32_t *")
    check(lib.spattn_device_count(count))
    rows = kernels()
    here = [name for name, runs_here in rows.items() if runs_here]
    build = json.loads(build_json())
    lines = {
        "libsparseattn": f"{version()}, ABI {lib.spattn_abi()}",
        "library": str(Path(__file__).resolve().parent / "lib" / f"libsparseattn.so.{lib.spattn_abi()}"),
        "built": ", ".join(f"{key} {value}" for key, value in build.items() if not isinstance(value, (list, dict))),
        **{key: ", ".join(map(str, value)) for key, value in build.items() if isinstance(value, list)},
        "machine": f"{device.Device()}, {platform.machine()}, {platform.system()} {platform.release()}",
        "GPUs": str(count[0]),
        "kernels": f"{len(here)} of {len(rows)} run here; the best is {here[0]}",
        "Python": platform.python_version(),
        **{name: installed(name) for name in BESIDE},
    }
    for name, text in lines.items():
        print(f"{name:14} {screen.shorten(text, 200)}")
    return 0


def installed(name: str) -> str:
    """A package's version. It is not imported, which takes seconds for some."""
    names = importlib.metadata.packages_distributions().get(name, [name]) if name == "cupy" else [name]
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return "not here"


# ---- arguments ----


def pair(text: str, least: int) -> tuple[int, int]:
    """ "8" as 8 and 8, "1/4096" as 1 and 4096."""
    match = re.fullmatch(r"(\d+)(?:/(\d+))?", text)
    if not match or min(int(part) for part in match.groups() if part) < least:
        raise argparse.ArgumentTypeError(f"is {text}; accepted: a number from {least} on, or two as 1/4096")
    return int(match[1]), int(match[2] or match[1])


def tokens_argument(text: str) -> tuple[int, int]:
    return pair(text, 1)


def width_argument(text: str) -> int:
    return demo.number_argument(text, 4, 400)


def head_argument(text: str) -> int:
    return demo.number_argument(text, 0, 65535)


def heads_argument(text: str) -> int:
    return demo.number_argument(text, 1, 65536)


def shape_argument(text: str) -> dict[str, int]:
    """The sizes of a Plan."""
    parts = text.split("x")
    if len(parts) != 4:
        raise argparse.ArgumentTypeError(f"is {text}; accepted: batch x seq x heads x head_dim, as 2x1/4096x32/8x128")
    (batch, also), seq, heads, dim = (pair(part, 1) for part in parts)
    if batch != also:
        raise argparse.ArgumentTypeError(f"is {text}; accepted: one batch for queries and keys")
    return {
        "batch": batch,
        **dict(zip(("seq_q", "seq_k"), seq)),
        **dict(zip(("heads_q", "heads_kv"), heads)),
        **dict(zip(("head_dim", "head_dim_v"), dim)),
    }
