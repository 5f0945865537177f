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
    names = ["dense", "xref", "block_topk_16_mean"]
    call = ["--stage", "s3", "--small", "--results", str(tmp_path), "--steps", "25", "--patterns", ",".join(names)]
    assert run.main(call) == 0
    text = (tmp_path / "s3.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["pattern"] for line in lines] == names
    for line in lines:
        first, last = line["curve"][0][1], line["curve"][-1][1]
        assert last < first - 0.3 and line["held_out"] and line["nll"] == pytest.approx(np.mean(line["held_out"]))
    assert run.main(call) == 0 and (tmp_path / "s3.jsonl").read_text() == text
    (tmp_path / "s3.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert run.main(call) == 0
    again = [json.loads(line) for line in (tmp_path / "s3.jsonl").read_text().splitlines()]
    for one, other in zip(again, lines):  # the same weights and batches, whatever ran before
        assert one["curve"][0] == other["curve"][0]


def some_batches(name, options, starts, learns=True):
    texts = [document.text for document in small.documents()]
    stream = training.Stream(training.train_tokenizer(texts, 300), texts)
    places = [[slice(start, start + options.seq + 1) for start in row] for row in starts]
    rows = [[(stream.ids[place], stream.symbols[place]) for place in of_step] for of_step in places]
    operands = training.Operands(options.heads, options.heads, 16, torch.float32, "cpu")
    return list(training.made_ahead(name, options.budget, rows, operands, learns)), rows


@pytest.mark.parametrize("name", [*training.PATTERNS, "xref_ngrams", "xref_long_spans"])
def test_rows_of_a_batch_have_patterns_of_their_own(name):
    options = training.SimpleNamespace(budget=176, seq=512, heads=1)
    (batch,), ((_, (ids, symbols)),) = some_batches(name, options, [[7, 1000]])
    assert (batch.ids[1].numpy() == ids).all() and batch.ids.shape == (2, 513)
    if batch.choose is None:
        made = batch.pattern.to_mask(sa.Extent(512, batch=2))[:, 0]
    else:
        q, k = torch.randn(2, 2, 512, 1, 16)
        lists = batch.choose(q, k)
        assert (lists[1] == batch.choose(q[1], k[1])).all() and (lists[0] != lists[1]).any()
        made = (lists[:, :, 0, :, None] == torch.arange(512)).any(dim=2).numpy()
        assert lists.max() < 512 and (made.sum(axis=2) == (lists >= 0).sum(dim=3)[..., 0].numpy()).all()
    assert not (made & ~np.tri(512, dtype=bool)).any()
    assert made.sum(axis=-1).max() == (512 if name == "dense" else 176)
    if name.startswith("xref"):
        text = training.patterns.Text(None, ids[:-1], symbols[:-1])
        own, _ = training.patterns.make(name, text, 176)
        assert (made[0] != made[1]).any()
        np.testing.assert_array_equal(made[1], own.to_mask(512)[0, 0])


@pytest.mark.parametrize("learns", [True, False])
def test_plans_that_were_made_ahead_are_found(learns):
    """The library returns the plan that it keeps, where a problem is the same."""
    options = training.SimpleNamespace(budget=176, seq=256, heads=2)
    batches, _ = some_batches("xref", options, [[0, 300], [600, 900]], learns)
    q = torch.randn(2, 256, 2, 16, requires_grad=learns)
    found = [training.sat.plan(batch.pattern, q, q, q, backward=learns)._handle for batch in batches]
    assert found == [batch._plan._handle for batch in batches] and found[0] != found[1]


def test_batches_come_in_their_order():
    options = training.SimpleNamespace(budget=176, seq=40, heads=1)
    starts = np.arange(80).reshape(40, 2)
    batches, rows = some_batches("xref", options, starts)
    assert [batch.ids.tolist() for batch in batches] == [[ids.tolist() for ids, _ in of_step] for of_step in rows]


def test_texts_are_read_once(tmp_path, monkeypatch):
    texts = [document.text for document in small.documents()]
    monkeypatch.setattr(training, "load_texts", lambda options: (texts[:2], texts[2:] + ["too short"]))
    sizes = {"vocabulary": 300, "seq": 64}
    options = training.SimpleNamespace(small=False, cache=tmp_path)
    made = training.prepare(options, sizes)
    monkeypatch.setattr(training, "load_texts", None)
    for stream, held_out in (made, training.prepare(options, sizes)):
        read, files = training.tokenize(texts[:2], texts[2:], sizes)
        np.testing.assert_array_equal(stream.ids, read.ids)
        np.testing.assert_array_equal(stream.symbols, read.symbols)
        assert len(held_out) == 1 and held_out[0][0].dtype == np.int64
        np.testing.assert_array_equal(held_out[0][0], files[0][0])
        np.testing.assert_array_equal(held_out[0][1], files[0][1])


def test_identifiers_of_parts_are_told_apart(monkeypatch):
    texts = [document.text for document in small.documents()]
    tokenizer = training.train_tokenizer(texts, 300)
    whole = training.Stream(tokenizer, texts).symbols
    monkeypatch.setattr(training, "SYMBOLS_AT_ONCE", 1 + len(whole) // 3)
    parts = training.Stream(tokenizer, texts).symbols
    third, second, _ = map(len, np.array_split(whole, 3))
    np.testing.assert_array_equal(parts[:third], whole[:third])
    assert not set(parts[:third][parts[:third] >= 0]) & set(parts[third:].flat) and parts.shape == whole.shape
    behind = slice(third + 100, third + second)  # where no identifier is open that began in the part before
    assert ((parts[behind] >= 0) == (whole[behind] >= 0)).all()


def test_losses_are_those_of_the_next_token():
    """A model whose scores do not depend on the text: the loss of token t is minus the log of its share."""
    shares = torch.tensor([0.5, 0.25, 0.25])
    rows = [(np.array(ids), None) for ids in ([0, 1, 2, 1], [1, 2, 1, 1])]
    batch = training.Batch("dense", 176, rows)
    found = training.losses_of(lambda ids: shares.log().expand(*ids.shape, 3), training.Attend(), batch, "cpu")
    np.testing.assert_allclose(found, np.log([[4, 4, 4], [4, 4, 4]]), rtol=1e-6)
