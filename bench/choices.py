#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Random problems on every kernel that can serve them: does a plan take the fastest?

    python3 bench/choices.py [--device cpu|cuda] [--seconds 60] [--seed 1] [--dtype float32] [--most 20] [--json FILE]

Each problem is planned freely, and then with each kernel row that could serve a pass pinned by SPATTN_FORCE_KERNEL.
What the free plan's kernel takes over what the fastest takes is its regret: 1 is none. Of each pass the problems with
the highest regret are printed, and for each row the middle and the extremes of what it takes over what plans predict. A
row that takes three times as long as the fastest so far is called twice and no more. Needs torch and the Python package.
"""
import argparse
import collections
import contextlib
import json
import os
import random
import re
import statistics
import time

import torch
from random_problems import random_problem, time_on_cpu, time_on_gpu

import sparseattn as sa
from sparseattn import torch as sparse

FORCE = "SPATTN_FORCE_KERNEL"
PASSES = ("forward", "backward")
HOPELESS = 3  # times the fastest


@contextlib.contextmanager
def pinned(row):
    """Plans that are made inside take this row; None pins nothing."""
    if row:
        os.environ[FORCE] = row
    try:
        yield
    finally:
        os.environ.pop(FORCE, None)


def section(explained, name):
    """What explain says of a pass."""
    begin = re.search(f"^{name} ", explained, re.M).start()
    end = re.search(r"^backward ", explained[begin + 1:], re.M)
    return explained[begin:begin + 1 + end.start()] if end else explained[begin:]


def predicted_us(explained):
    return float(re.search(r"^  predicted ([\d.]+) us", explained, re.M)[1])


def candidates(explained):
    """Rows that could serve the whole pass."""
    whole = explained.split("\n piece ")[0]
    considered = r"^  [* ] (\w+)(?: in residue classes| with listed tiles)?: (?:[\d.]+ us|could)"
    return list(dict.fromkeys(re.findall(considered, whole, re.M)))


class Operands:
    """Tensors of a problem, and plans of it."""

    def __init__(self, problem, device):
        self.problem = problem
        self.q, self.k, self.v = problem.operands(device)
        self.dout = torch.randn_like(self.q)

    def plan(self, row=None):
        with pinned(row):
            return sparse.plan(self.problem.pattern, self.q, self.k, self.v, backward=True,
                               q_offset=self.problem.q_offset())

    def call_of(self, plan, name):
        if name == "forward":
            return lambda: plan.forward(self.q, self.k, self.v)
        out, lse = plan.forward(self.q, self.k, self.v, return_lse=True)
        return lambda: plan.backward(self.q, self.k, self.v, out, lse, self.dout)


def seconds(call, on_gpu):
    """Of the second call, about."""
    call()
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(problem, device, time_us):
    """Of each pass a dict: problem, pass, chosen, and of each row that was timed what it takes and was to take, us."""
    operands, on_gpu = Operands(problem, device), device == "cuda"
    free = operands.plan()
    explained = free.explain()
    for name in PASSES:
        chosen = free.kernel(backward=name == "backward")
        of_pass = section(explained, name)
        call = operands.call_of(free, name)
        best = seconds(call, on_gpu)
        rows = {chosen: (time_us(call), predicted_us(of_pass))}
        for row in candidates(of_pass):
            if row == chosen:
                continue
            plan = operands.plan(row)
            call = operands.call_of(plan, name)
            took = seconds(call, on_gpu)
            if took < HOPELESS * best:
                rows[row] = time_us(call), predicted_us(section(plan.explain(), name))
                best = min(best, took)
        yield {"problem": str(problem), "pass": name, "chosen": chosen, "rows": rows}


def regret(line):
    return line["rows"][line["chosen"]][0] / min(us for us, _ in line["rows"].values())


def report(lines, most):
    for name in PASSES:
        of_pass = sorted((line for line in lines if line["pass"] == name), key=regret, reverse=True)
        regrets = [regret(line) for line in of_pass]
        print(f"{name}: regret {statistics.geometric_mean(regrets):.3f} in the mean, of {len(regrets)} problems "
              f"{sum(r > 1.05 for r in regrets)} above 1.05, {sum(r > 1.2 for r in regrets)} above 1.2")
        for line in of_pass[:most]:
            fastest = min(line["rows"], key=lambda row: line["rows"][row][0])
            print(f"  {regret(line):5.2f}  {line['problem']}")
            for row in dict.fromkeys((line["chosen"], fastest)):
                us, predicted = line["rows"][row]
                print(f"         {us:9.1f} us, predicted {predicted:9.1f}  {row}")
    ratios = collections.defaultdict(list)
    for line in lines:
        for row, (us, predicted) in line["rows"].items():
            ratios[row].append(us / predicted)
    print("what rows take over what was predicted: least, middle, most")
    for row, of_row in sorted(ratios.items()):
        print(f"  {min(of_row):5.2f} {statistics.median(of_row):5.2f} {max(of_row):5.2f}  {len(of_row):4}  {row}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", help="leave out problems of others")
    parser.add_argument("--most", type=int, default=20, help="problems that are printed of each pass")
    parser.add_argument("--json", help="a file that gets a line for each pass of a problem")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    largest, time_us = (3e11, time_on_gpu) if on_gpu else (3e9, time_on_cpu)  # FLOPs of dense attention
    draw, end, lines = random.Random(options.seed), time.monotonic() + options.seconds, []
    while time.monotonic() < end:
        problem = random_problem(draw, on_gpu)
        if problem.dense_flops() <= largest and options.dtype in (None, str(problem.dtype)[6:]):
            of_problem = list(measure(problem, options.device, time_us))
            lines += of_problem
            if options.json:
                with open(options.json, "a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in of_problem)
    print(f"{options.device}, torch {torch.__version__}, sparseattn {sa.__version__}")
    report(lines, options.most)


if __name__ == "__main__":
    main()
