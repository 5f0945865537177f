# SPDX-License-Identifier: MIT
"""What all stages share: the model, and a reading of one text with several patterns."""

import datetime
import re
import time
from dataclasses import dataclass

import numpy as np
import patterns
import sparseattn as sa
from reading import Attention, read_beside, read_dense

NEAR = 256  # tokens: an identifier that occurred within so many is near, and else far


@dataclass
class Subject:
    """A reading.Model, and its tokenizer; the name and the model's arithmetic go into every result line."""

    model: object
    tokenizer: object
    name: str


@dataclass
class Span:
    """Tokens [begin, end) of an answer that is judged as a whole, and what kind of answer it is."""

    label: str
    begin: int
    end: int


# ---- one text, several patterns ----


def measure(subject, ids, first, wanted, spans, facts, results, watched=(), shorten=lambda spans: spans):
    """Reads one text with dense attention and with patterns, and adds a line for each that is not there.

    wanted  (budget, name) of each pattern; a name whose blocks the budget cannot hold is left out
    facts   what every line says of this text; facts["id"] begins its id, budget and name end it
    spans   answers, judged beside the text as a whole; shorten makes of all that is found what the lines keep
    """
    ids = np.asarray(ids, np.int64)
    wanted = {(budget, name): f"{facts['id']}/{budget}/{name}" for budget, name in wanted}
    wanted = {key: line_id for key, line_id in wanted.items() if line_id not in results.known}
    dense_id = f"{facts['id']}/dense"
    if not wanted and dense_id in results.known:
        return
    facts = facts | {
        "tokens": len(ids),
        "first": first,
        "model": subject.name,
        "arithmetic": subject.model.arithmetic,
        "library": sa.version(),
        "date": datetime.date.today().isoformat(),
    }
    begin = time.perf_counter()
    text = patterns.Text(subject.tokenizer, ids)
    others = {
        (budget, name): Attention(*patterns.make(name, text, budget), len(ids), subject.model)
        for budget, name in wanted
        if budget >= patterns.least_budget(name)
    }
    dense = read_dense(subject.model, ids, first, others, watched)
    if dense_id not in results.known:
        results.add(
            facts
            | {
                "id": dense_id,
                "pattern": "dense",
                "nll": mean(dense.nll),
                "right": mean(dense.right),
                "far_share": mean(dense.far_mass),
                "spans": shorten(judge(spans, dense, dense, watched)),
                "seconds": round(time.perf_counter() - begin, 3),
            }
        )
    for (budget, name), other in others.items():
        begin = time.perf_counter()
        reading, kept = read_beside(subject.model, dense, other, watched), dense.kept[budget, name]
        results.add(
            facts
            | {
                "id": wanted[budget, name],
                "pattern": name,
                "budget": budget,
                "nll": mean(reading.nll),
                "delta_nll": mean(reading.nll - dense.nll),
                "kl": mean(reading.kl),
                "right": mean(reading.right),
                "same": mean(reading.same),
                "output_error": mean(kept["output_error"]),
                "mass": mean(kept["mass"]),
                "far_mass": mean(kept["far_mass"]),
                "check": float(f"{other.require_right(name):.1e}"),
                "spans": shorten(judge(spans, dense, reading, watched)),
                "seconds": round(time.perf_counter() - begin, 3),
            }
        )


def mean(numbers):
    return round(float(np.mean(numbers, dtype=np.float64)), 6)


def judge(spans, dense, reading, watched):
    """For each label, a number a span: its loss in nats, whether each of its tokens was the likeliest, and, where token
    ids are watched, whether its first token was the likeliest of those."""
    found = {}
    for span in spans:
        rows = slice(span.begin - dense.first - 1, span.end - dense.first - 1)
        entry = found.setdefault(span.label, {"nll": [], "right": [], "choice": []})
        entry["nll"].append(round(float(reading.nll[rows].sum(dtype=np.float64)), 3))
        entry["right"].append(int(reading.right[rows].all()))
        if len(watched):
            entry["choice"].append(int(watched[int(reading.watched[rows.start].argmax())] == dense.tokens[span.begin]))
    return found


# ---- identifiers ----


def means(spans):
    """Of what `judge` found, for each label how many spans there are, and the mean of each number."""
    return {
        label: {"count": len(found["nll"])} | {name: mean(numbers) for name, numbers in found.items() if numbers}
        for label, found in spans.items()
    }


def identifier_spans(text, offsets, first):
    """A span for each identifier of three characters or more that begins behind token `first`, labelled by where the
    same one occurred last: new, near (its last occurrence begins within NEAR tokens), or far."""
    begins = np.array([begin for begin, _ in offsets])
    ends = np.array([end for _, end in offsets])
    last, spans = {}, []
    for match in re.finditer(r"[A-Za-z_][A-Za-z0-9_]{2,}", text[: ends[-1]]):
        begin = int(np.searchsorted(ends, match.start(), side="right"))  # the token that brings its first character
        end = int(np.searchsorted(begins, match.end(), side="left"))
        before = last.get(match.group())
        last[match.group()] = begin
        if begin > first and match.end() < ends[-1]:  # the last one may go on behind the tokens
            label = "new" if before is None else "near" if begin - before <= NEAR else "far"
            spans.append(Span(label, begin, end))
    return spans
