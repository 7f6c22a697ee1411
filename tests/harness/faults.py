"""Faults that a rank causes to itself or to its parents, by name and at a known moment.

These functions run inside ranks. A test passes them, or calls them in the function that it launches.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.harness.processes import PYTHON_WORKER, TAG_VARIABLE, find

# State of a socket in /proc/net/tcp.
_LISTENS = "0A"
# Name of the file for the time of a fault.
HAPPENED_AT = "FAULT_HAPPENED_AT"


def seconds_since(path: Path) -> float:
    """Return the seconds since the fault that writes its time to `path`."""
    return time.monotonic() - float(path.read_text())  # every process of a machine has this clock


def note() -> None:
    """Write the time of the fault to the test's file. Call it just before the fault."""
    if path := os.environ.get(HAPPENED_AT):
        Path(path).write_text(str(time.monotonic()))


def kill_self() -> None:
    """End this rank like the kernel's out-of-memory killer."""
    note()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def kill_at_exit() -> None:
    """End this rank like `kill_self` after its function has returned."""
    import atexit

    atexit.register(kill_self)


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _pipes(pid: int) -> set[str]:
    """List the pipes that a process has open."""
    links = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            links.add(os.readlink(fd))
    return {link for link in links if link.startswith("pipe:")}


def python_worker() -> int:
    """Return the Spark task's own Python process: the other end of this rank's pipes."""
    ours = _pipes(os.getpid())
    (worker,) = (pid for pid in find(PYTHON_WORKER, os.environ[TAG_VARIABLE]) if _pipes(pid) & ours)
    return worker


def kill_python_worker() -> None:
    """End the Spark task's own Python process."""
    note()
    os.kill(python_worker(), signal.SIGKILL)
    time.sleep(60)


def serves_elastic_job() -> bool:
    """Return True if this rank's Spark task has the coordinator of its elastic job, which means that it listens."""
    worker = python_worker()
    held = set()
    for fd in Path(f"/proc/{worker}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            held.add(os.readlink(fd))
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(f"socket:[{words[9]}]" in held for words in sockets if words[3] == _LISTENS)


def kill_executor() -> None:
    """End the executor's JVM: the parent of the parent of the Python worker (daemon, worker, trainer)."""
    os.kill(parent_of(parent_of(python_worker())), signal.SIGKILL)
    time.sleep(60)
