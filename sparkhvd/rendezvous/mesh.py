"""Connect one rank to the others of a generation: from its listener to sockets between all pairs of ranks."""

from __future__ import annotations

import contextlib
import errno
import hmac
import mmap
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sparkhvd.engine.library import is_sealed_against_shrinking, new_memfd, seal_against_shrinking
from sparkhvd.errors import CollectiveError, CollectiveTimeoutError, MismatchError, PeerLostError
from sparkhvd.rendezvous.event_loop import (
    UNAUTHENTICATED_S,
    EventLoop,
    Task,
    Wait,
    is_same_user,
    open_connection,
    read,
    send,
    sleep,
)
from sparkhvd.rendezvous.handshake import (
    NEWS,
    NEWS_LATE,
    NEWS_LOST,
    NEWS_MET,
    PHASE_MESH,
    PHASE_STREAM,
    PHASE_TCP,
    WELCOME,
    ConnectionPhase,
    Connections,
    Endpoint,
    Job,
    Notice,
    introduce,
    joined,
)
from sparkhvd.rendezvous.listener import Acceptor, Listener, tcp_place, unix_address
from sparkhvd.settings import Settings

# Polling interval for the listener of a missing rank.
PROBE_S = 0.5
# Pause before another attempt to connect to a rank.
RETRY_S = 0.1

Proof = Callable[[socket.socket, float], Generator[Wait, None, bool]]


