"""Exchange of a text of every rank, through rank 0.

Rank 0 listens for the others at a `MeetingPoint`: an abstract Unix socket if they share a host, else a TCP port. Each
other rank sends its text over an authenticated connection and receives all texts. It is used if a launcher gives ranks
only their numbers. With a `local` master it replaces Spark's `allGather`, which takes a second.

**Trust**: connections authenticate each other as ranks do (`rendezvous`). On a Unix socket, whose key is not secret,
the kernel names the peer's user, and other users are refused. Texts are neither encrypted nor authenticated
individually.

**Failure**: if a rank ends while others wait for it, the connected ranks raise an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import selectors
import socket
import stat
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.interfaces import is_loopback
from sparkhvd.rendezvous import Endpoint, Job
from sparkhvd.rendezvous.event_loop import (
    UNAUTHENTICATED_S,
    Address,
    EventLoop,
    Task,
    Wait,
    is_same_user,
    open_connection,
    receive_frame,
    send,
    sleep,
)
from sparkhvd.rendezvous.handshake import KEY_BYTES, SERVICE_STAGE, ConnectionPhase, introduce
from sparkhvd.rendezvous.listener import Acceptor
from sparkhvd.settings import Settings
from sparkhvd.wire import frame_of, read_json, rebuild

_LONGEST_S = 24.0 * 86400  # longest wait of a selector, in whole days
# Time in which a rank may connect again.
_AGAIN_S = 1.0
# Pause between two attempts to reach rank 0.
_PAUSE_UNIX_S, _PAUSE_TCP_S = 0.005, 0.1
# Time for which a rank tries again if it reaches only processes with another key.
_REFUSED_S = 10.0
# Time after which a waiting rank prints its first line, and time between its later lines.
_SAY_AFTER_S, _SAY_AGAIN_S = 8.0, 60.0
_ADVICE = "Look for the reason in Spark's log."


@dataclass(frozen=True)
class MeetingPoint:
    """Address of rank 0 for the connections of the other ranks.

    Attributes:
        name: distinguishes this gathering from others; names the abstract Unix socket if there is no port.
        key: 32 bytes with which the ranks authenticate.
        host: of rank 0, as the others reach it; "" for the Unix socket.
        ports: rank 0 takes the first free one.
    """

    name: str
    key: bytes = field(repr=False)
    host: str = ""
    ports: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.ports:
            return "a Unix socket of this host"
        last = f"-{self.ports[-1]}" if len(self.ports) > 1 else ""
        return f"{self.host}, port {self.ports[0]}{last}"

    def job(self, rank: int, size: int) -> Job:
        """The ranks as a job, for the handshake."""
        return Job(self.key, self.name, 0, rank, size, (Endpoint("", 0, "", ""),) * size)

    def addresses(self) -> list[tuple[int, Address]]:
        """List the possible socket families and addresses of rank 0's listener.

        Raises:
            OSError: the host has no address (yet).
        """
        if not self.ports:
            return [(socket.AF_UNIX, b"\0" + self.name.encode())]
        found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        places = dict.fromkeys((family, address) for family, _, _, _, address in found)
        return [(f, (a[0], port, *a[2:])) for port in self.ports for f, a in places]

    def listen(self) -> tuple[socket.socket, str]:
        """Listen as rank 0. Return the socket, and the problem with the host's name or "".

        Raises:
            OSError: every port is taken.
        """
        if not self.ports:
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(b"\0" + self.name.encode())
            listening.listen(socket.SOMAXCONN)
            return listening, ""
        places: list[tuple[int, Address]] = []
        problem = ""
        try:
            places = [place for place in self.addresses() if not is_loopback(str(place[1][0]))]
        except OSError as error:
            problem = f"{self.host} has no address: {error}"
        for family, address in places:
            with contextlib.suppress(OSError):
                return _serve(family, address), problem
        # On rank 0's host its name may mean the loopback interface, or an address that is forwarded to the host.
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        for port in self.ports:
            with contextlib.suppress(OSError):
                return _serve(family, ("", port)), problem
        raise OSError(errno.EADDRINUSE, f"every port of {self} is taken")


def _serve(family: int, address: Address) -> socket.socket:
    is_any = address[0] == ""
    return socket.create_server(
        address,
        family=family,
        backlog=socket.SOMAXCONN,
        dualstack_ipv6=is_any and family == socket.AF_INET6,
    )


def on_this_host(name: str) -> MeetingPoint:
    """Make a meeting point at an abstract Unix socket.

    The handshake rejects other jobs, and the kernel other users.
    """
    return MeetingPoint(name, hashlib.sha256(name.encode()).digest())


def name_of(key: str, job_id: str, attempt: int) -> str:
    """Compute the Unix socket's name for a launch attempt. This requires the attempt's key."""
    text = f"sparkhvd tasks {job_id} {attempt}".encode()
    return "sparkhvd-tasks-" + hmac.digest(bytes.fromhex(key), text, "sha256").hex()


def gather(
    point: MeetingPoint, rank: int, size: int, text: str, timeout_s: float, advice: str = _ADVICE
) -> list[str]:
    """Gather the texts of all ranks on every rank, by rank. All ranks must call it.

    Args:
        point: where rank 0 waits; the same on every rank.
        rank: this one.
        size: number of ranks.
        text: this rank's.
        timeout_s: longest wait.
        advice: what to do if a rank is missing.

    Raises:
        PreflightError: a rank did not connect in time, or has ended.
        OSError: rank 0 cannot listen.
    """
    kind = _Root if rank == 0 else _Peer
    with contextlib.closing(kind(point, rank, size, text, timeout_s)) as gathering:
        try:
            return gathering.run()
        except TimeoutError as e:
            raise PreflightError(
                f"Rank {rank} waited {timeout_s:g} s (start_timeout_s) for the other ranks at {point}: "
                f"{gathering.missing()}. {advice}"
            ) from e
        except ConnectionError as e:
            raise PreflightError(f"Rank {rank} cannot start: {e}. {advice}") from e


class _Gathering:
    """One rank's part of the exchange: an event loop with a deadline."""

    def __init__(
        self, point: MeetingPoint, rank: int, size: int, text: str, timeout_s: float
    ) -> None:
        self.point = point
        self.job = point.job(rank, size)
        self.text = text
        self.deadline = time.monotonic() + timeout_s
        self.loop = EventLoop()
        self.loop.start(self._expire())
        self.loop.start(self._log())

    def _log(self) -> Task:
        """Print the missing ranks: without this line a wrong host name would show only at the deadline."""
        yield from sleep(_SAY_AFTER_S)
        while sys.stderr is not None:
            sys.stderr.write(
                f"sparkhvd: rank {self.job.rank} waits for the other ranks at {self.point}: {self.missing()}.\n"
            )
            sys.stderr.flush()
            yield from sleep(_SAY_AGAIN_S)

    def missing(self) -> str:
        """Describe the missing ranks."""
        raise NotImplementedError

    def _expire(self) -> Task:
        yield Wait(None, 0, self.deadline)
        raise TimeoutError

    def close(self) -> None:
        self.loop.close()


