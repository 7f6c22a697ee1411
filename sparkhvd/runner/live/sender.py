"""Task's side of live output: accepts the lines of a rank without blocking it.

**Threads**: a daemon thread from the first line on, which delivers, and retries after failures while the rank runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sparkhvd.runner.live.frames import Record, left_out

# How long the end of a rank may be delayed for its last lines.
FLUSH_S = 2.0
# Part of `FLUSH_S` that is left for the end of the thread.
_ABORT_S = 0.2


class Carrier(Protocol):
    """Carries records to the driver."""

    def deliver(self, backlog: Backlog) -> None:
        """Deliver records until the backlog has ended and is empty, or `abort` is called."""
        ...

    def abort(self) -> None:
        """End `deliver` soon."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the driver was unreachable for too long to wait for it at the end."""
        ...


@dataclass(frozen=True)
class OutputRoute:
    """Route of an attempt's output to the driver, sent as JSON.

    Attributes:
        address: host and port of the driver; None if it reads files.
        folder: of these files; "" without them.
        shows_lines: whether ordinary lines take this route, or messages only.
        on_terminal: whether the task's stderr is the driver's, so that a line must take one route only.
        is_shown: whether left out lines may appear on that stderr.
        at_once: whether a rank connects before its first line, because the driver reports missing connections.
    """

    address: tuple[str, int] | None = None
    folder: str = ""
    shows_lines: bool = True
    on_terminal: bool = False
    is_shown: bool = True
    at_once: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON object for `wire.rebuild`."""
        return asdict(self)

    @property
    def elsewhere(self) -> str:
        """Where left out lines are, or "" for nowhere."""
        if not self.on_terminal:
            return "the executor's log has all"
        return "they are on stderr" if self.is_shown else ""


class Sender:
    """Sender of one rank's lines. A context manager."""

    def __init__(self, way: OutputRoute, rank: int, carrier: Carrier) -> None:
        """Prepare a sender. It starts with the first line, or inside `with` if the route connects at once.

        Args:
            way: route to the driver.
            rank: of the lines.
            carrier: carries them there.
        """
        self._carrier = carrier
        self._at_once = way.at_once
        self._backlog = Backlog(
            rank, way.elsewhere, shows_lines=way.shows_lines, is_limited=not way.on_terminal
        )
        # Guards the start of the thread.
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def line(self, line: str) -> bool:
        """Send a line with a rank prefix. Return False if it is left out. Never blocks."""
        return self._started(self._backlog.line(line))

    def message(self, text: str) -> bool:
        """Send a message of some lines, at the rate of messages, and return False if it is left out."""
        return self._started(self._backlog.message(text))

    def metrics(self, entry: str) -> bool:
        """Send an entry of `log_metrics`, at the rate of messages, and return False if it is left out."""
        return self._started(self._backlog.metrics(entry))

    def progress(self, text: str) -> None:
        """Send a progress line to replace the previous line. It is lost with its connection."""
        self._started(self._backlog.progress(text))

    def _started(self, is_taken: bool) -> bool:
        if is_taken and self._thread is None:
            with self._lock:
                if self._thread is None and not self._is_closed:
                    self._thread = threading.Thread(
                        target=self._carrier.deliver,
                        args=(self._backlog,),
                        name="sparkhvd-live",
                        daemon=True,
                    )
                    self._thread.start()
        return is_taken

    def close(self) -> list[Record]:
        """End within `FLUSH_S` and return the last records without the driver's acknowledgement."""
        self._backlog.end()
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.join(0.0 if self._carrier.is_lost else FLUSH_S - _ABORT_S)
            self._carrier.abort()
            self._thread.join(_ABORT_S)
        return self._backlog.rest()

    def __enter__(self) -> Sender:
        if self._at_once:  # the carrier connects for this line, and drops it
            self.progress("begins")
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_closed:
            self.close()


# ----------------------------------------------------------------------------------------------------
# Rate limits of a rank's output to the driver.


@dataclass(frozen=True)
class Rate:
    """Sustained rate of a rank.

    Attributes:
        per_s: items per second.
        bytes_per_s: bytes per second.
        burst_s: seconds of both that may arrive at once.
    """

    per_s: float
    bytes_per_s: float
    burst_s: float


LINES = Rate(2000.0, float(1 << 20), 2.0)
# Rate of `log_to_driver` messages.
MESSAGES = Rate(100.0, float(1 << 20), 2.0)


class Bucket:
    """Token bucket. Once empty, it stays closed until half full, to leave out lines in a block."""

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._items = rate.per_s * rate.burst_s
        self._bytes = rate.bytes_per_s * rate.burst_s
        self._at = now
        self._is_closed = False

    def admits(self, num_bytes: int, now: float) -> bool:
        """Consume tokens if an item may pass at `now`."""
        rate, passed = self._rate, now - self._at
        self._at = now
        most_items, most_bytes = rate.per_s * rate.burst_s, rate.bytes_per_s * rate.burst_s
        self._items = min(most_items, self._items + passed * rate.per_s)
        self._bytes = min(most_bytes, self._bytes + passed * rate.bytes_per_s)
        if self._is_closed and min(self._items / most_items, self._bytes / most_bytes) < 0.5:
            return False
        self._is_closed = self._items < 1 or self._bytes < num_bytes
        if self._is_closed:
            return False
        self._items -= 1
        self._bytes -= num_bytes
        return True


