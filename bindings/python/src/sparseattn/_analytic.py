# SPDX-License-Identifier: MIT
"""Constructors of patterns by formula: any length, no storage."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ._arrays import integers
from ._core import integers_of, lib, sized
from ._patterns import Pattern, make_pattern


def full() -> Pattern:
    """Every key."""
    return make_pattern(lib.spattn_pattern_full)


def causal() -> Pattern:
    """k <= p."""
    return make_pattern(lib.spattn_pattern_causal)


def window(left: int, right: int) -> Pattern:
    """p - left <= k <= p + right; the query itself counts: window(1023, 0) is 1024 keys.

    Longformer (https://arxiv.org/abs/2004.05150), Mistral (https://arxiv.org/abs/2310.06825).
    """
    return make_pattern(lib.spattn_pattern_window, *integers_of(left=left, right=right))


def sink(tokens: int) -> Pattern:
    """k < tokens, whatever p. StreamingLLM (https://arxiv.org/abs/2309.17453)."""
    return make_pattern(lib.spattn_pattern_sink, *integers_of(tokens=tokens))


def block_diagonal(block: int) -> Pattern:
    """k / block = p / block; nothing for p < 0."""
    return make_pattern(lib.spattn_pattern_block_diagonal, *integers_of(block=block))


def documents(cu_seqlens: Sequence[int] | np.ndarray) -> Pattern:
    """k and p in the same [cu_seqlens[t], cu_seqlens[t + 1]). Integers, not decreasing, the first >= 0. Copied."""
    return make_pattern(lib.spattn_pattern_documents, integers(cu_seqlens, "cu_seqlens"))


def dilated(left: int, right: int, dilation: int) -> Pattern:
    """p - left <= k <= p + right and (k - p) mod dilation = 0; left and right in tokens.

    Longformer, NATTEN (https://arxiv.org/abs/2209.15001).
    """
    return make_pattern(lib.spattn_pattern_dilated, *integers_of(left=left, right=right, dilation=dilation))


def strided(stride: int) -> Pattern:
    """(k - p) mod stride = 0. Child et al. 2019 (https://arxiv.org/abs/1904.10509)'s strided attention is
    causal() & (window(stride, 0) | strided(stride))."""
    return make_pattern(lib.spattn_pattern_strided, *integers_of(stride=stride))


def landmark(block: int, landmarks: int) -> Pattern:
    """k mod block >= block - landmarks: the last keys of each block.

    Landmark Attention (https://arxiv.org/abs/2305.16300).
    """
    return make_pattern(lib.spattn_pattern_landmark, *integers_of(block=block, landmarks=landmarks))


def fixed(block: int, landmarks: int) -> Pattern:
    """block_diagonal(block) | landmark(block, landmarks). Child et al. 2019 (https://arxiv.org/abs/1904.10509)."""
    return make_pattern(lib.spattn_pattern_fixed, *integers_of(block=block, landmarks=landmarks))


def logsparse() -> Pattern:
    """p - k in {0, 1, 2, 4, 8, ...}. LogSparse Transformer (https://arxiv.org/abs/1907.00235)."""
    return make_pattern(lib.spattn_pattern_logsparse)


def residue(modulus: int, offset: int) -> Pattern:
    """k mod modulus = offset where p mod modulus = offset, else nothing.

    LongNet (https://arxiv.org/abs/2307.02486) is a union of block_diagonal(w) & residue(r, o).
    """
    return make_pattern(lib.spattn_pattern_residue, *integers_of(modulus=modulus, offset=offset))


def global_keys(positions: Sequence[int] | np.ndarray) -> Pattern:
    """k in positions: integers >= 0, in any order. Copied."""
    return make_pattern(lib.spattn_pattern_global_keys, integers(positions, "positions"))


def global_tokens(positions: Sequence[int] | np.ndarray) -> Pattern:
    """k in positions, or p in positions. Longformer (https://arxiv.org/abs/2004.05150). Copied."""
    return make_pattern(lib.spattn_pattern_global_tokens, integers(positions, "positions"))


def tree(parents: Sequence[int] | np.ndarray) -> Pattern:
    """The keys before the tree, and of its nodes a query's own and its ancestors. The tree is the end of the keys.

    parents: for each node its parent, -1 for a root; cycles are an error. SpecInfer (https://arxiv.org/abs/2305.09781).
    """
    numbers = integers(parents, "parents")
    made = make_pattern(lib.spattn_pattern_tree, numbers)
    made._sizes = {"seq_q": numbers.shape[0]}
    return made


def bigbird(block: int, window_blocks: int, global_blocks: int, random_blocks: int, seed: int = 0) -> Pattern:
    """In blocks of tokens: a window of window_blocks in total (odd, or 0), the first global_blocks as keys and as
    queries, and random_blocks more in each row, the same in every language for a seed.

    BigBird (https://arxiv.org/abs/2007.14062).
    """
    sizes = sized(
        "spattn_bigbird",
        block=block,
        window_blocks=window_blocks,
        global_blocks=global_blocks,
        random_blocks=random_blocks,
        seed=seed,
    )
    return make_pattern(lib.spattn_pattern_bigbird, sizes)
