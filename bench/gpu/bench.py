#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The GPU bench: rates of the library and of its peers on the same tensors, in the same run.

    python3 bench/gpu/bench.py --library build/libsparseattn.so [--case GLOB] [--pass forward|backward] [--no-flex]
                               [--sweep] [--out bench/results]

One JSON line for each case and peer goes to <out>/<gpu>.jsonl; --sweep runs five patterns over 4K to 128K tokens
instead, into <out>/<gpu>_sweep.jsonl. Peers that this python has are measured here (torch, and FA4 where its wheel is
on PYTHONPATH); the best figure that was recorded elsewhere stands beside them and says so. Inputs N(0,1). `tflops`: L2
cold, a pause before each call, median of 25 calls by events. `tflops_sustained`: warm, back to back for 0.4 s, when the
chip's power limit has lowered its clock, which is what a server sees. `dense_us` is the best dense kernel at the same
shapes, ours or torch's, cold; `empty_us` an empty kernel. A case that fails, or whose results are wrong, is a line that
says so, and the program ends with status 1.
"""
import fnmatch
import json
import sys
import traceback

import cases
import torch
from abi import Library
from beside import run_case
from dense import Dense
from measure import empty_us
from options import make_library_parser
from report import digits, first_line, origin, results_file


def describe(line):
    """A line for the terminal."""
    if "failed" in line:
        return f"{line['case']:28} FAILED: {line['failed']}"
    return (f"{line['case']:28} {line['pass']:8} {line['us']:9.1f} us {line['tflops']:6.4g} TFLOP/s "
            f"({line['tflops_sustained']} sustained)  goal {line['goal_us'] or line['goal']}  "
            f"{line['speedup_dense']}x {line['dense']} (goal {line['goal_dense']})  gemm {line['gemm']}  "
            f"err {line['max_err']:.1e}  {line['peer']}: {line['peer_tflops']} ({line['peer_tflops_sustained']})  "
            f"{line['kernel']}")


def run(options):
    """Runs the cases; how many failed."""
    chosen = [case for case in (cases.sweep() if options.sweep else cases.CASES)
              if fnmatch.fnmatch(case.name, options.case) and set(case.passes) & set(options.passes)]
    if not chosen:
        sys.exit(f"no case {options.case!r} with such a pass")
    library = Library(options.library)
    dense, failed = Dense(library), 0
    common = {**origin(options.toolkit), "empty_us": digits(empty_us())}
    with results_file(options.out, "_sweep" if options.sweep else "").open("w") as stream:
        def write(line):
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            print(describe(line), flush=True)
        for case in chosen:
            passes = [what for what in case.passes if what in options.passes]
            try:
                torch.compiler.reset()  # each case is a new shape: past eight, torch would stop compiling
                torch.cuda.empty_cache()
                run_case(library, dense, case, passes, not options.no_flex, common, write)
            except Exception as e:
                failed += 1
                write({"case": case.name, "failed": first_line(e), **common})
                traceback.print_exc()
    return failed


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    parser.add_argument("--sweep", action="store_true", help="five patterns over 4K to 128K tokens instead")
    parser.add_argument("--no-flex", action="store_true")
    return 1 if run(parser.parse_args()) else 0


if __name__ == "__main__":
    sys.exit(main())
