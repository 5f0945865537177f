#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the result lines say, as numbers with names, of which alone the report's are made, and its tables and figures.

    python3 bench/quality/summary.py [--results DIR]     prints every number with its name

Fixed before any result was seen: xref (C = 112 links of B = 224 keys) is compared with the tuned block top-k and with
sink + window, by the paired differences of documents, p-values raised after Holm for these two; all else describes.
What was seen to be better than xref then, longer spans, has documents of its own in results/confirm.
Trainings are tested in the same way, with held-out files for documents and means over seeds for losses: that was
decided when their lines were there.
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
MAIN = (OURS, *RIVALS, "xref_ngrams")  # what was read of most documents
BETTER = "xref_long_spans"
# What was read apart from the rest: a folder of results, tokens, a pattern, and those it is compared with. Longer
# spans, which were seen to be better, have documents of their own.
APART = {
    "confirm": ("confirm", 2048, BETTER, (OURS, "block_topk")),
    "blocks": ("ablations", 2048, OURS, ("xref_blocks_16", "xref_blocks_64")),
    "order": ("ablations", 2048, OURS, ("xref_identifiers_first",)),
    "oracle": ("ablations", 2048, "oracle", ("block_topk", OURS)),
    "code": ("ablations", 2048, OURS, ("call_graph", "sink_window", "block_topk")),
    "long": (".", 8192, BETTER, (OURS, "block_topk", "sink_window")),
}
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
        table = by_document([line for line in s1 if fits(line, tokens, budget)], tuned)
        values |= of_main(aligned(table, MAIN))
        values |= of_more(aligned(table, table))
        values |= of_sizes(s1, tuned, budget)
    for apart, (where, length, ours, rivals) in APART.items():
        if lines := [line for line in read_lines(folder / where / "s1.jsonl") if fits(line, length, budget)]:
            values |= of_rivals(apart, ours, rivals, aligned(by_document(lines, tuned), (ours, *rivals)))
    if s2:
        values |= of_tasks([line for line in s2 if line.get("budget", budget) == budget], tuned)
    if s3:
        values |= of_training(s3, tuned)
    if lines := read_lines(folder / "adapt.jsonl"):
        values |= of_adaptation(lines, tuned)
    return values | of_speed(read_lines(folder / "speed.jsonl"), tuned, budget)


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
    """{pattern: {document: line}}"""
    table = collections.defaultdict(dict)
    for line in lines:
        table[name_of(line, tuned)][line["kind"], line["document"]] = line
    return dict(table)


def aligned(table, names):
    """The table of dense attention and these patterns, as far as there are lines of theirs, and of the documents that
    all of these have read: means over different documents would not compare."""
    there = [name for name in dict.fromkeys(("dense", *names)) if name in table]
    common = sorted(set.intersection(*(set(table[name]) for name in there))) if there else []
    return {name: {document: table[name][document] for document in common} for name in there} if common else {}


def of_main(table):
    """What was read of most documents, with the comparisons that were fixed beforehand."""
    values = of_reading("s1", table)
    for name in RIVALS:
        if name in table and OURS in table:
            values |= test("s1", name, table)
    raise_p(values, [f"s1.vs.{name}.p" for name in RIVALS])
    raise_p(values, [key for key in values if key.startswith("s1.kind.") and key.endswith(".p")])
    return values


def of_more(table):
    """All patterns, on fewer documents."""
    values = of_reading("more", table)
    for name in table:
        if name not in ("dense", "block_topk") and "block_topk" in table:
            values |= with_interval(f"more.topk.{name}", differences(name, "block_topk", table))
    return values | of_proxies(values, "more", [name for name in table if name != "dense"])


def of_rivals(prefix, ours, rivals, table):
    """What was read apart from the rest, one pattern against others."""
    values = of_reading(prefix, table)
    for name in rivals:
        if name in table and ours in table:
            found, key = differences(name, ours, table), f"{prefix}.against.{name}"
            values |= with_interval(f"{key}.difference", found)
            values |= {f"{key}.p": paired.wilcoxon(found), f"{key}.wins": int((found > 0).sum())}
            values |= of_pages(key, found, table[name])
            for kind, of_kind in differences_by_kind(found, table[name]):
                values |= with_interval(f"{prefix}.kind.{kind}.against.{name}.difference", of_kind)
    raise_p(values, [f"{prefix}.against.{name}.p" for name in rivals])
    return values


