"""State of an elastic training: saved, restored and sent."""

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

# Horovod's value of `update_res` in `on_hosts_updated` for removed hosts only.
_REMOVED = 1


class State:
    """State of a training, in memory. A subclass defines what is saved, restored and sent."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs  # Horovod passes functions that send objects
        self._reset_callbacks: list[Callable[[], object]] = []
        self._updates: list[int] = []
        self._version = 0  # number of the last save; the same on all ranks after `sync`

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions for each change of the ranks, for example to change the learning rate.

        They run before the training continues, and only on ranks from before the change. They must not communicate,
        because new ranks do not call them.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the reset callbacks after a change of the ranks."""
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: object = None, update_res: int = 0) -> None:
        """Request a change of the ranks at the next commit.

        `update_res` 1 means that hosts were only removed.
        """
        del timestamp
        self._updates.append(update_res)

    def commit(self) -> None:
        """Save the state together with the other ranks, and check for changes of the hosts. Every rank must call this.

        After a failure the training resumes from the last commit that all ranks completed.

        Raises:
            HostsUpdatedInterrupt: the ranks should change now; on every rank.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check for changes of the hosts, without a save. Every rank must call this.

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
        """Restore the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to every rank."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare the state for the new ranks, before the reset callbacks run."""

    def _samplers(self) -> list[ElasticSampler]:
        return []


class ObjectState(State):
    """State of plain Python objects, with an attribute for each object.

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
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Copy rank 0's objects to every rank, and save."""
        values = {name: getattr(self, name) for name in self._names}
        self._version, values = self._bcast_object((self._version, values), root_rank=0)
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def _keep(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._names}
        self._version += 1


class TorchState(ObjectState):
    """State of a PyTorch training: model, optimizer, and further objects as attributes.

    Modules, optimizers, `ElasticSampler`s, and other objects with `state_dict` and `load_state_dict` (schedulers, `GradScaler`) are
    saved by their states and stay the same objects; all other values are pickled. A changed attribute is saved at the next commit.
    For a sharded optimizer each commit sends a copy of this rank's part to the next rank.

    Args:
        model: the module, if any.
        optimizer: the optimizer, if any.
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
                    f"TorchState({name}=...): the class has an attribute of that name. Give the object another name."
                )
            if (handler := handler_of(name, value)) is not None:
                handlers[name] = handler
            elif value is not None or name in kwargs:
                plain[name] = value
        self.__dict__["_handlers"] = handlers  # `__setattr__` needs it for the first attribute
        self._saved: dict[str, object] = {}
        self._former: dict[str, object] = {}  # older copies, whose memory the next copies reuse
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
        """Save the state with the other ranks. See `State.commit`."""
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
            # The commit is incomplete: return to the former copies, and reuse the memory of the new copies.
            self._former = self._saved
            self._saved, self._saved_state, self._version = before
            raise
        self._settle()

    def check_host_updates(self) -> None:
        """Check for changes of the hosts. See `State.check_host_updates`."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            if not (sharded := self._sharded()):
                raise
            for handler in sharded:
                handler.gather()
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def restore(self) -> None:
        for name, handler in self._handlers.items():
            handler.restore(self._saved[name])
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's state to every rank, and save."""
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
        """Complete this commit, and save the samplers again with the exchanged progress."""
        for sharded in self._sharded():
            sharded.settle()
        for name, handler in self._handlers.items():
            if isinstance(handler.value, ElasticSampler):
                self._saved[name] = handler.save(None)


# ----------------------------------------------------------------------------------------------------
# State of a sharded optimizer in elastic training. Every rank has a copy of its own part and of the previous rank's
# part. After a loss the remaining ranks merge the parts and divide them again. If a rank and the next rank are lost at
# once, a part of the state is gone. Before ranks leave at a commit, all ranks exchange all parts.


@dataclass(frozen=True)
class _Copies:
    """Copies of parts of the state from one commit, by rank, and the number of ranks at that commit."""

    size: int
    parts: dict[int, OwnState]


