# SPDX-License-Identifier: MIT
"""Pictures of patterns: out of characters for a terminal, out of pixels for a notebook.

What is kept is seen, however thin: a sink's column of 4 keys in 16,384, a window's diagonal in 2^30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The dots of a braille character, [row, column]; U+2800 plus the sum of those that are set.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
# Thresholds of ordered dithering (Bayer): what is half kept sets half of the dots, evenly.
_BAYER = (np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]) + 0.5) / 16
_SHADES = " .:-=+*#%@"


def braille(coverage: NDArray[np.float32]) -> list[str]:
    """Lines of braille, a dot for each cell of coverage [height, width] in 0..1; height % 4 == 0 and width % 2 == 0."""
    height, width = coverage.shape
    tiles = (-(-height // 4), -(-width // 4))
    dots = (coverage > np.tile(_BAYER, tiles)[:height, :width]).reshape(height // 4, 4, width // 2, 2)
    cells = (dots * _DOTS[None, :, None, :]).sum(axis=(1, 3))
    # Where dithering leaves a character blank though something is kept, the fullest of its cells sets its dot.
    places = coverage.reshape(height // 4, 4, width // 2, 2).swapaxes(1, 2).reshape(*cells.shape, 8)
    fullest = _DOTS.ravel()[places.argmax(-1)]
    cells = np.where((cells == 0) & (places.max(-1) > 0), fullest, cells)
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def shades(coverage: NDArray[np.float32]) -> list[str]:
    """Lines of ASCII, darker where more is kept, a character for every 4 x 2 cells: where braille cannot be written."""
    height, width = coverage.shape
    cells = coverage.reshape(height // 4, 4, width // 2, 2).mean(axis=(1, 3))
    levels = np.ceil(cells * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[level] for level in line) for line in levels]


def picture(coverage: NDArray[np.float32], encoding: str | None) -> list[str]:
    """Braille where the encoding has it, else ASCII."""
    lines = braille(coverage)
    try:
        "".join(lines).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return shades(coverage)
    return lines


def png(coverage: NDArray[np.float32]) -> bytes:
    """A picture of 8-bit greys, a pixel for each cell: white where nothing is kept, at least a light grey elsewhere."""
    import struct
    import zlib

    ink = np.where(coverage > 0, 0.3 + 0.6 * np.sqrt(coverage), 0)
    rows = np.pad(np.round(255 * (1 - ink)).astype(np.uint8), [(0, 0), (1, 0)])  # each row begins with its filter, none
    height, width = coverage.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def html(text: str, caption: str, coverage: NDArray[np.float32] | None) -> str:
    """A figure for a notebook: the pattern's text, and its picture where there is one."""
    import base64
    from html import escape

    title = f"<code>{escape(text)}</code>"
    if coverage is None:
        return title
    source = base64.b64encode(png(coverage)).decode()
    style = "width: 16em; border: 1px solid #888; image-rendering: pixelated"
    image = f'<img style="{style}" alt="{caption}" src="data:image/png;base64,{source}">'
    return (
        f"<figure>{title}<br>{image}<figcaption>{caption}: queries downwards, keys to the right</figcaption></figure>"
    )
