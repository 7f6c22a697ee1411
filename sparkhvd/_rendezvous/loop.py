"""A small event loop: tasks are generators that yield what they wait for.

Threads: one; whoever calls `_Loop.run`.
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
from typing import Any

# Whoever has proved nothing is given up after this long.
UNAUTHENTICATED_S = 5.0


@dataclass(frozen=True)
class _Wait:
    """What a task waits for: a socket, or only the time."""

    sock: socket.socket | None
    events: int
    until: float


_Task = Generator[_Wait, None, None]


class _Loop:
    """Runs tasks until a condition holds. An exception that a task does not catch ends the run."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[_Task, _Wait] = {}

    def start(self, task: _Task) -> None:
        self._resume(task, task.__next__)

    def is_idle(self) -> bool:
        return not self._tasks

    def run(self, done: Callable[[], bool]) -> None:
        while not done():
            now = time.monotonic()
            until = min((wait.until for wait in self._tasks.values()), default=now)
            for key, _ in self._selector.select(max(0.0, until - now)):
                task: _Task = key.data
                self._resume(task, task.__next__)
            now = time.monotonic()
            for task, wait in list(self._tasks.items()):
                if wait.until <= now and self._tasks.get(task) is wait:
                    expire = partial(task.throw, TimeoutError(errno.ETIMEDOUT, "timed out"))
                    self._resume(task, task.__next__ if wait.sock is None else expire)

    def close(self) -> None:
        for task in list(self._tasks):
            task.close()
        self._tasks.clear()
        self._selector.close()

    def cancel(self, task: _Task) -> None:
        self._forget(task)
        task.close()

    def _resume(self, task: _Task, step: Callable[[], _Wait]) -> None:
        self._forget(task)
        try:
            wait = step()
        except StopIteration:
            return
        self._tasks[task] = wait
        if wait.sock is not None:
            self._selector.register(wait.sock, wait.events, task)

    def _forget(self, task: _Task) -> None:
        wait = self._tasks.pop(task, None)
        if wait is not None and wait.sock is not None:
            with contextlib.suppress(KeyError, ValueError):  # closed meanwhile
                self._selector.unregister(wait.sock)


def _sleep(seconds: float) -> _Task:
    yield _Wait(None, 0, time.monotonic() + seconds)


def _read(sock: socket.socket, size: int, until: float) -> Generator[_Wait, None, bytes]:
    data = b""
    while len(data) < size:
        yield _Wait(sock, selectors.EVENT_READ, until)
        with contextlib.suppress(BlockingIOError):
            part = sock.recv(size - len(data))
            if not part:
                raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
            data += part
    return data


def _send(sock: socket.socket, data: bytes) -> None:
    """Every message here fits a fresh socket's buffer; the limit is for a peer that reads nothing."""
    sock.settimeout(UNAUTHENTICATED_S)
    try:
        sock.sendall(data)
    finally:
        sock.setblocking(False)


def _connect(family: int, place: Any, until: float) -> Generator[_Wait, None, socket.socket]:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(place)
        if code == errno.EINPROGRESS:
            yield _Wait(sock, selectors.EVENT_WRITE, until)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