class MeshBuilder:
    """Connects one rank with all peers for one generation, and agrees with them on hosts."""

    def __init__(
        self,
        job: Job,
        listener: Listener,
        settings: Settings,
        generation: int,
        early: list[EarlyConnection],
        notices: list[Notice],
    ) -> None:
        self.job = job
        self.errors = RendezvousErrors(job, listener.endpoint(), settings.connect_timeout_s)
        self.streams = settings.streams
        self.deadline = time.monotonic() + settings.connect_timeout_s
        self.stage = ConnectionPhase(generation, PHASE_MESH)
        self.early = early
        self.notices = notices  # of this generation and of later generations
        self.loop = EventLoop()
        self.links: dict[int, PeerLink] = {}  # of this phase
        self.met: list[
            dict[int, PeerLink]
        ] = []  # of earlier phases: for control frames, then by stream
        self.serving: dict[int, Task] = {}
        self.peers: frozenset[int] = frozenset(r for r in range(job.size) if r != job.rank)
        self.last_error: dict[int, OSError | str] = {}
        self.dialer = Dialer(job, listener.endpoint())
        self.suspects = SuspectPeers(self.loop, self.errors)
        self.acceptor = Acceptor(
            job,
            listener.sockets(),
            self.loop,
            current_stage=lambda: self.stage,
            on_peer=self._receive_peer,
            on_notice=self._receive_notice,
            on_shortage=self._record_shortage,
        )

    def run(self) -> Connections:
        """Connect to every other rank. Closes everything if it fails.

        Raises:
            CollectiveError: a rank is gone, or did not connect in time.
            MismatchError: ranks disagree on the number of streams.
        """
        try:
            for notice in self.notices:
                if notice.generation == self.stage.generation:
                    raise self.errors.reported(notice)
            self.acceptor.start()
            mesh = self._meet(self.peers)
            check_streams(self.job.rank, self.streams, mesh)
            hosts = agree_on_hosts(self.job, mesh)
            self._replace_unix_links(mesh, hosts)
            self._open_streams(hosts)
        except MeshError as error:
            self.loop.close()  # ends the tasks that use the links
            self._notify_others(error)
            self._close_links()
            raise error.cause from error.__cause__
        except BaseException:
            self._close_links()
            raise
        finally:
            self.loop.close()
        sockets, *further = [detach(links, self.job.size) for links in self.met]
        return Connections(self.job.rank, self.job.size, hosts, sockets, joined(further))

    def _meet(self, peers: frozenset[int]) -> dict[int, PeerLink]:
        """Connect with `peers` in the current phase. In the first phase also receive their rows."""
        self.peers = peers
        self.links = {}
        for early in [p for p in self.early if p.stage == self.stage]:
            self.early.remove(early)
            self._adopt(early.rank, early.sock)
        tasks = [self._reach(r) if r < self.job.rank else self._probe(r) for r in sorted(peers)]
        tasks.append(self._expire())
        for task in tasks:
            self.loop.start(task)
        self.loop.run(self._is_complete)
        for task in tasks:  # probes, and the deadline
            self.loop.cancel(task)
        return dict(self.links)

    def _is_complete(self) -> bool:
        ready = (
            not self.suspects
            and len(self.links) == len(self.peers)
            and all(link.is_ready for link in self.links.values())
        )
        if not ready or self.stage.phase != PHASE_MESH:
            return ready
        row = own_row(self.job, self.links)
        for peer, link in self.links.items():
            if not link.has_own_row:
                link.has_own_row = True
                try:
                    send(link.sock, NEWS.pack(NEWS_MET, self.streams - 1) + row)
                except OSError as error:
                    if not self._may_reach_again(
                        peer, link, error
                    ):  # else _serve() handles its end
                        self.suspects.add(peer, error)
        return not self.suspects and all(link.row is not None for link in self.links.values())

    def _replace_unix_links(self, mesh: dict[int, PeerLink], hosts: tuple[int, ...]) -> None:
        """Replace Unix links to ranks without shared memory by TCP links, as the engine expects."""
        split = frozenset(
            peer
            for peer, link in mesh.items()
            if link.is_unix and hosts[peer] != hosts[self.job.rank]
        )
        if split:
            self.stage = ConnectionPhase(self.stage.generation, PHASE_TCP)
            self.dialer.unix_peers = frozenset()
            # A peer in `split` closes its old link once the new link is ready, so watch only the links of the other
            # peers.
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
        """Open the tensor connections of all pairs, one phase per stream: MAX_UNAUTHENTICATED limits connections."""
        everybody = frozenset(self.links)
        self.dialer.unix_peers = frozenset(
            peer for peer in everybody if hosts[peer] == hosts[self.job.rank]
        )
        self.suspects.watch(self.links)
        for stream in range(self.streams):
            self.met.append(self.links)
            self.stage = ConnectionPhase(self.stage.generation, PHASE_STREAM + stream)
            self._meet(everybody)
        self.met.append(self.links)

    # Failures

    def _notify_others(self, error: MeshError) -> None:
        """Report the failure to every rank, best effort. Otherwise they would blame this rank.

        Uses links where the peer still waits for this rank's row, because a link works despite firewalls,
        and else a notice.
        """
        news = NEWS.pack(error.news, error.rank) + bytes(self.job.size)
        notified = {self.job.rank}
        for peer, link in self.links.items():
            awaits_row = self.stage.phase == PHASE_MESH and link.is_ready and not link.has_own_row
            if awaits_row and peer not in self.suspects:
                with contextlib.suppress(OSError):
                    send(link.sock, news)
                    notified.add(peer)
        notice = Notice(self.job.rank, self.stage.generation, error.news, error.rank)
        self.dialer.notify(sorted(set(range(self.job.size)) - notified), notice)

    def _close_links(self) -> None:
        for links in (*self.met, self.links):
            for link in links.values():
                link.sock.close()

    def _expire(self) -> Task:
        yield Wait(None, 0, self.deadline)
        while self.suspects:  # their notices take precedence
            yield from sleep(RETRY_S)
        rows = {peer: link.row for peer, link in self.links.items()}
        raise self.errors.expired(self.peers, rows, self.last_error)

    # Incoming

    def _receive_peer(self, stage: ConnectionPhase, peer: int, sock: socket.socket) -> None:
        if stage == self.stage and peer in self.peers:
            self._adopt(peer, sock)
        elif stage > self.stage:
            self.early.append(EarlyConnection(stage, peer, sock))
        else:
            sock.close()

    def _receive_notice(self, notice: Notice) -> None:
        """Handle a notice by its generation.

        A notice of the current generation raises its error. A notice of a later generation is kept, and a notice of an
        earlier generation is dropped.
        """
        if notice.generation == self.stage.generation:
            raise self.errors.reported(notice)
        if notice.generation > self.stage.generation:
            self.notices.append(notice)

    def _record_shortage(self, error: OSError) -> None:
        # The shortage may be why a missing rank is refused.
        for peer in self.peers.difference(self.links):
            self.last_error[peer] = error

    def _adopt(self, peer: int, sock: socket.socket) -> None:
        """Serve an authenticated connection of this phase, from a rank above this one."""
        self.suspects.clear(peer)
        old = self.links.pop(peer, None)
        if old is not None:  # the peer connects again after its first connection broke
            self.loop.cancel(self.serving[peer])
            old.sock.close()
        self._start_serving(peer, PeerLink(sock), check_memory)

    # Outgoing

    def _reach(self, peer: int) -> Task:
        """Connect to a rank below this one, with retries."""
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
        self._start_serving(peer, PeerLink(sock), offer_memory)

    def _reach_again(self, peer: int) -> Task:
        yield from sleep(RETRY_S)
        yield from self._reach(peer)

    def _may_reach_again(self, peer: int, link: PeerLink, error: OSError) -> bool:
        """Whether the accepting side may have ended a link before it read this rank's proof.

        It does so when it has just completed an earlier generation; the next one accepts the connection.
        """
        return peer < self.job.rank and isinstance(error, ConnectionError) and not link.has_answered

    def _introduce(self, peer: int, sock: socket.socket) -> Generator[Wait, None, bool]:
        """Run the handshake until the deadline: the other rank may call init() much later than this one."""
        return introduce(self.job, peer, self.stage, sock, self.deadline)

    def _probe(self, peer: int) -> Task:
        """Poll the listener of a higher rank until that rank has connected."""
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

    # Both directions

    def _start_serving(self, peer: int, link: PeerLink, prove: Proof) -> None:
        self.links[peer] = link
        self.serving[peer] = self._serve(peer, link, prove)
        self.loop.start(self.serving[peer])

    def _serve(self, peer: int, link: PeerLink, prove: Proof) -> Task:
        """Prove shared memory over an authenticated connection, then read the peer's row."""
        # Later than the deadline of `_expire()`, because its error is more precise.
        until = self.deadline + RETRY_S
        try:
            if self.stage.phase == PHASE_MESH and link.is_unix:
                link.shares_memory = yield from prove(link.sock, until)
            if self.stage.phase >= PHASE_STREAM and peer > self.job.rank:
                yield from read(link.sock, len(WELCOME), until)
            link.is_ready = True
            if self.stage.phase != PHASE_MESH:
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
            notice = Notice(peer, self.stage.generation, kind, about)
            if notice.is_valid(self.job):
                raise self.errors.reported(notice)
            self.suspects.add(peer, f"it sent news of kind {kind} about rank {about}")
            return
        link.streams = 1 + about
        link.row = message[NEWS.size :]


