#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the result lines say, as numbers with names, of which alone REPORT.md and its tables and figures are made.

    python3 bench/quality/summary.py [--results DIR]     prints every number with its name

Fixed before any result was seen: xref (C = 112 links of B = 224 keys) is compared with the tuned block top-k and with
sink + window, by the paired differences of documents, p-values raised after Holm for these two; all else describes.
"""

import argparse
import collections
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
LINE = ("nll", "delta_nll", "kl", "output_error", "mass", "far_mass")
KINDS = ("python", "javascript", "compat", "markdown", "html", "json", "novel")


def summarise(folder=RESULTS, tokens=2048, budget=224):
    """{name: number or text} of all stages that have lines."""
    tuning, s1, s2, s3 = (read_lines(folder / f"{stage}.jsonl") for stage in ("tune", "s1", "s2", "s3"))
    values = {"tokens": tokens, "budget": budget}
    if tuning:
        values |= of_tuning(tuning)
    tuned = values.get("tune.best")
    if chosen := [line for line in s1 if fits(line, tokens, budget)]:
        values |= of_reading(chosen, tuned)
    if chosen := [line for line in s2 if line.get("budget", budget) == budget]:
        values |= of_tasks(chosen, tuned)
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


# ---- S1 ----


def by_document(lines, tuned):
    """{pattern: {document: line}}, of the documents that xref, its rivals and dense attention have all read, as far as
    there are lines of theirs: means over different documents would not compare."""
    table = collections.defaultdict(dict)
    for line in lines:
        table[name_of(line, tuned)][line["kind"], line["document"]] = line
    common = set.intersection(*(set(table[name]) for name in ("dense", OURS, *RIVALS) if name in table))
    return {name: {key: line for key, line in found.items() if key in common} for name, found in table.items()}


def of_reading(lines, tuned):
    table = {name: found for name, found in by_document(lines, tuned).items() if found}
    lines = [line for found in table.values() for line in found.values()]
    if len(table) < 2:
        return {}  # no document was read with a pattern yet
    values = {
        "s1.check": max(line["check"] for line in lines if "check" in line),
        "s1.arithmetic": " and ".join(sorted({line["arithmetic"] for line in lines})),
        "s1.documents": len(table["dense"]),
        "s1.kinds": len({kind for kind, _ in table["dense"]}),
        "s1.lines": sorted(lines, key=lambda line: (line["kind"], line["document"], line["pattern"] != "dense")),
        "s1.far_share": float(np.mean([one["far_share"] for one in table["dense"].values() if one["far_share"]])),
    }
    for name, found in table.items():
        if name == "dense":
            continue
        key, ones = f"s1.{name}", list(found.values())
        delta, low, high = paired.bootstrap([one["delta_nll"] for one in ones])
        values |= {f"{key}.documents": len(ones), f"{key}.delta": delta, f"{key}.low": low, f"{key}.high": high}
        values |= {
            f"{key}.loss{end}": 100 * float(np.expm1(number))
            for end, number in (("", delta), ("_low", low), ("_high", high))
        }
        for number in ("kl", "output_error", "mass", "far_mass", "right", "same"):
            values[f"{key}.{number}"] = float(np.mean([one[number] for one in ones]))
        for kind in sorted({one["kind"] for one in ones}):
            values[f"{key}.{kind}"] = float(np.mean([one["delta_nll"] for one in ones if one["kind"] == kind]))
        values |= of_identifiers(key, found, table["dense"])
        if name != OURS and OURS in table:
            values |= compare(name, table)
    tests = [f"s1.vs.{name}.p" for name in RIVALS]
    if all(test in values for test in tests):
        values |= dict(zip((f"{test}_holm" for test in tests), paired.holm([values[test] for test in tests])))
    return values


def compare(name, table):
    """The pattern against xref on the documents that both read: loss of the one less loss of xref, nats a token."""
    both = [document for document in table[name] if document in table[OURS]]
    one, ours = ([table[which][document]["delta_nll"] for document in both] for which in (name, OURS))
    differences = np.subtract(one, ours)
    mean, low, high = paired.bootstrap(differences)
    key = f"s1.vs.{name}"
    values = {
        f"{key}.documents": len(both),
        f"{key}.difference": mean,
        f"{key}.low": low,
        f"{key}.high": high,
        f"{key}.p": paired.wilcoxon(differences),
        f"{key}.cliff": paired.cliffs_delta(one, ours),
        f"{key}.wins": int((differences > 0).sum()),
    }
    for kind in sorted({kind for kind, _ in both}):
        of_kind = [d for d, (k, _) in zip(differences, both) if k == kind]
        values |= {
            f"{key}.{kind}": float(np.mean(of_kind)),
            f"{key}.{kind}.wins": int(np.sum(np.array(of_kind) > 0)),
            f"{key}.{kind}.documents": len(of_kind),
        }
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


# ---- S2 and S3 ----


def of_tasks(lines, tuned):
    """The share of right answers, of the texts that all patterns read, and McNemar's p against xref over questions."""
    answers = collections.defaultdict(lambda: collections.defaultdict(dict))  # task -> pattern -> seed -> span
    for line in lines:
        answers[line["kind"]][name_of(line, tuned)][line["seed"], line["tokens"]] = line["spans"][line["kind"]]
    values = {}
    for task, table in answers.items():
        common = sorted(set.intersection(*(set(found) for found in table.values())))
        values |= {f"s2.{task}.texts": len(common)}
        for measure in ("right", "choice"):
            flat = {name: [x for text in common for x in found[text][measure]] for name, found in table.items()}
            for name, found in flat.items():
                if found:
                    values |= {f"s2.{task}.{name}.{measure}": float(np.mean(found)), f"s2.{task}.questions": len(found)}
                    if name not in (OURS, "dense") and OURS in flat:
                        values[f"s2.{task}.{name}.{measure}.p"] = paired.mcnemar(found, flat[OURS])
    return values


