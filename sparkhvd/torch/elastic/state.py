"""State of a training whose ranks change: saved, restored and sent."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.elastic.rendezvous import HostsUpdatedInterrupt
from sparkhvd.errors import ElasticError, InvalidArgumentError, MismatchError, UnsupportedError
from sparkhvd.torch.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    pass_object,
)
from sparkhvd.torch.collectives import Sum, allreduce
from sparkhvd.torch.context import context
from sparkhvd.torch.elastic.sampler import ElasticSampler, EpochProgress
from sparkhvd.torch.optimizer.sharded import Sharded
from sparkhvd.torch.optimizer.sharded_state import OwnState

# ----------------------------------------------------------------------------------------------------
# State of a sharded optimizer while ranks come and go: every rank has a copy of its own part and of its neighbour's.
# After a loss the survivors put the parts together and divide them anew. With a rank and its neighbour lost at once that part is gone. Ranks
# that leave at a commit give theirs to all others before.


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


# ----------------------------------------------------------------------------------------------------
# Copies of what a training must not lose, by the type of the object.


class Handler(Protocol):
    """Saves, restores and sends one object."""

    value: Any

    def save(self, former: object) -> object:
        """Return a copy; `former` is one that nobody needs any more, whose memory may be used."""

    def restore(self, saved: object) -> None:
        """Bring a copy back."""

    def sync(self, name: str) -> None:
        """Give every rank what rank 0 has; every rank must call this."""


def handler_of(name: str, value: object) -> Handler | None:
    """Return the handler of an object; None for plain ones.

    Raises:
        UnsupportedError: it is a sharded optimizer of some ranks, or with shared parameters.
    """
    if isinstance(value, Sharded):
        return ShardedHandler(name, value)
    if isinstance(value, torch.nn.Module):
        return _ModuleHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerHandler(value)
    if isinstance(value, ElasticSampler):
        return _SamplerHandler(value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return _StatefulHandler(value)
    return None


class _StatefulHandler:
    """For what has `state_dict` and `load_state_dict`, as schedulers and `GradScaler` have."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self, former: object) -> object:
        return copied(self.value.state_dict(), former)

    def restore(self, saved: object) -> None:
        # An optimizer takes over tensors that it is given, and changes them in place.
        self.value.load_state_dict(copied(saved, None))

    def sync(self, name: str) -> None:
        state = broadcast_object(self.value.state_dict(), root_rank=0, name=f"elastic.{name}")
        self.value.load_state_dict(state)


class _OptimizerHandler(_StatefulHandler):
    def sync(self, name: str) -> None:
        del name
        broadcast_optimizer_state(self.value, root_rank=0)


class _ModuleHandler(_StatefulHandler):
    def restore(self, saved: object) -> None:
        self.value.load_state_dict(saved)  # which copies

    def sync(self, name: str) -> None:
        del name
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _SamplerHandler:
    def __init__(self, value: ElasticSampler) -> None:
        self.value = value

    def save(self, former: object) -> object:
        del former
        return self.value.snapshot()

    def restore(self, saved: object) -> None:
        self.value.restore(saved)  # type: ignore[arg-type]  # what save() returned

    def sync(self, name: str) -> None:
        self.value.sync(broadcast_object(self.value.epoch, root_rank=0, name=f"elastic.{name}"))


def copied(value: Any, former: object) -> Any:
    """Return a deep copy, in the tensors of `former` where they fit."""
    if isinstance(value, Tensor):
        source = value.detach()
        if (
            isinstance(former, Tensor)
            and former.shape == source.shape
            and former.dtype == source.dtype
            and former.device == source.device
            and former.stride() == source.stride()
        ):
            return former.copy_(source)
        return source.clone()
    if isinstance(value, dict):
        others = former if isinstance(former, dict) else {}
        made = {key: copied(each, others.get(key)) for key, each in value.items()}
        if type(value) is dict:
            return made
        result = copy.copy(value)  # with a module's versions, which its state carries along
        result.clear()
        result.update(made)
        return result
    if type(value) in (list, tuple):
        others_in = former if isinstance(former, (list, tuple)) else ()
        padded = [*others_in, *[None] * len(value)]
        return type(value)(copied(each, padded[place]) for place, each in enumerate(value))
    return copy.deepcopy(value)


# ----------------------------------------------------------------------------------------------------
# What all ranks must know alike at a commit: how far each is, and whether the ranks should change.

# Columns of a rank's row: 1, whether it wants a change, whether that is more than removals; then of each sampler three.
_PRESENT, _CHANGE, _JOIN, _FIRST = 0, 1, 2, 3
_EPOCH, _COUNT, _IRREGULAR, _WIDTH = 0, 1, 2, 3