# ----------------------------------------------------------------------------------------------------
# Connections from this rank to the listeners of others.

# A notice needs one connect. Only a host that does not answer takes longer, and it would not receive the notice.
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
            except BlockingIOError:  # its backlog is full, so it is alive
                raise
            except OSError:  # not reachable by Unix socket after all
                pass
        return (yield from open_connection(*tcp_place(endpoint), until))

    def watch_listener(self, peer: int, on_open: Callable[[], object]) -> Task:
        """Hold a silent connection to a listener. The kernel resets it when the listener closes.

        The listener's rank closes it after 5 s, like any unauthenticated connection.

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
        """Send a notice to the listeners of some ranks, best effort, within NOTICE_S."""
        loop = EventLoop()
        try:
            for peer in peers:
                loop.start(self._notify(peer, notice))
            loop.run(loop.is_idle)
        finally:
            loop.close()

    def _notify(self, peer: int, notice: Notice) -> Task:
        with contextlib.suppress(OSError):  # the peer is gone, or cannot be reached
            sock = yield from self.dial(peer, time.monotonic() + NOTICE_S)
            with sock:
                send(sock, notice.to_bytes(self._job, peer))


# ----------------------------------------------------------------------------------------------------
# Authenticated connections to peers, and agreement of ranks over them.


@dataclass
class PeerLink:
    """Authenticated connection to a peer.

    Attributes:
        sock: the connection.
        shares_memory: whether both processes have proved that they can map the same memory.
        is_ready: whether the handshake is complete.
        row: by rank, 1 if the peer shares memory with it; None before the peer has sent it.
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
        """Whether a message of the peer shows that it has accepted this rank's proof."""
        return self.row is not None or (self.is_unix and self.is_ready)


