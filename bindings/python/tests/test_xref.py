# SPDX-License-Identifier: MIT
"""Cross-references: the constructor against the oracle, and the identifiers of tokenized texts."""

import random
import re

import numpy as np
import oracle
import pytest

import sparseattn as sa

SOURCE = "def total(items, price):\n    total_price = 0\n    for item in items:\n        total_price += price(item)\n"


class Words:
    """A tokenizer of pieces: words are cut after three letters, so that identifiers span tokens."""

    def __init__(self, text):
        self.pieces = re.findall(r" ?[A-Za-z]{1,3}|\s+|.", text)
        self.known = sorted(set(self.pieces))
        self.ids = [self.known.index(piece) for piece in self.pieces]

    def decode(self, ids):
        return "".join(self.known[i] for i in ids)


class Stripping(Words):
    """As SentencePiece: no space before a text's first word."""

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens
        return super().decode(ids).removeprefix(" ")


def symbols_by_definition(pieces):
    """(open, completed) of each token as texts, from the whole text so far."""
    rows, text = [], ""
    for piece in pieces:
        start, text = len(text), text + piece
        found = list(re.finditer(r"[A-Za-z_][A-Za-z0-9_]*", text))
        is_open = found and found[-1].end() == len(text)
        ended = [match.group() for match in found if start <= match.end() < len(text)]
        rows.append((found[-1].group() if is_open else "", ended[-1] if ended else ""))
    return [(a if len(a) >= 2 else "", b if len(b) >= 3 else "") for a, b in rows]


@pytest.mark.parametrize("kind", [Words, Stripping])
def test_symbols_are_those_of_the_text_so_far(kind):
    words = kind(SOURCE * 3)
    symbols = sa.symbols_of(words, words.ids)
    expected = symbols_by_definition(words.pieces)
    assert symbols.dtype == np.int64 and symbols.shape == (len(words.ids), 2)
    names = {}
    for row, texts in zip(symbols.tolist(), expected):
        for symbol, text in zip(row, texts):
            assert (symbol == -1) == (text == "")
            assert names.setdefault(symbol, text) == text or symbol == -1
    assert {"total_price", "tot", "ite", "items"} <= {a for a, _ in expected}
    assert "total_price" in {b for _, b in expected} and len(set(names.values())) == len(names)
    for end in range(len(words.ids)):  # rows depend on no later token
        np.testing.assert_array_equal(sa.symbols_of(words, words.ids[:end]), symbols[:end])


def test_what_is_too_short_or_too_long_is_no_identifier():
    pieces = ["x", " ab", " abc", " ", "y" * 60, "y" * 60, "y", " ", "q.rst_u.v", "\n"]
    symbols = sa.symbols_of(lambda ids: "".join(pieces[i] for i in ids), range(len(pieces)))
    assert (symbols[:, 0] >= 0).tolist() == [False, True, True, False, True, False, False, False, False, False]
    assert (symbols[:, 1] >= 0).tolist() == [False, False, False, True, False, False, False, False, True, False]
    assert sa.symbols_of(str, []).shape == (0, 2)


@pytest.mark.parametrize("seed", range(20))
def test_the_pattern_is_its_definition(seed):
    r = random.Random(seed)
    words = Words(SOURCE * r.randint(1, 3))
    symbols = sa.symbols_of(words, words.ids) if r.random() < 0.8 else None
    params = dict(sinks=r.randint(0, 4), window=r.randint(1, 12), links=r.randint(0, 20), ngram_keys=r.randint(0, 8),
                  symbol_before=r.randint(0, 3), symbol_after=r.randint(0, 9), look_back=r.randint(0, 32),
                  stop_ratio=r.choice([0, 1, 48]))  # fmt: skip
    params["budget"] = params["sinks"] + params["window"] + params["links"] + r.randint(0, 9)
    pattern = sa.xref(np.array(words.ids, r.choice([np.int32, np.int64])), symbols, **params)
    order = ("sinks", "window", "budget", "links", "ngram_keys", "symbol_before", "symbol_after", "look_back")
    given = [] if symbols is None else symbols.ravel().tolist()
    sees = oracle.xref(words.ids, given, *(params[name] for name in order), params["stop_ratio"])
    tokens = len(words.ids)
    for seq_q, seq_k in ((tokens, tokens), (1, tokens), (5, tokens // 2)):
        expected = oracle.to_mask(sees, oracle.Extent(seq_q, seq_k))
        np.testing.assert_array_equal(pattern.to_mask(sa.Extent(seq_q, seq_k)), expected)
    assert sa.load(pattern.save()) == pattern


def test_attention_sees_what_the_pattern_keeps():
    words = Words(SOURCE * 6)
    tokens = len(words.ids)
    pattern = sa.xref(words.ids, sa.symbols_of(words, words.ids), sinks=2, window=8, budget=40)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, tokens, 2, 16)).astype(np.float32)
    expected = oracle.attention_forward(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)),
                                        pattern.to_mask(sa.Extent(tokens, tokens, heads=2)), 0.25)[0]  # fmt: skip
    np.testing.assert_allclose(sa.attention(q, k, v, pattern), expected.transpose(0, 2, 1, 3), atol=1e-5)