def of_reading(key, table):
    """What each pattern costs in the mean of these documents, by kind, and beside xref."""
    if len(table) < 2:
        return {}  # no document was read with a pattern yet
    dense = table["dense"]
    lines = [line for found in table.values() for line in found.values()]
    values = {
        f"{key}.check": max(line["check"] for line in lines if "check" in line),
        f"{key}.arithmetic": " and ".join(sorted({line["arithmetic"] for line in lines})),
        f"{key}.documents": len(dense),
        f"{key}.kinds": len({kind for kind, _ in dense}),
        f"{key}.far_share": float(np.mean([one["far_share"] for one in dense.values() if one["far_share"]])),
    }
    for kind, ones in by_kind(dense):
        values[f"{key}.kind.{kind}.documents"] = len(ones)
        values[f"{key}.kind.{kind}.nll"] = float(np.mean([one["nll"] for one in ones]))
    for name, found in table.items():
        if name == "dense":
            continue
        values |= with_interval(f"{key}.{name}.delta", [one["delta_nll"] for one in found.values()])
        values |= percent(values, f"{key}.{name}")
        for number in MEANS:
            values[f"{key}.{name}.{number}"] = float(np.mean([one[number] for one in found.values()]))
        for kind, ones in by_kind(found):
            values[f"{key}.{name}.{kind}"] = float(np.mean([one["delta_nll"] for one in ones]))
        values |= of_identifiers(f"{key}.{name}", found, dense)
        if name != OURS and OURS in table:
            more = differences(name, OURS, table)
            values |= with_interval(f"{key}.vs.{name}.difference", more)
            values[f"{key}.vs.{name}.wins"] = int((more > 0).sum())
            if far := far_identifiers(name, table):
                values |= with_interval(f"{key}.vs.{name}.far", far)
    return values


def far_identifiers(name, table):
    """By how much xref reads a larger share of far identifiers right than the pattern does, a number a document."""
    both = [(ours["spans"], table[name][document]["spans"]) for document, ours in table[OURS].items()]
    return [ours["far"]["right"] - other["far"]["right"] for ours, other in both if "far" in ours]


def differences(name, other, table):
    """By how many nats a token the one pattern loses more than the other, a number a document."""
    return np.array([line["delta_nll"] - table[other][one]["delta_nll"] for one, line in table[name].items()])


def by_kind(found):
    """(kind, lines) for each kind of document."""
    kinds = sorted({kind for kind, _ in found})
    return [(kind, [line for (one, _), line in found.items() if one == kind]) for kind in kinds]


def differences_by_kind(found, documents):
    """(kind, its differences) for each kind of document."""
    kinds = np.array([kind for kind, _ in documents])
    return [(str(kind), found[kinds == kind]) for kind in np.unique(kinds)]


def of_pages(key, found, documents):
    """The formats of a page are no independent documents: the same comparison with one difference a page."""
    pages = collections.defaultdict(list)
    for (kind, document), difference in zip(documents, found):
        page = pathlib.PurePath(document).stem if kind in SAME_PAGES else f"{kind}/{document}"
        pages[page].append(difference)
    means = [np.mean(some) for some in pages.values()]
    values = {f"{key}.pages": len(means), f"{key}.pages_p": paired.wilcoxon(means)}
    return values | with_interval(f"{key}.pages_difference", means)


def raise_p(values, tests):
    """After Holm, where all of the tests are there."""
    if tests and all(test in values for test in tests):
        values |= zip((f"{test}_holm" for test in tests), paired.holm([values[test] for test in tests]))


def test(key, name, table):
    """The pattern against xref: signed ranks over documents, over pages, and for each kind."""
    found, of = differences(name, OURS, table), f"{key}.vs.{name}"
    losses = ([line["delta_nll"] for line in table[one].values()] for one in (name, OURS))
    values = {f"{of}.p": paired.wilcoxon(found), f"{of}.cliff": paired.cliffs_delta(*losses)}
    values |= of_pages(of, found, table[name])
    for kind, of_kind in differences_by_kind(found, table[name]):
        of = f"{key}.kind.{kind}.vs.{name}"
        values |= with_interval(f"{of}.difference", of_kind)
        values |= {f"{of}.wins": int((of_kind > 0).sum()), f"{of}.p": paired.wilcoxon(of_kind)}
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


