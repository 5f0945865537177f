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
import dataclasses
import random
import time

import torch
import torch.nn.functional as F

import sparseattn as sa
from sparseattn import torch as sparse

REPEATS = 10  # calls of a captured graph


@dataclasses.dataclass
class Problem:
    dtype: torch.dtype
    head_dim: int
    heads_q: int
    heads_kv: int
    batch: int
    seq_q: int  # aligned to the end of the keys
    seq_k: int
    pattern: str

    def __str__(self):
        shape = f"{self.batch} x {self.heads_q}/{self.heads_kv} heads of {self.head_dim}, {self.seq_q} x {self.seq_k}"
        return f"{str(self.dtype)[6:]}, {shape}: {self.pattern}"

    def dense_flops(self):
        return 4 * self.batch * self.heads_q * self.seq_q * self.seq_k * self.head_dim

    def is_causal(self):
        return self.seq_q == self.seq_k and self.pattern.startswith(("causal", "logsparse"))


def random_pattern(draw, tokens):
    width = max(1, tokens // draw.choice([4, 8, 16, 32]))
    return draw.choice([
        "full", "causal", "logsparse",
        f"causal & window({width},0)",
        f"window({width // 2},{width // 2})",
        f"causal & (sink(4) | window({width},0))",
        f"block_diagonal({max(1, tokens // draw.choice([4, 7, 16]))})",
        f"causal & dilated({width},0,{draw.choice([2, 4, 8])})",
        f"causal & strided({draw.choice([16, 32, 64, 100])})",
        f"causal & (window({width},0) | landmark({draw.choice([16, 64])},1))",
        f"window({width},{width}) | global_tokens(0, 1, {tokens // 2})",
    ])


def random_problem(draw, on_gpu):
    short, long = [128, 200, 512, 1000, 2048, 4096], [8192, 10000, 16384, 32768]
    seq_k = draw.choice(short + long if on_gpu else short)
    seq_q = seq_k if draw.random() < 0.8 else draw.choice([1, 7, 64, seq_k // 2])
    heads = [(32, 8), (24, 8), (16, 16), (8, 1), (4, 4)] if on_gpu else [(8, 2), (4, 4), (4, 1)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32] + ([torch.float16] if on_gpu else [])
    head_dim = draw.choice([16, 32, 40, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256])
    return Problem(draw.choice(dtypes), head_dim, *draw.choice(heads), draw.choice([1, 1, 2, 8, 32]), seq_q, seq_k,
                   random_pattern(draw, seq_k))


def time_on_cpu(call):
    call()
    best, begin, calls = float("inf"), time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - begin < 0.08:
        before = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - before), calls + 1
    return 1e6 * best


def time_on_gpu(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(REPEATS):
                call()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * min(times) / REPEATS


def time_passes(attention, operands, gradient, time_us):
    """us of forward, and of backward as what it adds."""
    with torch.no_grad():
        forward = time_us(lambda: attention(*operands))
    both = time_us(lambda: torch.autograd.grad(attention(*operands), operands, gradient))
    return forward, max(both - forward, 0.01)


def measure(problem, device, time_us):
    """us of ours and of dense attention, of each pass."""
    p = problem
    q, k, v = (torch.randn(p.batch, seq, heads, p.head_dim, device=device, dtype=p.dtype, requires_grad=True)
               for seq, heads in ((p.seq_q, p.heads_q), (p.seq_k, p.heads_kv), (p.seq_k, p.heads_kv)))
    gradient = torch.randn_like(q)
    offset, groups = p.seq_k - p.seq_q, {"enable_gqa": True} if p.heads_q != p.heads_kv else {}

    def ours(q, k, v):
        return sparse.attention(q, k, v, p.pattern, q_offset=offset)

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
