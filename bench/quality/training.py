# SPDX-License-Identifier: MIT
"""S3: small transformers that learn code from the start, each with one pattern in all of its layers, from the same
seeds and batches. Does what a frozen model loses come back when the model may learn where to look?

The transformer and its optimizer are those of ../train.py. Block top-k is not here: its lists would have to be learned
with the model's own scores, which its authors do with kernels of their own.
"""

import functools
import multiprocessing
import pathlib
import sys
import time
from types import SimpleNamespace

import corpus
import numpy as np
import small
import sparseattn as sa
import sparseattn.torch as sat
import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import train  # noqa: E402

PATTERNS = ["dense", "sink_window", "xref", "xref_ngrams"]
SINKS, WINDOW = 32, 64
SYMBOLS_AT_ONCE = 500_000  # tokens whose identifiers a process reads: some two seconds
# 20 million parameters, of which 6.3 in the vocabulary; on a CPU, and where only the code is tried, a toy.
SIZES = {
    "cuda": {"vocabulary": 8192, "seq": 2048, "batch": 8, "embed": 384, "heads": 6, "layers": 8, "steps": 3000},
    "cpu": {"vocabulary": 2048, "seq": 512, "batch": 2, "embed": 128, "heads": 2, "layers": 2, "steps": 200},
    "small": {"vocabulary": 300, "seq": 256, "batch": 2, "embed": 32, "heads": 2, "layers": 1, "steps": 4},
}


def run(options, results, progress):
    """A line for each pattern and seed that is not there."""
    sizes = dict(SIZES["small" if options.small else options.device])
    sizes |= {
        "steps": options.steps or sizes["steps"],
        "rate": 1e-3,
        "device": options.device,
        "budget": options.budget[0],
    }
    wanted = [
        (seed, name)
        for seed in options.seeds or range(1 if options.small else 3)
        for name in (options.patterns.split(",") if options.patterns else PATTERNS)
        if line_id(name, seed, sizes) not in results.known
    ]
    if not wanted:
        return
    learned, held_out = load_texts(options)
    tokenizer = train_tokenizer(learned, sizes["vocabulary"])
    stream, files = Stream(tokenizer, learned), [Stream(tokenizer, [text]) for text in held_out]
    progress(
        f"{len(stream.ids):,} tokens to learn, {sum(len(file.ids) for file in files):,} held out in {len(files)} files"
    )
    for seed, name in wanted:
        results.add(learn(name, seed, SimpleNamespace(**sizes), stream, files, progress))


def line_id(name, seed, sizes):
    return f"s3/{sizes['device']}/{sizes['steps']}x{sizes['batch']}x{sizes['seq']}/{sizes['budget']}/{seed}/{name}"


# ---- texts ----


def load_texts(options):
    """(texts to learn, texts held out), as manifest.json says."""
    if options.small:
        texts = [document.text for document in small.documents()]
        return texts[:2], texts[2:]
    texts = corpus.training_texts(options.cache)
    return (
        [text for key, text in texts.items() if not key.startswith("0")],
        [text for key, text in texts.items() if key.startswith("0")],
    )


def train_tokenizer(texts, vocabulary):
    """A byte-level BPE of the texts that are learned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Stream:
    """Texts one after the other: their tokens, and the identifiers that xref needs."""

    def __init__(self, tokenizer, texts):
        self.ids = np.concatenate([one.ids for one in tokenizer.encode_batch(texts)]).astype(np.int64)
        parts = np.array_split(self.ids, -(-len(self.ids) // SYMBOLS_AT_ONCE))
        if len(parts) == 1:
            self.symbols = sa.symbols_of(tokenizer, self.ids)
            return
        # Each process numbers the identifiers of its part from 0: those of two parts are told apart.
        with multiprocessing.get_context("spawn").Pool() as pool:
            found = pool.map(functools.partial(sa.symbols_of, tokenizer), parts, chunksize=1)
        for number, symbols in enumerate(found):
            symbols[symbols >= 0] += number * SYMBOLS_AT_ONCE
        self.symbols = np.concatenate(found)


# ---- one run ----


class Attend:
    """The attention of all layers. `pattern` is set before each batch: that of xref is made from the batch's tokens."""

    def __init__(self, name, options):
        self.name, self.options, self.pattern = name, options, None

    def __call__(self, q, k, v):
        return sat.attention(q, k, v, self.pattern)

    def see(self, stream, starts, tokens):
        """The pattern of rows of so many tokens that begin at these places of a stream."""
        budget = self.options.budget
        if self.name in ("dense", "sink_window"):
            near = sa.sink(SINKS) | sa.window(budget - SINKS - 1, 0)
            self.pattern = sa.causal() if self.name == "dense" else sa.causal() & near
            return
        rows = [slice(start, start + tokens) for start in starts]
        symbols = [stream.symbols[row] if self.name == "xref" else None for row in rows]
        self.pattern = sa.per_batch(
            [
                sa.xref(stream.ids[row], found, sinks=SINKS, window=WINDOW, budget=budget)
                for row, found in zip(rows, symbols)
            ]
        )


def losses_of(model, attend, stream, starts, tokens, device):
    """float32 [rows, tokens]: the loss of each next token of rows of a stream."""
    attend.see(stream, starts, tokens)
    rows = torch.from_numpy(np.stack([stream.ids[start : start + tokens + 1] for start in starts])).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        scores = model(rows[:, :-1])
    return functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(
        len(rows), -1
    )


def learn(name, seed, options, stream, files, progress):
    """The result line of one pattern and seed."""
    if len(stream.ids) <= options.seq + 1:
        raise SystemExit(f"{len(stream.ids)} tokens to learn; accepted: more than a row of {options.seq}")
    torch.manual_seed(seed)
    attend = Attend(name, options)
    model = train.Model(options, attend, options.vocabulary).to(options.device)
    optimizer, rng, curve, begin = (
        train.make_optimizer(model, options),
        np.random.default_rng(seed),
        [],
        time.perf_counter(),
    )
    for step in range(options.steps):
        starts = rng.integers(0, len(stream.ids) - options.seq - 1, options.batch)
        loss = losses_of(model, attend, stream, starts, options.seq, options.device).mean()
        train.descend(model, optimizer, loss, step, options)
        if step % max(1, options.steps // 100) == 0 or step == options.steps - 1:
            curve.append([step, round(loss.item(), 4)])
        if step % 50 == 0 or step == options.steps - 1:
            progress(f"{name} seed {seed} step {step}: {curve[-1][1]:.3f}")
    seconds = time.perf_counter() - begin
    held_out = []
    with torch.no_grad():
        for file in files:
            tokens = min(options.seq, len(file.ids) - 1)
            if tokens > 0:
                held_out.append(round(losses_of(model, attend, file, [0], tokens, options.device).mean().item(), 4))
    parameters = sum(weight.numel() for weight in model.parameters())
    return {
        "id": line_id(name, seed, vars(options)),
        "stage": "s3",
        "pattern": name,
        "seed": seed,
        **vars(options),
        "parameters": parameters,
        "curve": curve,
        "held_out": held_out,
        "nll": float(np.mean(held_out)),
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "library": sa.version(),
    }
