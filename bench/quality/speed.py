# SPDX-License-Identifier: MIT
"""The stage "speed": what the attention of one layer takes with a pattern, forward and backward, beside dense
attention, by length. Texts are the code that S3 learns; q, k and v are random, with the heads of the study's model.

What is done once a text for all layers (the pattern and its plan) and what a layer does before it attends (block top-k
chooses, in torch) have times of their own. Each time is the least of some calls, which other programs disturb least.
"""

import platform
import time

import numpy as np
import sparseattn as sa
import sparseattn.torch as sat
import torch
import training
from torch.nn import functional

PATTERNS = ["dense", "sdpa", "sink_window", "xref", "block_topk_16_mean"]  # sdpa is torch's own dense attention
AT_ONCE = {"cpu": 0, "cuda": 32768}  # tokens of a call: so many texts, one at least, keep a GPU busy at all lengths
HEADS_Q, HEADS_KV, HEAD_DIM = 9, 3, 64
SECONDS, FEWEST = 0.3, 2  # of calls


def run(options, results, progress):
    """A line for each length and pattern that is not there."""
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    stream = None
    for tokens in options.tokens:
        for name in options.patterns.split(",") if options.patterns else PATTERNS:
            facts = {"id": f"speed/{machine}/{tokens}/{options.budget[0]}/{name}", "stage": "speed", "machine": machine}
            if facts["id"] in results.known:
                continue
            if stream is None:
                stream, _ = training.prepare(options, training.SIZES["small" if options.small else "cuda"])
            count = max(1, AT_ONCE[options.device] // tokens)
            rows = rows_of(stream, count, tokens)
            facts |= {"device": options.device, "pattern": name, "tokens": tokens, "batch": count}
            facts |= {"budget": options.budget[0], "threads": torch.get_num_threads(), "torch": torch.__version__}
            results.add(facts | measure(name, options.budget[0], rows, device) | {"library": sa.version()})
            progress(f"{tokens} tokens, {name}")


def cpu_name():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def rows_of(stream, count, tokens):
    """Texts one after the other, as a training.Batch takes them."""
    if len(stream.ids) < count * tokens + 1:
        raise SystemExit(f"{len(stream.ids)} tokens of code; accepted: more than {count * tokens}")
    places = [slice(begin, begin + tokens + 1) for begin in range(0, count * tokens, tokens)]
    return [(stream.ids[place], stream.symbols[place]) for place in places]


def measure(name, budget, rows, device):
    """Times of one pattern, in microseconds, as a line has them."""
    torch.manual_seed(0)
    shape, dtype = (len(rows), len(rows[0][0]) - 1), torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q
    q, k, v, dout = (torch.randn(*shape, some, HEAD_DIM, dtype=dtype, device=device) for some in heads)
    found = {"heads_q": HEADS_Q, "heads_kv": HEADS_KV, "head_dim": HEAD_DIM, "dtype": str(dtype).removeprefix("torch.")}
    if name == "sdpa":
        return found | of_torch(q, k, v, dout)
    begin, lists = time.perf_counter(), None
    batch = training.Batch(name, budget, rows)
    if batch.choose is not None:  # each query head has lists of its own, and they belong to key heads
        k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, dim=2) for x in (k, v))
        lists = batch.choose(q, k)
        found["choose_us"] = least_us(lambda: batch.choose(q, k), device)
        begin = time.perf_counter()
    plan = sat.plan(batch.pattern, q, k, v, backward=True)
    found["plan_us"] = round((time.perf_counter() - begin) * 1e6, 1)
    out, lse = plan.forward(q, k, v, return_lse=True, indices=lists)
    return found | {
        "kernels": [plan.kernel(), plan.kernel(backward=True)],
        "forward_us": least_us(lambda: plan.forward(q, k, v, return_lse=True, indices=lists), device),
        "backward_us": least_us(lambda: plan.backward(q, k, v, out, lse, dout, indices=lists), device),
    }


def of_torch(q, k, v, dout):
    """Those of torch's dense attention, which gets as many key heads as query heads before its time begins."""
    k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, dim=2) for x in (k, v))
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]

    def attend():
        return functional.scaled_dot_product_attention(*inputs, is_causal=True)

    out, dout = attend(), dout.transpose(1, 2)
    return {
        "forward_us": least_us(attend, q.device),
        "backward_us": least_us(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), q.device),
    }


def least_us(call, device):
    """The least time of a call in microseconds, of some SECONDS of them. A GPU is timed by its stream, two calls at a
    time, so that what the host does between them is hidden."""
    times, begin = [], time.perf_counter()
    while len(times) < FEWEST or time.perf_counter() - begin < SECONDS:
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / 2)
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    return round(float(np.min(times)), 1)