# ----------------------------------------------------------------------------------------------------
# Records of a rank that the driver has not acknowledged, and lines for the next one.
# Threads: any number add lines without blocking; one removes records.

# Bytes of waiting lines; as many more for messages.
_QUEUE_BYTES = 4 << 20
# Lines are gathered in a record up to this size.
_RECORD_BYTES = 32 << 10
# Most bytes in flight before an acknowledgement.
_BATCH_BYTES = 256 << 10
# Most bytes that travel with the outcome.
_REST_BYTES = 256 << 10


class Backlog:
    """Bounded queue of a rank's lines."""

    def __init__(self, rank: int, elsewhere: str, *, shows_lines: bool, is_limited: bool) -> None:
        """Create an empty queue.

        Args:
            rank: for the lines that count what was left out.
            elsewhere: where those lines are, such as "the executor's log has all"; "" for nowhere.
            shows_lines: whether ordinary lines are accepted, or only messages.
            is_limited: whether lines are rate-limited.
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
        """Add a line and return False if it is left out."""
        if not self._shows_lines:
            return False
        num_bytes = len(line.encode(errors="replace")) + 1
        with self._changed:
            if self._has_ended:
                return False
            # Check the room first: a line without room must not consume tokens.
            if self._bytes + num_bytes > _QUEUE_BYTES or not (
                not self._is_limited or self._lines.admits(num_bytes, time.monotonic())
            ):
                self._left_out += 1
                return False
            self._put(line, num_bytes)
            return True

    def message(self, text: str) -> bool:
        """Add a message of some lines and return False if it is left out."""
        return self._add(text, is_metrics=False)

    def metrics(self, entry: str) -> bool:
        """Add an entry of `log_metrics` as a record of its own and return False if it is left out."""
        return self._add(entry, is_metrics=True)

    def _add(self, text: str, *, is_metrics: bool) -> bool:
        num_bytes = len(text.encode(errors="replace")) + 1
        with self._changed:
            if self._has_ended:
                return False
            if self._bytes + num_bytes > 2 * _QUEUE_BYTES or not self._messages.admits(
                num_bytes, time.monotonic()
            ):
                self._left_out += text.count("\n") + 1
                return False
            if is_metrics:
                self._close_record()
                self._last += 1
                self._records.append(Record(self._last, text, 1, is_metrics=True))
                self._bytes += num_bytes
                self._changed.notify_all()
            else:
                self._put(text, num_bytes)
            return True

    def progress(self, text: str) -> bool:
        """Replace the line about the training's progress and return False after the end."""
        with self._changed:
            if self._has_ended:
                return False
            self._newest = text
            self._changed.notify_all()
            return True

    def _put(self, text: str, num_bytes: int) -> None:
        was_empty = not self._open
        self._count_left_out()
        if self._open_bytes + num_bytes > _RECORD_BYTES:
            self._close_record()
        self._open.append(text)
        self._open_bytes += num_bytes
        self._open_lines += text.count("\n") + 1
        self._bytes += num_bytes
        if was_empty:
            self._changed.notify_all()

    def _count_left_out(self) -> None:
        if self._left_out:
            notice = left_out(self._rank, self._left_out, self._elsewhere)
            self._open_lines += self._left_out
            self._left_out = 0
            self._open.append(notice)
            self._open_bytes += len(notice) + 1
            self._bytes += len(notice) + 1

    def _close_record(self) -> None:
        """Number the gathered lines. From then on the record is fixed, however often it is sent."""
        if self._open:
            self._last += 1
            self._records.append(Record(self._last, "\n".join(self._open), self._open_lines))
            self._open, self._open_bytes, self._open_lines = [], 0, 0

    def take(self, gather_s: float) -> list[Record]:
        """Wait for lines and return the first unacknowledged records, or an empty list after the end of an empty queue.

        The wait has no deadline: a task always calls `end`, however its rank ends, and the thread is a daemon.
        Progress precedes the records, once, as a record with number 0.

        Args:
            gather_s: how long lines are gathered before they are sent.
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
        """Refuse further lines. Existing lines can still be taken."""
        with self._changed:
            self._count_left_out()
            self._has_ended = True
            self._changed.notify_all()

    def rest(self) -> list[Record]:
        """List the unacknowledged records. Older records beyond an outcome's limit lose their text."""
        with self._changed:
            self._close_record()
            found: deque[Record] = deque()
            room = _REST_BYTES
            for record in reversed(self._records):
                room -= len(record.text)
                # Too long: keep the record without its text. The driver may already have shown it.
                found.appendleft(record if room >= 0 else record._replace(text=""))
            return list(found)
