# SPDX-License-Identifier: MIT
"""What the READMEs show runs as it stands, and prints what they say it prints."""

import contextlib
import importlib.util
import io
import re

import pytest
from conftest import ROOT

OTHERS = ["torch", "jax", "transformers"]


def programs():
    """(file, program, what it prints or None)."""
    for file in ("README.md", "bindings/python/README.md"):
        text = (ROOT / file).read_text()
        found = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, flags=re.S | re.M)
        assert found, file
        yield from ((file, program, said or None) for program, said in found)


@pytest.mark.parametrize("file, program, said", list(programs()))
def test_readme_runs(file, program, said):
    for name in OTHERS:
        if re.search(rf"^import {name}\b", program, flags=re.M) and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not here")
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # whose pictures are braille
    with contextlib.redirect_stdout(printed):
        exec(compile(program, file, "exec"), {})
    printed.seek(0)
    assert said is None or printed.read() == said


def test_readme_shows_what_is_printed():
    assert sum(said is not None for _, _, said in programs()) >= 4
