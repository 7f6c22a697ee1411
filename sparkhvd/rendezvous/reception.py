"""Incoming connections: accepted, authenticated and handed over, or closed."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sparkhvd.rendezvous.endpoints import Party
from sparkhvd.rendezvous.handshake import HELLO, NOTICE, NOTICE_MAGIC, Notice, Turn, answer
from sparkhvd.rendezvous.loop import UNAUTHENTICATED_S, Loop, Task, Wait, is_same_user, read, sleep

__all__ = ["MAX_UNAUTHENTICATED", "Reception"]

MAX_UNAUTHENTICATED = 64
_RETRY_S = 0.1


@dataclass
class Reception:
    """Accepts connections while a meeting lasts.

    Attributes:
        job: the ranks and their key.
        listening: sockets that accept connections.
        loop: runs the tasks.
        current_turn: returns the turn of the meeting; connections of earlier ones are closed.
        on_peer: called with turn, rank and connection of an authenticated peer; owns the connection.
        on_notice: called with an authenticated notice.
        on_shortage: called with the error when this process or host lacks what an accept needs.
    """

    job: Party
    listening: Sequence[socket.socket]
    loop: Loop
    current_turn: Callable[[], Turn]
    on_peer: Callable[[Turn, int, socket.socket], None]
    on_notice: Callable[[Notice], None]
    on_shortage: Callable[[OSError], None]
    # Oldest first.
    _unauthenticated: dict[Task, None] = field(default_factory=dict, init=False)

    def start(self) -> None:
        """Accept from now on, whenever the loop runs."""
        for listening in self.listening:
            listening.setblocking(False)
            self.loop.start(self._accept(listening))

    def _accept(self, listening: socket.socket) -> Task:
        while True:
            yield Wait(listening, selectors.EVENT_READ, float("inf"))
            try:
                sock, _ = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.on_shortage(error)
                    yield from sleep(_RETRY_S)
                continue  # the other side has gone again
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                self.loop.cancel(oldest)
            task = self._authenticate(sock)
            self._unauthenticated[task] = None
            self.loop.start(task)

    def _authenticate(self, sock: socket.socket) -> Task:
        """Do the accepting side of the handshake; every error ends this connection and nothing else."""
        task = next(reversed(self._unauthenticated))
        peer: tuple[Turn, int] | None = None
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            elif not is_same_user(sock):
                return
            until = time.monotonic() + UNAUTHENTICATED_S
            hello = yield from read(sock, HELLO.size, until)
            if hello.startswith(NOTICE_MAGIC):
                rest = yield from read(sock, NOTICE.size - HELLO.size, until)
                if notice := Notice.from_bytes(hello + rest, self.job):
                    self.on_notice(notice)
                return
            peer = yield from answer(self.job, self.current_turn(), hello, sock, until)
        except OSError:  # includes the deadline
            return
        finally:
            self._unauthenticated.pop(task, None)
            if peer is None:
                sock.close()
        if peer is not None:
            self.on_peer(*peer, sock)
