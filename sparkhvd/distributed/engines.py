"""Engines and process sets of torch's groups."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sparkhvd.distributed.launch import EngineGroup
from sparkhvd.distributed.work import NUMBER_BITS, as_torch
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError, CollectiveTimeoutError, InvalidArgumentError
from sparkhvd.interfaces import address_on, address_towards, loopback
from sparkhvd.launchers import gather
from sparkhvd.launchers.environment import end_with_launcher
from sparkhvd.launchers.rank_claim import receive
from sparkhvd.rendezvous import (
    Endpoint,
    Job,
    Listener,
    SocketRendezvous,
    current_rendezvous,
    install_rendezvous,
)
from sparkhvd.rendezvous.handshake import KEY_BYTES
from sparkhvd.settings import Settings
from sparkhvd.torch import context
from sparkhvd.torch.process_sets import ProcessSets, add_process_set
from sparkhvd.torch.startup import way_to_join
from sparkhvd.wire import read_json, rebuild

_OTHER = "of other ranks"
# Number of default groups so far in each engine; the same on all its ranks.
_generations: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()


class EngineGroups:
    """Creates the engine groups for a default group and for its subgroups."""

    def __init__(self) -> None:
        self._world: EngineGroup | None = None
        self._named = 0

    def name(self, torchs: str) -> str:
        """Name a new group. The name is the same on all of its ranks.

        Torch's names are numbers if every rank creates the group. Since torch 2.14 a group that only its members create
        is counted too, but only on the members. So torch's later numbers may differ between ranks.
        """
        if not torchs.isdigit():
            return torchs
        self._named += 1
        return str(self._named)

    def world(
        self, store: Store, name: str, rank: int, size: int, timeout: timedelta
    ) -> EngineGroup:
        """Connect all ranks in the engine shared with `hvd`."""
        try:
            deadline = time.monotonic() + timeout.total_seconds()
            self._world = self._share(store, name, rank, size, timeout)
            _clean_up(store, rank, self._world, deadline)
        except CollectiveError as error:
            raise as_torch(error) from None
        return self._world

    def _share(
        self, store: Store, name: str, rank: int, size: int, timeout: timedelta
    ) -> EngineGroup:
        found = _state(rank, size)
        texts = exchange(
            store, "engine", rank, size, " ".join([str(_generation()), found]), timeout
        )
        generations, states = zip(*[text.split(" ", 1) for text in texts], strict=True)
        if _OTHER in states and "none" not in states:  # torch's ranks differ from hvd's ranks
            return own(store, name, rank, size, timeout)
        if len(set(states)) > 1:
            raise InvalidArgumentError(
                f"init_process_group('sparkhvd') on rank {rank}: the ranks have different engines: {list(states)}, by rank. Call "
                "hvd.init() before it on every rank or on no rank, and start all ranks in the same way."
            )
        if found == "launched":
            context.initialize(way_to_join(None))
        elif found == "none":
            rendezvous = meet(store, name, rank, size, timeout)
            context.initialize(lambda _: rendezvous)
            install_rendezvous(rendezvous)  # so that hvd.init() works after hvd.shutdown()
        engine = context.context().engine
        _generations[engine] = 1 + max(map(int, generations))
        return EngineGroup(
            engine, 0, tuple(range(size)), is_own=False, generation=_generations[engine]
        )

    def subset(
        self, ranks: tuple[int, ...], rank: int, name: str, store: Store, timeout: timedelta
    ) -> EngineGroup | None:
        """Create the engine group for some ranks of the default group and return None if this rank is not a member.

        The ranks become a process set, and then every rank must call this. They get their own engine if torch calls
        this on the members only (`use_local_synchronization`, recognized by a name that is not a number), if they are
        not in rank order, or if the default group has its own engine.
        """
        world = self._world
        if world is None or world.is_own or not name.isdigit() or list(ranks) != sorted(ranks):
            return (
                own(store, name, ranks.index(rank), len(ranks), timeout) if rank in ranks else None
            )
        process_set = world.process_set
        if ranks != world.ranks:
            try:
                registered = context.context().part(ProcessSets).by_ranks
                known = registered.get(ranks) or add_process_set(ranks)
            except CollectiveError as error:
                raise as_torch(error) from None
            process_set = known.process_set_id or 0
        if rank not in ranks:
            return None
        number = int(name) % (1 << NUMBER_BITS)
        return EngineGroup(
            world.engine,
            process_set,
            ranks,
            is_own=False,
            generation=world.generation,
            number=number,
        )


def own(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> EngineGroup:
    """Connect these ranks in a separate engine. Each of them must call this."""
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        rendezvous = meet(store, name, rank, size, timeout)
        longest = min(rendezvous.settings.connect_timeout_s, _left(deadline))
        rendezvous.settings = replace(rendezvous.settings, connect_timeout_s=longest)
        try:
            engine = Engine(rendezvous.connect(), rendezvous.settings)
        finally:
            rendezvous.close()  # no longer needed, because all ranks are connected
        team = EngineGroup(engine, 0, tuple(range(size)), is_own=True)
        try:
            _clean_up(store, rank, team, deadline)
        except BaseException:
            engine.shutdown()  # tells the failure to ranks that have passed the barriers
            raise
    except CollectiveError as error:
        raise as_torch(error) from None
    return team


def _clean_up(store: Store, rank: int, team: EngineGroup, deadline: float) -> None:
    """Delete our keys from the store, because later default groups may use the same store and the same names."""

    def barrier(what: str) -> None:
        name = f"torch.{team.generation}.{what}"
        team.engine.barrier(name=name, timeout_s=_left(deadline)).wait()

    barrier("read")
    forget(store, rank)
    barrier("deleted")


def _state(rank: int, size: int) -> str:
    """Describe this process's engine, for a comparison between the ranks."""
    if context.is_initialized():
        engine = context.context().engine
        try:
            engine.check()
        except CollectiveError:
            context.shut_down()  # the engine has lost a rank, so these ranks connect again
        else:
            return "shared" if (engine.rank, engine.size) == (rank, size) else _OTHER
    launched = current_rendezvous() or receive()
    if launched is None or isinstance(launched, StoreRendezvous):
        return "none"
    return "launched" if (launched.rank, launched.size) == (rank, size) else _OTHER


