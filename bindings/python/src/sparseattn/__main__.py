# SPDX-License-Identifier: MIT
"""python -m sparseattn COMMAND"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any, Callable

from . import SparseAttentionError, bench, questions, selftest, version
from .demo import run as demo
from .quality import command as quality


def print_prefix(_: Any) -> int:
    print(Path(__file__).resolve().parent)
    return 0


def nothing(_: argparse.ArgumentParser) -> None:
    """A command without options of its own."""


# Name -> what it does, the options that it takes, how help describes it.
COMMANDS: dict[str, tuple[Callable[[Any], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": (demo.run, demo.add_arguments, "a language model reads a novel with sparse attention"),
    "show": (questions.show, questions.add_show, "draw a pattern and count it"),
    "explain": (questions.explain, questions.add_explain, "say which kernels a pattern gets for a shape, and why"),
    "bench": (bench.run, bench.add_arguments, "time patterns beside dense attention, by length"),
    "quality": (quality.run, quality.add_arguments, "say what patterns cost a language model that reads a text"),
    "info": (questions.info, nothing, "say what is installed and what runs here"),
    "selftest": (selftest.run, selftest.add_arguments, "compare a few patterns with NumPy, in seconds"),
    "prefix": (print_prefix, nothing, "print where lib, include and the CMake package lie, for C and C++ programs"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparseattn", description="Sparse attention: show it, check it.")
    parser.add_argument("--version", action="version", version=f"sparseattn {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, add_arguments, text) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + "."))
    options = parser.parse_args(arguments)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends it in silence, as it does every command
    try:
        return COMMANDS[options.command][0](options)
    except SparseAttentionError as error:
        print(f"{parser.prog} {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
