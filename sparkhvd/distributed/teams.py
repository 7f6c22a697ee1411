"""Engines and process sets of torch's groups."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from torch._C._distributed_c10d import Store

from sparkhvd import rendezvous as meeting
from sparkhvd.distributed.errors import as_torch
from sparkhvd.distributed.launcher import MAX_NUMBER, Team
from sparkhvd.distributed.store_meeting import StoreRendezvous, exchange, forget, meet
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
        # By ranks: groups so far, and process sets, of which each tells the messages of so many groups apart.
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._sets: dict[tuple[int, ...], list[int]] = {}

    def world(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
        """Return all ranks, in the engine that `hvd` has in this process, or gets."""
        try:
            self._world = self._share(store, name, rank, size, timeout)
            _clean_up(store, rank, self._world.engine, timeout)
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
        try:
            process_set, number = self._place(world, ranks)
        except CollectiveError as error:
            raise as_torch(error) from None
        if rank not in ranks:
            return None
        return Team(world.engine, process_set, ranks, is_own=False, number=number)

    def _place(self, world: Team, ranks: tuple[int, ...]) -> tuple[int, int]:
        """Return the process set of the next group of these ranks, and its number there; every rank must call this."""
        if ranks not in self._sets:
            if ranks == world.ranks:
                self._sets[ranks], self._groups[ranks] = [world.process_set], 1
            else:
                known = context.context().process_sets.get(ranks) or add_process_set(ranks)
                self._sets[ranks] = [known.process_set_id or 0]
        sets = self._sets[ranks]
        which, number = divmod(self._groups[ranks], MAX_NUMBER)
        if which == len(sets):
            work = world.engine.add_process_set(ranks)
            work.wait()
            sets.append(work.output().rows[0])
        self._groups[ranks] += 1
        return sets[which], number + 1


def own(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
    """Return ranks in an engine of their own; every rank of them must call this."""
    try:
        rendezvous = meet(store, name, rank, size, timeout)
        engine = Engine(rendezvous.connect(), rendezvous.settings)
        rendezvous.close()  # all have met, and these ranks meet once
        _clean_up(store, rank, engine, timeout)
    except CollectiveError as error:
        raise as_torch(error) from None
    return Team(engine, 0, tuple(range(size)), is_own=True)


def _clean_up(store: Store, rank: int, engine: Engine, timeout: timedelta) -> None:
    """Leave the store as it was: a launcher's lasts for several default groups, which all have the same names."""
    seconds = timeout.total_seconds()
    engine.barrier(timeout_s=seconds).wait()  # all have read
    forget(store, rank)
    engine.barrier(timeout_s=seconds).wait()  # all have deleted


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
