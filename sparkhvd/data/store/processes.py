"""Processes that own files: written down, and checked later for being alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Process"]


@dataclass(frozen=True)
class Process:
    """A process of a machine.

    Attributes:
        host: name of its host.
        pid: its number there.
        machine: boot of the machine and its namespace of pids: two containers of one host differ; "" if unknown.
        started: its start in clock ticks since that boot, which tells it from a later process of the same number.
    """

    host: str
    pid: int
    machine: str
    started: str

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        return cls(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Process:
        """Return the process that `to_dict` described."""
        names = ("host", "machine", "started")
        return cls(pid=int(str(values["pid"])), **{n: str(values[n]) for n in names})

    def to_dict(self) -> dict[str, Any]:
        """Return this as JSON-able data."""
        return asdict(self)

    def is_alive(self) -> bool | None:
        """Return True if the process is alive; None if this process cannot see it."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # another user's
            pass
        started = _started(self.pid)
        return started == self.started if started else None

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start of a process; "" if it is not seen, "ended" for a zombie."""
    try:
        # The name before the last ")" may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
