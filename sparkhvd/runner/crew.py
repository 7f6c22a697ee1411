"""Ranks of this host that are processes of the user's command: started, ended, their output read.

**Ownership**: each rank leads a session and process group of its own, which ends with it, and so does all that has its mark in its
variables. A `Guard` ends them if this process is killed.

**Threads**: three per rank, one for each stream of its output and one that waits for its end; one more of its place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from sparkhvd.runner import leftovers
from sparkhvd.runner.guard import Guard
from sparkhvd.runner.lines import LineReader
from sparkhvd.runner.script_ranks import HandedOver

__all__ = ["Crew"]

# A longer line is passed on in pieces.
_LINE_BYTES = 1 << 20
# How long the rest of a rank's output may take, once nothing that writes to it is left.
_DRAIN_S = 1.0
# How long that takes where no other process holds the pipes.
_CLOSED_S = 0.1
_GATE = ("/bin/sh", "-c", 'read -r begin && exec "$@" </dev/null', "sparkhvd-gate")


class Crew:
    """Processes of ranks; a context manager that leaves none. Made before the process has threads.

    Args:
        on_line: called with rank, "stdout" or "stderr", and line, from threads of this object.
        on_end: called with rank and status (negative for a signal) when a rank has ended and its output is read.
    """

    def __init__(
        self, on_line: Callable[[int, str, bytes], None], on_end: Callable[[int, int], None]
    ) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._mark = secrets.token_hex(8)
        self._guard = Guard(self._mark)
        # Guards the processes: no signal may go to a number that has been given to another one.
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._waiting: list[threading.Thread] = []

    def start(self, given: HandedOver, command: Sequence[str]) -> None:
        """Start a rank with what it is given, whose place is closed behind the rank's end.

        Raises:
            OSError: the program cannot be started.
        """
        try:
            self._start(given, command)
        except BaseException:
            given.place.close()
            raise

    def _start(self, given: HandedOver, command: Sequence[str]) -> None:
        rank = given.rank
        # It begins when the guard knows of it: if this process is killed before, its standard input ends without a line.
        process = subprocess.Popen(
            [*_GATE, *command],
            env=leftovers.marked(given.variables, f"{self._mark}.{rank}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=given.descriptors,
            start_new_session=True,
        )
        self._guard.add(process.pid)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\n")
        with self._lock:
            self._running[rank] = process
        readers = [
            _thread(self._read, rank, name, pipe)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        self._waiting.append(_thread(self._wait, given, process, readers))

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to the groups of all ranks that run, or of one; SIGKILL goes to all that they have started."""
        with self._lock:
            for each, process in self._running.items():
                if rank in (None, each):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
        if number == signal.SIGKILL:  # the guard may have been killed
            leftovers.kill(self._mark if rank is None else f"{self._mark}.{rank}")

    def _read(self, rank: int, stream: str, pipe: IO[bytes]) -> None:
        with pipe:
            LineReader(
                pipe.fileno(), _LINE_BYTES, functools.partial(self._on_line, rank, stream)
            ).run()

    def _wait(
        self,
        given: HandedOver,
        process: subprocess.Popen[bytes],
        readers: Sequence[threading.Thread],
    ) -> None:
        rank = given.rank
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        given.place.close()  # to the other ranks the rank is gone
        with self._lock:
            del self._running[rank]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started and left behind
            self._guard.remove(process.pid)
            status = process.wait()
        if not _join(readers, _CLOSED_S):
            # Something in a session of its own holds the pipes. What has let go of them ends with the launch.
            leftovers.kill(f"{self._mark}.{rank}")
            _join(readers, _DRAIN_S)
        self._on_end(rank, status)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        for thread in self._waiting:
            thread.join()
        self._guard.__exit__()


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Wait for the end of threads; return True if all have ended in time."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread
