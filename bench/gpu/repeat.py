#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Whether a call makes the same bits each time, at full load: what races leave behind is too rare for one call's test.

    python3 bench/gpu/repeat.py --library build/libsparseattn.so [--case GLOB] [--seconds S] [--every]
                                [--out bench/results]

One case of each kernel, or with --every each case, of bench.py, lists.py and float8_operands.py is called for so many
seconds, and what each call made is compared with what the first one did. Gradients of which the
plan's explain says, under "bits", that they differ are left out: dk and dv of lists, and dq of the fast backward of
blocks, where no determinism was asked for. One JSON line for each case and pass goes to <out>/<gpu>_repeat.jsonl:
`calls`, and how many of them differ. Status 1 if any does.
"""
import fnmatch
import json
import re
import sys
import time
import typing

import cases
import float8_operands
import lists
import torch
from abi import Library
from options import PASSES, make_library_parser
from report import origin, results_file
from truth import Tensors


class Source(typing.NamedTuple):
    """A case of one of these benches."""
    name: str
    passes: tuple
    kind: str
    is_deterministic: bool
    make_plan: typing.Callable
    make_operands: typing.Callable  # new tensors; returns the operands of each pass by their names


def all_sources(library):
    def of_blocks(case):
        t = Tensors(case)
        return {what: t.operands(what, case.is_packed) for what in PASSES}

    def of_lists(case):
        t = lists.Tensors(case)
        return {what: t.operands(case, what) for what in PASSES}
    for case in cases.CASES:
        yield Source(case.name, case.passes, "blocks", case.deterministic,
                     lambda case=case: library.plan(case, "backward" in case.passes)[0],
                     lambda case=case: of_blocks(case))
    for case in lists.CASES:
        yield Source(case.name, case.passes, "lists", case.deterministic,
                     lambda case=case: lists.make_plan(library, case, "backward" in case.passes),
                     lambda case=case: of_lists(case))
    for given in float8_operands.all_cases():
        yield Source(given.name, PASSES, "float8", False,
                     lambda case=given.case: float8_operands.make_plan(library, case),
                     lambda given=given: float8_operands.make_operands(given, Tensors(given.case)))


def repeated(what, explained):
    """Names of what has the same bits in each call."""
    if what == "forward":
        return {"out", "lse"}
    others = re.findall("^ +bits +last ones of (.*) differ", explained, re.MULTILINE)
    return {"dq", "dk", "dv"} - {name for line in others for name in line.split(" and ")}


def count_differences(call, results, seconds):
    """How many calls there were, and how many of them made something else than the first."""
    call()
    first = [x.clone() for x in results]
    calls = differ = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for x in results:
            x.fill_(torch.nan)  # which stays where a call writes nothing
        call()
        calls += 1
        differ += not all(torch.equal(x, y) for x, y in zip(first, results))
    return calls, differ


def repeat(library, source, options, seen):
    """A line for each pass whose kernel was not seen at such a case yet."""
    plan, kernels = source.make_plan(), {}
    for what in options.passes:
        if what not in source.passes:
            continue
        kernel = library.kernel(plan, what)
        variant = kernel, source.kind, source.is_deterministic
        if options.every or variant not in seen:
            kernels[what] = kernel
            seen.add(variant)
    if not kernels:
        return
    torch.cuda.empty_cache()
    operands = source.make_operands()
    library.forward(plan, **operands["forward"])()  # whose out and lse backward takes
    for what, kernel in kernels.items():
        call = getattr(library, what)(plan, **operands[what])
        names = sorted(repeated(what, library.explain(plan)) & operands[what].keys())
        calls, differ = count_differences(call, [operands[what][name] for name in names], options.seconds)
        yield {"case": source.name, "pass": what, "kernel": kernel, "compared": names, "calls": calls, "differ": differ}


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--every", action="store_true", help="each case, not one of each kernel")
    options = parser.parse_args()
    library, common, seen, total = Library(options.library), origin(options.toolkit), set(), 0
    with results_file(options.out, "_repeat").open("w") as stream:
        for source in all_sources(library):
            if not fnmatch.fnmatch(source.name, options.case):
                continue
            for line in repeat(library, source, options, seen):
                total += line["differ"]
                stream.write(json.dumps({**line, **common}) + "\n")
                stream.flush()
                print(f"{line['case']:32} {line['pass']:8} {line['calls']:6} calls, {line['differ']} differ  "
                      f"{', '.join(line['compared']):10} {line['kernel']}", flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
