# SPDX-License-Identifier: MIT
"""What the READMEs show runs as it stands."""

import re

import pytest
from conftest import ROOT


@pytest.mark.parametrize("file", ["README.md", "bindings/python/README.md"])
def test_readme_runs(file, capsys):
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), flags=re.S | re.M)
    assert programs
    for program in programs:
        exec(compile(program, file, "exec"), {})
    assert capsys.readouterr().out
