"""How ranks find each other: from the endpoints of a job to authenticated sockets between every two ranks.

Threads: one. `connect()` runs a small event loop on non-blocking sockets in the caller's thread: one
generator per connection, each yields what it waits for. Nothing here is shared between threads.

Trust: a listener is reachable by anyone. Nothing but a hello of fixed size is read from a connection before both
sides have proved that they know the job's key; such a connection lives 5 s at most, 64 at a time (the
oldest goes first), and whatever it sends, it is closed and the job goes on. Proofs are HMAC-SHA256 over the
role, both ranks, both fresh nonces, the job, attempt, generation, byte order and versions, so they can be
neither reflected nor replayed. What follows is not encrypted.

Failure: a rank that cannot meet the others tells every one of them why before it leaves, over their link or else
by a notice into their listener, where it waits for ranks that come late. A notice is one message with a proof
over all it says and to whom; replayed, it repeats to the same rank what is true of the generation. So what a
rank has to say is there before its absence can be seen, and who sees an absence looks for notices first.

Shutdown: `connect()` closes every socket that it does not return, also when it fails. The listener stays
open for the next generation until `Listener.close()` or the end of the process.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import mmap
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    PreflightError,
)
from sparkhvd.settings import Settings

__all__ = [
    "Connections",
    "Endpoint",
    "Job",
    "Listener",
    "Rendezvous",
    "SingleRendezvous",
    "SocketRendezvous",
    "current",
    "in_process",
    "install",
]

# Both are part of every proof. A test compares them with the C header (`engine` may not be imported here).
ABI_VERSION = 1
WIRE_VERSION = 1

KEY_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 32
TOKEN_BYTES = 32
UNAUTHENTICATED_S = 5.0
MAX_UNAUTHENTICATED = 64
# A rank that has not come is asked this often whether its listener is still there.
PROBE_S = 0.5
RETRY_S = 0.1
# A peer that is gone may have left because of another, and its notice is then in this rank's backlog: this many
# turns of the event loop, RETRY_S apart, are enough to read it, also for a process that was stopped meanwhile.
GRACE_TURNS = 5
# A notice needs one connect; only a host that does not answer takes longer, and it hears nothing anyway.
NOTICE_S = 2.0

_MAGIC = b"sparkhvd"
_HELLO = struct.Struct(f"!8sIIB{NONCE_BYTES}s")  # magic, rank, generation, phase, nonce
_REPLY = struct.Struct(f"!{NONCE_BYTES}s{MAC_BYTES}s")
# A notice: magic, the rank that tells, generation, what, about whom, proof. Longer than a hello.
_NOTICE = struct.Struct(f"!8sIIBI{MAC_BYTES}s")
_NOTICE_MAGIC = b"sparkhvn"
_NEWS = struct.Struct("!BI")  # before the row: one of the next three, and the rank it is about
_NEWS_MET = 0
_NEWS_LOST = 1
_NEWS_LATE = 2
_PHASE_MESH = 0
_PHASE_TCP = 1  # replaces Unix links inside a host whose ranks turned out not to share memory


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens.

    Attributes:
        address: IPv4 or IPv6 address of one interface.
        port: TCP port.
        host_key: equal for processes that can reach each other's abstract Unix sockets; "" if unknown.
        unix_name: name of the abstract Unix socket in hex; "" if there is none.
    """

    address: str
    port: int
    host_key: str
    unix_name: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON object."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Endpoint:
        """The endpoint that `to_dict` wrote."""
        return cls(
            str(values["address"]),
            int(values["port"]),
            str(values["host_key"]),
            str(values["unix_name"]),
        )

    def __str__(self) -> str:
        return (
            f"[{self.address}]:{self.port}"
            if ":" in self.address
            else f"{self.address}:{self.port}"
        )


