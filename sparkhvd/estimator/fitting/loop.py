"""Options of the training loop that follow from several Params: the monitored number, the returned epoch, early stopping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.options import FitOptions
from sparkhvd.training.early_stopping import EarlyStopping, Monitor
from sparkhvd.training.precision import check_precision

__all__ = ["LoopOptions", "loop_options"]


@dataclass(frozen=True)
class LoopOptions:
    """Fields of `TrainSpec` with these names.

    Attributes:
        monitor: number of the history that tells the best epoch.
        return_best: return the best epoch's weights instead of the last one's.
        early_stopping: when to end before the last epoch, or None.
    """

    monitor: Monitor = Monitor()
    return_best: bool = False
    early_stopping: EarlyStopping | None = None

    def describe(self, *, has_schedule: bool) -> dict[str, object]:
        """Return the facts that a resumed fit must share: they decide which checkpoints stay, and what a schedule has looked at.

        Args:
            has_schedule: True if the fit has a learning-rate scheduler.
        """
        is_seen = self.return_best or has_schedule
        return {
            "return_model": "best" if self.return_best else "last",
            "monitor": f"{self.monitor.mode} of {self.monitor.name}" if is_seen else None,
        }


def loop_options(
    options: FitOptions, *, model: nn.Module, metric_names: Sequence[str], has_validation: bool
) -> LoopOptions:
    """Decide on the options of the training loop.

    Args:
        options: of the fit.
        model: the module to train.
        metric_names: of the fit's metrics, as they begin in the history.
        has_validation: some rows validate.

    Raises:
        InvalidArgumentError: two Params contradict each other.
    """
    check_precision(options.precision, model)
    if options.validation_steps_per_epoch is not None and not has_validation:
        raise InvalidArgumentError(
            "validation_steps_per_epoch is given, and there is no validation. Set validation, for example 0.1."
        )
    keys = _HistoryKeys.of(options, metric_names, has_validation=has_validation)
    default = "val_loss" if has_validation else "loss"
    name = options.monitor or default
    keys.check("monitor", name)
    monitor = Monitor(name, options.monitor_mode)
    return LoopOptions(
        monitor, _returns_best(options, has_validation), _early_stopping(options, monitor, keys)
    )


@dataclass(frozen=True)
class _HistoryKeys:
    """Keys that the records of the history will have.

    Attributes:
        names: those known before the first epoch, or their beginnings.
        is_open: True if user code may log others.
    """

    names: tuple[str, ...]
    is_open: bool

    @classmethod
    def of(
        cls, options: FitOptions, metric_names: Sequence[str], *, has_validation: bool
    ) -> _HistoryKeys:
        names = ("loss", *metric_names)
        functions = (options.train_step, options.validation_step, options.train_fn)
        is_open = bool(options.callbacks) or any(each is not None for each in functions)
        validated = tuple(f"val_{name}" for name in names) if has_validation else ()
        return cls(names + validated, is_open=is_open)

    def check(self, param: str, name: str) -> None:
        """Refuse a key that no record will have."""
        # A metric with several values has a key for each, known when the first epoch has ended.
        if (
            self.is_open
            or name in self.names
            or name.startswith(tuple(f"{n}_" for n in self.names))
        ):
            return
        raise InvalidArgumentError(
            f"{param} is {name!r}, which the history will not have. It will have {', '.join(map(repr, self.names))}."
        )


def _returns_best(options: FitOptions, has_validation: bool) -> bool:
    if options.return_model != "best":
        return False
    if not has_validation and options.monitor is None:
        name = "return_model='best'" if "return_model" in options.explicit else "restore_best"
        raise InvalidArgumentError(
            f"{name} needs validation rows to tell which epoch is best. Set validation, for example 0.1, or name "
            "another number of the history as monitor."
        )
    return True


def _early_stopping(
    options: FitOptions, monitor: Monitor, keys: _HistoryKeys
) -> EarlyStopping | None:
    entries = options.early_stopping
    if entries is None:
        return None
    unknown = sorted(set(entries) - {"monitor", "mode", "patience", "min_delta"})
    if unknown:
        raise InvalidArgumentError(
            f"early_stopping has {', '.join(map(repr, unknown))}. It may have 'monitor', 'mode', 'patience' and "
            "'min_delta'."
        )
    name, mode = entries.get("monitor", monitor.name), entries.get("mode", monitor.mode)
    if mode not in ("min", "max"):
        raise InvalidArgumentError(
            f"early_stopping's monitor's mode is {mode!r}; it must be one of 'min', 'max'."
        )
    keys.check("early_stopping's monitor", name)
    patience, min_delta = entries.get("patience", 1), entries.get("min_delta", 0.0)
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise InvalidArgumentError(
            f"early_stopping's patience is {patience!r}; it must be a whole number of epochs, at least 1."
        )
    if not isinstance(min_delta, (int, float)) or not min_delta >= 0:
        raise InvalidArgumentError(
            f"early_stopping's min_delta is {min_delta!r}; it must be a number, at least 0."
        )
    return EarlyStopping(Monitor(name, mode), patience, float(min_delta))
