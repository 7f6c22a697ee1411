"""Live output through files shared by driver and ranks, if executors may not reach the driver: Spark Connect.

A task with output writes a small file about once per second into a folder of the attempt. The driver shows the files
that it finds, and deletes them at its next poll.

**Threads**: on the driver one background thread. **Failure**: a store that is temporarily unavailable only delays the
output. If the client is gone, at most `_MOST_FILES` files per rank remain, which are deleted with the run's folder.
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

# How long lines are gathered in a file.
_GATHER_S = 0.7
# Pause after a file that could not be written.
_PAUSE_S = 1.0
# Most undeleted files of a rank.
_MOST_FILES = 32
# How long the driver waits at its end for the last files.
_LAST_LOOK_S = 15.0


class Chunks(Protocol):
    """Part of a store needed by a rank's writer."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file atomically."""
        ...

    def exists(self, path: str) -> bool: ...


@dataclass(frozen=True)
class Mailbox:
    """How the driver reads and deletes files of a folder.

    Attributes:
        collect: deletes files by their paths, and returns paths and contents of the remaining files of a folder, or of
            the first of them.
        poll_s: polling interval in seconds; None if polling needs a task slot that the ranks hold.
    """

    collect: Callable[[str, Sequence[str]], list[tuple[str, bytes]]]
    poll_s: float | None


def folder_of(run_dir: str, attempt: int, job_id: str) -> str:
    """Folder of an attempt's files. An earlier fit with the same run id has another folder."""
    return f"{run_dir}/attempts/{attempt}/live-{job_id}"


class ChunkWriter:
    """File carrier of records. One thread delivers, and another thread may abort."""

    def __init__(self, files: Chunks, folder: str, rank: int) -> None:
        self._files = files
        self._folder = folder
        self._rank = rank
        self._written: list[str] = []
        self._is_over = threading.Event()

    def deliver(self, backlog: Backlog) -> None:
        """Write records until the backlog has ended and is empty, or `abort` is called."""
        while not self._is_over.is_set() and (records := backlog.take(_GATHER_S)):
            # A store may raise anything; unwritten records are written later, or travel with the outcome.
            with contextlib.suppress(Exception):
                if self._has_room():
                    path = f"{self._folder}/{self._rank:06d}-{records[-1].number:010d}"
                    self._files.write_bytes(path, pack(records))
                    if path not in self._written[-1:]:  # a line of progress rewrites the file
                        self._written.append(path)
                    backlog.acknowledge(records[-1].number)
                    continue
            self._is_over.wait(_PAUSE_S)

    def _has_room(self) -> bool:
        """Whether there are fewer files than the limit, or the driver has deleted the oldest."""
        if len(self._written) < _MOST_FILES:
            return True
        if self._files.exists(self._written[0]):
            return False
        del self._written[0]
        return True

    def abort(self) -> None:
        self._is_over.set()

    @property
    def is_lost(self) -> bool:
        """False: a store has its own deadlines."""
        return False


class ChunkReader:
    """Driver's side: search, display and deletion of files. A context manager around the launch."""

    def __init__(self, mailbox: Mailbox, folder: str, display: Display) -> None:
        """Prepare a reader. It runs inside `with`.

        Args:
            mailbox: reads and deletes files.
            folder: of the attempt.
            display: used only by the thread until the end of the block.
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
        """Whether the reader did not end in time, because the stream blocks or the store does not answer."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.wait(self._mailbox.poll_s):
            self._poll()
        until = time.monotonic() + _LAST_LOOK_S
        # The last poll finds nothing, and deletes what the previous one found.
        while self._poll() and time.monotonic() < until:
            pass

    def _poll(self) -> bool:
        """Show the files and return False if nothing was found, or the store does not answer."""
        try:
            found = self._mailbox.collect(self.folder, self._done)
        except Exception:  # noqa: BLE001 - a store may raise anything; the next poll tries again
            return False
        self._done = [path for path, _ in found]
        for path, data in sorted(found):
            rank = int(path.rpartition("/")[2].partition("-")[0])
            for record in unpack(data):
                # At the end, progress is outdated.
                if record.number or not self._stopping.is_set():
                    self._display.take(rank, record)
        return bool(found)
