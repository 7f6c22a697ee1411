"""Checks of the user's functions and callbacks, on the driver before any job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.user_code.callbacks import Callback, check_callbacks
from sparkhvd.training.user_code.transformations import Transformations, resolve_transformations
from sparkhvd.training.user_step import StepFunction, check_signature, check_step_function


@dataclass(frozen=True)
class UserCode:
    """The user's functions and callbacks, pickled with the model.

    Attributes:
        train_step: (model, batch, ctx) -> loss; None if the Params `loss` and `label_cols` define the step.
        validation_step: the same for validation.
        train_fn: (ctx), the whole loop, or None.
        callbacks: called at points of the loop.
        transformation_fn: a dict of one row's values in and out, or None.
        batch_transform_fn: a dict of arrays in and out, or None.
        label_arguments: arguments of `forward` for labels, if the model computes its own loss; predictions omit them.
    """

    train_step: StepFunction | None = None
    validation_step: StepFunction | None = None
    train_fn: Callable[..., object] | None = None
    callbacks: tuple[Callback, ...] = ()
    transformation_fn: Callable[..., object] | None = None
    batch_transform_fn: Callable[..., object] | None = None
    label_arguments: tuple[str, ...] = ()

    @property
    def transformations(self) -> Transformations:
        """The functions between data and tensors."""
        return Transformations(self.transformation_fn, self.batch_transform_fn)

    @property
    def steps(self) -> dict[str, object]:
        """The user's `train_step` and `validation_step` for our training loop, by name."""
        return {"train_step": self.train_step, "validation_step": self.validation_step}

    @property
    def computes_loss(self) -> bool:
        """Whether the user's function computes the training loss, so that `loss` is not needed."""
        return self.train_step is not None or self.train_fn is not None

    def uses_loss(self, *, has_validation: bool) -> bool:
        """Whether the loop calls the Param `loss`, in training or in validation."""
        if self.train_fn is not None:
            return False
        return self.train_step is None or (has_validation and self.validation_step is None)

    @property
    def feeds_model(self) -> bool:
        """Whether the user's code calls the model, so that the columns need not fit its `forward`."""
        return getattr(self.train_fn, "feeds_model", False)

    @property
    def changes_columns(self) -> bool:
        """Whether the user's functions change the columns, so that the model cannot be tried on the original columns."""
        return getattr(self.train_fn, "changes_columns", False)

    @property
    def takes_rows(self) -> bool:
        """True if a function receives the values of each row before the model."""
        return self.transformation_fn is not None or getattr(self.train_fn, "takes_rows", False)

    @property
    def can_log(self) -> bool:
        """True if a function or a callback may report numbers while training."""
        return self.train_step is not None or bool(self.callbacks)

    def describe(self) -> dict[str, object]:
        """List the names of functions and callback classes, for comparison with a resumed run."""
        functions = {n: v for n, v in vars(self).items() if callable(v)}
        names = {n: getattr(f, "__qualname__", type(f).__qualname__) for n, f in functions.items()}
        if self.callbacks:
            return {**names, "callbacks": [type(c).__qualname__ for c in self.callbacks]}
        return names


def check_user_code(
    params: Mapping[str, Any], with_train_fn: Mapping[str, str] = MappingProxyType({})
) -> UserCode:
    """Check the user's functions and callbacks.

    Args:
        params: values, by name, of the params that differ from their default.
        with_train_fn: effect of a param with `train_fn`: "not seen", or "of the optimizer".

    Raises:
        InvalidArgumentError: a function does not accept its arguments, an object is not a callback, or a param would
            have no effect.
    """
    for name in ("train_step", "validation_step"):
        if name in params:
            check_step_function(name, params[name])
    if "train_fn" in params:
        check_signature("train_fn", params["train_fn"], ("ctx",))
    callbacks = check_callbacks(params.get("callbacks"))
    resolve_transformations(params.get("transformation_fn"), params.get("batch_transform_fn"))
    _check_effect(params, with_train_fn)
    names = (
        "train_step",
        "validation_step",
        "train_fn",
        "transformation_fn",
        "batch_transform_fn",
    )
    functions: dict[str, Any] = {name: params.get(name) for name in names}
    return UserCode(callbacks=callbacks, **functions)


def _check_effect(params: Mapping[str, object], with_train_fn: Mapping[str, str]) -> None:
    if "train_fn" in params:
        ignored = [n for n, seen in with_train_fn.items() if seen == "not seen" and n in params]
        if ignored:
            raise InvalidArgumentError(
                f"train_fn is the whole training loop, so these params would have no effect: {', '.join(ignored)}. "
                "Leave them out and do it in train_fn, or use train_step."
            )
        ignored = [
            n for n, seen in with_train_fn.items() if seen == "of the optimizer" and n in params
        ]
        if ignored and "optimizer" not in params:
            raise InvalidArgumentError(
                f"train_fn is given without optimizer, so these params would have no effect: {', '.join(ignored)}. Give "
                "optimizer and step ctx.optimizer, or leave them out and do it in train_fn."
            )
        return
    validates, has_step = bool(params.get("validation")), "validation_step" in params
    if has_step and not validates:
        raise InvalidArgumentError(
            "validation_step is given, but there are no validation rows. Set validation, for example 0.1."
        )
    if "train_step" not in params:
        return
    if validates and not has_step and not {"loss", "loss_constructors"} & params.keys():
        raise InvalidArgumentError(
            "validation is given with train_step, but there is neither validation_step nor loss to validate with. "
            "Give validation_step or loss."
        )
    if "metrics" in params and (has_step or not validates):
        raise InvalidArgumentError(
            "metrics would have no effect: with train_step they are computed only for validation rows, and only without "
            "validation_step. Report them with ctx.log(name, value)."
        )
