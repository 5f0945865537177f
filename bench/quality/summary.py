#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the result lines say, as numbers with names, of which alone REPORT.md and its tables and figures are made.

    python3 bench/quality/summary.py [--results DIR]     prints every number with its name

Fixed before any result was seen: xref (C = 112 links of B = 224 keys) is compared with the tuned block top-k and with
sink + window, by the paired differences of documents, p-values raised after Holm for these two; all else describes.
"""

import argparse
import collections
import itertools
import json
import pathlib

import numpy as np
import paired
import patterns
from lines import mean_losses, read_lines

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
RIVALS = ("block_topk", "sink_window")  # the two comparisons that were fixed beforehand
OURS = "xref"
LABELS = ("far", "near", "new")
KINDS = ("python", "javascript", "compat", "markdown", "html", "json", "novel")
SAME_PAGES = ("markdown", "html", "json")
MEANS = ("kl", "output_error", "mass", "far_mass", "right", "same")


def summarise(folder=RESULTS, tokens=2048, budget=224):
    """{name: number, text or curve} of all stages that have lines."""
    tuning, s1, s2, s3 = (read_lines(folder / f"{stage}.jsonl") for stage in ("tune", "s1", "s2", "s3"))
    values = {"tokens": tokens, "budget": budget}
    if tuning:
        values |= of_tuning(tuning)
    tuned = values.get("tune.best")
    if s1:
        values |= of_reading([line for line in s1 if fits(line, tokens, budget)], tuned)
        values |= of_sizes(s1, tuned, budget)
    if s2:
        values |= of_tasks([line for line in s2 if line.get("budget", budget) == budget], tuned)
    if s3:
        values |= of_training(s3)
    return values


def fits(line, tokens, budget):
    return line["tokens"] == tokens and line.get("budget", budget) == budget


def name_of(line, tuned):
    """Its pattern; what tuning chose is called block_topk."""
    return "block_topk" if line["pattern"] == tuned else line["pattern"]


def of_tuning(lines):
    documents, losses = mean_losses(lines, patterns.TOPK)
    values = {"tune.documents": documents} | {f"tune.{name}.delta": loss for name, loss in losses.items()}
    return values | ({"tune.best": min(losses, key=losses.get)} if losses else {})


def with_interval(key, numbers):
    """Their mean and its interval of the bootstrap, by names."""
    return dict(zip((key, f"{key}.low", f"{key}.high"), paired.bootstrap(numbers)))


def percent(values, key):
    """By how many percent a loss, and its interval, raise perplexity."""
    return {f"{key}.percent{end}": 100 * float(np.expm1(values[f"{key}.delta{end}"])) for end in ("", ".low", ".high")}


# ---- S1 ----


def by_document(lines, tuned):
    """{pattern: {document: line}}, of the documents that xref, its rivals and dense attention have all read, as far as
    there are lines of theirs: means over different documents would not compare."""
    table = collections.defaultdict(dict)
    for line in lines:
        table[name_of(line, tuned)][line["kind"], line["document"]] = line
    present = [set(table[name]) for name in ("dense", OURS, *RIVALS) if name in table]
    common = set.intersection(*present) if present else set()
    kept = {name: {key: line for key, line in found.items() if key in common} for name, found in table.items()}
    return {name: found for name, found in kept.items() if found}


def of_reading(lines, tuned):
    """All that one length and budget say."""
    table = by_document(lines, tuned)
    if len(table) < 2:
        return {}  # no document was read with a pattern yet
    lines = [line for found in table.values() for line in found.values()]
    dense = table.pop("dense")
    values = {
        "s1.check": max(line["check"] for line in lines if "check" in line),
        "s1.arithmetic": " and ".join(sorted({line["arithmetic"] for line in lines})),
        "s1.documents": len(dense),
        "s1.kinds": len({kind for kind, _ in dense}),
        "s1.far_share": float(np.mean([one["far_share"] for one in dense.values() if one["far_share"]])),
    }
    for kind, ones in by_kind(dense):
        values[f"s1.kind.{kind}.documents"] = len(ones)
        values[f"s1.kind.{kind}.nll"] = float(np.mean([one["nll"] for one in ones]))
    for name, found in table.items():
        key, ones = f"s1.{name}", list(found.values())
        values[f"{key}.documents"] = len(ones)
        values |= with_interval(f"{key}.delta", [one["delta_nll"] for one in ones])
        values |= percent(values, key)
        values |= {f"{key}.{number}": float(np.mean([one[number] for one in ones])) for number in MEANS}
        values |= {f"{key}.{kind}": float(np.mean([one["delta_nll"] for one in of])) for kind, of in by_kind(found)}
        values |= of_identifiers(key, found, dense)
        if name != OURS and OURS in table:
            values |= compare(name, table)
    raise_p(values, [f"s1.vs.{name}.p" for name in RIVALS])
    raise_p(values, [key for key in values if key.startswith("s1.kind.") and key.endswith(".p")])
    return values | of_proxies(values, [name for name in table if len(table[name]) == len(dense)])


def by_kind(found):
    """(kind, lines) for each kind of document."""
    kinds = sorted({kind for kind, _ in found})
    return [(kind, [line for (one, _), line in found.items() if one == kind]) for kind in kinds]


def raise_p(values, tests):
    """After Holm, where all of the tests are there."""
    if tests and all(test in values for test in tests):
        values |= zip((f"{test}_holm" for test in tests), paired.holm([values[test] for test in tests]))


def compare(name, table):
    """The pattern against xref on the documents that both read: loss of the one less loss of xref, nats a token."""
    both = [document for document in table[name] if document in table[OURS]]
    one, ours = ([table[which][document]["delta_nll"] for document in both] for which in (name, OURS))
    differences, key = np.subtract(one, ours), f"s1.vs.{name}"
    values = {f"{key}.documents": len(both), f"{key}.wins": int((differences > 0).sum())}
    values |= with_interval(f"{key}.difference", differences)
    if name not in RIVALS:
        return values
    values |= {f"{key}.p": paired.wilcoxon(differences), f"{key}.cliff": paired.cliffs_delta(one, ours)}
    # The formats of a page are no independent documents: the same comparison with one difference a page.
    pages = collections.defaultdict(list)
    for (kind, document), difference in zip(both, differences):
        page = pathlib.PurePath(document).stem if kind in SAME_PAGES else f"{kind}/{document}"
        pages[page].append(difference)
    of_pages = [np.mean(found) for found in pages.values()]
    values |= {f"{key}.pages": len(of_pages), f"{key}.pages_p": paired.wilcoxon(of_pages)}
    values |= with_interval(f"{key}.pages_difference", of_pages)
    for kind in sorted({kind for kind, _ in both}):
        of_kind = np.array([d for d, (k, _) in zip(differences, both) if k == kind])
        key = f"s1.kind.{kind}.vs.{name}"
        values |= with_interval(f"{key}.difference", of_kind)
        values |= {f"{key}.wins": int((of_kind > 0).sum()), f"{key}.p": paired.wilcoxon(of_kind)}
    return values


def of_identifiers(key, found, dense):
    """For new, near and far identifiers the share that is read right, and the loss above dense; means of documents."""
    values = {}
    for label in LABELS:
        pairs = [
            (one["spans"][label], dense[document]["spans"][label])
            for document, one in found.items()
            if document in dense and label in one["spans"]
        ]
        if pairs:
            values |= {
                f"{key}.{label}.right": float(np.mean([one["right"] for one, _ in pairs])),
                f"{key}.{label}.dense_right": float(np.mean([other["right"] for _, other in pairs])),
                f"{key}.{label}.delta": float(np.mean([one["nll"] - other["nll"] for one, other in pairs])),
                f"{key}.{label}.count": int(sum(one["count"] for one, _ in pairs)),
            }
    return values


def of_proxies(values, names):
    """Spearman's correlation, over these patterns, of what attention keeps with what the model loses."""
    if len(names) < 3:
        return {}
    losses = paired.ranks([values[f"s1.{name}.delta"] for name in names])
    found = {"s1.proxy.patterns": len(names)}
    for number in ("mass", "far_mass", "output_error", "kl"):
        ranks = paired.ranks([values[f"s1.{name}.{number}"] for name in names])
        found[f"s1.proxy.{number}"] = float(np.corrcoef(losses, ranks)[0, 1])
    return found


