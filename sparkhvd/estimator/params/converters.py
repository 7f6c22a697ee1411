"""Convert values of Params.

Spark puts "Invalid param value given for param ..." before a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, TypeVar

import torch
from pyspark.ml.param import TypeConverters
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkhvd.data.store.addresses import secrets_of
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.loggers.base import Logger

T = TypeVar("T")
# Function from the caller's value to the value of the Param.
Converter = Callable[[Any], object]


def to_columns(value: object) -> list[str]:
    """Convert a name or names to a list of names."""
    return [value] if isinstance(value, str) else TypeConverters.toListString(value)


def to_shapes(value: object) -> Any:
    """Convert the shapes of columns' rows, by order or by name."""
    if isinstance(value, Mapping):
        return {name: [int(n) for n in shape] for name, shape in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError("expected a list with one shape per column, such as [[-1, 28, 28]]")
    for shape in value:
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"expected one shape per column, such as [[-1, 28]], not {value}")
    return [[int(n) for n in shape] for shape in value]


def to_inputs(value: object) -> dict[str, Any]:
    """Convert a dict from arguments of `forward` to names of columns."""
    if not isinstance(value, Mapping):
        raise TypeError("expected a dict from argument names to column names")
    return {k: v if isinstance(v, str) else list(v) for k, v in value.items()}


def to_dtypes(value: object) -> Any:
    """Convert dtypes, by order or by column, to names of dtypes."""
    from sparkhvd.data.columns.schema import dtype_name

    def name(dtype: object) -> str | None:
        try:
            return None if dtype is None else dtype_name(dtype)
        except InvalidArgumentError as e:
            raise TypeError(str(e)) from e  # Spark adds the name of the param to a TypeError

    if isinstance(value, Mapping):
        return {column: name(dtype) for column, dtype in value.items()}
    if not isinstance(value, Iterable):
        raise TypeError(
            "expected a list of dtypes in the order of the columns, or a dict from columns to dtypes"
        )
    return [name(dtype) for dtype in value]


def to_mapping(value: object) -> dict[str, Any]:
    """Convert a mapping to a dict."""
    if not isinstance(value, Mapping):
        raise TypeError("expected a dict")
    return dict(value)


def to_whole(value: object) -> int:
    """Convert a whole number. A bool or a text is an error."""
    if isinstance(value, (bool, str)):  # Spark's own message shows a text without quotes
        raise TypeError(f"expected a whole number, not {value!r}")
    return TypeConverters.toInt(value)


def to_float(value: object) -> float:
    """Convert a number. A bool or a text is an error."""
    if isinstance(value, (bool, str)):
        raise TypeError(f"expected a number, not {value!r}")
    return TypeConverters.toFloat(value)


