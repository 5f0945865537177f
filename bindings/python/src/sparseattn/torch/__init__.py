# SPDX-License-Identifier: MIT
"""Attention of torch tensors, with gradients.

    import sparseattn.torch as sat
    out = sat.attention(q, k, v, "causal & window(1023,0)")       # tensors in, a tensor out
    out.sum().backward()

The library reads and writes the tensors' own memory, on the CPU and, as far as it has kernels there, on CUDA devices,
in torch's current stream. What torch.compile, torch.export, dispatch modes and torch.func see are two operators,
torch.ops.sparseattn.forward and .backward; a call of plain tensors goes to the library without a detour.
"""

from .._step import Step
from . import _flops as _flops
from ._append import cache_append
from ._attention import attention, attention_backward, plan, scaled_dot_product_attention
from ._cache import KVCache, decode
from ._context_parallel import ContextParallel
from ._float8 import float8_attention, to_float8
from ._flex import from_block_mask, to_block_mask, to_mask_mod
from ._modules import BlockSparseMultiHeadAttention
from ._tensors import TensorPlan

__all__ = [
    "BlockSparseMultiHeadAttention",
    "ContextParallel",
    "KVCache",
    "Step",
    "TensorPlan",
    "attention",
    "attention_backward",
    "cache_append",
    "decode",
    "float8_attention",
    "from_block_mask",
    "plan",
    "scaled_dot_product_attention",
    "to_block_mask",
    "to_float8",
    "to_mask_mod",
]
