# SPDX-License-Identifier: MIT
"""Whose memory patterns read: copied unless borrowed, and borrowed arrays live as long as somebody reads them."""

import copy
import weakref

import numpy as np
import pytest

import sparseattn as sa

ROWS, COLUMNS = [0, 2, 2, 3], [0, 4, 1]
VALUES = np.random.default_rng(4).random((2, 3, 5, 7)) < 0.4


def test_copied_unless_borrowed():
    rows, columns, values = np.array(ROWS), np.array(COLUMNS), VALUES[0, 0].copy()
    copied = sa.csr(rows, columns, 5) | sa.transpose(sa.bsr(rows, columns, 1, 1, 3, 5)), sa.mask(values)
    borrowed = sa.csr(rows, columns, 5, borrow=True), sa.mask(values, borrow=True)
    expected = [pattern.to_mask(size) for pattern, size in zip(copied, ((3, 5), (5, 7)))]
    columns[2], values[0] = 3, ~values[0]  # not allowed where they are lent: it shows who reads them
    for pattern, mask, size in zip(copied, expected, ((3, 5), (5, 7))):
        np.testing.assert_array_equal(pattern.to_mask(size), mask)
    assert borrowed[0].keeps((3, 5), 2, 3) and not borrowed[0].keeps((3, 5), 2, 1)
    np.testing.assert_array_equal(borrowed[1].to_mask((5, 7))[0, 0], values)


@pytest.mark.parametrize(
    "make, argument",
    [
        (lambda: sa.csr(np.arange(9)[::4], np.arange(8), 9, borrow=True), "row_ptr"),
        (lambda: sa.csr(np.array([0, 1]), np.arange(9)[5::-5][:1], 9, borrow=True), None),  # one number has no stride
        (lambda: sa.csr(np.array([0, 2]), np.arange(4)[::-2][::1], 9, borrow=True, trust=True), "col_idx"),
        (lambda: sa.csr(np.zeros(17, np.uint8)[1:].view(np.int64), [], 9, borrow=True), "row_ptr"),
        (lambda: sa.mask(VALUES[0, 0, ::-1], borrow=True), "mask"),
        (lambda: sa.mask(VALUES[0, 0].T, borrow=True), "mask"),
        (lambda: sa.mask(VALUES[:, ::2, 1:3], borrow=True), None),
        (lambda: sa.mask(np.broadcast_to(VALUES[0, 0, :1], (5, 7)), borrow=True), None),
    ],
)
def test_only_arrays_that_can_be_read_in_place_are_borrowed(make, argument):
    if argument is None:
        assert make().save()
        return
    with pytest.raises(sa.ArgumentError) as caught:
        make()
    assert (caught.value.status, caught.value.argument) == ("SPATTN_E_LAYOUT", argument)


BORROWERS = [
    lambda p: p,
    lambda p: p | sa.causal(),
    lambda p: sa.causal() & p & p,
    lambda p: sa.full() - p,
    lambda p: p - sa.full(),
    lambda p: sa.transpose(sa.transpose(p)),
    lambda p: sa.union([sa.causal(), p, "full"]),
    lambda p: sa.intersection(["full", p]),
    lambda p: sa.per_head([p, "full"], [0, 0]),
    lambda p: sa.per_batch([sa.full(), p], [1]),
    lambda p: sa.per_document(p, [0, 9]),
    lambda p: sa.rows(p, [(5, 9), (0, 5)], 9),
    lambda p: sa.columns(p, [(5, 9), (0, 5)], 9),
    lambda p: sa.Plan(sa.rows(p, [(0, 9)], 9), heads_q=2, seq_q=9, head_dim=4, reference=True),
    lambda p: sa.Plan(p, heads_q=2, seq_q=9, head_dim=4),
    lambda p: sa.Plan(p & sa.full(), heads_q=2, seq_q=9, head_dim=4, reference=True, backward=True),
    lambda p: copy.deepcopy(p),
    lambda p: sa.per_head([sa.per_batch([sa.transpose(p | sa.sink(1))], [0]), p], [0, 1]),
]


def lent(kind):
    """A pattern that borrows, and weak references to what it must keep alive, and to nothing else."""
    values = np.tri(9, dtype=np.uint8)
    if kind == "mask":
        return sa.mask(values, borrow=True), [weakref.ref(values)]
    arrays = np.arange(0, 28, 3), np.tile([1, 4, 8], 9)
    made = sa.csr(*arrays, 9, borrow=True) if kind == "csr" else sa.bsr(*arrays, 1, 1, 9, 9, borrow=True)
    return made, [weakref.ref(array) for array in arrays]


@pytest.mark.parametrize("number", range(len(BORROWERS)))
@pytest.mark.parametrize("kind", ["csr", "bsr", "mask"])
def test_borrowed_arrays_live_as_long_as_they_are_read_and_no_longer(kind, number):
    pattern, arrays = lent(kind)
    holder = BORROWERS[number](pattern)
    del pattern
    assert all(array() is not None for array in arrays)
    if isinstance(holder, sa.Plan):
        q = np.ones((1, 9, 2, 4), np.float32)
        assert np.isfinite(holder.forward(q, q, q)).all()
    else:
        assert holder.save()
    del holder
    assert all(array() is None for array in arrays)


def test_plans_of_borrowed_arrays_are_not_found_again():
    context, q = sa.Context("cpu"), np.random.default_rng(0).standard_normal((1, 9, 2, 4), np.float32)

    def run():
        columns = np.tile([1, 4, 8], 9)
        pattern = sa.csr(np.arange(0, 28, 3), columns, 9, borrow=True)
        out = sa.attention(q, q, q, pattern, reference=True, context=context)
        columns[:] = 0  # what a plan that outlived this would read
        return out

    np.testing.assert_array_equal(run(), run())


def test_memory_that_is_lent_cannot_be_pulled_away():
    memory = bytearray(b"\1\0\0\1")
    pattern = sa.mask(np.frombuffer(memory, np.uint8).reshape(2, 2), borrow=True)
    with pytest.raises(BufferError):
        memory.clear()
    rows = np.array(ROWS)
    other = sa.csr(rows, COLUMNS, 5, borrow=True)
    with pytest.raises(ValueError, match="refer"):
        rows.resize(100, refcheck=True)
    assert pattern.stats(2).pairs == 2 and other.stats((3, 5)).pairs == 3
