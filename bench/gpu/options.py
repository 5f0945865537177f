# SPDX-License-Identifier: MIT
"""The command line that the benches of this folder share."""
import argparse
import pathlib

PASSES = ("forward", "backward")


def make_parser(doc):
    """Options of every bench; each adds its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--toolkit", default="13.0", help="the nvcc that built the library")
    return parser


def make_library_parser(doc):
    """And of those that load a library themselves, to time its passes."""
    parser = make_parser(doc)
    parser.add_argument("--library", required=True, help="what is measured")
    parser.add_argument("--pass", dest="passes", choices=PASSES, nargs="+", default=PASSES)
    return parser
