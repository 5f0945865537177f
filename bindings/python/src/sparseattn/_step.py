# SPDX-License-Identifier: MIT
"""What the layers of a model share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._core import lib

if TYPE_CHECKING:
    from ._frames import Frame
    from ._plans import Plan


class Step:
    """What the layers of a model share in one of its steps, where each has a cache of its own.

        step = sparseattn.Step()                            # a new one for each step of the model
        for k, v in caches:                                 # of a layer each
            out = plan.forward(q, k, v, starts=starts, page_table=page_table, step=step)

    From the numbers in starts, page_table, query_offsets and parents a call makes lists of the keys that its queries see.
    Where these numbers are the same in all layers, the first call of each plan makes the lists, and other calls of that
    plan, whose k and v have the shapes and strides of the first call's, find them here. They must be given the same
    numbers, which nobody checks.

    It keeps the workspaces of the last plans, a few of them, so let each step of the model have its own Step. One thread
    at a time; on a GPU one stream, and one graph where calls are captured.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def _keep(self, key: Any, made: Any) -> None:
        """What the next calls find. A plan that is made anew for each call never finds its own again."""
        while key not in self._kept and len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = made

    def _call(self, plan: Plan, frame: Frame) -> int:
        """The status of a call that finds its lists here, or leaves them."""
        forms = (frame.tensors[name][0] for name in ("k", "v") if name in frame.tensors)
        key = "workspace", plan, plan._queue(), *forms
        scratch = self._kept.get(key)
        if scratch is not None:
            frame.args.flags = lib.SPATTN_FORWARD_SAME_STEP
            try:
                return plan._call(frame, scratch)
            finally:
                frame.args.flags = 0
        scratch = plan._make_scratch(frame.size)
        status = plan._call(frame, scratch)
        if not status:
            self._keep(key, scratch)
        return status


_MOST_KEPT = 32
