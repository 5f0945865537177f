# SPDX-License-Identifier: MIT
"""python -m sparseattn COMMAND"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import selftest
from .demo import run as demo

RUN = {"demo": demo.run, "selftest": lambda options: selftest.run(), "prefix": lambda options: print_prefix()}


def print_prefix() -> int:
    print(Path(__file__).resolve().parent)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparseattn", description="Sparse attention: show it, check it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo.add_arguments(commands.add_parser("demo", help="a language model reads a novel with sparse attention"))
    commands.add_parser("selftest", help="compare a few patterns with NumPy, in seconds")
    commands.add_parser("prefix", help="print where lib, include and the CMake package lie, for C and C++ programs")
    options = parser.parse_args(arguments)
    try:
        return RUN[options.command](options)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
