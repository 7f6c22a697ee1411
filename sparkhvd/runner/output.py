"""Lines of a rank's output, as they come through a pipe; text without an end, such as a progress bar, comes too."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable

# How long text waits for the end of its line.
_OPEN_S = 0.5
# The same for a line that is drawn again and again.
_REDRAWN_S = 1.0
# Longer than the thread that asked needs to wake up.
_TURN_S = 0.001
# Most bytes that a pipe holds, unless somebody has changed it.
_PIPE_BYTES = 1 << 16
# Most bytes of a character.
_CHARACTER_BYTES = 4
# Cursor up, by which a bar below another one, as tqdm's are, goes back to it; the end of a line behind it only returns to its own.
_UP = b"\x1b[A"
_UP_AND_DOWN = re.compile(rb"(?:\x1b\[A)+\n+")
_UP_AT_END = re.compile(rb"(?:\x1b\[A)+\Z")
# What would draw over other lines of the terminal; colours stay.
_MOVE = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")


class LineReader:
    """Reads a pipe to its end in one thread; another may have what was written until then passed on.

    Args:
        fd: of the pipe; it stays open, and is not used any more when `run` has returned.
        most_bytes: a longer line comes in pieces.
        take: called with each line and its end, and with what has waited for an end, without one; from either thread, by turns.
    """

    def __init__(self, fd: int, most_bytes: int, take: Callable[[bytes], None]) -> None:
        self._fd = fd
        self._most_bytes = most_bytes
        self._take = take
        # Guards everything below.
        self._lock = threading.Lock()
        # Not the one by which `run` waits: threads cannot share one.
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
            if self._is_asked:  # a lock that is free for a moment goes to whoever is awake
                time.sleep(_TURN_S)
            with self._lock:
                if self._poller.poll(0):
                    self._read()
                elif self._wait_ms() == 0:
                    self._pass_pending()

    def catch_up(self, timeout_s: float) -> None:
        """Pass on the lines that are in the pipe now; gives up after some seconds behind a `take` that blocks."""
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
        """Return how long what is pending may wait for the end of its line; None if nothing is."""
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
        if up := _UP_AT_END.search(pending):  # the end of a line may follow
            end = up.start()
        self._pending, self._since = pending[end:], time.monotonic()
        if end:
            self._take(pending[:end])


def _poller(fd: int) -> select.poll:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return poller


def _moved(match: re.Match[bytes]) -> bytes:
    """Return the ends of lines, or the moves up, that are left of both."""
    ups, downs = match[0].count(_UP), match[0].count(b"\n")
    return _UP * (ups - downs) + b"\r" + b"\n" * (downs - ups)


def _whole(data: bytes) -> int:
    """Return where to cut bytes of UTF-8 so that no character is torn: at their end, or before a last one that has more bytes to come."""
    for back in range(1, min(_CHARACTER_BYTES, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 != 0x80:  # not a byte inside a character
            needed = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
            return len(data) - back if needed > back else len(data)
    return len(data)


class Tail:
    """Last lines of a rank, as a terminal would show them: a progress bar is one line."""

    def __init__(self, most_lines: int) -> None:
        self._lines = deque[str](maxlen=most_lines)
        self._was_redrawn = False

    def add(self, line: bytes) -> str:
        """Take a line of a `LineReader`; return its text."""
        if self._was_redrawn:
            self._lines.pop()
        self._was_redrawn = is_redrawn(line)
        self._lines.append(shown(line))
        return self._lines[-1]

    def lines(self) -> tuple[str, ...]:
        """Return the texts, from any thread."""
        return tuple(self._lines)


def is_redrawn(line: bytes) -> bool:
    """Return True for text that has not ended its line and returns to its beginning: a progress bar."""
    return b"\r" in line and not line.endswith(b"\n")


def shown(line: bytes) -> str:
    """Return the text that a terminal would show of a line: what was drawn last, without moves of the cursor."""
    text = line.decode(errors="replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _MOVE.sub("", text)
    drawn = [part for part in text.split("\r") if part.strip()]
    return drawn[-1] if drawn else ""
