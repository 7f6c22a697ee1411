"""Peers that seem to be gone, and the grace before one of them is blamed."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Mapping

from sparkhvd.rendezvous.blame import Blame
from sparkhvd.rendezvous.links import Link
from sparkhvd.rendezvous.loop import Loop, Task, Wait, sleep

__all__ = ["Suspects"]

_TURN_S = 0.1
# A peer that is gone may have left because of another, and its notice is then in this rank's backlog: this many
# turns of the event loop, _TURN_S apart, are enough to read it, also for a process that was stopped meanwhile.
_GRACE_TURNS = 5


class Suspects:
    """Peers that seem to be gone. They are blamed after a grace, unless a notice says first why they left."""

    def __init__(self, loop: Loop, errors: Blame) -> None:
        self._loop = loop
        self._errors = errors
        self._causes: dict[int, object] = {}
        self._has_grace = False
        self._watched: set[int] = set()

    def __contains__(self, peer: int) -> bool:
        return peer in self._causes

    def __len__(self) -> int:
        return len(self._causes)

    def add(self, peer: int, cause: object) -> None:
        """Suspect a peer; `cause` shows that it is gone. The first cause counts."""
        self._causes.setdefault(peer, cause)
        if not self._has_grace:
            self._has_grace = True
            self._loop.start(self._blame())

    def clear(self, peer: int) -> None:
        """Take the suspicion back: the peer has come again."""
        self._causes.pop(peer, None)

    def watch(self, links: Mapping[int, Link]) -> None:
        """Suspect a peer from now on when its link ends; a peer is watched by its first link only."""
        for peer, link in links.items():
            if peer not in self._watched:
                self._watched.add(peer)
                self._loop.start(self._watch(peer, link.sock))

    def _watch(self, peer: int, sock: socket.socket) -> Task:
        """Wait for the end of a link, and leave its data to the engine."""
        yield Wait(sock, selectors.EVENT_READ, float("inf"))
        try:
            is_open = bool(sock.recv(1, socket.MSG_PEEK))
        except OSError as error:
            self.add(peer, error)
            return
        if not is_open:
            self.add(peer, "closed by the other side")

    def _blame(self) -> Task:
        yield from sleep(_TURN_S)
        first = set(self._causes)  # ranks that are missed later may have left because of these
        for _ in range(_GRACE_TURNS - 1):
            yield from sleep(_TURN_S)
        self._has_grace = False
        causes = {peer: cause for peer, cause in self._causes.items() if peer in first}
        if causes:  # else they have come again
            raise self._errors.lost(causes)
        for peer, cause in self._causes.items():
            self.add(peer, cause)
