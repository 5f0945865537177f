# SPDX-License-Identifier: MIT
"""Patterns: which keys each query may see. Sets, so | & - make new ones, also of texts and masks; immutable.

A query row i of an extent stands at position p = i + q_offset. `mod` and `/` are floored. Nothing implies causal, and
-1 as a bound means unbounded.
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple, Protocol, Sequence, Union
from weakref import WeakValueDictionary

import numpy as np

from ._arrays import as_array, integers, tensor_in, tensor_out
from ._core import (
    ArgumentError,
    DTypeError,
    FormatError,
    ShapeError,
    SparseAttentionError,
    check,
    ffi,
    handle_signals,
    integer,
    integers_of,
    lib,
    own,
    read_bytes,
    read_text,
    sized,
)
from ._draw import html, picture

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Extent:
    """The rectangle on which a question is asked of a pattern.

    seq_q, seq_k      queries and keys; seq_k None is seq_q
    batch, heads      needed where a pattern tells batch entries or heads apart
    q_offset          position of the first query; None is seq_k - seq_q: queries align to the end of the keys
    block_q, block_k  the unit of block counts in stats; 0 is 64

    Wherever an extent is asked for, n stands for Extent(n) and (m, n) for Extent(m, n).
    """

    seq_q: int
    seq_k: int | None = None
    batch: int = 1
    heads: int = 1
    q_offset: int | None = None
    block_q: int = 0
    block_k: int = 0


AnyExtent = Union[Extent, int, "tuple[int, int]"]

if TYPE_CHECKING:

    class Array(Protocol):
        """An array of NumPy, or of a library whose arrays NumPy can read."""

        @property
        def shape(self) -> Any: ...

        @property
        def dtype(self) -> Any: ...

    #: What stands for a pattern wherever one is asked for: a Pattern, its text, or a mask, bool [seq_q, seq_k],
    #: [heads, seq_q, seq_k] or [batch, heads, seq_q, seq_k] in the host's memory.
    AnyPattern = Union["Pattern", str, Array]


class Stats(NamedTuple):
    """What Pattern.stats and Plan.stats return: the fields of the C struct spattn_stats, under their names."""

    pairs: float  #: kept (query, key) pairs, over all batch entries and heads, as all that follows
    visited: float  #: pairs in blocks that are not empty
    density: float  #: pairs / (batch * heads * seq_q * seq_k)
    blocks_full: int
    blocks_partial: int
    blocks_empty: int
    row_min: int  #: kept keys of a query row
    row_max: int
    rows_empty: int
    layout_bytes: int  #: lists and masks
    flops_forward: float  #: on kept pairs; 0 for a bare pattern
    flops_backward: float
    bytes_forward: float  #: each operand once; 0 for a bare pattern
    bytes_backward: float


def read_stats(function: Any, *arguments: Any) -> Stats:
    """Calls function(*arguments, spattn_stats*)."""
    result = sized("spattn_stats")
    check(function(*arguments, result))
    return Stats(*(getattr(result, name) for name in Stats._fields))


@dataclass(frozen=True)
class _Whole(Extent):
    """An Extent whose seq_k is there."""

    seq_k: int = 0


def _whole(extent: AnyExtent) -> _Whole:
    if not isinstance(extent, Extent):
        extent = Extent(*extent) if isinstance(extent, tuple) else Extent(extent)
    fields = {name: value for name, value in vars(extent).items() if value is not None or name == "seq_q"}
    given = {name: integer(value, f"extent.{name}") for name, value in fields.items()}
    return _Whole(**{"seq_k": given["seq_q"], **given})


def _c_extent(extent: Extent) -> Any:
    fields = {name: value for name, value in vars(extent).items() if value is not None}
    flags = lib.SPATTN_EXTENT_Q_OFFSET if "q_offset" in fields else 0
    return sized("spattn_extent", flags=flags, cancel=handle_signals, **fields)


class Pattern:
    """A set of (query, key) pairs. Pattern(text) parses; the constructors of this module and | & - make others.

    print(p) is the text form, and Pattern(str(p)) == p while its lists are short (64 numbers); load(p.save()) == p
    always, and pickle uses it. Equality and hash flatten and sort unions and intersections. A notebook draws a pattern.

    Ctrl-C, and any signal whose handler raises, ends stats, density, to_mask, to_csr, to_image and show: they raise
    what the handler raised. What makes, saves, loads or compares a pattern goes on to its end.

    Raises FormatError for a text that is no pattern.
    """

    # _kept: what the library reads in place, or the parts that have such. Plans keep their pattern for it.
    # _name: its text, or its key in _numbered. A plain string, on whose value torch.compile can guard.
    # _sizes: fields of the extents that it is meant for, as far as they are known. It has no others of batch and heads.
    __slots__ = ("_handle", "_kept", "_name", "_sizes", "__weakref__")
    _handle: Any
    _kept: tuple[Any, ...]
    _name: str
    _sizes: dict[str, int]

    def __init__(self, text: str):
        if not isinstance(text, str):
            message = f"argument text is {type(text).__name__}; accepted: str"
            raise DTypeError(message, "SPATTN_E_DTYPE", "text")
        if "\0" in text:  # where C would take the text to end
            column = text.index("\0") + 1
            message = f"argument text column {column}: found byte 0; accepted: a text without it"
            raise FormatError(message, "SPATTN_E_FORMAT", "text")
        self._handle = own("spattn_pattern", lib.spattn_pattern_parse, text.encode(errors="replace"))
        self._kept, self._name, self._sizes = (), text, {}

    # So that NumPy's arrays leave mask & pattern, and | and -, to the pattern, which they would be mapped over else.
    __array_ufunc__ = None

    def __or__(self, other: AnyPattern) -> Pattern:
        return union([self, other]) if stands_for_pattern(other) else NotImplemented

    def __ror__(self, other: AnyPattern) -> Pattern:
        return union([other, self]) if stands_for_pattern(other) else NotImplemented

    def __and__(self, other: AnyPattern) -> Pattern:
        return intersection([self, other]) if stands_for_pattern(other) else NotImplemented

    def __rand__(self, other: AnyPattern) -> Pattern:
        return intersection([other, self]) if stands_for_pattern(other) else NotImplemented

    def __sub__(self, other: AnyPattern) -> Pattern:
        return _difference(self, as_pattern(other)) if stands_for_pattern(other) else NotImplemented

    def __rsub__(self, other: AnyPattern) -> Pattern:
        return _difference(as_pattern(other), self) if stands_for_pattern(other) else NotImplemented

    def __bool__(self) -> bool:
        raise TypeError("a pattern is neither true nor false; accepted: | & - where `or`, `and`, `not` were meant")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pattern):
            return NotImplemented
        return bool(lib.spattn_pattern_equal(self._handle, other._handle))

    def __hash__(self) -> int:
        result = ffi.new("uint64_t *")
        check(lib.spattn_pattern_hash(self._handle, result))
        return hash(result[0])

    def __repr__(self) -> str:
        return read_text(lib.spattn_pattern_print, self._handle)

    def save(self) -> bytes:
        """Bytes that load makes an equal pattern of, on any machine and in every later release."""
        return read_bytes(lib.spattn_pattern_save, self._handle)

    def __reduce__(self) -> tuple[Callable[[bytes], "Pattern"], tuple[bytes]]:
        return load, (self.save(),)

    def __copy__(self) -> "Pattern":
        return self

    def __deepcopy__(self, memo: Any) -> "Pattern":
        return self

    def keeps(self, extent: AnyExtent, q: int, k: int, *, batch: int = 0, head: int = 0) -> bool:
        """Whether query row q of a batch entry and head sees key k. Raises ArgumentError outside the extent."""
        result, where = ffi.new("int32_t *"), integers_of(batch=batch, head=head, q=q, k=k)
        check(lib.spattn_pattern_keeps(self._handle, _c_extent(_whole(extent)), *where, result))
        return bool(result[0])

    def to_mask(self, extent: AnyExtent) -> NDArray[np.bool_]:
        """bool [batch, heads, seq_q, seq_k], True where kept."""
        whole = _whole(extent)
        sizes = whole.batch, whole.heads, whole.seq_q, whole.seq_k
        mask = np.empty([max(1, size) for size in sizes], dtype=np.bool_)  # the library refuses others, by name
        check(lib.spattn_pattern_to_mask(self._handle, _c_extent(whole), tensor_out(mask, "out")))
        return mask

    def to_image(self, extent: AnyExtent, height: int = 256, width: int = 256, *, head: int = 0) -> NDArray[np.float32]:
        """float32 [height, width], at most the extent's size: the kept share, 0..1, of each cell."""
        whole = _whole(extent)
        height, width, head = integers_of(height=height, width=width, head=head)
        shape = max(0, min(height, whole.seq_q)), max(0, min(width, whole.seq_k))
        image = np.empty(shape, dtype=np.float32)
        check(lib.spattn_pattern_to_image(self._handle, _c_extent(whole), head, tensor_out(image, "coverage")))
        return image

    def to_csr(self, extent: AnyExtent, *, head: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """row_ptr int64 [seq_q + 1], col_idx int32 [pairs]: row q keeps col_idx[row_ptr[q] : row_ptr[q + 1]]."""
        whole, count, head = _whole(extent), ffi.new("int64_t *"), integer(head, "head")
        row_ptr = np.empty(max(0, whole.seq_q) + 1, dtype=np.int64)
        ask = (lib.spattn_pattern_to_csr, self._handle, _c_extent(whole), head, tensor_out(row_ptr, "row_ptr"))
        _csr(*ask, None, count)
        col_idx = np.empty(count[0], dtype=np.int32)
        _csr(*ask, tensor_out(col_idx, "col_idx"), count)
        return row_ptr, col_idx

    def stats(self, extent: AnyExtent) -> Stats:
        """Pairs kept, blocks touched, shortest and longest row: counted without running anything."""
        return read_stats(lib.spattn_pattern_stats, self._handle, _c_extent(_whole(extent)))

    def density(self, extent: AnyExtent) -> float:
        """Share of all (query, key) pairs that are kept, 0..1."""
        return self.stats(extent).density

    def show(self, extent: AnyExtent | None = None, *, width: int = 32, head: int = 0, file: Any = None) -> None:
        """Draws it with `width` characters a line: queries downwards, keys to the right, more dots where more is kept.

        A character is blank only where nothing is kept at all. extent None is 64 queries and keys, or the sizes that
        the pattern was made for: those of its arrays, its documents, its tree, its text, the whole of its rows.
        """
        file = file or sys.stdout
        print("\n".join(self.drawing(extent, width, head=head, encoding=getattr(file, "encoding", None))), file=file)

    def drawing(
        self, extent: AnyExtent | None = None, width: int = 32, *, head: int = 0, encoding: str | None = "utf-8"
    ) -> list[str]:
        """The lines that show prints: braille where the encoding has it, else ASCII shades."""
        whole, width = self._whole_or_own(extent), integer(width, "width")
        height = max(4, round(2 * width * min(1.0, whole.seq_q / max(1, whole.seq_k))))
        image = self.to_image(whole, height, 2 * width, head=head)
        spare = [(0, -size % cell) for size, cell in zip(image.shape, (4, 2))]
        return picture(np.pad(image, spare), encoding)

    def _repr_html_(self) -> str:
        """What Jupyter shows: the text, and a picture where an extent of 256 tokens, or the pattern's own, may ask."""
        try:
            whole = self._whole_or_own(None, 256)
            return html(repr(self), f"{whole.seq_q} x {whole.seq_k}", self.to_image(whole))
        except SparseAttentionError:  # lists of a call, and sizes that only the pattern's text knows
            return html(repr(self), "", None)

    def _whole_or_own(self, extent: AnyExtent | None, tokens: int = 64) -> _Whole:
        return _whole(Extent(**{"seq_q": tokens, **self._sizes}) if extent is None else extent)


def _csr(function: Any, pattern: Any, extent: Any, head: int, row_ptr: Any, col_idx: Any, count: Any) -> None:
    columns = ffi.NULL if col_idx is None else col_idx
    check(function(pattern, extent, head, row_ptr, columns, count))


def stands_for_pattern(value: Any) -> bool:
    """Whether it is of a kind that as_pattern reads."""
    return isinstance(value, (Pattern, str)) or hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def _difference(kept: Pattern, taken: Pattern) -> Pattern:
    return make_pattern(lib.spattn_pattern_difference, kept._handle, taken._handle, parts=(kept, taken))


# What makes a pattern of that which has such a method, or field: a mask_mod, a sparse matrix of SciPy, a BlockMask.
_MAKERS = {
    "__call__": "sparseattn.predicate makes a pattern of a function",
    "tocsr": "sparseattn.csr makes a pattern of a sparse matrix",
    "kv_indices": "sparseattn.torch.from_block_mask makes a pattern of a BlockMask",
}


def as_pattern(pattern: AnyPattern, argument: str = "pattern") -> Pattern:
    """What stands for a pattern wherever one is asked for: itself, its text, or a mask.

    Raises DTypeError, ShapeError for what is none of them.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, str):
        return Pattern(pattern)
    accepted = (
        "a Pattern, its text, or a bool array [seq_q, seq_k], [heads, seq_q, seq_k], [batch, heads, seq_q, seq_k]"
    )
    if not stands_for_pattern(pattern):
        makers = "".join(f". {maker}" for method, maker in _MAKERS.items() if hasattr(pattern, method))
        message = f"argument {argument} is {type(pattern).__name__}; accepted: {accepted}{makers}"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument)
    values = as_array(pattern, argument)
    if values.dtype != np.bool_:
        message = f"argument {argument} is an array of {values.dtype}; accepted: {accepted}"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument)
    if not 2 <= values.ndim <= 4:
        message = f"argument {argument} has shape {list(values.shape)}; accepted: {accepted}"
        raise ShapeError(message, "SPATTN_E_SHAPE", argument)
    return make_mask(values, argument)


def make_mask(values: Any, argument: str, borrow: bool = False) -> Pattern:
    """The pattern of a mask: what _indexed.mask documents."""
    array = tensor_in(values, argument, borrow)
    sizes = dict(zip(("seq_k", "seq_q", "heads", "batch"), reversed([array.shape[i] for i in range(array.ndim)])))
    flags = lib.SPATTN_BORROW if borrow else 0
    return make_pattern(lib.spattn_pattern_mask, array, flags, kept=(array,) if borrow else (), sizes=sizes)


# Patterns whose arrays no text holds, by names that no other process gives: "#", random digits, a number.
_numbered: WeakValueDictionary[str, Pattern] = WeakValueDictionary()
_numbers = itertools.count(1)
_process = secrets.token_hex(8)


def _begin_process() -> None:
    global _process
    _process = secrets.token_hex(8)


os.register_at_fork(after_in_child=_begin_process)


def make_pattern(
    function: Any,
    *arguments: Any,
    kept: tuple[Any, ...] = (),
    parts: Sequence[Pattern] = (),
    sizes: dict[str, int] | None = None,
) -> Pattern:
    """The pattern that function makes of the arguments.

    kept   what the library reads in place
    parts  patterns that it is made of
    sizes  fields of its extents, as Pattern has them; None is those of its parts. A pattern with sizes has arrays
    """
    pattern = Pattern.__new__(Pattern)
    pattern._handle = own("spattn_pattern", function, *arguments)
    pattern._kept = (*kept, *(part for part in parts if part._kept))
    pattern._sizes = sizes if sizes is not None else {k: v for part in parts for k, v in part._sizes.items()}
    is_short = sizes is None and not any(part._name.startswith("#") for part in parts)
    text = repr(pattern) if is_short else "#"  # a text with the arrays' hash would take a look at each of their numbers
    if "#" in text:
        text = f"#{_process}.{next(_numbers)}"
        _numbered[text] = pattern
    pattern._name = text
    return pattern


def pattern_named(name: str) -> Pattern:
    """The pattern whose _name this is, or of a text.

    Raises FormatError for no text, and for a name in _numbered whose pattern is gone or was another process's.
    """
    if not name.startswith("#"):
        return Pattern(name)
    pattern = _numbered.get(name)
    if pattern is None:
        message = f"pattern {name} has arrays that this process has not; accepted: a pattern that it holds"
        raise FormatError(message, "SPATTN_E_FORMAT", "pattern")
    return pattern


def parse(text: str) -> Pattern:
    """The pattern of a text, "causal & (sink(4) | window(9,0))". `|` binds loosest, `&` and `-` equally."""
    return Pattern(text)


def load(saved: Any) -> Pattern:
    """The pattern of what Pattern.save returned: bytes, or anything with their buffer. Never trusts them.

    Raises FormatError, with the byte where they are damaged or mean nothing.
    """
    try:
        memory = ffi.from_buffer(saved)
    except (BufferError, TypeError, ValueError):  # there is no buffer, or one with gaps
        message = f"argument bytes is {type(saved).__name__}; accepted: bytes, or what has their buffer, without gaps"
        raise DTypeError(message, "SPATTN_E_DTYPE", "bytes") from None
    return make_pattern(lib.spattn_pattern_load, memory, len(memory))


def entries(values: Iterable[Any], argument: str, accepted: str) -> list[Any]:
    """The list. Raises DTypeError for what is none, such as one pattern, which may be a text of many letters."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        message = f"argument {argument} is {type(values).__name__}; accepted: {accepted}"
        raise DTypeError(message, "SPATTN_E_DTYPE", argument)
    return list(values)


def _handles(parts: Sequence[AnyPattern]) -> tuple[Any, list[Pattern]]:
    """A C array of handles, and the patterns that must outlive the call."""
    patterns = [as_pattern(part) for part in entries(parts, "parts", "a sequence of patterns")]
    return ffi.new("spattn_pattern *[]", [pattern._handle for pattern in patterns]), patterns


def union(parts: Sequence[AnyPattern]) -> Pattern:
    """The keys that any part keeps; a | b is union([a, b])."""
    handles, kept = _handles(parts)
    return make_pattern(lib.spattn_pattern_union, handles, len(kept), parts=kept)


def intersection(parts: Sequence[AnyPattern]) -> Pattern:
    """The keys that all parts keep; a & b is intersection([a, b])."""
    handles, kept = _handles(parts)
    return make_pattern(lib.spattn_pattern_intersection, handles, len(kept), parts=kept)


def transpose(pattern: AnyPattern) -> Pattern:
    """The keys k with p in pattern(k)."""
    inner = as_pattern(pattern)
    return make_pattern(lib.spattn_pattern_transpose, inner._handle, parts=[inner])


def per_head(parts: Sequence[AnyPattern], part_of_head: Sequence[int] | None = None) -> Pattern:
    """Query head h sees parts[part_of_head[h]]; without it, parts[h]. The extent has exactly that many heads."""
    return _per(lib.spattn_pattern_per_head, parts, part_of_head, "part_of_head", "heads")


def per_batch(parts: Sequence[AnyPattern], part_of_batch: Sequence[int] | None = None) -> Pattern:
    """Batch entry b sees parts[part_of_batch[b]], say its own length; without it, parts[b]."""
    return _per(lib.spattn_pattern_per_batch, parts, part_of_batch, "part_of_batch", "batch")


def _per(function: Any, parts: Sequence[AnyPattern], part_of: Sequence[int] | None, name: str, axis: str) -> Pattern:
    handles, kept = _handles(parts)
    choices = range(len(kept)) if part_of is None else entries(part_of, name, "a sequence of integers")
    numbers = [integer(part, name) for part in choices]
    for at, number in enumerate(numbers):
        if not 0 <= number < len(kept):
            message = f"argument {name}[{at}] is {number}; accepted: 0 to {len(kept) - 1}, the number of a part"
            raise ArgumentError(message, "SPATTN_E_RANGE", f"{name}[{at}]")
    choice = ffi.new("int32_t[]", numbers)
    made = make_pattern(function, handles, len(kept), choice, len(choice), parts=kept)
    made._sizes = {**made._sizes, axis: len(choice)}
    return made


def per_document(pattern: AnyPattern, cu_q: Any, cu_k: Any = None) -> Pattern:
    """Documents packed one after the other, each with the pattern on its own extent, aligned to its end.

    Row i of document t, cu_q[t] <= i < cu_q[t + 1], sees cu_k[t] + pattern(i - cu_q[t]); rows of no document see
    nothing. With axes="thd" these are batches of sequences of several lengths: Krell et al. 2021
    (https://arxiv.org/abs/2107.02027).

    cu_q, cu_k  [documents + 1], int32 or int64, not decreasing, the first >= 0, the last at most the extent's seq_q and
                seq_k; cu_k None is cu_q. Copied

    Raises ArgumentError, ShapeError, DTypeError: .argument is "cu_q" or "cu_k".
    """
    inner = as_pattern(pattern)
    lists = integers(cu_q, "cu_q"), integers(cu_q if cu_k is None else cu_k, "cu_k")
    made = make_pattern(lib.spattn_pattern_per_document, inner._handle, *lists, parts=[inner])
    ends = [int(as_array(cu, "cu_q")[-1]) for cu in (cu_q, cu_q if cu_k is None else cu_k)]
    made._sizes = {**inner._sizes, "seq_q": ends[0], "seq_k": ends[1]}  # those of the inner pattern are a document's
    return made


def rows(pattern: AnyPattern, ranges: Any, seq_q: int) -> Pattern:
    """Some rows of a longer extent, say those that one of several devices has.

    The pattern is meant on seq_q queries, aligned to the end of the keys. Row i is its row r(i), where r counts through
    the ranges, one after the other. The extent has as many queries as the ranges have rows, and its q_offset plays no
    part. Lists of a run are those of the extent's own rows.

    ranges  [ranges, 2], int32 or int64, or pairs: 0 <= begin < end <= seq_q, in any order, and rows may be there more
            than once. Copied
    seq_q   queries of the pattern's own extent

        first_of_two = rows("causal", [(0, 256), (768, 1024)], 1024)

    Raises ArgumentError, ShapeError, DTypeError: .argument is "ranges" or "seq_q".
    """
    inner = as_pattern(pattern)
    pairs, numbers = integers(ranges, "ranges"), integers_of(seq_q=seq_q)
    made = make_pattern(lib.spattn_pattern_rows, inner._handle, pairs, *numbers, parts=[inner])
    made._sizes = {"seq_k": numbers[0], **inner._sizes, "seq_q": int(np.diff(as_array(ranges, "ranges")).sum())}
    return made


def columns(pattern: AnyPattern, ranges: Any, seq_k: int) -> Pattern:
    """Some keys of a longer extent, say those that a cache has left after it was thinned out.

    The pattern is meant on seq_k keys, whose end is as far from the queries as that of the extent's. Key j is its key
    c(j), where c counts through the ranges, one after the other. The extent has as many keys as the ranges.

    ranges  [ranges, 2], int32 or int64, or pairs: 0 <= begin < end <= seq_k, in any order, and keys may be there more
            than once. Copied
    seq_k   keys of the pattern's own extent

        sinks_and_recent = columns("causal", [(0, 4), (900, 1024)], 1024)

    Raises ArgumentError, ShapeError, DTypeError: .argument is "ranges" or "seq_k"; UnsupportedError for a pattern whose
    lists come with a run: those name the extent's own keys, as in runtime_tokens(8) & columns(...).
    """
    inner = as_pattern(pattern)
    pairs, numbers = integers(ranges, "ranges"), integers_of(seq_k=seq_k)
    made = make_pattern(lib.spattn_pattern_columns, inner._handle, pairs, *numbers, parts=[inner])
    made._sizes = {**inner._sizes, "seq_k": int(np.diff(as_array(ranges, "ranges")).sum())}
    return made
