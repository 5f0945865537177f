# SPDX-License-Identifier: MIT
"""The report's tables in Markdown, made of the numbers of summary.py alone."""

import patterns
from summary import APART, BETTER, KINDS, LABELS, MAIN, OURS, RIVALS


def tables(values):
    """{name: lines of Markdown}."""
    made = (tune, s1, kinds, vs, vs_kinds, identifiers, more, more_kinds, confirm, blocks, order, oracle, code, long)
    made += (long_kinds, lengths, sizes, answers, answers_by_length, training, training_lengths, adaptation, speed)
    return {table.__name__: table(values) for table in made}


# ---- what there is ----


def found_patterns(values, form):
    """Names for which the number is there, cheapest first."""
    prefix, suffix = form.split("*")
    names = [key[len(prefix) : -len(suffix)] for key in values if key.startswith(prefix) and key.endswith(suffix)]
    return sorted((name for name in names if "." not in name), key=lambda name: values[f"{prefix}{name}{suffix}"])


def found_numbers(values, prefix, suffix=".documents"):
    """The numbers n, ascending, for which there is prefix.n and the suffix."""
    parts = [key[len(prefix) + 1 : -len(suffix)] for key in values if key.startswith(prefix) and key.endswith(suffix)]
    return sorted(int(part) for part in parts if part.isdigit())


def kinds_of(values):
    return [kind for kind in KINDS if f"s1.kind.{kind}.documents" in values]


def tasks_of(values):
    parts = [key.split(".") for key in values if key.startswith("s2.") and key.endswith(".texts")]
    return [task for _, task, *rest in parts if len(rest) == 1]


# ---- how it is written ----


def rows_of(head, rows):
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def plain(values, key, form=".3f"):
    return format(values[key], form) if key in values else ""


def spread(values, key, form=".3f"):
    """A number with its interval."""
    if key not in values:
        return ""
    return f"{values[key]:{form}} [{values[f'{key}.low']:{form}}, {values[f'{key}.high']:{form}}]"


def signed(values, key):
    return spread(values, key, "+.3f")


def by_seed(values, key):
    return ", ".join(f"{number:+.3f}" for number in values.get(f"{key}.seeds", []))


# ---- S1 ----


def tune(values):
    names = [name for name in patterns.TOPK if f"tune.{name}.delta" in values]
    return rows_of(["pattern", "Δ nll, nats"], [[f"`{name}`", plain(values, f"tune.{name}.delta")] for name in names])


def s1(values):
    return losses("s1", values)


def more(values):
    return losses("more", values)


def losses(key, values):
    """What each pattern costs in the mean of the documents."""
    head = ["pattern", "perplexity above dense, %", "Δ nll, nats", "more than `xref`, nats"]
    by_topk = key == "more"
    head += ["more than `block_topk`, nats"] * by_topk + ["KL", "output error", "mass", "far mass"]
    rows = []
    for name in found_patterns(values, f"{key}.*.percent"):
        row = [f"`{name}`", spread(values, f"{key}.{name}.percent", ".1f"), plain(values, f"{key}.{name}.delta")]
        row += [signed(values, f"{key}.vs.{name}.difference")] + [signed(values, f"{key}.topk.{name}")] * by_topk
        numbers = ("kl", "output_error", "mass", "far_mass")
        rows.append(row + [plain(values, f"{key}.{name}.{one}") for one in numbers])
    return rows_of(head, rows)


def kinds(values):
    return by_kind("s1", values)


def more_kinds(values):
    """Of those that beat a sink and a window, and of these."""
    names = found_patterns(values, "more.*.percent")
    return by_kind("more", values, names[: names.index("sink_window") + 1] if "sink_window" in names else names)


def by_kind(key, values, names=None, differences=None):
    found = [kind for kind in KINDS if f"{key}.kind.{kind}.documents" in values]
    rows = [
        ["documents", *(plain(values, f"{key}.kind.{kind}.documents", "d") for kind in found)],
        ["dense: nll", *(plain(values, f"{key}.kind.{kind}.nll") for kind in found)],
    ]
    for name in names or found_patterns(values, f"{key}.*.percent"):
        rows.append([f"`{name}`", *(plain(values, f"{key}.{name}.{kind}") for kind in found)])
    for name, form in (differences or {}).items():
        rows.append([f"`{name}` loses more by", *(signed(values, form.format(kind)) for kind in found)])
    return rows_of(["Δ nll, nats", *found], rows if found else [])


def vs(values):
    head = ["against `xref`", "documents", "loses more by, nats", "p (signed ranks)", "p (Holm)", "Cliff's δ"]
    head += ["`xref` better", "pages", "loses more by, pages", "p of pages"]
    rows = []
    for name in RIVALS:
        key = f"s1.vs.{name}"
        if f"{key}.p" in values:
            row = [f"`{name}`", str(values["s1.documents"]), signed(values, f"{key}.difference")]
            row += [plain(values, f"{key}.p", ".1e"), plain(values, f"{key}.p_holm", ".1e")]
            row += [plain(values, f"{key}.cliff", "+.2f"), str(values[f"{key}.wins"]), str(values[f"{key}.pages"])]
            rows.append([*row, signed(values, f"{key}.pages_difference"), plain(values, f"{key}.pages_p", ".1e")])
    return rows_of(head, rows)


