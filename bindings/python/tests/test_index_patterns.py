# SPDX-License-Identifier: MIT
"""Patterns made of arrays: what they mean, what they may be made of, and the bytes that bring them back."""

import copy
import gc
import itertools
import pickle
import random
import subprocess
import sys

import numpy as np
import oracle
import pytest

import sparseattn as sa

ROWS, COLUMNS = [0, 2, 2, 3], [0, 4, 1]
VALUES = np.random.default_rng(4).random((2, 3, 5, 7)) < 0.4


def text_of(values):
    return f"mask([{','.join(str(int(x)) for x in np.ravel(values))}],{','.join(map(str, np.shape(values)))})"


CASES = [
    (sa.csr(ROWS, COLUMNS, 5), "csr([0,2,2,3],[0,4,1],5)", sa.Extent(3, 5)),
    (sa.csr(np.array([0, 0], np.int32), [], 1), "csr([0,0],[],1)", sa.Extent(1, 1)),
    (sa.bsr([0, 1, 3], [1, 0, 2], 4, 2, 7, 5), "bsr([0,1,3],[1,0,2],4,2,7,5)", sa.Extent(7, 5, q_offset=9)),
    (sa.mask(VALUES[0, 0]), text_of(VALUES[0, 0]), sa.Extent(5, 7, batch=2, heads=2)),
    (sa.mask(3 * VALUES[0].astype(np.uint8)), text_of(VALUES[0]), sa.Extent(5, 7, heads=3)),
    (sa.mask(VALUES), text_of(VALUES), sa.Extent(5, 7, batch=2, heads=3, q_offset=-1)),
    (
        sa.per_document("causal", [0, 2, 5], [0, 3, 6]),
        "per_document([0,2,5],[0,3,6],causal)",
        sa.Extent(5, 7, batch=2),
    ),
    (sa.per_document(sa.sink(1), np.array([1, 4], np.int32)), "per_document([1,4],[1,4],sink(1))", sa.Extent(4, 4)),
    (
        sa.causal() - sa.transpose(sa.csr([0, 1, 3, 3], [2, 0, 1], 3)),
        "causal - transpose(csr([0,1,3,3],[2,0,1],3))",
        sa.Extent(3, 3),
    ),
    (
        sa.per_document(sa.csr([0, 1, 3], [2, 0, 1], 3) & sa.causal(), [0, 2, 4], [0, 3, 6]),
        "per_document([0,2,4],[0,3,6],csr([0,1,3],[2,0,1],3) & causal)",
        sa.Extent(4, 6),
    ),
    (sa.rows("causal", [(0, 2), (6, 8)], 8), "rows([0,2,6,8],8,causal)", sa.Extent(4, 9, batch=2, q_offset=-7)),
    (sa.rows(sa.sink(1), np.array([[1, 4]], np.int32), 9), "rows([1,4],9,sink(1))", sa.Extent(3, 5)),
    (sa.columns("causal", [(0, 2), (6, 8)], 8), "columns([0,2,6,8],8,causal)", sa.Extent(9, 4, batch=2, q_offset=-3)),
    (sa.columns(sa.sink(1), np.array([[1, 4]], np.int32), 9), "columns([1,4],9,sink(1))", sa.Extent(5, 3)),
    (
        sa.rows(sa.csr(ROWS, COLUMNS, 5), np.array([[2, 0, 3, 0]])[:, ::2], 3) - sa.sink(1),
        "rows([2,3],3,csr([0,2,2,3],[0,4,1],5)) - sink(1)",
        sa.Extent(1, 5),
    ),
]
IDS = [text[:40] for _, text, _ in CASES]


def truth(text, extent):
    sees = oracle.parse(text) if isinstance(text, str) else text
    return oracle.to_mask(sees, oracle.Extent(extent.seq_q, extent.seq_k, extent.batch, extent.heads, extent.q_offset))


@pytest.mark.parametrize("pattern, text, extent", CASES, ids=IDS)
def test_constructor_is_its_text_and_its_definition(pattern, text, extent):
    assert pattern == sa.parse(text) and hash(pattern) == hash(sa.parse(text))
    expected = truth(text, extent)
    np.testing.assert_array_equal(pattern.to_mask(extent), expected)
    assert pattern.stats(extent).pairs == expected.sum()
    np.testing.assert_array_equal(pattern.to_csr(extent)[1], expected[0, 0].nonzero()[1])
    np.testing.assert_allclose(pattern.to_image(extent, 2, 2), oracle.coverage(expected[0, 0], *image_size(extent)))


