#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a training step pays for attention: `sparseattn.torch.attention`, forward and backward through autograd, beside
compiled FlexAttention and, where its wheel is on PYTHONPATH, FA4 on the same pattern, and torch's dense SDPA (causal),
on the same tensors, from 4K to 128K tokens.

    python3 bench/gpu/torch_op.py [--tokens 4096,...] [--out bench/results]
    python3 bench/gpu/torch_op.py --plot bench/results/h200_torch.svg --lines bench/results/h200_torch.jsonl

bfloat16, head_dim 128, 16 heads, batch 1. Times are medians of what the stream takes for a step, back to back for
0.4 s; the first step, in which plans are made and programs compiled, stands apart as `first_ms`. A JSON line for each
pattern, length and peer goes to <out>/<gpu>_torch.jsonl. It needs the Python package with a library for GPUs.
"""
import argparse
import json
import math
import pathlib
import time

HEADS, HEAD_DIM = 16, 128
TOKENS = [4096 << i for i in range(6)]
PATTERNS = ("streaming", "window1k")  # those of cases.py
NAMES = {"ours": "sparseattn.torch", "flex": "FlexAttention", "fa4": "FA4", "sdpa": "dense SDPA, causal"}


def peers(name, text, kept, tokens):
    """Name and a function of (q, k, v), [batch, seq, heads, head_dim], for each that computes attention."""
    import fa4
    import sparseattn.torch as sat
    import torch_peers
    from torch.nn.functional import scaled_dot_product_attention

    yield "ours", lambda q, k, v: sat.attention(q, k, v, text)
    flex = torch_peers.make_flex(kept, tokens, tokens)
    yield "flex", lambda q, k, v: flex(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    if fa4.is_here():
        yield "fa4", fa4.make_attention(name, tokens)
    yield "sdpa", lambda q, k, v: scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def run(options):
    import cases
    import measure
    import report
    import torch

    common = report.origin(options.toolkit)
    patterns = {"streaming": (cases.STREAMING, cases.streaming),
                "window1k": (cases.WINDOW, cases.window1k)}
    with report.results_file(options.out, "_torch").open("w") as stream:
        for tokens in options.tokens:
            torch.manual_seed(1)
            shape = 1, tokens, HEADS, HEAD_DIM
            *inputs, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
            for x in inputs:
                x.requires_grad_()
            for name in PATTERNS:
                text, kept = patterns[name]
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


def plot(options):
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in options.lines.read_text().splitlines()]
    figure, axes = pyplot.subplots(1, len(PATTERNS), figsize=(10, 4), sharey=True)
    for axis, name in zip(axes, PATTERNS):
        for peer, label in NAMES.items():
            points = [(x["tokens"], x["us"] / 1e3) for x in lines if (x["pattern"], x["peer"]) == (name, peer)]
            if not points:
                continue
            axis.plot(*zip(*points), marker="o", label=label)
        axis.set(xscale="log", yscale="log", title=name, xlabel="tokens")
        axis.set_xticks(TOKENS, [f"{n >> 10}K" for n in TOKENS])
        axis.minorticks_off()
    axes[0].set_ylabel("forward and backward, ms")
    axes[0].legend()
    figure.suptitle(f"{lines[0]['gpu']}, bfloat16, {HEADS} heads of {HEAD_DIM}")
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "sparseattn"  # the same file for the same lines
    figure.savefig(options.plot, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=TOKENS)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--toolkit", default="13.0", help="the nvcc that built the library")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help="only draws --lines")
    parser.add_argument("--lines", type=pathlib.Path, metavar="FILE.jsonl")
    options = parser.parse_args()
    if bool(options.plot) != bool(options.lines):
        parser.error("--plot and --lines go together")
    plot(options) if options.plot else run(options)


if __name__ == "__main__":
    main()