def of_training(lines):
    found = collections.defaultdict(dict)
    for line in lines:
        found[line["pattern"]][line["seed"]] = line
    values = {"s3.parameters": lines[0]["parameters"], "s3.steps": lines[0]["steps"]}
    for name, runs in found.items():
        values |= {
            f"s3.{name}.nll": float(np.mean([one["nll"] for one in runs.values()])),
            f"s3.{name}.seeds": len(runs),
        }
        if name != "dense" and "dense" in found:
            seeds = sorted(set(runs) & set(found["dense"]))
            files = [np.subtract(runs[seed]["held_out"], found["dense"][seed]["held_out"]) for seed in seeds]
            if seeds:
                mean, low, high = paired.bootstrap(np.mean(files, axis=0))  # the unit is the held-out file
                values |= {f"s3.{name}.delta": mean, f"s3.{name}.low": low, f"s3.{name}.high": high}
    return values


# ---- tables ----


def tables(values):
    """{name: lines of Markdown}."""
    return {
        name: table(values)
        for name, table in (
            ("documents", table_documents),
            ("s1", table_s1),
            ("kinds", table_kinds),
            ("vs", table_vs),
            ("identifiers", table_identifiers),
            ("tune", table_tune),
            ("s2", table_s2),
        )
    }


def found_patterns(values, form):
    """Names for which the number is there, cheapest first."""
    prefix, suffix = form.split("*")
    names = [key[len(prefix) : -len(suffix)] for key in values if key.startswith(prefix) and key.endswith(suffix)]
    return sorted((name for name in names if "." not in name), key=lambda name: values[f"{prefix}{name}{suffix}"])


def rows_of(head, rows):
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def table_s1(values):
    head = [
        "pattern",
        "documents",
        "perplexity above dense, %",
        "Δ nll, nats",
        "KL",
        "output error",
        "mass",
        "far mass",
    ]
    rows = []
    for name in found_patterns(values, "s1.*.loss"):
        v = {
            part: values[f"s1.{name}.{part}"]
            for part in (
                "documents",
                "loss",
                "loss_low",
                "loss_high",
                "delta",
                "kl",
                "output_error",
                "mass",
                "far_mass",
            )
        }
        rows.append(
            [
                f"`{name}`",
                str(v["documents"]),
                f"{v['loss']:.1f} [{v['loss_low']:.1f}, {v['loss_high']:.1f}]",
                f"{v['delta']:.3f}",
                f"{v['kl']:.3f}",
                f"{v['output_error']:.3f}",
                f"{v['mass']:.3f}",
                f"{v['far_mass']:.3f}",
            ]
        )
    return rows_of(head, rows)


