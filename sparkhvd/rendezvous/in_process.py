"""Rendezvous of ranks that are threads of one process, and of a single rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rendezvous.connections import Connections, Rendezvous, joined
from sparkhvd.settings import Settings


class SingleRendezvous:
    """Rendezvous of a job with one rank."""

    def __init__(self, settings: Settings) -> None:
        self.rank = 0
        self.size = 1
        self.settings = settings

    def connect(self) -> Connections:
        """Return no connections."""
        return Connections(0, 1, (0,), [-1], [-1] * self.settings.streams)


_Row = list[socket.socket | None]


class _Hall:
    """Socket pairs of ranks in one process, made when the first rank of a generation comes."""

    def __init__(self, hosts: tuple[int, ...], streams: int) -> None:
        self.hosts = hosts
        self.streams = streams
        self._lock = threading.Lock()
        # By generation and rank: the peers' sockets for control frames, then those of every stream.
        self._rows: dict[tuple[int, int], list[_Row]] = {}

    def take(self, generation: int, rank: int) -> Connections:
        with self._lock:
            if (generation, rank) not in self._rows:
                self._make(generation)
            rows = self._rows.pop((generation, rank))
        sockets, *further = [[-1 if s is None else s.detach() for s in row] for row in rows]
        return Connections(rank, len(self.hosts), self.hosts, sockets, joined(further))

    def _make(self, generation: int) -> None:
        streams = [self._stream() for _ in range(1 + self.streams)]
        for rank in range(len(self.hosts)):
            self._rows[generation, rank] = [rows[rank] for rows in streams]

    def _stream(self) -> list[_Row]:
        """Return one connection per pair, by rank and peer."""
        size = len(self.hosts)
        rows: list[_Row] = [[None] * size for _ in range(size)]
        for a in range(size):
            for b in range(a):
                pair = socket.socketpair() if self.hosts[a] == self.hosts[b] else _tcp_pair()
                rows[a][b], rows[b][a] = pair
        return rows


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server, address = listening.accept()
        if address != client.getsockname():  # another client of this machine was faster
            client.close()
            server.close()
            raise ConnectionError(f"{address} connected to a socket pair under construction")
    for sock in (client, server):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client, server


class _InProcessRendezvous:
    def __init__(self, hall: _Hall, rank: int, settings: Settings) -> None:
        self.rank = rank
        self.size = len(hall.hosts)
        self.settings = settings
        self._hall = hall
        self._generation = 0

    def connect(self) -> Connections:
        generation = self._generation
        self._generation += 1
        return self._hall.take(generation, self.rank)


def in_process(
    size: int, hosts: Sequence[int] | None = None, settings: Settings | None = None
) -> list[Rendezvous]:
    """Return the rendezvous of ranks that are threads of this process, by rank.

    Args:
        size: number of ranks.
        hosts: index of the host of each rank, to simulate several; None puts all on one. Ranks of one host
            get Unix sockets, others TCP.
        settings: None means the defaults.
    """
    indices = tuple(hosts) if hosts is not None else (0,) * size
    if len(indices) != size:
        raise InvalidArgumentError(f"in_process(size={size}): hosts has {len(indices)} entries.")
    settings = settings or Settings()
    hall = _Hall(indices, settings.streams)
    return [_InProcessRendezvous(hall, rank, settings) for rank in range(size)]
