# SPDX-License-Identifier: MIT
"""The pieces of the demo on tiny random weights, and the command line; nothing is downloaded."""

import argparse
import os

import numpy as np
import pytest
from conftest import in_process

import sparseattn as sa
from sparseattn.demo import book, device, files, model, reading, run, screen, speed, truth, weights

SHAPE = model.Shape(layers=2, heads_q=3, heads_kv=1, head_dim=8, rope_base=1e4, norm_epsilon=1e-5, context=64)
VOCABULARY, WIDTH, INNER = 50, 24, 32


def tiny_weights(rng):
    def matrix(rows, columns):
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))

    found = {"token_embd.weight": matrix(VOCABULARY, WIDTH), "output_norm.weight": np.ones(WIDTH, np.float32)}
    for n in range(SHAPE.layers):
        parts = {
            "attn_q": matrix(24, WIDTH),
            "attn_k": matrix(8, WIDTH),
            "attn_v": matrix(8, WIDTH),
            "attn_output": matrix(WIDTH, 24),
            "ffn_gate": matrix(INNER, WIDTH),
            "ffn_up": matrix(INNER, WIDTH),
            "ffn_down": matrix(WIDTH, INNER),
            "attn_norm": rng.random(WIDTH, dtype=np.float32),
            "ffn_norm": rng.random(WIDTH, dtype=np.float32),
        }
        found.update({f"blk.{n}.{name}.weight": part for name, part in parts.items()})
    return found


@pytest.fixture
def tiny():
    rng = np.random.default_rng(0)
    parts = tiny_weights(rng)
    return model.Model.from_gguf(SHAPE, parts), parts, rng.integers(0, VOCABULARY, 40)


