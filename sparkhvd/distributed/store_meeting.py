"""Ranks find each other through the store that torch.distributed gives to a group.

Trust: whoever can write to the store is trusted with addresses, as torch trusts it; the key does not go through it, unless
the user says that the network is trusted. Ranks of one host and user get it by a file that only they can read; of several
hosts, by `SPARKHVD_JOB_KEY_FILE` on each.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sparkhvd.errors import CollectiveTimeoutError, InvalidArgumentError
from sparkhvd.rendezvous import Endpoint, Job, Listener, SocketRendezvous
from sparkhvd.rendezvous.endpoints import KEY_BYTES
from sparkhvd.settings import Settings
from sparkhvd.topology import address_towards

__all__ = ["StoreRendezvous", "exchange", "forget", "meet"]

_KEY_PREFIX = "sparkhvd-key-"


class StoreRendezvous(SocketRendezvous):
    """Rendezvous of ranks that have met through a store."""


def exchange(
    store: Store, what: str, rank: int, size: int, value: str, timeout: timedelta
) -> list[str]:
    """Give a text to the other ranks and return everybody's, by rank.

    Raises:
        CollectiveTimeoutError: some ranks did not come in time; the message names them.
    """
    keys = [f"{what}/{each}" for each in range(size)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeoutError(
            f"init_process_group('sparkhvd') on rank {rank}: ranks {missing} of {size} did not come within "
            f"{timeout.total_seconds():g} s ({what}). Start all ranks with the same init_method, or raise timeout=."
        ) from error
    return [store.get(key).decode() for key in keys]


def forget(store: Store, rank: int) -> None:
    """Delete what this rank has put into the store, once all have read it: ranks may meet there again."""
    for key in (f"engine/{rank}", f"endpoint/{rank}", *(["key"] if rank == 0 else [])):
        store.delete_key(key)


@contextlib.contextmanager
def meet(
    store: Store, name: str, rank: int, size: int, timeout: timedelta
) -> Iterator[StoreRendezvous]:
    """Yield a rendezvous of the ranks of a group; they must connect before the block ends.

    Raises:
        CollectiveTimeoutError: some ranks did not come in time.
        InvalidArgumentError: the ranks are on several hosts, and nothing says where the key is from.
    """
    settings = Settings.resolve()
    listener = Listener.bind(_own_address(store), settings)
    own = json.dumps(listener.endpoint().to_dict())
    texts = exchange(store, "endpoint", rank, size, own, timeout)
    endpoints = tuple([Endpoint.from_dict(json.loads(text)) for text in texts])
    with _shared_key(store, name, rank, endpoints, settings, timeout) as key:
        job = Job(key, f"torch.{name}", 0, rank, size, endpoints)
        yield StoreRendezvous(job, listener, settings)


def _own_address(store: Store) -> str:
    """Return this host's address towards the host of the store; loopback where the store is no server."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"
    return address_towards(store.host)


@contextlib.contextmanager
def _shared_key(
    store: Store,
    name: str,
    rank: int,
    endpoints: Sequence[Endpoint],
    settings: Settings,
    timeout: timedelta,
) -> Iterator[bytes]:
    """Yield the job's key, the same on every rank; rank 0 makes it."""
    if settings.job_key_file:
        # Every group has a key of its own.
        yield hmac.digest(_read_key(Path(settings.job_key_file)), name.encode(), hashlib.sha256)
        return
    is_one_host = len({endpoint.host_key for endpoint in endpoints}) == 1 and endpoints[0].host_key
    if not is_one_host:
        _check_hosts(endpoints, settings)
    with contextlib.ExitStack() as stack:
        key = b""
        if rank == 0:
            key = secrets.token_bytes(KEY_BYTES)
            store.set("key", stack.enter_context(_key_file(key)) if is_one_host else key.hex())
        store.wait(["key"], timeout)
        text = store.get("key").decode()
        if rank != 0:
            key = _read_named_key(text) if is_one_host else bytes.fromhex(text)
        yield key


def _check_hosts(endpoints: Sequence[Endpoint], settings: Settings) -> None:
    """Refuse ranks on several hosts that cannot reach each other, or have no key."""
    what = f"init_process_group('sparkhvd') with {len(endpoints)} ranks on several hosts (or users of one)"
    for rank, endpoint in enumerate(endpoints):
        if ipaddress.ip_address(endpoint.address.partition("%")[0]).is_loopback:
            raise InvalidArgumentError(
                f"{what}: rank {rank} has only the address {endpoint.address}. Use init_method='env://' or 'tcp://' with "
                "an address of rank 0's host that the others reach."
            )
    if not settings.trust_network:
        raise InvalidArgumentError(
            f"{what}: the ranks need a key by which they know each other. Put 32 or more random bytes into a file on each "
            "host, mode 0600, and name it in SPARKHVD_JOB_KEY_FILE; or set SPARKHVD_TRUST_NETWORK=1, and whoever reaches "
            "the store can join."
        )


@contextlib.contextmanager
def _key_file(key: bytes) -> Iterator[str]:
    """Yield the path of a file with the key, which only this user can read, while the block runs."""
    descriptor, path = tempfile.mkstemp(prefix=_KEY_PREFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


def _read_named_key(path: str) -> bytes:
    """Read the key from a file that the store names: only one that rank 0 can have made for it."""
    found = Path(path)
    if not found.name.startswith(_KEY_PREFIX):
        raise InvalidArgumentError(
            f"init_process_group('sparkhvd'): the store names {path} as the file of the key. Use a store that only this "
            "job writes."
        )
    return _read_key(found)


def _read_key(path: Path) -> bytes:
    """Read a key that no other user can have written or read."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise InvalidArgumentError(
                f"{path}: the file of the job's key belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o}. It must be this user's, with mode 0600."
            )
        key = file.read()
    if len(key) < KEY_BYTES:
        raise InvalidArgumentError(
            f"{path}: the job's key has {len(key)} bytes. It needs {KEY_BYTES} random ones or more."
        )
    return key
