# SPDX-License-Identifier: MIT
"""Every constructor and question of patterns, through the C ABI, against the oracle."""

import gc
import hashlib
import io
import json
import threading

import numpy as np
import oracle
import pytest
from conftest import ROOT

import sparseattn as sa

CASES = [
    (sa.full(), "full"),
    (sa.causal(), "causal"),
    (sa.window(3, 1), "window(3,1)"),
    (sa.window(-1, 0), "window(-1,0)"),
    (sa.sink(2), "sink(2)"),
    (sa.block_diagonal(5), "block_diagonal(5)"),
    (sa.documents([0, 3, 3, 11, 20]), "documents(0,3,3,11,20)"),
    (sa.dilated(6, 3, 3), "dilated(6,3,3)"),
    (sa.strided(4), "strided(4)"),
    (sa.landmark(6, 2), "landmark(6,2)"),
    (sa.fixed(6, 1), "fixed(6,1)"),
    (sa.logsparse(), "logsparse"),
    (sa.residue(3, 1), "residue(3,1)"),
    (sa.global_keys([7, 1, 7]), "global_keys(1,7)"),
    (sa.global_tokens(np.array([0, 9], dtype=np.int32)), "global_tokens(0,9)"),
    (sa.bigbird(4, 3, 1, 1, 5), "bigbird(4,3,1,1,5)"),
    (sa.tree([-1, 0, 0, 1]), "tree(-1,0,0,1)"),
    (sa.transpose(sa.sink(2)), "transpose(sink(2))"),
    (sa.causal() & (sa.sink(2) | sa.window(4, 0)), "causal & (sink(2) | window(4,0))"),
    (sa.full() - sa.window(1, 1), "full - window(1,1)"),
    (sa.union(["sink(1)", sa.strided(3), "window(1,0)"]), "sink(1) | strided(3) | window(1,0)"),
    (sa.intersection([sa.causal(), "strided(3)"]), "causal & strided(3)"),
]
IDS = [text for _, text in CASES]


def truth(text, extent):
    return oracle.to_mask(text, oracle.Extent(extent.seq_q, extent.seq_k, extent.batch, extent.heads, extent.q_offset))


def extent_for(text):
    return sa.Extent(4, 17) if text.startswith("tree") else sa.Extent(13, 17)


@pytest.mark.parametrize("pattern, text", CASES, ids=IDS)
def test_constructor_is_its_text_and_its_definition(pattern, text):
    assert pattern == sa.parse(text) == sa.Pattern(repr(pattern))
    assert hash(pattern) == hash(sa.parse(text))
    np.testing.assert_array_equal(pattern.to_mask(extent_for(text)), truth(text, extent_for(text)))


@pytest.mark.parametrize("pattern, text", CASES, ids=IDS)
def test_questions_agree_with_the_mask(pattern, text):
    extent = extent_for(text)
    mask = truth(text, extent)[0, 0]
    stats = pattern.stats(extent)
    rows = mask.sum(1)
    assert (stats.pairs, stats.row_min, stats.row_max, stats.rows_empty) == (
        rows.sum(),
        rows.min(),
        rows.max(),
        (rows == 0).sum(),
    )
    assert pattern.density(extent) == stats.density == pytest.approx(mask.mean())
    row_ptr, col_idx = pattern.to_csr(extent)
    assert (row_ptr.dtype, col_idx.dtype) == (np.int64, np.int32)
    np.testing.assert_array_equal(row_ptr, np.concatenate([[0], rows.cumsum()]))
    np.testing.assert_array_equal(col_idx, mask.nonzero()[1])
    np.testing.assert_allclose(pattern.to_image(extent, 3, 5), oracle.coverage(mask, 3, 5), rtol=1e-6)
    for q, k in ((0, 0), (extent.seq_q - 1, extent.seq_k - 1), (2, 9)):
        assert pattern.keeps(extent, q, k) is bool(mask[q, k])


def test_vectors_of_every_language():
    vectors = json.loads((ROOT / "tests" / "vectors" / "patterns.json").read_text())
    assert len(vectors) > 100
    for vector in vectors:
        extent = sa.Extent(vector["seq_q"], vector["seq_k"], vector["batch"], vector["heads"], vector["q_offset"])
        mask = sa.parse(vector["text"]).to_mask(extent)
        assert mask.sum() == vector["pairs"], vector["text"]
        assert hashlib.sha256(mask.tobytes()).hexdigest() == vector["sha256"], vector["text"]


def test_heads_and_batch_entries_have_their_own():
    pattern = sa.per_head(["causal", sa.sink(1)], [0, 1, 0])
    extent = sa.Extent(4, 4, heads=3)
    np.testing.assert_array_equal(pattern.to_mask(extent), truth("per_head([0,1,0],causal,sink(1))", extent))
    assert pattern.keeps(extent, 0, 0, head=1) and not pattern.keeps(extent, 3, 3, head=1)
    np.testing.assert_array_equal(pattern.to_csr(extent, head=1)[1], [0, 0, 0, 0])
    np.testing.assert_array_equal(pattern.to_image(extent, 4, 4, head=1), truth("sink(1)", sa.Extent(4, 4))[0, 0])
    batch = sa.per_batch([sa.sink(2), sa.sink(3)])
    assert batch.to_mask(sa.Extent(3, batch=2)).sum(axis=(1, 2, 3)).tolist() == [6, 9]


