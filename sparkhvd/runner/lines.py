"""Lines of a rank's output, as they come through a pipe; text without an end, such as a progress bar, comes too."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Iterator

__all__ = ["Tail", "is_redrawn", "read_lines", "shown"]

# How long text waits for the end of its line.
_OPEN_S = 0.5
# The same for a line that is drawn again and again.
_REDRAWN_S = 1.0
# Most bytes of a character.
_CHARACTER_BYTES = 4


def read_lines(fd: int, most_bytes: int) -> Iterator[bytes]:
    """Read a pipe to its end; yield its lines with their ends, and what has waited for an end, without one.

    Args:
        fd: of the pipe; it stays open.
        most_bytes: a longer line comes in pieces.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    pending = b""
    since = 0.0
    while True:
        if pending:
            wait_s = since + (_REDRAWN_S if is_redrawn(pending) else _OPEN_S) - time.monotonic()
            if not poller.poll(1000 * max(0.0, wait_s)):
                yield pending
                pending = b""
        data = os.read(fd, 1 << 16)
        if not data:
            break
        *lines, rest = (pending + data).split(b"\n")
        yield from (line + b"\n" for line in lines)
        if lines or not pending:
            since = time.monotonic()
        pending = rest
        if len(pending) > most_bytes:
            end = _whole(pending)
            yield pending[:end]
            pending = pending[end:]
    if pending:
        yield pending


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
        """Take a line of `read_lines`; return its text."""
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
    """Return the text that a terminal would show of a line: what was drawn last."""
    text = line.decode(errors="replace").rstrip("\r\n")
    drawn = [part for part in text.split("\r") if part.strip()]
    return drawn[-1] if drawn else ""