def of_proxies(values, key, names):
    """Spearman's correlation, over these patterns, of what attention keeps with what the model loses."""
    if len(names) < 3:
        return {}
    losses = paired.ranks([values[f"{key}.{name}.delta"] for name in names])
    found = {f"{key}.patterns": len(names)}
    for number in ("mass", "far_mass", "output_error", "kl"):
        ranks = paired.ranks([values[f"{key}.{name}.{number}"] for name in names])
        found[f"{key}.proxy.{number}"] = float(np.corrcoef(losses, ranks)[0, 1])
    return found


# ---- S1 at other lengths and budgets ----


def of_sizes(lines, tuned, budget):
    """For each length with the budget of the study what its documents say, and beside it what the same documents say at
    the shortest length; and for each length and budget what those documents say that were read with all budgets of this
    length, with the patterns that all of these have, so that its budgets compare."""
    values, shortest = {}, {}
    for tokens in sorted({line["tokens"] for line in lines}):
        budgets = sorted({line["budget"] for line in lines if line["tokens"] == tokens and "budget" in line})
        tables = {one: by_document([line for line in lines if fits(line, tokens, one)], tuned) for one in budgets}
        tables = {one: table for one, table in tables.items() if OURS in table}
        if table := aligned(tables.get(budget, {}), MAIN):
            values |= of_size(f"s1.length.{tokens}", table, set(table.get(OURS, ())))
            shortest = shortest or table
            values |= of_growth(f"s1.longer.{tokens}", shortest, table)
        names = [name for name in (*MAIN, BETTER) if all(name in table for table in tables.values())]
        tables = {one: aligned(table, names) for one, table in tables.items()}
        common = set.intersection(*(set(table.get(OURS, ())) for table in tables.values())) if tables else set()
        if common and len(tables) > 1:
            for one, table in tables.items():
                values |= of_size(f"s1.size.{tokens}.{one}", table, common)
    return values


def of_size(key, table, documents):
    """Losses of the patterns on these documents, and differences from xref."""
    values = {f"{key}.documents": len(documents)}
    for name in table:
        if name != "dense":
            losses, ours = ([table[which][one]["delta_nll"] for one in sorted(documents)] for which in (name, OURS))
            values |= with_interval(f"{key}.{name}.delta", losses)
            values |= percent(values, f"{key}.{name}")
            if name != OURS:
                more = np.subtract(losses, ours)
                values |= with_interval(f"{key}.{name}.difference", more)
                values[f"{key}.{name}.wins"] = int((more > 0).sum())
                values |= of_pages(f"{key}.{name}", more, sorted(documents))
    if BETTER in table and "block_topk" in table:
        more = [table["block_topk"][one]["delta_nll"] - table[BETTER][one]["delta_nll"] for one in sorted(documents)]
        values |= with_interval(f"{key}.against.{BETTER}.difference", more)
    return values


def of_growth(key, short, long):
    """By how much more than xref the rivals lose on the same documents at two lengths, and the change between them."""
    values = {}
    for name in RIVALS:
        both = sorted(set.intersection(*(set(table.get(one, ())) for table in (short, long) for one in (OURS, name))))
        if both and short is not long:
            before, after = (
                np.array([table[name][one]["delta_nll"] - table[OURS][one]["delta_nll"] for one in both])
                for table in (short, long)
            )
            values[f"{key}.documents"] = len(both)
            for part, found in (("before", before), ("after", after), ("change", after - before)):
                values |= with_interval(f"{key}.{name}.{part}", found)
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


SHAPE = ("parameters", "seq", "batch", "budget", "steps")  # of a training


def of_training(lines, tuned):
    """Of the training with most patterns, the longest among equals, and of shorter and longer ones beside it."""
    shapes = collections.defaultdict(lambda: collections.defaultdict(dict))
    for line in lines:
        shapes[tuple(line[name] for name in SHAPE)][name_of(line, tuned)][line["seed"]] = line
    chosen = max(shapes, key=lambda shape: (len(shapes[shape]), shape[-1]))
    values = {f"s3.{name}": number for name, number in zip(SHAPE, chosen)} | {"s3.files": len(lines[0]["held_out"])}
    values["s3.tokens"] = values["s3.steps"] * values["s3.batch"] * values["s3.seq"]
    values |= of_runs("s3", shapes[chosen])
    for name, runs in shapes[chosen].items():
        steps = [step for step, _ in next(iter(runs.values()))["curve"]]
        losses = np.mean([[loss for _, loss in one["curve"]] for one in runs.values()], axis=0)
        values[f"s3.{name}.curve"] = [list(pair) for pair in zip(steps, losses.tolist())]
    for shape, found in sorted(shapes.items()):
        if shape[:-1] == chosen[:-1]:
            values |= of_runs(f"s3.length.{shape[-1]}", found)
    return values


