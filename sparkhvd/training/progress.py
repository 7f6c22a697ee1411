"""How far an epoch is, for the driver, from what the host knows without waiting for a GPU."""

from __future__ import annotations

import time

import sparkhvd.torch as hvd
from sparkhvd.rank_messages import report_progress

__all__ = ["Progress", "format_progress"]

# Seconds between two reports.
_INTERVAL_S = 0.5


def format_progress(
    epoch: int, epochs: int, step: int, num_steps: int, rows: int, steps: int, seconds: float
) -> str:
    """Format how far an epoch is: "epoch 2/10  step 120/500  12,345 rows/s  3 s left".

    Args:
        epoch: counted from 1.
        epochs: that the run will have.
        step: steps of the epoch that are done.
        num_steps: of an epoch.
        rows: of all ranks in the last steps.
        steps: number of these.
        seconds: that these have taken.
    """
    left = (num_steps - step) * seconds / steps
    minutes, rest = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    shown = (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
    return f"epoch {epoch}/{epochs}  step {step:,}/{num_steps:,}  {rows / seconds:,.0f} rows/s  {shown} left"


class Progress:
    """Reports of rank 0 within an epoch, at most two per second."""

    def __init__(self, epoch: int, epochs: int, num_steps: int) -> None:
        """Begin an epoch, counted from 1, of so many steps."""
        self._epoch, self._epochs, self._num_steps = epoch, epochs, num_steps
        self._is_reporting = hvd.rank() == 0
        self._began = self._reported = time.monotonic()
        self._rows = self._steps = 0

    def step(self, number: int, num_rows: int) -> None:
        """Count a step, by its number from 1, and the rows of all ranks in it."""
        if not self._is_reporting:
            return
        self._rows += num_rows
        self._steps += 1
        now = time.monotonic()
        if now - self._reported < _INTERVAL_S:
            return
        self._reported = now
        report_progress(
            format_progress(
                self._epoch,
                self._epochs,
                number,
                self._num_steps,
                self._rows,
                self._steps,
                now - self._began,
            )
        )
