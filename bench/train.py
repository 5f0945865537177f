#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A small transformer learns a novel byte by byte: once with the library's attention, once with dense masked attention
of torch, from the same seed and the same batches. The curves must lie on top of each other.

    python3 bench/train.py [--device cuda] [--steps N] [--deterministic] [--json LOSSES] [--plot FILE.svg]

On a GPU matrices and attention are bfloat16 under autocast, else float32. With --deterministic the library's run is
made twice, and every loss and weight of both must be the same bits: the program ends with status 1 where they are not.
It needs torch and the library's Python package, whose demo brings the novel.
"""
import argparse
import json
import math
import os
import sys
import time

# cuBLAS reads it when it starts: without it, products of matrices need not be the same bits twice.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import sparseattn as sa  # noqa: E402
import sparseattn.torch as sat  # noqa: E402
import torch  # noqa: E402
from sparseattn.demo import book  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

BYTES = 256
HELD_OUT = 0.05  # the end of the novel, which is not learned


# ---- the model ----

class Attention(nn.Module):
    def __init__(self, embed, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.project, self.out = nn.Linear(embed, 3 * embed, bias=False), nn.Linear(embed, embed, bias=False)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [batch, seq, heads, head_dim]
        return self.out(self.attend(rotate(q), rotate(k), v).flatten(2))


def rotate(x):
    """Rotary positions (https://arxiv.org/abs/2104.09864) of [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    def __init__(self, embed, heads, attend):
        super().__init__()
        self.attention, self.norm = Attention(embed, heads, attend), nn.LayerNorm(embed)
        wide = 4 * embed
        self.mlp = nn.Sequential(nn.LayerNorm(embed), nn.Linear(embed, wide), nn.GELU(), nn.Linear(wide, embed))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, options, attend, vocabulary=BYTES):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, options.embed)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(options.embed, options.heads, attend) for _ in range(options.layers)))
        self.norm, self.head = nn.LayerNorm(options.embed), nn.Linear(options.embed, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def make_attention(name, options):
    """The function (q, k, v) -> out of [batch, seq, heads, head_dim]."""
    if name == "library":
        pattern = sa.parse(options.pattern)
        return lambda q, k, v: sat.attention(q, k, v, pattern, deterministic=options.deterministic)
    mask = torch.from_numpy(sa.parse(options.pattern).to_mask(options.seq)[0, 0]).to(options.device)

    def dense(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return dense


# ---- one run ----

def make_optimizer(model, options):
    return torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)


def descend(model, optimizer, loss, step, options):
    """One step down the gradient, its rate warmed up and then a falling cosine."""
    for group in optimizer.param_groups:
        group["lr"] = options.rate * min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / options.steps)) / 2
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train(name, options, text):
    """Losses of the steps, of the held-out end, and the weights; the first are written as they come."""
    torch.manual_seed(options.seed)
    model = Model(options, make_attention(name, options)).to(options.device)
    optimizer = make_optimizer(model, options)
    learned = text[: int(len(text) * (1 - HELD_OUT))]
    drawn = torch.Generator().manual_seed(options.seed)
    losses, begin = [], time.perf_counter()
    for step in range(options.steps):
        starts = torch.randint(len(learned) - options.seq, (options.batch,), generator=drawn)
        loss = loss_of(model, learned, starts, options)
        descend(model, optimizer, loss, step, options)
        losses.append(loss.detach())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"{name:16} step {step:5}  loss {loss.item():.4f}  {time.perf_counter() - begin:6.1f} s", flush=True)
    losses = torch.stack(losses).tolist()
    seconds = time.perf_counter() - begin
    rest = text[len(learned):]
    with torch.no_grad():
        starts = torch.arange(0, len(rest) - options.seq, options.seq)[:4 * options.batch]
        held_out = [loss_of(model, rest, some, options).item() for some in starts.split(options.batch)]
    return {
        "run": name,
        "losses": losses,
        "held_out": sum(held_out) / len(held_out),
        "seconds": seconds,
        "tokens_per_second": options.steps * options.batch * options.seq / seconds,
        "weights": [parameter.detach().cpu() for parameter in model.parameters()],
    }


def loss_of(model, text, starts, options):
    rows = torch.stack([text[start : start + options.seq + 1] for start in starts.tolist()]).to(options.device).long()
    with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
        scores = model(rows[:, :-1])
    return functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())


# ---- what is said of the runs ----

