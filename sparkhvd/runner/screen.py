"""Lines of ranks on this process's streams and in files; the last ones are kept."""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import launching
from sparkhvd.runner.lines import Tail

__all__ = ["Output", "Screen"]

_TAIL_LINES = 20


@dataclass(frozen=True)
class Output:
    """Where the ranks' output goes.

    Attributes:
        folder: files `rank.<rank>/stdout` and `stderr` too; None for none.
        timestamps: the local time is put in front of every line.
    """

    folder: Path | None = None
    timestamps: bool = False


class Screen:
    """Shows ranks' lines, whole and with the rank in front, from any thread; a context manager."""

    def __init__(self, output: Output, size: int) -> None:
        self._folder = output.folder
        self._timestamps = output.timestamps
        self._lock = threading.Lock()
        self._tails: dict[int, Tail] = {}
        self._files: dict[tuple[int, str], BinaryIO] = {}
        try:
            for rank in range(size):
                self.add(rank)
        except BaseException:
            self.__exit__()
            raise

    def add(self, rank: int) -> None:
        """Prepare for one more rank.

        Raises:
            InvalidArgumentError: its files cannot be written.
        """
        self._tails[rank] = Tail(_TAIL_LINES)
        if self._folder is None:
            return
        folder = self._folder / f"rank.{rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stream in ("stdout", "stderr"):
                self._files[rank, stream] = open(folder / stream, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise InvalidArgumentError(
                f"--output-filename {str(self._folder)!r} cannot be written: {error}. Give a folder that may be made there."
            ) from error

    def show(self, rank: int, stream: str, line: bytes) -> None:
        """Pass a line on, with its end or cut."""
        target = sys.stdout if stream == "stdout" else sys.stderr
        with self._lock:
            if file := self._files.get((rank, stream)):
                file.write(line)
            text = self._tails[rank].add(line)
            with contextlib.suppress(OSError, ValueError):  # a reader that has gone
                launching.write_to(
                    target, launching.line_of(f"[{rank}] {text}", timestamp=self._timestamps)
                )

    def tail(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of a rank."""
        with self._lock:
            return self._tails[rank].lines()

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