def _generation() -> int:
    """Count the default groups so far in the engine shared with `hvd`."""
    return _generations.get(context.context().engine, 0) if context.is_initialized() else 0


# ----------------------------------------------------------------------------------------------------
# Rendezvous of ranks through the store that torch.distributed passes to a group.
# Trust: addresses in the store are trusted, as in torch. The job's key is not sent through the store, unless the user
# trusts the network. Ranks of one host and user get the key over a Unix socket, where the kernel identifies both ends.
# Ranks of several hosts read it from `SPARKHVD_JOB_KEY_FILE`.

_ADVICE = "Look at the output of the other ranks."


class StoreRendezvous(SocketRendezvous):
    """Rendezvous through a torch store."""


def exchange(
    store: Store, what: str, rank: int, size: int, value: str, timeout: timedelta
) -> list[str]:
    """Exchange a text with the other ranks and return all texts, by rank.

    Raises:
        CollectiveTimeoutError: some ranks were too late; the message names them.
    """
    keys = [f"{what}/{each}" for each in range(size)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeoutError(
            f"a group of backend 'sparkhvd' on rank {rank}: ranks {missing} of {size} did not arrive within the timeout of "
            f"{timeout.total_seconds():g} s ({what}). Start all ranks with the same init_method, and create a group on all of its "
            "ranks, or raise the timeout."
        ) from error
    return [store.get(key).decode() for key in keys]


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Wait for every rank through the store, so that a failure does not affect the engine.

    Args:
        store: store for this barrier only.
        rank: rank in the group. Rank 0 waits for all other ranks, and they wait for its answer.
        size: number of ranks of the group.
        timeout: timeout from this rank's call.
        wait_all_ranks: name all missing ranks instead of the first.

    Raises:
        CollectiveTimeoutError: ranks were too late. The message contains torch's words, because programs search for
            them.
    """
    timeout_ms = timeout // timedelta(milliseconds=1)
    if timeout_ms <= 0:
        raise CollectiveTimeoutError(
            f"Rank {rank} timed out in monitoredBarrier after {timeout_ms} ms: the timeout must be more than 0. Give a longer timeout."
        )
    if rank == 0:
        _let_pass(store, size, timeout, wait_all_ranks)
        return
    arrived, passed = f"arrived/{rank}", f"passed/{rank}"
    store.delete_key(passed)  # left by an earlier call that timed out just before the answer
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
    """Delete this rank's keys from the store, so that the store can be used again.

    Call it after all ranks have read the keys.
    """
    for key in (f"engine/{rank}", f"endpoint/{rank}", *(["key"] if rank == 0 else [])):
        store.delete_key(key)


def meet(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> StoreRendezvous:
    """Exchange addresses and the key through the store, and return the rendezvous of a group's ranks.

    Raises:
        CollectiveTimeoutError: some ranks were too late.
        InvalidArgumentError: the ranks are on several hosts, but no source of the key is configured.
        PreflightError: a rank of this host has ended meanwhile, or hosts cannot reach each other.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    settings = Settings.resolve()
    end_with_launcher()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener.bind(_own_address(store, settings), settings))
        own = json.dumps({**listener.endpoint().to_dict(), "meeting": secrets.token_hex(16)})
        texts = exchange(store, "endpoint", rank, size, own, timeout)
        entries = [read_json(text) for text in texts]
        endpoints = tuple([rebuild(Endpoint, entry, is_strict=False) for entry in entries])
        if gather.is_one_host(endpoints):
            point = gather.on_this_host(f"sparkhvd-{entries[0]['meeting']}")
            made = secrets.token_hex(KEY_BYTES)
            keys = gather.gather(point, rank, size, made, _left(deadline), _ADVICE)
            key = bytes.fromhex(keys[0])
        else:
            left = timedelta(seconds=_left(deadline))
            key = _key_between_hosts(store, name, rank, endpoints, settings, left)
        stack.pop_all()
    return StoreRendezvous(Job(key, f"torch.{name}", 0, rank, size, endpoints), listener, settings)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _own_address(store: Store, settings: Settings) -> str:
    """Find this host's address on the route to the store's host.

    It is loopback if the store has no server.
    """
    if settings.interfaces:
        return address_on(settings.interfaces)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return loopback()
    return address_towards(store.host)


def _key_between_hosts(
    store: Store,
    name: str,
    rank: int,
    endpoints: Sequence[Endpoint],
    settings: Settings,
    timeout: timedelta,
) -> bytes:
    """Get the job's key, the same on every rank."""
    what = f"init_process_group('sparkhvd') with {len(endpoints)} ranks on several hosts (or users of one)"
    gather.check_addresses(endpoints, what)
    key = gather.network_key(settings, what)
    if key is not None:
        return gather.derived_key(key, name)  # every group has its own key
    if rank == 0:
        store.set("key", secrets.token_hex(KEY_BYTES))
    store.wait(["key"], timeout)
    return bytes.fromhex(store.get("key").decode())
