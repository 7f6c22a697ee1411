"""Epochs of ranks as one epoch of all rows: the weights of a last step, and metrics of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.keras.backend import keras
from sparkhvd.keras.batches import Batches

__all__ = ["EpochRows", "merge_states"]

# Older versions write "mean" on variables of metrics, whatever these hold.
_TELLS = "aggregation" in inspect.signature(keras.metrics.Metric.add_variable).parameters


def merge_states(model: Any) -> None:
    """Give the metrics of every rank the states that one process would have which had seen the batches of all; every rank must call it.

    States of Keras' metrics are totals and counts, which add up: AUC holds counts by threshold. A variable of a metric that is added with
    `aggregation="mean"` or `"only_first_replica"` gets the mean, or rank 0's value.
    """
    variables = model.metrics_variables
    if hvd.size() == 1 or not variables:
        return
    parts = [variable.value.detach().to("cpu", torch.float64).flatten() for variable in variables]
    shares = [part * _share(variable) for part, variable in zip(parts, variables, strict=True)]
    total = hvd.allreduce(torch.cat(shares), op=hvd.Sum, name="KerasEstimator.metrics")
    for variable, part in zip(variables, total.split([len(p) for p in parts]), strict=True):
        if "int" in variable.dtype:
            part = part.round()
        variable.assign(part.reshape(tuple(variable.shape)).to(variable.value.dtype))


def _share(variable: Any) -> float:
    """Return the factor of this rank's state in the sum."""
    kind = getattr(variable, "aggregation", "sum") if _TELLS else "sum"
    if kind == "mean":
        return 1 / hvd.size()
    return float(hvd.rank() == 0) if kind == "only_first_replica" else 1.0


class EpochRows(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Callback that makes epochs of ranks one epoch of all rows: of the last step, of metrics.

    In the last step, or in any where broken images are left out or groups stay together, ranks have more and less rows, or none: losses are
    weighted so that the gradient is the mean of all rows of the step, and a step without rows leaves metrics as they are. Behind the last one the states of metrics are those of all ranks, from which Keras takes its results.
    What a `train_step` of the user's returns besides metrics becomes the mean of all ranks', weighted by their rows.
    """

    def __init__(self, training: Batches, validation: Batches | None) -> None:
        super().__init__()
        self._training, self._validation = training, validation
        self._rows = {"train": 0, "val": 0}
        self._kept: list[Any] | None = None
        self._are_merged = {"train": False, "val": False}

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Choose the order of the epoch's rows."""
        self._training.epoch = epoch
        self._rows = {"train": 0, "val": 0}

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Weight the losses of a last step."""
        rows = self._training.rows
        self._begin("train", rows)
        optimizer = self.model.optimizer
        optimizer.loss_share = 1.0
        if self._training.is_uneven or batch == len(self._training) - 1:
            mean = float(hvd.allreduce(torch.tensor(float(rows)), name="KerasEstimator.rows"))
            optimizer.loss_share = rows / mean if mean else 0.0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End a step."""
        self._end("train", batch == len(self._training) - 1, logs)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Lend rows for a last step without any."""
        assert self._validation is not None
        self._validation.spare = self._validation.spare or self._training.spare

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin a step of validation."""
        assert self._validation is not None
        self._begin("val", self._validation.rows)

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End it."""
        assert self._validation is not None
        self._end("val", batch == len(self._validation) - 1, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace what no metric has merged by means over all ranks, and count what decoders have left out."""
        self._count_broken(logs)
        names = sorted(
            name
            for name in logs or ()
            if not self._are_merged[_kind(name)] and not name.endswith("broken_rows")
        )
        if logs is None or not names or hvd.size() == 1:
            return
        weights = torch.tensor(
            [float(self._rows[_kind(name)]) for name in names], dtype=torch.float64
        )
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        # A rank without rows has no metrics.
        sums = torch.where(weights == 0, 0.0, values * weights)
        total = hvd.allreduce(torch.stack([sums, weights]), op=hvd.Sum, name="KerasEstimator.logs")
        logs.update(zip(names, (total[0] / total[1]).tolist(), strict=True))

    def _count_broken(self, logs: dict[str, Any] | None) -> None:
        counted = {"": self._training, "val_": self._validation}
        for prefix, batches in counted.items():
            if logs is not None and batches is not None and batches.skips:
                number = torch.tensor(batches.num_broken)
                total = hvd.allreduce(number, op=hvd.Sum, name=f"KerasEstimator.{prefix}broken")
                logs[f"{prefix}broken_rows"] = int(total)

    def _begin(self, kind: str, rows: int) -> None:
        self._rows[kind] += rows
        if not rows:
            self._kept = [v.value.detach().clone() for v in self.model.metrics_variables]

    def _end(self, kind: str, is_last: bool, logs: Mapping[str, Any] | None) -> None:
        if self._kept is not None:
            for variable, value in zip(self.model.metrics_variables, self._kept, strict=True):
                variable.assign(value)
            self._kept = None
        if is_last:
            # Where Keras takes results of metrics and not what the step has returned.
            self._are_merged[kind] = set(logs or ()) == set(self.model.get_metrics_result())
            merge_states(self.model)


def _kind(name: str) -> str:
    return "val" if name.startswith("val_") else "train"
