"""Process sets: the ranks that take part in an operation. Only the set of all ranks works so far."""

from __future__ import annotations

from collections.abc import Iterable

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch._context import context, is_initialized

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Ranks that do something together.

    Attributes:
        process_set_id: its number, None while it is not registered; 0 is the set of all ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks: list[int] | None = sorted(ranks)
        self.process_set_id: int | None = None
        if any(not isinstance(rank, int) for rank in self._ranks):
            raise InvalidArgumentError(
                f"ProcessSet({self._ranks!r}): ranks must be integers. Give a list such as [0, 1]."
            )

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks in it; None for the set of all ranks before `init()`."""
        if self._ranks is None and is_initialized():
            return list(range(context().engine.topology.size))
        return self._ranks

    def size(self) -> int | None:
        """Number of ranks in it."""
        return None if self.ranks is None else len(self.ranks)

    def included(self) -> bool | None:
        """Whether this process is in it."""
        return None if self.ranks is None else context().engine.topology.rank in self.ranks

    def rank(self) -> int | None:
        """This process's number inside the set.

        Raises:
            InvalidArgumentError: this process is not in it.
        """
        if self.ranks is None:
            return None
        mine = context().engine.topology.rank
        if mine not in self.ranks:
            raise InvalidArgumentError(
                f"ProcessSet.rank(): rank {mine} is not in {self}. Ask included() first."
            )
        return self.ranks.index(mine)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def _make_global() -> ProcessSet:
    made = ProcessSet([])
    made._ranks = None  # as many as the current engine has
    made.process_set_id = 0
    return made


global_process_set = _make_global()
"""All ranks: the default of every operation."""


def set_id(process_set: ProcessSet) -> int:
    """The engine's number of a process set.

    Raises:
        InvalidArgumentError: it is not the global one.
    """
    if process_set is not global_process_set:
        raise InvalidArgumentError(
            f"process_set={process_set!r}: this version of sparkhvd knows only the set of all ranks. "
            "Leave process_set out, or give global_process_set."
        )
    return 0