class _Root(_Gathering):
    """Rank 0: receives the texts of the others, and sends all of them to each."""

    def __init__(
        self, point: MeetingPoint, rank: int, size: int, text: str, timeout_s: float
    ) -> None:
        super().__init__(point, rank, size, text, timeout_s)
        self._texts = {0: text}
        self._links: dict[int, socket.socket] = {}
        self._listening, self._problem = point.listen()

    def run(self) -> list[str]:
        acceptor = Acceptor(
            self.job,
            [self._listening],
            self.loop,
            current_stage=lambda: SERVICE_STAGE,
            on_peer=self._receive_peer,
            on_notice=lambda _: None,
            on_shortage=lambda _: None,
        )
        acceptor.start()
        self.loop.run(lambda: len(self._texts) == self.job.size)
        by_rank = [self._texts[rank] for rank in range(self.job.size)]
        message = json.dumps(by_rank).encode()
        for sock in self._links.values():
            send(sock, frame_of(message))
        return by_rank

    def _receive_peer(self, _: ConnectionPhase, rank: int, sock: socket.socket) -> None:
        if rank in self._links:  # two processes with one number
            sock.close()
            return
        self._links[rank] = sock
        self.loop.start(self._receive(rank, sock))

    def _receive(self, rank: int, sock: socket.socket) -> Task:
        try:
            self._texts[rank] = yield from _read_message(sock)
        except ConnectionError:  # the rank connects again if this process read its proof too late
            self._links.pop(rank).close()
            yield from sleep(_AGAIN_S)
            if rank not in self._links:
                raise
            return
        yield Wait(sock, selectors.EVENT_READ, time.monotonic() + _LONGEST_S)
        raise ConnectionResetError(f"rank {rank} ended while the ranks connected")

    def missing(self) -> str:
        late = [str(rank) for rank in range(self.job.size) if rank not in self._texts]
        problem = f" ({self._problem})" if self._problem else ""
        return f"of {self.job.size} ranks these did not connect: {', '.join(late)}{problem}"

    def close(self) -> None:
        super().close()
        for sock in (self._listening, *self._links.values()):
            sock.close()


