#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Random problems beside torch's dense attention: where is the library slower than computing everything?

    python3 bench/beside_dense.py [--device cpu|cuda] [--seconds 60] [--seed 1] [--most 20]

Shapes, dtypes and patterns are drawn at random, short sequences and few queries among them, which a table of cases
leaves out. Dense is scaled_dot_product_attention, with is_causal where the pattern is causal and there are as many
queries as keys. Of each pass the problems with the highest ratio of our time to its are printed: above 1 it is faster.
Needs torch and the Python package; on a GPU times are those of captured graphs.
"""
import argparse
import random
import time

import torch
import torch.nn.functional as F
from random_problems import random_problem, time_on_cpu, time_on_gpu

import sparseattn as sa
from sparseattn import torch as sparse


def time_passes(attention, operands, gradient, time_us):
    """us of forward, and of backward as what it adds."""
    with torch.no_grad():
        forward = time_us(lambda: attention(*operands))
    both = time_us(lambda: torch.autograd.grad(attention(*operands), operands, gradient))
    return forward, max(both - forward, 0.01)


def measure(problem, device, time_us):
    """us of ours and of dense attention, of each pass."""
    p = problem
    q, k, v = p.operands(device, requires_grad=True)
    gradient = torch.randn_like(q)
    groups = {"enable_gqa": True} if p.heads_q != p.heads_kv else {}

    def ours(q, k, v):
        return sparse.attention(q, k, v, p.pattern, q_offset=p.q_offset())

    def dense(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=p.is_causal(), **groups)

    by_head = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    return (time_passes(ours, (q, k, v), gradient, time_us),
            time_passes(dense, by_head, gradient.transpose(1, 2), time_us))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=int, default=20, help="problems that are printed of each pass")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    largest, time_us = (2e12, time_on_gpu) if on_gpu else (3e10, time_on_cpu)
    draw, end, measured = random.Random(options.seed), time.monotonic() + options.seconds, []
    while time.monotonic() < end:
        problem = random_problem(draw, on_gpu)
        if problem.dense_flops() <= largest:
            measured.append((problem, *measure(problem, options.device, time_us)))
    print(f"{len(measured)} problems, {options.device}, torch {torch.__version__}, sparseattn {sa.__version__}")
    for number, what in enumerate(("forward", "backward")):
        ratios = sorted(((ours[number] / dense[number], problem, ours[number], dense[number])
                         for problem, ours, dense in measured), key=lambda entry: -entry[0])
        slower = sum(ratio > 1 for ratio, *_ in ratios)
        print(f"{what}: {slower} slower than dense attention")
        for ratio, problem, ours, dense in ratios[:options.most]:
            print(f"  {ratio:5.2f}  {ours:9.1f} us, dense {dense:9.1f}  {problem}")


if __name__ == "__main__":
    main()
