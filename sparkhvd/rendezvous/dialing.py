"""Connections from this rank to the listeners of others."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterable

from sparkhvd.rendezvous.endpoints import Endpoint, Job
from sparkhvd.rendezvous.handshake import Notice
from sparkhvd.rendezvous.listener import tcp_place, unix_address
from sparkhvd.rendezvous.loop import (
    UNAUTHENTICATED_S,
    Loop,
    Task,
    Wait,
    is_same_user,
    open_connection,
    send,
)

__all__ = ["Dialer"]

# A notice needs one connect; only a host that does not answer takes longer, and it receives nothing anyway.
NOTICE_S = 2.0


class Dialer:
    """Opens connections to peers: over Unix sockets inside the host where possible, else over TCP.

    Attributes:
        unix_peers: ranks to reach over their Unix sockets.
    """

    def __init__(self, job: Job, endpoint: Endpoint) -> None:
        self._job = job
        self.unix_peers = frozenset(
            rank
            for rank, peer in enumerate(job.endpoints)
            if rank != job.rank and peer.unix_name and endpoint.host_key == peer.host_key != ""
        )

    def dial(self, peer: int, until: float) -> Generator[Wait, None, socket.socket]:
        """Connect to a peer.

        Raises:
            OSError: it does not listen, or does not answer in time.
        """
        endpoint = self._job.endpoints[peer]
        if peer in self.unix_peers:
            try:
                sock = yield from open_connection(
                    socket.AF_UNIX, unix_address(endpoint.unix_name), until
                )
                if is_same_user(sock):
                    return sock
                sock.close()
            except BlockingIOError:  # its backlog is full: it is there
                raise
            except OSError:  # not reachable that way after all
                pass
        return (yield from open_connection(*tcp_place(endpoint), until))

    def watch_listener(self, peer: int, on_open: Callable[[], object]) -> Task:
        """Hold a silent connection to a listener, which the kernel resets when the listener closes.

        A rank that accepts closes it after 5 s, as any other unauthenticated connection.

        Args:
            peer: owner of the listener.
            on_open: called when the connection is open.

        Raises:
            OSError: the connection could not be opened.
        """
        family, place = tcp_place(self._job.endpoints[peer])
        sock = yield from open_connection(family, place, time.monotonic() + UNAUTHENTICATED_S)
        with sock:
            on_open()
            yield Wait(sock, selectors.EVENT_READ, float("inf"))

    def notify(self, peers: Iterable[int], notice: Notice) -> None:
        """Send a notice to the listeners of some ranks; best effort, NOTICE_S at most."""
        loop = Loop()
        try:
            for peer in peers:
                loop.start(self._notify(peer, notice))
            loop.run(loop.is_idle)
        finally:
            loop.close()

    def _notify(self, peer: int, notice: Notice) -> Task:
        with contextlib.suppress(OSError):  # the other is gone, or cannot be reached
            sock = yield from self.dial(peer, time.monotonic() + NOTICE_S)
            with sock:
                send(sock, notice.to_bytes(self._job, peer))
