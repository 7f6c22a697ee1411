"""Authenticated connections to peers, and agreements of ranks over them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from sparkhvd.errors import MismatchError
from sparkhvd.rendezvous.endpoints import Job
from sparkhvd.rendezvous.handshake import Turn

__all__ = ["Link", "Parked", "agree_on_hosts", "check_streams", "detach", "own_row"]


@dataclass
class Link:
    """Authenticated connection to a peer.

    Attributes:
        sock: the connection.
        shares_memory: whether both processes have proved that they can map the same memory.
        is_ready: whether the handshake is complete.
        row: by rank, 1 where the peer shares memory with it; None until the peer has sent it.
        streams: `Settings.streams` of the peer, known with the row.
        has_own_row: whether this rank has sent its row.
    """

    sock: socket.socket
    shares_memory: bool = False
    is_ready: bool = False
    row: bytes | None = None
    streams: int = 1
    has_own_row: bool = False

    @property
    def is_unix(self) -> bool:
        """True for a Unix socket."""
        return self.sock.family == socket.AF_UNIX

    @property
    def has_answered(self) -> bool:
        """True once the peer has sent something that shows that it has believed this rank's proof."""
        return self.row is not None or (self.is_unix and self.is_ready)


@dataclass
class Parked:
    """Authenticated connection of a later turn."""

    turn: Turn
    rank: int
    sock: socket.socket


def detach(links: Mapping[int, Link], size: int) -> list[int]:
    """Take the blocking descriptors of one stream out of its links, by rank; -1 where there is no link."""
    sockets = [-1] * size
    for peer, link in links.items():
        link.sock.setblocking(True)
        sockets[peer] = link.sock.detach()
    return sockets


def own_row(job: Job, links: Mapping[int, Link]) -> bytes:
    """Return, by rank, 1 where it shares memory with this one."""
    return bytes(rank == job.rank or links[rank].shares_memory for rank in range(job.size))


def agree_on_hosts(job: Job, links: Mapping[int, Link]) -> tuple[int, ...]:
    """Return the host index of every rank; a host whose ranks do not all share memory becomes one host per rank.

    Every rank computes the same, because every rank has the same rows.

    Args:
        job: the ranks and their endpoints.
        links: the link to each peer, with its row.
    """
    rows = [
        own_row(job, links) if rank == job.rank else links[rank].row or bytes(job.size)
        for rank in range(job.size)
    ]
    groups: dict[str, list[int]] = {}
    for rank, endpoint in enumerate(job.endpoints):
        groups.setdefault(endpoint.host_key or f"rank {rank}", []).append(rank)
    whole = {key for key, group in groups.items() if all(rows[a][b] for a in group for b in group)}
    names = [
        endpoint.host_key if endpoint.host_key in whole else f"rank {rank}"
        for rank, endpoint in enumerate(job.endpoints)
    ]
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def check_streams(rank: int, streams: int, links: Mapping[int, Link]) -> None:
    """Refuse ranks with different numbers of streams, on every rank, so that none waits for streams that do not come.

    Raises:
        MismatchError: `Settings.streams` differs between ranks.
    """
    numbers = {rank: streams, **{peer: link.streams for peer, link in links.items()}}
    for peer, number in sorted(numbers.items()):
        if number != numbers[0]:
            raise MismatchError(
                f"Rendezvous of rank {rank}: ranks disagree on Settings.streams. Rank 0 has "
                f"{numbers[0]}, rank {peer} has {number}. Start every rank with the same settings "
                "(SPARKHVD_STREAMS)."
            )
