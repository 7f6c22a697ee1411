"""Horovod's callbacks of Keras: equal initial weights, means of metrics, learning rate schedules and warm-up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.keras.backend import keras
from sparkhvd.keras.optimizer import follows_schedule
from sparkhvd.keras.variables import broadcast_global_variables

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Callback to broadcast a rank's model and optimizer variables before the first step of a fit.

    Args:
        root_rank: the rank with the values.
        device: Horovod's, without effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        del device
        self._root_rank = root_rank
        self._is_done = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Require a broadcast before the first batch of this fit."""
        self._is_done = False

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast before the first batch, after other callbacks have restored state."""
        if not self._is_done:
            self._is_done = True
            broadcast_global_variables(self._root_rank, self.model)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback to replace metrics by their means over all ranks at the end of each epoch.

    Later callbacks in the list, and the history, see the means: put it before `ReduceLROnPlateau`, `EarlyStopping`, `TensorBoard`
    and similar callbacks. Every rank must have the same metrics.

    Args:
        device: Horovod's, without effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics by their means over all ranks."""
        if not logs or hvd.size() == 1:
            return
        names = sorted(logs)
        means = hvd.allreduce(
            keras.ops.convert_to_tensor([float(logs[name]) for name in names], dtype="float64"),
            name="MetricAverageCallback",
        )
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback to set the learning rate to `initial_lr` times a multiplier, in a range of epochs.

    Args:
        initial_lr: the rate at multiplier 1, on every rank.
        multiplier: a number, or a function of the epoch; with `staircase=False` of the fraction of epochs trained after the next
            batch.
        start_epoch: the first epoch, counted from 0.
        end_epoch: the first epoch without changes of the rate; None = no end.
        staircase: set the rate at the beginning of epochs instead of before every batch. A number is always set so.
        momentum_correction: when the rate changes between batches, multiply the momentum by the ratio of the rates, because the
            velocity of `keras.optimizers.SGD` includes the rate.
        steps_per_epoch: batches of an epoch; None = as Keras counts them. Used with `staircase=False`.

    Raises:
        InvalidArgumentError: `initial_lr` is no number; the learning rate of the optimizer is a schedule; the number of
            batches of an epoch is unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidArgumentError(
                f"{type(self).__name__}: initial_lr is None. Give the learning rate at multiplier 1."
            )
        self._initial_lr = float(initial_lr)
        self._multiplier = multiplier
        self._epochs = (start_epoch, float("inf") if end_epoch is None else end_epoch)
        self._is_staircase = staircase or not callable(multiplier)
        self._corrects = momentum_correction
        self._steps = steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Check the base of the rate."""
        if follows_schedule(self._optimizer()):
            raise InvalidArgumentError(
                f"{type(self).__name__}: the learning rate of the optimizer is a LearningRateSchedule, so the callback cannot set it. Give the "
                "optimizer a number, or leave this callback out."
            )
        steps = self._steps or self.params.get("steps")
        if not self._is_staircase and not steps:
            raise InvalidArgumentError(
                f"{type(self).__name__}: Keras does not know how many batches an epoch has. Give steps_per_epoch."
            )
        self._steps = steps

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Record the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Set the rate of this batch."""
        begin, end = self._epochs
        if not begin <= self._epoch < end:
            return
        if self._is_staircase and batch == 0:
            self._set(self._epoch)
        elif not self._is_staircase:
            assert self._steps is not None
            # Count this batch, so that the last batch of an epoch has the rate at the end of the epoch.
            self._set(self._epoch + (batch + 1) / self._steps)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the momentum."""
        if self._momentum is not None:
            self._optimizer().momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the logs."""
        if logs is not None:
            logs["lr"] = float(self._optimizer().learning_rate)

    def _set(self, epoch: float) -> None:
        optimizer = self._optimizer()
        factor = self._multiplier(epoch) if callable(self._multiplier) else self._multiplier
        before, after = float(optimizer.learning_rate), self._initial_lr * factor
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", 0.0)
        if self._corrects and momentum and before and before != float(optimizer.learning_rate):
            self._momentum = momentum
            optimizer.momentum = momentum * after / before

    def _optimizer(self) -> Any:
        """Unwrap the model's optimizer if it has a wrapper for loss scaling."""
        optimizer = self.model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback to raise the rate from `initial_lr / size()` to `initial_lr`, batch by batch.

    In epoch e, a fraction that counts batches up to and including the next step, the rate is
    initial_lr / size * (e * (size - 1) / warmup_epochs + 1), as in Goyal et al., arXiv:1706.02677.

    Args:
        initial_lr: the rate after the warm-up, on every rank.
        warmup_epochs: length of the warm-up; may be a fraction.
        momentum_correction: as of `LearningRateScheduleCallback`.
        steps_per_epoch: likewise.
        verbose: 1: print when the warm-up has ended.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if not warmup_epochs > 0:
            raise InvalidArgumentError(
                f"LearningRateWarmupCallback: warmup_epochs is {warmup_epochs!r}; it must be more than 0."
            )

        def multiplier(epoch: float) -> float:
            ranks = hvd.size()
            return (min(epoch / warmup_epochs, 1.0) * (ranks - 1) + 1) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=-int(-warmup_epochs // 1),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate, and print when the warm-up has ended."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == self._epochs[1] - 1:
            rate = float(self._optimizer().learning_rate)
            sys.stdout.write(f"Epoch {epoch + 1}: the learning rate has warmed up to {rate:g}.\n")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Callback to keep the best model, for `checkpoint_callback` of `KerasEstimator`.

    The estimator sets the file.

    Args:
        monitor: name of the metric.
        verbose: 1: print when a model is kept.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath="best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )
