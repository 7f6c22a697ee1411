"""Messages of a rank to the driver of its job, and how far its training is.

Threads: any. A process that the rank has forked, and one that the runner did not start, write them to stderr.
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

# Begins the line of `log_metrics`; an object of JSON follows.
METRICS = "metrics "

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


def log_metrics(metrics: Mapping[str, SupportsFloat], step: int) -> None:
    """Give numbers to the loggers of the driver: those of `run(fn, loggers=[...])`, `run_local` and `run_hosts`; else they are a line of output.

    From any rank and thread; what several ranks give under one name, the loggers get several times. Never waits for the driver. 100 calls per second
    of a rank are taken.

    Args:
        metrics: numbers by name: floats, or what `float` takes, such as a tensor with one element.
        step: such as the epoch, or the number of the step.

    Raises:
        InvalidArgumentError: a value is no number, or `step` no whole number.
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
