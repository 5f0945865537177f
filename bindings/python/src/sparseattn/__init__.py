# SPDX-License-Identifier: MIT
"""Sparse attention, exact to the token, forward and backward: the Python binding of libsparseattn.

    import sparseattn as sa
    pattern = sa.causal() & (sa.sink(4) | sa.window(1023, 0))      # sets: | & -
    out = sa.attention(q, k, v, pattern)       # of NumPy, torch, JAX, CuPy: [batch, seq, heads, head_dim]
    print(sa.plan(pattern, q, k, v).explain())

The words are those of sparseattn.h, which is the manual; this package adds no feature of its own.
"""

from ._analytic import (
    bigbird,
    block_diagonal,
    causal,
    dilated,
    documents,
    fixed,
    full,
    global_keys,
    global_tokens,
    landmark,
    logsparse,
    residue,
    sink,
    strided,
    tree,
    window,
)
from ._append import cache_append
from ._attention import attention, attention_backward
from ._core import (
    ArgumentError,
    Context,
    CudaError,
    DTypeError,
    FormatError,
    InternalError,
    NoGPUError,
    ResourceError,
    ShapeError,
    SparseAttentionError,
    UnsupportedError,
    build_json,
    default_context,
    kernels,
    version,
)
from ._grids import grid, neighborhood, tile_order
from ._indexed import bsr, csr, mask, predicate, runtime_blocks, runtime_tokens, topk
from ._patterns import (
    Extent,
    Pattern,
    Stats,
    columns,
    intersection,
    load,
    parse,
    per_batch,
    per_document,
    per_head,
    rows,
    transpose,
    union,
)
from ._plans import Plan, plan
from ._sharding import Peer, Sharding
from ._step import Step
from ._xref import SymbolReader, symbols_of, xref, xref_extend

__version__ = version()
__all__ = [
    "ArgumentError",
    "Context",
    "CudaError",
    "DTypeError",
    "Extent",
    "FormatError",
    "InternalError",
    "NoGPUError",
    "Pattern",
    "Peer",
    "Plan",
    "ResourceError",
    "ShapeError",
    "Sharding",
    "SparseAttentionError",
    "Stats",
    "Step",
    "SymbolReader",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "bigbird",
    "block_diagonal",
    "bsr",
    "build_json",
    "cache_append",
    "causal",
    "columns",
    "csr",
    "default_context",
    "dilated",
    "documents",
    "fixed",
    "full",
    "global_keys",
    "global_tokens",
    "grid",
    "intersection",
    "kernels",
    "landmark",
    "load",
    "logsparse",
    "mask",
    "neighborhood",
    "parse",
    "per_batch",
    "per_document",
    "per_head",
    "plan",
    "predicate",
    "residue",
    "rows",
    "runtime_blocks",
    "runtime_tokens",
    "sink",
    "strided",
    "symbols_of",
    "tile_order",
    "topk",
    "transpose",
    "tree",
    "union",
    "version",
    "window",
    "xref",
    "xref_extend",
]
