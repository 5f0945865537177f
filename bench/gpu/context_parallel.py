#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Context parallelism over the GPUs of this machine: what a forward and a backward take on one, and on all.

    python3 bench/gpu/context_parallel.py [--torch] [--case GLOB] [--out bench/results]

It needs torch and the library's Python package (torch.distributed carries NCCL). Of a case, on tensors N(0,1): the passes
of sparseattn.torch.attention on one GPU, and of ContextParallel on all, keys and values sent included; out and gradients
of both are compared, and must be equal as far as roundings of parts let them (`max_difference`, absolute). Where a case
has `float8`, passes are those of float8_attention with such scales, and round operands themselves. `received` is how many
tokens a GPU receives, of those that others hold: all of them is what gathering keys would send. `*_peak_mib` is the
memory of torch at its highest, operands included, in a forward and a backward. With --torch, torch's own context
parallelism (a ring of its SDPA) takes causal attention, too, as `torch_*`, and must find the same out. Medians of calls on
warm memory, in milliseconds, of the slowest GPU. A JSON line for each case goes to
<out>/<gpu>_x<gpus>_context_parallel.jsonl.
"""
import fnmatch
import json
import os
import tempfile
import time
import typing

import sparseattn.torch as sat
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from options import make_parser
from report import origin, results_file
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from truth import difference

CALLS = 15


class Case(typing.NamedTuple):
    name: str
    pattern: str
    seq: int
    heads: int = 16
    heads_kv: int = 16
    head_dim: int = 128
    ranges: str = "zigzag"
    float8: str | None = None  # whose operands are rounded to float8: who has a scale, "heads" or "rows"


CASES = [
    Case("causal_64k", "causal", 65536),
    Case("full_64k", "full", 65536, ranges="contiguous"),
    Case("window4k_128k", "causal & window(4095,0)", 131072, ranges="contiguous"),
    Case("window4k_512k", "causal & window(4095,0)", 524288, ranges="contiguous"),
    Case("streaming_128k", "causal & (sink(64) | window(1023,0))", 131072, ranges="contiguous"),
    Case("dilated_128k", "causal & dilated(1008,0,16)", 131072, ranges="contiguous"),
    Case("bigbird_128k", "bigbird(64,3,2,3,0)", 131072, ranges="contiguous"),
    Case("causal_64k_gqa8", "causal", 65536, heads=32, heads_kv=4),
    Case("causal_64k_float8", "causal", 65536, float8="heads"),
    Case("causal_64k_float8_rows", "causal", 65536, float8="rows"),
    Case("window4k_128k_float8", "causal & window(4095,0)", 131072, ranges="contiguous", float8="heads"),
]


def make_operands(case, device):
    """q, k, v and dout of all tokens: the same on every process."""
    made = torch.Generator(device).manual_seed(1)
    shapes = [(1, case.seq, heads, case.head_dim) for heads in (case.heads, case.heads_kv, case.heads_kv, case.heads)]
    return [torch.randn(shape, generator=made, device=device, dtype=torch.bfloat16) for shape in shapes]


def median_ms(call, calls=CALLS):
    """Of calls that all processes begin together, in the one that needs longest."""
    call()
    times = []
    for _ in range(calls):
        if dist.is_initialized():
            dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), call(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    median = torch.tensor(sorted(times)[calls // 2], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


class Passes(typing.NamedTuple):
    results: tuple  # out and gradients
    forward_ms: float
    backward_ms: float
    peak_mib: int


def run_passes(attend, q, k, v, dout):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    before = torch.cuda.memory_allocated() - sum(x.nbytes for x in (q, k, v, dout))
    torch.cuda.reset_peak_memory_stats()
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    peak = (torch.cuda.max_memory_allocated() - before) >> 20
    forward = median_ms(lambda: attend(q, k, v))
    backward = median_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    return Passes((out.detach(), *gradients), forward, backward, peak)


def of_zigzag(x):
    """This process' tokens as torch shares them out."""
    shares = x.chunk(2 * dist.get_world_size(), 1)
    return torch.cat([shares[dist.get_rank()], shares[-1 - dist.get_rank()]], 1)


