"""Records of a rank that the driver has not acknowledged, and lines on their way to the next one.

Threads: any number put lines in, and never wait; one takes records out.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from sparkhvd.runner.live.frames import Record, left_out
from sparkhvd.runner.live.throttle import LINES, MESSAGES, Bucket

__all__ = ["Backlog"]

# Bytes of lines that may wait, and of messages beside them.
_QUEUE_BYTES = 4 << 20
# Lines come together in a record up to this size.
_RECORD_BYTES = 32 << 10
# Most that is sent before it must be acknowledged.
_BATCH_BYTES = 256 << 10
# Most that travels with the outcome.
_REST_BYTES = 256 << 10


class Backlog:
    """Bounded queue of a rank's lines."""

    def __init__(self, rank: int, elsewhere: str, *, shows_lines: bool, is_limited: bool) -> None:
        """Make an empty queue.

        Args:
            rank: for the lines that say how many were left out.
            elsewhere: where those are, such as "the executor's log has all"; "" for nowhere.
            shows_lines: whether ordinary lines are taken at all, or only messages.
            is_limited: whether the rate of lines is.
        """
        self._rank, self._elsewhere = rank, elsewhere
        self._shows_lines, self._is_limited = shows_lines, is_limited
        self._changed = threading.Condition()
        now = time.monotonic()
        self._lines, self._messages = Bucket(LINES, now), Bucket(MESSAGES, now)
        self._records: deque[Record] = deque()
        self._open: list[str] = []
        self._open_bytes = self._open_lines = 0
        self._bytes = 0
        self._last = 0
        self._newest = ""
        self._left_out = 0
        self._has_ended = False

    def line(self, line: str) -> bool:
        """Put in a line; return False if it is left out."""
        if not self._shows_lines:
            return False
        num_bytes = len(line.encode(errors="replace")) + 1
        with self._changed:
            if self._has_ended:
                return False
            # The room first: a line that finds none takes nothing from the rate.
            if self._bytes + num_bytes > _QUEUE_BYTES or not (
                not self._is_limited or self._lines.admits(num_bytes, time.monotonic())
            ):
                self._left_out += 1
                return False
            self._put(line, num_bytes)
            return True

    def message(self, text: str) -> bool:
        """Put in a message of some lines; return False if it is left out."""
        num_bytes = len(text.encode(errors="replace")) + 1
        with self._changed:
            if self._has_ended:
                return False
            if self._bytes + num_bytes > 2 * _QUEUE_BYTES or not self._messages.admits(
                num_bytes, time.monotonic()
            ):
                self._left_out += text.count("\n") + 1
                return False
            self._put(text, num_bytes)
            return True

    def progress(self, text: str) -> bool:
        """Put in a line on the progress of the training, in place of one that is still here; return False at the end."""
        with self._changed:
            if self._has_ended:
                return False
            self._newest = text
            self._changed.notify_all()
            return True

    def _put(self, text: str, num_bytes: int) -> None:
        was_empty = not self._open
        self._tell_left_out()
        if self._open_bytes + num_bytes > _RECORD_BYTES:
            self._close_record()
        self._open.append(text)
        self._open_bytes += num_bytes
        self._open_lines += text.count("\n") + 1
        self._bytes += num_bytes
        if was_empty:
            self._changed.notify_all()

    def _tell_left_out(self) -> None:
        if self._left_out:
            notice = left_out(self._rank, self._left_out, self._elsewhere)
            self._open_lines += self._left_out
            self._left_out = 0
            self._open.append(notice)
            self._open_bytes += len(notice) + 1
            self._bytes += len(notice) + 1

    def _close_record(self) -> None:
        """Number the lines that have come; from then on the record is the same, however often it is sent."""
        if self._open:
            self._last += 1
            self._records.append(Record(self._last, "\n".join(self._open), self._open_lines))
            self._open, self._open_bytes, self._open_lines = [], 0, 0

    def take(self, gather_s: float) -> list[Record]:
        """Wait for lines; return the first records that are not acknowledged, or none once it has ended and is empty.

        The wait for a rank that prints nothing has no deadline: `end` ends it, which a task calls however its rank ends, and the
        thread is a daemon that goes with its process.

        Progress comes before them, once, as a record with number 0.

        Args:
            gather_s: how long lines may come together before they are sent.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or self._records or self._open or self._newest
            )
            if not self._records:
                self._changed.wait_for(lambda: self._has_ended or self._records, gather_s)
            self._close_record()
            taken = [Record(0, self._newest)] if self._newest else []
            self._newest = ""
            num_bytes = 0
            for record in self._records:
                num_bytes += len(record.text)
                if taken and num_bytes > _BATCH_BYTES:
                    break
                taken.append(record)
            return taken

    def acknowledge(self, number: int) -> None:
        """Drop the records up to a number."""
        with self._changed:
            while self._records and self._records[0].number <= number:
                self._bytes -= len(self._records.popleft().text.encode(errors="replace")) + 1

    def end(self) -> None:
        """Take no more lines; what is there can still be taken out."""
        with self._changed:
            self._tell_left_out()
            self._has_ended = True
            self._changed.notify_all()

    def rest(self) -> list[Record]:
        """Return the records that are not acknowledged; those that cannot travel with an outcome without their text."""
        with self._changed:
            self._close_record()
            found: deque[Record] = deque()
            room = _REST_BYTES
            for record in reversed(self._records):
                room -= len(record.text)
                # The driver may have shown it, and knows then that it is not lost.
                found.appendleft(record if room >= 0 else record._replace(text=""))
            return list(found)
