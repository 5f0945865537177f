# SPDX-License-Identifier: MIT
"""FlexAttention's masks and patterns, both ways.

FlexAttention (https://arxiv.org/abs/2412.05496) says what a query sees by a function, mask_mod(batch, head, q, k), and
beside it by lists of blocks, BlockMask.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import torch

from .._core import ArgumentError, integers_of
from .._indexed import bsr, csr
from .._patterns import Extent, Pattern, as_pattern, per_batch, per_head

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .._patterns import AnyPattern

    #: Whether query row i at position p sees key k, elementwise for tensors of any shape.
    Keeps = Callable[[Any, Any, Any], Any]

_PAIRS = 1 << 24  # of partial blocks that are asked for at a time: 16 MiB of bools
_MOST_SIGNS = 200  # of a text that is read as formulas, which Python nests one in the other


# ---- BlockMask -> pattern ----


def from_block_mask(block_mask: BlockMask) -> Pattern:
    """The pattern of a BlockMask, pair by pair: full blocks as they are, the others by its mask_mod.

    Extents must have its seq_lengths. The host reads the lists, so this is for masks that stay the same.

    Raises ArgumentError for what is no BlockMask.
    """
    if not hasattr(block_mask, "kv_indices") or not hasattr(block_mask, "mask_mod"):
        message = f"block_mask is {type(block_mask).__name__}; accepted: a BlockMask of FlexAttention"
        raise ArgumentError(message, "SPATTN_E_ARGUMENT", "block_mask")
    batch, heads = block_mask.kv_indices.shape[:2]
    of_batch = []
    for b in range(batch):
        of_head = [_of_head(block_mask, b, h) for h in range(heads)]
        of_batch.append(of_head[0] if heads == 1 else per_head(of_head))
    return of_batch[0] if batch == 1 else per_batch(of_batch)


def _of_head(mask: BlockMask, b: int, h: int) -> Pattern:
    (seq_q, seq_k), (block_q, block_k) = mask.seq_lengths, mask.BLOCK_SIZE
    partial = _pairs_of_lists(mask.kv_num_blocks[b, h], mask.kv_indices[b, h])
    full_lists = mask.full_kv_num_blocks
    full = [] if full_lists is None else _pairs_of_lists(full_lists[b, h], mask.full_kv_indices[b, h])
    rows = -(-seq_q // block_q)
    found = [] if not len(full) else [bsr(*_compress(full, rows), block_q, block_k, seq_q, seq_k)]
    kept = [np.zeros((0, 2), np.int64)]
    step = max(1, _PAIRS // (block_q * block_k))
    for begin in range(0, len(partial), step):
        kept.append(_ask(mask, b, h, partial[begin : begin + step]))
    pairs = np.concatenate(kept)
    if len(pairs) or not found:
        found.append(csr(*_compress(pairs, seq_q), seq_k))
    return found[0] if len(found) == 1 else found[0] | found[1]


def _pairs_of_lists(num_blocks: torch.Tensor, indices: torch.Tensor) -> Any:
    """[n, 2] of block rows and the block columns that they list, in order."""
    counts, columns = num_blocks.cpu().numpy(), indices.cpu().numpy()
    pairs = [(row, column) for row, count in enumerate(counts) for column in sorted(columns[row, :count].tolist())]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _compress(pairs: Any, rows: int) -> tuple[Any, Any]:
    """row_ptr and col_idx of [n, 2] pairs, in any order."""
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return np.concatenate([[0], np.bincount(pairs[:, 0], minlength=rows).cumsum()]), pairs[:, 1].copy()


def _ask(mask: BlockMask, b: int, h: int, blocks: Any) -> Any:
    """Of these blocks the pairs that mask_mod keeps, [n, 2]."""
    device = mask.kv_indices.device
    (seq_q, seq_k), (block_q, block_k) = mask.seq_lengths, mask.BLOCK_SIZE
    where = torch.from_numpy(blocks).to(device)
    q = (where[:, :1] * block_q + torch.arange(block_q, device=device)).clamp(max=seq_q - 1)
    k = (where[:, 1:] * block_k + torch.arange(block_k, device=device)).clamp(max=seq_k - 1)
    at = [torch.tensor(n, device=device) for n in (b, h)]
    ask = torch.vmap(torch.vmap(mask.mask_mod, (None, None, None, 0)), (None, None, 0, None))
    kept = torch.vmap(ask, (None, None, 0, 0))(*at, q, k)
    block, row, column = kept.expand(len(q), block_q, block_k).nonzero(as_tuple=True)
    pairs = torch.stack([where[block, 0] * block_q + row, where[block, 1] * block_k + column], 1)
    inside = (pairs[:, 0] < seq_q) & (pairs[:, 1] < seq_k)
    return pairs[inside].cpu().numpy()


# ---- pattern -> mask_mod, BlockMask ----


def to_mask_mod(
    pattern: AnyPattern,
    seq_q: int,
    seq_k: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    device: Any = "cpu",
) -> Callable[[Any, Any, Any, Any], Any]:
    """A mask_mod(batch, head, q, k) of FlexAttention that keeps what the pattern keeps on this extent.

    Formulas stay formulas: causal, window, sink, block_diagonal, dilated, strided, landmark, fixed, logsparse, residue,
    and what | & - make of them. Any other part, and a pattern of hundreds of parts, is looked up in a table of bools on
    the device, seq_q x seq_k bytes for each head and batch entry that sees keys of its own. seq_k None is seq_q.

    Raises as Pattern.to_mask.
    """
    seq_q, seq_k = integers_of(seq_q=seq_q, seq_k=seq_q if seq_k is None else seq_k)
    made, whole, offset = as_pattern(pattern), Extent(seq_q, seq_k, batch, heads), seq_k - seq_q
    text = str(made)
    keeps = None if "#" in text else _formula(text, whole, device)
    if keeps is None:
        table = _table(made, whole, device)
        return lambda b, h, q, k: table[b if batch > 1 else 0, h if heads > 1 else 0, q, k]
    return lambda b, h, q, k: keeps(q, q + offset, k)


def _table(pattern: Pattern, whole: Extent, device: Any) -> torch.Tensor:
    return torch.from_numpy(pattern.to_mask(whole)).to(device)


def _formula(text: str, whole: Extent, device: Any) -> Keeps | None:
    """The text's meaning for all heads and batch entries, None where these may differ, or where it has too many parts.

    A text as patterns print it is an expression of Python, too. There - binds tighter than &, which makes the same
    sets: X & (Y - Z) is (X & Y) - Z.
    """
    differ = any(word in text for word in ("per_head", "per_batch", "mask"))
    if differ or sum(map(text.count, "|&-")) > _MOST_SIGNS:
        return None

    def read(node: ast.expr) -> Keeps:
        if isinstance(node, ast.BinOp):
            left, right = read(node.left), read(node.right)
            if isinstance(node.op, ast.BitOr):
                return lambda i, p, k: left(i, p, k) | right(i, p, k)
            if isinstance(node.op, ast.BitAnd):
                return lambda i, p, k: left(i, p, k) & right(i, p, k)
            return lambda i, p, k: left(i, p, k) & ~right(i, p, k)
        call = node if isinstance(node, ast.Call) else None
        name = ast.unparse(call.func if call else node)
        if name in _FORMULAS:
            return _FORMULAS[name](*(ast.literal_eval(argument) for argument in call.args) if call else ())
        # The whole extent, but one entry for all that see the same.
        table = _table(Pattern(ast.unparse(node).replace(" ", "")), Extent(whole.seq_q, whole.seq_k), device)[0, 0]
        return lambda i, p, k: table[i, k]

    return read(ast.parse(text, mode="eval").body)


def _window(left: int, right: int) -> Keeps:
    if left < 0 and right < 0:
        return _always
    if left < 0:
        return lambda i, p, k: k - p <= right
    if right < 0:
        return lambda i, p, k: p - k <= left
    return lambda i, p, k: (p - k <= left) & (k - p <= right)


def _dilated(left: int, right: int, dilation: int) -> Keeps:
    near = _window(left, right)
    return lambda i, p, k: near(i, p, k) & ((k - p) % dilation == 0)


def _logsparse(i: Any, p: Any, k: Any) -> Any:
    steps = p - k
    return (steps >= 0) & (steps & (steps - 1) == 0)


def _always(i: Any, p: Any, k: Any) -> Any:
    return (k >= 0) & (i >= 0)


def _block_diagonal(block: int) -> Keeps:
    return lambda i, p, k: (p >= 0) & (k // block == p // block)


def _landmark(block: int, landmarks: int) -> Keeps:
    return lambda i, p, k: (k % block >= block - landmarks) & (i >= 0)


def _fixed(block: int, landmarks: int) -> Keeps:
    near, far = _block_diagonal(block), _landmark(block, landmarks)
    return lambda i, p, k: near(i, p, k) | far(i, p, k)


# Written from the definitions in sparseattn.h; tests compare them with the library.
_FORMULAS: dict[str, Callable[..., Keeps]] = {
    "full": lambda: _always,
    "causal": lambda: lambda i, p, k: k <= p,
    "window": _window,
    "sink": lambda tokens: lambda i, p, k: (k < tokens) & (i >= 0),
    "block_diagonal": _block_diagonal,
    "dilated": _dilated,
    "strided": lambda stride: lambda i, p, k: (k - p) % stride == 0,
    "landmark": _landmark,
    "fixed": _fixed,
    "logsparse": lambda: _logsparse,
    "residue": lambda modulus, offset: lambda i, p, k: (k % modulus == offset) & (p % modulus == offset),
}


def to_block_mask(
    pattern: AnyPattern,
    seq_q: int,
    seq_k: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    block: int = 128,
    device: Any = "cpu",
) -> BlockMask:
    """A BlockMask of FlexAttention that keeps what the pattern keeps, with to_mask_mod for its partial blocks.

    batch, heads  None is one that serves all
    block         tokens on either side of a block

    Its lists come from the pattern without a table of all pairs where block divides both lengths; else the pairs are
    counted from a table. Raises as Pattern.to_mask; ArgumentError for a block below 1.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seq_q, seq_k, block = integers_of(seq_q=seq_q, seq_k=seq_q if seq_k is None else seq_k, block=block)
    if block < 1:
        raise ArgumentError(f"argument block is {block}; accepted: 1 and more", "SPATTN_E_RANGE", "block")
    made, whole = as_pattern(pattern), Extent(seq_q, seq_k, batch or 1, heads or 1)
    coverage = _coverage(made, whole, -(-seq_q // block), -(-seq_k // block), block)
    full, partial = coverage >= 1, (coverage > 0) & (coverage < 1)
    lists = [torch.from_numpy(x).to(device) for kind in (partial, full) for x in _lists(kind)]
    mask_mod = to_mask_mod(made, seq_q, seq_k, batch=whole.batch, heads=whole.heads, device=device)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(seq_q, seq_k))


def _coverage(pattern: Pattern, whole: Extent, rows: int, columns: int, block: int) -> Any:
    """[batch, heads, rows, columns]: the share of each block that is kept."""
    spare_q, spare_k = rows * block - whole.seq_q, columns * block - (whole.seq_k or whole.seq_q)
    if whole.batch == 1 and spare_q == spare_k == 0:
        return np.stack([[pattern.to_image(whole, rows, columns, head=head) for head in range(whole.heads)]])
    kept = np.pad(pattern.to_mask(whole), [(0, 0), (0, 0), (0, spare_q), (0, spare_k)])
    cells = kept.reshape(*kept.shape[:2], rows, block, columns, block).sum((3, 5), dtype=np.int64)
    return cells / block**2  # a block at the end that the extent cuts stays partial


def _lists(kind: Any) -> tuple[Any, Any]:
    """num_blocks [batch, heads, rows] and indices [batch, heads, rows, columns], those that count in front."""
    order = np.argsort(~kind, axis=-1, kind="stable").astype(np.int32)
    return kind.sum(-1, dtype=np.int32), order
