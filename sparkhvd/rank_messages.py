"""Messages of a rank to its driver, and the progress of its training.

Threads: any. A fork of the rank, and a process that the runner did not start, write them to stderr.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from sparkhvd.errors import InvalidArgumentError

# Prefix of the line of `log_metrics`; a JSON object follows.
METRICS = "metrics "

# Longer messages are cut.
_MAX_BYTES = 64 << 10
# At most one entry: the pid, and functions that send a message (False: closed) and progress to the driver.
_installed: list[tuple[int, Callable[[bytes], bool], Callable[[bytes], bool]]] = []


def log_to_driver(message: object) -> None:
    """Show a message on the driver, within a second, prefixed with the number of this rank.

    From any rank and thread, with its own rate limit (docs/observe.md): the driver shows 100 messages per second of a
    rank, and 64 KiB of each. In a process that `run`, `run_local`, `run_hosts` or a fit did not start, such as one of
    `sparkhvdrun` or mpirun, it is a line of stderr. Never waits for the driver.

    Args:
        message: text of one or more lines; `str` of anything else.
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


def log_metrics(metrics: Mapping[str, SupportsFloat], step: int) -> None:
    """Send numbers to the driver's loggers (`loggers=` of `run`, `run_local` and `run_hosts`); without loggers they are a line of output.

    From any rank and thread; each rank's value of a name is logged. Never waits for the driver. At most 100 calls per
    second of a rank are logged.

    Args:
        metrics: numbers by name: floats, or values that `float` accepts, such as a tensor with one element.
        step: such as the epoch, or the number of the step.

    Raises:
        InvalidArgumentError: a value is not a number, or `step` is not a whole number.
    """
    try:
        values = {str(name): float(value) for name, value in metrics.items()}
        whole = operator.index(step)
    except (TypeError, ValueError, AttributeError) as e:
        raise InvalidArgumentError(
            f"log_metrics({metrics!r:.200}, step={step!r}): {e}. Give numbers by name, and a whole number as step."
        ) from e
    entry = {"step": whole, "time": round(time.time(), 3), "values": values}
    log_to_driver(f"{METRICS}{json.dumps(entry)}")


def report_progress(text: str) -> None:
    """Report the training's progress to the driver in one line; only the newest counts. Does nothing in other processes."""
    if _installed and _installed[-1][0] == os.getpid():
        _installed[-1][2](text.encode(errors="replace"))


def install(send: Callable[[bytes], bool], progress: Callable[[bytes], bool]) -> None:
    """Set the functions that reach the driver for this process; called by the trainer process.

    Args:
        send: sends a message in UTF-8, from any thread; returns False once that is impossible.
        progress: the same for a short line about the training's progress.
    """
    _installed[:] = [(os.getpid(), send, progress)]
