# SPDX-License-Identifier: MIT
"""FA4 (the wheel flash-attn-4 and what it needs, on PYTHONPATH) on the cases of bench.py: one more peer of the run.

It takes [batch, seq, heads, head_dim]. Dense, causal and window cases are its own options, block-diagonal ones a batch,
and all others go through lists of 128 x 128 blocks, full ones and such that a mask function decides.
"""
import torch


def is_here():
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError:
        return False
    return True


def takes(name, mask):
    """Whether it has a case's pattern."""
    kinds = ("full", "causal", "window1k", "window4k", "streaming", "block")
    return mask is not None or name.split("_")[0] in kinds


def make_call(name, mask, q, k, v):
    """The call of a case. q, k, v and its result are [batch, heads, seq, head_dim]; mask is of 128-blocks, or None."""
    from flash_attn.cute.interface import _flash_attn_fwd
    rows, options, whole = prepared(name, mask, q, k, v)
    return lambda: whole(_flash_attn_fwd(*rows, return_lse=True, **options)[0])


def make_gradients(name, mask, q, k, v, dout):
    """The same of the backward pass: a call that returns dq, dk, dv."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    (*rows, dout), options, whole = prepared(name, mask, q, k, v, dout)
    out, lse = _flash_attn_fwd(*rows, return_lse=True, **options)[:2]
    if "block_sparse_tensors" in options:
        options = {**options, "block_sparse_tensors": make_lists(*(x.T for x in block_classes(name, mask, q.shape[2])))}
    return lambda: [whole(x) for x in _flash_attn_bwd(*rows, out, dout, lse, **options)[:3]]


def prepared(name, mask, *operands):
    """Operands as it wants them, options of a case, and what brings a result back to [batch, heads, seq, head_dim]."""
    rows = [x.transpose(1, 2) for x in operands]
    batch, seq, heads, dim = rows[0].shape
    if name.startswith("block_diagonal512"):
        rows = [x.view(seq // 512, 512, heads, dim) for x in rows]
        return rows, {}, lambda x: x.view(batch, seq, heads, dim).transpose(1, 2)
    return rows, make_options(name, mask, seq), lambda x: x.transpose(1, 2)


def make_attention(name, seq):
    """Differentiable attention of a case without a mask, on [batch, seq, heads, head_dim]."""
    from flash_attn.cute.interface import flash_attn_func
    options = make_options(name, None, seq)
    if "block_sparse_tensors" in options:
        options["block_sparse_tensors_bwd"] = make_lists(*(x.T for x in block_classes(name, None, seq)))
    if "window_size_left" in options:
        options = {"window_size": (options["window_size_left"], options["window_size_right"])}
    return lambda q, k, v: flash_attn_func(q, k, v, **options)[0]


def make_options(name, mask, seq):
    windows = {"window1k": 1023, "window4k": 4095}
    kind = name.split("_")[0]
    if kind in windows:
        return {"window_size_left": windows[kind], "window_size_right": 0}
    if kind == "causal":
        return {"causal": True}
    classes = block_classes(name, mask, seq)
    if classes is None:
        return {}
    options = {"block_sparse_tensors": make_lists(*classes)}
    return {**options, "mask_mod": make_streaming_mask()} if kind == "streaming" else options


def block_classes(name, mask, seq):
    """Which 128 x 128 blocks are full, and which it has to ask a mask function about: [query block, key block]."""
    if mask is not None:
        return mask, torch.zeros_like(mask)
    if not name.startswith("streaming"):
        return None
    q, k = torch.arange(seq // 128)[:, None] * 128, torch.arange(seq // 128)[None] * 128
    touched = (k <= q + 127) & ((q - k - 127 < 1024) | (k < 64))
    full = (k + 127 <= q) & (q + 127 - k < 1024)
    return full, touched & ~full


def make_streaming_mask():
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def keeps(batch, head, q, k, lengths, tensors):
        window, sink = utils.scalar_to_ssa(1024, cutlass.Int32), utils.scalar_to_ssa(64, cutlass.Int32)
        return (k <= q) & ((q - k < window) | (k < sink))

    return keeps


def make_lists(full, masked):
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    def listed(blocks):
        counts = blocks.sum(1).int()
        columns = torch.argsort(~blocks, dim=1, stable=True)[:, :max(1, int(counts.max()))].int()
        return counts[None, None].contiguous().cuda(), columns[None, None].contiguous().cuda()

    return BlockSparseTensorsTorch(*listed(masked), *listed(full), block_size=(128, 128))
