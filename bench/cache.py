#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Calls on a cache on the CPU, as in decoding, beside torch: one query or a few a sequence, keys in pages of 128.

    python3 bench/cache.py [--threads N] [--case GLOB] [--json FILE]          # with a python that has the package and torch

head_dim 128. `us` is the median of calls over half a second; `sdpa_us`, where sequences have one query, that of torch's
scaled_dot_product_attention (enable_gqa) on the same keys in one piece, all of which its queries see; `ratio`, the second
over the first. `gigabytes_a_second` is what the keys and values that some query sees come to, each read once. `max_err` is the
largest distance from attention of the same rows in float32 by sparseattn.torch.attention.
"""
import argparse
import datetime
import fnmatch
import json
import os
import time
import typing

import sparseattn as sa
import sparseattn.torch as sat
import torch
from peers import source_hash

PAGE_SIZE, HEAD_DIM = 128, 128


class Case(typing.NamedTuple):
    name: str
    batch: int
    heads: int
    heads_kv: int
    length: int
    queries: int = 1
    pattern: str = "causal"


STREAMING = "causal & (sink(4) | window(1023,0))"
CASES = [
    Case("decode_256", 1, 32, 8, 256),
    Case("decode_4k", 1, 32, 8, 4096),
    Case("decode_4k_batch8", 8, 32, 8, 4096),
    Case("decode_8k_group8", 1, 64, 8, 8192),
    Case("decode_8k_group16", 1, 32, 2, 8192),
    Case("decode_4k_mha", 1, 32, 32, 4096),
    Case("decode_streaming_8k", 1, 64, 8, 8192, 1, STREAMING),
    Case("draft4_4k", 1, 32, 8, 4096, 4),
]


def median_us(call, seconds=0.5):
    call()
    times, begin = [], time.monotonic()
    while len(times) < 5 or time.monotonic() - begin < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def run_case(case, dtype, context):
    torch.manual_seed(1)
    q = torch.randn(case.batch, case.queries, case.heads, HEAD_DIM).to(dtype)
    k, v = (torch.randn(case.batch, case.length, case.heads_kv, HEAD_DIM).to(dtype) for _ in "kv")
    cache = sat.KVCache(case.batch, case.length, case.heads_kv, HEAD_DIM, dtype=dtype, page_size=PAGE_SIZE,
                        pages=case.batch * -(-case.length // PAGE_SIZE))
    for begin in range(0, case.length, PAGE_SIZE):  # entries take pages in turns
        cache.append(*(x[:, begin:begin + PAGE_SIZE] for x in (k, v)))
    starts = cache.lengths - case.queries
    plan = sat.plan(case.pattern, q, cache.k, cache.v, starts=True, page_table=cache.page_table, context=context)
    operands = {"starts": starts, "page_table": cache.page_table, "out": torch.empty_like(q)}
    out = plan.forward(q, cache.k, cache.v, **operands)
    offset = case.length - case.queries
    truth = sat.attention(q.float(), k.float(), v.float(), case.pattern, q_offset=offset)
    seen = min(case.length, sa.parse(case.pattern).stats(case.length).row_max + case.queries - 1)
    bytes_of_key = 2 * HEAD_DIM * k.element_size()  # and its value
    us = median_us(lambda: plan.forward(q, cache.k, cache.v, **operands))
    line = {"case": case.name, "dtype": str(dtype)[6:], "kernel": plan.kernel(), "us": round(us, 1),
            "shape": [case.batch, case.queries, case.heads, case.heads_kv, case.length, HEAD_DIM],
            "pattern": case.pattern, "page_size": PAGE_SIZE, "max_err": (out.float() - truth).abs().max().item(),
            "gigabytes_a_second": round(case.batch * case.heads_kv * seen * bytes_of_key / us * 1e-3, 1)}
    if case.queries == 1:
        heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        sdpa = median_us(lambda: attend(*heads_first, enable_gqa=case.heads != case.heads_kv))
        line |= {"sdpa_us": round(sdpa, 1), "ratio": sdpa / us}
    return line


def cpu_name():
    with open("/proc/cpuinfo") as info:
        return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case", default="*")
    parser.add_argument("--json", help="appends a line a result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    common = {"threads": options.threads, "cpu": cpu_name(), "torch": torch.__version__, "source": source_hash()}
    context = sa.Context("cpu", threads=options.threads)
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            if not fnmatch.fnmatch(case.name, options.case):
                continue
            line = run_case(case, dtype, context)
            date = datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")
            print(f"{line['case']:22} {line['dtype']:9} {line['us']:9} us {line['gigabytes_a_second']:6} GB/s  "
                  f"sdpa {line.get('sdpa_us', ''):>9}  err {line['max_err']:.1e}  {line['kernel']}", flush=True)
            if options.json:
                with open(options.json, "a") as stream:
                    stream.write(json.dumps({**line, **common, "load": os.getloadavg()[0], "date": date}) + "\n")


if __name__ == "__main__":
    main()
