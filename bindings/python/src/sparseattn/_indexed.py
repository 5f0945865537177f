# SPDX-License-Identifier: MIT
"""Constructors of patterns from a caller's arrays and functions, and of those whose lists come with each call."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from ._analytic import full, global_keys, sink
from ._arrays import as_array, integers
from ._core import ArgumentError, DTypeError, ShapeError, ffi, integer, integers_of, lib
from ._patterns import Pattern, as_pattern, make_mask, make_pattern, per_batch, stands_for_pattern

if TYPE_CHECKING:
    from ._patterns import AnyPattern


def _flags(borrow: bool, trust: bool) -> int:
    return (lib.SPATTN_BORROW if borrow else 0) | (lib.SPATTN_TRUST if trust else 0)


def csr(
    row_ptr: Any, col_idx: Any = None, seq_k: int | None = None, *, borrow: bool = False, trust: bool = False
) -> Pattern:
    """Row q sees the keys col_idx[row_ptr[q] : row_ptr[q + 1]]. Rows, not positions: an extent has exactly these sizes.

    row_ptr  [seq_q + 1], int32 or int64: from 0, not decreasing, up to len(col_idx)
    col_idx  [pairs], int32 or int64, in [0, seq_k), strictly increasing in a row
    borrow   read the arrays in place: contiguous, unchanged while this pattern and what is made of it lives. They are
             kept alive. Without it they are copied
    trust    col_idx is not checked; which keys are kept is unspecified where it breaks the rules

    Arrays are NumPy's, or of any library in the host's memory (torch tensors, __dlpack__); sequences of integers too.
    csr(m) of a sparse matrix of SciPy keeps the pairs that it stores, of whatever value.

    Raises ArgumentError for numbers that break the rules, ShapeError for lengths, DTypeError.
    """
    if col_idx is None and hasattr(row_ptr, "tocsr"):
        row_ptr, col_idx, seq_k = _parts_of(row_ptr)
    arrays = integers(row_ptr, "row_ptr", borrow), integers(col_idx, "col_idx", borrow)
    rows = arrays[0].shape[0] - 1 if arrays[0].ndim else 0
    (seq_k,) = integers_of(seq_k=seq_k)
    sizes, kept = {"seq_q": rows, "seq_k": seq_k}, arrays if borrow else ()
    return make_pattern(lib.spattn_pattern_csr, *arrays, seq_k, _flags(borrow, trust), kept=kept, sizes=sizes)


def _parts_of(matrix: Any) -> tuple[Any, Any, int]:
    """row_ptr, col_idx and seq_k of a sparse matrix of SciPy, which may name a pair twice, and in any order."""
    matrix = matrix.tocsr()
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    return matrix.indptr, matrix.indices, matrix.shape[1]


def bsr(
    row_ptr: Any,
    col_idx: Any,
    block_q: int,
    block_k: int,
    seq_q: int,
    seq_k: int,
    *,
    borrow: bool = False,
    trust: bool = False,
) -> Pattern:
    """csr of blocks: row q sees the keys k whose block k // block_k is listed for block row q // block_q.

    row_ptr  [ceil(seq_q / block_q) + 1], else as in csr
    col_idx  [blocks], in [0, ceil(seq_k / block_k)), else as in csr

    borrow, trust, arrays and errors as in csr. Child et al. 2019 (https://arxiv.org/abs/1904.10509) compute attention
    over such blocks.
    """
    arrays = integers(row_ptr, "row_ptr", borrow), integers(col_idx, "col_idx", borrow)
    sizes, kept = {"seq_q": seq_q, "seq_k": seq_k}, arrays if borrow else ()
    numbers = integers_of(block_q=block_q, block_k=block_k, **sizes)
    return make_pattern(lib.spattn_pattern_bsr, *arrays, *numbers, _flags(borrow, trust), kept=kept, sizes=sizes)


def mask(values: Any, *, borrow: bool = False) -> Pattern:
    """Row q sees the keys whose value is not 0. Rows, not positions: an extent has exactly these sizes.

    values   bool or uint8 [seq_q, seq_k], [heads, seq_q, seq_k] or [batch, heads, seq_q, seq_k]; 1 for batch or heads
             serves all. Any strides; packed to a bit a pair. A mask of keys alone, whose row serves all queries, is
             given to attention as it is: here it would be that of one query. Padding behind texts, beside a pattern, is
             per_batch([pattern & sink(length) for length in lengths]), which holds no pairs
    borrow   read the array in place, a byte a pair: keys side by side, unchanged while this pattern and what is made of
             it lives. It is kept alive

    Arrays as in csr. Raises ShapeError, DTypeError, ArgumentError: .argument is "mask".
    """
    return make_mask(values, "mask", borrow)


def pattern_of_call(pattern: AnyPattern, seq_q: int, seq_k: int) -> Pattern | str:
    """What stands for a pattern in a call of so many queries and keys: a mask of one row serves all queries, as padding
    masks [batch, 1, 1, seq_k] do. Raises as as_pattern, and ShapeError for such a row of other keys."""
    if isinstance(pattern, (Pattern, str)):
        return pattern
    values = as_array(pattern, "pattern") if stands_for_pattern(pattern) else None
    if values is None or values.dtype != np.bool_ or not 2 <= values.ndim <= 4 or values.shape[-2] != 1:
        return as_pattern(pattern)
    if values.shape[-1] != seq_k:
        message = f"argument pattern has shape {list(values.shape)}; accepted: {seq_k} keys, as the call has"
        raise ShapeError(message, "SPATTN_E_SHAPE", "pattern")
    return mask_of_keys(values, seq_q)


def mask_of_keys(values: np.ndarray[Any, Any], seq_q: int) -> Pattern:
    """The pattern of bools [..., 1, seq_k], whose row serves all queries."""
    if seq_q != 1 and (values.ndim == 2 or values.shape[-3] == 1):
        of_batch = [_keys(row) for row in values.reshape(-1, values.shape[-1])]
        return of_batch[0] if len(of_batch) == 1 else per_batch(of_batch)
    return make_mask(np.broadcast_to(values, (*values.shape[:-2], seq_q, values.shape[-1])), "mask")


def _keys(row: np.ndarray[Any, Any]) -> Pattern:
    """Of a row of bools the keys that are True, by a formula where padding stands at one end."""
    positions = np.flatnonzero(row)
    first, count = (int(positions[0]), len(positions)) if len(positions) else (0, 0)
    if not row[first : first + count].all():
        return global_keys(positions)
    if first + count == len(row):
        return full() - sink(first) if first else full()
    return sink(count) if first == 0 else sink(first + count) - sink(first)


def runtime_tokens(max_tokens_per_row: int) -> Pattern:
    """Each (query, kv head) sees the keys that `indices` of the run lists, at most this many.

    Lists are multisets: a key listed twice counts twice; an entry below 0 or beyond the keys is absent. Alone, or once
    under & with patterns known beforehand, which then choose among the listed keys; all else raises UnsupportedError,
    and so do questions about its keys. DeepSeek Sparse Attention (https://arxiv.org/abs/2512.02556).
    """
    return make_pattern(lib.spattn_pattern_runtime_tokens, *integers_of(max_tokens_per_row=max_tokens_per_row))


def runtime_blocks(block_q: int, block_k: int, max_blocks_per_row: int) -> Pattern:
    """Each (block of block_q queries, kv head) sees the blocks of block_k keys that `indices` of the run lists.

    Else as runtime_tokens. NSA (https://arxiv.org/abs/2502.11089), MoBA (https://arxiv.org/abs/2502.13189): query heads
    of one kv head share its lists, so where each has its own, k and v have as many heads as q.
    """
    sizes = integers_of(block_q=block_q, block_k=block_k, max_blocks_per_row=max_blocks_per_row)
    return make_pattern(lib.spattn_pattern_runtime_blocks, *sizes)


def topk(scores: Any, k: int) -> Any:
    """Lists for runtime_tokens(k), or runtime_blocks: where each row's k largest scores stand, in no order.

    scores  [..., keys], of floats: [batch, seq_q, heads_kv, seq_k] for runtime_tokens, [batch, rows, heads_kv, blocks]
            for runtime_blocks. -infinity is never listed
    k       at most the keys

    Returns int64 [..., k], -1 where a row has fewer than k scores above -infinity: a torch tensor where scores is one,
    on its device; an array of JAX, int32, where scores is one, also while JAX traces; else a NumPy array.

        out = attention(q, k, v, causal() & runtime_tokens(64), indices=topk(scores, 64))

    Raises ShapeError, DTypeError, ArgumentError: .argument is "scores" or "k".
    """
    is_tensor, jax = hasattr(scores, "topk"), sys.modules.get("jax")  # which has been imported, if scores is of it
    is_jax = not is_tensor and isinstance(scores, getattr(jax, "Array", ()))  # torch.compile asks no tensor that
    values: Any = scores.detach() if is_tensor else scores if is_jax else as_array(scores, "scores")
    if not len(values.shape):
        raise ShapeError("argument scores has no axis; accepted: [..., keys]", "SPATTN_E_SHAPE", "scores")
    if not (values.is_floating_point() if is_tensor else values.dtype.kind in "fV"):
        raise DTypeError(f"argument scores is {values.dtype}; accepted: floats", "SPATTN_E_DTYPE", "scores")
    keys, k = values.shape[-1], integer(k, "k")
    if not 1 <= k <= keys:
        raise ArgumentError(f"k is {k!r}; accepted: 1 .. {keys}, the keys", "SPATTN_E_RANGE", "k")
    if is_tensor:
        found = values.topk(k, sorted=False)
        return found.indices.masked_fill(found.values == float("-inf"), -1)
    if jax is not None and is_jax:
        largest, where = jax.lax.top_k(values, k)
        return jax.numpy.where(largest == -np.inf, -1, where)
    values = values.astype(np.float32) if values.dtype.kind == "V" else values
    indices = np.argpartition(values, keys - k, axis=-1)[..., keys - k :]
    return np.where(np.take_along_axis(values, indices, -1) == -np.inf, -1, indices)


def predicate(keep: Callable[[int, int, int], Any], seq_q: int, seq_k: int, *, heads: int = 1) -> Pattern:
    """The mask [heads, seq_q, seq_k] of the pairs for which keep(head, q, k) is true.

    Asks for each pair once, now, and never again: a Python call a pair, at most 2^30 of them. What NumPy computes for
    whole arrays is faster as mask(...). An exception in keep ends the call and comes out of it.

    The idea of FlexAttention's mask_mod (https://arxiv.org/abs/2412.05496), with functions of any kind. Batch entries
    that see keys of their own are a per_batch of such patterns.

    Raises ArgumentError for sizes, and whatever keep raises.
    """
    if not callable(keep):
        message = f"argument keep is {type(keep).__name__}; accepted: a function of head, q and k"
        raise DTypeError(message, "SPATTN_E_DTYPE", "keep")
    raised: list[BaseException] = []

    def note(kind: Any, error: BaseException, traceback: Any) -> None:
        raised.append(error.with_traceback(traceback))

    # C cannot unwind. The handler of a signal raises where a function begins, too, ahead of any `try` that it has.
    @ffi.callback("spattn_keep_fn", error=-1, onerror=note)
    def ask(_: Any, head: int, q: int, k: int) -> int:
        return 1 if keep(head, q, k) else 0

    def sample(*arguments: Any) -> int:
        status: int = lib.spattn_pattern_predicate(ask, ffi.NULL, *arguments)
        if raised:
            raise raised.pop()
        return status

    numbers = integers_of(heads=heads, seq_q=seq_q, seq_k=seq_k)
    return make_pattern(sample, *numbers, sizes=dict(zip(("heads", "seq_q", "seq_k"), numbers)))
