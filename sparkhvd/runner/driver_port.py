"""Port of the driver for its tasks. Both sides authenticate with the attempt's key."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from collections.abc import Generator

from sparkhvd.rendezvous import Endpoint, Job
from sparkhvd.rendezvous.event_loop import EventLoop, Wait
from sparkhvd.rendezvous.handshake import SERVICE_STAGE, introduce
from sparkhvd.spark import SparkShim

# Linux has these options; elsewhere the system's defaults apply.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
}


def listen(shim: SparkShim) -> tuple[socket.socket, str]:
    """Listen for executors and return the non-blocking socket, and the driver's host as executors name it.

    Raises:
        OSError: this process cannot listen there.
    """
    own, host = shim.own_addresses()
    family = socket.getaddrinfo(own, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((own, 0), family=family, backlog=socket.SOMAXCONN)
    listening.setblocking(False)
    return listening, host


def address_of_one_interface(shim: SparkShim) -> str:
    """Find the numeric address of the driver for its ranks.

    If the driver listens on every interface, this is the address of its host.

    Raises:
        OSError: a name has no address.
    """
    own, host = shim.own_addresses()
    numeric = _numeric(own)
    is_every = ipaddress.ip_address(numeric.partition("%")[0]).is_unspecified
    return _numeric(host) if is_every else numeric


def _numeric(name: str) -> str:
    address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4]
    # `address` has the zone of an IPv6 address as a separate field.
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def connect(address: tuple[str, int], job: Job, timeout_s: float) -> socket.socket:
    """Connect to the driver and authenticate, and return the blocking connection.

    Raises:
        OSError: there is no listener, or it is not the driver of this job.
    """
    until = time.monotonic() + timeout_s
    sock = socket.create_connection(address, timeout_s)
    is_proved = False

    def prove() -> Generator[Wait, None, None]:
        nonlocal is_proved
        is_proved = yield from introduce(job, 0, SERVICE_STAGE, sock, until)

    loop = EventLoop()
    try:
        loop.start(prove())
        loop.run(loop.is_idle)
        if not is_proved:
            raise ConnectionRefusedError("it is not the driver of this job")
    except BaseException:
        sock.close()
        raise
    finally:
        loop.close()
    sock.settimeout(None)
    keep_alive(sock)
    return sock


def keep_alive(sock: socket.socket) -> None:
    """End a connection half a minute after the peer's host is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def proof_between(purpose: str, key: str, job_id: str, attempt: int, own: int, size: int) -> Job:
    """Make a job for the handshake between the driver, its rank 0, and its tasks.

    Args:
        purpose: of the port. A proof for one purpose is invalid for others, and for ranks.
        key: of the attempt, in hex.
        job_id: of the attempt.
        attempt: 0 for the first launch.
        own: this process's number, 0 for the driver.
        size: number of processes.
    """
    own_key = hmac.digest(bytes.fromhex(key), f"sparkhvd {purpose}".encode(), "sha256")
    return Job(own_key, job_id, attempt, own, size, (Endpoint("", 0, "", ""),) * size)