# ---- S1 at other lengths and budgets ----


def of_sizes(lines, tuned, budget):
    """For each length with the budget of the study what its documents say; and for each length and budget what those
    documents say that were read with all budgets of this length, so that its budgets compare."""
    values = {}
    for tokens in sorted({line["tokens"] for line in lines}):
        budgets = sorted({line["budget"] for line in lines if line["tokens"] == tokens and "budget" in line})
        tables = {one: by_document([line for line in lines if fits(line, tokens, one)], tuned) for one in budgets}
        tables = {one: table for one, table in tables.items() if OURS in table}
        if budget in tables:
            values |= of_size(f"s1.length.{tokens}", tables[budget], set(tables[budget][OURS]))
        common = set.intersection(*(set(table[OURS]) for table in tables.values())) if tables else set()
        if common and len(tables) > 1:
            for one, table in tables.items():
                values |= of_size(f"s1.size.{tokens}.{one}", table, common)
    return values


def of_size(key, table, documents):
    """Losses of the patterns that have read all of these documents, and differences from xref."""
    values = {f"{key}.documents": len(documents)}
    for name, found in table.items():
        if name != "dense" and documents <= set(found):
            losses, ours = ([table[which][one]["delta_nll"] for one in sorted(documents)] for which in (name, OURS))
            values |= with_interval(f"{key}.{name}.delta", losses)
            values |= percent(values, f"{key}.{name}")
            if name != OURS:
                values |= with_interval(f"{key}.{name}.difference", np.subtract(losses, ours))
                values[f"{key}.{name}.wins"] = int(np.greater(losses, ours).sum())
    return values


