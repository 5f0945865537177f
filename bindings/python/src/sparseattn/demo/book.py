# SPDX-License-Identifier: MIT
"""Pride and Prejudice (Jane Austen, 1813; public domain), as in https://github.com/juliasilge/janeaustenr."""

from __future__ import annotations

import lzma
from importlib import resources
from typing import Any

import numpy as np

FIRST = 1000  # tokens left out at the front: title page, and an opening that the model may know by heart


def text() -> str:
    """The whole novel."""
    packed = resources.files(__package__).joinpath("prideprejudice.txt.xz").read_bytes()
    return lzma.decompress(packed).decode("utf-8")


def passage(tokenizer: Any, tokens: int) -> np.ndarray:
    """`tokens` token ids from near the start of the novel."""
    return np.array(tokenizer.encode(text()).ids[FIRST : FIRST + tokens])
