"""Connection of a task to the driver, replaced whenever it is refused, cut or silent."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Generator

from sparkhvd.rendezvous import Job
from sparkhvd.rendezvous.event_loop import EventLoop, Wait
from sparkhvd.rendezvous.handshake import SERVICE_STAGE, introduce
from sparkhvd.runner.live.frames import pack, take_shown
from sparkhvd.runner.live.sender import Backlog

_READ_BYTES = 4096
# Timeout of a connection and its handshake.
_CONNECT_S = 5.0
# How long the driver may take to acknowledge before the connection counts as dead.
_SILENT_S = 10.0
# Pauses between attempts to connect grow from the first to the second.
_PAUSES_S = 0.1, 2.0
# How long lines are gathered before they are sent.
_GATHER_S = 0.2


class LiveConnection:
    """TCP carrier of records. One thread delivers, and another thread may abort."""

    def __init__(self, address: tuple[str, int], job: Job) -> None:
        self._address = address
        self._job = job
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        # Time of the first attempt to connect; infinity before it, None once the driver has been reached.
        self._tried_since: float | None = math.inf

    def deliver(self, backlog: Backlog) -> None:
        """Send records until the backlog has ended and is empty, or `abort` is called."""
        pause, longest = _PAUSES_S
        while not self._is_over.is_set() and backlog.take(0.0):
            if self._tried_since == math.inf:
                self._tried_since = time.monotonic()
            with contextlib.suppress(OSError, ValueError), self._connected() as sock:
                if self._is_proved(sock):
                    self._tried_since = None
                    pause = _PAUSES_S[0]
                    _serve(sock, backlog)
                    continue
            self._is_over.wait(pause)
            pause = min(longest, 2 * pause)

    @property
    def is_lost(self) -> bool:
        """Whether the driver was never reached within the connection timeout."""
        since = self._tried_since
        return since is not None and time.monotonic() - since > _CONNECT_S

    def abort(self) -> None:
        with self._lock:
            self._is_over.set()
            if self._sock is not None:
                with contextlib.suppress(OSError):  # not connected yet, or no longer
                    self._sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _connected(self) -> Generator[socket.socket, None, None]:
        found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as sock:
            with self._lock:
                if self._is_over.is_set():
                    raise OSError("connection aborted before it was made")
                self._sock = sock
            try:
                sock.settimeout(_CONNECT_S)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.connect(place)
                yield sock
            finally:
                with self._lock:
                    self._sock = None

    def _is_proved(self, sock: socket.socket) -> bool:
        is_proved = False

        def prove() -> Generator[Wait, None, None]:
            nonlocal is_proved
            is_proved = yield from introduce(
                self._job, 0, SERVICE_STAGE, sock, time.monotonic() + _CONNECT_S
            )

        loop = EventLoop()
        try:
            loop.start(prove())
            loop.run(loop.is_idle)
        finally:
            loop.close()
        return is_proved


def _serve(sock: socket.socket, backlog: Backlog) -> None:
    """Send records until the backlog has ended and all are acknowledged.

    Raises:
        OSError: the connection fails.
    """
    sock.settimeout(_SILENT_S)
    came = bytearray()
    while records := backlog.take(_GATHER_S):
        sock.sendall(pack(records))
        while (number := _acknowledged(sock, came)) < records[-1].number:
            backlog.acknowledge(number)
        backlog.acknowledge(number)


def _acknowledged(sock: socket.socket, came: bytearray) -> int:
    while (number := take_shown(came)) is None:
        part = sock.recv(_READ_BYTES)
        if not part:
            raise ConnectionResetError("closed by the driver")
        came += part
    return number
