"""Rendezvous of one rank for one generation: from its listener to sockets between every two ranks."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Generator
from functools import partial

from sparkhvd.rendezvous.blame import Blame, MeetingError
from sparkhvd.rendezvous.connections import Connections, joined
from sparkhvd.rendezvous.dialing import Dialer
from sparkhvd.rendezvous.endpoints import Job
from sparkhvd.rendezvous.handshake import (
    NEWS,
    NEWS_MET,
    PHASE_MESH,
    PHASE_STREAM,
    PHASE_TCP,
    WELCOME,
    Notice,
    Turn,
    introduce,
)
from sparkhvd.rendezvous.links import Link, Parked, agree_on_hosts, check_streams, detach, own_row
from sparkhvd.rendezvous.listener import Listener
from sparkhvd.rendezvous.loop import Loop, Task, Wait, read, send, sleep
from sparkhvd.rendezvous.memory import check_memory, offer_memory
from sparkhvd.rendezvous.reception import Reception
from sparkhvd.rendezvous.suspects import Suspects
from sparkhvd.settings import Settings

__all__ = ["Meeting"]

# The listener of a rank that has not come is checked this often.
PROBE_S = 0.5
RETRY_S = 0.1

Proof = Callable[[socket.socket, float], Generator[Wait, None, bool]]


class Meeting:
    """Connects one rank with all peers for one generation, and agrees with them on hosts."""

    def __init__(
        self,
        job: Job,
        listener: Listener,
        settings: Settings,
        generation: int,
        parked: list[Parked],
        notices: list[Notice],
    ) -> None:
        self.job = job
        self.errors = Blame(job, listener.endpoint(), settings.connect_timeout_s)
        self.streams = settings.streams
        self.deadline = time.monotonic() + settings.connect_timeout_s
        self.turn = Turn(generation, PHASE_MESH)
        self.parked = parked
        self.notices = notices  # of this and of later generations
        self.loop = Loop()
        self.links: dict[int, Link] = {}  # of this turn
        self.met: list[dict[int, Link]] = []  # of earlier turns: for control frames, then by stream
        self.serving: dict[int, Task] = {}
        self.peers: frozenset[int] = frozenset(r for r in range(job.size) if r != job.rank)
        self.last_error: dict[int, OSError | str] = {}
        self.dialer = Dialer(job, listener.endpoint())
        self.suspects = Suspects(self.loop, self.errors)
        self.reception = Reception(
            job,
            listener.sockets(),
            self.loop,
            current_turn=lambda: self.turn,
            on_peer=self._receive_peer,
            on_notice=self._receive_notice,
            on_shortage=self._note_shortage,
        )

    def run(self) -> Connections:
        """Meet every other rank. Closes everything if it fails.

        Raises:
            CollectiveError: a rank is gone, or did not come in time.
            MismatchError: ranks disagree on the number of streams.
        """
        try:
            for notice in self.notices:
                if notice.generation == self.turn.generation:
                    raise self.errors.reported(notice)
            self.reception.start()
            mesh = self._meet(self.peers)
            check_streams(self.job.rank, self.streams, mesh)
            hosts = agree_on_hosts(self.job, mesh)
            self._replace_unix_links(mesh, hosts)
            self._open_streams(hosts)
        except MeetingError as error:
            self.loop.close()  # ends the tasks that use the links
            self._tell_the_others(error)
            self._close_links()
            raise error.cause from error.__cause__
        except BaseException:
            self._close_links()
            raise
        finally:
            self.loop.close()
        sockets, *further = [detach(links, self.job.size) for links in self.met]
        return Connections(self.job.rank, self.job.size, hosts, sockets, joined(further))

    def _meet(self, peers: frozenset[int]) -> dict[int, Link]:
        """Return links to `peers` for the current turn; in the first phase with the row of each."""
        self.peers = peers
        self.links = {}
        for parked in [p for p in self.parked if p.turn == self.turn]:
            self.parked.remove(parked)
            self._adopt(parked.rank, parked.sock)
        tasks = [self._reach(r) if r < self.job.rank else self._probe(r) for r in sorted(peers)]
        tasks.append(self._expire())
        for task in tasks:
            self.loop.start(task)
        self.loop.run(self._is_complete)
        for task in tasks:  # probes, and the limit
            self.loop.cancel(task)
        return dict(self.links)

    def _is_complete(self) -> bool:
        ready = (
            not self.suspects
            and len(self.links) == len(self.peers)
            and all(link.is_ready for link in self.links.values())
        )
        if not ready or self.turn.phase != PHASE_MESH:
            return ready
        row = own_row(self.job, self.links)
        for peer, link in self.links.items():
            if not link.has_own_row:
                link.has_own_row = True
                try:
                    send(link.sock, NEWS.pack(NEWS_MET, self.streams - 1) + row)
                except OSError as error:
                    if not self._may_reach_again(peer, link, error):  # else _serve() sees its end
                        self.suspects.add(peer, error)
        return not self.suspects and all(link.row is not None for link in self.links.values())

    def _replace_unix_links(self, mesh: dict[int, Link], hosts: tuple[int, ...]) -> None:
        """Connect by TCP the ranks of this host that do not share memory, as the engine expects."""
        split = frozenset(
            peer
            for peer, link in mesh.items()
            if link.is_unix and hosts[peer] != hosts[self.job.rank]
        )
        if split:
            self.turn = Turn(self.turn.generation, PHASE_TCP)
            self.dialer.unix_peers = frozenset()
            # A peer of this phase closes its old link when it is done; its listener shows whether it lives.
            self.suspects.watch({peer: link for peer, link in mesh.items() if peer not in split})
            try:
                replaced = self._meet(split)
            except BaseException:
                for peer, link in mesh.items():
                    self.links.setdefault(peer, link)
                    if self.links[peer] is not link:
                        link.sock.close()
                raise
            for peer in split:
                mesh[peer].sock.close()
            mesh.update(replaced)
        self.links = mesh

    def _open_streams(self, hosts: tuple[int, ...]) -> None:
        """Open the connections for tensors of every pair, one turn for each: MAX_UNAUTHENTICATED counts for all."""
        everybody = frozenset(self.links)
        self.dialer.unix_peers = frozenset(
            peer for peer in everybody if hosts[peer] == hosts[self.job.rank]
        )
        self.suspects.watch(self.links)
        for stream in range(self.streams):
            self.met.append(self.links)
            self.turn = Turn(self.turn.generation, PHASE_STREAM + stream)
            self._meet(everybody)
        self.met.append(self.links)

    # Failures

    def _tell_the_others(self, error: MeetingError) -> None:
        """Report the failure to every rank, best effort: else they would blame this rank, which only reports.

        Over links where the peer still waits for this rank's row, because a link is there whatever firewalls
        forbid; else by a notice.
        """
        news = NEWS.pack(error.news, error.rank) + bytes(self.job.size)
        told = {self.job.rank}
        for peer, link in self.links.items():
            awaits_row = self.turn.phase == PHASE_MESH and link.is_ready and not link.has_own_row
            if awaits_row and peer not in self.suspects:
                with contextlib.suppress(OSError):
                    send(link.sock, news)
                    told.add(peer)
        notice = Notice(self.job.rank, self.turn.generation, error.news, error.rank)
        self.dialer.notify(sorted(set(range(self.job.size)) - told), notice)

    def _close_links(self) -> None:
        for links in (*self.met, self.links):
            for link in links.values():
                link.sock.close()

    def _expire(self) -> Task:
        yield Wait(None, 0, self.deadline)
        while self.suspects:  # their notices come first
            yield from sleep(RETRY_S)
        rows = {peer: link.row for peer, link in self.links.items()}
        raise self.errors.expired(self.peers, rows, self.last_error)

    # Incoming

    def _receive_peer(self, turn: Turn, peer: int, sock: socket.socket) -> None:
        if turn == self.turn and peer in self.peers:
            self._adopt(peer, sock)
        elif turn > self.turn:
            self.parked.append(Parked(turn, peer, sock))
        else:
            sock.close()

    def _receive_notice(self, notice: Notice) -> None:
        """Fail by a notice of this generation, keep one of a later, drop one of an earlier."""
        if notice.generation == self.turn.generation:
            raise self.errors.reported(notice)
        if notice.generation > self.turn.generation:
            self.notices.append(notice)

    def _note_shortage(self, error: OSError) -> None:
        # A rank that does not come in time may have been refused because of it.
        for peer in self.peers.difference(self.links):
            self.last_error[peer] = error

    def _adopt(self, peer: int, sock: socket.socket) -> None:
        """Serve an authenticated connection of this turn, from a rank above this one."""
        self.suspects.clear(peer)
        old = self.links.pop(peer, None)
        if old is not None:  # it came back after its first connection broke
            self.loop.cancel(self.serving[peer])
            old.sock.close()
        self._start_serving(peer, Link(sock), check_memory)

    # Outgoing

    def _reach(self, peer: int) -> Task:
        """Connect to a rank below this one, as often as it takes."""
        while True:
            sock = None
            try:
                sock = yield from self.dialer.dial(peer, self.deadline)
                if (yield from self._introduce(peer, sock)):
                    break
                self.last_error[peer] = (
                    "it gave a wrong proof: another job, attempt, generation or version of sparkhvd"
                )
            except OSError as error:
                # The listener was open when its endpoint was published: refused means the process is gone.
                if sock is None and error.errno == errno.ECONNREFUSED:
                    self.suspects.add(peer, error)
                    return
                self.last_error[peer] = error
            except BaseException:
                if sock is not None:
                    sock.close()
                raise
            if sock is not None:
                sock.close()
            yield from sleep(RETRY_S)
        self._start_serving(peer, Link(sock), offer_memory)

    def _reach_again(self, peer: int) -> Task:
        yield from sleep(RETRY_S)
        yield from self._reach(peer)

    def _may_reach_again(self, peer: int, link: Link, error: OSError) -> bool:
        """Return True if the accepting side may have ended a link because it had not read this rank's proof yet.

        It does so when it has just completed an earlier generation; the next one accepts the connection.
        """
        return peer < self.job.rank and isinstance(error, ConnectionError) and not link.has_answered

    def _introduce(self, peer: int, sock: socket.socket) -> Generator[Wait, None, bool]:
        """Do the handshake until the deadline: the other rank may call init() much later than this one."""
        return introduce(self.job, peer, self.turn, sock, self.deadline)

    def _probe(self, peer: int) -> Task:
        """Check the listener of a rank above this one until that rank has come."""
        while True:
            yield from sleep(PROBE_S)
            if peer in self.links:
                return
            try:
                yield from self.dialer.watch_listener(
                    peer, partial(self.last_error.pop, peer, None)
                )
            except OSError as error:
                if error.errno == errno.ECONNREFUSED and peer not in self.links:
                    self.suspects.add(peer, error)
                    return
                self.last_error[peer] = error

    # Both

    def _start_serving(self, peer: int, link: Link, prove: Proof) -> None:
        self.links[peer] = link
        self.serving[peer] = self._serve(peer, link, prove)
        self.loop.start(self.serving[peer])

    def _serve(self, peer: int, link: Link, prove: Proof) -> Task:
        """Prove shared memory over an authenticated connection, then read the peer's row."""
        # Later than _expire(), which knows more.
        until = self.deadline + RETRY_S
        try:
            if self.turn.phase == PHASE_MESH and link.is_unix:
                link.shares_memory = yield from prove(link.sock, until)
            if self.turn.phase >= PHASE_STREAM and peer > self.job.rank:
                yield from read(link.sock, len(WELCOME), until)
            link.is_ready = True
            if self.turn.phase != PHASE_MESH:
                return
            message = yield from read(link.sock, NEWS.size + self.job.size, until)
        except OSError as error:
            if self._may_reach_again(peer, link, error):
                self.last_error[peer] = error
                del self.links[peer]
                link.sock.close()
                self.loop.start(self._reach_again(peer))
            else:
                self.suspects.add(peer, error)
            return
        kind, about = NEWS.unpack_from(message)
        if kind != NEWS_MET:
            notice = Notice(peer, self.turn.generation, kind, about)
            if notice.is_valid(self.job):
                raise self.errors.reported(notice)
            self.suspects.add(peer, f"it sent news of kind {kind} about rank {about}")
            return
        link.streams = 1 + about
        link.row = message[NEWS.size :]