class ShardedHandler:
    """Saves, restores and sends a sharded optimizer. See `Handler`.

    Args:
        name: of the attribute.
        value: the optimizer, which follows changes of the ranks from now on.

    Raises:
        UnsupportedError: it shares parameters, or excludes some ranks.
    """

    def __init__(self, name: str, value: Sharded) -> None:
        if value.has_own_ranks:
            raise UnsupportedError(
                f"TorchState({name}=...): a sharded optimizer must have all ranks, and cannot share parameters in an elastic job. Leave "
                "process_set and share_parameters out."
            )
        self.value = value
        self._name = f"elastic.{name}"
        # Numbers of the optimizer's last copies and of the last commit's copies.
        self._version, self._committed = 0, 0
        self._copies: dict[int, _Copies] = {}
        context().followers.append(weakref.ref(value))
        self._keep_parts({context().engine.topology.rank: self._own()})
        self.settle()

    def save(self, former: object) -> object:
        """Do nothing, because the ranks must save together: `exchange` and `settle` do it."""
        del former
        return None

    def restore(self, saved: object) -> None:
        """Let the next `sync` restore the last commit, because this rank does not have the other ranks' parts."""
        del saved
        self._version = self._committed

    def exchange(self) -> None:
        """Keep a copy of this rank's part on this rank and on the next rank. Every rank must call this."""
        place = context().engine.topology
        own = self._own()
        parts = {place.rank: own}
        if place.size > 1:
            parts[(place.rank - 1) % place.size] = pass_object(own, f"{self._name}.neighbour")
        self._keep_parts(parts)

    def gather(self) -> None:
        """Copy all ranks' parts to every rank before some ranks leave. Every rank must call this."""
        parts = allgather_object(self.value.own_state(), f"{self._name}.leave")
        self._keep_parts(dict(enumerate(parts)))

    def settle(self) -> None:
        """Make `restore` return to the last `exchange` or `gather`."""
        self._committed = self._version

    def sync(self, name: str) -> None:
        """Merge the parts of rank 0's last copies and divide them among the ranks. Every rank must call this.

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
                f"Rank {lost[0]}'s part (of {size}) of the sharded optimizer's state is gone: rank {lost[0]} and the next rank, which had "
                "the copy, were lost together. Restart from a checkpoint."
            )
        self.value.load_own_states(states)
        self._copies = {self._version: _Copies(size, parts)}
        self.settle()

    def _own(self) -> OwnState:
        return copy.deepcopy(self.value.own_state())

    def _keep_parts(self, parts: dict[int, OwnState]) -> None:
        """Add new copies, and keep only the last and the committed copies.

        Other ranks may continue from these copies.
        """
        kept = {self._version, self._committed}
        self._copies = {each: some for each, some in self._copies.items() if each in kept}
        self._version += 1
        self._copies[self._version] = _Copies(context().engine.topology.size, parts)


# ----------------------------------------------------------------------------------------------------
# Handlers that copy the objects of a training, chosen by the objects' types.


class Handler(Protocol):
    """Saves, restores and sends one object."""

    value: Any

    def save(self, former: object) -> object:
        """Copy the state, possibly into the memory of the unused copy `former`."""

    def restore(self, saved: object) -> None:
        """Restore the object from a saved copy."""

    def sync(self, name: str) -> None:
        """Copy rank 0's object to every rank. Every rank must call this."""


def handler_of(name: str, value: object) -> Handler | None:
    """Create an object's handler, or return None for plain objects. They are pickled.

    Raises:
        UnsupportedError: a sharded optimizer excludes some ranks, or shares parameters.
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
    """Handler of objects with `state_dict` and `load_state_dict`, such as schedulers and `GradScaler`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self, former: object) -> object:
        return copied(self.value.state_dict(), former)

    def restore(self, saved: object) -> None:
        # Load a copy, because an optimizer keeps the given tensors and changes them in place.
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
        self.value.load_state_dict(saved)  # copies the tensors

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
    """Copy a value deeply, and reuse the tensors of `former` where shapes and types fit."""
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
        result = copy.copy(value)  # keeps the version metadata of a module's state dict
        result.clear()
        result.update(made)
        return result
    if type(value) in (list, tuple):
        others_in = former if isinstance(former, (list, tuple)) else ()
        padded = [*others_in, *[None] * len(value)]
        return type(value)(copied(each, padded[place]) for place, each in enumerate(value))
    return copy.deepcopy(value)


# ----------------------------------------------------------------------------------------------------
# Exchange of the ranks' progress and requests for a change, at a commit.

# Columns of a rank's row: 1 for a present rank; whether it requests a change; whether ranks should join, too. Then
# three columns for each sampler.
_PRESENT, _CHANGE, _JOIN, _FIRST = 0, 1, 2, 3
_EPOCH, _COUNT, _IRREGULAR, _WIDTH = 0, 1, 2, 3


@dataclass(frozen=True)
class StateAgreement:
    """Result of `agree`, the same on every rank.

    Attributes:
        should_change: whether the ranks should change now.
        only_removals: whether ranks only leave.
    """

    should_change: bool
    only_removals: bool


def rendezvous() -> ElasticRendezvous | None:
    """Return this process's rendezvous, or None outside of an elastic job."""
    current = context().rendezvous
    return current if isinstance(current, ElasticRendezvous) else None


def agree(
    samplers: Sequence[ElasticSampler], should_change: bool, only_removals: bool
) -> StateAgreement:
    """Exchange the ranks' progress and requests for a change. Every rank must call this.

    The number of samplers must be the same on every rank. A rank that waits in `hvd.join()` counts as done with its
    rows.

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
                f"ElasticSampler: rank {first} is in epoch {epochs[first]}, but rank {rank} is in epoch {epoch}, because the ranks had "
                "different numbers of batches. Give the loader batch_sampler=sampler.batches(...) and run its num_steps on every rank, "
                "or give the loader the sampler and a batch size."
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
