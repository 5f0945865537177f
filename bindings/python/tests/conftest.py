# SPDX-License-Identifier: MIT
"""The oracle of tests/ is the truth here too: written from the definitions alone, sharing no line with the library."""

import sys
from pathlib import Path

import numpy as np

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