# ---- S2 and S3 ----


def of_tasks(lines, tuned):
    """The share of right answers, of the texts that all patterns read, for each task and each of its lengths; and
    against xref the difference, texts being the units of its interval, and McNemar's p over questions."""
    answers = collections.defaultdict(lambda: collections.defaultdict(dict))  # task -> pattern -> text -> spans
    for line in lines:
        text = line.get("length", line["tokens"]), line["seed"]
        answers[line["kind"]][name_of(line, tuned)][text] = line["spans"][line["kind"]]
    values = {}
    for task, table in answers.items():
        common = sorted(set.intersection(*(set(found) for found in table.values())))
        if not common:
            continue
        values |= of_answers(f"s2.{task}", table, common)
        for length, texts in itertools.groupby(common, key=lambda text: text[0]):
            values |= of_answers(f"s2.{task}.{length}", table, list(texts))
    raise_p(values, [f"s2.{task}.{name}.p" for task in answers for name in RIVALS if f"s2.{task}.{name}.p" in values])
    return values


def of_answers(key, table, texts):
    """Where the answer was to be chosen from some, `right` counts that choice."""
    values = {f"{key}.texts": len(texts)}
    shares = {}
    for name, found in table.items():
        chosen = all(found[text].get("choice") for text in texts)
        flat = {text: found[text]["choice" if chosen else "right"] for text in texts}
        shares[name] = flat
        values[f"{key}.questions"] = sum(map(len, flat.values()))
        values[f"{key}.{name}.right"] = float(np.mean([x for text in texts for x in flat[text]]))
        if chosen:
            values[f"{key}.{name}.written"] = float(np.mean([x for text in texts for x in found[text]["right"]]))
    for name, flat in shares.items():
        if name not in (OURS, "dense") and OURS in shares:
            differences = [np.mean(shares[OURS][text]) - np.mean(flat[text]) for text in texts]
            values |= with_interval(f"{key}.{name}.behind", differences)
            both = [[x for text in texts for x in one[text]] for one in (flat, shares[OURS])]
            if key.count(".") == 1:  # of all lengths together
                values[f"{key}.{name}.p"] = paired.mcnemar(*both)
    return values


def of_training(lines):
    """Means over seeds; held-out files are the units of differences."""
    shape = {name: lines[0][name] for name in ("parameters", "steps", "seq", "batch", "budget")}
    found = collections.defaultdict(dict)
    for line in lines:
        if all(line[name] == number for name, number in shape.items()):
            found[line["pattern"]][line["seed"]] = line
    values = {f"s3.{name}": number for name, number in shape.items()} | {"s3.files": len(lines[0]["held_out"])}
    values["s3.tokens"] = shape["steps"] * shape["batch"] * shape["seq"]
    for name, runs in found.items():
        of_seeds = [one["nll"] for one in runs.values()]
        values |= {f"s3.{name}.nll": float(np.mean(of_seeds)), f"s3.{name}.seeds": len(runs)}
        values |= {f"s3.{name}.least": min(of_seeds), f"s3.{name}.most": max(of_seeds)}
        steps = [step for step, _ in next(iter(runs.values()))["curve"]]
        losses = np.mean([[loss for _, loss in one["curve"]] for one in runs.values()], axis=0)
        values[f"s3.{name}.curve"] = [list(pair) for pair in zip(steps, losses.tolist())]
        for other, part in (("dense", "delta"), (OURS, "difference")):
            seeds = sorted(set(runs) & set(found.get(other, {})))
            if name not in (other, "dense") and seeds:
                files = [np.subtract(runs[seed]["held_out"], found[other][seed]["held_out"]) for seed in seeds]
                values |= with_interval(f"s3.{name}.{part}", np.mean(files, axis=0))
        if f"s3.{name}.delta" in values:
            values |= percent(values, f"s3.{name}")
    return values


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    print(json.dumps(summarise(parser.parse_args().results), indent=1))


if __name__ == "__main__":
    main()
