#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a training step pays for attention: `sparseattn.torch.attention`, forward and backward through autograd, beside
compiled FlexAttention and, where its wheel is on PYTHONPATH, FA4 on the same pattern, and torch's dense SDPA (causal),
on the same tensors, from 4K to 128K tokens.

    python3 bench/gpu/torch_op.py [--tokens 4096,...] [--out bench/results]

bfloat16, head_dim 128, 16 heads, batch 1. Times are medians of what the stream takes for a step, back to back for
0.4 s; the first step, in which plans are made and programs compiled, stands apart as `first_ms`. A JSON line for each
pattern, length and peer goes to <out>/<gpu>_torch.jsonl. It needs the Python package with a library for GPUs.
"""
import json
import math
import time

import cases
import fa4
import measure
import report
import torch
import torch_peers
from options import make_parser
from torch.nn.functional import scaled_dot_product_attention

import sparseattn.torch as sat

HEADS, HEAD_DIM = 16, 128
TOKENS = [4096 << i for i in range(6)]
PATTERNS = {"streaming": (cases.STREAMING, cases.streaming), "window1k": (cases.WINDOW, cases.window1k)}


def peers(name, text, kept, tokens):
    """Name and a function of (q, k, v), [batch, seq, heads, head_dim], for each that computes attention."""
    yield "ours", lambda q, k, v: sat.attention(q, k, v, text)
    flex = torch_peers.make_flex(kept, tokens, tokens)
    yield "flex", lambda q, k, v: flex(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    if fa4.is_here():
        yield "fa4", fa4.make_attention(name, tokens)
    yield "sdpa", lambda q, k, v: scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def run(options):
    common = report.origin(options.toolkit)
    with report.results_file(options.out, "_torch").open("w") as stream:
        for tokens in options.tokens:
            torch.manual_seed(1)
            shape = 1, tokens, HEADS, HEAD_DIM
            *inputs, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
            for x in inputs:
                x.requires_grad_()
            for name, (text, kept) in PATTERNS.items():
                expected, lines = None, []
                for peer, attention in peers(name, text, kept, tokens):
                    def step(attention=attention):
                        return torch.autograd.grad(attention(*inputs), inputs, dout)
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    try:
                        gradients = step()
                        torch.cuda.synchronize()
                    except Exception as e:  # a peer that cannot is said, and is no line
                        if peer == "ours":
                            raise
                        print(f"{name} {tokens} {peer}: {(str(e).splitlines() or [repr(e)])[0][:160]}", flush=True)
                        continue
                    first = time.perf_counter() - begin
                    expected = expected or gradients
                    apart = [(a.float() - b.float()).abs().max() for a, b in zip(gradients, expected)]
                    worst = torch.stack(apart).max().item()  # NaN if any is, which max() of numbers may lose
                    if not math.isfinite(worst):
                        raise ValueError(f"{name} {tokens} {peer}: gradients differ by {worst}")
                    line = {"pattern": name, "tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "peer": peer,
                            "us": round(measure.sustained_us(step), 1), "first_ms": round(first * 1e3, 1),
                            # between gradients and ours: those of dense attention are another function's
                            "difference": None if peer == "sdpa" else round(worst, 5)}
                    print(json.dumps(line), flush=True)
                    lines.append({**line, **common})
                stream.writelines(json.dumps(line) + "\n" for line in lines)
                stream.flush()
                torch.compiler.reset()  # each length is a new shape: past eight, torch would stop compiling
            torch.cuda.empty_cache()


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=TOKENS)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
