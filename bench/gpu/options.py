# SPDX-License-Identifier: MIT
"""The command line that the benches of this folder share. It needs neither torch nor matplotlib."""
import argparse
import pathlib


def make_parser(doc):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="what is measured")
    parser.add_argument("--pass", dest="passes", choices=("forward", "backward"), action="append")
    parser.add_argument("--out", default=str(pathlib.Path(__file__).resolve().parents[1] / "results"))
    parser.add_argument("--toolkit", default="13.0", help="the nvcc that built the library")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help="only draws --lines")
    parser.add_argument("--lines", type=pathlib.Path, nargs="+", metavar="FILE.jsonl")
    return parser


def parse(parser, draw, passes):
    """The options, with these passes unless some are given; or None where a picture was asked for, which it draws by
    the function of plot.py that is named `draw`."""
    options = parser.parse_args()
    options.passes = options.passes or list(passes)
    if bool(options.plot) != bool(options.lines):
        parser.error("--plot and --lines go together")
    if options.plot:
        import plot
        return getattr(plot, draw)(options.lines, options.plot)
    if not options.library:
        parser.error("--library names what is measured")
    return options
