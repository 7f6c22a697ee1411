"""Key and addresses of ranks on several hosts, where their launcher gives none."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.interfaces import is_loopback
from sparkhvd.rendezvous import Endpoint
from sparkhvd.rendezvous.endpoints import KEY_BYTES
from sparkhvd.settings import Settings

__all__ = ["check_addresses", "derived_key", "is_one_host", "key_from_file", "network_key"]


def is_one_host(endpoints: Sequence[Endpoint]) -> bool:
    """Return True if all ranks reach each other by Unix sockets of one host and user."""
    hosts = {endpoint.host_key for endpoint in endpoints}
    return len(hosts) == 1 and all(each.host_key and each.unix_name for each in endpoints)


def network_key(settings: Settings, what: str) -> bytes | None:
    """Return the key that the user has given to ranks on several hosts; None where the network is trusted instead.

    Args:
        settings: name its file.
        what: the call and its ranks, for the message.

    Raises:
        InvalidArgumentError: there is neither, or the file is not good.
    """
    if settings.job_key_file:
        return key_from_file(Path(settings.job_key_file))
    if settings.trust_network:
        return None
    raise InvalidArgumentError(
        f"{what}: ranks on several hosts need a key by which they know each other. Put 32 or more random bytes into a file "
        "on each host, mode 0600, and name it in SPARKHVD_JOB_KEY_FILE; or set SPARKHVD_TRUST_NETWORK=1, and whoever reaches "
        "rank 0 can join. Under mpirun, init(comm=MPI.COMM_WORLD) with mpi4py needs neither."
    )


def key_from_file(path: Path) -> bytes:
    """Read a key that no other user can have written or read.

    Raises:
        InvalidArgumentError: there is no such file, it is another user's, others may read it, or it is too short.
    """
    try:
        # A Secret of Kubernetes is a link into its volume; whose file it leads to is looked at below.
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
            f"{path}: the job's key has {len(key)} bytes. It needs {KEY_BYTES} random ones or more."
        )
    return key


def derived_key(key: bytes, purpose: str) -> bytes:
    """Return a key of its own for one job or group."""
    return hmac.digest(key, purpose.encode(), hashlib.sha256)


def check_addresses(endpoints: Sequence[Endpoint], what: str) -> None:
    """Refuse ranks on several hosts whose addresses cannot reach each other.

    Raises:
        PreflightError: an address is a loopback's, or some are IPv4 and others IPv6.
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
