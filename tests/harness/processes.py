"""Find the processes that a test started, even after the end of their parent.

Every process that descends from this test run has `TAG_VARIABLE` in its environment, so processes of other
runs on the machine are never counted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import uuid
from pathlib import Path

TAG_VARIABLE = "SPARKHVD_TEST_RUN"
TAG = uuid.uuid4().hex

TRAINER = "sparkhvd-rank"  # its name: a fork has the command line of its zygote
ZYGOTE = "sparkhvd.runner.zygote"
PYTHON_WORKER = "pyspark.worker"  # an argument of each daemon that forks them


def find(command_contains: str, tag: str = TAG) -> set[int]:
    """Find live processes of this test run whose command line or name contains a text (zombies do not count)."""
    found = set()
    wanted = f"{TAG_VARIABLE}={tag}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            name = (entry / "comm").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ") + name
            if (
                command_contains.encode() in command
                and wanted in (entry / "environ").read_bytes().split(b"\0")
                and is_alive(int(entry.name))
            ):
                found.add(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children(pid: int) -> set[int]:
    """Return the processes whose parent is `pid`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    found.add(int(entry.name))
    return found


def peak_bytes() -> int:
    """Return the peak memory of this process. Unlike getrusage's, it does not include the parent's peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def wait_until_gone(pids: set[int], timeout_s: float = 10) -> set[int]:
    """Wait until none of `pids` is alive, and return the living ones at the end."""
    deadline = time.monotonic() + timeout_s
    while left := {pid for pid in pids if is_alive(pid)}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def wait_for_no_trainers(timeout_s: float = 10) -> set[int]:
    """Wait until no trainer of this test run is alive, and return the living ones at the end."""
    deadline = time.monotonic() + timeout_s
    while left := find(TRAINER):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


_reserved: dict[int, socket.socket] = {}


def free_port() -> int:
    """Find a loopback port for a server that binds it with SO_REUSEADDR, as most do.

    No other process that requests any port gets it until `wait_for_port` has found the server.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    _reserved[port] = probe
    return port


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server listens on a `free_port()`. If it ends, fail with its log."""
    deadline = time.monotonic() + 150
    with _reserved.pop(port):
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if process.poll() is not None:
                break
            time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}:\n{log.read_text(errors='replace')}")
