# SPDX-License-Identifier: MIT
"""The stage "speed" on toys: what it times is what it says."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
import run  # noqa: E402
import speed  # noqa: E402
import torch  # noqa: E402


def test_small_run_times_each_pattern_once(tmp_path):
    call = ["--stage", "speed", "--small", "--results", str(tmp_path), "--tokens", "256,512"]
    assert run.main(call) == 0
    text = (tmp_path / "speed.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["tokens"], line["pattern"]) for line in lines] == [
        (tokens, name) for tokens in (256, 512) for name in speed.PATTERNS
    ]
    for line in lines:
        assert line["forward_us"] > 0 and line["backward_us"] > 0 and line["batch"] == 1
        assert ("choose_us" in line) == line["pattern"].startswith("block_topk") and line["device"] == "cpu"
        assert ("plan_us" in line) == (line["pattern"] != "sdpa")
    assert run.main(call) == 0 and (tmp_path / "speed.jsonl").read_text() == text


def test_the_least_time_is_that_of_a_call(monkeypatch):
    moments = iter(np.cumsum([0, 0, 5, 0, 3, 1]).tolist())  # the begin, and two calls of 5 and 3 seconds
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(moments))
    assert speed.least_us(lambda: None, torch.device("cpu")) == 3e6


def test_texts_that_are_too_short_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="accepted: more than 1048576"):
        run.main(["--stage", "speed", "--small", "--results", str(tmp_path), "--tokens", str(1 << 20)])
