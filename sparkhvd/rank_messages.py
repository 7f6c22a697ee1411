"""Messages of a rank to the driver of its job, and how far its training is.

Threads: any. A process that the rank has forked, and one that the runner did not start, write them to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

__all__ = ["install", "log_to_driver", "report_progress"]

# The rest of a longer message is left out.
_MAX_BYTES = 64 << 10
# At most one entry: the process, and its ways to the driver, of messages (False: it is closed) and of progress.
_installed: list[tuple[int, Callable[[bytes], bool], Callable[[bytes], bool]]] = []


def log_to_driver(message: object) -> None:
    """Show a message on the driver, within a second, behind the number of this rank.

    From any rank and any thread, whatever the rank prints: it counts apart from the limit of lines (docs/observe.md). 100 messages per second of
    a rank are shown, and 64 KiB of each. In a process that `run`, `run_local`, `run_hosts` or a fit did not start, such as one of `sparkhvdrun`
    or mpirun, it is a line of stderr. Never waits for the driver.

    Args:
        message: text of one or more lines; of anything else its `str`.
    """
    data = str(message).encode(errors="replace")
    if len(data) > _MAX_BYTES:
        left_out = len(data) - _MAX_BYTES
        data = data[:_MAX_BYTES] + f"... ({left_out:,} bytes left out)".encode()
    if _installed:
        pid, send, _ = _installed[-1]
        if pid == os.getpid() and send(data):
            return
    sys.stderr.write(f"{data.decode(errors='replace')}\n")
    sys.stderr.flush()


def report_progress(text: str) -> None:
    """Tell the driver in one line how far the training is; only the newest counts. In other processes nothing happens."""
    if _installed and _installed[-1][0] == os.getpid():
        _installed[-1][2](text.encode(errors="replace"))


def install(send: Callable[[bytes], bool], progress: Callable[[bytes], bool]) -> None:
    """Set the ways to the driver for this process; called by the trainer process.

    Args:
        send: takes a message in UTF-8, from any thread; returns False when it cannot be sent any more.
        progress: the same for a short line on how far the training is.
    """
    _installed[:] = [(os.getpid(), send, progress)]