def to_ranks(value: object) -> int | tuple[int, int]:
    """Convert a number of ranks, or the minimum and the maximum."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise TypeError("expected a whole number, or the pair (minimum, maximum)")
        return to_whole(value[0]), to_whole(value[1])
    return to_whole(value)


def to_loggers(value: object) -> list[Logger]:
    """Convert one or several loggers to a list."""
    loggers = [value] if isinstance(value, Logger) else value
    if not isinstance(loggers, (list, tuple)) or not all(isinstance(e, Logger) for e in loggers):
        raise TypeError(
            "expected loggers, such as [sparkhvd.MLflowLogger()], or instances of a subclass of sparkhvd.Logger"
        )
    return list(loggers)


# Default number of steps in a timeline. The file then has tens of megabytes, which a browser can show.
_TIMELINE_STEPS = 1000


def to_timeline(value: object) -> int:
    """Convert a number of steps. True means the default number."""
    if isinstance(value, bool):
        return _TIMELINE_STEPS if value else 0
    return to_whole(value)


def to_thresholds(value: object) -> list[float]:
    """Convert one threshold per class, as in Spark ML."""
    thresholds = TypeConverters.toListFloat(value)
    is_good = len(thresholds) > 1 and all(t >= 0 for t in thresholds) and thresholds.count(0) < 2
    if not is_good:
        raise TypeError("expected a number above 0 for each class, of which one may be 0")
    return thresholds


def to_function(value: object) -> Callable[..., Any]:
    """Require a callable."""
    if not callable(value):
        raise TypeError("expected a function")
    return value


# Name as a value of `optimizer` or `loss` -> class or function of torch.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
LOSSES: dict[str, Callable[[], torch.nn.Module]] = {
    "mse": torch.nn.MSELoss,
    "mae": torch.nn.L1Loss,
    "huber": torch.nn.HuberLoss,
    "cross_entropy": torch.nn.CrossEntropyLoss,
    "binary_cross_entropy_with_logits": torch.nn.BCEWithLogitsLoss,
    "nll": torch.nn.NLLLoss,
}


def _named(name: str, known: Mapping[str, T]) -> T:
    """Look up a name, ignoring upper and lower case."""
    if name.lower() not in known:
        raise TypeError(f"{name!r} is not one of {', '.join(map(repr, known))}")
    return known[name.lower()]


def to_optimizer(value: object) -> Any:
    """Convert the name of an optimizer to its class, and keep any other value."""
    return _named(value, OPTIMIZERS) if isinstance(value, str) else value


def to_losses(value: object) -> Any:
    """Convert names of losses, also in a list, to instances, and keep any other value."""
    if isinstance(value, (list, tuple)):
        return [to_losses(entry) for entry in value]
    return _named(value, LOSSES)() if isinstance(value, str) else value


def to_scheduler(value: object) -> Callable[..., Any]:
    """Require a scheduler factory, because a scheduler refers to the driver's optimizer."""
    if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
        kind = type(value).__name__
        raise TypeError(
            f"expected a function that makes the scheduler of an optimizer, because each rank has its own optimizer: "
            f"lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.{kind}(optimizer, ...)"
        )
    return to_function(value)


def to_stopping(value: object) -> dict[str, Any]:
    """Require a dict, for `early_stopping`."""
    if not isinstance(value, Mapping):
        raise TypeError("expected a dict, such as early_stopping={'patience': 3, 'min_delta': 0.0}")
    return dict(value)


def any_value(value: object) -> Any:
    """Accept any value."""
    return value


def to_store(value: object) -> Any:
    """Keep a store as given, but convert a URL with a password to a `Store`.

    A `Store` does not show the password in `explainParams` or in a saved estimator.
    """
    if isinstance(value, (str, PathLike)) and secrets_of(text := str(fspath(value)), {}):
        return Store(text)
    return value


# Converter -> Python type that it accepts, for type checkers.
ACCEPTED: dict[Converter, str] = {
    to_columns: "str | Sequence[str]",
    to_shapes: "Sequence[Sequence[int]] | Mapping[str, Sequence[int]]",
    to_inputs: "Mapping[str, str | Sequence[str]]",
    to_dtypes: "Sequence[Any] | Mapping[str, Any]",
    to_mapping: "Mapping[str, Any]",
    to_thresholds: "Sequence[float]",
    to_whole: "int",
    to_timeline: "bool | int",
    to_loggers: "Logger | Sequence[Logger]",
    to_function: "Callable[..., Any]",
    to_scheduler: "Callable[..., Any]",
    to_stopping: "Mapping[str, Any]",
    to_float: "float",
    TypeConverters.toString: "str",
    TypeConverters.toBoolean: "bool",
    TypeConverters.toListFloat: "Sequence[float]",
}
# Converter -> Python type of its result, where it differs from the type that the user may pass (table above).
CONVERTED: dict[Converter, str] = {
    to_columns: "list[str]",
    to_shapes: "list[list[int]] | dict[str, list[int]]",
    to_inputs: "dict[str, str | list[str]]",
    to_dtypes: "list[str | None] | dict[str, str | None]",
    to_mapping: "dict[str, Any]",
    to_stopping: "dict[str, Any]",
    to_optimizer: "Optimizer | Sequence[Optimizer] | Callable[..., Any]",
    to_losses: "Callable[..., Any] | Sequence[Callable[..., Any]]",
    to_thresholds: "list[float]",
    to_timeline: "int",
    to_loggers: "list[Logger]",
    TypeConverters.toListFloat: "list[float]",
}
