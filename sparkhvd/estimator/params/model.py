"""Params of the model, the optimizer and the loss."""

from __future__ import annotations

import functools

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import any_value, to_float, to_losses, to_optimizer
from sparkhvd.estimator.params.table import NOT_SEEN, OF_THE_OPTIMIZER, param

__all__ = ["ModelParams"]


def not_negative(value: float) -> str:
    """Check a number that may be 0."""
    return "" if 0 <= value < float("inf") else "it must be 0 or more"


def is_scaling(value: str) -> str:
    """Check `lr_scaling`."""
    if value == "linear":
        return ""
    return "it must be 'linear', or not given: then learning rates are used as given"


model_param = functools.partial(param, group="model")


@accessors
class ModelParams(TorchParams):
    """Params of the model, the optimizer and the loss."""

    model = model_param(
        any_value,
        "torch.nn.Module to train, or a function that makes one",
        annotation="nn.Module | Callable[..., nn.Module]",
    )
    optimizer = model_param(
        to_optimizer,
        "optimizer over the model's parameters, a function of parameters, or 'adam', 'adamw', 'sgd', ...",
        annotation="Optimizer | Callable[..., Any] | str",
    )
    loss = model_param(
        to_losses,
        "(output, label) -> mean or (mean, weight), or 'mse', ...; or one per label; a scalar label is (rows, 1) if its output is",
        annotation="Callable[..., Any] | str | Sequence[Callable[..., Any] | str]",
    )
    loss_constructors = model_param(
        any_value,
        "functions that return the loss; instead of loss",
        annotation="Callable[..., Any] | Sequence[Callable[..., Any]]",
    )
    learning_rate = model_param(
        to_float,
        "learning rate of all groups of the optimizer; default theirs",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        aliases=("stepSize",),
        check=not_negative,
    )
    weight_decay = model_param(
        to_float,
        "weight decay of all groups of the optimizer; default theirs",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        check=not_negative,
    )
    lr_scaling = model_param(
        TypeConverters.toString,
        "'linear' multiplies learning rates by num_proc",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        check=is_scaling,
    )
    gradient_compression = model_param(
        any_value,
        "member of hvd.Compression for gradients on their way",
        train_fn=OF_THE_OPTIMIZER,
    )
    loss_weights = model_param(
        TypeConverters.toListFloat,
        "factor of each label's loss",
        fingerprint=True,
        train_fn=NOT_SEEN,
    )
    metrics = model_param(
        any_value,
        "'accuracy', 'f1', 'auc', 'mse', 'mae', functions of (output, label) as for loss, or torchmetrics, which get (rows,); or a dict",
        default=[],
        annotation="Any",
        train_fn=NOT_SEEN,
    )
    pairs_rows = model_param(
        TypeConverters.toBoolean,
        "False: no warning where loss or metrics do not compare each row's output with its label",
        default=True,
        train_fn=NOT_SEEN,
    )
    compile = model_param(
        TypeConverters.toBoolean,
        "run the model through torch.compile",
        default=False,
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    train_step = model_param(
        any_value,
        "(model, batch, ctx) -> loss of a batch; instead of forward and loss; a scalar label is (rows,)",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    validation_step = model_param(
        any_value,
        "(model, batch, ctx) -> loss of a validation batch",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    train_fn = model_param(
        any_value,
        "(ctx): the whole training loop",
        annotation="Callable[..., Any]",
    )
    callbacks = model_param(
        any_value,
        "sparkhvd.estimator.Callback objects",
        annotation="Sequence[Callback]",
        train_fn=NOT_SEEN,
    )
