#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The GPU bench: rates of the library and of its peers on the same tensors, in the same run.

    python3 bench/gpu/bench.py --library build/libsparseattn.so [--case GLOB] [--pass forward|backward] [--no-flex]
                               [--out bench/results]

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
import typing

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings" / "python"))
import native  # noqa: E402

CALLS, PAUSE = 25, 0.01  # seconds
SUSTAINED = 0.4  # seconds
MOST_DIFFERENCE = 0.05  # of two results in bf16 that compute the same
QUEUED = 500_000  # cycles of work before each call, so that no host is too slow to have it queued in time


DETERMINISTIC = "_deterministic"


class Case(typing.NamedTuple):
    name: str
    pattern: str  # a text, or the mask of that name
    heads: int
    seq: int
    kept: typing.Callable | None  # (queries, keys) -> bool; None: as the mask says
    goals: dict  # TFLOP/s of each pass
    recorded: dict = {}  # the best peer measured elsewhere: pass -> (name, TFLOP/s)
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    head_dim_v: int = 128
    deterministic: bool = False  # backward alone: the forward always is

    def mask(self):
        return self.name.removesuffix(DETERMINISTIC) if self.pattern == "mask" else None


def window(q, k, before):
    return (k <= q) & (k >= q - before)


def streaming(q, k):
    return (k <= q) & ((k < 64) | (k >= q - 1023))


