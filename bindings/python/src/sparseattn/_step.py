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

    A call finds in starts, page_table, query_offsets and parents which keys its queries see, and where these lie. Where
    layers have the same of these numbers, the first call of each plan makes that, and the others, whose k and v have
    the shapes and strides of the first call's, find it here, and do not read the numbers again.

    It keeps a workspace for each plan. One thread at a time, and on a GPU one stream.
    """

    def __init__(self) -> None:
        self._scratch: dict[Any, Any] = {}  # of a plan, and forms of k and v: where the first call has left its layout
        self._of_caches: dict[Any, Any] = {}  # what sparseattn.torch.decode made of the numbers of caches

    def _call(self, plan: Plan, frame: Frame) -> int:
        """The status of a call that finds its layout here, or leaves it."""
        key = plan, *(frame.tensors[name][0] for name in ("k", "v") if name in frame.tensors)
        scratch = self._scratch.get(key)
        if scratch is not None:
            frame.args.flags = lib.SPATTN_FORWARD_SAME_LAYOUT
            try:
                return plan._call(frame, scratch)
            finally:
                frame.args.flags = 0
        scratch = plan._make_scratch(frame.size)
        status = plan._call(frame, scratch)
        if not status:
            self._scratch[key] = scratch
        return status