@dataclass(frozen=True)
class StateAgreement:
    """Result of an agreement, the same on every rank.

    Attributes:
        should_change: whether the ranks should change now.
        only_removals: whether nobody would join.
    """

    should_change: bool
    only_removals: bool


def rendezvous() -> ElasticRendezvous | None:
    """Return this member's rendezvous; None in a job whose ranks do not change."""
    current = context().rendezvous
    return current if isinstance(current, ElasticRendezvous) else None


def agree(
    samplers: Sequence[ElasticSampler], should_change: bool, only_removals: bool
) -> StateAgreement:
    """Exchange how far the ranks are, and whether one of them wants a change; every rank must call this with as many samplers.

    A rank that has joined (`hvd.join()`) has recorded all of its rows.

    Raises:
        MismatchError: a sampler is in different epochs on different ranks.
        CollectiveError: the set of ranks changed.
    """
    place = context().engine.topology
    rows = torch.zeros(place.size, _FIRST + _WIDTH * len(samplers), dtype=torch.int64)
    own = rows[place.rank]
    own[_PRESENT], own[_CHANGE] = 1, int(should_change)
    own[_JOIN] = int(should_change and not only_removals)
    for number, sampler in enumerate(samplers):
        count, is_regular = sampler.progress()
        entry = torch.tensor((sampler.epoch, count, int(not is_regular)))
        own[_FIRST + _WIDTH * number :][:_WIDTH] = entry
    rows = allreduce(rows, op=Sum, name="elastic.commit")
    present = rows[rows[:, _PRESENT] > 0]
    for number, sampler in enumerate(samplers):
        columns = rows[:, _FIRST + _WIDTH * number :][:, :_WIDTH]
        _check_epochs(columns, rows[:, _PRESENT])
        sampler.agree(_progress(sampler, columns, rows[:, _PRESENT], f"elastic.progress.{number}"))
    totals = present.sum(dim=0)
    return StateAgreement(bool(totals[_CHANGE]), not bool(totals[_JOIN]))


def _check_epochs(columns: Tensor, present: Tensor) -> None:
    ranks = torch.nonzero(present).flatten().tolist()
    epochs = {rank: int(columns[rank, _EPOCH]) for rank in ranks}
    first = ranks[0]
    for rank, epoch in epochs.items():
        if epoch != epochs[first]:
            raise MismatchError(
                f"ElasticSampler: rank {first} is in epoch {epochs[first]}, rank {rank} in epoch {epoch}. One had a batch more than the "
                "other: give the loader batch_sampler=sampler.batches(...) and take its num_steps on every rank, or give it the sampler and a batch size."
            )


def _progress(
    sampler: ElasticSampler, columns: Tensor, present: Tensor, name: str
) -> EpochProgress:
    counts = [
        int(columns[rank, _COUNT]) if present[rank] else sampler.share_of(rank)
        for rank in range(len(columns))
    ]
    if not bool(columns[:, _IRREGULAR].any()):
        return EpochProgress(tuple(counts))
    marks = allreduce(sampler.marks_of_all(), op=Sum, name=name)
    joined = [0 if present[rank] else counts[rank] for rank in range(len(columns))]
    return EpochProgress(tuple(joined), frozenset(torch.nonzero(marks).flatten().tolist()))


# As Horovod calls the kinds of `on_hosts_updated`.
_REMOVED = 1


class State:
    """State of a training, in memory. A subclass says what is saved, restored and sent."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs  # Horovod's, how objects are sent
        self._reset_callbacks: list[Callable[[], object]] = []
        self._updates: list[int] = []
        self._version = 0  # of the last save; the same on all ranks after `sync`

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call functions whenever the ranks have changed, before the training goes on: to change the learning rate, say.

        They run on the ranks that were there before, and must not communicate: new ones do not call them.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Follow a change of the ranks."""
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: object = None, update_res: int = 0) -> None:
        """Ask for a change at the next commit, as if hosts had come (`update_res` 1: only gone)."""
        del timestamp
        self._updates.append(update_res)

    def commit(self) -> None:
        """Save the state, together with the other ranks, and follow changes of the hosts. Every rank must call this.

        After a failure the training goes on from here. Either all ranks have this commit or none: those that did not come
        to its end go back to the one before.

        Raises:
            HostsUpdatedInterrupt: the ranks should change now; on every rank.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Follow changes of the hosts. Every rank must call this.

        Raises:
            HostsUpdatedInterrupt: the ranks should change now; on every rank.
        """
        member = rendezvous()
        should_change, only_removals = (False, True) if member is None else member.should_change()
        if self._updates:
            only_removals = only_removals and all(each == _REMOVED for each in self._updates)
            should_change = True
        agreed = agree(self._samplers(), should_change, only_removals)
        if agreed.should_change:
            self._updates.clear()
            raise HostsUpdatedInterrupt(agreed.only_removals)

    def save(self) -> None:
        """Keep a copy of the state on this rank."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank what rank 0 has."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for other ranks; called before the callbacks."""

    def _samplers(self) -> list[ElasticSampler]:
        return []


