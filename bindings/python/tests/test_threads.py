# SPDX-License-Identifier: MIT
"""Threads that use the package at the same time, and change places after every few instructions."""

import os
import subprocess
import sys
import sysconfig
import threading

import numpy as np
import pytest

import sparseattn as sa
from sparseattn import _frames

TEXTS = ["causal", "window(5,3)", "causal & (sink(2) | window(9,0))", "block_diagonal(7)", "bigbird(8,3,1,1,3)"]
THREADS = 6
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.fixture(autouse=True)
def restless():
    """With a GIL, what a thread does between two of its instructions is then seen by others nearly always."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work):
    """Calls work(n) on threads that begin together; what they returned, in order. Raises what one of them raised."""
    start, results, errors = threading.Barrier(THREADS), [None] * THREADS, []

    def run(n):
        start.wait()
        try:
            results[n] = work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for error in errors:
        raise error
    return results


def operands(n, seq=24, dtype=np.float32):
    rng = np.random.default_rng(n)
    return [rng.standard_normal((1, seq, heads, 8)).astype(dtype) for heads in (2, 1, 1)]


def test_calls_of_different_forms_share_plans_and_their_memory():
    """Threads take turns with few plans, whose structs and workspaces must not mix."""
    forms = [(24, np.float32), (40, np.float32), (24, np.float64), (57, np.float16)]
    expected = {
        (n, form, text): sa.attention(*operands(n, *form), text, return_lse=True)
        for n in range(THREADS) for form in forms for text in TEXTS[:2]
    }  # fmt: skip

    def work(n):
        for turn in range(30):
            form, text = forms[(n + turn) % 4], TEXTS[turn % 2]
            x = operands(n, *form)
            if turn % 3 == 0:
                x[1] = np.repeat(x[1], 2, 2)[:, :, ::2]  # strides of their own
            found = sa.attention(*x, text, return_lse=True)
            for one, other in zip(found, expected[n, form, text], strict=True):
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(sa.attention(*x, text), expected[n, form, text][0])

    at_once(work)


def test_one_plan_forward_and_backward():
    plan = sa.plan(TEXTS[2], *operands(0), backward=True)

    def run(n):
        q, k, v = operands(n)
        out, lse = plan.forward(q, k, v, return_lse=True)
        return out, lse, *plan.backward(q, k, v, out, lse, out)

    expected = [run(n) for n in range(THREADS)]
    for found, wanted in zip(at_once(lambda n: [run(n) for _ in range(20)]), expected, strict=True):
        for one in found:
            [np.testing.assert_array_equal(x, y) for x, y in zip(one, wanted, strict=True)]


def test_patterns_are_made_shared_and_let_go():
    shared = sa.mask(np.tri(24, dtype=bool)) | sa.window(1, 1)

    def work(n):
        counted = []
        for turn in range(20):
            own = sa.csr(*sa.parse(TEXTS[turn % 5]).to_csr(24), 24)
            both = (own | shared) & sa.parse(TEXTS[n % 5])
            counted.append(both.stats(24).pairs)
            assert hash(both) == hash((shared | own) & sa.parse(TEXTS[n % 5])) and sa.load(own.save()) == own
            x = operands(turn)
            sa.attention(*x, both)
        return counted

    found = at_once(work)
    assert found == [work(n) for n in range(THREADS)]


def test_all_of_it_at_once():
    """Patterns of every kind are made while others run, in a context that keeps so few plans that threads drop those of
    others."""
    causal, lists = np.tri(24, dtype=bool), sa.parse(TEXTS[2]).to_csr(24)
    makers = [
        lambda: sa.causal() & (sa.sink(2) | sa.window(9, 0)),
        lambda: sa.csr(*lists, 24),
        lambda: sa.csr(*lists, 24, borrow=True),
        lambda: sa.mask(causal),
        lambda: sa.predicate(lambda head, q, k: k <= q and (q - k) % 2 == 0, 24, 24),
        lambda: sa.union([sa.global_keys([n, 2 * n]) for n in range(4)]) & sa.bigbird(4, 3, 1, 1, 5),
        lambda: sa.load(sa.documents([0, 7, 24]).save()),
        lambda: sa.transpose(sa.tree([-1, *(n // 2 for n in range(23))])),
    ]
    context = sa.Context("cpu", plan_cache=2)
    plan = sa.plan(TEXTS[2], *operands(0), context=context)

    def run(n, turn):
        x, pattern = operands(n), makers[(n + turn) % len(makers)]()
        found = [plan.forward(*x), *sa.attention(*x, pattern, return_lse=True, context=context)]
        found.append(sa.attention(*x, TEXTS[(n * turn) % len(TEXTS)], context=context))
        return [*found, *pattern.to_csr(24), pattern.to_mask(24)]

    turns = range(2 * len(makers))
    expected = [[run(n, turn) for turn in turns] for n in range(THREADS)]
    for found, wanted in zip(at_once(lambda n: [run(n, turn) for turn in turns]), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            [np.testing.assert_array_equal(x, y) for x, y in zip(one, other, strict=True)]


def test_errors_stay_with_their_thread():
    def work(n):
        for turn in range(50):
            with pytest.raises(sa.FormatError, match=f"nothing{n}_{turn}"):
                sa.parse(f"nothing{n}_{turn}")
            with pytest.raises(sa.ShapeError) as caught:
                sa.attention(*operands(n), "causal", sink_logits=np.zeros(3 + n, np.float32))
            assert caught.value.argument == "sink_logits" and f"[{3 + n}]" in str(caught.value)

    at_once(work)


def test_a_thread_keeps_no_scratch_beyond_a_bound(monkeypatch):
    q, k, v = operands(0)
    small = sa.plan("causal", q, k, v)
    large = sa.plan("causal", q, k, v, backward=True)
    out, lse = small.forward(q, k, v, return_lse=True)
    assert small.workspace() < large.workspace(backward=True)

    def run():
        small.forward(q, k, v)
        small_size = _frames._of_thread.memory.size
        expected = large.backward(q, k, v, out, lse, out)
        large_size = _frames._of_thread.memory.size
        assert small_size < large_size >= large.workspace(backward=True)
        _frames._of_thread.memory = None
        small.forward(q, k, v)
        monkeypatch.setattr(_frames, "MOST_KEPT", large_size - 1)
        gradients = large.backward(q, k, v, out, lse, out)
        assert _frames._of_thread.memory.size == small_size
        [np.testing.assert_array_equal(x, y) for x, y in zip(gradients, expected, strict=True)]
        return True

    done = []
    thread = threading.Thread(target=lambda: done.append(run()))
    thread.start()
    thread.join()
    assert done


def test_the_first_call_of_all_may_be_many():
    program = """
