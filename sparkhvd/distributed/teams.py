"""Engines and process sets of torch's groups."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

from torch._C._distributed_c10d import Store

from sparkhvd import rendezvous as meeting
from sparkhvd.distributed.errors import NUMBER_BITS, as_torch
from sparkhvd.distributed.launcher import Team
from sparkhvd.distributed.store_meeting import StoreRendezvous, exchange, forget, meet
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.launchers.place import receive
from sparkhvd.torch import context
from sparkhvd.torch.joining import way_to_join
from sparkhvd.torch.process_sets import add_process_set

__all__ = ["Teams"]

_OTHER = "of other ranks"
# Default groups of each engine so far, as its ranks have agreed.
_generations: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()


class Teams:
    """Makes the engine's side of a default group and of the groups in it."""

    def __init__(self) -> None:
        self._world: Team | None = None
        self._named = 0

    def name(self, torchs: str) -> str:
        """Return a name of a new group that is the same on all of its ranks.

        Torch's names are numbers where every rank makes the group. Since torch 2.14 a group that its members alone make counts, too,
        on them, so that later numbers differ between ranks.
        """
        if not torchs.isdigit():
            return torchs
        self._named += 1
        return str(self._named)

    def world(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
        """Return all ranks, in the engine that `hvd` has in this process, or gets."""
        try:
            self._world = self._share(store, name, rank, size, timeout)
            _clean_up(store, rank, self._world, timeout)
        except CollectiveError as error:
            raise as_torch(error) from None
        return self._world

    def _share(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
        found = _state(rank, size)
        texts = exchange(
            store, "engine", rank, size, " ".join([str(_generation()), found]), timeout
        )
        generations, states = zip(*[text.split(" ", 1) for text in texts], strict=True)
        if _OTHER in states and "none" not in states:  # torch's ranks are not hvd's
            return own(store, name, rank, size, timeout)
        if len(set(states)) > 1:
            raise InvalidArgumentError(
                f"init_process_group('sparkhvd') on rank {rank}: the ranks' engines are {list(states)}, by rank. Call hvd.init() "
                "before it on every rank or on none, and start all ranks in the same way."
            )
        if found == "launched":
            context.initialize(way_to_join(None))
        elif found == "none":
            rendezvous = meet(store, name, rank, size, timeout)
            context.initialize(lambda _: rendezvous)
            meeting.install(rendezvous)  # hvd.init() after hvd.shutdown() finds the ranks again
        engine = context.context().engine
        _generations[engine] = 1 + max(map(int, generations))
        return Team(engine, 0, tuple(range(size)), is_own=False, generation=_generations[engine])

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
        process_set = world.process_set
        if ranks != world.ranks:
            try:
                known = context.context().process_sets.get(ranks) or add_process_set(ranks)
            except CollectiveError as error:
                raise as_torch(error) from None
            process_set = known.process_set_id or 0
        if rank not in ranks:
            return None
        number = int(name) % (1 << NUMBER_BITS)
        return Team(
            world.engine,
            process_set,
            ranks,
            is_own=False,
            generation=world.generation,
            number=number,
        )


def own(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> Team:
    """Return ranks in an engine of their own; every rank of them must call this."""
    try:
        rendezvous = meet(store, name, rank, size, timeout)
        engine = Engine(rendezvous.connect(), rendezvous.settings)
        rendezvous.close()  # all have met, and these ranks meet once
        team = Team(engine, 0, tuple(range(size)), is_own=True)
        _clean_up(store, rank, team, timeout)
    except CollectiveError as error:
        raise as_torch(error) from None
    return team


def _clean_up(store: Store, rank: int, team: Team, timeout: timedelta) -> None:
    """Leave the store as it was: a launcher's lasts for several default groups, which all have the same names."""

    def barrier(what: str) -> None:
        name = f"torch.{team.generation}.{what}"
        team.engine.barrier(name=name, timeout_s=timeout.total_seconds()).wait()

    barrier("read")
    forget(store, rank)
    barrier("deleted")


def _state(rank: int, size: int) -> str:
    """Return what this process has of an engine."""
    if context.is_initialized():
        engine = context.context().engine
        try:
            engine.check()
        except CollectiveError:
            context.shut_down()  # a rank of it is gone: these ranks meet anew
        else:
            return "shared" if (engine.rank, engine.size) == (rank, size) else _OTHER
    launched = meeting.current() or receive()
    if launched is None or isinstance(launched, StoreRendezvous):
        return "none"
    return "launched" if (launched.rank, launched.size) == (rank, size) else _OTHER


def _generation() -> int:
    """Return how many default groups the engine has had that this process shares with `hvd`."""
    return _generations.get(context.context().engine, 0) if context.is_initialized() else 0
