# SPDX-License-Identifier: MIT
"""Rows of float8, as caches have them."""
import torch


def to_float8(x):
    """Rows as float8, a scale for each of them [..., heads], and what they stand for."""
    scales = x.abs().amax(-1).float() / torch.finfo(torch.float8_e4m3fn).max
    codes = (x.float() / scales[..., None]).to(torch.float8_e4m3fn)
    return codes, scales, (codes.float() * scales[..., None]).to(x.dtype)