def test_extent_shorthands_and_offset():
    assert sa.causal().stats(6) == sa.causal().stats((6, 6)) == sa.causal().stats(sa.Extent(6))
    assert sa.causal().stats((2, 6)).pairs == 5 + 6
    assert sa.causal().stats(sa.Extent(2, 6, q_offset=0)).pairs == 1 + 2
    assert sa.causal().stats(sa.Extent(64, block_q=16, block_k=32)).blocks_empty == 2


def test_equality_follows_the_laws():
    a, b, c = sa.causal(), sa.sink(3), sa.strided(2)
    assert a | b == b | a and (a | b) | c == a | (b | c) and a & a == a
    assert a & (b - c) == (a & b) - c and hash(a & (b - c)) == hash((a & b) - c)
    assert a != b and a != "causal" and len({a, sa.causal(), b}) == 2
    assert repr(b | a) == "sink(3) | causal"
    with pytest.raises(TypeError):
        a | 3  # noqa: B018


def test_long_lists_print_as_a_hash_that_does_not_parse():
    pattern = sa.global_keys(range(0, 200, 2))
    assert "#" in repr(pattern)
    with pytest.raises(sa.FormatError):
        sa.parse(repr(pattern))


@pytest.mark.parametrize(
    "make, kind, argument",
    [
        (lambda: sa.window(-2, 0), sa.ArgumentError, "left"),
        (lambda: sa.block_diagonal(0), sa.ArgumentError, "block"),
        (lambda: sa.residue(3, 3), sa.ArgumentError, "offset"),
        (lambda: sa.documents([3, 2]), sa.ArgumentError, "cu_seqlens"),
        (lambda: sa.documents(np.array([0.0, 2.0])), sa.DTypeError, "cu_seqlens"),
        (lambda: sa.documents([["a"]]), sa.DTypeError, "cu_seqlens"),
        (lambda: sa.global_keys([[1, 2]]), sa.ShapeError, "positions"),
        (lambda: sa.tree([1, 0]), sa.ArgumentError, "parents"),
        (lambda: sa.bigbird(0, 3, 1, 1), sa.ArgumentError, "params.block"),
        (lambda: sa.per_head([sa.full()], [1]), sa.ArgumentError, "part_of_head[0]"),
        (lambda: sa.union([]), sa.ArgumentError, "count"),
        (lambda: sa.parse("causal & wind(3)"), sa.FormatError, "text"),
        (lambda: sa.causal().stats(0), sa.ArgumentError, "extent.seq_q"),
        (lambda: sa.causal().keeps(4, 4, 0), sa.ArgumentError, "q"),
        (lambda: sa.tree([-1, 0]).stats((3, 9)), sa.SparseAttentionError, "pattern"),
    ],
)
def test_errors_are_typed_and_name_the_argument(make, kind, argument):
    with pytest.raises(kind) as caught:
        make()
    assert caught.value.argument == argument
    assert caught.value.status.startswith("SPATTN_E_") and "accepted" in str(caught.value) or argument == "text"


def test_error_families_are_those_of_python():
    assert issubclass(sa.ShapeError, ValueError) and issubclass(sa.FormatError, ValueError)
    assert issubclass(sa.DTypeError, TypeError) and issubclass(sa.UnsupportedError, NotImplementedError)
    assert issubclass(sa.NoGPUError, sa.UnsupportedError) and issubclass(sa.CudaError, RuntimeError)


def test_parts_may_die_before_the_whole():
    parts = [sa.parse(f"window({n},0)") for n in range(50)]
    whole = sa.union(parts)
    text = repr(whole)
    del parts
    gc.collect()
    assert repr(whole) == text and whole.stats(60).row_max == 50


def test_lists_are_copied():
    positions = np.array([1, 2])
    pattern = sa.global_keys(positions)
    positions[:] = 9
    assert pattern == sa.global_keys([1, 2])


def test_lists_may_be_views():
    assert sa.global_keys(np.arange(10)[1:8:3]) == sa.global_keys([1, 4, 7])
    assert sa.global_keys(np.arange(10)[::-3]) == sa.global_keys([9, 6, 3, 0])
    assert sa.global_keys([]).stats(4).pairs == 0


def test_errors_stay_on_their_thread():
    texts = {}

    def fail(n):
        for _ in range(200):
            with pytest.raises(sa.ArgumentError) as caught:
                sa.window(-n, 0)
            texts.setdefault(n, set()).add(str(caught.value))

    threads = [threading.Thread(target=fail, args=(n,)) for n in range(2, 8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(len(found) == 1 and f"-{n}" in next(iter(found)) for n, found in texts.items()) and len(texts) == 6


def test_show_draws_what_is_kept():
    lines = sa.causal().drawing(64, 8)
    assert len(lines) == 4 and {len(line) for line in lines} == {8}
    assert lines[-1][0] == "\u28ff" and lines[0][-1] == "\u2800"
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    sa.causal().show(64, width=8, file=ascii_file)
    ascii_file.seek(0)
    assert ascii_file.read().splitlines()[-1].startswith("@@@@")
    assert sa.full().drawing((3, 5), 4)  # smaller than a character's worth of cells
    assert len(sa.causal().drawing((16, 1_000_000), 32)) >= 1
