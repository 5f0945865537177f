# SPDX-License-Identifier: MIT
"""The oracle of tests/ is the truth here too: written from the definitions alone, sharing no line with the library."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))


def draw_parents(random, batch, nodes, reach=8):
    """int64 [batch, nodes]: forests of any shape, as plans with parents take them. Some numbers name no query, or one
    that is not before the node itself: such a node is a root."""
    parents = np.arange(nodes) - random.integers(1, reach + 1, (batch, nodes))
    return np.where(random.random((batch, nodes)) < 0.1, random.integers(-9, nodes + 9, (batch, nodes)), parents)


def seen_by_nodes(pattern, seq_k, starts, parents, heads):
    """bool [batch, heads, nodes, seq_k]: what queries see of a cache who are nodes of trees."""
    import oracle

    batch, nodes = parents.shape
    kept = oracle.to_mask(f"causal & ({pattern})", oracle.Extent(seq_k, seq_k, batch, heads))
    seen = np.zeros((batch, heads, nodes, seq_k), bool)
    for b, start in enumerate(starts):
        for node in range(max(0, -start), min(nodes, seq_k - start)):
            own = np.arange(seq_k) < start
            ancestor = node
            while ancestor >= max(0, -start):
                own[start + ancestor] = True
                ancestor = parents[b, ancestor] if parents[b, ancestor] < ancestor else -1
            seen[b, :, node] = kept[b, :, start + node] & own
    return seen


class Array:
    """An array library of its own: it knows DLPack, and nothing of NumPy."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def from_dlpack(array):
    return Array(np.from_dlpack(array))


def hear_ctrl_c(handler=signal.SIG_DFL):
    """Undoes what a shell does to programs in its background, and their children: Ctrl-C is ignored, or held back.

    Returns what was before, for signal.signal and signal.pthread_sigmask. A child hears it with this for a preexec_fn.
    """
    return signal.signal(signal.SIGINT, handler), signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def ctrl_c():
    """Presses it after 0.3 s, which must end what is inside soon after."""
    handler, held_back = hear_ctrl_c(signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        assert 0.2 < time.monotonic() - start < 10
    finally:
        timer.cancel()
        timer.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        signal.signal(signal.SIGINT, handler)


def in_process(*arguments):
    """What `python -m sparseattn` prints, and ends with, without a process whose imports take half a second.

    What would be a traceback there is an exception here.
    """
    from sparseattn.__main__ import main

    out, err, on_pipe = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGPIPE)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    except SystemExit as ended:
        code = ended.code
    finally:
        signal.signal(signal.SIGPIPE, on_pipe)
    if isinstance(code, str):  # Python prints it
        err.write(f"{code}\n")
        code = 1
    return subprocess.CompletedProcess(arguments, code or 0, out.getvalue(), err.getvalue())