def confirm(values):
    """Longer spans, on documents that had not been read when they were seen to be better."""
    return apart(values, "confirm")


def blocks(values):
    """xref in whole blocks of keys."""
    return apart(values, "blocks")


def order(values):
    """xref whose links are appended in another order."""
    return apart(values, "order")


def oracle(values):
    """The keys of the largest weights."""
    return apart(values, "oracle")


def code(values):
    """What the calls of code link, on code alone."""
    return apart(values, "code")


def long(values):
    """Longer spans, on long documents."""
    return apart(values, "long", pages=True)


def long_kinds(values):
    """With the differences from longer spans."""
    rivals = [name for name in (OURS, "block_topk") if f"long.against.{name}.p" in values]
    return by_kind("long", values, differences={name: f"long.kind.{{}}.against.{name}.difference" for name in rivals})


def apart(values, prefix, pages=False):
    _, _, ours, rivals = APART[prefix]
    head = [f"against `{ours}`", "documents", "loses more by, nats", "p (signed ranks)", "p (Holm)", f"`{ours}` better"]
    head += ["pages", "loses more by, pages", "p of pages"] * pages
    rows = []
    for name in rivals:
        key = f"{prefix}.against.{name}"
        if f"{key}.p" in values:
            row = [f"`{name}`", str(values[f"{prefix}.documents"]), signed(values, f"{key}.difference")]
            rows.append(row + [plain(values, f"{key}.{one}", ".1e") for one in ("p", "p_holm")])
            rows[-1].append(str(values[f"{key}.wins"]))
            if pages:
                rows[-1] += [str(values[f"{key}.pages"]), signed(values, f"{key}.pages_difference")]
                rows[-1].append(plain(values, f"{key}.pages_p", ".1e"))
    return rows_of(head, rows)


def vs_kinds(values):
    names = [name for name in RIVALS if f"s1.vs.{name}.p" in values]
    head = ["kind", "documents"]
    for name in names:
        head += [f"`{name}` loses more by, nats", "p (Holm)", "`xref` better"]
    rows = []
    for kind in kinds_of(values):
        row = [kind, plain(values, f"s1.kind.{kind}.documents", "d")]
        for name in names:
            key = f"s1.kind.{kind}.vs.{name}"
            row += [signed(values, f"{key}.difference"), plain(values, f"{key}.p_holm", ".2g")]
            row += [plain(values, f"{key}.wins", "d")]
        rows.append(row)
    return rows_of(head, rows)


def identifiers(values):
    head = ["share read right", *(f"{label} ({values.get(f's1.{OURS}.{label}.count', 0)})" for label in LABELS)]
    rows = []
    if f"s1.{OURS}.delta" in values:
        rows.append(["dense", *(plain(values, f"s1.{OURS}.{label}.dense_right") for label in LABELS)])
    for name in found_patterns(values, "s1.*.percent"):
        rows.append([f"`{name}`", *(plain(values, f"s1.{name}.{label}.right") for label in LABELS)])
    return rows_of(head, rows)


def lengths(values):
    """All documents of each length, with the budget of the study."""
    head = ["tokens", "documents", *(f"`{name}`: Δ nll" for name in MAIN)]
    head += [f"`{name}` loses more than `xref` by" for name in RIVALS]
    head += ["pages", "`block_topk` loses more than `xref` by, pages"]
    rows = []
    for tokens in found_numbers(values, "s1.length"):
        key = f"s1.length.{tokens}"
        row = [str(tokens), str(values[f"{key}.documents"])]
        row += [plain(values, f"{key}.{name}.delta") for name in MAIN]
        row += [signed(values, f"{key}.{name}.difference") for name in RIVALS]
        row.append(plain(values, f"{key}.block_topk.pages", "d"))
        rows.append([*row, signed(values, f"{key}.block_topk.pages_difference")])
    return rows_of(head, rows)


def sizes(values):
    """Each length and budget, the documents of a length being the same for all of its budgets."""
    sized = [key for key in values if key.startswith("s1.size.")]
    names = [name for name in (*MAIN, BETTER) if any(f".{name}.percent" in key for key in sized)]
    head = ["tokens", "documents", "keys", *(f"`{name}`" for name in names)]
    head += [f"`block_topk` loses more than `{name}` by, nats" for name in (OURS, BETTER)]
    rows = []
    for tokens in found_numbers(values, "s1.length"):
        for budget in found_numbers(values, f"s1.size.{tokens}"):
            key = f"s1.size.{tokens}.{budget}"
            row = [str(tokens), str(values[f"{key}.documents"]), str(budget)]
            row += [plain(values, f"{key}.{name}.percent", ".1f") for name in names]
            row.append(signed(values, f"{key}.block_topk.difference"))
            rows.append([*row, signed(values, f"{key}.against.{BETTER}.difference")])
    return rows_of(head, rows)