class _Peer(_Gathering):
    """Any other rank: sends its text to rank 0, and receives all texts."""

    def __init__(
        self, point: MeetingPoint, rank: int, size: int, text: str, timeout_s: float
    ) -> None:
        super().__init__(point, rank, size, text, timeout_s)
        self._error: object = "no error"
        self._refused_at: float | None = None
        self._sock: socket.socket | None = None
        self._texts: list[str] | None = None

    def run(self) -> list[str]:
        self.loop.start(self._join())
        self.loop.run(lambda: self._texts is not None)
        assert self._texts is not None
        return self._texts

    def _join(self) -> Task:
        pause_s = _PAUSE_TCP_S if self.point.ports else _PAUSE_UNIX_S
        while self._sock is None:
            yield from self._try_all()
            if self._sock is None:
                yield from sleep(pause_s)
        send(self._sock, frame_of(self.text.encode()))
        texts = read_json((yield from _read_message(self._sock)))
        self._texts = rebuild(list[str], texts)

    def _try_all(self) -> Task:
        """Try every address once."""
        try:
            places = self.point.addresses()
        except OSError as error:
            self._error = f"{self.point.host} has no address: {error}"
            return
        for family, address in places:
            if self._sock is None:
                yield from self._try(family, address)

    def _try(self, family: int, address: Address) -> Task:
        until = time.monotonic() + UNAUTHENTICATED_S
        try:
            sock = yield from open_connection(family, address, until)
        except OSError as error:
            self._error = error
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            if family == socket.AF_UNIX and not is_same_user(sock):
                raise PermissionError(f"{self.point} belongs to another user")
            try:
                is_known = yield from introduce(self.job, 0, SERVICE_STAGE, sock, until)
            except OSError as error:  # the process is not rank 0, or is of another job
                self._error = error
                return
            if is_known:
                self._sock = sock
                stack.pop_all()
            else:
                self._record_refusal()

    def _record_refusal(self) -> None:
        """Give up once processes with another key have been the only answer for some time."""
        self._error = "the process that listens there has another key or number of ranks"
        self._refused_at = self._refused_at or time.monotonic()
        if time.monotonic() > self._refused_at + _REFUSED_S:
            key = (
                ", and SPARKHVD_JOB_KEY_FILE the same bytes on every host"
                if self.point.ports
                else ""
            )
            raise ConnectionRefusedError(
                f"the process that listens at {self.point} is of another job (every rank needs the same number of ranks, here "
                f"{self.job.size}{key})"
            )

    def missing(self) -> str:
        return f"rank 0 has not answered ({self._error})"

    def close(self) -> None:
        super().close()
        if self._sock is not None:
            self._sock.close()


