# SPDX-License-Identifier: MIT
"""bench/train.py at a small size: the library's curve lies on that of dense attention, and is the same bits twice."""

import importlib.util
import json

import pytest
from conftest import ROOT

torch = pytest.importorskip("torch")

SMALL = "--steps 12 --seq 48 --batch 2 --embed 32 --heads 2 --layers 2 --rate 0.01 --deterministic".split()
PATTERN = ["--pattern", "causal & (sink(2) | window(7,0))"]


@pytest.fixture
def program(monkeypatch):
    spec = importlib.util.spec_from_file_location("train", ROOT / "bench" / "train.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # and away again: the program sets it
    spec.loader.exec_module(module)
    yield module
    torch.use_deterministic_algorithms(False)


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return lines[0], lines[1:-1], lines[-1]


def test_curves_lie_on_top_of_each_other(program, tmp_path, capsys):
    files = ["--json", str(tmp_path / "losses.jsonl"), "--plot", str(tmp_path / "losses.svg")]
    assert program.main([*SMALL, *PATTERN, *files]) == 0
    first, losses, said = read(tmp_path / "losses.jsonl")
    assert first["options"]["steps"] == 12 and len(losses) == 3 * 12
    assert said["bit_equal"] and said["largest_difference"] < 1e-4
    assert said["last_loss"] < said["first_loss"] - 0.5
    assert (tmp_path / "losses.svg").read_text().count("<polyline") == 3


def test_another_pattern_has_another_curve(program, tmp_path, monkeypatch, capsys):
    """What the comparison above would say of attention that is wrong."""
    make = program.make_attention

    def planted(name, options):
        if name == "library":
            options = program.argparse.Namespace(**{**vars(options), "pattern": "causal & (sink(2) | window(6,0))"})
        return make(name, options)

    monkeypatch.setattr(program, "make_attention", planted)
    program.main([*SMALL, *PATTERN, "--json", str(tmp_path / "losses.jsonl")])
    assert read(tmp_path / "losses.jsonl")[2]["largest_difference"] > 1e-3
