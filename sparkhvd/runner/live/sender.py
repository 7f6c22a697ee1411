"""Task's end of live output: takes the lines of a rank, without ever making the rank wait.

**Threads**: a daemon thread from the first line on, which delivers; whatever fails on the way is tried again for as long as the rank runs.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sparkhvd.runner.live.backlog import Backlog
from sparkhvd.runner.live.frames import Record

__all__ = ["FLUSH_S", "Carrier", "Sender", "Way"]

# How long the end of a rank may take longer, so that the driver shows its last lines.
FLUSH_S = 2.0
_ABORT_S = 0.2


class Carrier(Protocol):
    """Way of records to the driver."""

    def deliver(self, backlog: Backlog) -> None:
        """Bring records to the driver until the backlog has ended and is empty, or `abort` is called."""
        ...

    def abort(self) -> None:
        """End `deliver` soon."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether nothing has ever come through, for so long that its end needs no waiting."""
        ...


@dataclass(frozen=True)
class Way:
    """Way of an attempt's output to the driver; crosses as JSON.

    Attributes:
        address: host and port of the driver; None where it reads files.
        folder: of these files; "" for none.
        shows_lines: whether ordinary lines go there, or messages only.
        on_terminal: whether the task's stderr is the driver's, so that nothing must go both ways.
        is_shown: whether lines that are left out may be on that stderr.
        at_once: whether a rank connects before its first line, because the driver says so where none comes.
    """

    address: tuple[str, int] | None = None
    folder: str = ""
    shows_lines: bool = True
    on_terminal: bool = False
    is_shown: bool = True
    at_once: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, from which `from_dict` rebuilds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Way:
        """Rebuild it from `to_dict`, as JSON has it."""
        address = fields["address"]
        return cls(**{**fields, "address": address and (address[0], address[1])})

    @property
    def elsewhere(self) -> str:
        """Where lines are that were left out; "" for nowhere."""
        if not self.on_terminal:
            return "the executor's log has all"
        return "they are on stderr" if self.is_shown else ""


class Sender:
    """Sender of one rank's lines; a context manager."""

    def __init__(self, way: Way, rank: int, carrier: Carrier) -> None:
        """Prepare a sender; nothing runs before the first line, or before `with` if the way is tried at once.

        Args:
            way: to the driver.
            rank: whose lines they are.
            carrier: which brings them there.
        """
        self._carrier = carrier
        self._at_once = way.at_once
        self._backlog = Backlog(
            rank, way.elsewhere, shows_lines=way.shows_lines, is_limited=not way.on_terminal
        )
        # Guards the start.
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def line(self, line: str) -> bool:
        """Send a line, which begins with its rank; return False if it is left out. Never waits."""
        return self._started(self._backlog.line(line))

    def message(self, text: str) -> bool:
        """Send a message of one or more such lines, which counts apart from them; return False if it is left out."""
        return self._started(self._backlog.message(text))

    def progress(self, text: str) -> None:
        """Send a line on the progress of the training in place of the last one; lost with its connection."""
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
        """End within `FLUSH_S`; return the last records that the driver may not have shown."""
        self._backlog.end()
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.join(0.0 if self._carrier.is_lost else FLUSH_S - _ABORT_S)
            self._carrier.abort()
            self._thread.join(_ABORT_S)
        return self._backlog.rest()

    def __enter__(self) -> Sender:
        if self._at_once:  # the first look drops progress, and connects for it
            self.progress("begins")
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_closed:
            self.close()
