#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Attention of q, k and v of float8, beside that of the bfloat16 that they stand for, in the same run.

    python3 bench/gpu/float8_operands.py --library build/libsparseattn.so [--case GLOB] [--out bench/results]

One JSON line for each case and kind of scales goes to <out>/<gpu>_float8.jsonl. Each row of a token and head has a scale
(`row`), or each head one (`head`): its largest magnitude / 448. Copies that a call makes of its operands count in its
time. `bf16_us`, `bf16_backward_us`: the calls of bfloat16. `error`, `backward_error` are against double precision on what
the float8 stand for, on sampled rows; `lost`, the largest difference of out from that of the bfloat16 which were rounded,
is what float8 costs. Times as bench.py has them.
"""
import dataclasses
import itertools

import cases
import torch
from abi import Library
from float8 import to_float8
from measure import empty_us, sustained_us, time_us
from options import make_library_parser
from report import digits, write_cases
from truth import Tensors, max_error

NAMES = ("full_16k", "causal_16k", "window1k_16k", "window4k_128k", "streaming_16k", "streaming_128k",
         "block_diagonal512_16k", "bsr128_10_16k", "bsr128_05_32k", "dilated_16k", "causal_4k_gqa8", "full_16k_d256")


@dataclasses.dataclass
class Float8Case:
    case: cases.Case
    scales: str  # "row" or "head"

    @property
    def name(self):
        return f"{self.case.name}_{self.scales}_scales"


def all_cases():
    known = {case.name: case for case in cases.CASES}
    return [Float8Case(known[name], scales) for name, scales in itertools.product(NAMES, ("row", "head"))]


def make_plan(library, case):
    return library.plan(case.but(case.name, dtype=torch.float8_e4m3fn), True)[0]


def make_operands(given, t):
    """Those of each pass. q, k and v of the tensors become what the float8 stand for."""
    operands = {"out": t.out, "lse": t.lse}
    for name in ("q", "k", "v"):
        codes, scales, stands_for = to_float8(getattr(t, name), -1 if given.scales == "head" else None)
        operands |= {name: codes, f"{name}_scales": scales}
        setattr(t, name, stands_for)
    return {"forward": operands, "backward": operands | {"dout": t.dout, "dq": t.dq, "dk": t.dk, "dv": t.dv}}


def run_case(library, given):
    torch.cuda.empty_cache()
    case, passes = given.case, ("forward", "backward")
    t = Tensors(case)
    calls, plan, pairs = library.calls(case, t, passes)
    line = {"case": given.name, "pattern": case.pattern, "shape": case.shape(), "bf16": library.kernel(plan, "forward"),
            "bf16_us": digits(time_us(calls["forward"])), "bf16_sustained_us": digits(sustained_us(calls["forward"])),
            "bf16_backward_us": digits(time_us(calls["backward"]))}
    right, operands = t.out.clone(), make_operands(given, t)
    plan = make_plan(library, case)
    for name in ("out", "dq", "dk", "dv"):
        getattr(t, name).fill_(torch.nan)
    calls = {what: getattr(library, what)(plan, **operands[what]) for what in passes}
    for name in passes:
        calls[name]()
    us, sustained, backward = time_us(calls["forward"]), sustained_us(calls["forward"]), time_us(calls["backward"])
    rate = case.flops("forward", pairs) * 1e-6
    kept = case.keeps("cuda")
    return {**line, "kernel": library.kernel(plan, "forward"), "us": digits(us), "sustained_us": digits(sustained),
            "tflops": digits(rate / us), "tflops_sustained": digits(rate / sustained),
            "bf16_tflops": digits(rate / line["bf16_us"]), "speedup": digits(line["bf16_us"] / us, 3),
            "backward": library.kernel(plan, "backward"), "backward_us": digits(backward),
            "backward_tflops": digits(case.flops("backward", pairs) * 1e-6 / backward),
            "backward_speedup": digits(line["bf16_backward_us"] / backward, 3),
            "error": max_error(case, t, kept, "forward"), "backward_error": max_error(case, t, kept, "backward"),
            "lost": (t.out.float() - right.float()).abs().max().item(), "empty_us": digits(empty_us())}


def describe(line):
    return (f"{line['case']:34} {line['us']:8} us  {line['tflops']:6} ({line['tflops_sustained']} sustained) TFLOP/s  "
            f"bf16 {line['bf16_us']:8} us {line['bf16_tflops']}  {line['speedup']}x  backward {line['backward_us']:8} us  "
            f"{line['backward_tflops']} TFLOP/s  bf16 {line['bf16_backward_us']:8} us  {line['backward_speedup']}x  "
            f"error {line['error']:.1e} {line['backward_error']:.1e}  lost {line['lost']:.1e}  {line['kernel']}")


def main():
    parser = make_library_parser(__doc__)
    parser.add_argument("--case", default="*")
    options = parser.parse_args()
    library = Library(options.library)
    write_cases(options, "_float8", all_cases(), lambda case: run_case(library, case), describe)


if __name__ == "__main__":
    main()
