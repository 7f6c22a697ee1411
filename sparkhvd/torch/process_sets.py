"""Process sets: groups of ranks for operations.

Operations may use a `ProcessSet` from its registration (`init(process_sets=...)` or `add_process_set`) until its
removal or `shutdown()`. While it is registered it has a number.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers.mpi import Communicator, is_communicator
from sparkhvd.torch.arguments import to_integers, to_list
from sparkhvd.torch.context import Context, ContextPart, context, is_initialized


class ProcessSet:
    """Ranks that run collectives among themselves.

    Args:
        ranks_or_comm: the ranks, or a communicator of MPI, whose ranks are read at registration.

    Attributes:
        process_set_id: number of the set, 0 for the set of all ranks; None while it is not registered.
        mpi_comm: the communicator; None for a set from ranks.
        together: sets that were registered at once, from communicators that differ between ranks.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Communicator) -> None:
        self.mpi_comm: Communicator | None = None
        self.together: tuple[ProcessSet, ...] = ()
        self._ranks: list[int] | None = None
        self._number: int | None = None
        self._context: weakref.ref[Context] | None = None  # the context in which it is registered
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self.take(ranks_or_comm)  # type: ignore[arg-type]  # no communicator

    def take(self, given: Iterable[int]) -> None:
        """Set the ranks.

        Raises:
            InvalidArgumentError: a rank is not an integer.
        """
        items = to_list(f"ProcessSet({given!r})", given, "ranks")
        ranks = to_integers(items)
        if ranks is None:
            raise InvalidArgumentError(
                f"ProcessSet({items!r}): ranks must be integers. Give a list such as [0, 1]."
            )
        self._ranks = sorted(ranks)

    @property
    def process_set_id(self) -> int | None:
        """The engine's number of this set, or None while it is not registered."""
        if self is global_process_set:
            return 0
        owner = None if self._context is None else self._context()
        return self._number if owner is not None and owner.is_open else None

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks in the set, or None if they are not known yet.

        They are not known for the set of all ranks before `init()`, and for a communicator before its registration.
        """
        if self._ranks is None and self.mpi_comm is None and is_initialized():
            return list(range(context().engine.topology.size))
        return self._ranks

    def size(self) -> int | None:
        """The number of ranks in the set, or None while it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def included(self) -> bool | None:
        """Whether this process is in the set, or None while it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return context().engine.topology.rank in self.ranks

    def rank(self) -> int | None:
        """This process's number inside the set, or None while it is not registered.

        Raises:
            InvalidArgumentError: this process is not in it.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        rank = context().engine.topology.rank
        if rank not in self.ranks:
            raise InvalidArgumentError(
                f"ProcessSet.rank(): rank {rank} is not in {self}. Check included() first."
            )
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def _make_global() -> ProcessSet:
    made = ProcessSet([])
    made._ranks = None  # as many as the current engine has
    return made


class ProcessSets(ContextPart):
    """Registered process sets, by their ranks."""

    def __init__(self) -> None:
        self.by_ranks: dict[tuple[int, ...], ProcessSet] = {}

    def retire(self) -> None:
        """Forget all sets, because the context has closed."""
        self.by_ranks.clear()


global_process_set = _make_global()
"""All ranks: the default of every operation."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Every rank of the job must call this with the same ranks.

    Waits for all ranks.

    Args:
        process_set: an unregistered set, or its ranks.

    Returns:
        The registered set.

    Raises:
        InvalidArgumentError: a rank is not an integer or does not exist, or a set of these ranks is registered already.
        MismatchError: ranks disagree on the set; raised on every rank.
        CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    current = context()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    check_new(current, added)
    name = current.name("add_process_set", None)
    work = current.engine.add_process_set(added.ranks or (), name=name)
    work.wait()
    added._number = work.output().rows[0]
    added._context = weakref.ref(current)
    current.part(ProcessSets).by_ranks[tuple(added.ranks or ())] = added
    return added


def check_new(current: Context, added: ProcessSet) -> None:
    """Check that a set can be registered.

    Raises:
        InvalidArgumentError: the set has no ranks, a repeated rank or a rank that does not exist, or is registered
            already.
    """
    size, ranks = current.engine.topology.size, added.ranks or []
    what = f"add_process_set({ranks})"
    if not ranks:
        raise InvalidArgumentError(f"{what}: a process set needs at least one rank.")
    if len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(f"{what}: a rank is named twice. Give each rank once.")
    if ranks[0] < 0 or ranks[-1] >= size:
        raise InvalidArgumentError(
            f"{what}: the job has {size} ranks, so ranks must be from 0 to {size - 1}."
        )
    if added.process_set_id is not None:
        raise InvalidArgumentError(f"{what}: {added} is registered already. Use it as it is.")
    same = current.part(ProcessSets).by_ranks.get(tuple(ranks))
    if same is None and len(ranks) == size:
        same = global_process_set
    if same is not None:
        raise InvalidArgumentError(
            f"{what}: attempted to add a duplicate process set; {same} has the same ranks. Use that one."
        )


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank must call this. The object may be added again.

    Returns:
        False, without any effect, for the set of all ranks and for an unregistered set.

    Raises:
        InvalidArgumentError: it is not a process set.
        MismatchError, CollectiveTimeoutError, PeerLostError: as for `add_process_set`.
    """
    current = context()
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(
            f"remove_process_set({process_set!r}): expected a ProcessSet. Give what add_process_set() returned."
        )
    number = process_set.process_set_id
    if not number or process_set._context is None or process_set._context() is not current:
        return False
    name = current.name("remove_process_set", None)
    current.engine.remove_process_set(number, name=name).wait()
    current.part(ProcessSets).by_ranks.pop(tuple(process_set.ranks or ()), None)
    process_set._number = process_set._context = None
    return True


def set_id(process_set: ProcessSet) -> int:
    """Return the engine's number of a process set.

    Raises:
        InvalidArgumentError: the argument is not a registered process set.
    """
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(
            f"process_set={process_set!r}: expected a ProcessSet. Give what add_process_set() returned."
        )
    owner = None if process_set._context is None else process_set._context()
    if owner is None or owner is not context() or process_set._number is None:
        raise InvalidArgumentError(
            f"process_set={process_set}: the process set is not registered. Call add_process_set() with it on every rank, or "
            "give it to init()."
        )
    return process_set._number


def members(process_set: ProcessSet) -> list[int]:
    """Return the global ranks of a registered set, ascending."""
    ranks = process_set.ranks
    return list(range(context().engine.topology.size)) if ranks is None else ranks


def num_members(ctx: Context, number: int) -> int:
    """Count the ranks of the registered set with this engine number."""
    if number == 0:
        return ctx.engine.topology.size
    sets = ctx.part(ProcessSets).by_ranks
    return next(len(ranks) for ranks, each in sets.items() if each._number == number)
