"""Processes that have imported the modules of ranks and fork them, because a fresh rank imports torch for seconds."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence

from tests.harness.paths import ROOT

# Modules for a training, and for an engine.
_OF_TORCH = ("torch", "sparkhvd.torch.elastic", "tests.harness.rank_process")
_OF_ENGINES = (
    "numpy",
    "sparkhvd.engine.engine",
    "tests.harness.meeting",
    "tests.harness.rank_process",
)
_ANSWER_BYTES = 32
_START_S = 120.0


class ForkedProcess:
    """A fork, with the part of `subprocess.Popen` that `RankProcess` uses."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "w", buffering=1)
        self.stdout = os.fdopen(stdout)
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)

    def close(self) -> None:
        os.close(self._descriptor)


class ForkServer:
    """Starts processes that run `tests.harness.rank_process.main`. A context manager."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # forks lose threads
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.fork_server", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **variables},
                cwd=ROOT,
            )
        self._socket.settimeout(_START_S)
        assert self._socket.recv(1) == b"!", "it did not start"

    def start(self, descriptors: Sequence[int]) -> ForkedProcess:
        """Fork a process, which gets descriptors of a listener (TCP, Unix or none)."""
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        try:
            socket.send_fds(self._socket, [b"!"], [stdin, stdout, *descriptors])
            pid = int(self._socket.recv(_ANSWER_BYTES))
        finally:
            os.close(stdin)
            os.close(stdout)
        process = ForkedProcess(pid, ours_in, ours_out)
        self._socket.send(b"!")  # it may end from now on
        return process

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(_START_S)


# Servers of this test run: the one with torch, and that of ranks whose test names none.
_running: list[ForkServer] = []
_default: list[ForkServer] = []


def running() -> ForkServer | None:
    """Return the server with torch, or None if no test has requested it."""
    return _running[-1] if _running else None


def default() -> ForkServer | None:
    """Return the server for ranks whose test names none, or None if they are fresh processes."""
    return _default[-1] if _default else None


@contextlib.contextmanager
def as_running() -> Iterator[ForkServer]:
    """Start the server with torch."""
    with ForkServer(_OF_TORCH) as server:
        _running.append(server)
        yield server
        _running.clear()


@contextlib.contextmanager
def as_default(server: ForkServer) -> Iterator[None]:
    """Make ranks whose test names no server its forks."""
    _default.append(server)
    yield
    _default.pop()


def of_engines() -> ForkServer:
    """Return a server of ranks that need no torch."""
    return ForkServer(_OF_ENGINES)


def main() -> None:
    for name in sys.argv[2:]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    server = socket.socket(fileno=int(sys.argv[1]))
    server.send(b"!")
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 1, 4)
        if not message:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a fork with threads
            pid = os.fork()
        if pid == 0:
            _run(server, descriptors)
        server.send(str(pid).encode())
        server.recv(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(server: socket.socket, descriptors: list[int]) -> None:
    """Be a rank, in the fork. This never returns."""
    from tests.harness import rank_process

    server.close()
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stdin, stdout, *listener = descriptors
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        rank_process.main([*listener, -1][:2])
        atexit._run_exitfuncs()  # an engine notifies its peers
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