def slow_loss(parts, tokens):
    """The same model once more, token by token in float64, with loops instead of the tricks of model.py."""

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x) + SHAPE.norm_epsilon) * weight

    def turn(x, position):
        out = x.copy()
        for pair in range(SHAPE.head_dim // 2):
            angle = position * SHAPE.rope_base ** (-2 * pair / SHAPE.head_dim)
            a, b = x[2 * pair], x[2 * pair + 1]
            out[2 * pair], out[2 * pair + 1] = (
                a * np.cos(angle) - b * np.sin(angle),
                a * np.sin(angle) + b * np.cos(angle),
            )
        return out

    keys, values = [[] for _ in range(SHAPE.layers)], [[] for _ in range(SHAPE.layers)]
    total = 0.0
    for position, token in enumerate(tokens[:-1]):
        x = parts["token_embd.weight"][token].astype(np.float64)
        for n in range(SHAPE.layers):
            w = {
                name: parts[f"blk.{n}.{name}.weight"].astype(np.float64)
                for name in (
                    "attn_norm",
                    "attn_q",
                    "attn_k",
                    "attn_v",
                    "attn_output",
                    "ffn_norm",
                    "ffn_gate",
                    "ffn_up",
                    "ffn_down",
                )
            }
            h = norm(x, w["attn_norm"])
            keys[n].append(turn(w["attn_k"] @ h, position))
            values[n].append(w["attn_v"] @ h)
            seen = []
            for q in (w["attn_q"] @ h).reshape(SHAPE.heads_q, SHAPE.head_dim):
                s = np.array(keys[n]) @ turn(q, position) / np.sqrt(SHAPE.head_dim)
                p = np.exp(s - s.max())
                seen.append(p / p.sum() @ np.array(values[n]))
            x = x + w["attn_output"] @ np.concatenate(seen)
            h = norm(x, w["ffn_norm"])
            gate = w["ffn_gate"] @ h
            x = x + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up"] @ h))
        logits = parts["token_embd.weight"].astype(np.float64) @ norm(x, parts["output_norm.weight"])
        total += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[tokens[position + 1]]
    return total / (len(tokens) - 1)


def entry(text):
    return reading.make_entry(sa.parse(text), SHAPE, 40, device.Device())


def test_model_reads_like_its_slow_twin(tiny):
    reader, parts, tokens = tiny
    dense, shares = entry("causal"), []
    reading.read_dense(reader, tokens, dense, [], 1, shares.append)
    assert np.log(dense.perplexity) == pytest.approx(slow_loss(parts, tokens), rel=1e-5)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_mass_is_the_dense_weight_on_the_kept_keys(tiny):
    reader, _, tokens = tiny
    dense, window, all_keys = entry("causal"), entry("causal & window(4,0)"), entry("causal & window(50,0)")
    kept = reading.read_dense(reader, tokens, dense, [window, all_keys], 1, lambda share: None)
    causal, near = (sa.parse(text).to_mask(40)[0, 0] for text in ("causal", "causal & window(4,0)"))
    weight = [
        truth.attend_head(kept.q[:, head], kept.k[:, 0], kept.v[:, 0], causal, 8**-0.5)[1][near].sum() / 40
        for head in range(3)
    ]
    assert window.mass[1] == pytest.approx(np.mean(weight), rel=1e-5)
    assert all_keys.mass == pytest.approx([1, 1]) and 0 < window.mass[0] < 1
    assert len(dense.seconds) == len(window.seconds) == 2


def test_sparse_reading_changes_what_is_read(tiny):
    reader, _, tokens = tiny
    same, other = entry("causal & window(39,0)"), entry("causal & window(1,0)")
    dense = entry("causal")
    reading.read_dense(reader, tokens, dense, [], 0, lambda share: None)
    for one in (same, other):
        reading.read_sparse(reader, tokens, one, lambda share: None)
    assert same.perplexity == pytest.approx(dense.perplexity, rel=1e-5)
    assert abs(other.perplexity / dense.perplexity - 1) > 1e-4


def test_layer_check_finds_errors():
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 30, 4, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 30, 2, 16), dtype=np.float32)
    pattern = sa.per_head(["causal", "window(3,0)", "causal", "sink(2)"])
    errors = run.check_layer(pattern, q, k, v, dout, device.Device())
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"} and max(errors.values()) < 1e-5
    right, floor = {"out": np.ones(3)}, {"out": 0.01}
    assert truth.relative_errors({"out": np.array([1, 1, 1.5])}, right, floor) == {"out": 0.5}
    assert truth.relative_errors({"out": np.array([1, 1, np.nan])}, right, floor) == {"out": np.inf}
    assert truth.relative_errors({"out": np.array([1, 1, -np.inf])}, right, floor) == {"out": np.inf}


@pytest.mark.parametrize("text", ["causal & window(0,0)", "full - full", "causal & sink(1)", "causal - window(7,0)"])
def test_layer_check_lets_nothing_be_nothing(text):
    """Gradients that cancel and rows without keys: what is left is rounding, and infinities where they belong."""
    rng = np.random.default_rng(1)
    q, dout = 8 * rng.standard_normal((2, 64, 4, 64), dtype=np.float32)
    k, v = 8 * rng.standard_normal((2, 64, 2, 64), dtype=np.float32)
    errors = run.check_layer(sa.parse(text), q, k, v, dout, device.Device())
    assert max(errors.values()) < run.BOUND, errors


def test_floor_hides_no_error():
    """What is wrong by a thousandth of the products that cancel is still called wrong."""
    rng = np.random.default_rng(2)
    q, dout, k, v = rng.standard_normal((4, 64, 2, 64), dtype=np.float32)
    right = truth.forward_backward(q, k, v, dout, np.broadcast_to(np.eye(64, dtype=bool), (2, 64, 64)), 0.125)
    floor = truth.floors(q, k, v, dout, 0.125)
    wrong = {name: array + 0.1 * floor[name] for name, array in right.items()}
    assert np.abs(right["dq"]).max() < 1e-12
    assert min(truth.relative_errors(wrong, right, floor).values()) > run.BOUND


