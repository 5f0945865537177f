# SPDX-License-Identifier: MIT
"""Reading beside dense attention on tiny random weights, and the command `quality`; nothing is downloaded."""

import argparse
import importlib.util
import json

import numpy as np
import pytest
from conftest import in_process
from test_demo import SHAPE, VOCABULARY, tiny_weights

import sparseattn as sa
from sparseattn.demo import model, screen, truth
from sparseattn.quality import beside, command, matrix

TOKENS, FIRST = 60, 12


@pytest.fixture
def tiny():
    rng = np.random.default_rng(3)
    return model.Model.from_gguf(SHAPE, tiny_weights(rng)), rng.integers(0, VOCABULARY, TOKENS)


def read(tiny, **others):
    return beside.read_dense(*tiny, FIRST, others, lambda share: None)


def log_probabilities(reader, tokens, pattern):
    """float64 [rows, vocabulary] with dense masked attention."""
    mask = sa.parse(pattern).to_mask(TOKENS)[0, 0]

    def attend(layer, q, k, v):
        outs = [
            truth.attend_head(q[:, head].astype(np.float64), k[:, 0], v[:, 0], mask, SHAPE.head_dim**-0.5)[0]
            for head in range(SHAPE.heads_q)
        ]
        return np.stack(outs, 1).astype(np.float32)

    logits = reader.logits(reader.hidden(tokens, attend)[FIRST:-1]).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_numbers_are_those_of_dense_masked_attention(tiny):
    reader, tokens = tiny
    text = "causal & (sink(3) | window(6,0))"
    dense = read(tiny)
    found = beside.read_beside(reader, dense, beside.Attention(text), lambda share: None, watched=[4, 9])
    true, sparse = (log_probabilities(reader, tokens, pattern) for pattern in ("causal", text))
    rows, targets = np.arange(len(true)), tokens[FIRST + 1 :]
    np.testing.assert_allclose(dense.nll, -true[rows, targets], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.nll, -sparse[rows, targets], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.kl, (np.exp(true) * (true - sparse)).sum(axis=1), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.watched, sparse[:, [4, 9]], rtol=1e-4, atol=1e-4)
    assert (found.right == (sparse.argmax(axis=1) == targets)).all() and found.kl.max() > 1e-3
    assert (found.same == (sparse.argmax(axis=1) == true.argmax(axis=1))).all()


def test_what_is_kept_is_the_dense_weight_on_the_keys(tiny, monkeypatch):
    """Against the weights themselves, of the first layer; far keys are those beyond 2 sinks and the 8 nearest."""
    monkeypatch.setattr(beside, "FAR", "causal - (sink(2) | window(7,0))")
    reader, tokens = tiny
    operands = []
    reader.hidden(tokens, lambda layer, q, k, v: operands.append((q, k, v)) or q)
    q, k, v = operands[0]
    text = "causal & window(20,0)"
    masks = [sa.parse(one).to_mask(TOKENS)[0, 0] for one in ("causal", text, f"{text} & ({beside.FAR})", beside.FAR)]
    heads = range(SHAPE.heads_q)
    outs, weights = zip(*(truth.attend_head(q[:, h], k[:, 0], v[:, 0], masks[0], 8**-0.5)[:2] for h in heads))
    mass, far, all_far = (np.mean([(p * mask)[FIRST:].sum(axis=1) for p in weights]) for mask in masks[1:])
    sparse = np.stack([truth.attend_head(q[:, h], k[:, 0], v[:, 0], masks[1], 8**-0.5)[0] for h in heads])
    dense = read(tiny, one=beside.Attention(text), all=beside.Attention("causal & window(99,0)"))
    kept = dense.kept["one"]
    assert kept.mass[0] == pytest.approx(mass, rel=1e-4) and kept.far_mass[0] == pytest.approx(far / all_far, rel=1e-4)
    assert dense.far_mass[0] == pytest.approx(all_far, rel=1e-4) and 0 < kept.far_mass[0] < 1
    error = np.linalg.norm((sparse - np.stack(outs))[:, FIRST:]) / np.linalg.norm(np.stack(outs)[:, FIRST:])
    assert kept.output_error[0] == pytest.approx(error, rel=1e-3) and len(kept.mass) == SHAPE.layers
    whole = dense.kept["all"]
    assert whole.mass == pytest.approx([1, 1]) and max(whole.output_error) < 1e-5


def test_lists_of_a_layer_read_like_the_pattern_that_has_the_same_keys(tiny):
    reader, _ = tiny
    lists = np.arange(TOKENS)[:, None] - np.arange(9)  # the 9 nearest; negative ones are absent
    chosen = beside.Attention(sa.runtime_tokens(9), lambda q, k: np.repeat(lists[:, None], q.shape[1], axis=1))
    dense = read(tiny, lists=chosen, window=beside.Attention("causal & window(8,0)"))
    one, other = dense.kept.values()
    for name in ("mass", "output_error"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-4)
    window = beside.Attention("causal & window(8,0)")
    one, other = (beside.read_beside(reader, dense, attention, lambda share: None) for attention in (chosen, window))
    np.testing.assert_allclose(one.nll, other.nll, rtol=1e-4)


