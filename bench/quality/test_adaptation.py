# SPDX-License-Identifier: MIT
"""The stage "adapt" on a toy: that weights learn, what is compared, and that lines are there once."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
import adaptation  # noqa: E402
import reading  # noqa: E402
import run  # noqa: E402
import small  # noqa: E402
import torch  # noqa: E402
import training  # noqa: E402


def test_small_run_learns_and_is_there_once(tmp_path):
    names = ["dense", "xref", "block_topk_16_mean"]
    call = ["--stage", "adapt", "--small", "--results", str(tmp_path), "--steps", "12", "--patterns", ",".join(names)]
    assert run.main(call) == 0
    text = (tmp_path / "adapt.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["pattern"] for line in lines] == names
    for line in lines:
        assert len(line["held_out"]) == len(line["held_out_before"]) == 1
        assert line["nll"] < line["nll_before"] - 0.001 and line["nll"] == pytest.approx(np.mean(line["held_out"]))
    assert len({line["nll_before"] for line in lines}) == 3  # each sees otherwise
    assert run.main(call) == 0 and (tmp_path / "adapt.jsonl").read_text() == text


def test_losses_are_those_of_the_frozen_model():
    """With dense attention, before a step: as study.measure reads the text."""
    ids = np.array(small.Bytes().encode(small.documents()[0].text).ids[:257])
    adapted, frozen = adaptation.Adapted(small.numpy_model(), "cpu"), reading.Model(small.numpy_model())
    batch = training.Batch("dense", 176, [(ids, None)])
    found = adapted.losses(batch)
    np.testing.assert_allclose(found.detach(), reading.read_dense(frozen, ids, 0, {}).nll, rtol=1e-4)
    found.mean().backward()
    assert all(torch.isfinite(weight.grad).all() and weight.grad.any() for weight in adapted.parameters())