def image_size(extent):
    return min(2, extent.seq_q), min(2, extent.seq_k)


def test_what_a_pattern_says_makes_it_again():
    pattern = sa.causal() & (sa.sink(2) | sa.window(9, 0) | sa.strided(11))
    mask = pattern.to_mask((70, 90))
    row_ptr, col_idx = pattern.to_csr((70, 90))
    again = sa.csr(row_ptr, col_idx, 90)
    assert sa.mask(mask) == sa.mask(mask[0, 0]) and again == sa.csr(row_ptr.astype(np.int32), col_idx.tolist(), 90)
    for other in (again, sa.mask(mask), sa.bsr(row_ptr, col_idx, 1, 1, 70, 90)):
        np.testing.assert_array_equal(other.to_mask((70, 90)), mask)
    assert "#" in repr(again)
    with pytest.raises(sa.FormatError):
        sa.parse(repr(again))


def random_lists(r, extent):
    """A pattern through arrays, and the oracle's of the same."""
    kind = r.choice(["csr", "bsr", "mask"])
    dtype, borrow = r.choice([np.int32, np.int64]), r.random() < 0.5
    if kind == "mask":
        values = np.array([r.random() < 0.4 for _ in range(extent.seq_q * extent.seq_k)])
        plane = values.reshape(extent.seq_q, extent.seq_k)
        return sa.mask(plane, borrow=borrow), oracle.mask(values, extent.seq_q, extent.seq_k)
    block_q, block_k = (1, 1) if kind == "csr" else (r.randint(1, 9), r.randint(1, 9))
    rows, columns = -(-extent.seq_q // block_q), -(-extent.seq_k // block_k)
    lists = [sorted(r.sample(range(columns), r.randint(0, columns))) for _ in range(rows)]
    row_ptr = np.array([0, *itertools.accumulate(map(len, lists))], dtype)
    col_idx = np.array(list(itertools.chain(*lists)), dtype)
    sizes = (extent.seq_k,) if kind == "csr" else (block_q, block_k, extent.seq_q, extent.seq_k)
    options = {"borrow": borrow, "trust": r.random() < 0.5}
    return getattr(sa, kind)(row_ptr, col_idx, *sizes, **options), getattr(oracle, kind)(row_ptr, col_idx, *sizes)


def random_pair(r, extent, depth):
    if depth == 0:
        text = r.choice(["causal", "window(4,2)", "sink(3)", "strided(3)", "global_tokens(1,5)", "logsparse"])
        return random_lists(r, extent) if r.random() < 0.6 else (sa.parse(text), oracle.parse(text))
    (a, one), (b, other) = random_pair(r, extent, depth - 1), random_pair(r, extent, depth - 1)
    return r.choice(
        [
            lambda: (a | b, oracle.union(one, other)),
            lambda: (a & b, oracle.intersection(one, other)),
            lambda: (a - b, oracle.difference(one, other)),
            lambda: (sa.transpose(a), oracle.transpose(one)),
            lambda: (sa.per_head([a, b], [1, 0]), oracle.per_head([one, other], [1, 0])),
            lambda: (sa.per_batch([a, b], [0, 1]), oracle.per_batch([one, other], [0, 1])),
        ]
    )()


@pytest.mark.parametrize("seed", range(40))
def test_random_algebra(seed):
    r = random.Random(seed)
    extent = sa.Extent(r.randint(1, 30), r.randint(1, 30), 2, 2, r.choice([None, -3, 8]))
    for _ in range(10):
        pattern, sees = random_pair(r, extent, r.randint(0, 3))
        gc.collect(0)  # nothing but the pattern holds what it borrows
        expected = truth(sees, extent)
        np.testing.assert_array_equal(pattern.to_mask(extent), expected)
        again = sa.load(pattern.save())
        assert again == pattern and hash(again) == hash(pattern) and repr(again) == repr(pattern)
        np.testing.assert_array_equal(again.to_mask(extent), expected)


# ---- what they may be made of ----


class OnlyDlpack:
    """An array of a library that knows DLPack and nothing else."""

    def __init__(self, values, device=(1, 0)):
        self.values, self.device = values, device

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def test_arrays_of_other_libraries():
    rows, columns, mask = np.array(ROWS), np.array(COLUMNS, np.int32), VALUES.astype(np.uint8)
    expected = sa.csr(rows, columns, 5)
    for borrow in (False, True):
        assert sa.csr(OnlyDlpack(rows), OnlyDlpack(columns), 5, borrow=borrow) == expected
        assert sa.mask(OnlyDlpack(mask), borrow=borrow) == sa.mask(memoryview(mask), borrow=borrow) == sa.mask(VALUES)
        assert sa.csr(range(0, 4), (1, 0, 2), 3, borrow=borrow) == sa.csr([0, 1, 2, 3], [1, 0, 2], 3)
    with pytest.raises(sa.ArgumentError) as caught:
        sa.csr(rows, OnlyDlpack(columns, device=(2, 0)), 5)
    assert caught.value.argument == "col_idx" and caught.value.status == "SPATTN_E_DEVICE"


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    rows, columns = torch.tensor(ROWS, dtype=torch.int32), torch.tensor(COLUMNS)
    mask = torch.from_numpy(VALUES)
    for borrow in (False, True):
        assert sa.csr(rows, columns, 5, borrow=borrow) == sa.csr(ROWS, COLUMNS, 5)
        assert sa.mask(mask, borrow=borrow) == sa.mask(VALUES)
    assert sa.mask(mask.transpose(0, 1)) == sa.mask(VALUES.swapaxes(0, 1))
    assert sa.per_document("causal", rows) == sa.per_document("causal", ROWS)
    for make in (sa.rows, sa.columns):
        assert make("causal", torch.tensor([[4, 8], [0, 1]]), 8) == make("causal", [(4, 8), (0, 1)], 8)
    for bad in (mask.float().requires_grad_(), mask.to(torch.bfloat16), mask.to("meta"), mask.to_sparse()):
        with pytest.raises(sa.DTypeError) as caught:
            sa.mask(bad)
        assert caught.value.argument == "mask"


def test_sparse_matrices_of_scipy():
    sparse = pytest.importorskip("scipy.sparse")
    kept = np.random.default_rng(5).random((6, 9)) < 0.4
    for kind in (sparse.csr_matrix, sparse.csr_array, sparse.csc_array, sparse.coo_matrix):
        np.testing.assert_array_equal(sa.csr(kind(kept)).to_mask((6, 9))[0, 0], kept)
    unsorted = sparse.csr_array((np.ones(4), [2, 0, 0, 1], [0, 3, 4]), shape=(2, 3))
    assert str(sa.csr(unsorted)) == "csr([0,2,3],[0,2,1],3)" and unsorted.indices.tolist() == [2, 0, 0, 1]
    with pytest.raises(sa.DTypeError) as caught:
        sa.csr([0, 1])
    assert caught.value.argument == "col_idx"


def test_views_are_read_as_they_lie():
    wide = np.repeat(VALUES, 2, axis=3)
    for view in (wide[..., ::2], np.asfortranarray(VALUES), VALUES[::-1, :, ::-1, ::-1][::-1, :, ::-1, ::-1]):
        assert sa.mask(view) == sa.mask(VALUES)
    backwards = VALUES[0, 0, ::-1, ::-1]
    assert sa.mask(backwards) == sa.mask(backwards.copy()) != sa.mask(VALUES[0, 0])
    assert sa.mask(np.broadcast_to(VALUES[0, 0, :1], (5, 7))) == sa.mask(np.repeat(VALUES[0, 0, :1], 5, axis=0))
    numbers = np.arange(0, 12, 2)
    assert sa.csr(numbers[:3], numbers[::-1][:4][::-1], 11) == sa.csr([0, 2, 4], [4, 6, 8, 10], 11)
    memory = np.empty(8 * 4 + 1, np.uint8)
    odd = memory[1:].view(np.int64)
    odd[:] = ROWS
    assert sa.csr(odd, COLUMNS, 5) == sa.csr(ROWS, COLUMNS, 5)


HUGE = 1 << 62


@pytest.mark.parametrize(
    "make, kind, status, argument",
    [
        (lambda: sa.csr([1, 2], [0, 1], 3), sa.ArgumentError, "RANGE", "row_ptr"),
        (lambda: sa.csr([0, 2, 1], [0], 3), sa.ArgumentError, "RANGE", "row_ptr"),
        (lambda: sa.csr([0, HUGE], [0], 3), sa.ShapeError, "SHAPE", "col_idx"),
        (lambda: sa.csr([], [], 3), sa.ShapeError, "SHAPE", "row_ptr"),
        (lambda: sa.csr([[0, 1]], [0], 3), sa.ShapeError, "SHAPE", "row_ptr"),
        (lambda: sa.csr(0, [0], 3), sa.ShapeError, "SHAPE", "row_ptr"),
        (lambda: sa.csr([0, 1], [3], 3), sa.ArgumentError, "RANGE", "col_idx"),
        (lambda: sa.csr([0, 2], [1, 1], 3), sa.ArgumentError, "RANGE", "col_idx"),
        (lambda: sa.csr([0, 1], [0], 0), sa.ArgumentError, "RANGE", "seq_k"),
        (lambda: sa.csr([0.0, 1.0], [0], 3), sa.DTypeError, "DTYPE", "row_ptr"),
        (lambda: sa.csr([0, 1], ["a"], 3), sa.DTypeError, "DTYPE", "col_idx"),
        (lambda: sa.csr([0, 1], [None], 3), sa.DTypeError, "DTYPE", "col_idx"),
        (lambda: sa.csr([0, 1], [[0], [1, 2]], 3), sa.DTypeError, "DTYPE", "col_idx"),
        (lambda: sa.csr([0, 1], [2**64], 3), sa.DTypeError, "DTYPE", "col_idx"),
        (lambda: sa.csr(np.array([0, 1], ">i8"), [0], 3), sa.DTypeError, "DTYPE", "row_ptr"),
        (lambda: sa.csr(np.array([0, 1], np.int16), [0], 3), sa.DTypeError, "DTYPE", "row_ptr"),
        (lambda: sa.csr(np.array([0, 1], np.uint64), [0], 3), sa.DTypeError, "DTYPE", "row_ptr"),
        (lambda: sa.csr(np.array([0, 1], bool), [0], 3), sa.DTypeError, "DTYPE", "row_ptr"),
        (lambda: sa.csr(np.array([0, 1], "m8[s]"), [0], 3), sa.DTypeError, "DTYPE", "row_ptr"),
        (lambda: sa.bsr([0, 1], [0], 0, 1, 1, 1), sa.ArgumentError, "RANGE", "block_q"),
        (lambda: sa.bsr([0, 1], [0], 2, 2, 4, 4), sa.ShapeError, "SHAPE", "row_ptr"),
        (lambda: sa.bsr([0, 1], [2], 4, 2, 4, 4), sa.ArgumentError, "RANGE", "col_idx"),
        (lambda: sa.mask([True, False]), sa.ShapeError, "SHAPE", "mask"),
        (lambda: sa.mask(np.ones((1, 1, 1, 1, 1), bool)), sa.ShapeError, "SHAPE", "mask"),
        (lambda: sa.mask(np.ones((0, 3), bool)), sa.ArgumentError, "RANGE", "mask"),
        (lambda: sa.mask([[1, 0]]), sa.DTypeError, "DTYPE", "mask"),
        (lambda: sa.mask(np.ones((2, 2), np.float32)), sa.DTypeError, "DTYPE", "mask"),
        (lambda: sa.mask(np.ones((2, 2), "i1")), sa.DTypeError, "DTYPE", "mask"),
        (lambda: sa.mask(np.zeros((2, 2), [("a", "u1")])), sa.DTypeError, "DTYPE", "mask"),
        (lambda: sa.mask(None), sa.DTypeError, "DTYPE", "mask"),
        (lambda: sa.mask(VALUES).stats((5, 7)), sa.ShapeError, "SHAPE", "pattern"),
        (lambda: sa.csr(ROWS, COLUMNS, 5).stats((3, 6)), sa.ShapeError, "SHAPE", "pattern"),
        (lambda: sa.per_document("full", [0, 2, 1]), sa.ArgumentError, "RANGE", "cu_q"),
        (lambda: sa.per_document("full", [0, 2], [0, 1, 2]), sa.ShapeError, "SHAPE", "cu_k"),
        (lambda: sa.per_document("full", [0, 2], [0.5, 1]), sa.DTypeError, "DTYPE", "cu_k"),
        (lambda: sa.per_document("full", [0, 9]).stats((8, 9)), sa.ShapeError, "SHAPE", "pattern"),
        (lambda: sa.per_document("wind", [0, 9]), sa.FormatError, "FORMAT", "text"),
        (lambda: sa.rows("full", [], 9), sa.ShapeError, "SHAPE", "ranges"),
        (lambda: sa.rows("full", [0, 2], 9), sa.ShapeError, "SHAPE", "ranges"),
        (lambda: sa.rows("full", [(0, 2, 3)], 9), sa.ShapeError, "SHAPE", "ranges"),
        (lambda: sa.rows("full", np.zeros((0, 2), int), 9), sa.ShapeError, "SHAPE", "ranges"),
        (lambda: sa.rows("full", [(0, 2), (8, 10)], 9), sa.ArgumentError, "RANGE", "ranges"),
        (lambda: sa.rows("full", [(2, 2)], 9), sa.ArgumentError, "RANGE", "ranges"),
        (lambda: sa.rows("full", [(0, 0.5)], 9), sa.DTypeError, "DTYPE", "ranges"),
        (lambda: sa.rows("full", [(0, 2), (3,)], 9), sa.DTypeError, "DTYPE", "ranges"),
        (lambda: sa.rows("full", [(0, 2)], 0), sa.ArgumentError, "RANGE", "seq_q"),
        (lambda: sa.rows("full", [(0, 2)], 2.5), sa.DTypeError, "DTYPE", "seq_q"),
        (lambda: sa.rows("full", [(0, 2)], 9).stats(3), sa.ShapeError, "SHAPE", "pattern"),
        (lambda: sa.rows("wind", [(0, 2)], 9), sa.FormatError, "FORMAT", "text"),
        (lambda: sa.columns("full", [], 9), sa.ShapeError, "SHAPE", "ranges"),
        (lambda: sa.columns("full", [(0, 2), (8, 10)], 9), sa.ArgumentError, "RANGE", "ranges"),
        (lambda: sa.columns("full", [(0, 2)], 0), sa.ArgumentError, "RANGE", "seq_k"),
        (lambda: sa.columns("full", [(0, 2)], 2.5), sa.DTypeError, "DTYPE", "seq_k"),
        (lambda: sa.columns("full", [(0, 2)], 9).stats(3), sa.ShapeError, "SHAPE", "pattern"),
        (lambda: sa.columns("runtime_tokens(3)", [(0, 2)], 9), sa.UnsupportedError, "UNSUPPORTED", "pattern"),
        (lambda: sa.predicate(lambda *_: 1, 0, 1), sa.ArgumentError, "RANGE", "seq_q"),
        (lambda: sa.predicate(lambda *_: 1, 1 << 15, 1 << 16), sa.ArgumentError, "RANGE", "seq_k"),
        (lambda: sa.predicate(lambda *_: 1, 1, 1, heads=0), sa.ArgumentError, "RANGE", "heads"),
    ],
)
def test_errors_are_typed_and_name_the_argument(make, kind, status, argument):
    with pytest.raises(kind) as caught:
        make()
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.argument) == (f"SPATTN_E_{status}", argument)
    assert "accepted" in str(caught.value) or kind is sa.FormatError


