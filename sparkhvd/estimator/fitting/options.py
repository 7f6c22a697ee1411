"""From the Params that shape the training loop to what the ranks get, checked on the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.early_stopping import EarlyStopping, Monitor
from sparkhvd.training.precision import check_precision

__all__ = ["describe_result", "training_options"]


def training_options(
    get: Callable[[str], Any],
    to_ranks: Mapping[str, Any],
    *,
    model: nn.Module,
    metric_names: Sequence[str],
    has_validation: bool,
) -> dict[str, Any]:
    """Fields of `TrainSpec`, from Params.

    Args:
        get: the value of a Param by name, or None.
        to_ranks: fields of `TrainSpec` that are Params as they are.
        model: the module to train.
        metric_names: of the fit's metrics, as they begin in the history.
        has_validation: some rows validate.

    Raises:
        InvalidArgumentError: a value is out of range, or two Params contradict each other.
    """
    check_precision(get("precision"), model)
    if get("validation_steps_per_epoch") is not None and not has_validation:
        raise InvalidArgumentError(
            "validation_steps_per_epoch is given, and there is no validation. Set validation, for example 0.1."
        )
    known = ["loss", *metric_names]
    known += [f"val_{name}" for name in known] if has_validation else []
    default = "val_loss" if has_validation else "loss"
    # What user code logs is known when the first epoch has ended.
    logs = any(get(n) for n in ("train_step", "validation_step", "train_fn", "callbacks"))
    monitor = _monitor(
        "monitor", get("monitor") or default, get("monitor_mode"), known, any_name=logs
    )
    return {
        **to_ranks,
        "monitor": monitor,
        "return_best": _returns_best(get, has_validation),
        "early_stopping": _early_stopping(get("early_stopping"), monitor, known, any_name=logs),
    }


def describe_result(options: Mapping[str, Any], *, has_schedule: bool) -> dict[str, Any]:
    """What two fits must share because it decides which checkpoints stay and what a schedule may have looked at.

    Args:
        options: what `training_options` gave.
        has_schedule: whether the fit has a learning-rate scheduler.
    """
    monitor, is_best = options["monitor"], options["return_best"]
    return {
        "return_model": "best" if is_best else "last",
        "monitor": f"{monitor.mode} of {monitor.name}" if is_best or has_schedule else None,
    }


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        given = ", ".join(map(repr, choices))
        raise InvalidArgumentError(f"{name} is {value!r}; it must be one of {given}.")


def _monitor(param: str, name: str, mode: str, known: Sequence[str], *, any_name: bool) -> Monitor:
    _check_choice(f"{param}'s mode" if param != "monitor" else "monitor_mode", mode, ("min", "max"))
    # A metric with several values has a key for each, known when the first epoch has ended.
    if not any_name and name not in known and not any(name.startswith(f"{one}_") for one in known):
        raise InvalidArgumentError(
            f"{param} is {name!r}, which the history will not have. It will have {', '.join(map(repr, known))}."
        )
    return Monitor(name, mode)


def _returns_best(get: Callable[[str], Any], has_validation: bool) -> bool:
    given, restore = get("return_model"), get("restore_best")
    if given is None and not restore:
        return False
    if given is not None:
        _check_choice("return_model", given, ("best", "last"))
        if restore and given == "last":
            raise InvalidArgumentError(
                "return_model is 'last' and restore_best is True, which means 'best'. Give one of them."
            )
        if given == "last":
            return False
    if not has_validation and get("monitor") is None:
        name = "restore_best" if given is None else "return_model='best'"
        raise InvalidArgumentError(
            f"{name} needs validation rows to tell which epoch is best. Set validation, for example 0.1, or name "
            "another number of the history as monitor."
        )
    return True


def _early_stopping(
    given: Mapping[str, Any] | None, monitor: Monitor, known: Sequence[str], *, any_name: bool
) -> EarlyStopping | None:
    if given is None:
        return None
    unknown = sorted(set(given) - {"monitor", "mode", "patience", "min_delta"})
    if unknown:
        raise InvalidArgumentError(
            f"early_stopping has {', '.join(map(repr, unknown))}. It may have 'monitor', 'mode', 'patience' and "
            "'min_delta'."
        )
    own = _monitor(
        "early_stopping's monitor",
        given.get("monitor", monitor.name),
        given.get("mode", monitor.mode),
        known,
        any_name=any_name,
    )
    patience, min_delta = given.get("patience", 1), given.get("min_delta", 0.0)
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise InvalidArgumentError(
            f"early_stopping's patience is {patience!r}; it must be a whole number of epochs, at least 1."
        )
    if not isinstance(min_delta, (int, float)) or not min_delta >= 0:
        raise InvalidArgumentError(
            f"early_stopping's min_delta is {min_delta!r}; it must be a number, at least 0."
        )
    return EarlyStopping(own, patience, float(min_delta))
