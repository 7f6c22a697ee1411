"""Times of checkpoints inside an epoch: pure arithmetic on a clock that the caller reads."""

from __future__ import annotations

__all__ = ["Cadence"]

# A checkpoint starts when this part of the interval has gone; the rest is for writing it.
_START = 0.75
_SHORTEST_STEP_S = 1e-6
# Rank 0 is asked at most so often per interval, and at least so often.
_MOST_QUESTIONS, _LEAST_QUESTIONS = 200, 20


class Cadence:
    """Rank 0's decisions to write. At most `interval_s` of steps may be lost, so a write must end within it.

    Every few steps the ranks ask rank 0 whether to write; how many steps lie between two questions follows from
    the time that steps take.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        """Begin at `now`, before any training."""
        self._interval_s = interval_s
        self._taken = self._asked = now
        self._write_s = 0.0
        self._num_steps = 1

    def taken(self, now: float) -> None:
        """Note that a checkpoint with the state at `now` is being written."""
        self._taken = now

    def written(self, seconds: float) -> None:
        """Note that a checkpoint was written `seconds` after it was taken."""
        self._write_s = max(seconds, 0.7 * self._write_s)  # one fast write says little

    def ask(self, now: float, *, is_writing: bool) -> tuple[bool, int]:
        """Decide whether to take a checkpoint now, and after how many steps to ask again.

        Args:
            now: the time, on rank 0's clock.
            is_writing: the one before is still being written, so another has to wait.
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
