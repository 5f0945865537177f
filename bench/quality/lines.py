# SPDX-License-Identifier: MIT
"""Result lines, each in its file once."""

import json
import os


class Results:
    """A file of JSON lines, each with an id of its own. What is there is not computed again."""

    def __init__(self, path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.known = {line["id"] for line in read_lines(path)}

    def add(self, line):
        with open(self.path, "ab+") as file:
            file.seek(-min(1, file.seek(0, os.SEEK_END)), os.SEEK_END)
            whole = file.read() in (b"", b"\n")
            file.write(b"\n" * (not whole) + json.dumps(line).encode() + b"\n")
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


def mean_losses(lines, names):
    """(documents, {name: mean loss above dense attention}) of the documents that were read with all of the named
    patterns; (0, {}) where there is none."""
    found = {name: {} for name in names}
    for line in lines:
        if line["pattern"] in found:
            found[line["pattern"]][line["kind"], line["document"]] = line["delta_nll"]
    common = set.intersection(*map(set, found.values()))
    losses = {name: sum(of[one] for one in common) / len(common) for name, of in found.items()} if common else {}
    return len(common), losses
