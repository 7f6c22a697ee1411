"""Records of ranks on the driver's stream, each once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from sparkhvd.runner.live.frames import Record, left_out
from sparkhvd.runner.outcomes import Outcome

__all__ = ["Display"]


class Display:
    """Shows the records of an attempt's ranks, for one thread at a time."""

    def __init__(
        self,
        show: Callable[[str], None],
        size: int,
        progress: Callable[[str], None] = lambda _: None,
        elsewhere: str = "",
    ) -> None:
        """Make a display.

        Args:
            show: called with whole lines.
            size: number of ranks.
            progress: called with a line on the progress of the training.
            elsewhere: where lines are that are lost; "" for nowhere.
        """
        self._elsewhere = elsewhere
        self._show = show
        self._progress = progress
        # Number of the last record that is shown, by rank.
        self._shown = [0] * size

    def last(self, rank: int) -> int:
        """Return the number of the last record of a rank that is shown; 0 for none."""
        return self._shown[rank]

    def take(self, rank: int, record: Record) -> None:
        """Show a record, unless it was shown before; progress has no number."""
        if record.number == 0:
            with contextlib.suppress(Exception):
                self._progress(record.text)
        if record.number <= self._shown[rank]:
            return
        # A broken stream never breaks training; what it does not take is gone.
        with contextlib.suppress(Exception):
            self._show(record.text)
        self._shown[rank] = record.number

    def show_rest(self, outcomes: Iterable[Outcome]) -> None:
        """Show what ranks had not sent when they ended, and count what is lost."""
        for outcome in outcomes:
            if outcome.rank is not None:
                self._show_unsent(outcome.rank, [Record(*fields) for fields in outcome.unsent])

    def _show_unsent(self, rank: int, records: Sequence[Record]) -> None:
        lost = [each for each in records if not each.text and each.number > self._shown[rank]]
        if lost:
            text = left_out(rank, sum(each.lines for each in lost), self._elsewhere)
            self.take(rank, Record(lost[-1].number, text))
        for record in records:
            self.take(rank, record)
