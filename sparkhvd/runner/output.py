"""Split a rank's output into lines. Text without a newline, such as a progress bar, is flushed after 0.5 s."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from sparkhvd.terminal import visible

# How long text waits for its newline.
_OPEN_S = 0.5
# The same for a progress bar, which redraws its line.
_REDRAWN_S = 1.0
# Longer than the waiting thread needs to wake up.
_TURN_S = 0.001
# Default capacity of a pipe.
_PIPE_BYTES = 1 << 16
# Longest UTF-8 character.
_CHARACTER_BYTES = 4
# Cursor up: a bar below another bar (tqdm) uses it to return. A newline behind it only returns to its own line.
_UP = b"\x1b[A"
_UP_AND_DOWN = re.compile(rb"(?:\x1b\[A)+\n+")
_UP_AT_END = re.compile(rb"(?:\x1b\[A)+\Z")
# Sequences that would draw over other lines of the terminal; colours stay.
_MOVE = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")


class LineReader:
    """Reader of a pipe's lines in one thread. Another thread may flush the text written so far.

    Args:
        fd: of the pipe. It stays open, and is unused once `run` has returned.
        most_bytes: longer lines are passed on in pieces.
        take: called with each line and its newline, and with text whose newline has not come in time; by either thread,
            never concurrently.
    """

    def __init__(self, fd: int, most_bytes: int, take: Callable[[bytes], None]) -> None:
        self._fd = fd
        self._most_bytes = most_bytes
        self._take = take
        # Guards everything below.
        self._lock = threading.Lock()
        # `run` waits with another poller: threads cannot share one.
        self._poller = _poller(fd)
        self._is_asked = False
        self._is_over = False
        self._pending = b""
        self._since = 0.0

    def run(self) -> None:
        """Read until the pipe has ended."""
        waiting = _poller(self._fd)
        while not self._is_over:
            waiting.poll(self._wait_ms())
            if self._is_asked:  # let `catch_up` take the lock: a thread that is awake would win it
                time.sleep(_TURN_S)
            with self._lock:
                if self._poller.poll(0):
                    self._read()
                elif self._wait_ms() == 0:
                    self._pass_pending()

    def catch_up(self, timeout_s: float) -> None:
        """Pass on the lines now in the pipe. Give up if `take` blocks for `timeout_s`."""
        self._is_asked = True
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            self._is_asked = False
            left = _PIPE_BYTES
            while left > 0 and not self._is_over and self._poller.poll(0):
                left -= self._read()
        finally:
            self._lock.release()

    def _wait_ms(self) -> float | None:
        """Get the longest wait for the newline of pending text, or None without pending text."""
        if not self._pending.replace(_UP, b""):
            return None
        wait_s = _REDRAWN_S if is_redrawn(self._pending) else _OPEN_S
        return 1000 * max(0.0, self._since + wait_s - time.monotonic())

    def _read(self) -> int:
        data = os.read(self._fd, _PIPE_BYTES)
        text = self._pending + data
        if _UP in text:
            text = _UP_AND_DOWN.sub(_moved, text)
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._take(line + b"\n")
        if lines or self._wait_ms() is None:
            self._since = time.monotonic()
        self._pending = rest
        if len(rest) > self._most_bytes:
            end = _whole(rest)
            self._take(rest[:end])
            self._pending = rest[end:]
        if not data:
            self._is_over = True
            self._pass_pending()
        return len(data)

    def _pass_pending(self) -> None:
        pending = self._pending
        end = len(pending) if self._is_over else _whole(pending) or len(pending)
        if up := _UP_AT_END.search(pending):  # a newline may follow
            end = up.start()
        self._pending, self._since = pending[end:], time.monotonic()
        if end:
            self._take(pending[:end])


def _poller(fd: int) -> select.poll:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return poller


def _moved(match: re.Match[bytes]) -> bytes:
    """Cancel moves up against newlines and return the remainder."""
    ups, downs = match[0].count(_UP), match[0].count(b"\n")
    return _UP * (ups - downs) + b"\r" + b"\n" * (downs - ups)


def _whole(data: bytes) -> int:
    """Find the place to cut UTF-8 bytes without splitting a character."""
    for back in range(1, min(_CHARACTER_BYTES, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 != 0x80:  # not a byte inside a character
            needed = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
            return len(data) - back if needed > back else len(data)
    return len(data)


class Tail:
    """Last lines of a rank as a terminal shows them: a progress bar is one line."""

    def __init__(self, most_lines: int) -> None:
        self._lines = deque[str](maxlen=most_lines)
        self._was_redrawn = False

    def add(self, line: bytes) -> str:
        """Add a line of a `LineReader` and return its text."""
        if self._was_redrawn:
            self._lines.pop()
        self._was_redrawn = is_redrawn(line)
        self._lines.append(shown(line))
        return self._lines[-1]

    def lines(self) -> tuple[str, ...]:
        """Get a copy of the lines. Any thread may call this."""
        return tuple(self._lines)


def is_redrawn(line: bytes) -> bool:
    """Whether a line without newline returns to its start, as a progress bar does."""
    return b"\r" in line and not line.endswith(b"\n")


def shown(line: bytes) -> str:
    """Reduce a line to its final form on a terminal: the last redraw, without cursor moves."""
    text = line.decode(errors="replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _MOVE.sub("", text)
    drawn = [part for part in text.split("\r") if part.strip()]
    return visible(drawn[-1]) if drawn else ""
