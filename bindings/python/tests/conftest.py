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
