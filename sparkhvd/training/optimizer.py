"""The user's optimizer: checked on the driver, built on the ranks, and changed by Params."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch import arguments
from sparkhvd.training.loss_state import LossState
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.types import Compression, MakeOptimizer


def check_optimizer(
    optimizer: object, model_param: object, model: nn.Module, others: LossState | None = None
) -> torch.optim.Optimizer:
    """Check an optimizer or optimizer function against the model, without changing either.

    Args:
        optimizer: the Param.
        model_param: the Param `model`: the module, or a function that makes the module on each rank.
        model: the module.
        others: state of the losses, with their parameters.

    Returns:
        The optimizer, or the function's result for a copy of the model.

    Raises:
        InvalidArgumentError: the optimizer is missing, is of another kind, or does not hold this model's parameters.
    """
    if optimizer is None:
        raise InvalidArgumentError(
            "optimizer is required: give an optimizer over model.parameters(), or a function of the parameters, "
            "for example torch.optim.Adam."
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_instance(optimizer, model_param, model, others or LossState())
        built = optimizer
    elif callable(optimizer):
        # Use a copy of the model, because an optimizer may attach hooks to parameters.
        built = build_optimizer(optimizer, light_copy(model), _light(others))
    elif isinstance(optimizer, (list, tuple)):
        built = joined(optimizer)
        _check_instance(built, model_param, model, others or LossState())
        optimizer = built
    else:
        raise InvalidArgumentError(
            f"optimizer is {optimizer!r:.200}; it must be a torch.optim.Optimizer, a list of optimizers, or a function of the "
            "model's parameters."
        )
    if others is not None:
        _warn_of_untrained(built, others, is_made=built is not optimizer)
    return built


class OptimizerList(torch.optim.Optimizer):
    """Optimizers of different parameters, stepped together, such as `SparseAdam` and `Adam`.

    They share their groups and their state with this object, so that schedulers, checkpoints and `DistributedOptimizer`
    see a single optimizer.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Join copies of the optimizers, so that the given optimizers keep their own state.

        Raises:
            ValueError: two optimizers have the same parameter.
        """
        self.optimizers = [_shallow(each) for each in optimizers]
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for each in optimizers:
            self.state.update(each.state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for each in self.optimizers:
            own = [next(groups) for _ in each.param_groups]
            each.__setstate__({"state": self.state, "param_groups": own})
        self.optimizers[-1].param_groups.extend(groups)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set state and groups, also when a state dict is loaded."""
        super().__setstate__(state)
        if "optimizers" in vars(self):  # a shallow copy has only groups
            self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last optimizer."""
        known = {id(group) for each in self.optimizers for group in each.param_groups}
        if id(param_group) not in known:
            self.optimizers[-1].add_param_group(param_group)
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def train(self) -> None:
        """Switch optimizers with modes to training."""
        for each in self.optimizers:
            set_mode(each, is_training=True)

    def eval(self) -> None:
        """Switch optimizers with modes to evaluation."""
        for each in self.optimizers:
            set_mode(each, is_training=False)


def _shallow(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    # `copy.copy` would keep only state, groups and defaults, and lose other attributes.
    made = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    return made


def joined(optimizers: Sequence[object]) -> OptimizerList:
    """Join the optimizers of a list.

    Raises:
        InvalidArgumentError: an element is not an optimizer or needs several losses per step, or two elements have the
            same parameter.
    """
    checked: list[torch.optim.Optimizer] = []
    for number, each in enumerate(optimizers):
        if not isinstance(each, torch.optim.Optimizer):
            raise InvalidArgumentError(
                f"optimizer[{number}] is {each!r:.200}; it must be a torch.optim.Optimizer."
            )
        if needs_closure(each):
            raise InvalidArgumentError(
                f"optimizer[{number}] is {type(each).__name__}, which evaluates the loss several times per step, so it cannot be in a "
                "list. Give it alone, or write a train_fn."
            )
        checked.append(each)
    if not checked:
        raise InvalidArgumentError("optimizer is an empty list; it must contain an optimizer.")
    try:
        return OptimizerList(checked)
    except ValueError as e:
        raise InvalidArgumentError(
            f"optimizer: the optimizers of the list cannot step together: {e}."
        ) from e


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether `step` evaluates the loss itself, several times, as LBFGS and SAM do."""
    if looks_twice(optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        return True
    for kind in type(optimizer).__mro__:
        if "step" in vars(kind) and not kind.__module__.startswith("sparkhvd."):
            closure = inspect.signature(vars(kind)["step"]).parameters.get("closure")
            return closure is not None and closure.default is closure.empty
    return False


def looks_twice(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether `step` evaluates the loss a second time at moved weights, as SAM does."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


def set_mode(optimizer: object, *, is_training: bool) -> None:
    """Switch an optimizer to train or eval mode, if it has modes.

    An example is a schedule-free optimizer with averaged weights.
    """
    method = getattr(optimizer, "train" if is_training else "eval", None)
    if callable(method):
        method()


def check_clipping(
    model: nn.Module, norm: float | None, value: float | None, others: Sequence[Tensor] = ()
) -> None:
    """Raise an error for clipping of sparse or complex gradients, because torch cannot clip them.

    Args:
        model: to train.
        norm: the Param `gradient_clip_norm`.
        value: the Param `gradient_clip_value`.
        others: trained parameters of losses.

    Raises:
        InvalidArgumentError: a gradient will be sparse or complex.
    """
    if norm is None and value is None:
        return
    param = "gradient_clip_value" if norm is None else "gradient_clip_norm"
    names = {id(p): n for n, p in model.named_parameters() if p.is_complex()}
    kind = "complex"
    if not names:
        kind = "sparse"
        parts = dict(model.named_modules())
        names = {
            id(part): f"{name}.weight".lstrip(".")
            for name, part in parts.items()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        }
    if not names and any(p.is_complex() for p in others):
        names, kind = {0: "of the loss"}, "complex"
    if names:
        raise InvalidArgumentError(
            f"{param} is given, but the gradient of parameter {next(iter(names.values()))!r} is {kind}, which torch cannot clip. Leave "
            f"{param} out{', or make the layer with sparse=False' if kind == 'sparse' else ''}."
        )


def _warn_of_untrained(
    optimizer: torch.optim.Optimizer, others: LossState, *, is_made: bool
) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if is_made:  # its parameters are light copies
        held |= {id(p) for p in others.trained}
    names = others.untrained(held)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"The loss refers to parameters that require a gradient but are not in the optimizer: {', '.join(names[:3])}{more}. They are not "
            "trained. Give an optimizer with the model's parameters and these parameters, or make the loss an nn.Module that has them. If "
            "they are fixed, call requires_grad_(False) on them.",
            stacklevel=3,
        )


def _check_instance(
    optimizer: torch.optim.Optimizer, model_param: object, model: nn.Module, others: LossState
) -> None:
    if model_param is not model:
        raise InvalidArgumentError(
            f"optimizer is an instance of {type(optimizer).__name__} with the parameters of one model, but model is a function, "
            "with which each rank makes its own model. Give a function of the parameters, for example "
            f"lambda parameters: torch.optim.{type(optimizer).__name__}(parameters, lr=0.1)."
        )
    parameters = {id(p) for p in itertools.chain(model.parameters(), others.parameters.values())}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in parameters:
                raise InvalidArgumentError(
                    f"optimizer: parameter group {number} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that the model does not have, so it belongs to another model. Build the optimizer "
                    "from this model's parameters() and the loss's parameters, or give a function of the parameters."
                )


def _light(others: LossState | None) -> list[Tensor]:
    """Copy the parameters of losses as new objects with the same memory."""
    return list(light_copy(nn.ParameterList(others.trained)).parameters()) if others else []


def build_optimizer(
    optimizer: MakeOptimizer, model: nn.Module, trained: Sequence[Tensor] = ()
) -> torch.optim.Optimizer:
    """Call the optimizer function with the model's parameters, or return the optimizer instance.

    `trained` are parameters of losses, which are appended to the model's parameters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, Sequence):
        return joined(optimizer)
    try:
        built = optimizer(itertools.chain(model.parameters(), trained))
    except Exception as e:
        raise InvalidArgumentError(
            f"optimizer: calling it with the model's parameters failed: {type(e).__name__}: {e}. Give a function of "
            "one argument, for example lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        ) from e
    if isinstance(built, (list, tuple)) and any(
        isinstance(each, torch.optim.Optimizer) for each in built
    ):
        return joined(built)
    if not isinstance(built, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer: calling it with the model's parameters returned {built!r:.200}; it must return a "
            "torch.optim.Optimizer, or a list of optimizers."
        )
    # Add attributes that `state_dict` needs, because a class that wraps another optimizer may not call torch's
    # constructor.
    for name, value in vars(torch.optim.SGD([torch.zeros(1)])).items():
        if name.startswith("_"):
            vars(built).setdefault(name, value)
    return built


@dataclass(frozen=True)
class Overrides:
    """Changes of the optimizer's groups by Params.

    Attributes:
        learning_rate: learning rate of all groups; None leaves the groups unchanged.
        weight_decay: weight decay of all groups; None leaves the groups unchanged.
        lr_scaling: "linear" multiplies learning rates by the number of ranks; None does not.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    learning_rate: float | None = None
    weight_decay: float | None = None
    lr_scaling: str | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"{name} is {value}; it must be 0 or more.")
        if self.lr_scaling not in (None, "linear"):
            raise InvalidArgumentError(
                f"lr_scaling is {self.lr_scaling!r}; it must be 'linear'. Leave it out to use learning rates unchanged."
            )

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an InvalidArgumentError if the optimizer lacks an option to set."""
        for name, value in (
            ("lr", self.learning_rate),
            ("lr", self.lr_scaling),
            ("weight_decay", self.weight_decay),
        ):
            if value is not None and any(name not in g for g in optimizer.param_groups):
                param = name if name != "lr" else "learning_rate or lr_scaling"
                raise InvalidArgumentError(
                    f"{param} is given, but {type(optimizer).__name__} has no {name!r} to set. Leave {param} out."
                )

    def apply(self, optimizer: torch.optim.Optimizer, world_size: int) -> None:
        """Change the groups of an optimizer. Call this before a scheduler is attached."""
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
            # Our scheduler would otherwise start from the value of a user's scheduler.
            if "initial_lr" in group:
                group["initial_lr"] = float(group["lr"])


def check_compression(compression: object) -> Compression:
    """Check the Param `gradient_compression` and return it, or `Compression.none` if it is None.

    Raises:
        InvalidArgumentError: the value has no compress() and decompress().
    """
    if compression is None:
        return hvd.Compression.none
    arguments.check_compression("gradient_compression", compression)
    return cast("Compression", compression)  # any class with the two methods
