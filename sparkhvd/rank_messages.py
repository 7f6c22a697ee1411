"""Messages of a rank to its driver, and the progress of its training.

Threads: any. A fork of the rank, and a process that the runner did not start, write them to stderr.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from collections.abc import Mapping
from typing import Protocol, SupportsFloat

from sparkhvd.errors import InvalidArgumentError

# A longer message is cut, and a longer entry of metrics is refused.
_MAX_BYTES = 64 << 10


class DriverChannel(Protocol):
    """Channel from this process to the driver, for any thread.

    Each method returns False once sending is impossible.
    """

    def message(self, text: bytes) -> bool:
        """Send a message of `log_to_driver`."""
        ...

    def metrics(self, entry: bytes) -> bool:
        """Send an entry of `log_metrics`, as JSON."""
        ...

    def progress(self, text: bytes) -> bool:
        """Send a short line about the training's progress."""
        ...


# At most one entry: the pid and its channel.
_installed: list[tuple[int, DriverChannel]] = []


def log_to_driver(message: object) -> None:
    """Show a message on the driver, within a second, prefixed with the number of this rank.

    From any rank and thread, with its own rate limit (docs/monitoring.md): the driver shows 100 messages per second of a
    rank, and 64 KiB of each. In a process that `run`, `run_local`, `run_hosts` or a fit did not start, such as one of
    `sparkhvdrun` or mpirun, it is a line of stderr. Never waits for the driver.

    Args:
        message: text of one or more lines; `str` of anything else.
    """
    data = str(message).encode(errors="replace")
    if len(data) > _MAX_BYTES:
        left_out = len(data) - _MAX_BYTES
        data = data[:_MAX_BYTES] + f"... ({left_out:,} bytes left out)".encode()
    channel = _channel()
    if channel is None or not channel.message(data):
        _print(data.decode(errors="replace"))


def log_metrics(metrics: Mapping[str, SupportsFloat], step: int) -> None:
    """Send numbers to the driver's loggers, or print them as a line if there are no loggers.

    `loggers=` of the launch sets the loggers.

    From any rank and thread; each rank's value of a name is logged. Never waits for the driver. At most 100 calls per
    second of a rank are logged.

    Args:
        metrics: numbers by name: floats, or values that `float` accepts, such as a tensor with one element.
        step: such as the epoch, or the number of the step.

    Raises:
        InvalidArgumentError: a value is not a number, `step` is not a whole number, or the entry has more than 64 KiB.
    """
    try:
        values = {str(name): float(value) for name, value in metrics.items()}
        whole = operator.index(step)
    except (TypeError, ValueError, AttributeError) as e:
        raise InvalidArgumentError(
            f"log_metrics({metrics!r:.200}, step={step!r}): {e}. Give numbers by name, and a whole number as step."
        ) from e
    entry = {"step": whole, "time": round(time.time(), 3), "values": values}
    text = json.dumps(entry)
    if len(text) > _MAX_BYTES:
        raise InvalidArgumentError(
            f"log_metrics: {len(values):,} numbers take {len(text):,} bytes with their names; a call may have {_MAX_BYTES:,}. Log them in "
            "several calls."
        )
    channel = _channel()
    if channel is None or not channel.metrics(text.encode()):
        _print(f"metrics {text}")


def report_progress(text: str) -> None:
    """Report the training's progress to the driver in one line. Only the newest report counts.

    No effect in a process without a channel to the driver.
    """
    if (channel := _channel()) is not None:
        channel.progress(text.encode(errors="replace"))


def install(channel: DriverChannel) -> None:
    """Set the channel of this process. The trainer process calls it."""
    _installed[:] = [(os.getpid(), channel)]


def _channel() -> DriverChannel | None:
    """Get this process's channel, or None in a fork or a process not started by the runner."""
    return next((channel for pid, channel in _installed if pid == os.getpid()), None)


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
