# SPDX-License-Identifier: MIT
"""Patterns of tokens on a grid, as of images and videos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Sequence

import numpy as np

from ._core import ArgumentError, ShapeError, ffi, integer, lib
from ._patterns import Pattern, as_pattern, entries, make_pattern

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._patterns import AnyPattern


def _of_axes(values: Iterable[Any], argument: str, axes: int | None = None) -> list[Any]:
    """The list. Raises DTypeError for what is none, ShapeError for one of another length than the axes have."""
    found = entries(values, argument, "a sequence, an entry for each axis")
    if axes is not None and len(found) != axes:
        message = f"argument {argument} has {len(found)} entries; accepted: {axes}, as sizes has"
        raise ShapeError(message, "SPATTN_E_SHAPE", argument)
    return found


def _integers(values: Iterable[Any], argument: str, axes: int | None = None) -> list[int]:
    found = _of_axes(values, argument, axes)
    return [integer(entry, f"{argument}[{axis}]") for axis, entry in enumerate(found)]


def grid(sizes: Sequence[int], parts: Sequence[AnyPattern], tile: Sequence[int] | None = None) -> Pattern:
    """Tokens on a grid, with a pattern for each axis: a query sees a key where, on each axis, the part sees the key's
    place from the query's.

    grid((30, 48, 80), ["causal", "full", "full"]) is video whose frames see earlier ones. Axial attention
    (https://arxiv.org/abs/1912.12180) of an image is grid((48, 80), ["window(0,0)", "full"]) | grid((48, 80), ["full",
    "window(0,0)"]).

    sizes   [axes], 1 to 8: how many places each axis has, the slowest first, as (height, width) or (frames, height,
            width). Tokens beyond their product see nothing and are not seen
    parts   [axes]: each is meant on as many queries and keys as its axis has places
    tile    [axes], divisors of sizes: tokens lie tile after tile, and in a tile one after the other, the last axis
            fastest both times. Where it is about a block of the kernels (64 to 128 tokens), as (8, 8), neighbours are
            in few blocks: tile_order() is that order. None is sizes: tokens lie row after row

    Raises ArgumentError, ShapeError, DTypeError: .argument is "axes", "sizes", "parts" or "tile", or such an entry.
    """
    shape = _integers(sizes, "sizes")
    patterns = [
        as_pattern(part, f"parts[{axis}]") for axis, part in enumerate(_of_axes(parts, "parts", len(shape)))
    ]
    of_tile = shape if tile is None else _integers(tile, "tile", len(shape))
    lists = ffi.new("int64_t[]", shape), ffi.new("int64_t[]", of_tile)
    handles = ffi.new("spattn_pattern *[]", [pattern._handle for pattern in patterns])
    made = make_pattern(lib.spattn_pattern_grid, *lists, handles, len(patterns), parts=patterns)
    made._sizes = {name: size for name, size in made._sizes.items() if name in ("batch", "heads")}
    return made


def neighborhood(
    sizes: Sequence[int],
    window: Sequence[int],
    tile: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
) -> Pattern:
    """Neighborhood Attention (https://arxiv.org/abs/2204.07143, https://natten.org): of each axis, a query sees the
    window[axis] places around its own. At the edges of the grid windows are moved inwards, so that every query sees as
    many keys. Of an even window, one place more lies before the query's than behind it.

    sizes, tile   as in grid
    window        [axes], 1 to the axis's size
    causal        [axes]: on these axes the window ends with the query's own place, and is cut at the first one

    Raises ArgumentError, ShapeError, DTypeError: .argument is "window", "causal", or one of grid's.
    """
    shape = _integers(sizes, "sizes")
    widths = _integers(window, "window", len(shape))
    is_causal = [False] * len(shape) if causal is None else _of_axes(causal, "causal", len(shape))
    for axis, (width, size) in enumerate(zip(widths, shape)):
        if not 1 <= width <= max(size, 1):
            message = f"argument window[{axis}] is {width}; accepted: 1 to {size}, the axis's size"
            raise ArgumentError(message, "SPATTN_E_RANGE", f"window[{axis}]")
    return grid(shape, [_nearest(*axis) for axis in zip(shape, widths, is_causal)], tile)


def tile_order(sizes: Sequence[int], tile: Sequence[int]) -> NDArray[np.int64]:
    """The order of tokens in tiles, as numbers of tokens row after row, int64 [tokens]: x[:, order] has tile after tile
    what x [batch, tokens, ...] has row after row, and y[:, order.argsort()] is back in rows. sizes, tile as in grid.

    Raises ArgumentError, ShapeError, DTypeError: .argument is "axes", "sizes" or "tile", or such an entry.
    """
    shape = _integers(sizes, "sizes")
    of_tile = _integers(tile, "tile", len(shape))
    grid(shape, ["full"] * len(shape), of_tile)  # which says what is wrong with them
    split = [n for size, part in zip(shape, of_tile) for n in (size // part, part)]
    tiles_first = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return np.arange(np.prod(shape, dtype=np.int64)).reshape(split).transpose(tiles_first).ravel()


def _nearest(places: int, width: int, is_causal: Any) -> str:
    """What a place of one axis sees: the window around it; near the ends, all of the window at the end."""
    if is_causal:
        return f"window({width - 1},0)"
    if width == places:
        return "full"
    before, behind = width // 2, (width - 1) // 2
    around = f"window({before},{behind})"
    first = f"sink({width}) & transpose(sink({before}))"
    last = f"(full - sink({places - width})) & transpose(full - sink({places - behind}))"
    return around if width == 1 else f"{around} | {first} | {last}"