class ObjectState(State):
    """State of plain objects, each an attribute.

    Args:
        bcast_object: sends an object from rank 0, as `hvd.broadcast_object`.
        get_rank: returns this rank.
        **kwargs: the objects, by name.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._names = list(kwargs)
        self._saved_state: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._keep()

    def save(self) -> None:
        """Keep a deep copy of every object."""
        self._keep()

    def restore(self) -> None:
        """Go back to the last copies."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give every rank the objects of rank 0, and save."""
        values = {name: getattr(self, name) for name in self._names}
        self._version, values = self._bcast_object((self._version, values), root_rank=0)
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def _keep(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._names}
        self._version += 1


class TorchState(ObjectState):
    """State of a PyTorch training: model, optimizer, and anything else as attributes.

    Modules, optimizers, `ElasticSampler`s, and what else has `state_dict` and `load_state_dict` (schedulers, `GradScaler`) are
    handled by their states and stay the same objects; all other values are pickled. An attribute that is set anew is saved at the
    next commit. Of a sharded optimizer each commit gives the next rank a copy of this rank's part.

    Args:
        model: the module; None for none.
        optimizer: the optimizer; None for none.
        **kwargs: further objects, such as `batch=0, epoch=0, sampler=sampler`.

    Raises:
        UnsupportedError: an optimizer is sharded among some ranks, or shares parameters.
        InvalidArgumentError: a name is one of this class's own.
    """

    _handlers: dict[str, Handler]

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers: dict[str, Handler] = {}
        plain: dict[str, Any] = {}
        for name, value in given.items():
            if name.startswith("_") or hasattr(TorchState, name):
                raise InvalidArgumentError(
                    f"TorchState({name}=...): the class has that name itself. Give the object another one."
                )
            if (handler := handler_of(name, value)) is not None:
                handlers[name] = handler
            elif value is not None or name in kwargs:
                plain[name] = value
        self.__dict__["_handlers"] = handlers  # before the first attribute
        self._saved: dict[str, object] = {}
        self._former: dict[str, object] = {}  # whose memory the next copy takes
        for name, value in given.items():
            self.__dict__[name] = value
        super().__init__(**plain)
        self._saved = {name: handler.save(None) for name, handler in handlers.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            handler = handler_of(name, value)
            if handler is None:
                raise InvalidArgumentError(
                    f"TorchState.{name} was {type(self._handlers[name].value).__name__} and cannot become {type(value).__name__}. Give "
                    "an object of the same kind."
                )
            self._handlers[name] = handler
            self._saved[name] = handler.save(None)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep copies on this rank."""
        former, self._former = self._former, self._saved
        self._saved = {
            name: handler.save(former.get(name)) for name, handler in self._handlers.items()
        }
        super().save()

    def commit(self) -> None:
        """Save the state with the other ranks; see `State.commit`."""
        before = self._saved, self._saved_state, self._version
        self.save()
        try:
            for handler in self._sharded():
                handler.exchange()
            self.check_host_updates()
        except HostsUpdatedInterrupt:
            self._settle()
            raise
        except BaseException:
            # Not all have come: what was before counts, and the new copies' memory is free.
            self._former = self._saved
            self._saved, self._saved_state, self._version = before
            raise
        self._settle()

    def check_host_updates(self) -> None:
        """Follow changes of the hosts; see `State.check_host_updates`."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            if not (sharded := self._sharded()):
                raise
            for handler in sharded:
                handler.gather()
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def restore(self) -> None:
        """Go back to the last copies."""
        for name, handler in self._handlers.items():
            handler.restore(self._saved[name])
        super().restore()

    def sync(self) -> None:
        """Give every rank what rank 0 has, and save."""
        for name, handler in self._handlers.items():
            handler.sync(name)
        super().sync()

    def reset(self) -> None:
        """Divide the rows of samplers among the new ranks."""
        for sampler in self._samplers():
            sampler.reset()

    def _samplers(self) -> list[ElasticSampler]:
        values = (handler.value for handler in self._handlers.values())
        return [value for value in values if isinstance(value, ElasticSampler)]

    def _sharded(self) -> list[ShardedHandler]:
        handlers = self._handlers.values()
        return [handler for handler in handlers if isinstance(handler, ShardedHandler)]

    def _settle(self) -> None:
        """Let this commit count, with what the ranks have just told each other of samplers."""
        for sharded in self._sharded():
            sharded.settle()
        for name, handler in self._handlers.items():
            if isinstance(handler.value, ElasticSampler):
                self._saved[name] = handler.save(None)
