# SPDX-License-Identifier: MIT
"""torch's own attention on a case: one more peer of the run each."""
import sys

import torch
import torch.nn.functional as F
from report import ROOT
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(ROOT / "bench"))
import peers  # noqa: E402

MOST_SPARSE = 2**37  # FLOPs of a case that torch.sparse is given, which reached 1 to 4 TFLOP/s on an H200


def dense(is_causal, dtype, head_dim=128):
    """Name and attention of each dense kernel for a dtype and head_dim. A causal one takes as many queries as keys."""
    backends = [("torch cuDNN SDPA", SDPBackend.CUDNN_ATTENTION), ("torch flash SDPA", SDPBackend.FLASH_ATTENTION)]
    if dtype == torch.float32 or head_dim > 256:
        backends = [("torch efficient SDPA", SDPBackend.EFFICIENT_ATTENTION)]
    for name, backend in backends:
        def attention(q, k, v, backend=backend):
            group = q.shape[1] // k.shape[1]
            if backend == SDPBackend.EFFICIENT_ATTENTION and group > 1:  # which knows no groups
                k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
                if k.requires_grad and k.numel() >= 2**31:  # it writes elsewhere, or ends the process
                    raise RuntimeError("gradients beyond 2^31 elements (github.com/pytorch/pytorch/issues/150054)")
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=group > 1)
        yield name, attention


def of_documents(boundaries, device):
    """Causal attention of packed documents: torch's kernels on nested tensors."""
    lengths = [end - begin for begin, end in zip(boundaries, boundaries[1:])]
    options = dict(offsets=torch.tensor(boundaries, device=device), min_seqlen=min(lengths), max_seqlen=max(lengths))

    def attention(q, k, v):
        nested = (torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), **options) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested), is_causal=True)
        return out.transpose(1, 2).values().transpose(0, 1)[None]
    return attention


def of_pass(what, attention, t):
    """The call of one pass of a differentiable attention. Returns what the library's pass makes."""
    if what == "forward":
        return lambda: [attention(t.q, t.k, t.v)]
    inputs = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    out = attention(*inputs)
    return lambda: torch.autograd.grad(out, inputs, t.dout, retain_graph=True)


def sparse(csr, t):
    """torch.sparse's forward, which is of float32. csr: row_ptr and col_idx."""
    arrays = (x.to(t.q.device) for x in csr)
    call = peers.sparse_attention(*arrays, *(x.float() for x in (t.q, t.k, t.v)))
    return lambda: [call()]


def make_flex(kept, seq_q, seq_k):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    make = torch.compile(create_block_mask, dynamic=False)
    blocks = make(lambda b, h, i, j: kept(i, j), None, None, seq_q, seq_k, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] > k.shape[1])
