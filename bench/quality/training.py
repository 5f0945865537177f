# SPDX-License-Identifier: MIT
"""S3: small transformers that learn code from the start, each with one pattern in all of its layers, from the same
seeds and batches. Does what a frozen model loses come back when the model may learn where to look?

The transformer and its optimizer are those of ../train.py. A pattern that a text decides is made of each row's tokens,
with its plan, by threads that are some batches ahead. Block top-k chooses by each layer's q and k, as MoBA does in
training (https://arxiv.org/abs/2502.13189): no gradient comes through the choice.
"""

import collections
import concurrent.futures
import functools
import multiprocessing
import os
import pathlib
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import corpus
import numpy as np
import patterns
import small
import sparseattn as sa
import sparseattn.torch as sat
import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import train  # noqa: E402

PATTERNS = ["dense", "sink_window", "xref", "block_topk_16_mean"]  # the last is what tuning chose
AHEAD = 16  # batches that are made ahead
SYMBOLS_AT_ONCE = 500_000  # tokens whose identifiers a process reads: some two seconds
# 20 million parameters, of which 6.3 in the vocabulary; on a CPU, and where only the code is tried, a toy.
SIZES = {
    "cuda": {"vocabulary": 8192, "seq": 2048, "batch": 8, "embed": 384, "heads": 6, "layers": 8, "steps": 3000},
    "cpu": {"vocabulary": 2048, "seq": 512, "batch": 2, "embed": 128, "heads": 2, "layers": 2, "steps": 200},
    "small": {"vocabulary": 300, "seq": 256, "batch": 2, "embed": 32, "heads": 2, "layers": 1, "steps": 4},
}


def runs_wanted(options, patterns, is_missing):
    """(seed, pattern) of each training that is missing, of those that the options name, else of three seeds."""
    return [
        (seed, name)
        for seed in options.seeds or range(1 if options.small else 3)
        for name in (options.patterns.split(",") if options.patterns else patterns)
        if is_missing(name, seed)
    ]


def run(options, results, progress):
    """A line for each pattern and seed that is not there."""
    sizes = dict(SIZES["small" if options.small else options.device])
    sizes |= {
        "steps": options.steps or sizes["steps"],
        "rate": 1e-3,
        "device": options.device,
        "budget": options.budget[0],
    }
    wanted = runs_wanted(options, PATTERNS, lambda name, seed: line_id(name, seed, sizes) not in results.known)
    if not wanted:
        return
    stream, files = prepare(options, sizes)
    progress(f"{len(stream.ids):,} tokens to learn, {len(files)} files held out", last=True)
    for seed, name in wanted:
        results.add(learn(name, seed, SimpleNamespace(**sizes), stream, files, progress))


def line_id(name, seed, sizes):
    return f"s3/{sizes['device']}/{sizes['steps']}x{sizes['batch']}x{sizes['seq']}/{sizes['budget']}/{seed}/{name}"


# ---- texts ----


def prepare(options, sizes, tokenizer=None):
    """(the stream to learn, the beginning of each held-out file), kept in the cache: they take minutes of a core.

    sizes      "vocabulary" and "seq"; "every": the stream has one text in so many
    tokenizer  None: a byte-level BPE of the texts is trained, of `vocabulary` tokens

    A beginning is (ids [seq + 1], symbols [seq + 1, 2]). Shorter files are left out.
    """
    if options.small:
        return tokenize(*load_texts(options), sizes, tokenizer)
    texts = corpus.read_manifest()["training"]["sha256"]
    path = options.cache / f"training_{texts[:12]}_{sizes['vocabulary']}_{sizes['seq']}.npz"
    if not path.is_file():
        stream, files = tokenize(*load_texts(options), sizes, tokenizer)
        part = path.with_suffix(f".{os.getpid()}.npz")
        kept = {"ids": stream.ids, "symbols": stream.symbols}
        kept |= {f"held_out_{name}": np.stack(of) for name, of in zip(kept, zip(*files))}
        np.savez_compressed(part, **{name: array.astype(np.int32) for name, array in kept.items()})
        part.rename(path)
    with np.load(path) as kept:
        stream = SimpleNamespace(ids=kept["ids"].astype(np.int64), symbols=kept["symbols"])
        return stream, list(zip(kept["held_out_ids"].astype(np.int64), kept["held_out_symbols"]))


def tokenize(learned, held_out, sizes, tokenizer=None):
    """What prepare returns."""
    if tokenizer is None:
        tokenizer = train_tokenizer(learned[:: 8 if len(learned) > 8 else 1], sizes["vocabulary"])
    rows = sizes["seq"] + 1
    encoded = [np.array(tokenizer.encode(text).ids[:rows], np.int64) for text in held_out]
    files = [(ids, sa.symbols_of(tokenizer, ids)) for ids in encoded if len(ids) == rows]
    return Stream(tokenizer, learned[:: sizes.get("every", 1)]), files


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
        self.ids = np.concatenate([tokenizer.encode(text).ids for text in texts]).astype(np.int64)
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