def test_defaults_and_text():
    assert str(sa.xref([7, 8, 7])) == "xref([7,8,7],[],32,64,224,112,7,3,10,32,48)"
    assert sa.xref([1, 2], budget=128) == sa.xref([1, 2], budget=128, links=32)
    assert sa.xref([1, 2], sinks=0) == sa.parse("xref([1,2],[],0)") != sa.xref([1, 2])


@pytest.mark.parametrize(
    "make, kind, argument",
    [
        (lambda: sa.xref([]), sa.ArgumentError, "token_ids"),
        (lambda: sa.xref([1, 2], [[0, 1]]), sa.ShapeError, "symbols"),
        (lambda: sa.xref([1, 2], [0, 1]), sa.ShapeError, "symbols"),
        (lambda: sa.xref([1], [[0, -2]]), sa.ArgumentError, "symbols"),
        (lambda: sa.xref([1.5]), sa.DTypeError, "token_ids"),
        (lambda: sa.xref([1], window=0), sa.ArgumentError, "params.window"),
        (lambda: sa.xref([1], budget=95), sa.ArgumentError, "params.budget"),
        (lambda: sa.xref([1], links=200), sa.ArgumentError, "params.links"),
        (lambda: sa.xref([1], links=-1), sa.ArgumentError, "params.links"),
        (lambda: sa.xref([1], sinks=-1), sa.ArgumentError, "params.sinks"),
        (lambda: sa.xref([1], stop_ratio=None), sa.DTypeError, "params.stop_ratio"),
        (lambda: sa.xref([1], look_back=np.array([1, 2])), sa.DTypeError, "params.look_back"),
        (lambda: sa.xref([1, 2]).stats((3, 3)), sa.ShapeError, "pattern"),
    ],
)
def test_misuse(make, kind, argument):
    with pytest.raises(kind) as caught:
        make()
    assert caught.value.argument == argument


def test_errors_have_the_number_that_was_given():
    with pytest.raises(sa.ArgumentError, match="params.window is 0; accepted: 1 or more"):
        sa.xref([1], window=0)


def test_a_text_that_goes_on_is_the_whole_text():
    words = Words(SOURCE * 9)
    whole = sa.symbols_of(words, words.ids)
    reader = sa.SymbolReader(words)
    ends = [0, 40, 40, 41, 300, len(words.ids)]
    parts = [reader.read(words.ids[begin:end]) for begin, end in zip(ends, ends[1:])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    pattern = sa.xref(words.ids[:40], parts[0], window=3, sinks=2, budget=20)
    for begin, end, part in zip(ends[1:], ends[2:], parts[1:]):
        pattern = sa.xref_extend(pattern, np.array(words.ids[begin:end], np.int64), part)
    assert pattern == sa.xref(words.ids, whole, window=3, sinks=2, budget=20)
    assert sa.xref_extend(sa.xref([1]), [2]) == sa.xref_extend(str(sa.xref([1])), [2]) == sa.xref([1, 2])


def test_only_a_text_itself_goes_on():
    with pytest.raises(sa.ArgumentError, match="pattern is causal; accepted: xref"):
        sa.xref_extend(sa.causal(), [1])
    with pytest.raises(sa.DTypeError, match="NoneType"):
        sa.xref_extend(None, [1])
    with pytest.raises(sa.ShapeError, match="symbols"):
        sa.xref_extend(sa.xref([1]), [1, 2], np.zeros((1, 2), np.int64))
