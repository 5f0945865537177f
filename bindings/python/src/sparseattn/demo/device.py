# SPDX-License-Identifier: MIT
"""Where the programs of this package run attention: NumPy on the CPU, or torch, which brings the memory of a GPU."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any, Callable

import numpy as np

from .. import Context, Pattern, Plan, attention, attention_backward

Run = Callable[..., Any]  # of placed q, k, v, and perhaps an array for out: (out, lse)


class Device:
    """The CPU, with arrays of NumPy."""

    dtype = "float32"

    def __init__(self, threads: int = 0):
        self._context = Context("cpu", threads=threads)

    def __str__(self) -> str:
        return f"{len(os.sched_getaffinity(0))} CPU cores"

    def exact(self) -> Device:
        """The same device in float32, whose rounding is small enough to tell it from a wrong kernel."""
        return self

    def place(self, array: np.ndarray) -> Any:
        """[...] as an operand of calls, [1, ...]."""
        return np.asarray(array, self.dtype)[None]

    def fetch(self, operand: Any) -> np.ndarray:
        """An operand or a result [1, ...] as the array [...]."""
        array: np.ndarray = operand[0]
        return array

    def plan(self, pattern: Pattern, **sizes: Any) -> Run:
        """Attention with this pattern on these sizes, which are options of Plan."""
        made = Plan(pattern, context=self._context, dtype=self.dtype, **sizes)
        return lambda q, k, v, out=None: made.forward(q, k, v, return_lse=True, out=out)

    def gradients(self, pattern: Pattern, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        """(out, lse, dq, dk, dv) of placed operands."""
        out, lse = attention(q, k, v, pattern, return_lse=True, context=self._context)
        return out, lse, *attention_backward(q, k, v, out, lse, dout, pattern, context=self._context)

    def timed(self, run: Callable[..., Any], *operands: Any) -> tuple[Any, float]:
        """What run(*operands) gives, and its seconds."""
        self._wait()
        begin = time.perf_counter()
        result = run(*operands)
        self._wait()
        return result, time.perf_counter() - begin

    def _wait(self) -> None:
        """Returns when all that was asked of the device is done."""


class TorchDevice(Device):
    """A device of torch, with its tensors; in bfloat16, where a GPU has its fast kernels."""

    def __init__(self, name: str, dtype: str = "bfloat16"):
        import torch

        from ..torch import attention

        self._torch, self._attention, self.dtype = torch, attention, dtype
        self._device = torch.device(name)

    def __str__(self) -> str:
        on_gpu = self._device.type == "cuda"
        return self._torch.cuda.get_device_name(self._device) if on_gpu else f"torch on {self._device}"

    def exact(self) -> Device:
        return TorchDevice(str(self._device), "float32")

    def place(self, array: np.ndarray) -> Any:
        tensor = self._torch.from_numpy(np.ascontiguousarray(array))
        return tensor[None].to(self._device, getattr(self._torch, self.dtype))

    def fetch(self, operand: Any) -> np.ndarray:
        array: np.ndarray = operand.detach()[0].float().cpu().numpy()
        return array

    def plan(self, pattern: Pattern, **sizes: Any) -> Run:
        return lambda q, k, v, out=None: self._attention(q, k, v, pattern, return_lse=True)

    def gradients(self, pattern: Pattern, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        q, k, v = (operand.detach().requires_grad_() for operand in (q, k, v))
        out, lse = self._attention(q, k, v, pattern, return_lse=True)
        return out, lse, *self._torch.autograd.grad(out, (q, k, v), dout)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)


def find(name: str, threads: int = 0) -> Device:
    """The device of a user's word, "cpu", "cuda" or "cuda:1". Raises SystemExit with a sentence where it is not."""
    if name == "cpu":
        return Device(threads)
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(f"--device {name} needs torch, whose tensors lie on the GPU:  pip install torch")
    import torch

    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) >= count:
        raise SystemExit(f"--device {name}: torch sees {count} GPUs here; accepted: cpu, and cuda where there is one")
    return TorchDevice(name)
