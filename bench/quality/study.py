# SPDX-License-Identifier: MIT
"""What all stages share: the model, a reading of one text with several patterns, and result lines, each there once."""

import datetime
import json
import re
import time
from dataclasses import dataclass

import numpy as np
import patterns
import sparseattn as sa
from sparseattn.demo import truth
from sparseattn.quality.beside import Attention, read_beside, read_dense

NEAR = 256  # tokens: an identifier that occurred within so many is near, and else far
CHECKED_ROWS, BOUND = 4, 1e-3


@dataclass
class Subject:
    """A model that reads, and its tokenizer; `name` and `arithmetic` go into every result line."""

    model: object
    tokenizer: object
    name: str
    arithmetic: str


@dataclass
class Span:
    """Tokens [begin, end) of an answer that is judged as a whole, and what kind of answer it is."""

    label: str
    begin: int
    end: int


# ---- result lines ----


class Results:
    """A file of JSON lines, each with an id of its own. What is there is not computed again."""

    def __init__(self, path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.known = {line["id"] for line in read_lines(path)}

    def add(self, line):
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with open(self.path, "a") as file:
            file.write("\n" * (not whole) + json.dumps(line) + "\n")
        self.known.add(line["id"])


def read_lines(path):
    """The lines of a file, none where there is no file. A last line that was cut short by a crash is not one."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}: a line that was cut short is left out: {text[:60]}")
    return lines


# ---- one text, several patterns ----


class Checked(Attention):
    """Attention that compares some rows of each layer with dense masked attention in float64."""

    def __init__(self, pattern, choose=None):
        super().__init__(pattern, choose)
        self.worst, self._rows = 0.0, None

    def forward(self, q, k, v, lists, cut=None):
        out, lse = super().forward(q, k, v, lists, cut)
        if cut is None:
            self._check(q, k, v, lists, out)
        return out, lse

    def _check(self, q, k, v, lists, out):
        tokens, heads, dim = q.shape
        rows = np.linspace(0, tokens - 1, CHECKED_ROWS).astype(int)
        if lists is None and self._rows is None:
            self._rows = self.pattern.to_mask(tokens)[0, 0][rows]
        for head in range(heads):
            shared = head * k.shape[1] // heads
            mask = self._rows
            if lists is not None:
                mask = np.array([np.isin(np.arange(tokens), lists[0, row, head]) for row in rows])
            operands = (x.astype(np.float64) for x in (q[rows, head], k[:, shared], v[:, shared]))
            right = truth.attend_head(*operands, mask, dim**-0.5)[0]
            self.worst = max(self.worst, float(np.abs(out[rows, head] - right).max() / np.abs(right).max()))
        if self.worst > BOUND:
            raise SystemExit(f"{self.pattern} differs from dense masked attention by {self.worst:.1e} of the largest")


def measure(subject, ids, first, names, budget, spans, facts, results, watched=(), shorten=lambda spans: spans):
    """Reads one text with dense attention and with each named pattern, and adds a line for each that is not there.

    facts   what every line says of this text; facts["id"] begins its id, budget and name end it
    spans   answers, judged beside the text as a whole; shorten makes of all that is found what the lines keep
    """
    text = patterns.Text(subject.tokenizer, ids)
    wanted = [name for name in names if f"{facts['id']}/{budget}/{name}" not in results.known]
    dense_id = f"{facts['id']}/dense"
    if not wanted and dense_id in results.known:
        return
    facts = facts | {
        "tokens": len(ids),
        "first": first,
        "model": subject.name,
        "arithmetic": subject.arithmetic,
        "library": sa.version(),
        "date": datetime.date.today().isoformat(),
    }
    begin = time.perf_counter()
    others = {name: Checked(*patterns.make(name, text, budget)) for name in wanted}
    dense = read_dense(subject.model, np.asarray(ids), first, others, lambda share: None)
    if dense_id not in results.known:
        chosen = dense.log_p[:, list(watched)]
        results.add(
            facts
            | {
                "id": dense_id,
                "pattern": "dense",
                "nll": mean(dense.nll),
                "right": mean(dense.right),
                "far_share": mean(dense.far_mass) if wanted else None,
                "spans": shorten(judge(spans, dense, dense.nll, dense.right, chosen, watched)),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    for name, other in others.items():
        begin = time.perf_counter()
        reading, kept = read_beside(subject.model, dense, other, lambda share: None, watched), dense.kept[name]
        results.add(
            facts
            | {
                "id": f"{facts['id']}/{budget}/{name}",
                "pattern": name,
                "budget": budget,
                "nll": mean(reading.nll),
                "delta_nll": mean(reading.nll - dense.nll),
                "kl": mean(reading.kl),
                "right": mean(reading.right),
                "same": mean(reading.same),
                "output_error": mean(kept.output_error),
                "mass": mean(kept.mass),
                "far_mass": mean(kept.far_mass),
                "check": float(f"{other.worst:.1e}"),
                "spans": shorten(judge(spans, dense, reading.nll, reading.right, reading.watched, watched)),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )


def mean(numbers):
    return round(float(np.mean(numbers, dtype=np.float64)), 6)


def judge(spans, dense, nll, right, chosen, watched):
    """For each label, a number a span: its loss in nats, whether each of its tokens was the likeliest, and, where token
    ids are watched, whether its first token was the likeliest of those."""
    found = {}
    for span in spans:
        rows = slice(span.begin - dense.first - 1, span.end - dense.first - 1)
        entry = found.setdefault(span.label, {"nll": [], "right": [], "choice": []})
        entry["nll"].append(round(float(nll[rows].sum(dtype=np.float64)), 3))
        entry["right"].append(int(right[rows].all()))
        if len(watched):
            entry["choice"].append(int(watched[int(chosen[rows.start].argmax())] == dense.tokens[span.begin]))
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
