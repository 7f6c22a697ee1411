"""Small event loop. Its tasks are generators and yield the events to wait for.

Threads: the caller of `EventLoop.run`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

from sparkhvd import wire

# Unauthenticated connections are closed after this long.
UNAUTHENTICATED_S = 5.0


@dataclass(frozen=True)
class Wait:
    """Event to resume a task: a socket, or only a time."""

    sock: socket.socket | None
    events: int
    until: float


Task = Generator[Wait, None, None]
Address = tuple[str | int | bytes, ...] | bytes  # as `socket.connect` takes it


class EventLoop:
    """Loop over tasks until a condition holds. An uncaught exception of a task ends the run."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[Task, Wait] = {}

    def start(self, task: Task) -> None:
        """Run a task up to its first wait."""
        self._resume(task, task.__next__)

    def is_idle(self) -> bool:
        """Whether every task has ended."""
        return not self._tasks

    def run(self, done: Callable[[], bool]) -> None:
        """Run the tasks until `done()`.

        At its deadline a task gets a TimeoutError, or resumes if it only slept.
        """
        while not done():
            now = time.monotonic()
            until = min((wait.until for wait in self._tasks.values()), default=now)
            for key, _ in self._selector.select(max(0.0, until - now)):
                task: Task = key.data
                self._resume(task, task.__next__)
            now = time.monotonic()
            for task, wait in list(self._tasks.items()):
                if wait.until <= now and self._tasks.get(task) is wait:
                    expire = partial(task.throw, TimeoutError(errno.ETIMEDOUT, "timed out"))
                    self._resume(task, task.__next__ if wait.sock is None else expire)

    def close(self) -> None:
        """Close every task."""
        for task in list(self._tasks):
            task.close()
        self._tasks.clear()
        self._selector.close()

    def cancel(self, task: Task) -> None:
        """Close one task, unless it has ended."""
        self._forget(task)
        task.close()

    def _resume(self, task: Task, step: Callable[[], Wait]) -> None:
        self._forget(task)
        try:
            wait = step()
        except StopIteration:
            return
        self._tasks[task] = wait
        if wait.sock is not None:
            self._selector.register(wait.sock, wait.events, task)

    def _forget(self, task: Task) -> None:
        wait = self._tasks.pop(task, None)
        if wait is not None and wait.sock is not None:
            with contextlib.suppress(KeyError, ValueError):  # closed meanwhile
                self._selector.unregister(wait.sock)


def sleep(seconds: float) -> Task:
    yield Wait(None, 0, time.monotonic() + seconds)


def read(sock: socket.socket, size: int, until: float) -> Generator[Wait, None, bytes]:
    """Read exactly `size` bytes.

    Raises:
        ConnectionResetError: the peer closed the connection.
        TimeoutError: they have not arrived in time.
    """
    data = b""
    while len(data) < size:
        yield Wait(sock, selectors.EVENT_READ, until)
        with contextlib.suppress(BlockingIOError):
            part = sock.recv(size - len(data))
            if not part:
                raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
            data += part
    return data


def receive_frame(
    sock: socket.socket, until: float, most_bytes: int = wire.MOST_BYTES
) -> Generator[Wait, None, bytes]:
    """Receive a payload, as a task of an event loop.

    Raises:
        ConnectionResetError: the peer closed the connection.
        TimeoutError: it has not arrived in time.
        ValueError: it has more than `most_bytes`.
    """
    header = yield from read(sock, wire.LENGTH.size, until)
    return (
        yield from read(sock, wire.checked_size(wire.LENGTH.unpack(header)[0], most_bytes), until)
    )


def send(sock: socket.socket, data: bytes) -> None:
    """Send a message small enough for a fresh socket's buffer. A stalled peer causes a timeout."""
    sock.settimeout(UNAUTHENTICATED_S)
    try:
        sock.sendall(data)
    finally:
        sock.setblocking(False)


def open_connection(
    family: int, address: Address, until: float
) -> Generator[Wait, None, socket.socket]:
    """Connect a non-blocking socket.

    Raises:
        OSError: there is no listener, or no answer in time.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            yield Wait(sock, selectors.EVENT_WRITE, until)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def is_same_user(sock: socket.socket) -> bool:
    """Whether the peer of a Unix socket runs as this user, according to the kernel."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
