"""Rendezvous over sockets, in process, and of a single rank."""

from __future__ import annotations

import hmac
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from sparkhvd.errors import InvalidArgumentError, NotInitializedError
from sparkhvd.rendezvous.handshake import Connections, Job, Notice, Rendezvous, joined
from sparkhvd.rendezvous.listener import Listener, make_room
from sparkhvd.rendezvous.mesh import EarlyConnection, MeshBuilder
from sparkhvd.settings import Settings


class SocketRendezvous:
    """Rendezvous of the ranks of a job on their published endpoints.

    Rank i connects to every rank below it and accepts from every rank above it, so each pair has one
    connection: an abstract Unix socket if both are on one host, else TCP. Ranks of one host that prove to
    each other that they can map the same memory get one host index. If any pair of them cannot, each is
    treated as its own host.

    Args:
        job: the same on every rank, except `rank`.
        listener: listens at `job.endpoints[job.rank]`. It stays open for later generations, and because a closed port
            means that the process is gone. Connections are accepted inside `connect` only.
        settings: the same on every rank; or a function that returns them, called by every `connect`.
    """

    def __init__(
        self, job: Job, listener: Listener, settings: Settings | Callable[[], Settings]
    ) -> None:
        self.job = job
        self.rank = job.rank
        self.size = job.size
        self._ask = settings if callable(settings) else None
        self.settings = settings() if callable(settings) else settings
        self._listener = listener
        self._generation = 0
        self._parked: list[EarlyConnection] = []
        self._notices: list[Notice] = []
        self._made: Connections | None = None
        self._among: dict[
            tuple[int, ...], SocketRendezvous
        ] = {}  # kept, because each counts its generations
        # A forked child (a DataLoader worker) must not keep the port or a connection of a dead rank open.
        _close_in_children()
        _open_rendezvous.add(self)

    def connect(self) -> Connections:
        """Connect to every other rank. See `Rendezvous.connect`."""
        if self._ask is not None:
            self.settings = self._ask()
        make_room(self.size, self.settings.streams)
        generation = self._generation
        self._generation += 1
        for early in [p for p in self._parked if p.stage.generation < generation]:
            self._parked.remove(early)
            early.sock.close()
        self._notices[:] = [n for n in self._notices if n.generation >= generation]
        mesh = MeshBuilder(
            self.job, self._listener, self.settings, generation, self._parked, self._notices
        )
        self._made = mesh.run()
        return self._made

    def among(self, ranks: Sequence[int]) -> SocketRendezvous:
        """Make a separate job of some ranks, numbered by their positions in the list.

        Each of them must pass the same list. Because they share the listener, another such job may start only when this
        one has ended.

        Args:
            ranks: distinct, including this rank.
        """
        chosen = tuple(ranks)
        if chosen == tuple(range(self.size)):
            return self
        if chosen not in self._among:
            names = ",".join(map(str, chosen))
            job = replace(
                self.job,
                key=hmac.digest(self.job.key, f"among {names}".encode(), "sha256"),
                job_id=f"{self.job.job_id} ranks {names}",
                rank=chosen.index(self.rank),
                size=len(chosen),
                endpoints=tuple(self.job.endpoints[rank] for rank in chosen),
            )
            self._among[chosen] = SocketRendezvous(job, self._listener, self._ask or self.settings)
        return self._among[chosen]

    def close(self) -> None:
        """Close the listener, and connections of later generations."""
        for early in self._parked:
            early.sock.close()
        self._parked.clear()
        self._listener.close()


_open_rendezvous: weakref.WeakSet[SocketRendezvous] = weakref.WeakSet()


def _close_all() -> None:
    for rendezvous in list(_open_rendezvous):
        rendezvous.close()
        if rendezvous._made is not None:  # the engine closes the descriptors that it has taken over
            rendezvous._made.close()


@cache
def _close_in_children() -> None:
    os.register_at_fork(after_in_child=_close_all)


# ----------------------------------------------------------------------------------------------------
# Rendezvous of ranks that are threads of one process, and of a single rank.


class SingleRendezvous:
    """Rendezvous of a job with one rank."""

    def __init__(self, settings: Settings) -> None:
        self.rank = 0
        self.size = 1
        self.settings = settings

    def connect(self) -> Connections:
        """Make connections without peers."""
        return Connections(0, 1, (0,), [-1], [-1] * self.settings.streams)


_Row = list[socket.socket | None]


class _InProcessHub:
    """Socket pairs of ranks in one process, created by the first rank of a generation."""

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
        """Open one connection per pair, by rank and peer."""
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
    def __init__(self, hub: _InProcessHub, rank: int, settings: Settings) -> None:
        self.rank = rank
        self.size = len(hub.hosts)
        self.settings = settings
        self._hub = hub
        self._generation = 0

    def connect(self) -> Connections:
        generation = self._generation
        self._generation += 1
        return self._hub.take(generation, self.rank)


def in_process(
    size: int, hosts: Sequence[int] | None = None, settings: Settings | None = None
) -> list[Rendezvous]:
    """Make the rendezvous of several ranks, threads of this process. The list is by rank.

    Args:
        size: number of ranks.
        hosts: index of the host of each rank, to simulate several; None means one host. Ranks of one host get Unix
            sockets, others TCP.
        settings: None means the defaults.
    """
    indices = tuple(hosts) if hosts is not None else (0,) * size
    if len(indices) != size:
        raise InvalidArgumentError(f"in_process(size={size}): hosts has {len(indices)} entries.")
    settings = settings or Settings()
    hub = _InProcessHub(indices, settings.streams)
    return [_InProcessRendezvous(hub, rank, settings) for rank in range(size)]


# ----------------------------------------------------------------------------------------------------
# Rendezvous of this process: at most one.

# The rendezvous of this process, with the pid of the launched process.
_installed: list[tuple[Rendezvous, int]] = []


def install_rendezvous(rendezvous: Rendezvous | None) -> None:
    """Set the result of `current_rendezvous()`. The launcher calls this before user code."""
    _installed[:] = [] if rendezvous is None else [(rendezvous, os.getpid())]


def current_rendezvous() -> Rendezvous | None:
    """Get the rendezvous of this process, or None if it was not launched as a rank.

    Raises:
        NotInitializedError: this process is a fork of a launched one.
    """
    if not _installed:
        return None
    rendezvous, pid = _installed[0]
    if os.getpid() != pid:
        raise NotInitializedError(
            f"init(): process {os.getpid()} was forked by rank {rendezvous.rank} (process {pid}) and is not a rank itself. "
            "Let the rank communicate and hand the results over, start more ranks with num_proc, or let the rank start a program: without "
            "SPARKHVD_PLACE in its environment that is a job of its own."
        )
    return rendezvous
