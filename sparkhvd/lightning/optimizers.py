"""Optimizers and schedulers of a module: distributed, with learning rates as the user wants them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.torch.optimizer.adasum import DistributedAdasum
from sparkhvd.torch.optimizer.distributed import Distributed

__all__ = ["detach", "distribute", "forward_to", "hold", "scale"]

Optimizer = torch.optim.Optimizer

# Learning rates in a parameter group: torch's own key, and those by which schedulers remember theirs.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
# What `DistributedOptimizer` defines or replaces.
_METHODS = (
    *("zero_grad", "synchronize", "skip_synchronize", "no_sync", "clip_grad_norm_"),
    *("add_param_group", "set_backward_passes_per_step", "state_dict", "load_state_dict"),
)


def distribute(
    optimizers: Iterable[Optimizer],
    schedulers: Iterable[Any],
    module: nn.Module,
    options: Mapping[str, Any],
) -> list[Optimizer]:
    """Return the optimizers, each as a `DistributedOptimizer`, and let schedulers use them; every rank must call it.

    Args:
        optimizers: of the module; those that are distributed stay.
        schedulers: of the optimizers.
        module: whose parameters' names messages have.
        options: of `DistributedOptimizer`.
    """
    made = {each: _distributed(each, module, options) for each in optimizers}
    for scheduler in _all(schedulers):
        if getattr(scheduler, "optimizer", None) in made:
            scheduler.optimizer = made[scheduler.optimizer]
    return list(made.values())


def _distributed(optimizer: Optimizer, module: nn.Module, options: Mapping[str, Any]) -> Optimizer:
    if isinstance(optimizer, (Distributed, DistributedAdasum)):
        return optimizer
    own = {p for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p in own]
    # All of them or none: a loss may bring parameters along that the module does not list.
    names = named if len(named) == len(own) else None
    return hvd.DistributedOptimizer(optimizer, names, **options)


def scale(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], factor: int) -> None:
    """Multiply the learning rates of optimizers, and those that schedulers start from."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in _RATES:
                if isinstance(rate := group.get(key), Tensor):
                    rate.mul_(factor)
                elif rate is not None:
                    group[key] = rate * factor
    for scheduler in _all(schedulers):
        for name in ("base_lrs", "_last_lr"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])


def _all(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Return schedulers with those inside them (`SequentialLR`, `ChainedScheduler`)."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all(getattr(scheduler, "_schedulers", ()))


@contextlib.contextmanager
def hold(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let backward passes inside only add to this rank's gradients."""
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            if isinstance(each, Distributed):
                stack.enter_context(each.no_sync())
        yield


def detach(optimizers: Iterable[Optimizer]) -> None:
    """Stop reducing gradients: what the program does with the module after a fit is its own."""
    for each in optimizers:
        if isinstance(each, Distributed):
            each.detach()


def forward_to(optimizers: Sequence[Optimizer], wrappers: Sequence[Any]) -> None:
    """Let Lightning's wrappers call methods of the optimizers that they wrap.

    A wrapper takes the class of its optimizer, so that `isinstance` works, but not its state.
    """
    for optimizer, wrapper in zip(optimizers, wrappers, strict=True):
        if isinstance(optimizer, (Distributed, DistributedAdasum)):
            methods = {name: getattr(optimizer, name, None) for name in _METHODS}
            vars(wrapper).update({n: method for n, method in methods.items() if method is not None})