def test_tokenizer_cuts_digits_apart_and_keeps_bytes():
    letters = [chr(c) for c in range(33, 127)] + [
        "\u0120",
        "\u010a",
        "\u00c3",
        "\u00a9",
    ]  # space, newline, and the bytes of e acute
    tokenizer = weights.build_tokenizer(
        [*letters, "th", "the", "\u0120the", "12"], ["t h", "th e", "\u0120 the", "1 2"]
    )
    text = "the the 12\n\u00e9"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["the", "\u0120the", "\u0120", "1", "2", "\u010a", "\u00c3", "\u00a9"]
    assert tokenizer.decode(encoded.ids) == text


def test_book_is_whole():
    text = book.text()
    assert text.startswith("PRIDE AND PREJUDICE") and "truth universally acknowledged" in text and len(text) == 684_767


def test_weights_are_found_only_whole(tmp_path):
    assert weights.find_weights(tmp_path) in (None, weights.find_weights(tmp_path / "other"))
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")  # cut short
    assert weights.find_weights(tmp_path) != tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_speed_and_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "ENOUGH", 0.0)
    operands = reading.Operands(*(np.ones((20, heads, 8), np.float32) for heads in (3, 1, 1)))
    patterns = [sa.parse("causal"), sa.parse("causal & window(3,0)")]
    assert speed.lengths(2048) == [1024, 2048, 4096, 8192]
    assert speed.stretch(np.arange(6).reshape(3, 1, 2), 5)[:, 0, 0].tolist() == [0, 2, 4, 0, 2]
    seconds = speed.measure(patterns, operands, [32, 64], device.Device(), lambda share: None)
    assert seconds.shape == (2, 2) and (seconds > 0).all()
    screen.chart([1024, 2048], seconds)
    assert "2K tokens" in capsys.readouterr().out
    paths = files.save_patterns(patterns, 20, 3, tmp_path) + files.save_speed(
        ["a", "b"], [1024, 2048], seconds, "t", tmp_path
    )
    assert [path.name for path in paths] == ["patterns.png", "speed.png", "speed.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_users_patterns_are_cut_to_the_past(tiny, capsys):
    extra = [sa.parse("strided(3)"), sa.parse("causal & window(5,0)"), sa.parse("causal")]
    texts = [str(entry.pattern) for entry in run.plan_all(extra, tiny[0], 40, device.Device())]
    assert texts[0] == "causal" and texts[-2:] == ["causal & strided(3)", "causal & window(5,0)"] and len(texts) == 8
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("strided(3) ") and said[0].endswith("causal & strided(3).")


@pytest.mark.parametrize(
    "option, value, says",
    [
        ("--tokens", "9", "is 9; accepted: 64 to 8192"),
        ("--tokens", "many", "is many; accepted: 64 to 8192"),
        ("--threads", "-1", "is -1; accepted: 0 to 4096"),
        ("--threads", "5000", "is 5000; accepted: 0 to 4096"),
        ("--out", "{here}/file/pictures", "file is no folder; accepted: a folder to write into"),
        ("--cache", "{here}/file", "file is no folder; accepted: a folder to write into"),
        ("--out", "{here}/closed/pictures", "closed cannot be written; accepted: a folder to write into"),
    ],
)
def test_bad_options_are_sentences_before_any_work(option, value, says, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    if "closed" in value and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write everywhere")
    bad = in_process("demo", option, value.format(here=tmp_path))
    assert bad.returncode == 2 and f"argument {option}: " in bad.stderr and says in bad.stderr
    assert bad.stdout == ""


def test_cache_nobody_can_write_is_said_before_the_download(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(weights, "find_weights", lambda cache: None)
    with pytest.raises(SystemExit, match="--cache is .* is no folder"):
        run.load(argparse.Namespace(cache=tmp_path / "file", tokens=64), device.Device())


def test_output_is_at_most_100_columns(capsys):
    screen.side_by_side([sa.causal().drawing(64, 32)] * 5, ["causal"] * 5, 32)
    screen.row(["x" * 80, "1", "2"], [42, 11, 11])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= screen.WIDTH
