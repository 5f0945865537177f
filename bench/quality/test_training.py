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
    options = training.SimpleNamespace(budget=176, seq=512)
    (batch,) = training.batches_of(name, options, stream, [[7, 1000]])
    assert (batch.ids.numpy() == [stream.ids[7:520], stream.ids[1000:1513]]).all()
    if batch.lists is None:
        made = batch.pattern.to_mask(sa.Extent(512, batch=2))[:, 0]
    else:
        made = (batch.lists[..., None] == torch.arange(512)).any(dim=2).numpy()
        assert batch.lists.max() < 512 and (made.sum(axis=2) == (batch.lists.numpy() >= 0).sum(axis=2)).all()
    assert not (made & ~np.tri(512, dtype=bool)).any()
    if name != "dense":
        assert made.sum(axis=-1).max() == 176
    if name.startswith("xref"):
        assert (made[0] != made[1]).any()
        found = stream.symbols[1000:1512] if name == "xref" else None
        np.testing.assert_array_equal(made[1], sa.xref(stream.ids[1000:1512], found, budget=176).to_mask(512)[0, 0])


def test_batches_come_in_their_order():
    stream = training.SimpleNamespace(ids=np.arange(100), symbols=np.zeros((100, 2)))
    options = training.SimpleNamespace(budget=176, seq=3)
    starts = np.arange(80).reshape(40, 2)
    found = [batch.ids[:, 0].tolist() for batch in training.batches_of("dense", options, stream, starts)]
    assert found == starts.tolist()


def test_identifiers_of_parts_are_told_apart(monkeypatch):
    texts = [document.text for document in small.documents()]
    tokenizer = training.train_tokenizer(texts, 300)
    whole = training.Stream(tokenizer, texts).symbols
    monkeypatch.setattr(training, "SYMBOLS_AT_ONCE", 1 + len(whole) // 3)
    parts = training.Stream(tokenizer, texts).symbols
    third = len(np.array_split(whole, 3)[0])
    np.testing.assert_array_equal(parts[:third], whole[:third])
    assert not set(parts[:third][parts[:third] >= 0]) & set(parts[third:].flat) and parts.shape == whole.shape
    behind = slice(third + 100, 2 * third)  # where no identifier is open that began in the part before
    assert ((parts[behind] >= 0) == (whole[behind] >= 0)).all()


def test_losses_are_those_of_the_next_token():
    """A model whose scores do not depend on the text: the loss of token t is minus the log of its share."""
    shares = torch.tensor([0.5, 0.25, 0.25])
    rows = [(np.array(ids), None) for ids in ([0, 1, 2, 1], [1, 2, 1, 1])]
    batch = training.Batch("dense", training.SimpleNamespace(budget=176), rows)
    found = training.losses_of(lambda ids: shares.log().expand(*ids.shape, 3), training.Attend(1), batch, "cpu")
    np.testing.assert_allclose(found, np.log([[4, 4, 4], [4, 4, 4]]), rtol=1e-6)
