#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What sparse patterns cost a language model: a study that anyone can run again.

    python3 bench/quality/run.py --stage tune            chooses the block top-k, on documents of its own
    python3 bench/quality/run.py --stage s1              a frozen model reads documents with each pattern
    python3 bench/quality/run.py --stage s2              and answers questions about what stands far above
    python3 bench/quality/run.py --stage s3 --device cuda    small models learn with each pattern from the start
    python3 bench/quality/run.py --stage adapt --device cuda    the model of S1 learns to see with a pattern
    python3 bench/quality/run.py --stage speed --device cuda    the attention of one layer is timed, by length
    python3 bench/quality/run.py --stage s1 --small      all of its code in seconds: a random model, nothing downloaded

Results are lines of JSON in results/STAGE.jsonl. A line that is there is not computed again: a run that was stopped
goes on where it was. It needs torch and the library's Python package with its extra [demo].
"""

import argparse
import functools
import pathlib
import sys
import time

import corpus
import reading
import small
import stages
from lines import Results
from sparseattn.demo import run as demo
from sparseattn.demo import weights
from study import Subject

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
SMALL_TOKENS, SMALL_BUDGET = 512, 176
SECONDS_BETWEEN_LINES = 5  # of progress


def read_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stage", choices=("tune", "s1", "s2", "s3", "adapt", "speed"), required=True)
    parser.add_argument("--small", action="store_true", help="a tiny random model and texts that are here")
    parser.add_argument("--cache", type=pathlib.Path, default=corpus.default_cache(), help="packages and weights")
    parser.add_argument("--results", type=pathlib.Path, help="the folder of the lines (default: results beside this)")
    parser.add_argument("--tokens", type=numbers, help="of a text: 2048,4096 (default 2048; of speed, up to 32768)")
    parser.add_argument("--budget", type=numbers, help="keys of a query, one or more numbers (default 224)")
    parser.add_argument("--patterns", help="names separated by commas: see patterns.py; default: those of the stage")
    parser.add_argument("--kinds", help="kinds of document, separated by commas; default: all in manifest.json")
    parser.add_argument("--documents", type=int, help="of each kind at most (default: all)")
    parser.add_argument("--skip", type=int, default=0, help="documents of each kind that are left out before these")
    parser.add_argument("--seeds", type=numbers, help="S2: of texts (default 0 to 23); of trainings (default 0,1,2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models read and are trained")
    parser.add_argument("--steps", type=int, help="of a training")
    parser.add_argument("--part", type=part, default=slice(None), metavar="K/N", help="tuning, S1: every N-th document")
    parser.add_argument("--seconds", type=float, help="stops after so long, at the end of a document or step")
    options = parser.parse_args(arguments)
    if not options.tokens:
        lengths = [2048 << double for double in range(5)] if options.stage == "speed" else [2048]
        options.tokens = [SMALL_TOKENS] if options.small else lengths
    options.budget = options.budget or [SMALL_BUDGET if options.small else 224]
    if options.results is None:
        if options.small:
            parser.error("--small needs --results: what a random model gives is no result of the study")
        options.results = RESULTS
    return options


def numbers(text):
    return [int(number) for number in text.split(",")]


def part(text):
    """K/N as a slice: N processes, each with a K of its own, share the documents."""
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError
    return slice(number - 1, None, of)


class TimeIsUp(Exception):
    """The run has taken as long as its option allows."""


@functools.cache
def load_model(cache):
    """(the model of the manifest in NumPy, its tokenizer)"""
    demo.require_packages("gguf", "tokenizers")
    reader = weights.open_gguf(corpus.model_path(cache))
    return weights.load_model(reader, lambda share: None), weights.load_tokenizer(reader)


@functools.cache
def load_subject(cache, device):
    model, tokenizer = load_model(cache)
    return Subject(reading.Model(model, device), tokenizer, corpus.read_manifest()["model"]["name"])


def load_documents(options, tuning):
    """The stage's documents, in the manifest's order."""
    if options.small:
        return small.documents()
    kinds = options.kinds.split(",") if options.kinds else None
    documents = [one for one in corpus.load(options.cache, kinds) if one.tuning == tuning]
    counts, chosen = {}, []
    last = float("inf") if options.documents is None else options.skip + options.documents
    for document in documents:
        counts[document.kind] = counts.get(document.kind, 0) + 1
        if options.skip < counts[document.kind] <= last:
            chosen.append(document)
    return chosen


def read(options, progress):
    """Tuning, S1 and S2: a frozen model reads."""
    results = Results(options.results / f"{options.stage}.jsonl")
    subject = small.subject(options.device) if options.small else load_subject(options.cache, options.device)
    if options.stage == "tune":
        rounds = [options.patterns.split(",") if options.patterns else stages.patterns.TOPK]
    else:
        # What matters most is read of all documents before the rest is.
        rounds = [options.patterns.split(",")] if options.patterns else [stages.MAIN, stages.MORE]
        rounds = [stages.named(names, options.results / "tune.jsonl") for names in rounds]
    documents = [] if options.stage == "s2" else load_documents(options, tuning=options.stage == "tune")
    counts = [len(subject.tokenizer.encode(document.text).ids) for document in documents]
    for names in rounds:
        for tokens in options.tokens:
            more = tokens, options.budget, names, results, progress
            if options.stage == "s2":
                seeds = options.seeds or range(1 if options.small else 24)
                stages.run_tasks(subject, seeds, *more)
            else:
                long = stages.in_turn([one for one, count in zip(documents, counts) if count >= tokens])
                progress(f"{len(long)} of {len(documents)} documents have {tokens} tokens", last=True)
                stages.read_documents(options.stage, subject, long[options.part], *more)


def main(arguments=None):
    options = read_options(arguments)
    begin = shown = time.monotonic()

    def progress(text, last=False):
        nonlocal shown
        now = time.monotonic()
        if last or now - shown >= SECONDS_BETWEEN_LINES:
            shown = now
            print(f"{options.stage} {now - begin:7.0f} s  {text}", flush=True)
        if options.seconds is not None and now - begin > options.seconds:
            raise TimeIsUp

    try:
        if options.stage == "s3":
            import training  # torch is imported only where it is needed

            training.run(options, Results(options.results / "s3.jsonl"), progress)
        elif options.stage == "adapt":
            import adaptation

            model, tokenizer = (small.numpy_model(), small.Bytes()) if options.small else load_model(options.cache)
            adaptation.run(options, model, tokenizer, Results(options.results / "adapt.jsonl"), progress)
        elif options.stage == "speed":
            import speed

            speed.run(options, Results(options.results / "speed.jsonl"), progress)
        else:
            read(options, progress)
    except corpus.CorpusError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1
    except TimeIsUp:
        print(f"Stopped after {options.seconds:g} s; the same command goes on from here.", flush=True)
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
