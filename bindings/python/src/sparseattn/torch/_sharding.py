# SPDX-License-Identifier: MIT
"""A sequence on several ranks, of tensors."""

from __future__ import annotations

from typing import Any

import torch

from .._patterns import Pattern
from .._sharding import Sharding
from ._tensors import TensorPlan, code_of, require_tensor, stream_on, struct_of


class TensorSharding(Sharding):
    """A Sharding whose arrays are tensors of one device. Autograd does not see what it does."""

    plan: TensorPlan

    def __init__(self, pattern: Any, device: torch.device, ranks: int, rank: int, **options: Any):
        self._device = device
        super().__init__(pattern, ranks, rank, **options)

    def _read_dtype(self, dtype: torch.dtype, argument: str) -> tuple[Any, tuple[int, int]]:
        return dtype, code_of(dtype, argument)

    def _adopt(self, handle: Any, pattern: Pattern, problem: Any) -> TensorPlan:
        return TensorPlan.adopt_on(self._device, handle, pattern, problem, self._axes, self.dtype)

    def _stream(self) -> Any:
        return stream_on(self._device)

    def _join(self, x: torch.Tensor, axis: int, ranges: list[tuple[int, int]]) -> torch.Tensor:
        parts = [x.narrow(axis, begin, end - begin) for begin, end in ranges]
        return torch.cat(parts, axis) if len(parts) > 1 else parts[0]

    def _empty_bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _tensor(self, array: Any, argument: str, writes: bool) -> Any:
        require_tensor(array, argument)
        array = array if writes else array.detach().resolve_neg()
        return struct_of(array, argument, array.data_ptr())

    def _memory_of(self, buffer: torch.Tensor) -> tuple[int, int]:
        return buffer.data_ptr(), buffer.numel()