def run_torch(whole, out):
    """What torch's own context parallelism takes, an experiment of torch's own that other versions may not have."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    shards = [x.transpose(1, 2).contiguous() for x in whole]  # which the context cuts in place

    def attend(q, k, v):  # by a function that the context replaces
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        passes = run_passes(attend, *shards)
    difference("out of torch", passes.results[0].transpose(1, 2).float(), out.float())
    return {"torch_forward_ms": round(passes.forward_ms, 3), "torch_backward_ms": round(passes.backward_ms, 3),
            "torch_peak_mib": passes.peak_mib}


def run_case(case, beside_torch):
    """The line of a case; in every process, of which the first writes it."""
    device = torch.device("cuda", torch.cuda.current_device())
    whole = make_operands(case, device)
    begin = time.monotonic()
    parallel = sat.ContextParallel(case.pattern, case.seq, ranges=case.ranges)
    setup = time.monotonic() - begin
    own = [parallel.local(x) for x in whole]
    name, options = ("attention", {}) if case.float8 is None else ("float8_attention", {"scales": case.float8})
    of_all, of_one = getattr(parallel, name), getattr(sat, name)
    shared = run_passes(lambda q, k, v: of_all(q, k, v, **options), *own)
    alone = run_passes(lambda q, k, v: of_one(q, k, v, case.pattern, **options), *whole)
    worst = max(difference(name, x.float(), parallel.local(y).float())
                for name, x, y in zip(("out", "dq", "dk", "dv"), shared.results, alone.results))
    is_torchs = case.pattern == "causal" and case.heads == case.heads_kv and case.float8 is None
    of_torch = run_torch(whole, of_zigzag(alone.results[0])) if beside_torch and is_torchs else {}
    most = torch.tensor([worst, parallel.received, setup * 1e3], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"case": case.name, "pattern": case.pattern, "shape": [1, case.heads, case.heads_kv, case.seq, case.head_dim],
            "dtype": "bf16", "float8": case.float8, "gpus": parallel.size, "ranges": case.ranges,
            "received": int(most[1]), "others": case.seq - parallel.tokens, "setup_ms": round(most[2].item(), 1),
            "forward_ms": round(shared.forward_ms, 3), "backward_ms": round(shared.backward_ms, 3),
            "peak_mib": shared.peak_mib, "one_gpu_forward_ms": round(alone.forward_ms, 3),
            "one_gpu_backward_ms": round(alone.backward_ms, 3), "one_gpu_peak_mib": alone.peak_mib,
            "max_difference": round(most[0].item(), 5), **of_torch}


def process(rank, size, store, options):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size,
                            device_id=torch.device("cuda", rank))
    common = origin(options.toolkit)
    lines = [run_case(case, options.torch) for case in CASES if fnmatch.fnmatch(case.name, options.case)]
    if rank == 0:
        with results_file(options.out, f"_x{size}_context_parallel").open("w") as stream:
            for line in lines:
                stream.write(json.dumps({**line, **common}) + "\n")
                print(f"{line['case']:18} forward {line['one_gpu_forward_ms']:8.3f} -> {line['forward_ms']:8.3f} ms  "
                      f"backward {line['one_gpu_backward_ms']:8.3f} -> {line['backward_ms']:8.3f} ms  received "
                      f"{line['received']:,} of {line['others']:,} tokens  MiB {line['one_gpu_peak_mib']:,} -> "
                      f"{line['peak_mib']:,}  difference {line['max_difference']}"
                      f"  torch {line.get('torch_forward_ms', '-')} {line.get('torch_backward_ms', '-')}", flush=True)
    dist.destroy_process_group()


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--case", default="*")
    parser.add_argument("--torch", action="store_true", help="torch's own context parallelism, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = torch.cuda.device_count()
        processes.spawn(process, (size, os.path.join(folder, "store"), options), size)


if __name__ == "__main__":
    main()
