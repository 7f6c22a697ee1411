"""States of a reduction cycle, from the first gradient of a backward pass to the step that uses the reduced gradients.

    IDLE -> COLLECTING -> SENDING -> SENT -> REDUCED -> IDLE

| state | meaning |
|---|---|
| IDLE | no gradient has arrived since the last step |
| COLLECTING | gradients of this cycle arrive; nothing has been submitted |
| SENDING | a bucket, or the vote on layouts, has been submitted |
| SENT | all operations of the cycle have been submitted |
| REDUCED | `.grad` holds the reduced gradients, and the optimizer has not stepped with them |

A rank without a gradient goes from IDLE to SENT. Where a further pass may add to reduced gradients, and where the reducers of
an optimizer reduce again together, REDUCED is followed by COLLECTING or SENT. `reset` leads from every state back to IDLE: after
an error, when the cycle is discarded, and before its result is taken.

A cycle holds what is valid until its end: the state, how many backward passes are left, and the pass that runs. The reducer has
one object, which `reset` makes ready for the next cycle. `results` outlive it: gradients that are kept after the step are recognized by them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum, auto

from torch import Tensor

from sparkhvd.torch.gradients.backward_end import BackwardEnd
from sparkhvd.torch.gradients.entry import Entry

__all__ = ["Cycle", "ReducedGradients", "State"]


class State(Enum):
    """State of a cycle."""

    IDLE = auto()
    COLLECTING = auto()
    SENDING = auto()
    SENT = auto()
    REDUCED = auto()


class Cycle:
    """State of the running cycle; every transition is a method.

    Args:
        passes: backward passes per cycle.

    Attributes:
        state: of the cycle.
        passes: backward passes per cycle.
        passes_left: backward passes until the gradients are complete, with the one that runs.
        is_held: whether passes only add to the gradients of this rank, and none of them is the last.
        count: how many cycles have ended with reduced gradients.
        results: the reduced gradients, where a change or a further pass would give wrong results.
        added_to_kept: name of a parameter whose gradient was added to one of the last step; a step with the sum would be wrong.
    """

    __slots__ = (
        "_end",
        "added_to_kept",
        "count",
        "is_held",
        "passes",
        "passes_left",
        "results",
        "state",
    )

    def __init__(self, passes: int) -> None:
        self.state = State.IDLE
        self.passes = self.passes_left = passes
        self.is_held = False
        self.count = 0
        self.results = ReducedGradients()
        self.added_to_kept = ""
        # Of the backward pass that runs; the reference is dead if that ended in an exception.
        self._end: weakref.ref[BackwardEnd] | None = None

    @property
    def is_in_pass(self) -> bool:
        """Return True while a backward pass runs that has given a gradient."""
        return self._end is not None and self._end() is not None

    @property
    def is_interrupted(self) -> bool:
        """Return True if the last backward pass ended in an exception."""
        return self._end is not None and self._end() is None

    @property
    def is_in_flight(self) -> bool:
        """Return True if an operation of this cycle has been submitted."""
        return self.state in (State.SENDING, State.SENT)

    @property
    def is_last_pass(self) -> bool:
        """Return True if the gradients are complete after the pass that runs, or the next one."""
        return self.passes_left == 1 and not self.is_held

    @property
    def is_open(self) -> bool:
        """Return True if the cycle has begun and must be waited for."""
        return self.state not in (State.IDLE, State.REDUCED)

    # --- Transitions. ---

    def enter(self, end: BackwardEnd) -> None:
        """Go to COLLECTING, with the first gradient of a backward pass."""
        assert not self.is_in_flight
        self.state = State.COLLECTING
        self._end = weakref.ref(end)

    def leave(self, end: BackwardEnd) -> bool:
        """Count a backward pass that has ended; return True if it was the last of the cycle."""
        if self._end is None or self._end() is not end:
            return (
                False  # a step inside the pass, in the backward of a function, has ended the cycle
            )
        self._end = None
        is_last = self.is_last_pass
        if not is_last and not self.is_held:
            self.passes_left -= 1
        return is_last

    def send(self) -> None:
        """Go to SENDING: an operation has been submitted, and others will be."""
        if self.state is not State.SENT:
            self.state = State.SENDING

    def complete(self) -> None:
        """Go to SENT: every operation has been submitted."""
        self.state = State.SENT

    def reset(self) -> None:
        """Go to IDLE: no operation of the cycle is in flight any more."""
        self.state = State.IDLE
        self.passes_left = self.passes
        self._end = None

    def finish(self) -> None:
        """Go from IDLE, behind the operations, to REDUCED: their results lie in `.grad`."""
        assert self.state is State.IDLE
        self.state = State.REDUCED
        self.count += 1

    def use(self) -> None:
        """Go from REDUCED to IDLE: the optimizer steps with the reduced gradients."""
        if self.state is State.REDUCED:
            self.state = State.IDLE
        self.results.clear()

    def drop(self) -> None:
        """Forget the reduced gradients: they are dropped or set to zero."""
        self.use()
        self.added_to_kept = ""

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes a cycle has; only between cycles."""
        self.passes = self.passes_left = passes


class ReducedGradients:
    """The reduced gradients of a reducer, by parameter number, as they were when they were noted."""

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __bool__(self) -> bool:
        return bool(self._noted)

    def clear(self) -> None:
        """Forget all."""
        self._noted = {}

    def note(self, entries: Sequence[Entry]) -> None:
        """Note the gradients as they are now, in place of those that were noted before."""
        grads = [(e.index, e.param.grad) for e in entries]
        self._noted = {i: (weakref.ref(g), g._version) for i, g in grads if g is not None}

    def find_changed(self, entries: Sequence[Entry]) -> str | None:
        """Return the name of a parameter whose gradient was changed or replaced since `note`."""
        for index, (reference, version) in self._noted.items():
            entry = entries[index]
            grad = entry.param.grad
            if grad is None or grad is not reference() or grad._version != version:
                return entry.name
        return None

    def is_added_to(self, entry: Entry) -> bool:
        """Return True if backward added to the noted gradient of this parameter."""
        reference, version = self._noted.get(entry.index, (None, 0))
        grad = entry.param.grad
        if reference is None or grad is None or grad is not reference():
            return False
        return grad._version == version + 1  # else it was set to zero in place before

    def was_dropped(self, entry: Entry, entries: Sequence[Entry]) -> bool:
        """Return True if a gradient of this cycle, in flight or reduced, is not `.grad` any more.

        Args:
            entry: the parameter that got another gradient.
            entries: all parameters of the reducer.
        """
        known = self._known(entry)
        if known is not None:
            return entry.param.grad is not known
        # It is the first of a parameter that had none in this cycle.
        others = [(e, self._known(e)) for e in entries]
        return any([grad is not None and e.param.grad is not grad for e, grad in others]) or any(
            [reference() is None for reference, _ in self._noted.values()]
        )

    def _known(self, entry: Entry) -> Tensor | None:
        """Return the gradient of this cycle, in flight or reduced."""
        if entry.grad is not None:
            return entry.grad
        reference, _ = self._noted.get(entry.index, (None, 0))
        return None if reference is None else reference()