def test_trusted_columns_are_not_checked():
    with pytest.raises(sa.ArgumentError):
        sa.csr([0, 3], [5, 1, 1], 9)
    pattern = sa.csr([0, 3], [5, 1, 1 << 40], 9, trust=True)
    assert 0 <= pattern.stats((1, 9)).pairs <= 9
    with pytest.raises(sa.ArgumentError):
        sa.csr([0, -1, 3], [5, 1, 1], 9, trust=True)


# ---- bytes ----


@pytest.mark.parametrize("pattern, text, extent", CASES, ids=IDS)
def test_saved_patterns_come_back(pattern, text, extent):
    saved = pattern.save()
    assert isinstance(saved, bytes) and saved == sa.parse(text).save()
    for buffer in (saved, bytearray(saved), memoryview(saved), np.frombuffer(saved, np.uint8)):
        assert sa.load(buffer) == pattern
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps({"a": [pattern, pattern]}, protocol))["a"]
        assert again[0] == pattern and again[0] is again[1] and repr(again[0]) == repr(pattern)
    assert copy.copy(pattern) is copy.deepcopy(pattern) is pattern


def test_another_process_reads_what_was_saved(tmp_path):
    pattern = sa.csr(*sa.bigbird(4, 3, 1, 2).to_csr(300), 300, borrow=True) | sa.sink(2)
    (tmp_path / "saved").write_bytes(pickle.dumps(pattern))
    program = (
        "import pickle, sys; p = pickle.load(open(sys.argv[1], 'rb')); print(repr(p), int(p.stats(300).pairs), hash(p))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "saved"], capture_output=True, text=True)
    assert done.stdout.strip() == f"{pattern!r} {int(pattern.stats(300).pairs)} {hash(pattern)}", done.stderr


def test_bytes_that_are_no_pattern():
    saved = sa.csr(ROWS, COLUMNS, 5).save()
    damaged = [b"", b"\0" * 40, saved[:-1], saved + b"\0", saved[::-1]]
    damaged += [bytes(byte ^ (1 << n % 8) * (n == at) for n, byte in enumerate(saved)) for at in range(len(saved))]
    for bad in damaged:
        with pytest.raises(sa.FormatError) as caught:
            sa.load(bad)
        assert caught.value.argument == "bytes" and "byte " in str(caught.value)
    for other in ("causal", 7, None, memoryview(saved)[::2]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            sa.load(other)
