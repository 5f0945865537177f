# SPDX-License-Identifier: MIT
"""Problems drawn at random, short sequences and few queries among them, which tables of cases leave out; times of calls."""
import dataclasses
import time

import torch

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

    def q_offset(self):
        return self.seq_k - self.seq_q

    def operands(self, device, requires_grad=False):
        """q, k and v, [batch, seq, heads, head_dim]."""
        sizes = (self.seq_q, self.heads_q), (self.seq_k, self.heads_kv), (self.seq_k, self.heads_kv)
        return [torch.randn(self.batch, seq, heads, self.head_dim, device=device, dtype=self.dtype,
                            requires_grad=requires_grad) for seq, heads in sizes]


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
