"""Model, optimizer and losses from what the user gave, which may be functions; the driver checks, the ranks build."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch import arguments
from sparkhvd.training.modules.architecture import light_copy
from sparkhvd.training.program import build_optimizer

__all__ = ["Overrides", "build_model", "check_compression", "given_loss"]

# torch has one generator per process, and fits may run in several threads.
_drawing = threading.Lock()


def build_model(given: Any, seed: int = 0) -> Any:
    """The module given, or what the function given returns; anything else as it is.

    The random numbers of the caller are left alone: the function draws from generators seeded with `seed`.

    Raises:
        InvalidArgumentError: the function failed, or returned no module.
    """
    if isinstance(given, nn.Module) or not callable(given):
        return given
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = given()
        except Exception as e:
            raise InvalidArgumentError(
                f"model: calling the function failed: {type(e).__name__}: {e}. Give a torch.nn.Module, or a function "
                "without arguments that returns one."
            ) from e
    if not isinstance(made, nn.Module):
        raise InvalidArgumentError(
            f"model: the function returned {made!r:.200}; it must return a torch.nn.Module."
        )
    return made


@dataclass(frozen=True)
class Overrides:
    """Values that replace those of the optimizer's groups.

    Attributes:
        learning_rate: of all groups; None leaves them.
        weight_decay: of all groups; None leaves them.
        lr_scaling: "linear" multiplies learning rates by the number of ranks; None does not.
    """

    learning_rate: float | None = None
    weight_decay: float | None = None
    lr_scaling: str | None = None

    def check(self, optimizer: Any, model: nn.Module) -> None:
        """Raise InvalidArgumentError if the optimizer has nothing to override; nothing is changed."""
        if self == Overrides():
            return
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = build_optimizer(optimizer, light_copy(model))
        for name, value in (
            ("lr", self.learning_rate),
            ("lr", self.lr_scaling),
            ("weight_decay", self.weight_decay),
        ):
            if value is not None and any(name not in g for g in optimizer.param_groups):
                param = name if name != "lr" else "learning_rate or lr_scaling"
                raise InvalidArgumentError(
                    f"{param} is given, and {type(optimizer).__name__} has no {name!r} to set. Leave it out."
                )

    def apply(self, optimizer: torch.optim.Optimizer, world_size: int) -> torch.optim.Optimizer:
        """Set the groups of an optimizer that no scheduler follows yet; returns it."""
        factor = world_size if self.lr_scaling == "linear" else 1
        for group in optimizer.param_groups:
            if self.weight_decay is not None:
                group["weight_decay"] = self.weight_decay
            if self.learning_rate is None and factor == 1:
                continue
            rate = group["lr"] if self.learning_rate is None else self.learning_rate
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate) * factor)
            else:
                group["lr"] = rate * factor
            # Where a scheduler of the user's wrote what it starts from, ours would start from there.
            if "initial_lr" in group:
                group["initial_lr"] = float(group["lr"])
        return optimizer


def given_loss(loss: Any, constructors: Any, model: nn.Module) -> Any:
    """The Param `loss`, or what `loss_constructors` make: one function or a list with one per label.

    A constructor is called on the driver, with `model=` if it takes that.

    Raises:
        InvalidArgumentError: both are given, or a constructor is no function or fails.
    """
    if constructors is None:
        return loss
    if loss is not None:
        raise InvalidArgumentError("loss and loss_constructors are both given. Give one of them.")
    several = isinstance(constructors, (list, tuple))
    made = [_construct(c, model) for c in (constructors if several else [constructors])]
    return made if len(made) > 1 else made[0]


def _construct(constructor: Any, model: nn.Module) -> Any:
    if not callable(constructor):
        raise InvalidArgumentError(
            f"loss_constructors holds {constructor!r:.200}; it must hold functions that return a loss."
        )
    try:
        return constructor(**_accepted(constructor, {"model": model}))
    except Exception as e:
        raise InvalidArgumentError(
            f"loss_constructors: calling {constructor!r:.100} failed: {type(e).__name__}: {e}. Give functions that can "
            "be called without arguments, or with model=."
        ) from e


def _accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in values.items() if takes_all or k in parameters}


def check_compression(given: Any) -> Any:
    """The Param `gradient_compression`; not given: none.

    Raises:
        InvalidArgumentError: it cannot compress.
    """
    if given is not None:
        arguments.check_compression("gradient_compression", given)
    return hvd.Compression.none if given is None else given
