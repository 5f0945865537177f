# SPDX-License-Identifier: MIT
"""Summaries of made-up lines, whose numbers are known; and the report held to the lines that are there."""

import json
import re

import figures
import numpy as np
import pytest
import report
import summary

NAMES = ("sink_window", "xref", "block_topk_32_mean")


def span(right, nll):
    return {"count": 3, "right": right, "nll": nll}


@pytest.fixture
def folder(tmp_path):
    """Ten documents of two kinds: xref costs 0.1 to 0.19, sink + window twice that, block top-k 0.05 more."""
    common = {
        "tokens": 2048,
        "seed": 0,
        "kl": 0.2,
        "output_error": 0.3,
        "mass": 0.7,
        "far_mass": 0.1,
        "same": 0.9,
        "check": 1e-7,
        "budget": 224,
        "arithmetic": "float32",
    }
    lines, tuning, tasks = [], [], []
    for number in range(10):
        facts = {"kind": ("python", "novel")[number % 2], "document": str(number)}
        dense = {
            "id": f"{number}/dense",
            "pattern": "dense",
            "arithmetic": "float32",
            "tokens": 2048,
            "nll": 2.0,
            "far_share": 0.15,
        }
        lines.append(facts | dense | {"spans": {label: span(0.8, 1.0) for label in summary.LABELS}})
        for name, delta in zip(NAMES, (0.2 + 0.02 * number, 0.1 + 0.01 * number, 0.15 + 0.01 * number)):
            lines.append(
                facts
                | common
                | {
                    "id": f"{number}/{name}",
                    "pattern": name,
                    "delta_nll": delta,
                    "nll": 2 + delta,
                    "right": 0.5,
                    "spans": {label: span(0.6, 1.5) for label in summary.LABELS},
                }
            )
        for name in summary.patterns.TOPK:
            tuning.append(facts | {"pattern": name, "delta_nll": 0.1 + (name != NAMES[2])})
        for name in ("dense", *NAMES):
            right = [1, int(name in ("dense", "xref"))]
            tasks.append(
                {
                    "id": f"{number}{name}",
                    "kind": "definition",
                    "seed": number,
                    "tokens": 2048,
                    "pattern": name,
                    "spans": {"definition": {"right": right, "nll": [1, 1], "choice": []}},
                }
            )
    for stage, some in (("tune", tuning), ("s1", lines), ("s2", tasks)):
        (tmp_path / f"{stage}.jsonl").write_text("\n".join(map(json.dumps, some)) + "\n")
    return tmp_path


def test_summary_of_known_lines(folder):
    values = summary.summarise(folder)
    assert values["tune.best"] == NAMES[2] and values["tune.block_topk_32_mean.delta"] == pytest.approx(0.1)
    assert values["s1.xref.delta"] == pytest.approx(0.145) and values["s1.documents"] == 10
    assert values["s1.xref.loss"] == pytest.approx(100 * (np.exp(0.145) - 1))
    assert values["s1.xref.loss_low"] < values["s1.xref.loss"] < values["s1.xref.loss_high"]
    assert values["s1.xref.python"] == pytest.approx(0.14) and values["s1.xref.far.delta"] == pytest.approx(0.5)
    assert values["s1.vs.sink_window.difference"] == pytest.approx(0.145) and values["s1.vs.sink_window.wins"] == 10
    assert values["s1.vs.block_topk.difference"] == pytest.approx(0.05)
    assert values["s1.vs.block_topk.p"] == pytest.approx(2 / 1024)
    assert values["s1.vs.block_topk.p_holm"] == pytest.approx(4 / 1024)
    assert values["s1.vs.block_topk.cliff"] == pytest.approx(0.75, abs=0.06)  # 10 of 100 pairs go the other way, 5 tie
    assert values["s2.definition.xref.right"] == 1 and values["s2.definition.sink_window.right"] == 0.5
    assert values["s2.definition.sink_window.right.p"] == pytest.approx(2 / 1024)


def test_means_are_of_the_same_documents(folder):
    """A run that was stopped has read a document with some patterns: it does not count yet."""
    lines = (folder / "s1.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["id"] != "9/xref"]
    (folder / "s1.jsonl").write_text("\n".join(kept) + "\n")
    values = summary.summarise(folder)
    assert values["s1.documents"] == values["s1.sink_window.documents"] == values["s1.xref.documents"] == 9
    assert values["s1.sink_window.delta"] == pytest.approx(0.28) and len(values["s1.lines"]) == 4 * 9
    assert summary.tables(values)["documents"][2].startswith("| novel: 1 | `dense` | 2.000 |  |")


def test_another_budget_or_length_is_another_study(folder):
    other = json.loads((folder / "s1.jsonl").read_text().splitlines()[1]) | {"budget": 320, "delta_nll": 9, "id": "x"}
    with open(folder / "s1.jsonl", "a") as file:
        file.write(json.dumps(other) + "\n")
    assert summary.summarise(folder)["s1.sink_window.delta"] < 1


def test_report_is_written_from_names(folder):
    values = summary.summarise(folder)
    text = "costs <!--s1.xref.loss .1f-->9<!--/--> %, best <!--tune.best s-->?<!--/-->\n"
    text += "<!--table s1-->\nold\n<!--/table-->\n"
    right = report.render(text, values)
    assert f"-->{values['s1.xref.loss']:.1f}<!--/-->" in right and "block_topk_32_mean<!--/-->" in right
    assert "| `xref` | 10 |" in right and "old" not in right and report.render(right, values) == right
    with pytest.raises(KeyError):
        report.render("<!--s1.nothing .1f-->1<!--/-->", values)
    assert report.loose_numbers("xref costs 3.5 nats") and report.loose_numbers("loses 12 %")
    assert not report.loose_numbers(right.replace(" %", "")) and not report.loose_numbers(
        "at 224 keys, arXiv:2401.14727"
    )


def test_figures_are_the_same_twice(folder, tmp_path):
    values = summary.summarise(folder)
    paths = figures.draw_all(values, tmp_path / "one")
    assert [path.stem for path in paths] == ["losses", "kinds", "mass", "identifiers", "answers"]
    again = figures.draw_all(values, tmp_path / "two")
    for one, other in zip(paths, again):
        assert one.read_bytes() == other.read_bytes() and len(one.read_bytes()) > 2000
    assert figures.draw_all({}, tmp_path / "none") == []


# ---- the report that is there ----


def test_report_agrees_with_the_results():
    text = report.REPORT.read_text()
    assert report.render(text, summary.summarise()) == text, "run bench/quality/report.py"
    assert len(report.NUMBER.findall(text)) > 10 and len(report.TABLE.findall(text)) >= 2


def test_every_number_names_its_result():
    assert report.loose_numbers(report.REPORT.read_text()) == []


def test_figures_of_the_report_are_there():
    named = re.findall(r"!\[[^]]*\]\(([^)]+)\)", report.REPORT.read_text())
    assert named and all((report.REPORT.parent / name).is_file() for name in named)
