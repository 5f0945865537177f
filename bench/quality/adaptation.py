# SPDX-License-Identifier: MIT
"""The stage "adapt": the model of S1 goes on learning for some steps, with one pattern in all of its layers. How much
of what a pattern costs a frozen model is only that the model never met it?

Dense attention adapts, too, on the same rows: what is left of a pattern's loss is its distance from that. All weights
are learned, in float32; attention is computed as in S3, and each row has a pattern of its own.
"""

import time
from types import SimpleNamespace

import numpy as np
import reading
import sparseattn as sa
import torch
import training
from torch.nn import functional
from training import train

PATTERNS = ["dense", "xref", "block_topk_16_mean", "sink_window"]
SIZES = {
    "cuda": {"seq": 2048, "batch": 4, "steps": 200},
    "cpu": {"seq": 512, "batch": 1, "steps": 10},
    "small": {"seq": 256, "batch": 2, "steps": 3},
}
RATE = 1e-4
EVERY = 4  # of the texts that S3 learns: more than enough rows
MOST_FILES = 64  # held out


def run(options, original, tokenizer, results, progress):
    """A line for each pattern and seed that is not there. original: a sparseattn.demo.model.Model"""
    sizes = dict(SIZES["small" if options.small else options.device])
    sizes |= {"steps": options.steps or sizes["steps"], "rate": RATE, "device": options.device}
    sizes |= {"budget": options.budget[0]}
    wanted = training.runs_wanted(options, PATTERNS, lambda name, seed: line_id(name, seed, sizes) not in results.known)
    if not wanted:
        return
    texts = {"vocabulary": len(original.embedding), "seq": sizes["seq"], "every": 1 if options.small else EVERY}
    stream, files = training.prepare(options, texts, tokenizer)
    files = files[:MOST_FILES]
    progress(f"{len(stream.ids):,} tokens to learn, {len(files)} files held out", last=True)
    for seed, name in wanted:
        results.add(adapt(name, seed, SimpleNamespace(**sizes), original, stream, files, progress))


def line_id(name, seed, sizes):
    return training.line_id(name, seed, sizes).replace("s3/", "adapt/", 1)


class Adapted(reading.Model):
    """A reading.Model whose weights learn, and whose queries see as `attend.batch` says, a row at a time."""

    def __init__(self, original, device):
        # Half precision with the range of float32: gradients need no factor.
        super().__init__(original, device, operands=torch.bfloat16 if device == "cuda" else torch.float32)
        self.attend = training.Attend()
        for weight in self.parameters():
            weight.requires_grad_()

    def parameters(self):
        """All weights, as torch.nn.Module has them."""
        return [self.embedding, self.norm, *(weight for layer in self.layers for weight in layer.values())]

    def losses(self, batch):
        """float32 [tokens]: the loss of each next token of a batch of one row."""
        self.attend.batch, (ids,) = batch, batch.ids
        hidden = self.hidden(ids[:-1].numpy(), lambda q, k, v: self.attend(q[None], k[None], v[None])[0])
        return functional.cross_entropy(hidden @ self.embedding.T, ids[1:].to(self.device), reduction="none")


def adapt(name, seed, options, original, stream, files, progress):
    """The result line of one pattern and seed."""
    model = Adapted(original, options.device)
    shape = model.shape
    operands = training.Operands(shape.heads_q, shape.heads_kv, shape.head_dim, model.operands, options.device)
    drawn = ([row] for rows in training.drawn_rows(options, seed, stream) for row in rows)
    batches = training.made_ahead(name, options.budget, drawn, operands, learns=True)
    before = read(model, name, options, operands, files)
    optimizer, curve, begin = train.make_optimizer(model, options), [], time.perf_counter()
    for step in range(options.steps):
        loss = torch.stack([model.losses(next(batches)).mean() for _ in range(options.batch)]).mean()
        train.descend(model, optimizer, loss, step, options)
        if step % max(1, options.steps // 100) == 0 or step == options.steps - 1:
            curve.append([step, round(loss.item(), 4)])
        progress(f"{name} seed {seed} step {step}: {curve[-1][1]:.3f}")
    seconds = time.perf_counter() - begin
    after = read(model, name, options, operands, files)
    return {
        "id": line_id(name, seed, vars(options)),
        "stage": "adapt",
        "pattern": name,
        "seed": seed,
        **vars(options),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "curve": curve,
        "held_out_before": before,
        "nll_before": float(np.mean(before)),
        "held_out": after,
        "nll": float(np.mean(after)),
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "library": sa.version(),
    }


@torch.no_grad()
def read(model, name, options, operands, files):
    """The mean loss of each held-out file, in nats a token."""
    batches = training.made_ahead(name, options.budget, [[file] for file in files], operands, learns=False)
    return [round(model.losses(batch).mean().item(), 4) for batch in batches]
