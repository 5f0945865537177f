#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Holds the report and its appendix to the results: every number names its source, and is written by this program.

    python3 bench/quality/report.py            writes numbers, tables and figures anew
    python3 bench/quality/report.py --check    says what does not agree, and ends with status 1

In both a number stands as <!--NAME FORMAT-->12.3<!--/-->, with a name of summary.py and a format of Python, and a
table between <!--table NAME--> and <!--/table-->; readers of the page see the number and the table alone.
"""

import argparse
import pathlib
import re
import sys

import summary
import tables

FOLDER = pathlib.Path(__file__).resolve().parent
REPORT, APPENDIX = PAPERS = FOLDER / "REPORT.md", FOLDER / "APPENDIX.md"
NUMBER = re.compile(r"<!--([\w.]+) ([^\s>]+?)-->(.*?)<!--/-->")
TABLE = re.compile(r"<!--table (\w+)-->\n.*?<!--/table-->", flags=re.S)


def render(text, values):
    """A paper with all numbers and tables as the results have them. Raises KeyError for a name that they lack."""
    made = tables.tables(values)
    text = TABLE.sub(
        lambda match: "\n".join([f"<!--table {match[1]}-->", "", *made[match[1]], "", "<!--/table-->"]), text
    )
    return NUMBER.sub(lambda match: f"<!--{match[1]} {match[2]}-->{as_text(values[match[1]], match[2])}<!--/-->", text)


def as_text(value, form):
    return str(value) if form == "s" else format(value, form)


def loose_numbers(text):
    """Lines with a decimal number that names no result, outside tables, links, code and what is marked."""
    text = TABLE.sub("", NUMBER.sub("", text))
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|arXiv:\d+\.\d+|SmolLM2-\d+M", "", text, flags=re.S)
    return [line for line in text.splitlines() if re.search(r"\d\.\d|\d ?%", line)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    values = summary.summarise()
    texts = {paper: paper.read_text() for paper in PAPERS}
    right = {paper: render(text, values) for paper, text in texts.items()}
    if options.check:
        for paper in PAPERS:
            compare(texts[paper], right[paper])
        return int(texts != right)
    import figures  # matplotlib is needed only to draw
    import pictures

    for paper in PAPERS:
        paper.write_text(right[paper])
    shown = [name for text in texts.values() for name in figures_of(text)]
    drawn = figures.draw_all(values, FOLDER / "figures", shown) + pictures.draw_all(FOLDER / "figures", shown)
    print("\n".join(map(str, drawn)))
    return 0


def figures_of(text):
    return re.findall(r"\]\(figures/(\w+)\.svg\)", text)


def compare(text, right):
    for is_there, should_be in zip(text.splitlines(), right.splitlines()):
        if is_there != should_be:
            print(f"is        {is_there}\nshould be {should_be}")


if __name__ == "__main__":
    sys.exit(main())