def kinds_of(values):
    return [kind for kind in KINDS if f"s1.{OURS}.{kind}" in values]


def table_documents(values):
    """Every document by itself, for as long as they are few."""
    head = ["document", "pattern", "nll, nats", "Δ nll", "KL", "output error", "mass", "far mass"]
    rows = []
    for line in values.get("s1.lines", []):
        numbers = [f"{line[name]:.3f}" for name in LINE if name in line]
        rows.append([f"{line['kind']}: {line['document']}", f"`{line['pattern']}`", *numbers])
    return rows_of(head, [row + [""] * (len(head) - len(row)) for row in rows])


def table_kinds(values):
    names, kinds = found_patterns(values, "s1.*.loss"), kinds_of(values)

    def cell(name, kind):
        return f"{values[f's1.{name}.{kind}']:.3f}" if f"s1.{name}.{kind}" in values else ""

    return rows_of(["Δ nll", *kinds], [[f"`{name}`", *(cell(name, kind) for kind in kinds)] for name in names])


def table_vs(values):
    head = [
        "against `xref`",
        "documents",
        "loses more by, nats",
        "p (signed ranks)",
        "p (Holm)",
        "Cliff's δ",
        "`xref` better",
    ]
    rows = []
    for name in found_patterns(values, "s1.vs.*.difference"):
        v = {
            part: values[f"s1.vs.{name}.{part}"]
            for part in ("documents", "difference", "low", "high", "p", "cliff", "wins")
        }
        raised = values.get(f"s1.vs.{name}.p_holm")
        rows.append(
            [
                f"`{name}`",
                str(v["documents"]),
                f"{v['difference']:+.3f} [{v['low']:+.3f}, {v['high']:+.3f}]",
                f"{v['p']:.2g}",
                "" if raised is None else f"{raised:.2g}",
                f"{v['cliff']:+.2f}",
                f"{v['wins']} of {v['documents']}",
            ]
        )
    return rows_of(head, rows)


def table_identifiers(values):
    head = ["share read right", *(f"{label} ({values.get(f's1.{OURS}.{label}.count', 0)})" for label in LABELS)]
    names = found_patterns(values, "s1.*.loss")
    rows = [["dense", *(f"{values[f's1.{OURS}.{label}.dense_right']:.3f}" for label in LABELS)]] if names else []
    rows += [[f"`{name}`", *(f"{values[f's1.{name}.{label}.right']:.3f}" for label in LABELS)] for name in names]
    return rows_of(head, rows)


def table_tune(values):
    names = [name for name in patterns.TOPK if f"tune.{name}.delta" in values]
    rows = [[f"`{name}`", f"{values[f'tune.{name}.delta']:.3f}"] for name in names]
    return rows_of(["pattern", "Δ nll, nats"], rows)


def table_s2(values):
    tasks = [key.split(".")[1] for key in values if key.startswith("s2.") and key.endswith(".texts")]
    names = []
    for key in values:
        parts = key.split(".")
        if parts[0] == "s2" and parts[-1] == "right" and parts[2] not in names:
            names.append(parts[2])
    head = ["share of right answers", *(f"{task} ({values[f's2.{task}.questions']})" for task in tasks)]

    def cell(task, name):
        right, choice = (values.get(f"s2.{task}.{name}.{measure}") for measure in ("right", "choice"))
        return "" if right is None else f"{right:.3f}" if choice is None else f"{right:.3f}, of four {choice:.3f}"

    return rows_of(head, [[f"`{name}`", *(cell(task, name) for task in tasks)] for name in names])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    print(json.dumps(summarise(parser.parse_args().results), indent=1))


if __name__ == "__main__":
    main()