def test_rounded_weights_change_little(tiny):
    pytest.importorskip("torch")
    exact, rounded = (
        read(tiny),
        beside.read_dense(matrix.round_weights(tiny[0]), tiny[1], FIRST, {}, lambda share: None),
    )
    apart = np.abs(exact.nll - rounded.nll)
    assert 1e-6 < apart.max() < 0.1


# ---- the command ----


class Letters:
    def decode(self, ids):
        return "".join("ab c_"[i % 5] for i in ids)


def test_patterns_of_the_command():
    ids = np.arange(40) % 7
    made = command.pattern_argument("xref(budget=20, sinks=2,window=4)").make(Letters(), ids)
    assert made == sa.xref(ids, sa.symbols_of(Letters(), ids), budget=20, sinks=2, window=4)
    assert command.pattern_argument("xref").make(Letters(), ids) == sa.xref(ids, sa.symbols_of(Letters(), ids))
    assert command.pattern_argument("window(3,3)").text == "causal & window(3,3)"
    for bad, says in [("xref(keys=3)", "keys"), ("xref(budget=3)", "budget"), ("wind(3)", "wind")]:
        with pytest.raises(argparse.ArgumentTypeError, match=says):
            command.pattern_argument(bad)


def test_tables_have_every_pattern_and_layer(tiny, capsys):
    others = {"near": beside.Attention("causal & window(8,0)")}
    dense = read(tiny, **others)
    reading = beside.read_beside(tiny[0], dense, others["near"], lambda share: None)
    lines = [
        command.line_of("causal (dense)", dense, None, None),
        command.line_of("near", dense, reading, dense.kept["near"]) | {"keys": 8.4},
    ]
    assert "NaN" not in json.dumps(lines) and lines[1]["far_mass"] is None  # 60 tokens have no far keys
    command.print_table(lines, dense)
    command.print_layers(dense)
    said = capsys.readouterr().out
    assert f"{lines[1]['perplexity']:.3f}" in said and f"{lines[1]['delta_nll']:+.4f}" in said and "a  near" in said
    assert lines[1]["delta_nll"] == pytest.approx(lines[1]["nll"] - lines[0]["nll"], rel=1e-4)
    assert sum(line.startswith(("0 ", "1 ")) for line in said.splitlines()) == SHAPE.layers
    assert max(map(len, said.splitlines())) <= screen.WIDTH


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--pattern", "wind(3)"], "argument --pattern: "),
        (["--pattern", "xref(budget=5)"], "budget"),
        (["--tokens", "9"], "is 9; accepted: 64 to 8192"),
        (["--text", "/nowhere/at/all"], "accepted: a file of UTF-8"),
    ],
)
def test_bad_options_are_sentences(arguments, says):
    bad = in_process("quality", *arguments)
    assert bad.returncode == 2 and says in bad.stderr


@pytest.fixture
def small_weights(tiny, monkeypatch, tmp_path):
    """The command finds the tiny model, whose tokens are letters."""

    class Tokenizer(Letters):
        def encode(self, text):
            return argparse.Namespace(ids=[ord(letter) % VOCABULARY for letter in text])

    monkeypatch.setattr(command.demo, "require_packages", lambda *names: None)
    for name, found in [
        ("find_weights", tmp_path),
        ("open_gguf", None),
        ("load_tokenizer", Tokenizer()),
        ("load_model", tiny[0]),
    ]:
        monkeypatch.setattr(command.weights, name, lambda *_, found=found: found)


def options(tmp_path, *arguments):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 4)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--text", str(tmp_path / "text"), *arguments])


def test_command_reads_a_text(small_weights, tmp_path, capsys):
    patterns = ["--pattern", "causal & window(99,0)", "--pattern", "xref(sinks=1,window=4,budget=8)"]
    assert command.run(options(tmp_path, "--tokens", "80", "--first", "30", "--json", *patterns)) == 0
    dense, whole, linked = map(json.loads, capsys.readouterr().out.splitlines())
    assert dense["perplexity"] == pytest.approx(np.exp(dense["nll"])) and dense["tokens"] == 80 and dense["first"] == 30
    assert abs(whole["delta_nll"]) < 1e-4 and whole["kl"] < 1e-5 and whole["same"] == 1
    assert whole["keys"] == 40.5 and linked["keys"] < 8 and linked["kl"] > 1e-3
    assert command.run(options(tmp_path, "--tokens", "80", "--layers", *patterns)) == 0
    said = capsys.readouterr().out
    assert "behind the first 21 are judged" in said
    assert "b  xref(sinks=1,window=4,budget=8)" in said


def test_first_token_is_one_of_the_text(small_weights, tmp_path):
    with pytest.raises(SystemExit, match="--first is 79; accepted: 0 to 78 of 80 tokens"):
        command.run(options(tmp_path, "--tokens", "80", "--first", "79"))


def test_missing_packages_are_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(SystemExit, match="gguf.*pip install gguf"):
        command.run(argparse.Namespace(bfloat16=False))
