"""Messages of a rank to the driver of its job.

Threads: any. A process that the rank has forked, and one that the runner did not start, write them to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

__all__ = ["install", "log_to_driver"]

# The rest of a longer message is left out.
_MAX_BYTES = 64 << 10
# At most one entry: the process, and its way to the driver, which returns False when it is closed.
_installed: list[tuple[int, Callable[[bytes], bool]]] = []


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
        pid, send = _installed[-1]
        if pid == os.getpid() and send(data):
            return
    sys.stderr.write(f"{data.decode(errors='replace')}\n")
    sys.stderr.flush()


def install(send: Callable[[bytes], bool]) -> None:
    """Set the way to the driver for this process; called by the trainer process.

    Args:
        send: takes a message in UTF-8, from any thread; returns False when it cannot be sent any more.
    """
    _installed[:] = [(os.getpid(), send)]
