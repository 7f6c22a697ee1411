"""One rank's part in one generation, from the listener to sockets between every two ranks."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from sparkhvd.errors import MismatchError
from sparkhvd.rendezvous.blame import Blame, MeetingError
from sparkhvd.rendezvous.connections import Connections, joined
from sparkhvd.rendezvous.endpoints import Job
from sparkhvd.rendezvous.handshake import (
    HELLO,
    NEWS,
    NEWS_MET,
    NOTICE,
    NOTICE_MAGIC,
    PHASE_MESH,
    PHASE_STREAM,
    PHASE_TCP,
    WELCOME,
    Notice,
    Turn,
    answer,
    introduce,
)
from sparkhvd.rendezvous.listener import Listener, tcp_place, unix_address
from sparkhvd.rendezvous.loop import (
    UNAUTHENTICATED_S,
    Loop,
    Task,
    Wait,
    is_same_user,
    open_connection,
    read,
    send,
    sleep,
)
from sparkhvd.rendezvous.memory import check_memory, offer_memory
from sparkhvd.settings import Settings

__all__ = ["Meeting", "Parked"]

MAX_UNAUTHENTICATED = 64
# A rank that has not come is asked this often whether its listener is still there.
PROBE_S = 0.5
RETRY_S = 0.1
# A peer that is gone may have left because of another, and its notice is then in this rank's backlog: this many
# turns of the event loop, RETRY_S apart, are enough to read it, also for a process that was stopped meanwhile.
GRACE_TURNS = 5
# A notice needs one connect; only a host that does not answer takes longer, and it hears nothing anyway.
NOTICE_S = 2.0


@dataclass
class Link:
    """An authenticated connection to a peer."""

    sock: socket.socket
    shares_memory: bool = False
    is_ready: bool = False
    row: bytes | None = None  # with whom the peer shares memory
    streams: int = 1  # of the peer's settings, known with the row
    has_my_row: bool = False

    @property
    def is_unix(self) -> bool:
        return self.sock.family == socket.AF_UNIX


@dataclass
class Parked:
    """An authenticated connection of a later turn."""

    turn: Turn
    rank: int
    sock: socket.socket


Proof = Callable[[socket.socket, float], Generator[Wait, None, bool]]


class Meeting:
    """One rank's part in one generation: links to all peers, and agreement on who shares memory."""

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
        self.listener = listener
        self.errors = Blame(job, listener.endpoint(), settings.connect_timeout_s)
        self.streams = settings.streams
        self.deadline = time.monotonic() + settings.connect_timeout_s
        self.turn = Turn(generation, PHASE_MESH)
        self.parked = parked
        self.notices = notices  # of this and of later generations
        self.loop = Loop()
        self.links: dict[int, Link] = {}  # of this turn
        self.met: list[dict[int, Link]] = []  # of earlier turns, by stream
        self.serving: dict[int, Task] = {}
        self.peers: frozenset[int] = frozenset(r for r in range(job.size) if r != job.rank)
        self.unix_peers = frozenset(r for r in self.peers if self._is_same_host(r))
        self.watched: set[int] = set()
        # Incoming connections that have proved nothing, oldest first.
        self.strangers: dict[Task, None] = {}
        self.last_error: dict[int, OSError | str] = {}
        # Peers that seem to be gone, and what shows it; blamed after a grace.
        self.gone: dict[int, object] = {}
        self.has_grace = False

    def run(self) -> Connections:
        """Meets everybody. Closes everything if it fails."""
        try:
            for notice in self.notices:
                if notice.generation == self.turn.generation:
                    raise self.errors.reported(notice)
            self._start_listening()
            mesh = self._meet(self.peers)
            self._check_streams(mesh)
            hosts = self._agreed_hosts(mesh)
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
        sockets, *further = [self._detached(links) for links in self.met]
        return Connections(self.job.rank, self.job.size, hosts, sockets, joined(further))

    def _meet(self, peers: frozenset[int]) -> dict[int, Link]:
        """Links to `peers` for the current turn; in the first phase also everybody's row."""
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

    def _detached(self, links: dict[int, Link]) -> list[int]:
        """The descriptors of one stream, by rank."""
        sockets = [-1] * self.job.size
        for peer, link in links.items():
            link.sock.setblocking(True)
            sockets[peer] = link.sock.detach()
        return sockets

    def _is_complete(self) -> bool:
        ready = (
            not self.gone
            and len(self.links) == len(self.peers)
            and all(link.is_ready for link in self.links.values())
        )
        if not ready or self.turn.phase != PHASE_MESH:
            return ready
        row = bytes(
            peer == self.job.rank or self.links[peer].shares_memory for peer in range(self.job.size)
        )
        for peer, link in self.links.items():
            if not link.has_my_row:
                link.has_my_row = True
                try:
                    send(link.sock, NEWS.pack(NEWS_MET, self.streams - 1) + row)
                except OSError as error:
                    if not self._is_unheard(peer, link, error):  # else _serve() sees its end
                        self._suspect(peer, error)
        return not self.gone and all(link.row is not None for link in self.links.values())

    def _check_streams(self, mesh: dict[int, Link]) -> None:
        """Every rank has everybody's number, so all raise, and nobody waits for streams that do not come."""
        numbers = {self.job.rank: self.streams, **{r: link.streams for r, link in mesh.items()}}
        for peer, number in sorted(numbers.items()):
            if number != numbers[0]:
                raise MismatchError(
                    f"Rendezvous of rank {self.job.rank}: ranks disagree on Settings.streams. Rank 0 has "
                    f"{numbers[0]}, rank {peer} has {number}. Start every rank with the same settings "
                    "(SPARKHVD_STREAMS)."
                )

    def _agreed_hosts(self, mesh: dict[int, Link]) -> tuple[int, ...]:
        """Host indices from the rows that every rank has: the same computation everywhere."""
        size, me = self.job.size, self.job.rank
        mine = bytes(peer == me or mesh[peer].shares_memory for peer in range(size))
        rows = [mine if r == me else mesh[r].row or bytes(size) for r in range(size)]
        groups: dict[str, list[int]] = {}
        for r, endpoint in enumerate(self.job.endpoints):
            groups.setdefault(endpoint.host_key or f"rank {r}", []).append(r)
        whole = {
            key for key, group in groups.items() if all(rows[a][b] for a in group for b in group)
        }
        names = [
            endpoint.host_key if endpoint.host_key in whole else f"rank {r}"
            for r, endpoint in enumerate(self.job.endpoints)
        ]
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)

    def _replace_unix_links(self, mesh: dict[int, Link], hosts: tuple[int, ...]) -> None:
        """Between ranks that do not share memory the engine expects TCP."""
        split = frozenset(
            peer
            for peer, link in mesh.items()
            if link.is_unix and hosts[peer] != hosts[self.job.rank]
        )
        if split:
            self.turn = Turn(self.turn.generation, PHASE_TCP)
            self.unix_peers = frozenset()
            # A peer of this phase closes its old link when it is done; its listener shows whether it lives.
            self._watch({peer: link for peer, link in mesh.items() if peer not in split})
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
        """The further connections of every pair, one turn for each: MAX_UNAUTHENTICATED counts for all."""
        everybody = frozenset(self.links)
        if self.streams > 1:
            self.unix_peers = frozenset(r for r in everybody if hosts[r] == hosts[self.job.rank])
            self._watch(self.links)
        for stream in range(1, self.streams):
            self.met.append(self.links)
            self.turn = Turn(self.turn.generation, PHASE_STREAM + stream - 1)
            self._meet(everybody)
        self.met.append(self.links)

    # Failures

    def _suspect(self, peer: int, cause: object) -> None:
        """A peer seems to be gone. It is blamed after a grace, unless a notice says why it left."""
        self.gone.setdefault(peer, cause)
        if not self.has_grace:
            self.has_grace = True
            self.loop.start(self._blame())

    def _blame(self) -> Task:
        yield from sleep(RETRY_S)
        first = set(self.gone)  # who is missed later may have left because of these
        for _ in range(GRACE_TURNS - 1):
            yield from sleep(RETRY_S)
        self.has_grace = False
        causes = {peer: cause for peer, cause in self.gone.items() if peer in first}
        if causes:  # else they have come again
            raise self.errors.lost(causes)
        for peer, cause in self.gone.items():
            self._suspect(peer, cause)

    def _tell_the_others(self, error: MeetingError) -> None:
        """Best effort, NOTICE_S at most: without it they would name this rank, which only reports.

        Over links where the peer still waits for this rank's row, because a link is there whatever firewalls
        forbid; else by a notice.
        """
        news = NEWS.pack(error.news, error.rank) + bytes(self.job.size)
        told = {self.job.rank}
        for peer, link in self.links.items():
            awaits_row = self.turn.phase == PHASE_MESH and link.is_ready and not link.has_my_row
            if awaits_row and peer not in self.gone:
                with contextlib.suppress(OSError):
                    send(link.sock, news)
                    told.add(peer)
        notice = Notice(self.job.rank, self.turn.generation, error.news, error.rank)
        loop = Loop()
        try:
            for peer in sorted(set(range(self.job.size)) - told):
                loop.start(self._notify(peer, notice))
            loop.run(loop.is_idle)
        finally:
            loop.close()

    def _notify(self, peer: int, notice: Notice) -> Task:
        with contextlib.suppress(OSError):  # the other is gone, or cannot be reached
            sock = yield from self._dial(peer, time.monotonic() + NOTICE_S)
            with sock:
                send(sock, notice.to_bytes(self.job, peer))

    def _close_links(self) -> None:
        for links in (*self.met, self.links):
            for link in links.values():
                link.sock.close()

    def _expire(self) -> Task:
        yield Wait(None, 0, self.deadline)
        while self.gone:  # _blame() looks for their notices first
            yield from sleep(RETRY_S)
        job = self.job
        missing = [r for r in sorted(self.peers) if r not in self.links]
        waiting = [r for r, link in sorted(self.links.items()) if link.row is None]
        lines = []
        for r in missing:
            cause = self.last_error.get(r)
            if r < job.rank:
                lines.append(
                    f"rank {r} at {job.endpoints[r]} has not answered ({cause or 'no error'})"
                )
            else:
                lines.append(
                    f"rank {r} at {job.endpoints[r]} has not connected ({cause or 'its port is open'})"
                )
        if not missing:
            lines = [f"rank {r} at {job.endpoints[r]} still waits for others" for r in waiting]
        raise self.errors.late(missing or waiting or sorted(self.peers), lines)

    # Incoming

    def _start_listening(self) -> None:
        for listening in self.listener.sockets():
            listening.setblocking(False)
            self.loop.start(self._accept(listening))

    def _accept(self, listening: socket.socket) -> Task:
        while True:
            yield Wait(listening, selectors.EVENT_READ, float("inf"))
            try:
                sock, _ = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # Whoever does not come in time may have been here.
                    for peer in self.peers.difference(self.links):
                        self.last_error[peer] = error
                    yield from sleep(RETRY_S)
                continue  # the other side has gone again
            if len(self.strangers) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                self.loop.cancel(oldest)
            task = self._greet(sock)
            self.strangers[task] = None
            self.loop.start(task)

    def _greet(self, sock: socket.socket) -> Task:
        """The accepting side of the handshake. Whatever goes wrong ends this connection and nothing else."""
        task = next(reversed(self.strangers))
        known = None
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
                self._hear(Notice.from_bytes(hello + rest, self.job))
                return
            known = yield from answer(self.job, self.turn, hello, sock, until)
        except OSError:  # includes the deadline
            return
        finally:
            self.strangers.pop(task, None)
            if known is None:
                sock.close()
        if known is None:
            return
        turn, client = known
        if turn == self.turn and client in self.peers:
            self._adopt(client, sock)
        elif turn > self.turn:
            self.parked.append(Parked(turn, client, sock))
        else:
            sock.close()

    def _hear(self, notice: Notice | None) -> None:
        """A notice: of this generation, of a later one, or too late to matter; None if it is forged."""
        if notice is None or notice.generation < self.turn.generation:
            return
        if notice.generation == self.turn.generation:
            raise self.errors.reported(notice)
        self.notices.append(notice)

    def _adopt(self, peer: int, sock: socket.socket) -> None:
        """An authenticated connection of this turn, from a rank above this one."""
        self.gone.pop(peer, None)
        old = self.links.pop(peer, None)
        if old is not None:  # it came back after its first connection broke
            self.loop.cancel(self.serving[peer])
            old.sock.close()
        self._start_serving(peer, Link(sock), check_memory)

    # Outgoing

    def _reach(self, peer: int) -> Task:
        """Connects to a rank below this one, as often as it takes."""
        while True:
            sock = None
            try:
                sock = yield from self._dial(peer, self.deadline)
                if (yield from self._introduce(peer, sock)):
                    break
                self.last_error[peer] = (
                    "it gave a wrong proof: another job, attempt, generation or version of sparkhvd"
                )
            except OSError as error:
                # The listener was open when its endpoint was published: refused means the process is gone.
                if sock is None and error.errno == errno.ECONNREFUSED:
                    self._suspect(peer, error)
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

    def _is_unheard(self, peer: int, link: Link, error: OSError) -> bool:
        """Whether the accepting side may have ended a link because it had not read this rank's proof yet.

        It does so when it has just completed an earlier generation: whoever knocks is let in by the next one.
        """
        has_answered = link.row is not None or (link.is_unix and link.is_ready)
        return peer < self.job.rank and isinstance(error, ConnectionError) and not has_answered

    def _dial(self, peer: int, until: float) -> Generator[Wait, None, socket.socket]:
        endpoint = self.job.endpoints[peer]
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

    def _introduce(self, peer: int, sock: socket.socket) -> Generator[Wait, None, bool]:
        """The handshake, as long as it takes: the other rank may call init() much later than this one."""
        return introduce(self.job, peer, self.turn, sock, self.deadline)

    def _probe(self, peer: int) -> Task:
        """Until a rank above this one has come: is its listener still there?

        A silent connection waits in its backlog; the kernel resets it when the listener closes. A rank that
        listens already closes it after 5 s, as it does with any stranger.
        """
        family, place = tcp_place(self.job.endpoints[peer])
        while True:
            yield from sleep(PROBE_S)
            if peer in self.links:
                return
            sock = None
            try:
                sock = yield from open_connection(
                    family, place, time.monotonic() + UNAUTHENTICATED_S
                )
                self.last_error.pop(peer, None)
                yield Wait(sock, selectors.EVENT_READ, float("inf"))
            except OSError as error:
                if error.errno == errno.ECONNREFUSED and peer not in self.links:
                    self._suspect(peer, error)
                    return
                self.last_error[peer] = error
            finally:
                if sock is not None:
                    sock.close()

    def _is_same_host(self, peer: int) -> bool:
        mine, theirs = self.listener.endpoint(), self.job.endpoints[peer]
        return bool(theirs.unix_name) and mine.host_key != "" and mine.host_key == theirs.host_key

    # Both

    def _start_serving(self, peer: int, link: Link, prove: Proof) -> None:
        self.links[peer] = link
        self.serving[peer] = self._serve(peer, link, prove)
        self.loop.start(self.serving[peer])

    def _serve(self, peer: int, link: Link, prove: Proof) -> Task:
        """An authenticated connection: proof of shared memory, then the peer's row."""
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
            news = yield from read(link.sock, NEWS.size + self.job.size, until)
        except OSError as error:
            if self._is_unheard(peer, link, error):
                self.last_error[peer] = error
                del self.links[peer]
                link.sock.close()
                self.loop.start(self._reach_again(peer))
            else:
                self._suspect(peer, error)
            return
        what, about = NEWS.unpack_from(news)
        if what != NEWS_MET:
            notice = Notice(peer, self.turn.generation, what, about)
            if notice.makes_sense(self.job):
                raise self.errors.reported(notice)
            self._suspect(peer, f"it sent news of kind {what} about rank {about}")
            return
        link.streams = 1 + about
        link.row = news[NEWS.size :]

    def _watch(self, links: Mapping[int, Link]) -> None:
        """From now on the end of one of these links is the end of its peer."""
        for peer, link in links.items():
            if peer not in self.watched:
                self.watched.add(peer)
                self.loop.start(self._notice_end(peer, link.sock))

    def _notice_end(self, peer: int, sock: socket.socket) -> Task:
        """Notices the end of a peer; leaves what it sends to the engine."""
        yield Wait(sock, selectors.EVENT_READ, float("inf"))
        try:
            is_open = bool(sock.recv(1, socket.MSG_PEEK))
        except OSError as error:
            self._suspect(peer, error)
            return
        if not is_open:
            self._suspect(peer, "closed by the other side")