@dataclass
class Operands:
    """What q, k and v of a layer are."""

    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    device: str


class Batch:
    """Rows of a stream, and what their queries see.

    ids      int64 [rows, tokens + 1]
    pattern  what all layers and heads see
    choose   None, or what lists keys of a layer's q and k for it, as choices.BlockTopK does
    """

    def __init__(self, name, budget, rows):
        """rows: (ids [tokens + 1], symbols [tokens + 1, 2]) of each"""
        self.ids, self.choose, self._plan = torch.from_numpy(np.stack([ids for ids, _ in rows])), None, None
        if name == "dense":
            self.pattern = sa.causal()
            return
        texts = [patterns.Text(None, ids[:-1], symbols[:-1]) for ids, symbols in rows]
        made, chooses = zip(*(patterns.make(name, text, budget) for text in texts))
        self.pattern = made[0] if len(set(made)) == 1 else sa.per_batch(made)
        self.choose = chooses[0]

    def plan(self, operands, learns):
        """Makes the plan that attention() will find. A stream of its own lets its lists be copied beside other work."""
        if self.choose is not None:  # one plan serves all batches
            return
        rows, tokens = self.ids.shape[0], self.ids.shape[1] - 1
        one = torch.empty((), dtype=operands.dtype, device=operands.device)
        q, k = (one.expand(rows, tokens, heads, operands.head_dim) for heads in (operands.heads_q, operands.heads_kv))
        with torch.cuda.stream(torch.cuda.Stream() if one.is_cuda else None):
            self._plan = sat.plan(self.pattern, q, k, k, backward=learns)


class Attend:
    """The attention of all layers, which sees as the batch says that is set before it is read."""

    batch = None

    def __call__(self, q, k, v):
        lists, choose = None, self.batch.choose
        if choose is not None:
            if q.shape[2] > k.shape[2]:  # each query head has lists of its own, and they belong to key heads
                k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                lists = choose(q, k)
        return sat.attention(q, k, v, self.batch.pattern, indices=lists)


def made_ahead(name, budget, batches, operands, learns):
    """A Batch for each list of rows in `batches`, with its plan, made by threads while those before it are computed."""
    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() // 2)) as pool:

        def make(rows):
            batch = Batch(name, budget, rows)
            batch.plan(operands, learns)
            return batch

        coming = collections.deque()
        for rows in batches:
            coming.append(pool.submit(make, rows))
            if len(coming) > AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def drawn_rows(options, seed, stream):
    """The rows of each step, which the seed decides."""
    most = len(stream.ids) - options.seq - 1
    for starts in np.random.default_rng(seed).integers(0, most, (options.steps, options.batch)):
        places = [slice(start, start + options.seq + 1) for start in starts]
        yield [(stream.ids[place], stream.symbols[place]) for place in places]


def losses_of(model, attend, batch, device):
    """float32 [rows, tokens]: the loss of each next token of a batch."""
    attend.batch, ids = batch, batch.ids.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        scores = model(ids[:, :-1])
    losses = functional.cross_entropy(scores.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)


def learn(name, seed, options, stream, held_out, progress):
    """The result line of one pattern and seed."""
    if len(stream.ids) <= options.seq + 1:
        raise SystemExit(f"{len(stream.ids)} tokens to learn; accepted: more than a row of {options.seq}")
    torch.manual_seed(seed)
    attend = Attend()
    model = train.Model(options, attend, options.vocabulary).to(options.device)
    optimizer, curve, begin = train.make_optimizer(model, options), [], time.perf_counter()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32  # as autocast gives them to attention
    operands = Operands(options.heads, options.heads, options.embed // options.heads, dtype, options.device)
    drawn = drawn_rows(options, seed, stream)
    for step, batch in enumerate(made_ahead(name, options.budget, drawn, operands, learns=True)):
        loss = losses_of(model, attend, batch, options.device).mean()
        train.descend(model, optimizer, loss, step, options)
        if step % max(1, options.steps // 100) == 0 or step == options.steps - 1:
            curve.append([step, round(loss.item(), 4)])
        progress(f"{name} seed {seed} step {step}: {curve[-1][1]:.3f}")
    seconds = time.perf_counter() - begin
    files = []
    with torch.no_grad():
        some = [held_out[place : place + options.batch] for place in range(0, len(held_out), options.batch)]
        for batch in made_ahead(name, options.budget, some, operands, learns=False):
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
