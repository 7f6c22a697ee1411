"""Processes of a launch, fresh or forked by a zygote. Each ends with all its descendants.

**Ownership**: a trainer takes over the descriptors of `InheritedPipes`, and the parent closes its copies. The pid of a
process stays reserved until `reap`, so no signal can reach another process.
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sparkhvd.runner import orphans
from sparkhvd.wire import parse

_MESSAGE_BYTES = 1 << 16
# How long a zygote may take to report the end of a trainer: longer than its imports.
_REPORT_S = 30.0
# How long a zygote may be stopped, as by SIGSTOP, before its answer is given up, and how often that is checked.
_STOPPED_S, _POLL_S = 2.0, 0.25
# How long the pipes of an ended process may take to end if no other process holds them.
_CLOSED_S = 0.1


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
    """Read the facts of a process, or return None if it does not exist or is invisible."""
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
    """Descriptors for a trainer process to take over.

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
        """List the descriptors, the listener's last."""
        return [self.spec, self.result, self.log, *(fd for fd in self.listener if fd >= 0)]

    def close(self) -> None:
        """Close the descriptors except the listener's: the listener has another owner."""
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


class Process(Protocol):
    """Leader of its own session and process group."""

    pid: int

    def wait_for_end(self) -> None:
        """Wait until the process has ended. Its pid stays reserved."""

    def reap(self) -> ProcessExit:
        """Kill the rest of its group and release its pid."""


class FreshProcess:
    """Process of a command.

    Args:
        command: program and arguments.
        options: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, start_new_session=True, **options
        )
        self.pid = self.process.pid

    def wait_for_end(self) -> None:
        """Wait until the process has ended. Its pid stays reserved."""
        # WNOWAIT leaves a zombie, which reserves the number of the process group.
        # If this process ignores SIGCHLD, the kernel has reaped it.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> ProcessExit:
        """Kill the rest of its group and release its pid."""
        ended = reap(self.pid)
        self.process.returncode = ended.status
        return ended


def fresh_trainer(environ: Mapping[str, str], ends: InheritedPipes) -> FreshProcess:
    """Start a trainer in a new interpreter.

    Args:
        environ: its environment.
        ends: descriptors that it takes over.
    """
    return FreshProcess(
        [*python_of("sparkhvd.runner.child"), str(ends.spec), str(ends.result)],
        stdin=subprocess.DEVNULL,
        stdout=ends.log,
        stderr=ends.log,
        env=environ,
        pass_fds=[fd for fd in ends.all() if fd != ends.log],
    )


class ForkedProcess:
    """Trainer forked by a zygote. The zygote is its parent and reports its end.

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
        """Wait until the process has ended. Its pid stays reserved while the zygote lives."""
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
        # Without an answer the zygote has ended or is stopped. Do not signal the pid: it may belong to another process
        # by now. The group of the trainer ends when its pipe closes.
        return (
            ProcessExit(None)
            if answer is None
            else ProcessExit(answer["status"], answer["peak_rss_bytes"])
        )

    def _receive(self) -> dict[str, Any] | None:
        wait_for_answer(self._channel, self._zygote, _REPORT_S)
        return receive(self._channel)


def python_of(module: str) -> list[str]:
    """Make the start of a command line to run a module.

    From Python 3.11 on, the search path leaves out the working directory, where a `random.py` is not Python's.
    """
    # Python 3.10 cannot leave the directory out.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [os.path.abspath(sys.executable), *safe, "-m", module]


class ProcessGroup:
    """Process with its descendants: its group, and processes with its mark in other sessions.

    Args:
        process: leads the group.
        mark: of the processes, see `orphans`; "" for no mark.
        name: of its thread.
        drain_s: longest wait for pipes that other processes hold.
    """

    def __init__(self, process: Process, mark: str, name: str, drain_s: float) -> None:
        self.pid = process.pid
        self._process = process
        self._mark = mark
        self._drain_s = drain_s
        # Guards _is_reaped: no signal may go to a pid that has been reused.
        self._lock = threading.Lock()
        self._is_reaped = False
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def watch(
        self,
        readers: Sequence[threading.Thread],
        on_end: Callable[[ProcessExit], None],
        at_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait in a thread for the end of the process, and end what it has started.

        Args:
            readers: threads that end with the pipes of the process and its children.
            on_end: called when the readers have ended.
            at_exit: called while the pid is still reserved.
        """
        self._readers, self._on_end, self._at_exit = readers, on_end, at_exit
        self._thread.start()

    def _watch(self) -> None:
        self._process.wait_for_end()
        with contextlib.suppress(Exception):  # the end must be reported
            self._at_exit()
        with self._lock:
            ended = self._process.reap()
            self._is_reaped = True
        if not _join(self._readers, _CLOSED_S if self._mark else self._drain_s) and self._mark:
            # An orphan in another session holds the pipes. Orphans that have closed them end with the launch.
            orphans.kill(self._mark)
            _join(self._readers, self._drain_s)
        self._on_end(ended)

    def signal(self, number: int, *, whole: bool = True) -> None:
        """Send a signal to the group, or only to its leader. Do nothing after the leader's end."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._is_reaped:
                (os.killpg if whole else os.kill)(self.pid, number)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until `on_end` has been called and return True if it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Wait for the end of threads and return True if all have ended in time."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def reap(pid: int) -> ProcessExit:
    """Kill the rest of an ended child's group, and release its pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    try:
        _, status, usage = os.wait4(pid, 0)
    except ChildProcessError:  # the kernel has reaped it
        return ProcessExit(None)
    return ProcessExit(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)


def send(channel: socket.socket, message: Mapping[str, object]) -> None:
    """Send a message over a socket with message boundaries."""
    channel.send(json.dumps(message).encode())


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Receive a message, or return None if the peer is gone."""
    try:
        data = channel.recv(_MESSAGE_BYTES)
    except ConnectionError:
        return None
    if not data:
        return None
    return parse(data)
