"""Trainer processes: fresh interpreters, or forks of a zygote.

**Ownership**: a process takes over the descriptors of `InheritedPipes`, and the parent closes its copies. Its pid stays
reserved until `reap`, so no signal can reach another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sparkhvd.wire import parse

_MESSAGE_BYTES = 1 << 16
# How long a zygote may take to report the end of a trainer: longer than its imports.
_REPORT_S = 30.0
# How long a zygote may be stopped, as by SIGSTOP, before its answer is given up, and how often that is checked.
_STOPPED_S, _POLL_S = 2.0, 0.25


class ProcessStat(NamedTuple):
    """Facts about a process from /proc/<pid>/stat.

    Attributes:
        state: one letter: "T" or "t" for a stopped process, "Z" or "X" for an ended one.
        parent: pid of its parent.
        started: start in clock ticks since boot, because pids are reused.
    """

    state: str
    parent: int
    started: str


def stat_of(pid: int) -> ProcessStat | None:
    """Return facts about a process; None if it does not exist or is invisible."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[
        2
    ].split()  # the name before the last ")" may contain any character
    return ProcessStat(fields[0], int(fields[1]), fields[19])


def wait_for_answer(sock: socket.socket, pid: int, timeout_s: float) -> None:
    """Wait until a process has sent something.

    Args:
        sock: socket to it.
        pid: of the process; 0 if unknown.
        timeout_s: longest wait.

    Raises:
        TimeoutError: nothing came in time, or the process has been stopped for 2 s.
    """
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    stopped_at: float | None = None
    while not poller.poll(1000 * _POLL_S):
        now = time.monotonic()
        stat = stat_of(pid) if pid else None
        if stat is None or stat.state not in "Tt":
            stopped_at = None
        else:
            stopped_at = stopped_at or now
            if now - stopped_at > _STOPPED_S:
                raise TimeoutError(f"process {pid} is stopped")
        if now > deadline:
            raise TimeoutError(f"process {pid} gave no answer in {timeout_s:g} s")


@dataclass(frozen=True)
class InheritedPipes:
    """Descriptors that a trainer process takes over.

    Attributes:
        spec: frames to it.
        result: frames from it.
        log: its output.
        listener: its bound listener (TCP, Unix); -1 for none.
    """

    spec: int
    result: int
    log: int
    listener: tuple[int, int]

    def all(self) -> list[int]:
        """List the descriptors; those of the listener last."""
        return [self.spec, self.result, self.log, *(fd for fd in self.listener if fd >= 0)]

    def close(self) -> None:
        """Close what belongs to the process; the listener's descriptors are its owner's."""
        for fd in (self.spec, self.result, self.log):
            os.close(fd)


@dataclass(frozen=True)
class ProcessExit:
    """End of a process.

    Attributes:
        status: exit status, negative for a signal; None if unknown.
        peak_rss_bytes: largest resident memory; 0 if unknown.
    """

    status: int | None
    peak_rss_bytes: int = 0


class TrainerProcess(Protocol):
    """Process of a trainer; leader of its own session and group."""

    pid: int

    def wait_for_end(self) -> None:
        """Wait until the process has ended; its pid stays reserved."""

    def reap(self) -> ProcessExit:
        """Kill the rest of its group and release its pid."""


class FreshProcess:
    """Trainer in a new interpreter.

    Args:
        environ: its environment.
        ends: descriptors that it takes over.
    """

    def __init__(self, environ: Mapping[str, str], ends: InheritedPipes) -> None:
        self._process = subprocess.Popen(
            [
                *python_of("sparkhvd.runner.child"),
                *(str(ends.spec), str(ends.result)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=ends.log,
            stderr=ends.log,
            env=environ,
            close_fds=True,
            pass_fds=[fd for fd in ends.all() if fd != ends.log],
            start_new_session=True,
        )
        self.pid = self._process.pid

    def wait_for_end(self) -> None:
        """Wait until the process has ended; its pid stays reserved."""
        # WNOWAIT leaves a zombie, which reserves the number of the process group.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> ProcessExit:
        """Kill the rest of its group and release its pid."""
        kill_group(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return ProcessExit(self._process.returncode, usage.ru_maxrss * 1024)


class ForkedProcess:
    """Trainer forked by a zygote, which is its parent and reports its end.

    Args:
        pid: its number.
        channel: to the zygote; owned by this object.
        zygote: number of the zygote.
    """

    def __init__(self, pid: int, channel: socket.socket, zygote: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._channel = channel
        self._pidfd = os.pidfd_open(pid)  # signals the end also if the zygote does not

    def wait_for_end(self) -> None:
        """Wait until the process has ended; its pid stays reserved while the zygote lives."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll()

    def reap(self) -> ProcessExit:
        """Have the zygote kill the rest of its group and release its pid."""
        answer = None
        with contextlib.suppress(OSError):
            if self._receive() is not None:
                send(self._channel, {})
                answer = self._receive()
        self._channel.close()
        os.close(self._pidfd)
        # The zygote is gone or stopped, and the pid may belong to another process. The group dies with its pipe.
        return (
            ProcessExit(None)
            if answer is None
            else ProcessExit(answer["status"], answer["peak_rss_bytes"])
        )

    def _receive(self) -> dict[str, Any] | None:
        wait_for_answer(self._channel, self._zygote, _REPORT_S)
        return receive(self._channel)


def python_of(module: str) -> list[str]:
    """Return the start of a command that runs a module without the working directory in the search path, where a `random.py` is not Python's."""
    # Python 3.10 cannot leave the directory out.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [os.path.abspath(sys.executable), *safe, "-m", module]


def kill_group(pid: int) -> None:
    """Kill all processes of a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def send(channel: socket.socket, message: Mapping[str, object]) -> None:
    """Send a message over a socket that preserves message boundaries."""
    channel.send(json.dumps(message).encode())


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Receive a message; None if the peer is gone."""
    try:
        data = channel.recv(_MESSAGE_BYTES)
    except ConnectionError:
        return None
    if not data:
        return None
    return parse(data)