WINDOW, STREAMING = "causal & window(1023,0)", "causal & (sink(64) | window(1023,0))"
CASES = [
    Case("full_16k", "full", 16, 16384, lambda q, k: k == k, {"forward": 790, "backward": 650},
         {"forward": ("FA4", 720), "backward": ("FA4", 620)}),
    Case("causal_16k", "causal", 16, 16384, lambda q, k: k <= q, {"forward": 770, "backward": 630},
         {"forward": ("FA4", 651), "backward": ("FA4", 600)}),
    Case("window1k_16k", WINDOW, 16, 16384, lambda q, k: window(q, k, 1023), {"forward": 620, "backward": 480},
         {"forward": ("FA4", 498), "backward": ("FA4", 442)}),
    Case("window4k_128k", "causal & window(4095,0)", 4, 131072, lambda q, k: window(q, k, 4095),
         {"forward": 750, "backward": 600}, {"forward": ("FA4", 617), "backward": ("cuDNN flex", 558)}),
    Case("streaming_16k", STREAMING, 16, 16384, streaming, {"forward": 600, "backward": 460},
         {"forward": ("cuDNN flex", 463), "backward": ("cuDNN flex", 273)}),
    Case("streaming_128k", STREAMING, 4, 131072, streaming, {"forward": 640, "backward": 480},
         {"forward": ("cuDNN flex", 507), "backward": ("cuDNN flex", 129)}),
    Case("block_diagonal512_16k", "block_diagonal(512)", 16, 16384, lambda q, k: q // 512 == k // 512,
         {"forward": 600, "backward": 450}, {"forward": ("FA4", 450), "backward": ("FA4", 359)}),
    Case("bsr128_50_4k", "mask", 16, 4096, None, {"forward": 660, "backward": 540},
         {"forward": ("FA4", 572), "backward": ("cuDNN flex", 482)}),
    Case("bsr128_25_8k", "mask", 16, 8192, None, {"forward": 700, "backward": 570},
         {"forward": ("cuDNN flex", 610), "backward": ("BSA", 496)}),
    Case("bsr128_10_16k", "mask", 16, 16384, None, {"forward": 720, "backward": 580},
         {"forward": ("FLASH flex", 624), "backward": ("BSA", 520)}),
    Case("bsr128_05_32k", "mask", 16, 32768, None, {"forward": 730, "backward": 590},
         {"forward": ("FA4", 603), "backward": ("BSA", 539)}),
    # Tokens in other orders than their own: residue classes, hot tokens, pieces.
    Case("dilated_16k", "causal & dilated(1008,0,16)", 16, 16384, lambda q, k: window(q, k, 1008) & ((q - k) % 16 == 0),
         {"forward": 110, "backward": 95}, {"forward": ("FA4", 75), "backward": ("FA4", 67)}),
    Case("dilated_128k", "causal & dilated(1008,0,16)", 4, 131072,
         lambda q, k: window(q, k, 1008) & ((q - k) % 16 == 0), {}),
    Case("longnet_128k", "causal & block_diagonal(8192) & residue(4,1)", 4, 131072,
         lambda q, k: (k <= q) & (q // 8192 == k // 8192) & (q % 4 == 1) & (k % 4 == 1), {}),
    Case("strided_16k", "causal & strided(128)", 16, 16384, lambda q, k: (k <= q) & ((q - k) % 128 == 0), {}),
    Case("sparse_transformer_16k", "causal & (window(128,0) | strided(128))", 16, 16384,
         lambda q, k: (k <= q) & ((k >= q - 128) | ((q - k) % 128 == 0)), {"forward": 350}),
    Case("logsparse_16k", "logsparse", 16, 16384, lambda q, k: (k <= q) & (((q - k) & (q - k - 1)) == 0), {}),
    Case("window1k_128k", WINDOW, 4, 131072, lambda q, k: window(q, k, 1023), {}),
    Case("global_tokens_64k", "window(256,256) | global_tokens(" + ",".join(str(i) for i in range(0, 65536, 1024)) + ")",
         4, 65536, lambda q, k: ((q - k).abs() <= 256) | (q % 1024 == 0) | (k % 1024 == 0), {"forward": 550}),
    Case("landmark_64k", "causal & (window(256,0) | landmark(64,1))", 4, 65536,
         lambda q, k: (k <= q) & ((k >= q - 256) | (k % 64 == 63)), {}),
    # Elements and head sizes beside bf16 and 128.
    *(Case(f"{name}_{label}", text, 16, 16384, kept, {}, {}, dtype, head_dim, head_dim_v)
      for name, text, kept in (("full_16k", "full", lambda q, k: k == k),
                               ("window1k_16k", WINDOW, lambda q, k: window(q, k, 1023)))
      for label, dtype, head_dim, head_dim_v in (("f16", torch.float16, 128, 128), ("d64", torch.bfloat16, 64, 64),
                                                 ("d64_f16", torch.float16, 64, 64), ("d96", torch.bfloat16, 96, 96),
                                                 ("d192_128", torch.bfloat16, 192, 128),
                                                 ("d256", torch.bfloat16, 256, 256))),
]
CASES += [case._replace(name=case.name + DETERMINISTIC, goals={"backward": 0.85 * case.goals["backward"]},
                        deterministic=True) for case in CASES if "backward" in case.goals]
PASSES = ("forward", "backward")


ffi = native.view()
DTYPES = {torch.bfloat16: (4, 16, 1), torch.float16: (2, 16, 1), torch.float32: (2, 32, 1),
          torch.int32: (0, 32, 1)}  # spattn_dtype


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

    def pattern(self, case):
        if not case.mask():
            return self.make("spattn_pattern", self.lib.spattn_pattern_parse, case.pattern.encode())
        rows = load_mask(case.mask())
        row_ptr = torch.tensor([0] + [len(r.nonzero()) for r in rows]).cumsum(0).int()
        col_idx = rows.nonzero()[:, 1].int().contiguous()
        a, b = view(row_ptr), view(col_idx)
        return self.make("spattn_pattern", self.lib.spattn_pattern_bsr, a[0], b[0], 128, 128, case.seq, case.seq, 0)

    def plan(self, case, backward):
        flags = (self.lib.SPATTN_PLAN_BACKWARD if backward else 0) | (
            self.lib.SPATTN_PLAN_DETERMINISTIC if case.deterministic else 0)
        problem = sized("spattn_problem", flags=flags, batch=1, heads_q=case.heads, heads_kv=case.heads,
                        seq_q=case.seq, seq_k=case.seq, head_dim=case.head_dim, head_dim_v=case.head_dim_v,
                        dtype=DTYPES[case.dtype], axes=self.lib.SPATTN_BHSD)
        pattern = self.pattern(case)
        plan = self.make("spattn_plan", self.lib.spattn_plan_create, self.context, pattern, problem, ffi.NULL)
        stats = sized("spattn_stats")
        self.check(self.lib.spattn_plan_stats(plan, stats))
        return plan, stats.pairs

    def kernel(self, plan, op):
        return ffi.string(self.lib.spattn_plan_kernel(plan, op)).decode()

    def forward(self, plan, **operands):
        return self._call(plan, self.lib.SPATTN_OP_FORWARD, "spattn_forward", operands)

    def backward(self, plan, **operands):
        return self._call(plan, self.lib.SPATTN_OP_BACKWARD, "spattn_backward", operands)

    def _call(self, plan, op, function, operands):
        """A function without arguments that makes the call, and keeps its operands alive."""
        need, align = ffi.new("size_t *"), ffi.new("size_t *")
        self.check(self.lib.spattn_plan_workspace(plan, op, need, align))
        workspace = torch.empty(max(1, need[0]), dtype=torch.uint8, device="cuda")
        views = {name: view(tensor) for name, tensor in operands.items()}
        args = sized(function + "_args", stream=ffi.cast("void *", torch.cuda.current_stream().cuda_stream),
                     workspace=ffi.cast("void *", workspace.data_ptr()), workspace_bytes=need[0],
                     **{name: tensor for name, (tensor, *_) in views.items()})
        keep, run = (views, workspace), getattr(self.lib, function)
        return lambda: keep and self.check(run(plan, args))


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


def sampled(seq):
    return (0, 1, seq // 3, seq // 2 + 77, seq - 130, seq - 1)


class Tensors:
    """Operands of a case; in memory [batch, seq, heads, head_dim], which every peer takes as it is."""

    def __init__(self, case):
        torch.manual_seed(1)
        def normal(columns):
            x = torch.randn(1, case.seq, case.heads, columns, device="cuda", dtype=case.dtype)
            return x.transpose(1, 2)
        self.q, self.k, self.v = normal(case.head_dim), normal(case.head_dim), normal(case.head_dim_v)
        self.dout = normal(case.head_dim_v)
        self.out, self.dq, self.dk, self.dv = (torch.full_like(x, math.nan) for x in (self.v, self.q, self.k, self.v))
        self.lse = torch.empty(1, case.heads, case.seq, device="cuda")
        self.results = {"forward": ["out"], "backward": ["dq", "dk", "dv"]}


def max_error(case, t, kept, what):
    """Of what a pass made, against double precision on sampled rows."""
    worst, everyone = 0.0, torch.arange(case.seq, device="cuda")
    scale = 1 / math.sqrt(case.head_dim)

    def softmax(head, queries, keys):
        s = (t.q[0, head, queries].double() @ t.k[0, head, keys].double().T) * scale
        s = s.masked_fill(~kept(queries[:, None], keys[None, :]), -math.inf)
        return torch.exp(s - t.lse[0, head, queries].double()[:, None])

    def ds(head, queries, keys, p):
        dp = t.dout[0, head, queries].double() @ t.v[0, head, keys].double().T
        delta = (t.dout[0, head, queries].double() * t.out[0, head, queries].double()).sum(1, keepdim=True)
        return p * (dp - delta) * scale

    for head in (0, case.heads - 1):
        for row in sampled(case.seq):
            row = torch.tensor([row], device="cuda")
            by_query = softmax(head, row, everyone)
            if what == "forward":
                by_query /= by_query.sum()  # lse is what is checked, too
                truths = {"out": by_query @ t.v[0, head].double()}
            else:
                by_key = softmax(head, everyone, row)
                truths = {"dq": ds(head, row, everyone, by_query) @ t.k[0, head].double(),
                          "dk": ds(head, everyone, row, by_key).T @ t.q[0, head].double(),
                          "dv": by_key.T @ t.dout[0, head].double()}
            for name, truth in truths.items():
                worst = max(worst, (truth - getattr(t, name)[0, head, row].double()).abs().max().item())
    return worst


def peers_here(case, what, mask, kept, use_flex, t):
    """Name, and a function that makes the call, of each peer that this python has for the case."""
    import fa4
    from torch.nn.attention import SDPBackend, sdpa_kernel
    is_plain = case.dtype == torch.bfloat16 and case.head_dim == 128
    if case.deterministic:
        return  # none of them is, on sparse patterns
    if fa4.is_here() and is_plain and fa4.takes(case.name, mask):
        make = fa4.make_call if what == "forward" else fa4.make_gradients
        operands = [t.q, t.k, t.v] if what == "forward" else [t.q, t.k, t.v, t.dout]
        yield "FA4", lambda: make(case.name, mask, *operands)
    if case.pattern in ("full", "causal"):
        backends = (("torch cuDNN SDPA", SDPBackend.CUDNN_ATTENTION), ("torch flash SDPA", SDPBackend.FLASH_ATTENTION))
        for peer, backend in backends:
            def attention(q, k, v, backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=case.pattern == "causal")
            yield peer, lambda attention=attention: of_pass(what, attention, t)
    if use_flex:
        yield "FlexAttention (Triton)", lambda: of_pass(what, make_flex(kept, case.seq), t)


def of_pass(what, attention, t):
    """The call of one pass of a differentiable attention. Returns what the library's pass makes."""
    if what == "forward":
        return lambda: [attention(t.q, t.k, t.v)]
    inputs = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    out = attention(*inputs)
    return lambda: torch.autograd.grad(out, inputs, t.dout, retain_graph=True)


def make_flex(kept, seq):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    make = torch.compile(create_block_mask, dynamic=False)
    blocks = make(lambda b, h, i, j: kept(i, j), None, None, seq, seq, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def measure_peer(call, flops, results):
    """TFLOP/s, cold and sustained, of a peer that computes the same."""
    theirs = call()
    theirs = [theirs] if isinstance(theirs, torch.Tensor) else theirs
    for x, result in zip(theirs, results):
        difference = (x.float() - result.float()).abs().max().item()
        if not difference < MOST_DIFFERENCE * max(1.0, result.float().abs().max().item()):
            raise AssertionError(f"its result differs by {difference:.2g}")
    return round(flops / time_us(call) * 1e-6, 1), round(flops / sustained_us(call) * 1e-6, 1)


def run_case(library, case, passes, use_flex, common, write):
    mask, kept = None, case.kept
    if kept is None:
        mask = load_mask(case.mask()).bool()
        on_gpu = mask.cuda()
        kept = lambda i, j: on_gpu[i // 128, j // 128]  # noqa: E731
    t = Tensors(case)
    forward = dict(q=t.q, k=t.k, v=t.v, out=t.out, lse=t.lse)
    backward = dict(forward, dout=t.dout, dq=t.dq, dk=t.dk, dv=t.dv)
    lib = library.lib
    plan, pairs = library.plan(case, "backward" in passes)
    calls = {"forward": library.forward(plan, **forward)}
    calls["forward"]()
    flops = {"forward": 2 * pairs * (case.head_dim + case.head_dim_v)}
    if "backward" in passes:
        calls["backward"] = library.backward(plan, **backward)
        flops["backward"] = 2 * pairs * (3 * case.head_dim + 2 * case.head_dim_v)
    for what in passes:
        ours, size = calls[what], flops[what]
        us = time_us(ours)
        op = lib.SPATTN_OP_FORWARD if what == "forward" else lib.SPATTN_OP_BACKWARD
        line = {"case": case.name, "pass": what, "kernel": library.kernel(plan, op),
                "dtype": {torch.bfloat16: "bf16", torch.float16: "f16"}[case.dtype],
                "shape": [1, case.heads, case.heads, case.seq, case.head_dim], "head_dim_v": case.head_dim_v,
                "us": round(us, 1), "tflops": round(size / us * 1e-6, 1),
                "tflops_sustained": round(size / sustained_us(ours) * 1e-6, 1),
                "max_err": max_error(case, t, kept, what)}
        results = [getattr(t, name) for name in t.results[what]]
        peers = [(name + " (recorded)", tflops, None) for name, tflops in [case.recorded.get(what, ("none", None))]]
        for peer, make_call in peers_here(case, what, mask, kept, use_flex, t):
            try:
                peers.append((peer + " (same run)", *measure_peer(make_call(), size, results)))
            except Exception as e:  # a peer that cannot is a fact to record
                reason = (str(e).splitlines() or [repr(e)])[0]
                peers.append((f"{peer} (failed: {reason[:80]})", None, None))
        line["gemm"] = round(gemm_tflops(), 1)
        for peer, tflops, sustained in peers:
            ratio = round(line["tflops"] / tflops, 3) if tflops else None
            write({**line, "peer": peer, "peer_tflops": tflops, "peer_tflops_sustained": sustained, "ratio": ratio,
                   "goal": case.goals.get(what), **common})
    torch.compiler.reset()  # each case is a new shape: past eight, torch would stop compiling
    torch.cuda.empty_cache()


def shell(command):
    return subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def origin(toolkit):
    """What every line says of its run."""
    hashed = "find include src cuda -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12"
    return {"source": shell(hashed), "gpu": torch.cuda.get_device_name(),
            "driver": shell("nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1"),
            "toolkit": f"nvcc {toolkit}, torch {torch.__version__}",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")}


def results_file(folder, suffix=""):
    gpu = torch.cuda.get_device_name().lower().replace("nvidia ", "")
    file = pathlib.Path(folder) / (re.sub("[^a-z0-9]", "_", gpu) + suffix + ".jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--case", default="*")
    parser.add_argument("--pass", dest="passes", choices=PASSES, action="append", help="both, unless given")
    parser.add_argument("--out", default=str(ROOT / "bench/results"))
    parser.add_argument("--toolkit", default="13.0", help="the nvcc that built the library")
    parser.add_argument("--no-flex", action="store_true")
    args = parser.parse_args()
    common, file = origin(args.toolkit), results_file(args.out)
    library = Library(args.library)
    with file.open("w") as stream:
        def write(line):
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            print(f"{line['case']:22} {line['pass']:8} {line['us']:9.1f} us {line['tflops']:6.1f} TFLOP/s "
                  f"({line['tflops_sustained']:.1f} sustained)  goal {line['goal']}  "
                  f"gemm {line['gemm']}  err {line['max_err']:.1e}  {line['peer']}: {line['peer_tflops']} "
                  f"({line['peer_tflops_sustained']})  {line['kernel']}",
                  flush=True)
        for case in CASES:
            if fnmatch.fnmatch(case.name, args.case):
                passes = [what for what in args.passes or PASSES if what == "backward" or not case.deterministic]
                run_case(library, case, passes, not args.no_flex, common, write)


if __name__ == "__main__":
    main()
