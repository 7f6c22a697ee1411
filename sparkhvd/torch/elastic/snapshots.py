"""Copies of what a training must not lose, by the type of the object."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkhvd.torch.broadcast import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from sparkhvd.torch.elastic.sampler import ElasticSampler
from sparkhvd.torch.elastic.sharded import ShardedHandler
from sparkhvd.torch.optimizer.sharded import Sharded

__all__ = ["Handler", "copied", "handler_of"]


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
