#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The GPU bench: forward rates of the library and of its peers on the same tensors, in the same run.

    python3 bench/gpu/bench.py --library build/libsparseattn.so [--case GLOB] [--out bench/results] [--no-flex]

One JSON line for each case and peer goes to <out>/<gpu>.jsonl. Peers that this python has are measured here (torch, and
FA4 where its wheel is on PYTHONPATH); the best figure that was recorded elsewhere stands beside them and says so.
Inputs N(0,1). `tflops`: L2 cold, a pause before each call, median of 25 calls by events. `tflops_sustained`: warm, back
to back for 0.4 s, when the chip's power limit has lowered its clock, which is what a server sees.
"""
import argparse
import datetime
import fnmatch
import json
import math
import pathlib
import re
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings" / "python"))
import native  # noqa: E402

CALLS, PAUSE = 25, 0.01  # seconds
SUSTAINED = 0.4  # seconds
MOST_DIFFERENCE = 0.05  # of two results in bf16 that compute the same
QUEUED = 500_000  # cycles of work before each call, so that no host is too slow to have it queued in time

# name, pattern text or mask, heads, seq, kept(q, k), goal, recorded peer, its TFLOP/s
CASES = [
    ("full_16k", "full", 16, 16384, lambda q, k: k == k, 790, "FA4", 720),
    ("causal_16k", "causal", 16, 16384, lambda q, k: k <= q, 770, "FA4", 651),
    ("window1k_16k", "causal & window(1023,0)", 16, 16384, lambda q, k: (k <= q) & (k >= q - 1023), 620, "FA4", 498),
    ("window4k_128k", "causal & window(4095,0)", 4, 131072, lambda q, k: (k <= q) & (k >= q - 4095), 750, "FA4", 617),
    ("streaming_16k", "causal & (sink(64) | window(1023,0))", 16, 16384,
     lambda q, k: (k <= q) & ((k < 64) | (k >= q - 1023)), 600, "cuDNN flex", 463),
    ("streaming_128k", "causal & (sink(64) | window(1023,0))", 4, 131072,
     lambda q, k: (k <= q) & ((k < 64) | (k >= q - 1023)), 640, "cuDNN flex", 507),
    ("block_diagonal512_16k", "block_diagonal(512)", 16, 16384, lambda q, k: q // 512 == k // 512, 600, "FA4", 450),
    ("bsr128_50_4k", "mask", 16, 4096, None, 660, "FA4", 572),
    ("bsr128_25_8k", "mask", 16, 8192, None, 700, "cuDNN flex", 610),
    ("bsr128_10_16k", "mask", 16, 16384, None, 720, "FLASH flex", 624),
    ("bsr128_05_32k", "mask", 16, 32768, None, 730, "FA4", 603),
]


ffi = native.view()
DTYPES = {torch.bfloat16: (4, 16, 1), torch.float32: (2, 32, 1), torch.int32: (0, 32, 1)}  # spattn_dtype


def sized(struct, **fields):
    return ffi.new(f"{struct} *", {"struct_size": ffi.sizeof(struct), **fields})


def view(t):
    """A spattn_tensor* of a torch tensor, and what must live as long."""
    shape, strides = ffi.new("int64_t[]", list(t.shape)), ffi.new("int64_t[]", list(t.stride()))
    device = (2, t.device.index or 0) if t.is_cuda else (1, 0)
    data = ffi.cast("void *", t.data_ptr())
    return ffi.new("spattn_tensor *", (data, device, t.dim(), DTYPES[t.dtype], shape, strides, 0)), shape, strides


class Library:
    def __init__(self, path):
        self.lib = ffi.dlopen(str(path))
        options = sized("spattn_context_options", device=(self.lib.SPATTN_CUDA, 0))
        self.context = self.make("spattn_context", self.lib.spattn_context_create, options)

    def check(self, status):
        if status:
            raise RuntimeError(ffi.string(self.lib.spattn_last_error_text()).decode())

    def make(self, kind, function, *args):
        handle = ffi.new(f"{kind} **")
        self.check(function(*args, handle))
        return handle[0]

    def pattern(self, name, text, seq):
        if text != "mask":
            return self.make("spattn_pattern", self.lib.spattn_pattern_parse, text.encode())
        rows = load_mask(name)
        row_ptr = torch.tensor([0] + [len(r.nonzero()) for r in rows]).cumsum(0).int()
        col_idx = rows.nonzero()[:, 1].int().contiguous()
        a, b = view(row_ptr), view(col_idx)
        return self.make("spattn_pattern", self.lib.spattn_pattern_bsr, a[0], b[0], 128, 128, seq, seq, 0)

    def plan(self, pattern, heads, seq):
        problem = sized("spattn_problem", batch=1, heads_q=heads, heads_kv=heads, seq_q=seq, seq_k=seq, head_dim=128,
                        dtype=DTYPES[torch.bfloat16], axes=self.lib.SPATTN_BHSD)
        plan = self.make("spattn_plan", self.lib.spattn_plan_create, self.context, pattern, problem, ffi.NULL)
        stats = sized("spattn_stats")
        self.check(self.lib.spattn_plan_stats(plan, stats))
        kernel = self.lib.spattn_plan_kernel(plan, self.lib.SPATTN_OP_FORWARD)
        return plan, stats.pairs, ffi.string(kernel).decode()

    def call(self, plan, operands):
        need, align = ffi.new("size_t *"), ffi.new("size_t *")
        self.check(self.lib.spattn_plan_workspace(plan, self.lib.SPATTN_OP_FORWARD, need, align))
        workspace = torch.empty(max(1, need[0]), dtype=torch.uint8, device="cuda")
        views = [view(t) for t in operands]
        args = sized("spattn_forward_args", stream=ffi.cast("void *", torch.cuda.current_stream().cuda_stream),
                     workspace=ffi.cast("void *", workspace.data_ptr()), workspace_bytes=need[0],
                     **{name: tensor for name, (tensor, *_) in zip(("q", "k", "v", "out", "lse"), views)})
        keep = (views, workspace)
        return lambda: keep and self.check(self.lib.spattn_forward(plan, args))


def load_mask(name):
    text = (ROOT / "bench/gpu/masks" / f"{name}.pbm").read_text()
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    width, height = map(int, lines[1].split())
    bits = "".join("".join(lines[2:]).split())
    return torch.tensor([int(b) for b in bits]).view(height, width)


_flush = None


def time_us(call):
    global _flush
    if _flush is None:
        _flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call(), call()
    times = []
    for i in range(CALLS):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        _flush.fill_(i)
        torch.cuda._sleep(QUEUED)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), call(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[CALLS // 2]


def sustained_us(call):
    """Back to back, two calls a measurement, so that events cost the stream little."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times, begin = [], time.monotonic()
    while time.monotonic() - begin < SUSTAINED or len(times) < 5:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), call(), call(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 2)
    return sorted(times)[len(times) // 2]


def gemm_tflops():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return 2 * 8192**3 / time_us(lambda: a @ b) * 1e-6


def max_error(q, k, v, out, kept, heads, seq):
    """Against double precision on sampled rows."""
    worst = 0.0
    keys = torch.arange(seq, device="cuda")
    for head in (0, heads - 1):
        for row in (0, 1, seq // 3, seq // 2 + 77, seq - 130, seq - 1):
            s = (k[0, head].double() @ q[0, head, row].double()) / math.sqrt(128)
            s = s.masked_fill(~kept(torch.tensor(row, device="cuda"), keys), -math.inf)
            truth = torch.softmax(s, 0) @ v[0, head].double()
            worst = max(worst, (truth - out[0, head, row].double()).abs().max().item())
    return worst


def peers_here(name, kept, mask, use_flex, seq, q, k, v):
    """Name, and a function that makes the call, of each peer that this python has for the case."""
    import fa4
    from torch.nn.attention import SDPBackend, sdpa_kernel
    if fa4.is_here():
        yield "FA4", lambda: fa4.make_call(name, mask, q, k, v)
    if name in ("full_16k", "causal_16k"):
        backends = (("torch cuDNN SDPA", SDPBackend.CUDNN_ATTENTION), ("torch flash SDPA", SDPBackend.FLASH_ATTENTION))
        for peer, backend in backends:
            def call(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=name.startswith("causal"))
            yield peer, lambda call=call: call
    if use_flex:
        yield "FlexAttention (Triton)", lambda: make_flex(kept, seq, q, k, v)


def make_flex(kept, seq, q, k, v):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    make = torch.compile(create_block_mask, dynamic=False)
    blocks = make(lambda b, h, i, j: kept(i, j), None, None, seq, seq, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks)


def measure_peer(call, flops, out):
    """TFLOP/s, cold and sustained, of a peer that computes the same."""
    difference = (call().float() - out.float()).abs().max().item()
    if not difference < MOST_DIFFERENCE:
        raise AssertionError(f"its result differs by {difference:.2g}")
    return round(flops / time_us(call) * 1e-6, 1), round(flops / sustained_us(call) * 1e-6, 1)


def run_case(library, case, use_flex, common, write):
    name, text, heads, seq, kept, goal, recorded, recorded_tflops = case
    mask = None
    if kept is None:
        mask = load_mask(name).bool()
        on_gpu = mask.cuda()
        kept = lambda i, j: on_gpu[i // 128, j // 128]  # noqa: E731
    torch.manual_seed(1)
    # In memory [batch, seq, heads, head_dim], which every peer takes as it is.
    q, k, v = (torch.randn(1, seq, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv")
    out = torch.full_like(q, math.nan)
    lse = torch.empty(1, heads, seq, device="cuda")
    plan, pairs, kernel = library.plan(library.pattern(name, text, seq), heads, seq)
    ours = library.call(plan, (q, k, v, out, lse))
    us = time_us(ours)
    flops = 4 * pairs * 128
    line = {"case": name, "pass": "forward", "kernel": kernel, "dtype": "bf16", "shape": [1, heads, heads, seq, 128],
            "us": round(us, 1), "tflops": round(flops / us * 1e-6, 1),
            "tflops_sustained": round(flops / sustained_us(ours) * 1e-6, 1),
            "gbs": round((4 * q.numel() * 2 + lse.numel() * 4) / us * 1e-3, 1), "gemm": None,
            "max_err": max_error(q, k, v, out, kept, heads, seq)}
    peers = [(recorded + " (recorded)", recorded_tflops, None)]
    for peer, make_call in peers_here(name, kept, mask, use_flex, seq, q, k, v):
        try:
            peers.append((peer + " (same run)", *measure_peer(make_call(), flops, out)))
        except Exception as e:  # a peer that cannot is a fact to record
            reason = (str(e).splitlines() or [repr(e)])[0]
            peers.append((f"{peer} (failed: {reason[:80]})", None, None))
    line["gemm"] = round(gemm_tflops(), 1)
    for peer, tflops, sustained in peers:
        ratio = round(line["tflops"] / tflops, 3) if tflops else None
        write({**line, "peer": peer, "peer_tflops": tflops, "peer_tflops_sustained": sustained, "ratio": ratio,
               "goal": goal, **common})
    torch.compiler.reset()  # each case is a new shape: past eight, torch would stop compiling
    torch.cuda.empty_cache()


def shell(command):
    return subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--case", default="*")
    parser.add_argument("--out", default=str(ROOT / "bench/results"))
    parser.add_argument("--toolkit", default="13.0", help="the nvcc that built the library")
    parser.add_argument("--no-flex", action="store_true")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    hashed = "find include src cuda -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12"
    now = datetime.datetime.now(datetime.timezone.utc)
    common = {"source": shell(hashed), "gpu": gpu,
              "driver": shell("nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1"),
              "toolkit": f"nvcc {args.toolkit}, torch {torch.__version__}", "date": now.isoformat("T", "seconds")}
    library = Library(args.library)
    file = pathlib.Path(args.out) / (re.sub("[^a-z0-9]", "_", gpu.lower().replace("nvidia ", "")) + ".jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        def write(line):
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            print(f"{line['case']:22} {line['us']:9.1f} us {line['tflops']:6.1f} TFLOP/s "
                  f"({line['tflops_sustained']:.1f} sustained)  goal {line['goal']}  "
                  f"gemm {line['gemm']}  err {line['max_err']:.1e}  {line['peer']}: {line['peer_tflops']} "
                  f"({line['peer_tflops_sustained']})  {line['kernel']}",
                  flush=True)
        for case in CASES:
            if fnmatch.fnmatch(case[0], args.case):
                run_case(library, case, not args.no_flex, common, write)


if __name__ == "__main__":
    main()
