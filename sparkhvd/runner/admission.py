"""Admission of launches: they take the task slots of their application in the order of their calls.

Spark starts a barrier stage when all its slots are free in one round of offers and never holds some of them, so stages
cannot block each other for good; but small ones may overtake a large one again and again. So launches take slots here,
before Spark sees them. Where the number of slots is unknown, Spark alone decides.

**Threads**: any; one condition guards the list of launches. **Shutdown**: a launch leaves the list when its block ends,
whatever ends it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from sparkhvd.errors import PreflightError

__all__ = ["Turn", "is_launched", "turn"]

# A poll also lets Ctrl-C through.
_POLL_S = 0.5
# A wait for executors is printed when it lasts longer than this, and then as often.
_SAY_EVERY_S = 5.0


@dataclass(eq=False)
class Turn:
    """Place of a launch in the order of its application.

    Attributes:
        application: id of the application.
        kind: resources per task. Launches of one kind compete for the same slots; between kinds Spark decides.
        size: slots that it needs.
        is_alone: whether its ranks find their GPUs by local rank, so that two such launches would share them.
        holds: slots that it holds; 0 while it waits for them, also between two attempts.
        most: slots that it takes where they are free, once it has those that it needs; 0 for no more.
    """

    application: str
    kind: Hashable
    size: int
    is_alone: bool = False
    holds: int = 0
    most: int = 0

    @contextlib.contextmanager
    def slots(
        self, count: Callable[[], int | None], limit_s: float, say: Callable[[str], None]
    ) -> Iterator[None]:
        """Wait for the slots of all ranks, and hold them inside the block.

        Args:
            count: returns the slots of all registered executors, taken or not; None where that is unknown.
            limit_s: longest time in seconds with fewer slots than ranks. A wait for other launches does not count.
            say: prints a line.

        Raises:
            PreflightError: there were too few slots for too long.
        """
        try:
            self._wait(count, limit_s, say)
            yield
        finally:
            with _changed:
                self.holds = 0
                _changed.notify_all()

    def _wait(
        self, count: Callable[[], int | None], limit_s: float, say: Callable[[str], None]
    ) -> None:
        lacked_s, said_at, is_told = 0.0, time.monotonic(), False
        while True:
            asked_at = time.monotonic()
            slots = count()
            with _changed:
                if not (reason := self._take(slots)):
                    return
            is_lacking = slots is not None and slots < self.size
            if not is_lacking and not is_told:
                is_told = True
                say(reason)
            with _changed:
                _changed.wait(_POLL_S)
            if not is_lacking:
                continue
            lacked_s += time.monotonic() - asked_at
            if lacked_s > limit_s:
                raise PreflightError(
                    f"num_proc={self.size}: after {limit_s:g} s the application has {slots} task slots, so the "
                    "barrier stage cannot start. Free executors on the cluster, lower num_proc, or raise start_timeout."
                )
            if time.monotonic() - said_at >= _SAY_EVERY_S:
                said_at = time.monotonic()
                say(reason)

    def _take(self, slots: int | None) -> str:
        """Hold the slots if no launch before this one needs them, and return ""; else return the reason for the user."""
        if slots is not None and slots < self.size:
            return f"Waiting for task slots: {slots} of {self.size} registered."
        others = [
            other for other in _turns if other is not self and other.application == self.application
        ]
        running = [other for other in others if other.holds]
        before = _turns[: _turns.index(self)]
        earlier = [other for other in before if other in others and not other.holds]
        if slots is not None:
            peers = [other for other in running if other.kind == self.kind]
            # A launch that is too large even alone waits for executors, and holds up no smaller one.
            ahead = [other for other in earlier if other.kind == self.kind and other.size <= slots]
            if ahead or sum(other.holds for other in peers) + self.size > slots:
                return (
                    f"Waiting for {self.size} of {slots} task slots: {len(peers)} launches of this application "
                    f"run, and {len(ahead)} came earlier."
                )
        if self.is_alone and any(other.is_alone for other in (*running, *earlier)):
            return (
                "Waiting for the GPUs: another launch of this application, whose ranks find theirs by local rank "
                "too, came earlier."
            )
        free = self.size if slots is None else slots - sum(other.holds for other in running)
        self.holds = max(self.size, min(self.most, free))
        return ""


# Launches of this process that have not ended, in the order of their calls.
_turns: list[Turn] = []
_changed = threading.Condition()


@contextlib.contextmanager
def turn(
    application: str, kind: Hashable, size: int, *, is_alone: bool = False, most: int = 0
) -> Iterator[Turn]:
    """Take a place in the order of the application's launches for the length of the block; see `Turn`."""
    place = Turn(application, kind, size, is_alone, most=most)
    with _changed:
        _turns.append(place)
    try:
        yield place
    finally:
        with _changed:
            _turns.remove(place)
            _changed.notify_all()


def is_launched(application: str) -> bool:
    """Return True if a job of this process holds slots of the application, or waits for them."""
    with _changed:
        return any(launch.application == application for launch in _turns)