import sys, threading
sys.setswitchinterval(1e-6)
import numpy as np
import sparseattn as sa
q = np.zeros((1, 8, 1, 8), np.float32)
start, found = threading.Barrier(8), []
def run():
    start.wait()
    sa.attention(q, q, q, "causal")
    found.append(sa.default_context())
threads = [threading.Thread(target=run) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(found), len(set(map(id, found))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "8 1\n", done.stderr


@pytest.mark.skipif(not FREE_THREADED, reason="this Python has a GIL: tests/run python-free-threaded")
def test_without_a_gil_none_comes_with_the_package():
    """Python switches it on, and warns, for a module of C that does not say that it needs none."""
    program = "import sys, sparseattn, sparseattn.dlpack; print(sys._is_gil_enabled())"
    free = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, env=free)
    assert done.stdout == "False\n", done.stderr
    assert not sys._is_gil_enabled()  # here too, or these tests would say nothing about threads that run at once


def test_torch_has_it_too():
    torch = pytest.importorskip("torch")
    import sparseattn.torch as sat

    def run(n):
        leaves = [torch.from_numpy(x).requires_grad_() for x in operands(n, 24 + 8 * (n % 2))]
        out = sat.attention(*leaves, TEXTS[n % 3])
        out.square().sum().backward()
        return out.detach(), *(x.grad for x in leaves)

    expected = [run(n) for n in range(THREADS)]
    for found, wanted in zip(at_once(lambda n: [run(n) for _ in range(10)]), expected, strict=True):
        for one in found:
            assert all(torch.equal(x, y) for x, y in zip(one, wanted, strict=True))


def test_jax_registers_once():
    pytest.importorskip("jax")
    program = """
import sys, threading
sys.setswitchinterval(1e-6)
import numpy as np
import sparseattn.jax as saj
q = np.zeros((1, 8, 1, 8), np.float32)
found = []
threads = [threading.Thread(target=lambda: found.append(saj.attention(q, q, q, "causal").shape)) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found == [q.shape] * 4)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