# ---- S2 and S3 ----


def answers(values):
    names = ("dense", *(name for name in MAIN if any(key.startswith("s2.") and f".{name}." in key for key in values)))
    head = ["task", "questions", *(f"`{name}`" for name in names)]
    head += [part for name in RIVALS for part in (f"`{name}` behind `xref` by", "p (Holm)")]
    rows = []
    for task in tasks_of(values):
        key = f"s2.{task}"
        row = [task, str(values[f"{key}.questions"]), *(plain(values, f"{key}.{name}.right") for name in names)]
        for name in RIVALS:
            row += [signed(values, f"{key}.{name}.behind"), plain(values, f"{key}.{name}.p_holm", ".2g")]
        rows.append(row)
    return rows_of(head, rows)


def answers_by_length(values):
    names = ("dense", *(name for name in MAIN if any(key.startswith("s2.") and f".{name}." in key for key in values)))
    rows = []
    for task in tasks_of(values):
        for length in found_numbers(values, f"s2.{task}", ".texts"):
            key = f"s2.{task}.{length}"
            row = [task, str(length), str(values[f"{key}.questions"])]
            rows.append(row + [plain(values, f"{key}.{name}.right") for name in names])
    return rows_of(["task", "tokens", "questions", *(f"`{name}`" for name in names)], rows)


def training(values):
    return rows_of(["pattern", *TRAINED], rows_of_runs(values, "s3"))


def training_lengths(values):
    """Of trainings of several lengths, each with its patterns."""
    lengths = sorted({int(key.split(".")[2]) for key in values if key.startswith("s3.length.")})
    rows = [[f"{length:,}", *row] for length in lengths for row in rows_of_runs(values, f"s3.length.{length}")]
    return rows_of(["steps", "pattern", *TRAINED], rows)


TRAINED = ["seeds", "nll of held-out files", "least and most of seeds", "above dense, nats"]
TRAINED += ["perplexity above dense, %", "more than `xref`, nats", "of each seed", "p (Holm)"]


def rows_of_runs(values, prefix):
    rows = []
    for name in found_patterns(values, f"{prefix}.*.nll"):
        key = f"{prefix}.{name}"
        row = [f"`{name}`", str(values[f"{key}.seeds"]), plain(values, f"{key}.nll")]
        row += [f"{values[f'{key}.least']:.3f}, {values[f'{key}.most']:.3f}", signed(values, f"{key}.delta")]
        row += [spread(values, f"{key}.percent", ".1f"), signed(values, f"{key}.difference")]
        rows.append([*row, by_seed(values, f"{key}.difference"), plain(values, f"{key}.p_holm", ".0e")])
    return rows


def adaptation(values):
    head = ["pattern", "seeds", "nll before", "nll after", "above dense before, nats", "above dense after, nats"]
    rows = []
    for name in found_patterns(values, "adapt.after.*.nll"):
        before, after = f"adapt.before.{name}", f"adapt.after.{name}"
        row = [f"`{name}`", str(values[f"{after}.seeds"])]
        row += [plain(values, f"{before}.nll"), plain(values, f"{after}.nll")]
        row += [signed(values, f"{before}.delta"), signed(values, f"{after}.delta")]
        row += [plain(values, f"adapt.{name}.left", ".0f"), signed(values, f"{after}.difference")]
        rows.append([*row, by_seed(values, f"{after}.difference"), plain(values, f"{after}.p_holm", ".0e")])
    return rows_of([*head, "left, %", "more than `xref` after, nats", "of each seed", "p (Holm)"], rows)


# ---- speed ----


def speed(values):
    """Shares of the time of dense attention, forward and backward; of block top-k, forward and the choice before it."""
    names = [name for name in MAIN if any(key.endswith(f".{name}.backward") for key in values)]
    rows = []
    for device in ("cpu", "cuda"):
        for tokens in found_numbers(values, f"speed.{device}", ".batch"):
            key = f"speed.{device}.{tokens}"
            row = [values[f"speed.{device}.machine"], f"{tokens:,}", str(values[f"{key}.batch"])]
            dense = (values[f"{key}.{part}"] for part in ("forward", "backward"))
            row.append(" / ".join(f"{ms:.2f}" if ms < 10 else f"{ms:,.0f}" for ms in dense))
            for name in names:
                chosen = plain(values, f"{key}.{name}.choose", "+.2f")
                row.append(f"{plain(values, f'{key}.{name}.forward', '.2f')}{chosen} / ")
                row[-1] += plain(values, f"{key}.{name}.backward", ".2f")
            rows.append([*row, plain(values, f"{key}.{OURS}.plan", ".1f")])
    head = ["machine", "tokens", "texts", "dense: ms", *(f"`{name}`" for name in names), "plans of `xref`, ms"]
    return rows_of(head, rows)
