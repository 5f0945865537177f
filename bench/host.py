#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a call costs in Python beside its kernel, in microseconds: NumPy, torch, and the import.

    python3 bench/host.py [--json FILE] [--device cpu|cuda]

Attention of 16 tokens, 1 head, head_dim 16, one thread: the smallest problem that is one. `kernel` is the same call of
the C ABI with structs that are ready; the others are what a user writes, and `over` is their difference. Each figure is
the least of many short runs, which a busy machine disturbs least.
"""
import argparse
import json
import os
import subprocess
import sys
import time

import numpy as np
import sparseattn as sa
from sparseattn._native import ffi, lib

TOKENS, DIM, TEXT = 16, 16, "causal & window(7,0)"
SECONDS = 1.0


def least(call):
    """Microseconds of a call. Short runs, so that some of them are left alone."""
    call()
    begin = time.perf_counter()
    call()
    calls = max(1, min(100, int(3e-4 / max(1e-7, time.perf_counter() - begin))))
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best * 1e6


def kernel(plan, q, k, v, out):
    """The bare call of the C ABI on the same arrays."""
    held = []

    def tensor(array):
        made = ffi.new("spattn_tensor *")
        held.extend([array, made, ffi.new("int64_t[]", array.shape)])
        made.data, made.ndim, made.shape = ffi.cast("void *", array.ctypes.data), array.ndim, held[-1]
        made.device.type, made.dtype.code, made.dtype.bits, made.dtype.lanes = lib.SPATTN_CPU, lib.SPATTN_FLOAT, 32, 1
        return made

    size = plan.workspace()
    scratch = np.empty(size + 64, np.uint8)
    args = ffi.new("spattn_forward_args *")
    args.struct_size, args.workspace_bytes = ffi.sizeof("spattn_forward_args"), size
    args.workspace = ffi.cast("void *", scratch.ctypes.data + -scratch.ctypes.data % 64)
    args.q, args.k, args.v, args.out = map(tensor, (q, k, v, out))

    def call():
        assert lib.spattn_forward(plan._handle, args) == 0 and held is not None and scratch.size
    return call


def of_numpy():
    context = sa.Context("cpu", threads=1)
    pattern = sa.parse(TEXT)
    q, k, v = (np.random.default_rng(n).standard_normal((1, TOKENS, 1, DIM), np.float32) for n in range(3))
    plan = sa.plan(pattern, q, k, v, backward=True, context=context)
    out, lse = plan.forward(q, k, v, return_lse=True)
    bare = least(kernel(plan, q, k, v, np.empty_like(out)))
    yield "kernel", bare, None
    yield "numpy plan.forward", least(lambda: plan.forward(q, k, v)), bare
    yield "numpy plan.forward(out=)", least(lambda: plan.forward(q, k, v, out=out)), bare
    yield "numpy attention", least(lambda: sa.attention(q, k, v, pattern, context=context)), bare
    yield "numpy attention, text", least(lambda: sa.attention(q, k, v, TEXT, context=context)), bare
    yield "numpy plan.backward", least(lambda: plan.backward(q, k, v, out, lse, out)), None


def of_torch(device):
    import sparseattn.torch as sat
    import torch
    torch.set_num_threads(1)
    context = sa.Context("cpu", threads=1) if device == "cpu" else None
    pattern = sa.parse(TEXT)
    q, k, v = torch.randn(3, 1, TOKENS, 1, DIM, device=device).unbind()
    leaf = q.clone().requires_grad_()
    dout = torch.ones_like(q)
    bare = None
    if device == "cpu":
        arrays = [x.numpy() for x in (q, k, v)]
        bare = least(kernel(sa.plan(pattern, *arrays, context=context), *arrays, np.empty_like(arrays[0])))

    def both():
        leaf.grad = None
        sat.attention(leaf, k, v, pattern, context=context).backward(dout)

    def forward(first):
        return lambda: sat.attention(first, k, v, pattern, context=context)

    yield f"torch {device} attention", least(forward(q)), bare
    yield f"torch {device} attention, gradients", least(forward(leaf)), bare
    yield f"torch {device} forward and backward", least(both), None
    sdpa = torch.nn.functional.scaled_dot_product_attention
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    yield f"torch {device} its own sdpa, causal", least(lambda: sdpa(*swapped, is_causal=True)), None


def imports():
    """CPU milliseconds of `import sparseattn` after NumPy's, the least of 15 processes."""
    program = ("import numpy, time; begin = time.process_time(); import sparseattn; "
               "print((time.process_time() - begin) * 1e3)")
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as pip does
    run = dict(args=[sys.executable, "-c", program], env=compiled, capture_output=True, text=True, check=True)
    return min(float(subprocess.run(**run).stdout) for _ in range(15))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="append a line for each figure to this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where torch's tensors lie")
    options = parser.parse_args()
    lines = []
    print(f"{'us':>9} {'over':>7}")
    rows = list(of_numpy())
    try:
        rows += list(of_torch(options.device))
    except ImportError:
        print("no torch here")
    for name, us, bare in rows:
        over = "" if bare is None else f"{us - bare:7.2f}"
        print(f"{us:9.2f} {over:>7}  {name}")
        lines.append({"case": name, "us": round(us, 3)} | ({} if bare is None else {"over": round(us - bare, 3)}))
    milliseconds = imports()
    print(f"import over NumPy's: {milliseconds:.1f} ms")
    lines.append({"case": "import", "ms": round(milliseconds, 2)})
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
