# SPDX-License-Identifier: MIT
"""Patterns that a Python function says."""

import functools
import gc
import itertools
import signal
import threading
import weakref

import numpy as np
import oracle
import pytest

import sparseattn as sa


def test_predicates_are_asked_once_for_every_pair():
    asked = []

    def keep(head, q, k):
        asked.append((head, q, k))
        return (head + q * k) % 3 == 0

    pattern = sa.predicate(keep, 4, 6, heads=2)
    assert asked == list(itertools.product(range(2), range(4), range(6)))
    extent = sa.Extent(4, 6, heads=2)
    sees = oracle.predicate(lambda head, q, k: (head + q * k) % 3 == 0, 2, 4, 6)
    expected = oracle.to_mask(sees, oracle.Extent(4, 6, heads=2))
    np.testing.assert_array_equal(pattern.to_mask(extent), expected)
    assert pattern == sa.mask(expected[0]) and len(asked) == 48
    forgotten = weakref.ref(keep)
    del keep
    gc.collect()
    assert forgotten() is None


@pytest.mark.parametrize("answer", [True, 1, -1, 2.5, "yes", [0], np.True_, np.float32(3), object()])
def test_whatever_is_true_keeps(answer):
    assert sa.predicate(lambda *_: answer, 1, 2).stats((1, 2)).pairs == 2


@pytest.mark.parametrize("answer", [False, 0, None, "", [], np.False_, 0.0])
def test_whatever_is_false_does_not(answer):
    assert sa.predicate(lambda *_: answer, 1, 2).stats((1, 2)).pairs == 0


class Own(Exception):
    pass


@pytest.mark.parametrize("kind", [Own, ZeroDivisionError, KeyboardInterrupt, SystemExit, StopIteration, sa.ShapeError])
def test_exceptions_come_out_as_they_were_raised(kind):
    error, cause, asked = kind("reason"), OSError("cause"), []

    def keep(head, q, k):
        asked.append(k)
        if k == 3:
            raise error from cause
        return 1

    with pytest.raises(kind) as caught:
        sa.predicate(keep, 1, 9)
    assert caught.value is error and error.__cause__ is cause and asked == [0, 1, 2, 3]
    assert caught.traceback[-1].name == "keep"
    assert sa.predicate(lambda *_: 1, 1, 9).stats((1, 9)).pairs == 9  # the next call is as ever


def test_what_a_signal_raises_between_two_questions_comes_out():
    """The function is one of C's, so that Python runs the handler where it begins, or ends, to ask."""

    def interrupt(*_):
        raise Own("reason")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(20):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Own, match="reason"):
                sa.predicate(max, 1 << 12, 1 << 12)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_answers_without_truth_and_functions_that_are_none():
    with pytest.raises(ValueError, match="ambiguous"):
        sa.predicate(lambda *_: np.ones(2), 1, 1)
    with pytest.raises(TypeError):
        sa.predicate(lambda q: True, 1, 1)
    with pytest.raises(TypeError, match="accepted: a function"):
        sa.predicate(7, 1, 1)


def test_predicates_within_predicates_and_on_threads():
    def keep(head, q, k):
        with pytest.raises(Own):
            sa.predicate(functools.partial(fail, q), 1, 1)
        return sa.predicate(lambda *_: q >= k, 1, 1).stats(1).pairs

    def fail(q, *_):
        raise Own(q)

    found = []
    threads = [threading.Thread(target=lambda: found.append(sa.predicate(keep, 6, 6))) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [sa.mask(np.tri(6, dtype=bool))] * 4