@dataclass
class EarlyConnection:
    """Authenticated connection of a later phase."""

    stage: ConnectionPhase
    rank: int
    sock: socket.socket


def detach(links: Mapping[int, PeerLink], size: int) -> list[int]:
    """Detach one stream's blocking descriptors from its links, by rank. -1 means no link."""
    sockets = [-1] * size
    for peer, link in links.items():
        link.sock.setblocking(True)
        sockets[peer] = link.sock.detach()
    return sockets


def own_row(job: Job, links: Mapping[int, PeerLink]) -> bytes:
    """A byte per rank: 1 if it shares memory with this rank."""
    return bytes(rank == job.rank or links[rank].shares_memory for rank in range(job.size))


def agree_on_hosts(job: Job, links: Mapping[int, PeerLink]) -> tuple[int, ...]:
    """Number the hosts, by rank. If the ranks of a host do not all share memory, each rank counts as a host.

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


def check_streams(rank: int, streams: int, links: Mapping[int, PeerLink]) -> None:
    """Reject different numbers of streams, on every rank, so that no rank waits for missing streams.

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


# ----------------------------------------------------------------------------------------------------
# Errors of a failed rendezvous, as raised by this rank and reported to the others.


class MeshError(Exception):
    """Failure of a rendezvous, with the error for this rank and the notice for the others."""

    def __init__(self, cause: CollectiveError, news: int, rank: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.news = news
        self.rank = rank


@dataclass(frozen=True)
class RendezvousErrors:
    """Errors of one rank's rendezvous: missing ranks, their addresses, and the remedy.

    Attributes:
        job: the job as this rank knows it.
        endpoint: where this rank listens.
        timeout_s: how long it waits for the others.
    """

    job: Job
    endpoint: Endpoint
    timeout_s: float

    def reported(self, notice: Notice) -> MeshError:
        """Make the error for a failure reported by another rank."""
        teller, about = notice.teller, notice.about
        if notice.kind == NEWS_LATE:
            return self.late([about], [f"rank {teller} gave up waiting for rank {about}"])
        if about == self.job.rank:
            return self.lost({teller: "it lost its connection to this rank"})
        return self.lost({about: f"rank {teller} reports it"})

    def lost(self, causes: Mapping[int, object]) -> MeshError:
        """Make the error for lost ranks. `causes` holds the evidence by rank."""
        lines = [
            f"rank {peer} at {self.job.endpoints[peer]} is gone ({cause})"
            for peer, cause in sorted(causes.items())
        ]
        where = "its error in its own log" if len(lines) == 1 else "their errors in their own logs"
        text = (
            f"Rendezvous of rank {self.job.rank} at {self.endpoint}: {', '.join(lines)}. Look for "
            f"{where}; start the job again."
        )
        return MeshError(PeerLostError(text), NEWS_LOST, min(causes))

    def expired(
        self,
        peers: Collection[int],
        rows: Mapping[int, bytes | None],
        last_errors: Mapping[int, object],
    ) -> MeshError:
        """Make the error about missing ranks, or else about connected ranks waiting for others.

        Args:
            peers: all ranks that must connect.
            rows: row of each connected rank, or None before it has arrived.
            last_errors: the last error of connecting with a rank.
        """
        missing = [rank for rank in sorted(peers) if rank not in rows]
        waiting = [rank for rank in sorted(rows) if rows[rank] is None]
        lines = [self._missing_line(rank, last_errors.get(rank)) for rank in missing]
        if not missing:
            lines = [f"rank {r} at {self.job.endpoints[r]} still waits for others" for r in waiting]
        return self.late(missing or waiting or sorted(peers), lines)

    def _missing_line(self, rank: int, error: object) -> str:
        who = f"rank {rank} at {self.job.endpoints[rank]}"
        if rank < self.job.rank:
            return f"{who} has not answered ({error or 'no error'})"
        return f"{who} has not connected ({error or 'its port is open'})"

    def late(self, ranks: Sequence[int], lines: Sequence[str]) -> MeshError:
        """Make the error for late ranks. `lines` describes each, and the notice names the first."""
        text = (
            f"Rendezvous of rank {self.job.rank} at {self.endpoint}: not all of "
            f"{self.job.size} ranks connected within {self.timeout_s:g} s: {'; '.join(lines)}. Make sure that "
            "every rank calls init() and that the hosts reach each other on these ports "
            "(SPARKHVD_PORT_RANGE), or raise SPARKHVD_CONNECT_TIMEOUT_S."
        )
        return MeshError(CollectiveTimeoutError(text), NEWS_LATE, ranks[0])


# ----------------------------------------------------------------------------------------------------
# Suspects: peers that seem to be gone, with a grace before they are blamed.

# Time between two passes of the event loop that read what a leaving peer has sent.
_STAGE_S = 0.1
# A peer may have left because of another rank, and its notice is then in this rank's backlog. This many passes of the
# event loop, _STAGE_S apart, suffice to read it, also in a process that was stopped meanwhile.
_GRACE_TURNS = 5


class SuspectPeers:
    """Possibly lost peers. They are blamed after a grace, unless a notice gives the reason."""

    def __init__(self, loop: EventLoop, errors: RendezvousErrors) -> None:
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
        """Suspect a peer of being gone, with `cause` as evidence. The first cause counts."""
        self._causes.setdefault(peer, cause)
        if not self._has_grace:
            self._has_grace = True
            self._loop.start(self._blame())

    def clear(self, peer: int) -> None:
        """Clear the suspicion: the peer has connected again."""
        self._causes.pop(peer, None)

    def watch(self, links: Mapping[int, PeerLink]) -> None:
        """Suspect a peer when its link ends. Only its first link is watched."""
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
        yield from sleep(_STAGE_S)
        first = set(self._causes)  # peers suspected later may have left because of these
        for _ in range(_GRACE_TURNS - 1):
            yield from sleep(_STAGE_S)
        self._has_grace = False
        causes = {peer: cause for peer, cause in self._causes.items() if peer in first}
        if causes:  # else they have connected again
            raise self._errors.lost(causes)
        for peer, cause in self._causes.items():
            self.add(peer, cause)


# ----------------------------------------------------------------------------------------------------
# Proof that two processes can map the same memory.

TOKEN_BYTES = 32


def offer_memory(sock: socket.socket, until: float) -> Generator[Wait, None, bool]:
    """Run the connecting side: pass a memory file with a token and expect an answer inside it."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        descriptor = new_memfd("sparkhvd-proof")
    except OSError:  # memory files are forbidden here: use sockets, and notify the peer
        send(sock, token)
        yield from read(sock, TOKEN_BYTES, until)
        send(sock, b"\0")
        return False
    try:
        os.ftruncate(descriptor, 2 * TOKEN_BYTES)
        seal_against_shrinking(descriptor)
        os.pwrite(descriptor, token, 0)
        socket.send_fds(sock, [token], [descriptor])
        answer = yield from read(sock, TOKEN_BYTES, until)
        shared = hmac.compare_digest(os.pread(descriptor, TOKEN_BYTES, TOKEN_BYTES), answer)
    finally:
        os.close(descriptor)
    send(sock, bytes([shared]))
    return shared


def check_memory(sock: socket.socket, until: float) -> Generator[Wait, None, bool]:
    """Run the accepting side: map the memory file, compare its token, write an answer into it."""
    yield Wait(sock, selectors.EVENT_READ, until)
    token, descriptors, _, _ = socket.recv_fds(sock, TOKEN_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    answer = secrets.token_bytes(TOKEN_BYTES)
    shared = False
    try:
        if (
            len(token) < TOKEN_BYTES
        ):  # cut short or closed; a sender of this version never splits it
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        with contextlib.suppress(
            OSError, ValueError
        ):  # cannot map: no shared memory between the two
            if descriptors and _has_room(descriptors[0]):
                with mmap.mmap(descriptors[0], 2 * TOKEN_BYTES) as memory:
                    shared = hmac.compare_digest(memory[:TOKEN_BYTES], token)
                    memory[TOKEN_BYTES:] = answer
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    send(sock, answer)
    verdict = yield from read(sock, 1, until)
    return shared and verdict == b"\1"


def _has_room(descriptor: int) -> bool:
    """Whether the file holds both tokens and cannot shrink. Shrinking would kill a process that has mapped it."""
    return (
        is_sealed_against_shrinking(descriptor) and os.fstat(descriptor).st_size >= 2 * TOKEN_BYTES
    )
