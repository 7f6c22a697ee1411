"""Output of a rank in its task: to the driver while it runs, and to the task's stderr."""

from __future__ import annotations

import sys
from typing import Literal

from sparkhvd.runner.launching import line_of
from sparkhvd.runner.live.sender import Sender

__all__ = ["RankOutput", "log"]


class RankOutput:
    """Ways of a rank's output; a context manager.

    Args:
        sender: takes it to the driver; None where it stays here.
        timestamp: whether lines on stderr begin with the local time.
        on_stderr: whether stderr gets all of it, or none, or what the sender did not take.
    """

    def __init__(
        self,
        sender: Sender | None,
        *,
        timestamp: bool,
        on_stderr: Literal["always", "unsent", "never"],
    ) -> None:
        self._sender = sender
        self._timestamp = timestamp
        self._on_stderr = on_stderr

    def line(self, line: str) -> None:
        """Pass a line of the trainer on."""
        self._echo(line, is_sent=self._sender is not None and self._sender.line(line))

    def message(self, text: str) -> None:
        """Pass a message for the driver on."""
        self._echo(text, is_sent=self._sender is not None and self._sender.message(text))

    def progress(self, text: str) -> None:
        """Pass a line on the progress of the training on; stderr has none of it."""
        if self._sender is not None:
            self._sender.progress(text)

    def _echo(self, text: str, *, is_sent: bool) -> None:
        if self._on_stderr == "always" or (self._on_stderr == "unsent" and not is_sent):
            for line in text.split("\n"):
                log(line, timestamp=self._timestamp)

    def close(self) -> tuple[tuple[int, str, int], ...]:
        """Let the driver have the last lines; return those that it may not have got."""
        return () if self._sender is None else tuple(self._sender.close())

    def __enter__(self) -> RankOutput:
        if self._sender is not None:
            self._sender.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sender is not None:
            self._sender.__exit__()


def log(line: str, *, timestamp: bool = False) -> None:
    """Write a line to the task's stderr."""
    sys.stderr.write(line_of(line, timestamp=timestamp))
    sys.stderr.flush()
