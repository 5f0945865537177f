# SPDX-License-Identifier: MIT
"""Stage by stage, what is read with which patterns. S3, which trains, has a file of its own."""

import patterns
import tasks
from lines import mean_losses, read_lines
from study import identifier_spans, means, measure

MAIN = ["sink_window", "xref", "block_topk", "xref_ngrams"]  # in the order in which a run that is cut short needs them
MORE = ["strided", "bigbird", "longnet", "longformer", "same_identifier", "code_memory", "outline", "window"]
MORE += ["xref_identifiers", "xref_all_links", "xref_no_stop", "xref_short_spans", "xref_long_spans"]
MORE += ["xref_blocks_16", "xref_blocks_64"]


def best_topk(path):
    """The block top-k that lost least on the tuning documents. Raises SystemExit where tuning is not done."""
    losses = mean_losses(read_lines(path), patterns.TOPK)[1]
    if not losses:
        raise SystemExit(f"{path} has no document that was read with every block top-k: run --stage tune first")
    return min(losses, key=losses.get)


def named(names, path):
    """block_topk under the name of what tuning chose, whose lines are in the file."""
    return [best_topk(path) if name == "block_topk" else name for name in names]


def in_turn(documents):
    """One document of each kind, then the next of each: a run that is cut short has some of all."""
    place, keyed = {}, []
    for document in documents:
        place[document.kind] = place.get(document.kind, 0) + 1
        keyed.append((place[document.kind], document))
    return [document for _, document in sorted(keyed, key=lambda pair: pair[0])]


def read_documents(stage, subject, documents, tokens, budgets, names, results, progress):
    """Tuning and S1: beginnings of documents, of which all behind the first quarter is judged."""
    wanted = [(budget, name) for budget in budgets for name in names]
    for number, document in enumerate(documents):
        encoded = subject.tokenizer.encode(document.text)
        facts = {
            "id": f"{stage}/{document.kind}/{document.name}/{tokens}",
            "stage": stage,
            "kind": document.kind,
            "document": document.name,
            "sha256": document.sha256,
            "seed": 0,
        }
        spans = identifier_spans(document.text, encoded.offsets[:tokens], tokens // 4)
        measure(subject, encoded.ids[:tokens], tokens // 4, wanted, spans, facts, results, shorten=means)
        progress(f"{tokens} tokens: {number + 1} of {len(documents)}, {document.kind} {document.name}")
    progress(f"{tokens} tokens: {len(documents)} documents were read", last=True)


def run_tasks(subject, seeds, tokens, budgets, names, results, progress):
    """S2: texts made from a seed, which end with questions about what stands far above."""
    wanted = [(budget, name) for budget in budgets for name in names]
    for seed in seeds:
        for task in tasks.TASKS:
            ids, spans, watched = tasks.make(task, seed, tokens, subject.tokenizer)
            facts = {"id": f"s2/{task}/{seed}/{tokens}", "stage": "s2", "kind": task, "seed": seed, "length": tokens}
            measure(subject, ids, min(span.begin for span in spans) - 1, wanted, spans, facts, results, watched)
        progress(f"{tokens} tokens, seed {seed}: {', '.join(tasks.TASKS)}")