def _read_message(sock: socket.socket) -> Generator[Wait, None, str]:
    try:
        return (yield from receive_frame(sock, time.monotonic() + _LONGEST_S)).decode()
    except ConnectionError as error:
        raise ConnectionResetError("another rank ended while the ranks connected") from error
    except ValueError as error:
        raise ConnectionResetError(f"a rank sent {error}") from error


# ----------------------------------------------------------------------------------------------------
# Key and addresses of ranks on several hosts, if their launcher provides none.


def is_one_host(endpoints: Sequence[Endpoint]) -> bool:
    """Whether all ranks reach each other by Unix sockets of one host and user."""
    hosts = {endpoint.host_key for endpoint in endpoints}
    return len(hosts) == 1 and all(each.host_key and each.unix_name for each in endpoints)


def network_key(settings: Settings, what: str) -> bytes | None:
    """Read the user's key for ranks on several hosts, or return None if the network is trusted.

    Args:
        settings: name its file.
        what: the call and its ranks, for the message.

    Raises:
        InvalidArgumentError: neither is set, or the file is unusable.
    """
    if settings.job_key_file:
        return key_from_file(Path(settings.job_key_file))
    if settings.trust_network:
        return None
    raise InvalidArgumentError(
        f"{what}: ranks on several hosts need a key with which they authenticate. Put 32 or more random bytes into a file "
        "on each host, mode 0600, and name it in SPARKHVD_JOB_KEY_FILE; or set SPARKHVD_TRUST_NETWORK=1, which lets any process that reaches "
        "rank 0 join. Under mpirun, init(comm=MPI.COMM_WORLD) with mpi4py needs neither."
    )


def key_from_file(path: Path) -> bytes:
    """Read a key from a file, private to this user.

    Raises:
        InvalidArgumentError: the file is missing, of another user, readable by others, or too short.
    """
    try:
        # A Secret of Kubernetes is a link into its volume; the checks below are on its target.
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            key = file.read()
    except OSError as error:
        raise InvalidArgumentError(
            f"SPARKHVD_JOB_KEY_FILE={path} cannot be read: {error}."
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid() or mode & 0o077:
        raise InvalidArgumentError(
            f"{path}: the file of the job's key belongs to user {status.st_uid} with mode {mode:04o}. It must be this user's, "
            "with mode 0600."
        )
    if len(key) < KEY_BYTES:
        raise InvalidArgumentError(
            f"{path}: the job's key has {len(key)} bytes. It needs {KEY_BYTES} random bytes or more."
        )
    return key


def derived_key(key: bytes, purpose: str) -> bytes:
    """Derive a key for one job or group."""
    return hmac.digest(key, purpose.encode(), hashlib.sha256)


def check_addresses(endpoints: Sequence[Endpoint], what: str) -> None:
    """Reject ranks on several hosts with mutually unreachable addresses.

    Raises:
        PreflightError: an address is a loopback address, or IPv4 and IPv6 are mixed.
    """
    for rank, endpoint in enumerate(endpoints):
        if is_loopback(endpoint.address):
            raise PreflightError(
                f"{what}: the ranks are on several hosts, and rank {rank} has only the address {endpoint.address}. Give rank "
                "0's host by an address that the others reach, or choose interfaces with SPARKHVD_INTERFACES."
            )
    kinds = {
        ipaddress.ip_address(each.address.partition("%")[0]).version: f"rank {rank} at {each}"
        for rank, each in enumerate(endpoints)
    }
    if len(kinds) > 1:
        raise PreflightError(
            f"{what}: the ranks have no common interface: {kinds[4]} has IPv4, {kinds[6]} IPv6. Choose a network that all hosts "
            "have with SPARKHVD_INTERFACES, such as 10.0.0.0/8."
        )
