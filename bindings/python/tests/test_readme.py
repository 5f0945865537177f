# SPDX-License-Identifier: MIT
"""What the READMEs show runs as it stands."""

import re

import pytest
from conftest import ROOT


def programs():
    for file in ("README.md", "bindings/python/README.md"):
        found = re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), flags=re.S | re.M)
        assert found, file
        yield from ((file, program) for program in found)


@pytest.mark.parametrize("file, program", list(programs()))
def test_readme_runs(file, program):
    if "import torch" in program:
        pytest.importorskip("torch")
    exec(compile(program, file, "exec"), {})
