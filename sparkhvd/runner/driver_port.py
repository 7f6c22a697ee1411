"""A port of the driver at which tasks connect, and the proof of both ends that they know the attempt's key."""

from __future__ import annotations

import hmac
import socket

from sparkhvd.rendezvous import Endpoint, Job
from sparkhvd.rendezvous.handshake import Turn
from sparkhvd.spark import SparkShim

__all__ = ["FIRST", "listen", "proof_between"]

FIRST = Turn(0, 0)


def listen(shim: SparkShim) -> tuple[socket.socket, str]:
    """Listen at the address at which executors reach the driver; return the socket, not blocking, and their name for its host.

    Raises:
        OSError: this process cannot listen there.
    """
    own, host = shim.own_addresses()
    family = socket.getaddrinfo(own, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((own, 0), family=family, backlog=socket.SOMAXCONN)
    listening.setblocking(False)
    return listening, host


def proof_between(purpose: str, key: str, job_id: str, attempt: int, own: int, size: int) -> Job:
    """Return a job whose ranks are the driver (0) and tasks, for the handshake between them.

    Args:
        purpose: of the port; no proof of one purpose is one of another, or of ranks.
        key: of the attempt, in hex.
        job_id: of the attempt.
        attempt: 0 for the first launch.
        own: this process's number, 0 for the driver.
        size: numbers there are.
    """
    own_key = hmac.digest(bytes.fromhex(key), f"sparkhvd {purpose}".encode(), "sha256")
    return Job(own_key, job_id, attempt, own, size, (Endpoint("", 0, "", ""),) * size)
