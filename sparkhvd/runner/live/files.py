"""Live output through files that the driver and the ranks share, where executors may not reach the driver: Spark Connect.

A task writes a small file about once per second, if there is output, into a folder of the attempt; the driver shows what it finds there, and
deletes it with its next look.

**Threads**: on the driver one background thread. **Failure**: a store that cannot be read or written for a moment costs time only; a client that is gone
leaves `_MOST_FILES` per rank behind at most, which go with the run's folder.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sparkhvd.runner.live.frames import pack, unpack
from sparkhvd.runner.live.receiver import Display
from sparkhvd.runner.live.sender import Backlog

# How long lines come together in a file.
_GATHER_S = 0.7
_PAUSE_S = 1.0
# A rank whose files nobody deletes writes no more than these.
_MOST_FILES = 32
# How long the driver waits at its end for the last files.
_LAST_LOOK_S = 15.0


class Chunks(Protocol):
    """Files that ranks can write."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        ...

    def exists(self, path: str) -> bool:
        """Return True if the file exists."""
        ...


@dataclass(frozen=True)
class Mailbox:
    """Way in which the driver reads and deletes files of a folder.

    Attributes:
        collect: deletes files by their paths, and returns paths and contents of the others of a folder, or of the first of them.
        poll_s: seconds between two looks; None where looking needs a task slot that the ranks hold.
    """

    collect: Callable[[str, Sequence[str]], list[tuple[str, bytes]]]
    poll_s: float | None


def folder_of(run_dir: str, attempt: int, job_id: str) -> str:
    """Return the folder of an attempt's files; an earlier fit with the same run id had another."""
    return f"{run_dir}/attempts/{attempt}/live-{job_id}"


class ChunkWriter:
    """Way of records through files, for one thread that delivers and another that aborts."""

    def __init__(self, files: Chunks, folder: str, rank: int) -> None:
        self._files = files
        self._folder = folder
        self._rank = rank
        self._written: list[str] = []
        self._is_over = threading.Event()

    def deliver(self, backlog: Backlog) -> None:
        """Write records until the backlog has ended and is empty, or `abort` is called."""
        while not self._is_over.is_set() and (records := backlog.take(_GATHER_S)):
            # A store may raise anything; what is not written is written later, or travels with the outcome.
            with contextlib.suppress(Exception):
                if self._has_room():
                    path = f"{self._folder}/{self._rank:06d}-{records[-1].number:010d}"
                    self._files.write_bytes(path, pack(records))
                    if path not in self._written[-1:]:  # progress again
                        self._written.append(path)
                    backlog.acknowledge(records[-1].number)
                    continue
            self._is_over.wait(_PAUSE_S)

    def _has_room(self) -> bool:
        """Return True if the driver has deleted the oldest of as many files as there may be."""
        if len(self._written) < _MOST_FILES:
            return True
        if self._files.exists(self._written[0]):
            return False
        del self._written[0]
        return True

    def abort(self) -> None:
        """End `deliver` soon."""
        self._is_over.set()

    @property
    def is_lost(self) -> bool:
        """False: a store that refuses has its own deadlines."""
        return False


class ChunkReader:
    """Driver's end: looks for files, shows and deletes them; a context manager around the launch."""

    def __init__(self, mailbox: Mailbox, folder: str, display: Display) -> None:
        """Prepare a reader; nothing runs before `with`.

        Args:
            mailbox: how to look.
            folder: of the attempt.
            display: used by the thread alone until the end of the block.
        """
        self.folder = folder
        self._mailbox = mailbox
        self._display = display
        self._done: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkhvd-live", daemon=True)

    def __enter__(self) -> ChunkReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(_LAST_LOOK_S)

    @property
    def is_stuck(self) -> bool:
        """Whether it did not end in time, because the stream blocks or the store does not answer."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.wait(self._mailbox.poll_s):
            self._poll()
        until = time.monotonic() + _LAST_LOOK_S
        # The last look finds nothing, and deletes what the one before has found.
        while self._poll() and time.monotonic() < until:
            pass

    def _poll(self) -> bool:
        """Show the files that are there; return False if there are none, or the store does not answer."""
        try:
            found = self._mailbox.collect(self.folder, self._done)
        except Exception:  # noqa: BLE001 - a store may raise anything, and is asked again
            return False
        self._done = [path for path, _ in found]
        for path, data in sorted(found):
            rank = int(path.rpartition("/")[2].partition("-")[0])
            for record in unpack(data):
                # Progress is no news at the end.
                if record.number or not self._stopping.is_set():
                    self._display.take(rank, record)
        return bool(found)