@dataclass(frozen=True)
class Job:
    """What a rank must know to meet the others of one attempt.

    Attributes:
        key: 32 random bytes that only the ranks of this attempt know.
        job_id: any name, the same on every rank.
        attempt: counts the launches of the job.
        rank: this rank.
        size: number of ranks.
        endpoints: where each rank listens, by rank.
    """

    key: bytes = field(repr=False)
    job_id: str
    attempt: int
    rank: int
    size: int
    endpoints: tuple[Endpoint, ...]

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise InvalidArgumentError(
                f"Job.key has {len(self.key)} bytes; it must have {KEY_BYTES}, from secrets.token_bytes()."
            )
        if not 0 <= self.rank < self.size or len(self.endpoints) != self.size:
            raise InvalidArgumentError(
                f"Job(rank={self.rank}, size={self.size}) with {len(self.endpoints)} endpoints; it needs one "
                "endpoint per rank and a rank below size."
            )

    def to_json(self) -> str:
        """Text with the key in it: hand it over by pipe, never in argv, environment or a log."""
        values = {**vars(self), "key": self.key.hex()}
        values["endpoints"] = [endpoint.to_dict() for endpoint in self.endpoints]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        values = json.loads(text)
        return cls(
            key=bytes.fromhex(values["key"]),
            job_id=str(values["job_id"]),
            attempt=int(values["attempt"]),
            rank=int(values["rank"]),
            size=int(values["size"]),
            endpoints=tuple(Endpoint.from_dict(e) for e in values["endpoints"]),
        )


@dataclass
class Connections:
    """One connected, authenticated socket per peer, as `Engine` takes them.

    Attributes:
        rank: this rank.
        size: number of ranks.
        hosts: index of the host of each rank; equal on all ranks. Ranks with the same index share memory.
        sockets: descriptor per peer, -1 for this rank; not inheritable. Owned by whoever holds this.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    sockets: list[int]

    def close(self) -> None:
        """Close every descriptor that nobody took."""
        for peer, descriptor in enumerate(self.sockets):
            if descriptor >= 0:
                os.close(descriptor)
            self.sockets[peer] = -1


class Rendezvous(Protocol):
    """A way for the ranks of one job to meet."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def settings(self) -> Settings:
        """The settings of the job; equal on every rank."""

    def connect(self) -> Connections:
        """Meet every other rank; each call is the next generation, so init after shutdown works.

        Every rank must call this. Raises CollectiveTimeoutError (a rank did not come within
        `Settings.connect_timeout_s`) or PeerLostError (a rank is gone), which name the rank.
        """


# --- Listening ---


