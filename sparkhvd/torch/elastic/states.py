"""State of a training whose ranks change: saved, restored and sent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from sparkhvd.elastic.interrupt import HostsUpdatedInterrupt
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.broadcast import broadcast_object
from sparkhvd.torch.elastic.agreement import agree, rendezvous
from sparkhvd.torch.elastic.sampler import ElasticSampler
from sparkhvd.torch.elastic.sharded import ShardedHandler
from sparkhvd.torch.elastic.snapshots import Handler, handler_of

__all__ = ["ObjectState", "State", "TorchState"]

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
