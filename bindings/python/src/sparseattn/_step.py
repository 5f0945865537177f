# SPDX-License-Identifier: MIT
"""What the layers of a model share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._core import ArgumentError, DTypeError, lib

if TYPE_CHECKING:
    from ._frames import Frame
    from ._plans import Plan


class Step:
    """What the layers of a model share in one of its steps, where each has a cache of its own.

        step = sparseattn.Step()
        for ...:                                            # the steps of the model
            for k, v in caches:                             # of a layer each
                out = plan.forward(q, k, v, starts=starts, page_table=page_table, step=step)
            step.reset()

    From the numbers in starts, page_table, query_offsets and parents a call makes lists of the keys that its queries
    see. Where these numbers are the same in all layers, the first call of each plan makes the lists, and other calls of
    that plan, whose k and v have the shapes and strides of the first call's, find them here.

    They must be given the same numbers, or ArgumentError names the argument that has others. On a GPU the host does not
    read them: starts, query_offsets and parents must be the very tensors of the first call, which nobody has written to
    since. Each layer may have a page_table of its own there, whose numbers nobody compares.

    It keeps the workspaces of the last plans, a few of them, until it is reset or forgotten. One thread at a time; on a
    GPU one stream, and one graph where calls are captured. A copy, also a pickled one, has seen no call.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def reset(self) -> None:
        """Forgets all calls: the next ones are of another step of the model, with any numbers, as with a new Step."""
        self._kept.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": {}}

    def _keep(self, key: Any, made: Any) -> None:
        """What the next calls find. A plan that is made anew for each call never finds its own again."""
        while key not in self._kept and len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = made

    def _call(self, plan: Plan, frame: Frame, numbers: dict[str, Any]) -> int:
        """The status of a call that finds its lists here, or leaves them; numbers: the arguments that these are of."""
        forms = (frame.tensors[name][0] for name in ("k", "v") if name in frame.tensors)
        key = "workspace", plan, plan._queue(), *forms
        scratch, known = self._kept.get(key, (None, {}))
        if scratch is not None:
            self._compare(plan, known, numbers)
            frame.args.flags = lib.SPATTN_FORWARD_SAME_STEP
            try:
                return plan._call(frame, scratch)
            finally:
                frame.args.flags = 0
        known = self._note(plan, numbers)
        scratch = plan._make_scratch(frame.size)
        status = plan._call(frame, scratch)
        if not status:
            self._keep(key, (scratch, known))
        return status

    def _note(self, plan: Plan, numbers: dict[str, Any]) -> dict[str, Any]:
        """What the calls to come are compared with."""
        return {name: plan._note(name, x) for name, x in numbers.items() if x is not None}

    def _compare(self, plan: Plan, known: dict[str, Any], numbers: dict[str, Any]) -> None:
        """Raises ArgumentError where a call has other numbers than the first."""
        for name, noted in known.items():
            x = numbers[name]
            if x is not None:  # else the library says what it says without a step
                refuse_other(name, plan._differs(name, noted, x))


class StepOfCaches(Step):
    """A Step for one call, of which its caller knows that all numbers are the same."""

    def __init__(self, step: Any):
        self._kept = required_step(step)._kept

    def _note(self, plan: Plan, numbers: dict[str, Any]) -> dict[str, Any]:
        return {}


def required_step(step: Any) -> Step:
    """The step. Raises DTypeError for what is none."""
    if not isinstance(step, Step):
        message = f"argument step is {type(step).__name__}; accepted: a sparseattn.Step"
        raise DTypeError(message, "SPATTN_E_DTYPE", "step")
    return step


OTHER_NUMBERS = "has other numbers than in an earlier call of the step"


def refuse_other(name: str, why: str) -> None:
    """Raises ArgumentError for an argument that is not what the step began with; why is "" where it is."""
    if why:
        accepted = "the same in all layers, and step.reset() before the next step of the model"
        raise ArgumentError(f"argument {name} {why}; accepted: {accepted}", "SPATTN_E_STATE", name)


_MOST_KEPT = 32
