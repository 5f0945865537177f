# SPDX-License-Identifier: MIT
"""Rows of float8, as caches and operands have them."""
import torch


def to_float8(x, shared=None):
    """Rows as float8, a scale for each of them (or, along an axis of these, one), and what they stand for."""
    scales = x.abs().amax(-1).float() / torch.finfo(torch.float8_e4m3fn).max
    if shared is not None:
        scales = scales.amax(shared, keepdim=True).expand_as(scales)
    codes = (x.float() / scales[..., None]).to(torch.float8_e4m3fn)
    return codes, scales, (codes.float() * scales[..., None]).to(x.dtype)