def of_runs(prefix, found):
    """Means over seeds of {pattern: {seed: line}}; held-out files are the units of differences, and of the signed ranks
    against the rivals."""
    values = {}
    for name, runs in found.items():
        of_seeds, key = [one["nll"] for one in runs.values()], f"{prefix}.{name}"
        values |= {f"{key}.nll": float(np.mean(of_seeds)), f"{key}.seeds": len(runs)}
        values |= {f"{key}.least": min(of_seeds), f"{key}.most": max(of_seeds)}
        for other, part in (("dense", "delta"), (OURS, "difference")):
            seeds = sorted(set(runs) & set(found.get(other, {})))
            if name not in (other, "dense") and seeds:
                files = [np.subtract(runs[seed]["held_out"], found[other][seed]["held_out"]) for seed in seeds]
                values |= with_interval(f"{key}.{part}", np.mean(files, axis=0))
                values[f"{key}.{part}.seeds"] = [float(np.mean(of_seed)) for of_seed in files]
                if other == OURS:
                    more = np.mean(files, axis=0)
                    values |= {f"{key}.p": paired.wilcoxon(more), f"{key}.wins": int((more > 0).sum())}
        if f"{key}.delta" in values:
            values |= percent(values, key)
    raise_p(values, [f"{prefix}.{name}.p" for name in RIVALS])
    return values


def of_adaptation(lines, tuned):
    """Of the first line's size: losses before a step and after all."""
    parts, size = {"before": {}, "after": {}}, ("device", "seq", "batch", "budget", "steps")
    for line in lines:
        if all(line[name] == lines[0][name] for name in size):
            name = name_of(line, tuned)
            before = {"held_out": line["held_out_before"], "nll": line["nll_before"]}
            for part, found in (("before", before), ("after", line)):
                parts[part].setdefault(name, {})[line["seed"]] = found
    values = {f"adapt.{name}": lines[0][name] for name in size[1:]} | {"adapt.files": len(lines[0]["held_out"])}
    for part, found in parts.items():
        values |= of_runs(f"adapt.{part}", found)
    for name in parts["after"]:
        if f"adapt.after.{name}.delta" in values:
            before, after = (values[f"adapt.{part}.{name}.delta"] for part in parts)
            values[f"adapt.{name}.left"] = 100 * after / before
    return values


# ---- speed ----


def of_speed(lines, tuned, budget):
    """Of each device, length and pattern the times of a layer as shares of those of dense attention, of the library's
    or torch's the faster one; what a layer computes to choose keys is part of its forward pass."""
    found = collections.defaultdict(dict)
    for line in lines:
        if line["budget"] == budget:
            found[line["device"], line["tokens"]][name_of(line, tuned)] = line
    values = {}
    for (device, tokens), times in sorted(found.items()):
        key = f"speed.{device}.{tokens}"
        values |= {f"speed.{device}.machine": times["dense"]["machine"], f"{key}.batch": times["dense"]["batch"]}
        values |= {f"speed.{device}.{number}": times["dense"][number] for number in ("threads", "dtype")}
        values |= {f"speed.{number}": times["dense"][number] for number in ("heads_q", "heads_kv", "head_dim")}
        for part in ("forward", "backward"):
            dense = min(times[name][f"{part}_us"] for name in ("dense", "sdpa") if name in times)
            values[f"{key}.{part}"] = dense / 1e3
            for name, line in times.items():
                values[f"{key}.{name}.{part}"] = line[f"{part}_us"] / dense
                if part == "forward" and "choose_us" in line:
                    values[f"{key}.{name}.choose"] = line["choose_us"] / dense
        for name, line in times.items():
            chosen = values.get(f"{key}.{name}.choose", 0)
            values[f"{key}.{name}.layer"] = values[f"{key}.{name}.forward"] + chosen
            if "plan_us" in line:
                values[f"{key}.{name}.plan"] = line["plan_us"] / 1e3
    return values


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    print(json.dumps(summarise(parser.parse_args().results), indent=1))


if __name__ == "__main__":
    main()
