"""Rendezvous over sockets: one meeting per generation."""

from __future__ import annotations

import hmac
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from sparkhvd.rendezvous.connections import Connections
from sparkhvd.rendezvous.descriptors import make_room
from sparkhvd.rendezvous.endpoints import Job
from sparkhvd.rendezvous.handshake import Notice
from sparkhvd.rendezvous.links import Parked
from sparkhvd.rendezvous.listener import Listener
from sparkhvd.rendezvous.meeting import Meeting
from sparkhvd.settings import Settings

__all__ = ["SocketRendezvous"]


class SocketRendezvous:
    """Rendezvous of the ranks of a job on their published endpoints.

    Rank i connects to every rank below it and accepts from every rank above it, so each pair has one
    connection: an abstract Unix socket if both are on one host, else TCP. Ranks of one host that prove to
    each other that they can map the same memory get one host index; if any pair of them cannot, each is
    treated as a host of its own.

    Args:
        job: the same on every rank, but for `rank`.
        listener: listens at `job.endpoints[job.rank]`; stays open, because a later meeting needs it, and a
            closed port means that the process is gone. Connections are accepted during meetings only.
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
        self._parked: list[Parked] = []
        self._notices: list[Notice] = []
        self._made: Connections | None = None
        self._among: dict[tuple[int, ...], SocketRendezvous] = {}  # they count their generations
        # A forked child (a DataLoader worker) must not keep the port or a connection of a dead rank open.
        _close_in_children()
        _open_rendezvous.add(self)

    def connect(self) -> Connections:
        """Meet every other rank; see `Rendezvous.connect`."""
        if self._ask is not None:
            self.settings = self._ask()
        make_room(self.size, self.settings.streams)
        generation = self._generation
        self._generation += 1
        for parked in [p for p in self._parked if p.turn.generation < generation]:
            self._parked.remove(parked)
            parked.sock.close()
        self._notices[:] = [n for n in self._notices if n.generation >= generation]
        meeting = Meeting(
            self.job, self._listener, self.settings, generation, self._parked, self._notices
        )
        self._made = meeting.run()
        return self._made

    def among(self, ranks: Sequence[int]) -> SocketRendezvous:
        """Return the rendezvous of some of the ranks: a job of its own, whose ranks are their places in the list.

        Each of them must ask with the same list; another job may follow when this one has ended, because they share the listener.

        Args:
            ranks: different ones, this rank among them.
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
        """Stop listening, and close connections of later generations."""
        for parked in self._parked:
            parked.sock.close()
        self._parked.clear()
        self._listener.close()


_open_rendezvous: weakref.WeakSet[SocketRendezvous] = weakref.WeakSet()


def _close_all() -> None:
    for rendezvous in list(_open_rendezvous):
        rendezvous.close()
        if rendezvous._made is not None:  # the owner of taken descriptors closes them in the child
            rendezvous._made.close()


@cache
def _close_in_children() -> None:
    os.register_at_fork(after_in_child=_close_all)
