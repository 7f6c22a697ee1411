"""State of a sharded optimizer while ranks come and go: every rank has a copy of its own part and of its neighbour's.

After a loss the survivors put the parts together and divide them anew. With a rank and its neighbour lost at once that part is gone. Ranks
that leave at a commit give theirs to all others before.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass

from sparkhvd.errors import ElasticError, UnsupportedError
from sparkhvd.torch.broadcast import allgather_object, broadcast_object, pass_object
from sparkhvd.torch.context import context
from sparkhvd.torch.optimizer.sharded import Sharded
from sparkhvd.torch.optimizer.sharded_state import OwnState

__all__ = ["ShardedHandler"]


@dataclass(frozen=True)
class _Copies:
    """Parts of the state of one moment, by rank of that moment, and how many ranks there were."""

    size: int
    parts: dict[int, OwnState]


class ShardedHandler:
    """Saves, restores and sends a sharded optimizer; see `snapshots.Handler`.

    Args:
        name: of the attribute.
        value: the optimizer, which follows changes of the ranks from now on.

    Raises:
        UnsupportedError: its ranks share parameters, or are not all.
    """

    def __init__(self, name: str, value: Sharded) -> None:
        if value.has_own_ranks:
            raise UnsupportedError(
                f"TorchState({name}=...): a sharded optimizer must have all ranks, and cannot share parameters in an elastic job. Leave "
                "process_set and share_parameters out."
            )
        self.value = value
        self._name = f"elastic.{name}"
        # Moments: the one at which the optimizer is, and that of the last commit.
        self._version, self._committed = 0, 0
        self._copies: dict[int, _Copies] = {}
        context().followers.append(weakref.ref(value))
        self._note({context().engine.topology.rank: self._own()})
        self.settle()

    def save(self, former: object) -> object:
        """Return nothing: `exchange` and `settle` save, because one rank alone cannot."""
        del former
        return None

    def restore(self, saved: object) -> None:
        """Let the next `sync` go back to the last commit; the parts of others are not here."""
        del saved
        self._version = self._committed

    def exchange(self) -> None:
        """Keep a copy of this rank's part, and give the next rank one; every rank must call this."""
        place = context().engine.topology
        own = self._own()
        parts = {place.rank: own}
        if place.size > 1:
            parts[(place.rank - 1) % place.size] = pass_object(own, f"{self._name}.neighbour")
        self._note(parts)

    def gather(self) -> None:
        """Give every rank all parts as they are now, before some leave; every rank must call this."""
        parts = allgather_object(self.value.own_state(), f"{self._name}.leave")
        self._note(dict(enumerate(parts)))

    def settle(self) -> None:
        """Let `restore` lead back to the moment of the last `exchange` or `gather`."""
        self._committed = self._version

    def sync(self, name: str) -> None:
        """Put the parts together that belong to the state of rank 0, and divide them anew; every rank must call this.

        Raises:
            ElasticError: a rank's part is gone.
        """
        del name
        known = self._copies.get(self._version)
        place = self._version, 0 if known is None else known.size
        self._version, size = broadcast_object(place, 0, f"{self._name}.version")
        copies = self._copies.get(self._version)
        own = copies.parts if copies is not None and copies.size == size else {}
        holders: dict[int, int] = {}
        for rank, numbers in enumerate(allgather_object(list(own), f"{self._name}.holders")):
            for number in numbers:
                holders.setdefault(number, rank)
        rank = context().engine.topology.rank
        given = {number: own[number] for number in own if holders[number] == rank}
        parts: dict[int, OwnState] = {}
        for some in allgather_object(given, f"{self._name}.parts"):
            parts.update(some)
        states = [parts[number] for number in sorted(parts)]
        lost = [number for number in range(size) if number not in parts]
        if lost and any(state.parts for state in states):
            raise ElasticError(
                f"The state of the sharded optimizer of rank {lost[0]} of {size} is gone: it was lost together with the next rank, which had the copy. "
                "Begin anew from a checkpoint."
            )
        self.value.load_own_states(states)
        self._copies = {self._version: _Copies(size, parts)}
        self.settle()

    def _own(self) -> OwnState:
        return copy.deepcopy(self.value.own_state())

    def _note(self, parts: dict[int, OwnState]) -> None:
        """Keep copies of this moment; others may have failed in one before, and go on from there."""
        kept = {self._version, self._committed}
        self._copies = {each: some for each, some in self._copies.items() if each in kept}
        self._version += 1
        self._copies[self._version] = _Copies(context().engine.topology.size, parts)
