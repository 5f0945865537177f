# SPDX-License-Identifier: MIT
"""Every constructor and question of patterns, through the C ABI, against the oracle."""

import base64
import gc
import hashlib
import io
import json
import re
import threading

import numpy as np
import oracle
import pytest
from conftest import ROOT, ctrl_c, from_dlpack

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
    (sa.xref([5, 6] * 9, sinks=1, window=2, budget=7), f"xref([{'5,6,' * 8}5,6],[],1,2,7)"),
    (sa.transpose(sa.sink(2)), "transpose(sink(2))"),
    (sa.causal() & (sa.sink(2) | sa.window(4, 0)), "causal & (sink(2) | window(4,0))"),
    (sa.full() - sa.window(1, 1), "full - window(1,1)"),
    (sa.union(["sink(1)", sa.strided(3), "window(1,0)"]), "sink(1) | strided(3) | window(1,0)"),
    (sa.grid((3, 5), [sa.causal(), "window(1,1)"]), "grid([3,5],causal,window(1,1))"),
    (sa.grid([4, 4], ["full", "causal"], tile=(2, 2)), "grid([4,4],[2,2],full,causal)"),
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


def nearest(size, width, causal):
    """[size, size]: the window around each place, moved inwards at both ends; or before it."""
    mask = np.zeros((size, size), bool)
    for place in range(size):
        begin = place - width + 1 if causal else min(max(place - width // 2, 0), size - width)
        mask[place, max(begin, 0) : begin + width] = True
    return mask


@pytest.mark.parametrize(
    "sizes, window, tile, causal",
    [
        ((12,), (5,), None, None),
        ((12,), (4,), (3,), None),
        ((6, 8), (3, 5), None, None),
        ((6, 8), (3, 8), (2, 4), None),
        ((4, 6, 4), (1, 3, 2), (2, 3, 2), None),
        ((4, 6, 4), (3, 5, 3), None, (True, False, False)),
    ],
)
def test_neighborhoods_are_moved_inwards(sizes, window, tile, causal):
    places = np.indices(sizes).reshape(len(sizes), -1).T
    if tile is not None:
        in_tiles = places[np.lexsort([*(places % tile).T[::-1], *(places // tile).T[::-1]])]
        np.testing.assert_array_equal(places[sa.tile_order(sizes, tile)], in_tiles)
        places = in_tiles
    expected = np.ones((len(places), len(places)), bool)
    for axis, (size, width) in enumerate(zip(sizes, window)):
        on_axis = places[:, axis]
        expected &= nearest(size, width, causal is not None and causal[axis])[np.ix_(on_axis, on_axis)]
    pattern = sa.neighborhood(sizes, window, tile, causal)
    np.testing.assert_array_equal(pattern.to_mask(len(places))[0, 0], expected)
    if causal is None:
        assert set(expected.sum(axis=1)) == {np.prod(window)}


def test_grids_keep_heads_and_batch_entries_apart():
    pattern = sa.grid([2, 3], [sa.per_head(["full", "causal"]), sa.csr([0, 1, 2, 3], [2, 1, 0], 3)])
    extent = sa.Extent(6, 6, heads=2)
    text = "grid([2,3],per_head([0,1],full,causal),csr([0,1,2,3],[2,1,0],3))"
    np.testing.assert_array_equal(pattern.to_mask(extent), truth(text, extent))
    assert sa.load(pattern.save()) == pattern


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


def test_operators_take_texts_and_masks_on_either_side():
    sinks, mask = sa.sink(3), np.tri(8, k=2, dtype=bool)
    of = {"causal": sa.causal(), "mask": sa.mask(mask), "foreign": sa.mask(mask)}
    for name, other in {"causal": "causal", "mask": mask, "foreign": from_dlpack(mask)}.items():
        assert sinks & other == other & sinks == sinks & of[name]
        assert sinks | other == other | sinks == sinks | of[name]
        assert sinks - other == sinks - of[name] and other - sinks == of[name] - sinks
    for wrong in (3, None, [[True]]):
        with pytest.raises(TypeError):
            wrong & sinks  # noqa: B018
        with pytest.raises(TypeError):
            sinks - wrong  # noqa: B018
    with pytest.raises(sa.FormatError):
        sinks & "caus"  # noqa: B018
    with pytest.raises(sa.DTypeError):
        np.zeros((8, 8)) | sinks  # noqa: B018


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
        (lambda: sa.per_head([sa.full()], [0, 1 << 40]), sa.ArgumentError, "part_of_head[1]"),
        (lambda: sa.per_head([sa.full()], [0.9]), sa.DTypeError, "part_of_head"),
        (lambda: sa.per_batch([sa.full()], ["0"]), sa.DTypeError, "part_of_batch"),
        (lambda: sa.per_head([sa.full()], 0), sa.DTypeError, "part_of_head"),
        (lambda: sa.grid([4, 6], ["full", "full"], [4, 4]), sa.ArgumentError, "tile[1]"),
        (lambda: sa.grid([4, 6], ["full"]), sa.ShapeError, "parts"),
        (lambda: sa.grid([4, 6], ["full", "full"], [4]), sa.ShapeError, "tile"),
        (lambda: sa.tile_order([4, 6], [4, 4]), sa.ArgumentError, "tile[1]"),
        (lambda: sa.tile_order([4, 6], [4]), sa.ShapeError, "tile"),
        (lambda: sa.tile_order([-4, 6], [2, 2]), sa.ArgumentError, "sizes[0]"),
        (lambda: sa.tile_order([1 << 40, 1 << 40], [2, 2]), sa.ArgumentError, "sizes"),
        (lambda: sa.grid([], []), sa.ArgumentError, "axes"),
        (lambda: sa.grid([0], ["full"]), sa.ArgumentError, "sizes[0]"),
        (lambda: sa.grid(4, ["full"]), sa.DTypeError, "sizes"),
        (lambda: sa.grid([4], "full"), sa.DTypeError, "parts"),
        (lambda: sa.neighborhood([4, 6], [3, 7]), sa.ArgumentError, "window[1]"),
        (lambda: sa.neighborhood([4, 6], [3]), sa.ShapeError, "window"),
        (lambda: sa.neighborhood([4], [3], causal=[True, False]), sa.ShapeError, "causal"),
        (lambda: sa.union([]), sa.ArgumentError, "count"),
        (lambda: sa.union("causal"), sa.DTypeError, "parts"),
        (lambda: sa.intersection(sa.causal()), sa.DTypeError, "parts"),
        (lambda: sa.per_head("causal", [0, 0]), sa.DTypeError, "parts"),
        (lambda: sa.parse("causal & wind(3)"), sa.FormatError, "text"),
        (lambda: sa.parse("causal\ud800"), sa.FormatError, "text"),
        (lambda: sa.causal().stats(0), sa.ArgumentError, "extent.seq_q"),
        (lambda: sa.causal().show(0), sa.ArgumentError, "extent.seq_q"),
        (lambda: sa.causal().to_mask((4, -5)), sa.ArgumentError, "extent.seq_k"),
        (lambda: sa.causal().to_mask(sa.Extent(4, batch=-2)), sa.ArgumentError, "extent.batch"),
        (lambda: sa.causal().to_csr(-5), sa.ArgumentError, "extent.seq_q"),
        (lambda: sa.per_document("causal", [0, 0]).show(), sa.ArgumentError, "extent.seq_q"),
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


MASK = np.random.default_rng(2).random((2, 3, 20, 20)) < 0.4


@pytest.mark.parametrize("mask", [MASK[0, 0], MASK[0], MASK, MASK[:, :1]], ids=lambda mask: f"{mask.ndim} axes")
def test_masks_are_patterns(mask):
    extent = sa.Extent(20, batch=2, heads=3)
    expected = np.broadcast_to(mask, MASK.shape)
    np.testing.assert_array_equal(
        sa.intersection([sa.causal(), mask]).to_mask(extent), expected & np.tri(20, dtype=bool)
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 3, 8), np.float32) for _ in range(3))
    out = sa.attention(q, k, v, mask)
    np.testing.assert_array_equal(out, sa.attention(q, k, v, sa.mask(mask)))
    changed = mask.copy()
    changed[..., 3, :] = ~changed[..., 3, :]
    assert not np.array_equal(out, sa.attention(q, k, v, changed))


def test_masks_of_torch_are_patterns():
    torch = pytest.importorskip("torch")
    assert sa.union([torch.from_numpy(MASK[0, 0])]) == sa.mask(MASK[0, 0])


@pytest.mark.parametrize(
    "pattern, kind, words",
    [
        (None, sa.DTypeError, "NoneType"),
        (3, sa.DTypeError, "int"),
        (b"causal", sa.DTypeError, "bytes"),
        ([[True, False]], sa.DTypeError, "list"),
        (lambda head, q, k: q >= k, sa.DTypeError, "function"),
        (np.zeros((4, 4), np.float32), sa.DTypeError, "float32"),
        (np.zeros((4, 4), np.uint8), sa.DTypeError, "uint8"),
        (np.zeros(4, bool), sa.ShapeError, r"\[4\]"),
        (np.zeros((1, 1, 1, 4, 4), bool), sa.ShapeError, r"\[1, 1, 1, 4, 4\]"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, kind, words):
    x = np.zeros((1, 4, 1, 8), np.float32)
    for call in (
        lambda: sa.attention(x, x, x, pattern),
        lambda: sa.plan(pattern, x, x, x),
        lambda: sa.union([pattern]),
    ):
        with pytest.raises(kind, match=f"{words}.*accepted: a Pattern, its text, or a bool array") as caught:
            call()
        assert caught.value.argument == "pattern"


def test_what_makes_a_pattern_is_named():
    class Matrix:
        def tocsr(self):
            raise AssertionError

    for other, maker in ((lambda head, q, k: q >= k, "predicate makes"), (Matrix(), "csr makes")):
        with pytest.raises(sa.DTypeError, match=rf"seq_k\]\. sparseattn\.{maker} a pattern of a [a-z ]*$"):
            sa.union([other])


def test_texts_are_texts():
    for what in (None, 3, sa.causal()):
        with pytest.raises(sa.DTypeError, match="accepted: str"):
            sa.Pattern(what)


def test_a_pattern_is_neither_true_nor_false():
    for ask in (lambda: sa.causal() and sa.window(3, 0), lambda: not sa.causal(), lambda: bool(sa.mask(MASK))):
        with pytest.raises(TypeError, match="neither true nor false"):
            ask()


BLANK, TOKENS = "\u2800", 2**30


@pytest.mark.parametrize("tokens", [16_384, 131_072, TOKENS])
def test_thin_parts_are_seen(tokens):
    """A column of four keys, and a diagonal that is a hundred-thousandth of the width."""
    lines = sa.parse("causal & (sink(4) | window(1023,0))").drawing(tokens, 32)
    assert len(lines) == 16 and all(line[0] != BLANK for line in lines)
    assert all(lines[row][2 * row] != BLANK and lines[row][2 * row + 1] != BLANK for row in range(16))
    assert lines[8][4:13] == BLANK * 9 and lines[0][3:] == BLANK * 29
    ascii_lines = sa.parse("sink(1)").drawing(tokens, 32, encoding="ascii")
    assert set(ascii_lines) == {"." + " " * 31}


def test_where_all_is_thin_more_is_darker():
    few, more = (sa.dilated(-1, -1, step).drawing(16_384, 8) for step in (64, 4))
    dots = [sum(bin(ord(c) - 0x2800).count("1") for c in "".join(lines)) for lines in (few, more)]
    assert 0 < dots[0] < dots[1]


@pytest.mark.parametrize(
    "pattern, lines",
    [
        (sa.mask(np.eye(9, 30, dtype=bool)), 1),
        (sa.causal() & sa.csr([0, 1, 1], [3], 4), 1),
        (sa.transpose(sa.mask(np.ones((30, 9), bool))), 4),
        (sa.per_head(["causal", sa.sink(2)]), 4),
        (sa.per_batch([sa.mask(np.eye(64, dtype=bool)), "full"]), 4),
        (sa.rows(sa.mask(np.ones((9, 30), bool)), [(0, 9), (2, 5)], 9), 2),
        (sa.rows("causal", [(0, 9), (2, 5)], 9), 3),
        (sa.columns(sa.mask(np.ones((9, 9), bool)), [(0, 9), (2, 5)], 9), 2),
        (sa.per_document("causal", [0, 20, 300]), 4),
        (sa.per_document(sa.per_head(["causal", "full"]), [2, 9], [0, 40]), 1),
        (sa.tree([-1, 0, 0, 1, 3]), 2),
        (sa.xref_extend(sa.xref([1, 2, 3, 1]), [2, 3]), 2),
    ],
)
def test_patterns_with_sizes_of_their_own_show_these(pattern, lines):
    assert len(pattern.drawing(width=8)) >= lines
    assert "<img" in pattern._repr_html_()


def test_rows_are_shown_in_their_places():
    """Of a square: the last of 40 rows has all 40 keys before it, and the first one itself alone."""
    pattern = sa.rows("causal", [(0, 2), (38, 40)], 40)
    assert pattern.drawing() == pattern.drawing((4, 40)) != pattern.drawing(4)


def test_notebooks_show_the_text_and_a_picture():
    shown = sa.parse("causal & window(3,0)")._repr_html_()
    assert "causal &amp; window(3,0)" in shown and "256 x 256" in shown
    picture = base64.b64decode(re.search(r"base64,([^\"]*)", shown)[1])
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(picture))
    coverage = sa.parse("causal & window(3,0)").to_mask(256)[0, 0]
    np.testing.assert_array_equal(image < 0.9, coverage)
    assert sa.runtime_tokens(4)._repr_html_() == "<code>runtime_tokens(4)</code>"


@pytest.mark.parametrize(
    "call, kind, argument",
    [
        (lambda: sa.window(1.5, 0), sa.DTypeError, "left"),
        (lambda: sa.window(0, 1 << 80), sa.ArgumentError, "right"),
        (lambda: sa.sink(None), sa.DTypeError, "tokens"),
        (lambda: sa.dilated(4, 4, "2"), sa.DTypeError, "dilation"),
        (lambda: sa.grid([4, 2.0], ["full", "full"]), sa.DTypeError, "sizes[1]"),
        (lambda: sa.bigbird(64, 3, 1, 1.0), sa.DTypeError, "params.random_blocks"),
        (lambda: sa.csr([0, 1], [0], 4.0), sa.DTypeError, "seq_k"),
        (lambda: sa.runtime_blocks(16, None, 4), sa.DTypeError, "block_k"),
        (lambda: sa.predicate(3, 4, 4), sa.DTypeError, "keep"),
        (lambda: sa.predicate(max, 4, 4, heads="2"), sa.DTypeError, "heads"),
        (lambda: sa.causal().stats("many"), sa.DTypeError, "extent.seq_q"),
        (lambda: sa.causal().to_mask((4, 5.0)), sa.DTypeError, "extent.seq_k"),
        (lambda: sa.causal().to_mask(None), sa.DTypeError, "extent.seq_q"),
        (lambda: sa.causal().keeps(4, 1.0, 0), sa.DTypeError, "q"),
        (lambda: sa.causal().keeps(4, 1, 0, head=None), sa.DTypeError, "head"),
        (lambda: sa.causal().to_csr(4, head=0.0), sa.DTypeError, "head"),
        (lambda: sa.causal().to_image(4, "4"), sa.DTypeError, "height"),
        (lambda: sa.causal().to_image(4, -1), sa.ShapeError, "coverage"),
        (lambda: sa.causal().show(width=2.5), sa.DTypeError, "width"),
        (lambda: sa.causal().show(width=-2), sa.ShapeError, "coverage"),
        (lambda: sa.load("text"), sa.DTypeError, "bytes"),
        (lambda: sa.load(memoryview(sa.causal().save())[::2]), sa.DTypeError, "bytes"),
        (lambda: sa.load(np.zeros(64, np.uint8)[::2]), sa.DTypeError, "bytes"),
    ],
)
def test_what_is_no_number_is_refused_by_name(call, kind, argument):
    with pytest.raises(kind, match="accepted: ") as caught:
        call()
    assert caught.value.argument == argument


@pytest.mark.parametrize("question", ["stats", "to_mask", "to_image", "to_csr"])
def test_ctrl_c_ends_a_question(question):
    """A thousand keys at random for each query, from position 0 on: many seconds."""
    pattern = sa.bigbird(1, 1, 0, 1000)
    with ctrl_c():
        getattr(pattern, question)(sa.Extent(1 << 17, 2048, q_offset=0))
    assert sa.causal().stats(4).pairs == 10
