"""Listening sockets of a rank, and socket addresses of endpoints."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.rendezvous.event_loop import (
    UNAUTHENTICATED_S,
    Address,
    EventLoop,
    Task,
    Wait,
    is_same_user,
    read,
    sleep,
)
from sparkhvd.rendezvous.handshake import (
    HELLO,
    NOTICE,
    NOTICE_MAGIC,
    ConnectionPhase,
    Endpoint,
    HandshakeSide,
    Notice,
    answer,
)
from sparkhvd.settings import Settings


class Listener:
    """TCP listener on one interface and, where possible, an abstract Unix listener.

    A context manager.
    """

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
        tcp = bind_tcp(address, settings)
        key = host_key()
        unix, name = _bind_unix() if key else (None, "")
        return cls(tcp, unix, Endpoint(address, tcp.getsockname()[1], key, name))

    @classmethod
    def from_filenos(cls, tcp_fd: int, unix_fd: int, endpoint: Endpoint) -> Listener:
        """Rebuild a listener from inherited descriptors. `unix_fd` is -1 without a Unix socket."""
        for descriptor in (tcp_fd, unix_fd):
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
        unix = socket.socket(fileno=unix_fd) if unix_fd >= 0 else None
        return cls(socket.socket(fileno=tcp_fd), unix, endpoint)

    def endpoint(self) -> Endpoint:
        return self._endpoint

    def filenos(self) -> tuple[int, int]:
        """Get the TCP and Unix descriptors for a child process. Close this listener afterwards.

        The Unix descriptor is -1 without a Unix listener.
        """
        return self._tcp.fileno(), -1 if self._unix is None else self._unix.fileno()

    def sockets(self) -> list[socket.socket]:
        return [self._tcp] if self._unix is None else [self._tcp, self._unix]

    def close(self) -> None:
        """Stop listening. The other ranks then see that this rank is gone."""
        for listening in self.sockets():
            listening.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bind_tcp(address: str, settings: Settings) -> socket.socket:
    """Listen on `address`, on a port of `settings.port_range`. The errors are those of `Listener.bind`."""
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
            f"{asked}: this address stands for every interface. Give the address of one interface."
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
        "(SPARKHVD_PORT_RANGE), or end the processes that hold its ports."
    )


def _bind_unix() -> tuple[socket.socket | None, str]:
    name = secrets.token_hex(16)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(unix_address(name))
        listening.listen(socket.SOMAXCONN)
    except OSError:  # a sandbox without Unix sockets: use TCP inside the host, too
        listening.close()
        return None, ""
    return listening, name


def unix_address(name: str) -> bytes:
    """Abstract Unix address of an endpoint's `unix_name`. It has no file and ends with the process."""
    return b"\0sparkhvd-" + name.encode()


def host_key() -> str:
    """Identify the boot, network namespace and user of this process, or return "" if unknown.

    Processes with the same key reach each other's abstract Unix sockets.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"
    except OSError:
        return ""


def tcp_place(endpoint: Endpoint) -> tuple[int, Address]:
    """Address family of an endpoint, and its address for `connect`."""
    info = socket.getaddrinfo(
        endpoint.address, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    return info[0][0], info[0][4]


# ----------------------------------------------------------------------------------------------------
# Incoming connections: accepted, authenticated and passed on, or closed.

MAX_UNAUTHENTICATED = 64
# Pause before accepting again after a failure, such as a lack of descriptors.
_RETRY_S = 0.1


@dataclass
class Acceptor:
    """Accepts connections during a rendezvous.

    Attributes:
        job: the ranks and their key.
        listening: sockets that accept connections.
        loop: runs the tasks.
        current_stage: returns the current phase; connections of earlier phases are closed.
        on_peer: called with phase, rank and connection of an authenticated peer; owns the connection.
        on_notice: called with an authenticated notice.
        on_shortage: called with the error when this process or host lacks a resource for an accept.
    """

    job: HandshakeSide
    listening: Sequence[socket.socket]
    loop: EventLoop
    current_stage: Callable[[], ConnectionPhase]
    on_peer: Callable[[ConnectionPhase, int, socket.socket], None]
    on_notice: Callable[[Notice], None]
    on_shortage: Callable[[OSError], None]
    # Tasks of unauthenticated connections, oldest first.
    _unauthenticated: dict[Task, None] = field(default_factory=dict, init=False)

    def start(self) -> None:
        """Accept connections whenever the loop runs."""
        for listening in self.listening:
            listening.setblocking(False)
            self.loop.start(self._accept(listening))

    def _accept(self, listening: socket.socket) -> Task:
        while True:
            yield Wait(listening, selectors.EVENT_READ, float("inf"))
            try:
                sock, _ = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.on_shortage(error)
                    yield from sleep(_RETRY_S)
                continue  # the peer has closed already
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                self.loop.cancel(oldest)
            task = self._authenticate(sock)
            self._unauthenticated[task] = None
            self.loop.start(task)

    def _authenticate(self, sock: socket.socket) -> Task:
        """Run the accepting side of the handshake. An error ends only this connection."""
        task = next(reversed(self._unauthenticated))
        peer: tuple[ConnectionPhase, int] | None = None
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
                if notice := Notice.from_bytes(hello + rest, self.job):
                    self.on_notice(notice)
                return
            peer = yield from answer(self.job, self.current_stage(), hello, sock, until)
        except OSError:  # includes the deadline
            return
        finally:
            self._unauthenticated.pop(task, None)
            if peer is None:
                sock.close()
        if peer is not None:
            self.on_peer(*peer, sock)


# ----------------------------------------------------------------------------------------------------
# Descriptors that the connections of a job need.

# Descriptors besides those per rank: unauthenticated connections, the engine's own, and the files of a program.
_OTHERS = 256


def _per_rank(streams: int) -> int:
    # Control and `streams` tensor connections, and temporarily the memory and eventfd of each rank on its host.
    return streams + 3


def most_ranks(limit: int, streams: int) -> int:
    """Largest number of ranks of a job, if each rank may open `limit` files."""
    return max(1, (limit - _OTHERS) // _per_rank(streams))


def make_room(size: int, streams: int) -> None:
    """Raise the soft limit of open files to the hard one if a job of this size may not fit below it."""
    import resource  # absent on Windows, where a Connect client may import this file

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and size > most_ranks(soft, streams):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
