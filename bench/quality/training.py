# SPDX-License-Identifier: MIT
"""S3: small transformers that learn code from the start, each with one pattern in all of its layers, from the same
seeds and batches. Does what a frozen model loses come back when the model may learn where to look?

The transformer and its optimizer are those of ../train.py. Block top-k is not here: its lists would have to be learned
with the model's own scores, which its authors do with kernels of their own.
"""

import collections
import concurrent.futures
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
from reading import listed
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import train  # noqa: E402

PATTERNS = ["dense", "sink_window", "xref", "xref_ngrams"]
SINKS, WINDOW = 32, 64
AHEAD = 8  # batches that are made ahead, each by a thread
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
    tokenizer = train_tokenizer(learned[:: 1 if options.small else 8], sizes["vocabulary"])
    stream = Stream(tokenizer, learned)
    files = [Stream(tokenizer, [text]) for text in held_out]
    rows = sizes["seq"] + 1
    files = [(file.ids[:rows], file.symbols[:rows]) for file in files if len(file.ids) >= rows]
    progress(f"{len(stream.ids):,} tokens to learn, {len(files)} files held out", last=True)
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
    """A byte-level BPE of texts that are learned."""
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
        # Each process numbers the identifiers of its part from 0: those of two parts are told apart. Forked processes
        # need not import torch, which they do not use.
        with multiprocessing.get_context("fork").Pool() as pool:
            found = pool.map(functools.partial(sa.symbols_of, tokenizer), parts, chunksize=1)
        for number, symbols in enumerate(found):
            symbols[symbols >= 0] += number * SYMBOLS_AT_ONCE
        self.symbols = np.concatenate(found)


# ---- one run ----


class Batch:
    """Rows of a stream, and what their queries see: a pattern, or lists of keys that are made from the rows' tokens."""

    def __init__(self, name, options, rows):
        """rows: (ids [tokens + 1], symbols [tokens + 1, 2]) of each"""
        tokens, budget = len(rows[0][0]) - 1, options.budget
        self.ids, self.lists = torch.from_numpy(np.stack([ids for ids, _ in rows])), None
        if name in ("dense", "sink_window"):
            near = sa.sink(SINKS) | sa.window(budget - SINKS - 1, 0)
            self.pattern = sa.causal() if name == "dense" else sa.causal() & near
            return
        options = {"sinks": SINKS, "window": WINDOW, "budget": budget}
        patterns = [sa.xref(ids[:-1], symbols[:-1] if name == "xref" else None, **options) for ids, symbols in rows]
        self.lists = torch.from_numpy(np.stack([listed(pattern, tokens, budget) for pattern in patterns]))
        self.pattern = sa.runtime_tokens(budget)


class Attend:
    """The attention of all layers, which sees as the batch says that is set before it is read."""

    def __init__(self, heads):
        self.heads, self.pattern, self.lists = heads, None, None

    def see(self, batch, device):
        self.pattern, self.lists = batch.pattern, None
        if batch.lists is not None:  # a layer's heads have the same
            self.lists = batch.lists.to(device)[:, :, None].expand(-1, -1, self.heads, -1).contiguous()

    def __call__(self, q, k, v):
        return sat.attention(q, k, v, self.pattern, indices=self.lists)


def batches_of(name, options, stream, starts):
    """A Batch for each row of starts, made by threads some steps ahead of the one that is learned."""
    with concurrent.futures.ThreadPoolExecutor(AHEAD) as pool:

        def make(row):
            places = [slice(start, start + options.seq + 1) for start in row]
            return Batch(name, options, [(stream.ids[place], stream.symbols[place]) for place in places])

        coming = collections.deque()
        for row in starts:
            coming.append(pool.submit(make, row))
            if len(coming) > AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def losses_of(model, attend, batch, device):
    """float32 [rows, tokens]: the loss of each next token of a batch."""
    attend.see(batch, device)
    ids = batch.ids.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        scores = model(ids[:, :-1])
    losses = functional.cross_entropy(scores.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)


def learn(name, seed, options, stream, held_out, progress):
    """The result line of one pattern and seed."""
    if len(stream.ids) <= options.seq + 1:
        raise SystemExit(f"{len(stream.ids)} tokens to learn; accepted: more than a row of {options.seq}")
    torch.manual_seed(seed)
    attend = Attend(options.heads)
    model = train.Model(options, attend, options.vocabulary).to(options.device)
    optimizer, curve, begin = train.make_optimizer(model, options), [], time.perf_counter()
    starts = np.random.default_rng(seed).integers(
        0, len(stream.ids) - options.seq - 1, (options.steps, options.batch)
    )
    for step, batch in enumerate(batches_of(name, options, stream, starts)):
        loss = losses_of(model, attend, batch, options.device).mean()
        train.descend(model, optimizer, loss, step, options)
        if step % max(1, options.steps // 100) == 0 or step == options.steps - 1:
            curve.append([step, round(loss.item(), 4)])
        progress(f"{name} seed {seed} step {step}: {curve[-1][1]:.3f}")
    seconds = time.perf_counter() - begin
    files = []
    with torch.no_grad():
        for place in range(0, len(held_out), options.batch):
            batch = Batch(name, options, held_out[place : place + options.batch])
            losses = losses_of(model, attend, batch, options.device).mean(dim=1)
            files += [round(loss, 4) for loss in losses.tolist()]
    parameters = sum(weight.numel() for weight in model.parameters())
    return {
        "id": line_id(name, seed, vars(options)),
        "stage": "s3",
        "pattern": name,
        "seed": seed,
        **vars(options),
        "parameters": parameters,
        "curve": curve,
        "held_out": files,
        "nll": float(np.mean(files)),
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "library": sa.version(),
    }