def compare(runs, options):
    """One object: how far the curves are apart, and whether equal runs were equal."""
    library, dense = runs["library"], runs["dense"]
    apart = [abs(one - other) for one, other in zip(library["losses"], dense["losses"])]
    said = {
        "parameters": sum(weight.numel() for weight in library["weights"]),
        "first_loss": library["losses"][0],
        "last_loss": library["losses"][-1],
        "held_out": {name: run["held_out"] for name, run in runs.items()},
        "largest_difference": max(apart),
        "mean_difference": sum(apart) / len(apart),
        "tokens_per_second": {name: run["tokens_per_second"] for name, run in runs.items()},
    }
    if options.deterministic:
        again = runs["library again"]
        said["bit_equal"] = library["losses"] == again["losses"] and all(
            torch.equal(one, other) for one, other in zip(library["weights"], again["weights"])
        )
    return said


def write_json(path, runs, said, options):
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    with open(path, "w") as file:
        file.write(json.dumps({"options": vars(options), "device": machine, "torch": torch.__version__}) + "\n")
        for name, run in runs.items():
            for step, loss in enumerate(run["losses"]):
                file.write(json.dumps({"run": name, "step": step, "loss": loss}) + "\n")
        file.write(json.dumps(said) + "\n")


def write_plot(path, runs, options):
    """The curves as an SVG: every run is a line, so that what coincides looks like one."""
    width, height, edge = 640, 400, 50
    top = max(max(run["losses"]) for run in runs.values())
    bottom = min(min(run["losses"]) for run in runs.values())

    def at(step, loss):
        x = edge + (width - 2 * edge) * step / max(1, options.steps - 1)
        return f"{x:.1f},{height - edge - (height - 2 * edge) * (loss - bottom) / max(1e-9, top - bottom):.1f}"

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             'font-size="13">', f'<rect width="{width}" height="{height}" fill="white"/>']
    styles = [("#1f77b4", 4, ""), ("#ff7f0e", 1.5, ""), ("black", 1, "2 4")]
    for number, ((name, run), (colour, thick, dash)) in enumerate(zip(runs.items(), styles)):
        points = " ".join(at(step, loss) for step, loss in enumerate(run["losses"]))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thick}" '
                     f'stroke-dasharray="{dash}"/>')
        lines.append(f'<text x="{width - 220}" y="{edge + 18 * number}" fill="{colour}">{name}: held out '
                     f'{run["held_out"]:.3f}</text>')
    for loss in (bottom, top):
        y = at(0, loss).split(",")[1]
        lines.append(f'<text x="6" y="{y}">{loss:.2f}</text>')
    lines += [f'<text x="{edge}" y="{height - 16}">loss (nats a byte) of {options.steps} steps; {options.pattern}; '
              f"{options.seq} bytes, {options.device}</text>", "</svg>"]
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")


def read_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--deterministic", action="store_true", help="train twice, and ask for the same bits")
    parser.add_argument("--pattern", default="causal & (sink(4) | window(255,0))")
    parser.add_argument("--steps", type=int, help="default: 400 on a GPU, 60 on a CPU")
    parser.add_argument("--seq", type=int, help="bytes of a row; default 2048, 512")
    parser.add_argument("--batch", type=int, help="rows of a step; default 8, 2")
    parser.add_argument("--embed", type=int, help="default 256, 128; a multiple of heads")
    parser.add_argument("--heads", type=int, help="default 4, 2")
    parser.add_argument("--layers", type=int, help="default 6, 2")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write a line for each loss, and one that compares the runs, to this file")
    parser.add_argument("--plot", help="write the curves to this SVG")
    options = parser.parse_args(arguments)
    usual = {"steps": (400, 60), "seq": (2048, 512), "batch": (8, 2), "embed": (256, 128), "heads": (4, 2)}
    for name, (gpu, cpu) in {**usual, "layers": (6, 2)}.items():
        if getattr(options, name) is None:
            setattr(options, name, gpu if options.device == "cuda" else cpu)
    return options


def main(arguments=None):
    options = read_options(arguments)
    if options.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)  # dense attention on a GPU has none with a mask
    text = torch.frombuffer(bytearray(book.text().encode()), dtype=torch.uint8)
    names = ["library", "dense"] + ["library again"] * options.deterministic
    runs = {name: train(name.split()[0], options, text) for name in names}
    said = compare(runs, options)
    print(json.dumps(said, indent=1))
    if options.json:
        write_json(options.json, runs, said, options)
    if options.plot:
        write_plot(options.plot, runs, options)
    return 0 if said.get("bit_equal", True) else 1


if __name__ == "__main__":
    sys.exit(main())
