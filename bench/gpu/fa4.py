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


def make_call(name, mask, q, k, v):
    """The call of a case. q, k, v and its result are [batch, heads, seq, head_dim]; mask is of 128-blocks, or None."""
    from flash_attn.cute.interface import _flash_attn_fwd
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, seq, heads, dim = q.shape
    if name.startswith("block_diagonal512"):
        rows = [x.view(seq // 512, 512, heads, dim) for x in (q, k, v)]
        return lambda: _flash_attn_fwd(*rows, return_lse=True)[0].view(batch, seq, heads, dim).transpose(1, 2)
    options = make_options(name, mask, seq)
    return lambda: _flash_attn_fwd(q, k, v, return_lse=True, **options)[0].transpose(1, 2)


def make_options(name, mask, seq):
    windows = {"window1k_16k": 1023, "window4k_128k": 4095}
    if name in windows:
        return {"window_size_left": windows[name], "window_size_right": 0}
    if name == "causal_16k":
        return {"causal": True}
    if name.startswith("streaming"):
        return {"block_sparse_tensors": streaming_lists(seq), "mask_mod": make_streaming_mask()}
    return {"block_sparse_tensors": make_lists(mask, torch.zeros_like(mask))} if mask is not None else {}


def make_streaming_mask():
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def keeps(batch, head, q, k, lengths, tensors):
        window, sink = utils.scalar_to_ssa(1024, cutlass.Int32), utils.scalar_to_ssa(64, cutlass.Int32)
        return (k <= q) & ((q - k < window) | (k < sink))

    return keeps


def streaming_lists(seq):
    q, k = torch.arange(seq // 128)[:, None] * 128, torch.arange(seq // 128)[None] * 128
    touched = (k <= q + 127) & ((q - k - 127 < 1024) | (k < 64))
    full = (k + 127 <= q) & (q + 127 - k < 1024)
    return make_lists(full, touched & ~full)


def make_lists(full, masked):
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    def listed(blocks):
        counts = blocks.sum(1).int()
        columns = torch.argsort(~blocks, dim=1, stable=True)[:, :max(1, int(counts.max()))].int()
        return counts[None, None].contiguous().cuda(), columns[None, None].contiguous().cuda()

    return BlockSparseTensorsTorch(*listed(masked), *listed(full), block_size=(128, 128))
