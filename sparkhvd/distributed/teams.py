"""Engines and process sets of torch's groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from sparkhvd import rendezvous as meeting
from sparkhvd.distributed.errors import as_torch
from sparkhvd.distributed.launcher import Team
from sparkhvd.distributed.store_meeting import StoreRendezvous, exchange, meet
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.launchers.handover import receive
from sparkhvd.torch import context
from sparkhvd.torch.joining import way_to_join
from sparkhvd.torch.process_sets import add_process_set

__all__ = ["Teams"]


class Teams:
    """Makes the engine's side of a default group and of the groups in it."""

    def __init__(self) -> None:
        self._world: Team | None = None
        self._groups: Counter[int] = Counter()  # by process set

    def world(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
        """Return all ranks, in the engine that `hvd` has in this process, or gets."""
        try:
            self._world = self._share(store, name, rank, size, timeout)
        except CollectiveError as error:
            raise as_torch(error) from None
        return self._world

    def _share(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
        found = _state(rank, size)
        states = exchange(store, "engine", rank, size, found, timeout)
        if len(set(states)) > 1:
            raise InvalidArgumentError(
                f"init_process_group('sparkhvd') on rank {rank}: the ranks' engines are {states}, by rank. Call hvd.init() "
                "before it on every rank or on none, and start all ranks in the same way."
            )
        if found == "of another size":  # hvd's ranks are not torch's
            return own(store, name, rank, size, timeout)
        if found == "launched":
            context.initialize(way_to_join(None))
        elif found == "none":
            rendezvous = meet(store, name, rank, size, timeout)
            context.initialize(lambda _: rendezvous)
            meeting.install(rendezvous)  # hvd.init() after hvd.shutdown() finds the ranks again
        return Team(context.context().engine, 0, tuple(range(size)), is_own=False)

    def subset(
        self, ranks: tuple[int, ...], rank: int, name: str, store: Store, timeout: timedelta
    ) -> Team | None:
        """Return the ranks of a group inside the default one; None where this rank is not in it.

        They are a process set, for which every rank must call this; or they have an engine of their own where torch calls
        it on the members alone (`use_local_synchronization`, seen by a name that is no number), in another order than by
        rank, or in a default group that has its own engine.
        """
        world = self._world
        if world is None or world.is_own or not name.isdigit() or list(ranks) != sorted(ranks):
            return (
                own(store, name, ranks.index(rank), len(ranks), timeout) if rank in ranks else None
            )
        if ranks == world.ranks:
            return replace(world, number=self._number(world.process_set))
        try:
            known = context.context().process_sets.get(ranks) or add_process_set(ranks)
        except CollectiveError as error:
            raise as_torch(error) from None
        number = self._number(known.process_set_id or 0)
        if rank not in ranks:
            return None
        return Team(world.engine, known.process_set_id or 0, ranks, is_own=False, number=number)

    def _number(self, process_set: int) -> int:
        """Count the groups of a process set; beyond 126, messages of two with one tag are told apart no more."""
        self._groups[process_set] += 1
        return (self._groups[process_set] + (process_set == 0) - 1) % 127 + 1


def own(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
    """Return ranks in an engine of their own; every rank of them must call this."""
    try:
        rendezvous = meet(store, name, rank, size, timeout)
        engine = Engine(rendezvous.connect(), rendezvous.settings)
        rendezvous.close()  # all have met, and these ranks meet once
    except CollectiveError as error:
        raise as_torch(error) from None
    return Team(engine, 0, tuple(range(size)), is_own=True)


def _state(rank: int, size: int) -> str:
    """Return what this process has of an engine."""
    if context.is_initialized():
        engine = context.context().engine
        try:
            engine.check()
        except CollectiveError:
            context.shut_down()  # a rank of it is gone: these ranks meet anew
        else:
            return "shared" if (engine.rank, engine.size) == (rank, size) else "of another size"
    launched = meeting.current() or receive()
    if launched is None or isinstance(launched, StoreRendezvous):
        return "none"
    return "launched" if (launched.rank, launched.size) == (rank, size) else "of another size"