class Listener:
    """A bound TCP listener on one interface and, where possible, an abstract Unix one. A context manager."""

    def __init__(self, tcp: socket.socket, unix: socket.socket | None, endpoint: Endpoint) -> None:
        self._tcp = tcp
        self._unix = unix
        self._endpoint = endpoint

    @classmethod
    def bind(cls, address: str, settings: Settings) -> Listener:
        """Listen on `address`, on a port of `settings.port_range`.

        Raises:
            InvalidArgumentError: the address stands for every interface.
            PreflightError: the address is not of this host, or every port is taken.
        """
        tcp = _bind_tcp(address, settings)
        host_key = _host_key()
        unix, name = _bind_unix() if host_key else (None, "")
        return cls(tcp, unix, Endpoint(address, tcp.getsockname()[1], host_key, name))

    @classmethod
    def from_filenos(cls, tcp_fd: int, unix_fd: int, endpoint: Endpoint) -> Listener:
        """The listener whose descriptors this process inherited; `unix_fd` is -1 if there is none."""
        for descriptor in (tcp_fd, unix_fd):
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
        unix = socket.socket(fileno=unix_fd) if unix_fd >= 0 else None
        return cls(socket.socket(fileno=tcp_fd), unix, endpoint)

    def endpoint(self) -> Endpoint:
        """Where the other ranks find this one."""
        return self._endpoint

    def filenos(self) -> tuple[int, int]:
        """Descriptors to pass to a child process (TCP, Unix or -1); close this listener afterwards."""
        return self._tcp.fileno(), -1 if self._unix is None else self._unix.fileno()

    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        return [self._tcp] if self._unix is None else [self._tcp, self._unix]

    def close(self) -> None:
        """Stop listening. The other ranks take that for the end of this one."""
        for listening in self.sockets():
            listening.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bind_tcp(address: str, settings: Settings) -> socket.socket:
    asked = f"Listener.bind({address!r})"
    try:
        info = socket.getaddrinfo(
            address, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidArgumentError(
            f"{asked}: {error}. Give the numeric IPv4 or IPv6 address of one interface."
        ) from error
    if not address or ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise InvalidArgumentError(
            f"{asked}: this stands for every interface. Give the address of the one in use."
        )
    family, _, _, _, place = info[0]
    for port in settings.ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Connections of a finished job linger in TIME_WAIT; they must not block the port range.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((place[0], port, *place[2:]))
            listening.listen(socket.SOMAXCONN)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise PreflightError(
                f"{asked}: cannot listen on port {port}: {error}. Give an address of this host and ports "
                "that this user may bind."
            ) from error
        return listening
    raise PreflightError(
        f"{asked}: every port of port_range={settings.port_range!r} is taken on this host. Widen the range "
        "(SPARKHVD_PORT_RANGE), or end the processes that hold it."
    )


def _bind_unix() -> tuple[socket.socket | None, str]:
    name = secrets.token_hex(16)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(_unix_address(name))
        listening.listen(socket.SOMAXCONN)
    except OSError:  # a sandbox without Unix sockets: TCP serves inside the host too
        listening.close()
        return None, ""
    return listening, name


def _unix_address(name: str) -> bytes:
    return b"\0sparkhvd-" + name.encode()


def _host_key() -> str:
    """Boot, network namespace and user: who shares all three can meet on an abstract Unix socket."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"
    except OSError:
        return ""


# --- Proofs ---


def _mac(job: Job, role: bytes, *, client: int, server: int, turn: _Turn, nonces: bytes) -> bytes:
    """What the client (b"C") or the server (b"S") must show."""
    job_id = job.job_id.encode()
    context = struct.pack(
        f"!16s1s1sIIIIIIIB{len(job_id)}s",
        b"sparkhvd proof 1",
        role,
        sys.byteorder[:1].encode(),
        WIRE_VERSION,
        ABI_VERSION,
        job.attempt,
        job.size,
        client,
        server,
        turn.generation,
        turn.phase,
        job_id,
    )
    # Every field has a fixed length but the id, which ends where the nonces of fixed length begin.
    return hmac.digest(job.key, context + nonces, "sha256")


@dataclass(frozen=True)
class _Notice:
    """Why a generation has failed, as one rank tells another."""

    teller: int
    generation: int
    what: int
    about: int

    def to_bytes(self, job: Job, to: int) -> bytes:
        """The message for rank `to`."""
        proof = self._proof(job, to)
        return _NOTICE.pack(
            _NOTICE_MAGIC, self.teller, self.generation, self.what, self.about, proof
        )

    @classmethod
    def from_bytes(cls, message: bytes, job: Job) -> _Notice | None:
        """What the message says to rank `job.rank`; None if its proof is wrong."""
        _, teller, generation, what, about, proof = _NOTICE.unpack(message)
        notice = cls(teller, generation, what, about)
        return notice if hmac.compare_digest(proof, notice._proof(job, job.rank)) else None

    def _proof(self, job: Job, to: int) -> bytes:
        job_id = job.job_id.encode()
        context = struct.pack(
            f"!16s1sIIIIIIIBI{len(job_id)}s",
            b"sparkhvd notice1",  # another first field than in the proofs of a handshake
            sys.byteorder[:1].encode(),
            WIRE_VERSION,
            ABI_VERSION,
            job.attempt,
            job.size,
            self.teller,
            to,
            self.generation,
            self.what,
            self.about,
            job_id,
        )
        return hmac.digest(job.key, context, "sha256")


@dataclass(frozen=True, order=True)
class _Turn:
    """Which meeting a connection is for; a later one than the listener is at waits for it."""

    generation: int
    phase: int


# --- A small event loop ---


@dataclass(frozen=True)
class _Wait:
    """What a task waits for: a socket, or only the time."""

    sock: socket.socket | None
    events: int
    until: float


_Task = Generator[_Wait, None, None]


class _Loop:
    """Runs tasks until a condition holds. An exception that a task does not catch ends the run."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[_Task, _Wait] = {}

    def start(self, task: _Task) -> None:
        self._resume(task, task.__next__)

    def is_idle(self) -> bool:
        return not self._tasks

    def run(self, done: Callable[[], bool]) -> None:
        while not done():
            now = time.monotonic()
            until = min((wait.until for wait in self._tasks.values()), default=now)
            for key, _ in self._selector.select(max(0.0, until - now)):
                task: _Task = key.data
                self._resume(task, task.__next__)
            now = time.monotonic()
            for task, wait in list(self._tasks.items()):
                if wait.until <= now and self._tasks.get(task) is wait:
                    expire = partial(task.throw, TimeoutError(errno.ETIMEDOUT, "timed out"))
                    self._resume(task, task.__next__ if wait.sock is None else expire)

    def close(self) -> None:
        for task in list(self._tasks):
            task.close()
        self._tasks.clear()
        self._selector.close()

    def cancel(self, task: _Task) -> None:
        self._forget(task)
        task.close()

    def _resume(self, task: _Task, step: Callable[[], _Wait]) -> None:
        self._forget(task)
        try:
            wait = step()
        except StopIteration:
            return
        self._tasks[task] = wait
        if wait.sock is not None:
            self._selector.register(wait.sock, wait.events, task)

    def _forget(self, task: _Task) -> None:
        wait = self._tasks.pop(task, None)
        if wait is not None and wait.sock is not None:
            with contextlib.suppress(KeyError, ValueError):  # closed meanwhile
                self._selector.unregister(wait.sock)


def _sleep(seconds: float) -> _Task:
    yield _Wait(None, 0, time.monotonic() + seconds)


def _read(sock: socket.socket, size: int, until: float) -> Generator[_Wait, None, bytes]:
    data = b""
    while len(data) < size:
        yield _Wait(sock, selectors.EVENT_READ, until)
        with contextlib.suppress(BlockingIOError):
            part = sock.recv(size - len(data))
            if not part:
                raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
            data += part
    return data


def _send(sock: socket.socket, data: bytes) -> None:
    """Every message here fits a fresh socket's buffer; the limit is for a peer that reads nothing."""
    sock.settimeout(UNAUTHENTICATED_S)
    try:
        sock.sendall(data)
    finally:
        sock.setblocking(False)


def _connect(family: int, place: Any, until: float) -> Generator[_Wait, None, socket.socket]:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(place)
        if code == errno.EINPROGRESS:
            yield _Wait(sock, selectors.EVENT_WRITE, until)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


# --- Proof that two processes can map the same memory ---


def _offer_memory(sock: socket.socket, until: float) -> Generator[_Wait, None, bool]:
    """The connecting side: passes a memory file with a token and expects an answer inside it."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        descriptor = os.memfd_create("sparkhvd-proof", os.MFD_CLOEXEC)
    except OSError:  # forbidden here: say so, and use sockets
        _send(sock, token)
        yield from _read(sock, TOKEN_BYTES, until)
        _send(sock, b"\0")
        return False
    try:
        os.ftruncate(descriptor, 2 * TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
        socket.send_fds(sock, [token], [descriptor])
        answer = yield from _read(sock, TOKEN_BYTES, until)
        shared = hmac.compare_digest(os.pread(descriptor, TOKEN_BYTES, TOKEN_BYTES), answer)
    finally:
        os.close(descriptor)
    _send(sock, bytes([shared]))
    return shared


def _check_memory(sock: socket.socket, until: float) -> Generator[_Wait, None, bool]:
    """The accepting side: maps what was passed, compares the token, writes an answer into it."""
    yield _Wait(sock, selectors.EVENT_READ, until)
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
            if descriptors and os.fstat(descriptors[0]).st_size >= 2 * TOKEN_BYTES:
                with mmap.mmap(descriptors[0], 2 * TOKEN_BYTES) as memory:
                    shared = hmac.compare_digest(memory[:TOKEN_BYTES], token)
                    memory[TOKEN_BYTES:] = answer
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    _send(sock, answer)
    verdict = yield from _read(sock, 1, until)
    return shared and verdict == b"\1"


# --- The meeting ---


@dataclass
class _Link:
    """An authenticated connection to a peer."""

    sock: socket.socket
    shares_memory: bool = False
    is_ready: bool = False
    row: bytes | None = None  # with whom the peer shares memory
    has_my_row: bool = False

    @property
    def is_unix(self) -> bool:
        return self.sock.family == socket.AF_UNIX


@dataclass
class _Parked:
    """An authenticated connection of a later turn."""

    turn: _Turn
    rank: int
    sock: socket.socket


class _MeetingError(Exception):
    """Carries the error of this rank and what the others are told about it."""

    def __init__(self, cause: CollectiveError, news: int, rank: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.news = news
        self.rank = rank


_Proof = Callable[[socket.socket, float], Generator[_Wait, None, bool]]


class _Meeting:
    """One rank's part in one generation: links to all peers, and agreement on who shares memory."""

    def __init__(
        self,
        job: Job,
        listener: Listener,
        settings: Settings,
        generation: int,
        parked: list[_Parked],
        notices: list[_Notice],
    ) -> None:
        self.job = job
        self.listener = listener
        self.timeout_s = settings.connect_timeout_s
        self.deadline = time.monotonic() + settings.connect_timeout_s
        self.turn = _Turn(generation, _PHASE_MESH)
        self.parked = parked
        self.notices = notices  # of this and of later generations
        self.loop = _Loop()
        self.links: dict[int, _Link] = {}
        self.serving: dict[int, _Task] = {}
        self.peers: frozenset[int] = frozenset(r for r in range(job.size) if r != job.rank)
        # Incoming connections that have proved nothing, oldest first.
        self.strangers: dict[_Task, None] = {}
        self.last_error: dict[int, OSError | str] = {}
        # Peers that seem to be gone, and what shows it; blamed after a grace.
        self.gone: dict[int, object] = {}
        self.has_grace = False

    def run(self) -> Connections:
        """Meets everybody. Closes everything if it fails."""
        try:
            for notice in self.notices:
                if notice.generation == self.turn.generation:
                    raise self._reported(notice)
            self._start_listening()
            mesh = self._meet(self.peers)
            hosts = self._agreed_hosts(mesh)
            self._replace_unix_links(mesh, hosts)
        except _MeetingError as error:
            self.loop.close()  # ends the tasks that use the links
            self._tell_the_others(error)
            self._close_links()
            raise error.cause from error.__cause__
        except BaseException:
            self._close_links()
            raise
        finally:
            self.loop.close()
        sockets = [-1] * self.job.size
        for peer, link in self.links.items():
            link.sock.setblocking(True)
            sockets[peer] = link.sock.detach()
        return Connections(self.job.rank, self.job.size, hosts, sockets)

    def _meet(self, peers: frozenset[int]) -> dict[int, _Link]:
        """Links to `peers` for the current turn; in the first phase also everybody's row."""
        self.peers = peers
        self.links = {}
        for parked in [p for p in self.parked if p.turn == self.turn]:
            self.parked.remove(parked)
            self._adopt(parked.rank, parked.sock)
        for peer in sorted(peers):
            self.loop.start(self._reach(peer) if peer < self.job.rank else self._probe(peer))
        self.loop.start(self._expire())
        self.loop.run(self._is_complete)
        return dict(self.links)

    def _is_complete(self) -> bool:
        ready = (
            not self.gone
            and len(self.links) == len(self.peers)
            and all(link.is_ready for link in self.links.values())
        )
        if not ready or self.turn.phase == _PHASE_TCP:
            return ready
        row = bytes(
            peer == self.job.rank or self.links[peer].shares_memory for peer in range(self.job.size)
        )
        for peer, link in self.links.items():
            if not link.has_my_row:
                link.has_my_row = True
                try:
                    _send(link.sock, _NEWS.pack(_NEWS_MET, 0) + row)
                except OSError as error:
                    self._suspect(peer, error)
        return not self.gone and all(link.row is not None for link in self.links.values())

    def _agreed_hosts(self, mesh: dict[int, _Link]) -> tuple[int, ...]:
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

    def _replace_unix_links(self, mesh: dict[int, _Link], hosts: tuple[int, ...]) -> None:
        """Between ranks that do not share memory the engine expects TCP."""
        split = frozenset(
            peer
            for peer, link in mesh.items()
            if link.is_unix and hosts[peer] != hosts[self.job.rank]
        )
        if split:
            self.turn = _Turn(self.turn.generation, _PHASE_TCP)
            for peer, link in mesh.items():
                # A peer of this phase closes its old link when it is done; its listener shows whether it lives.
                if peer not in split:
                    self.loop.start(self._watch(peer, link.sock))
            try:
                replaced = self._meet(split)
            except BaseException:
                for peer, link in mesh.items():
                    self.links.setdefault(peer, link)
                    if self.links[peer] is not link:
                        link.sock.close()
                raise
            # The loop still watches the old sockets; end that before they are closed.
            self.loop.close()
            for peer in split:
                mesh[peer].sock.close()
            mesh.update(replaced)
        self.links = mesh

    # Failures

    def _suspect(self, peer: int, cause: object) -> None:
        """A peer seems to be gone. It is blamed after a grace, unless a notice says why it left."""
        self.gone.setdefault(peer, cause)
        if not self.has_grace:
            self.has_grace = True
            self.loop.start(self._blame())

    def _blame(self) -> _Task:
        for _ in range(GRACE_TURNS):
            yield from _sleep(RETRY_S)
        self.has_grace = False
        if self.gone:  # else it has come again
            raise self._lost(self.gone)

    def _reported(self, notice: _Notice) -> _MeetingError:
        """What this rank raises when another one tells why it failed."""
        teller, about = notice.teller, notice.about
        if notice.what == _NEWS_LATE:
            return self._late([about], [f"rank {teller} gave up waiting for rank {about}"])
        if about == self.job.rank:
            return self._lost({teller: "it lost its connection to this rank"})
        return self._lost({about: f"rank {teller} reports it"})

    def _lost(self, causes: Mapping[int, object]) -> _MeetingError:
        lines = [
            f"rank {peer} at {self.job.endpoints[peer]} is gone ({cause})"
            for peer, cause in sorted(causes.items())
        ]
        where = "its error in its own log" if len(lines) == 1 else "their errors in their own logs"
        text = (
            f"Rendezvous of rank {self.job.rank} at {self.listener.endpoint()}: {', '.join(lines)}. Look for "
            f"{where}; start the job again."
        )
        return _MeetingError(PeerLostError(text), _NEWS_LOST, min(causes))

    def _late(self, ranks: Sequence[int], lines: Sequence[str]) -> _MeetingError:
        text = (
            f"Rendezvous of rank {self.job.rank} at {self.listener.endpoint()}: not all of "
            f"{self.job.size} ranks came within {self.timeout_s:g} s: {'; '.join(lines)}. Make sure that "
            "every rank calls init() and that the hosts reach each other on these ports "
            "(SPARKHVD_PORT_RANGE), or raise SPARKHVD_CONNECT_TIMEOUT_S."
        )
        return _MeetingError(CollectiveTimeoutError(text), _NEWS_LATE, ranks[0])

    def _tell_the_others(self, error: _MeetingError) -> None:
        """Best effort, NOTICE_S at most: without it they would name this rank, which only reports.

        Over links where the peer still waits for this rank's row, because a link is there whatever firewalls
        forbid; else by a notice.
        """
        news = _NEWS.pack(error.news, error.rank) + bytes(self.job.size)
        told = {self.job.rank}
        for peer, link in self.links.items():
            awaits_row = self.turn.phase == _PHASE_MESH and link.is_ready and not link.has_my_row
            if awaits_row and peer not in self.gone:
                with contextlib.suppress(OSError):
                    _send(link.sock, news)
                    told.add(peer)
        notice = _Notice(self.job.rank, self.turn.generation, error.news, error.rank)
        loop = _Loop()
        try:
            for peer in sorted(set(range(self.job.size)) - told):
                loop.start(self._notify(peer, notice))
            loop.run(loop.is_idle)
        finally:
            loop.close()

    def _notify(self, peer: int, notice: _Notice) -> _Task:
        with contextlib.suppress(OSError):  # the other is gone, or cannot be reached
            sock = yield from self._dial(peer, time.monotonic() + NOTICE_S)
            with sock:
                _send(sock, notice.to_bytes(self.job, peer))

    def _close_links(self) -> None:
        for link in self.links.values():
            link.sock.close()

    def _expire(self) -> _Task:
        yield _Wait(None, 0, self.deadline)
        if self.gone:
            raise self._lost(self.gone)
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
        raise self._late(missing or waiting or sorted(self.peers), lines)

    # Incoming

    def _start_listening(self) -> None:
        for listening in self.listener.sockets():
            listening.setblocking(False)
            self.loop.start(self._accept(listening))

    def _accept(self, listening: socket.socket) -> _Task:
        while True:
            yield _Wait(listening, selectors.EVENT_READ, float("inf"))
            try:
                sock, _ = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    yield from _sleep(RETRY_S)
                continue  # the other side has gone again
            if len(self.strangers) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                self.loop.cancel(oldest)
            task = self._greet(sock)
            self.strangers[task] = None
            self.loop.start(task)

    def _greet(self, sock: socket.socket) -> _Task:
        """The accepting side of the handshake. Whatever goes wrong ends this connection and nothing else."""
        task = next(reversed(self.strangers))
        known = False
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            elif not _is_same_user(sock):
                return
            until = time.monotonic() + UNAUTHENTICATED_S
            hello = yield from _read(sock, _HELLO.size, until)
            if hello.startswith(_NOTICE_MAGIC):
                rest = yield from _read(sock, _NOTICE.size - _HELLO.size, until)
                self._hear(_Notice.from_bytes(hello + rest, self.job))
                return
            magic, client, generation, phase, nonce = _HELLO.unpack(hello)
            turn = _Turn(generation, phase)
            is_expected = magic == _MAGIC and self.job.rank < client < self.job.size
            if not is_expected or turn < self.turn:
                return
            nonces = nonce + secrets.token_bytes(NONCE_BYTES)

            def mac(role: bytes) -> bytes:
                return _mac(
                    self.job, role, client=client, server=self.job.rank, turn=turn, nonces=nonces
                )

            _send(sock, _REPLY.pack(nonces[NONCE_BYTES:], mac(b"S")))
            proof = yield from _read(sock, MAC_BYTES, until)
            known = hmac.compare_digest(proof, mac(b"C"))
        except OSError:  # includes the deadline
            return
        finally:
            self.strangers.pop(task, None)
            if not known:
                sock.close()
        if not known:
            return
        if turn == self.turn and client in self.peers:
            self._adopt(client, sock)
        elif turn > self.turn:
            self.parked.append(_Parked(turn, client, sock))
        else:
            sock.close()

    def _hear(self, notice: _Notice | None) -> None:
        """A notice: of this generation, of a later one, or too late to matter; None if it is forged."""
        if notice is None or notice.generation < self.turn.generation:
            return
        if notice.generation == self.turn.generation:
            raise self._reported(notice)
        self.notices.append(notice)

    def _adopt(self, peer: int, sock: socket.socket) -> None:
        """An authenticated connection of this turn, from a rank above this one."""
        self.gone.pop(peer, None)
        old = self.links.pop(peer, None)
        if old is not None:  # it came back after its first connection broke
            self.loop.cancel(self.serving[peer])
            old.sock.close()
        self._start_serving(peer, _Link(sock), _check_memory)

    # Outgoing

    def _reach(self, peer: int) -> _Task:
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
            yield from _sleep(RETRY_S)
        self._start_serving(peer, _Link(sock), _offer_memory)

    def _dial(self, peer: int, until: float) -> Generator[_Wait, None, socket.socket]:
        endpoint = self.job.endpoints[peer]
        if self.turn.phase == _PHASE_MESH and self._is_same_host(peer):
            try:
                sock = yield from _connect(socket.AF_UNIX, _unix_address(endpoint.unix_name), until)
                if _is_same_user(sock):
                    return sock
                sock.close()
            except BlockingIOError:  # its backlog is full: it is there
                raise
            except OSError:  # not reachable that way after all
                pass
        return (yield from _connect(*_tcp_place(endpoint), until))

    def _introduce(self, peer: int, sock: socket.socket) -> Generator[_Wait, None, bool]:
        """The connecting side of the handshake. The other rank may call init() much later than this one."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        me = self.job.rank
        _send(sock, _HELLO.pack(_MAGIC, me, self.turn.generation, self.turn.phase, nonce))
        reply = yield from _read(sock, _REPLY.size, self.deadline)
        theirs, proof = _REPLY.unpack(reply)
        context: dict[str, Any] = {
            "client": me,
            "server": peer,
            "turn": self.turn,
            "nonces": nonce + theirs,
        }
        if not hmac.compare_digest(proof, _mac(self.job, b"S", **context)):
            return False
        _send(sock, _mac(self.job, b"C", **context))
        return True

    def _probe(self, peer: int) -> _Task:
        """Until a rank above this one has come: is its listener still there?

        A silent connection waits in its backlog; the kernel resets it when the listener closes. A rank that
        listens already closes it after 5 s, as it does with any stranger.
        """
        family, place = _tcp_place(self.job.endpoints[peer])
        while True:
            yield from _sleep(PROBE_S)
            if peer in self.links:
                return
            sock = None
            try:
                sock = yield from _connect(family, place, time.monotonic() + UNAUTHENTICATED_S)
                self.last_error.pop(peer, None)
                yield _Wait(sock, selectors.EVENT_READ, float("inf"))
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

    def _start_serving(self, peer: int, link: _Link, prove: _Proof) -> None:
        self.links[peer] = link
        self.serving[peer] = self._serve(peer, link, prove)
        self.loop.start(self.serving[peer])

    def _serve(self, peer: int, link: _Link, prove: _Proof) -> _Task:
        """An authenticated connection: proof of shared memory, then the peer's row."""
        # Later than _expire(), which knows more.
        until = self.deadline + RETRY_S
        try:
            if link.is_unix:
                link.shares_memory = yield from prove(link.sock, until)
            link.is_ready = True
            if self.turn.phase == _PHASE_TCP:
                return
            news = yield from _read(link.sock, _NEWS.size + self.job.size, until)
        except OSError as error:
            self._suspect(peer, error)
            return
        what, about = _NEWS.unpack_from(news)
        if what != _NEWS_MET:
            raise self._reported(_Notice(peer, self.turn.generation, what, about))
        link.row = news[_NEWS.size :]

    def _watch(self, peer: int, sock: socket.socket) -> _Task:
        """Notices the end of a peer; leaves what it sends to the engine."""
        yield _Wait(sock, selectors.EVENT_READ, float("inf"))
        try:
            is_open = bool(sock.recv(1, socket.MSG_PEEK))
        except OSError as error:
            self._suspect(peer, error)
            return
        if not is_open:
            self._suspect(peer, "closed by the other side")


def _tcp_place(endpoint: Endpoint) -> tuple[int, Any]:
    info = socket.getaddrinfo(
        endpoint.address, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    return info[0][0], info[0][4]


class SocketRendezvous:
    """Meets the ranks of a job on their published endpoints.

    Rank i connects to every rank below it and accepts from every rank above it, so each pair has one
    connection: an abstract Unix socket if both are on one host, else TCP. Ranks of one host that prove to
    each other that they can map the same memory get one host index; if any pair of them cannot, each is
    treated as a host of its own.

    Args:
        job: the same on every rank, but for `rank`.
        listener: the one whose endpoint is `job.endpoints[job.rank]`; stays open.
        settings: the same on every rank.
    """

    def __init__(self, job: Job, listener: Listener, settings: Settings) -> None:
        self.job = job
        self.rank = job.rank
        self.size = job.size
        self.settings = settings
        self._listener = listener
        self._generation = 0
        self._parked: list[_Parked] = []
        self._notices: list[_Notice] = []
        # A forked child (a DataLoader worker) must not keep the port of a dead rank open.
        _close_in_children()
        _open_rendezvous.add(self)

    def connect(self) -> Connections:
        """Meet every other rank; see `Rendezvous.connect`."""
        generation = self._generation
        self._generation += 1
        for parked in [p for p in self._parked if p.turn.generation < generation]:
            self._parked.remove(parked)
            parked.sock.close()
        self._notices[:] = [n for n in self._notices if n.generation >= generation]
        meeting = _Meeting(
            self.job, self._listener, self.settings, generation, self._parked, self._notices
        )
        return meeting.run()

    def close(self) -> None:
        """Stop listening, and close connections of generations that this rank never asked for."""
        for parked in self._parked:
            parked.sock.close()
        self._parked.clear()
        self._listener.close()


_open_rendezvous: weakref.WeakSet[SocketRendezvous] = weakref.WeakSet()


def _close_all() -> None:
    for rendezvous in list(_open_rendezvous):
        rendezvous.close()


@cache
def _close_in_children() -> None:
    os.register_at_fork(after_in_child=_close_all)


class SingleRendezvous:
    """The meeting of one rank with itself."""

    def __init__(self, settings: Settings) -> None:
        self.rank = 0
        self.size = 1
        self.settings = settings

    def connect(self) -> Connections:
        """No connections."""
        return Connections(0, 1, (0,), [-1])


class _Hall:
    """The socket pairs of ranks in one process, made when the first rank of a generation comes."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        self.hosts = hosts
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, int], list[socket.socket | None]] = {}  # by generation and rank

    def take(self, generation: int, rank: int) -> list[int]:
        with self._lock:
            if (generation, rank) not in self._rows:
                self._make(generation)
            row = self._rows.pop((generation, rank))
        return [-1 if sock is None else sock.detach() for sock in row]

    def _make(self, generation: int) -> None:
        size = len(self.hosts)
        rows: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
        for a in range(size):
            for b in range(a):
                pair = socket.socketpair() if self.hosts[a] == self.hosts[b] else _tcp_pair()
                rows[a][b], rows[b][a] = pair
        self._rows.update({(generation, rank): row for rank, row in enumerate(rows)})


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server, address = listening.accept()
        if address != client.getsockname():  # somebody else on this machine was faster
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
        sockets = self._hall.take(generation, self.rank)
        return Connections(self.rank, self.size, self._hall.hosts, sockets)


def in_process(
    size: int, hosts: Sequence[int] | None = None, settings: Settings | None = None
) -> list[Rendezvous]:
    """The rendezvous of ranks that are threads of this process, by rank.

    Args:
        size: number of ranks.
        hosts: index of the host of each rank, to simulate several; None puts all on one. Ranks of one host
            get Unix sockets, others TCP.
        settings: None means the defaults.
    """
    indices = tuple(hosts) if hosts is not None else (0,) * size
    if len(indices) != size:
        raise InvalidArgumentError(f"in_process(size={size}): hosts has {len(indices)} entries.")
    hall = _Hall(indices)
    settings = settings or Settings()
    return [_InProcessRendezvous(hall, rank, settings) for rank in range(size)]


# The process's own rendezvous: at most one.
_installed: list[Rendezvous] = []


def install(rendezvous: Rendezvous | None) -> None:
    """Set what `current()` returns; called by whoever started this process, before user code."""
    _installed[:] = [] if rendezvous is None else [rendezvous]


def current() -> Rendezvous | None:
    """The rendezvous that was installed in this process; None if nobody launched it."""
    return _installed[0] if _installed else None
