# SPDX-License-Identifier: MIT
"""Summaries of made-up lines, whose numbers are known; and the report held to the lines that are there."""

import itertools
import json
import re

import figures
import numpy as np
import pictures
import pytest
import report
import sparseattn as sa
import summary
import tables

NAMES = ("sink_window", "xref", "block_topk_32_mean")


def span(right, nll):
    return {"count": 3, "right": right, "nll": nll}


def document_lines(number, tokens=2048, budget=224, **deltas):
    """Those of a document that was read with some patterns; markdown and html have the same pages."""
    kind, name = ("markdown", "html", "novel")[number % 3], ("{}.md", "{}.html", "part_{}")[number % 3]
    facts = {"kind": kind, "document": name.format(number // 3), "tokens": tokens, "seed": 0, "arithmetic": "float32"}
    spans = {label: span(0.8, 1.0) for label in summary.LABELS}
    dense = {"id": f"{number}/{tokens}/dense", "pattern": "dense", "nll": 2.0, "far_share": 0.15, "spans": spans}
    lines = [facts | dense]
    for name, delta in deltas.items():
        lines.append(
            facts
            | {
                "id": f"{number}/{tokens}/{budget}/{name}",
                "pattern": name,
                "budget": budget,
                "delta_nll": delta,
                "nll": 2 + delta,
                "kl": delta,
                "output_error": 0.3 + delta,
                "mass": 0.9 - delta,
                "far_mass": 0.1 - delta / 20,
                "right": 0.5,
                "same": 0.9,
                "check": 1e-7,
                "spans": {label: span(0.6 if name == "xref" else 0.4, 1.5) for label in summary.LABELS},
            }
        )
    return lines


def add_lines(folder, stage, lines):
    with open(folder / f"{stage}.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def folder(tmp_path):
    """Ten documents of three kinds: xref costs 0.1 to 0.19, sink + window twice that, block top-k 0.05 more. The oracle
    has read two of them. With fewer keys and more tokens all lose more."""
    for number in range(10):
        small = 0.01 * number
        losses = dict(zip(NAMES, (0.2 + 2 * small, 0.1 + small, 0.15 + small)))
        losses |= {"oracle": 0.01} if number < 2 else {}
        add_lines(tmp_path, "s1", document_lines(number, **losses))
        if number < 4:
            for tokens, budget in ((2048, 128), (4096, 224), (4096, 128)):
                more = {name: loss + 1 for name, loss in losses.items() if name != "oracle"}
                add_lines(tmp_path, "s1", document_lines(number, tokens, budget, **more))
        add_lines(
            tmp_path,
            "tune",
            [
                {"kind": "novel", "document": number, "pattern": name, "delta_nll": 0.1 + (name != NAMES[2])}
                for name in summary.patterns.TOPK
            ],
        )
    for number, task, length in itertools.product(range(5), ("definition", "paraphrase"), (2048, 4096)):
        for name in ("dense", *NAMES):
            right = [1, int(name in ("dense", "xref"))]
            found = {"right": right, "nll": [1, 1], "choice": right[::-1] if task == "paraphrase" else []}
            facts = {"kind": task, "seed": number, "length": length, "tokens": length - 7, "pattern": name}
            add_lines(tmp_path, "s2", [facts | {"id": f"{task}{number}{length}{name}", "spans": {task: found}}])
    for seed, (number, name) in itertools.product(range(2), enumerate(("dense", "sink_window", "xref"))):
        held_out = [2 + 0.1 * number + 0.01 * number * file for file in range(6)]
        run = {"pattern": name, "seed": seed, "held_out": held_out, "nll": sum(held_out) / 6 + 0.02 * seed}
        shape = {"parameters": 100, "steps": 30, "seq": 8, "batch": 2, "budget": 4}
        run |= {"curve": [[step, 5 - step / 10 + seed] for step in range(30)]}
        add_lines(tmp_path, "s3", [run | shape | {"id": f"{name}{seed}"}])
    return tmp_path


def test_summary_of_known_lines(folder):
    values = summary.summarise(folder)
    assert values["tune.best"] == NAMES[2] and values["tune.block_topk_32_mean.delta"] == pytest.approx(0.1)
    assert values["s1.xref.delta"] == pytest.approx(0.145) and values["s1.documents"] == 10
    assert values["s1.xref.percent"] == pytest.approx(100 * (np.exp(0.145) - 1))
    assert values["s1.xref.percent.low"] < values["s1.xref.percent"] < values["s1.xref.percent.high"]
    assert values["s1.xref.html"] == pytest.approx(0.14) and values["s1.xref.far.delta"] == pytest.approx(0.5)
    assert values["s1.kind.html.documents"] == 3 and "s1.oracle.delta" not in values
    assert values["s1.vs.sink_window.difference"] == pytest.approx(0.145) and values["s1.vs.sink_window.wins"] == 10
    assert values["s1.vs.block_topk.difference"] == pytest.approx(0.05)
    assert values["s1.vs.block_topk.far"] == pytest.approx(0.2) == values["s1.vs.sink_window.far"]
    # All patterns beside each other: two documents.
    assert values["more.documents"] == 2 and values["more.xref.delta"] == pytest.approx(0.105)
    assert values["more.vs.oracle.difference"] == pytest.approx(-0.095)
    assert values["more.topk.oracle"] == pytest.approx(-0.145)
    assert values["s1.vs.block_topk.p"] == pytest.approx(2 / 1024)
    assert values["s1.vs.block_topk.p_holm"] == pytest.approx(4 / 1024)
    assert values["s1.vs.block_topk.cliff"] == pytest.approx(0.75, abs=0.06)  # 10 of 100 pairs go the other way, 5 tie
    assert values["s1.kind.html.vs.block_topk.p"] == 2 / 8 and values["s1.kind.html.vs.block_topk.p_holm"] == 1
    assert values["more.patterns"] == 4 and values["more.proxy.mass"] == pytest.approx(-1)
    assert values["more.proxy.kl"] == pytest.approx(1)


def test_formats_of_a_page_are_one_unit(folder):
    """Documents 0, 1, 3, 4, 6, 7 are three pages in two formats, 9 is a page of which html is missing."""
    values = summary.summarise(folder)
    assert values["s1.vs.sink_window.pages"] == 4 + 3 and values["s1.vs.sink_window.pages_p"] == 2 / 2**7
    differences = [np.mean([0.1 + 0.01 * one for one in page]) for page in ([0, 1], [3, 4], [6, 7], [9], [2], [5], [8])]
    assert values["s1.vs.sink_window.pages_difference"] == pytest.approx(np.mean(differences))


def test_lengths_and_budgets(folder):
    values = summary.summarise(folder)
    assert values["s1.length.2048.documents"] == 10 and values["s1.length.4096.documents"] == 4
    assert values["s1.length.2048.xref.delta"] == pytest.approx(0.145)
    assert values["s1.length.4096.block_topk.difference"] == pytest.approx(0.05)
    assert values["s1.length.4096.block_topk.pages"] == 3, "0 and 1 are two formats of a page"
    # Beside the four documents of 4,096 tokens the same four of 2,048.
    assert values["s1.longer.4096.documents"] == 4 and "s1.longer.2048.documents" not in values
    assert values["s1.longer.4096.sink_window.before"] == pytest.approx(0.115)
    assert values["s1.longer.4096.sink_window.change"] == pytest.approx(0)
    # Those of a length that were read with both budgets, and no others.
    assert values["s1.size.2048.224.documents"] == values["s1.size.2048.128.documents"] == 4
    assert values["s1.size.2048.224.xref.delta"] == pytest.approx(0.115)
    assert values["s1.size.2048.128.xref.percent"] == pytest.approx(100 * (np.exp(1.115) - 1))
    assert values["s1.size.4096.128.sink_window.wins"] == 4 and "s1.size.2048.224.oracle.delta" not in values
    made = tables.tables(values)
    assert [line.split(" | ")[:3] for line in made["sizes"][2:]] == [
        [f"| {tokens}", "4", str(budget)] for tokens in (2048, 4096) for budget in (128, 224)
    ]
    assert [line.split(" | ")[:2] for line in made["lengths"][2:]] == [["| 2048", "10"], ["| 4096", "4"]]


def test_budgets_compare_by_patterns_that_all_of_them_have(folder):
    """With 128 keys three documents were read without n-grams alone, and two of them with longer spans."""
    for number in range(3):
        more = {"xref_long_spans": 0.1} if number < 2 else {}
        add_lines(folder, "s1", document_lines(number, xref_ngrams=0.3, xref_long_spans=0.05))
        add_lines(folder, "s1", document_lines(number, 2048, 128, **more))
    values = summary.summarise(folder)
    assert values["s1.length.2048.documents"] == 3 and "s1.length.2048.xref_long_spans.delta" not in values
    assert values["s1.size.2048.128.documents"] == values["s1.size.2048.224.documents"] == 2
    assert values["s1.size.2048.128.xref_long_spans.delta"] == pytest.approx(0.1)
    assert "s1.size.2048.224.xref_ngrams.delta" not in values
    assert values["s1.size.2048.224.against.xref_long_spans.difference"] == pytest.approx(0.105)
    made = tables.tables(values)["sizes"]
    assert "`xref_long_spans`" in made[0] and made[2].count(" |") == made[0].count(" |")
    assert " |  |" in made[4], "no longer spans at 4,096 tokens"


def test_long_documents(folder):
    for number in range(5):
        small = 0.01 * number
        losses = {"xref": 0.3 + small, "xref_long_spans": 0.2, NAMES[2]: 0.25, "sink_window": 0.9}
        add_lines(folder, "s1", document_lines(number, 8192, **losses))
    values = summary.summarise(folder)
    assert values["long.documents"] == 5 and values["long.against.xref.difference"] == pytest.approx(0.12)
    assert values["long.against.block_topk.wins"] == 5 and values["s1.length.8192.documents"] == 5
    assert values["s1.documents"] == 10, "documents of 2,048 tokens"
    assert values["long.against.xref.pages"] == 3 and values["long.against.xref.pages_p"] == 2 / 2**3
    assert values["long.against.xref.pages_difference"] == pytest.approx((0.105 + 0.12 + 0.135) / 3)
    assert values["long.kind.html.against.xref.difference"] == pytest.approx((0.11 + 0.14) / 2)
    assert values["s1.longer.8192.documents"] == 5
    assert values["s1.longer.8192.block_topk.change"] == pytest.approx(-0.07 - 0.05)
    made = tables.tables(values)
    assert [row.split(" | ")[0] for row in made["long"][2:]] == ["| `xref`", "| `block_topk`", "| `sink_window`"]
    assert made["long"][0].endswith("| p of pages |") and "pages" not in made["confirm"][0]
    assert [row.split(" | ")[0] for row in made["long_kinds"][4:]] == [
        *(f"| `{name}`" for name in ("xref_long_spans", "block_topk", "xref", "sink_window")),
        *(f"| `{name}` loses more by" for name in ("xref", "block_topk")),
    ]


def test_answers_and_training(folder):
    values = summary.summarise(folder)
    assert values["s2.definition.xref.right"] == 1 and values["s2.definition.sink_window.right"] == 0.5
    assert values["s2.definition.questions"] == 20 and values["s2.definition.2048.questions"] == 10
    assert values["s2.definition.sink_window.behind"] == values["s2.definition.sink_window.behind.low"] == 0.5
    assert values["s2.definition.sink_window.p"] == pytest.approx(2 / 1024)
    assert values["s2.definition.sink_window.p_holm"] == pytest.approx(8 / 1024)  # two tasks, two rivals
    assert values["s2.paraphrase.sink_window.written"] == 0.5 and "s2.definition.xref.written" not in values
    assert values["s3.xref.nll"] == pytest.approx(2.26) and values["s3.xref.delta"] == pytest.approx(0.25)
    assert values["s3.sink_window.difference"] == pytest.approx(-0.125) and values["s3.files"] == 6
    assert values["s3.sink_window.difference.seeds"] == pytest.approx([-0.125, -0.125])
    assert values["s3.sink_window.p"] == pytest.approx(2 / 64) and values["s3.sink_window.wins"] == 0
    assert "s3.sink_window.p_holm" not in values  # of two comparisons, one is not there
    assert values["s3.xref.curve"][:2] == [[0, 5.5], [1, 5.4]] and values["s3.tokens"] == 480
    assert [line.split(" | ")[0] for line in tables.tables(values)["training"][2:]] == [
        f"| `{name}`" for name in ("dense", "sink_window", "xref")
    ]


def test_trainings_of_several_lengths(folder):
    """What has most patterns is what the report is about; the block top-k that tuning chose is called so."""
    shape = {"parameters": 100, "seq": 8, "batch": 2, "budget": 4, "seed": 0}
    for steps, names in ((60, ("xref", "dense")), (10, ("xref", "dense", "sink_window", NAMES[2]))):
        for number, name in enumerate(names):
            held_out = [steps + number + file for file in range(3)]
            run = {"pattern": name, "held_out": held_out, "nll": held_out[1], "curve": [[0, 5.0]], "steps": steps}
            add_lines(folder, "s3", [run | shape | {"id": f"{steps}{name}"}])
    values = summary.summarise(folder)
    assert values["s3.steps"] == 10 and values["s3.block_topk.difference"] == 3
    assert values["s3.block_topk.p_holm"] == 2 * values["s3.block_topk.p"] == 2 * 2 / 8
    assert values["s3.length.60.xref.nll"] == 61 and values["s3.length.60.xref.delta"] == -1
    assert values["s3.length.30.xref.nll"] == pytest.approx(2.26)
    rows = [line.strip("| ").split(" | ")[:3] for line in tables.tables(values)["training_lengths"][2:]]
    assert [steps for steps, _, _ in rows] == ["10"] * 4 + ["30"] * 3 + ["60"] * 2
    assert rows[0] == ["10", "`xref`", "1"] and rows[-1] == ["60", "`dense`", "1"]


def test_adaptation_of_known_lines(folder):
    shape = {"device": "cpu", "seq": 8, "batch": 1, "budget": 4, "steps": 5}
    for seed, (number, name) in itertools.product(range(3), enumerate(("dense", "xref", NAMES[2]))):
        before, after = [2.0 + number, 3.0 + number], [1.0 + number / 4, 2.0 + number / 4]
        run = {"pattern": name, "seed": seed, "held_out_before": before, "held_out": after}
        run |= {"nll_before": 2.5 + number, "nll": 1.5 + number / 4}
        add_lines(folder, "adapt", [run | shape | {"id": f"adapt/{name}/{seed}"}])
    values = summary.summarise(folder)
    assert values["adapt.before.xref.delta"] == 1 and values["adapt.after.xref.delta"] == 0.25
    assert values["adapt.after.block_topk.difference"] == 0.25 and values["adapt.files"] == 2
    rows = [line.strip("| ").split(" | ") for line in tables.tables(values)["adaptation"][2:]]
    assert [row[:4] for row in rows][1] == ["`xref`", "3", "3.500", "1.750"]
    spreads = ["+2.000 [+2.000, +2.000]", "+0.500 [+0.500, +0.500]", "25", "+0.250 [+0.250, +0.250]"]
    assert rows[2][4:9] == [*spreads, "+0.250, +0.250, +0.250"] and values["adapt.xref.left"] == 25


def test_speed_of_known_lines(folder):
    """Torch's dense attention is the faster one at 4096 tokens, the library's at 2048."""
    facts = {"device": "cpu", "machine": "some CPU", "threads": 2, "dtype": "float32", "batch": 1, "budget": 224}
    facts |= {"heads_q": 9, "heads_kv": 3, "head_dim": 64}
    for tokens, sdpa in ((2048, 200), (4096, 50)):
        times = {"dense": (100, 200), "sdpa": (sdpa, 400), "xref": (25, 50), NAMES[2]: (75, 100)}
        for name, (forward, backward) in times.items():
            line = {"id": f"{name}{tokens}", "pattern": name, "tokens": tokens, "plan_us": 3000.0}
            line |= {"choose_us": 30} if name == NAMES[2] else {}
            add_lines(folder, "speed", [facts | line | {"forward_us": forward, "backward_us": backward}])
    values = summary.summarise(folder)
    assert values["speed.cpu.2048.xref.forward"] == 0.25 and values["speed.cpu.4096.xref.forward"] == 0.5
    assert values["speed.cpu.4096.xref.backward"] == 0.25 and values["speed.cpu.4096.dense.forward"] == 2
    assert values["speed.cpu.2048.block_topk.layer"] == pytest.approx(1.05)
    assert tables.tables(values)["speed"][2:] == [
        "| some CPU | 2,048 | 1 | 0.10 / 0.20 | 0.25 / 0.25 | 0.75+0.30 / 0.50 | 3.0 |",
        "| some CPU | 4,096 | 1 | 0.05 / 0.20 | 0.50 / 0.25 | 1.50+0.60 / 0.50 | 3.0 |",
    ]


def test_means_are_of_the_same_documents(folder):
    """A run that was stopped has read a document with some patterns: it does not count yet."""
    lines = (folder / "s1.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["id"] != "9/2048/224/xref"]
    (folder / "s1.jsonl").write_text("\n".join(kept) + "\n")
    values = summary.summarise(folder)
    assert values["s1.documents"] == 9
    assert values["s1.sink_window.delta"] == pytest.approx(0.28)


def test_longer_spans_have_documents_of_their_own(folder):
    (folder / "confirm").mkdir()
    for number in range(6):
        losses = {"xref": 0.2 + 0.01 * number, "xref_long_spans": 0.1, "block_topk_32_mean": 0.11 - 0.01 * number}
        add_lines(folder / "confirm", "s1", document_lines(number, **losses))
    values = summary.summarise(folder)
    assert values["confirm.documents"] == 6 and values["s1.documents"] == 10
    assert (
        values["confirm.against.xref.difference"] == pytest.approx(0.125) and values["confirm.against.xref.wins"] == 6
    )
    assert values["confirm.against.xref.p_holm"] == 2 * values["confirm.against.xref.p"] == 4 / 2**6
    assert values["confirm.against.block_topk.wins"] == 1
    assert len(tables.tables(values)["confirm"]) == 4
    (folder / "ablations").mkdir()
    for number in range(4):
        read = {"xref": 0.1, "xref_blocks_16": 0.3, "xref_blocks_64": 0.6} | ({"oracle": 0.02} if number else {})
        add_lines(folder / "ablations", "s1", document_lines(number, **read))
    values = summary.summarise(folder)
    assert values["blocks.documents"] == 4 and values["blocks.against.xref_blocks_64.difference"] == pytest.approx(0.5)
    assert [row.split(" | ")[0] for row in tables.tables(values)["blocks"][2:]] == [
        "| `xref_blocks_16`",
        "| `xref_blocks_64`",
    ]
    assert values["oracle.documents"] == 3 and values["oracle.against.xref.difference"] == pytest.approx(0.08)


def test_report_is_written_from_names(folder):
    values = summary.summarise(folder)
    text = "costs <!--s1.xref.percent .1f-->9<!--/--> %, best <!--tune.best s-->?<!--/-->\n"
    text += "<!--table s1-->\nold\n<!--/table-->\n"
    right = report.render(text, values)
    assert f"-->{values['s1.xref.percent']:.1f}<!--/-->" in right and "block_topk_32_mean<!--/-->" in right
    assert "| `xref` | 15.6 [" in right and "old" not in right and report.render(right, values) == right
    with pytest.raises(KeyError):
        report.render("<!--s1.nothing .1f-->1<!--/-->", values)
    assert report.loose_numbers("xref costs 3.5 nats") and report.loose_numbers("loses 12 %")
    assert not report.loose_numbers(right.replace(" %", "")) and not report.loose_numbers(
        "at 224 keys, arXiv:2401.14727"
    )


def test_figures_are_the_same_twice(folder, tmp_path):
    values = summary.summarise(folder)
    values["speed.cpu.machine"] = "some CPU"
    for tokens, share in ((2048, 0.5), (4096, 0.3)):
        key = f"speed.cpu.{tokens}"
        values |= {f"{key}.batch": 1, f"{key}.xref.layer": share, f"{key}.xref.backward": share / 2}
    paths = figures.draw_all(values, tmp_path / "one")
    assert [path.stem for path in paths] == [
        "losses",
        "kinds",
        "budgets",
        "mass",
        "identifiers",
        "answers",
        "training",
        "speed",
    ]
    again = figures.draw_all(values, tmp_path / "two")
    for one, other in zip(paths, again):
        assert one.read_bytes() == other.read_bytes() and len(one.read_bytes()) > 2000
    assert figures.draw_all({}, tmp_path / "none") == []


def test_pictures_are_the_same_twice(tmp_path):
    paths = pictures.draw_all(tmp_path / "one")
    assert [path.stem for path in paths] == ["row", "masks"]
    for one, other in zip(paths, pictures.draw_all(tmp_path / "two")):
        assert one.read_bytes() == other.read_bytes() and len(one.read_bytes()) > 20_000


def test_keys_of_a_row_are_told_apart():
    """The query's xyz stands behind a space, as once before, and once behind a bracket; gamma was used just now."""
    words, budget = pictures.Words(), pictures.ROW["budget"]
    text = (
        "one two three four five six (xyz: alpha.beta\n"
        + "1 2 3 4 5 6 7 8 9 " * 2
        + "gamma = 1\n"
        + "+ - * / % & " * 20
        + "8 - xyz[3]\n"
        + "! ? ^ ~ " * 20
        + "gamma, xyz"
    )
    ids = words.ids(text)
    found = pictures.links(ids, sa.symbols_of(words, ids), len(ids) - 1)
    keys = sorted(key for some in found.values() for key in some)
    assert len(set(keys)) == len(keys) == budget
    texts = {name: words.decode(ids[some].tolist()) for name, some in found.items()}
    assert "(xyz: alpha" in texts["open identifier"] and texts["last tokens"].startswith("xyz[3]")
    assert "gamma =" in texts["recent identifiers"] and texts["window"].endswith("gamma, ") and texts["query"] == "xyz"
    row = sa.xref(ids, sa.symbols_of(words, ids), **pictures.ROW).to_mask(len(ids))[0, 0, -1]
    assert keys == np.flatnonzero(row).tolist()


# ---- the report and the appendix that are there ----


@pytest.fixture(scope="module", params=report.PAPERS, ids=lambda paper: paper.stem)
def paper(request):
    return request.param.read_text()


def test_papers_agree_with_the_results(paper):
    assert report.render(paper, summary.summarise()) == paper, "run bench/quality/report.py"
    assert len(report.NUMBER.findall(paper)) > 10 and report.TABLE.findall(paper)


def test_every_number_names_its_result(paper):
    assert report.loose_numbers(paper) == []


def test_figures_of_the_papers_are_there(paper):
    named = re.findall(r"!\[[^]]*\]\(([^)]+)\)", paper)
    assert named and all((report.FOLDER / name).is_file() for name in named)
    assert named == [f"figures/{name}.svg" for name in report.figures_of(paper)]


def test_the_report_points_at_all_of_the_appendix():
    parts = re.findall(r"^## (\w) ", report.APPENDIX.read_text(), flags=re.M)
    pointers = set(re.findall(r"\[([A-Z])\]\(" + report.APPENDIX.name + r"\)", report.REPORT.read_text()))
    assert parts == sorted(parts) and pointers == set(parts)
    assert f"]({report.REPORT.name})" in report.APPENDIX.read_text()


def test_the_report_has_four_to_six_pages():
    """References and all: pages of 550 words, of 50 lines of a table, or of figures 6.5 inches wide and 9 high."""
    text = report.REPORT.read_text()
    prose = re.sub(r"!\[.*?\]\(.*?\)|<!--.*?-->", "", report.TABLE.sub("", text))
    lines = sum(match[0].count("\n|") for match in report.TABLE.finditer(text))
    shapes = [size_of(report.FOLDER / "figures" / f"{name}.svg") for name in report.figures_of(text)]
    inches = sum(6.5 * height / max(width, 6.5 * 72) for width, height in shapes)
    assert 4 <= len(re.findall(r"\S*\w\S*", prose)) / 550 + lines / 50 + inches / 9 <= 6


def size_of(picture):
    """Width and height in points."""
    return [float(side) for side in re.search(r'viewBox="0 0 (\S+) (\S+)"', picture.read_text()).groups()]
