# SPDX-License-Identifier: MIT
"""Pictures of patterns out of characters."""

from __future__ import annotations

import numpy as np

# The dots of a braille character, [row, column]; U+2800 plus the sum of those that are set.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
# Thresholds of ordered dithering (Bayer): what is half kept sets half of the dots, evenly.
_BAYER = (np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]) + 0.5) / 16
_SHADES = " .:-=+*#%@"


def braille(coverage: np.ndarray) -> list[str]:
    """Lines of braille, a dot for each cell of coverage [height, width] in 0..1; height % 4 == 0 and width % 2 == 0."""
    height, width = coverage.shape
    tiles = (-(-height // 4), -(-width // 4))
    dots = coverage > np.tile(_BAYER, tiles)[:height, :width]
    cells = dots.reshape(height // 4, 4, width // 2, 2) * _DOTS[None, :, None, :]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells.sum(axis=(1, 3))]


def shades(coverage: np.ndarray) -> list[str]:
    """Lines of ASCII, darker where more is kept, a character for every 4 x 2 cells: where braille cannot be written."""
    height, width = coverage.shape
    cells = coverage.reshape(height // 4, 4, width // 2, 2).mean(axis=(1, 3))
    levels = np.ceil(cells * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[level] for level in line) for line in levels]


def picture(coverage: np.ndarray, encoding: str | None) -> list[str]:
    """Braille where the encoding has it, else ASCII."""
    lines = braille(coverage)
    try:
        "".join(lines).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return shades(coverage)
    return lines
