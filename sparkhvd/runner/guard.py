"""A process that ends what a launcher has started, however the launcher ends.

**Lifetime**: a fork of the launcher that does nothing but wait for the end of a pipe; it ends with the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal

from sparkhvd.runner import leftovers

__all__ = ["Guard"]


class Guard:
    """Kills process groups that are still there when this process has ended; a context manager.

    Made before the process has threads.

    Args:
        mark: what has it in its variables is killed, too; empty for nothing (see `leftovers`).
    """

    def __init__(self, mark: str = "") -> None:
        reader, self._writer = os.pipe()  # neither is inherited by what this process starts
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writer)
            _guard(reader, mark)
        os.close(reader)

    def add(self, group: int) -> None:
        """Kill a process group at the end, unless `remove` comes before."""
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        """Leave a process group alone that has ended; called before its number is free."""
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        # Somebody may kill the guard: this process still ends the groups itself.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writer, f"{line}\n".encode())

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def _guard(reader: int, mark: str) -> None:
    """Wait for the end of the launcher, in the fork; never returns."""
    try:
        os.setsid()  # Ctrl-C and a terminal's hang-up are not for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        groups: set[int] = set()
        with open(reader) as lines:
            for line in lines:
                group = int(line[1:])
                (groups.add if line[0] == "+" else groups.discard)(group)
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if mark:
            leftovers.kill(mark)
    finally:
        os._exit(0)
