# SPDX-License-Identifier: MIT
"""S3 on toys: that models learn, that they see only what their pattern shows, and that runs repeat."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
import run  # noqa: E402
import small  # noqa: E402
import sparseattn as sa  # noqa: E402
import torch  # noqa: E402
import training  # noqa: E402


def test_small_run_learns_and_is_there_once(tmp_path):
    call = ["--stage", "s3", "--small", "--results", str(tmp_path), "--steps", "25", "--patterns", "dense,xref"]
    assert run.main(call) == 0
    text = (tmp_path / "s3.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["pattern"] for line in lines] == ["dense", "xref"]
    for line in lines:
        first, last = line["curve"][0][1], line["curve"][-1][1]
        assert last < first - 0.3 and line["held_out"] and line["nll"] == pytest.approx(np.mean(line["held_out"]))
    assert run.main(call) == 0 and (tmp_path / "s3.jsonl").read_text() == text
    (tmp_path / "s3.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert run.main(call) == 0
    again = [json.loads(line) for line in (tmp_path / "s3.jsonl").read_text().splitlines()]
    assert again[1]["curve"][0] == lines[1]["curve"][0]  # the same weights and batches, whatever ran before


@pytest.mark.parametrize("name", training.PATTERNS)
def test_rows_of_a_batch_have_patterns_of_their_own(name):
    texts = [document.text for document in small.documents()]
    stream = training.Stream(training.train_tokenizer(texts, 300), texts)
    options = training.SimpleNamespace(budget=176)
    attend, starts = training.Attend(name, options), [7, 1000]
    attend.see(stream, starts, 512)
    made = attend.pattern.to_mask(sa.Extent(512, batch=2))
    assert not (made & ~np.tri(512, dtype=bool)).any()
    if name != "dense":
        assert made.sum(axis=-1).max() == 176
    if name.startswith("xref"):
        assert (made[0] != made[1]).any()
        alone = training.Attend(name, options)
        alone.see(stream, starts[1:], 512)
        np.testing.assert_array_equal(alone.pattern.to_mask(512)[0], made[1])


def test_losses_are_those_of_the_next_token():
    """A model whose scores do not depend on the text: the loss of token t is minus the log of its share."""
    stream = training.SimpleNamespace(ids=np.array([0, 1, 2, 1, 1]), symbols=None)
    shares = torch.tensor([0.5, 0.25, 0.25])
    attend = training.Attend("dense", training.SimpleNamespace(budget=176))
    found = training.losses_of(lambda rows: shares.log().expand(*rows.shape, 3), attend, stream, [0, 1], 3, "cpu")
    np.testing.assert_allclose(found, np.log([[4, 4, 4], [4, 4, 4]]), rtol=1e-6)
