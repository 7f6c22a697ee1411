"""Ranks find each other through the store that torch.distributed gives to a group.

Trust: whoever can write to the store is trusted with addresses, as torch trusts it; the key does not go through it, unless
the user says that the network is trusted. Ranks of one host and user get it over a Unix socket, whose ends the kernel names; of
several hosts, by `SPARKHVD_JOB_KEY_FILE` on each.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sparkhvd.errors import CollectiveTimeoutError
from sparkhvd.interfaces import address_on, address_towards
from sparkhvd.launchers import gathering, network
from sparkhvd.launchers.lifetime import end_with_launcher
from sparkhvd.rendezvous import Endpoint, Job, Listener, SocketRendezvous
from sparkhvd.rendezvous.endpoints import KEY_BYTES
from sparkhvd.settings import Settings

__all__ = ["StoreRendezvous", "exchange", "forget", "meet", "monitored_barrier"]

_ADVICE = "Look at the output of the others."


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
            f"a group of backend 'sparkhvd' on rank {rank}: ranks {missing} of {size} did not make it within the timeout of "
            f"{timeout.total_seconds():g} s ({what}). Start all ranks with the same init_method and make a group on all of its "
            "ranks, or raise the timeout."
        ) from error
    return [store.get(key).decode() for key in keys]


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Wait for every rank by way of the store, so that a failure leaves the engine as it is.

    Args:
        store: for this barrier alone.
        rank: in the group. Rank 0 waits for all others, which wait for its answer.
        size: of the group.
        timeout: from this rank's call.
        wait_all_ranks: name all missing ranks, rather than the first.

    Raises:
        CollectiveTimeoutError: ranks did not come in time. Torch's words are in the text, by which programs know it.
    """
    timeout_ms = timeout // timedelta(milliseconds=1)
    if timeout_ms <= 0:
        raise CollectiveTimeoutError(
            f"Rank {rank} timed out in monitoredBarrier after {timeout_ms} ms: the timeout is not above 0. Give a longer one."
        )
    if rank == 0:
        _let_pass(store, size, timeout, wait_all_ranks)
        return
    arrived, passed = f"arrived/{rank}", f"passed/{rank}"
    store.delete_key(passed)  # of a call that gave up just before the answer
    store.set(arrived, "")
    try:
        store.wait([passed], timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        store.delete_key(arrived)
        raise CollectiveTimeoutError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: no answer within the timeout of {timeout_ms} ms. Look at the output of rank 0, which names the missing ranks."
        ) from error
    store.delete_key(passed)


def _let_pass(store: Store, size: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait for the other ranks of a monitored barrier, and answer them."""
    arrived = [f"arrived/{rank}" for rank in range(1, size)]
    try:
        store.wait(arrived, timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        missing = [str(rank) for rank, key in enumerate(arrived, 1) if not store.check([key])]
        named = missing if wait_all_ranks else missing[:1]
        raise CollectiveTimeoutError(
            f"[Rank 0]: {'Ranks' if len(named) > 1 else 'Rank'} {', '.join(named)} failed to pass monitoredBarrier in "
            f"{timeout // timedelta(milliseconds=1)} ms. Look at what the missing ranks do, or raise the timeout of the barrier."
        ) from error
    for key in arrived:
        store.delete_key(key)
    for rank in range(1, size):
        store.set(f"passed/{rank}", "")


def forget(store: Store, rank: int) -> None:
    """Delete what this rank has put into the store, once all have read it: ranks may meet there again."""
    for key in (f"engine/{rank}", f"endpoint/{rank}", *(["key"] if rank == 0 else [])):
        store.delete_key(key)


def meet(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> StoreRendezvous:
    """Return a rendezvous of the ranks of a group.

    Raises:
        CollectiveTimeoutError: some ranks did not come in time.
        InvalidArgumentError: the ranks are on several hosts, and nothing says where the key is from.
        PreflightError: a rank of this host has ended meanwhile, or hosts cannot reach each other.
    """
    settings = Settings.resolve()
    end_with_launcher()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener.bind(_own_address(store, settings), settings))
        own = json.dumps({**listener.endpoint().to_dict(), "meeting": secrets.token_hex(16)})
        texts = exchange(store, "endpoint", rank, size, own, timeout)
        entries = [json.loads(text) for text in texts]
        endpoints = tuple([Endpoint.from_dict(entry) for entry in entries])
        if network.is_one_host(endpoints):
            point = gathering.on_this_host(f"sparkhvd-{entries[0]['meeting']}")
            made = secrets.token_hex(KEY_BYTES)
            keys = gathering.gather(point, rank, size, made, timeout.total_seconds(), _ADVICE)
            key = bytes.fromhex(keys[0])
        else:
            key = _key_between_hosts(store, name, rank, endpoints, settings, timeout)
        stack.pop_all()
    return StoreRendezvous(Job(key, f"torch.{name}", 0, rank, size, endpoints), listener, settings)


def _own_address(store: Store, settings: Settings) -> str:
    """Return this host's address towards the host of the store; loopback where the store is no server."""
    if settings.interfaces:
        return address_on(settings.interfaces)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"
    return address_towards(store.host)


def _key_between_hosts(
    store: Store,
    name: str,
    rank: int,
    endpoints: Sequence[Endpoint],
    settings: Settings,
    timeout: timedelta,
) -> bytes:
    """Return the job's key, the same on every rank."""
    what = f"init_process_group('sparkhvd') with {len(endpoints)} ranks on several hosts (or users of one)"
    network.check_addresses(endpoints, what)
    key = network.network_key(settings, what)
    if key is not None:
        return network.derived_key(key, name)  # every group has a key of its own
    if rank == 0:
        store.set("key", secrets.token_hex(KEY_BYTES))
    store.wait(["key"], timeout)
    return bytes.fromhex(store.get("key").decode())
