"""When to write a checkpoint inside an epoch: pure arithmetic on the time that it is told."""

from __future__ import annotations

__all__ = ["Cadence"]

# A checkpoint starts when this part of the interval has gone; the rest is for writing it.
_START = 0.75
_SHORTEST_STEP_S = 1e-6
# Rank 0 is asked at most so often per interval, and at least so often.
_MOST_QUESTIONS, _LEAST_QUESTIONS = 200, 20


class Cadence:
    """Rank 0's decisions. No more than `interval_s` of steps may be lost, so a write must end within it.

    Every few steps the ranks ask rank 0 whether to write; how many steps lie between two questions follows from
    the time that steps take.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        """The state at `now` is safe: nothing has been trained since."""
        self._interval_s = interval_s
        self._taken = self._asked = now
        self._write_s = 0.0
        self._num_steps = 1

    def taken(self, now: float) -> None:
        """The state at `now` is what the checkpoint being written holds."""
        self._taken = now

    def written(self, seconds: float) -> None:
        """A checkpoint was written `seconds` after it was taken."""
        self._write_s = max(seconds, 0.7 * self._write_s)  # one fast write says little

    def ask(self, now: float, *, is_writing: bool) -> tuple[bool, int]:
        """Whether to take a checkpoint now, and after how many steps to ask again (the same on all ranks).

        Args:
            now: the moment, on rank 0's clock.
            is_writing: the one before is still being written: then another has to wait.
        """
        step_s = max((now - self._asked) / self._num_steps, _SHORTEST_STEP_S)
        self._asked = now
        start = min(_START * self._interval_s, self._interval_s - 2 * self._write_s)
        left = self._taken + start - now
        shortest = self._interval_s / _MOST_QUESTIONS
        is_due = left <= shortest and not is_writing
        if is_due:
            left = start
        pause = min(max(left / 4, shortest), self._interval_s / _LEAST_QUESTIONS)
        # Steps may become slower: never more than four times as many as were measured.
        self._num_steps = max(1, min(int(pause / step_s), 4 * self._num_steps))
        return is_due, self._num_steps
