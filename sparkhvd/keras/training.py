"""A rank of `KerasEstimator.fit`: Keras' own `fit` over this rank's rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.data.dataset import Dataset
from sparkhvd.keras.backend import keras
from sparkhvd.keras.batches import Batches
from sparkhvd.keras.callbacks import BroadcastGlobalVariablesCallback
from sparkhvd.keras.network import Network
from sparkhvd.keras.optimizer import DistributedOptimizer
from sparkhvd.keras.progress import Progress
from sparkhvd.keras.variables import SEED_NAME

__all__ = ["Order", "train"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a rank trains.

    Attributes:
        network: around the user's model.
        compiling: arguments of `compile`.
        compiled: configuration of a model that the user has compiled, or None.
        distributing: options of `DistributedOptimizer`.
        dataset: rows.
        columns: features, labels, and that of weights.
        batch_size: rows per rank and step.
        val_batch_size: likewise, in validation.
        shuffle: a new order in each epoch.
        seed: of the order, and of random numbers.
        epochs: passes over the rows.
        callbacks: of Keras.
        checkpoint: callback of rank 0 that keeps the best model, or None.
        verbose: of Keras' `fit`, on rank 0.
        run_id: name of a run to go on with, or None.
    """

    network: Network
    compiling: Mapping[str, Any]
    compiled: dict[str, Any] | None
    distributing: Mapping[str, Any]
    dataset: Dataset
    columns: tuple[Sequence[str], Sequence[str], str | None]
    batch_size: int
    val_batch_size: int
    shuffle: bool
    seed: int
    epochs: int
    callbacks: Sequence[Any]
    checkpoint: Any
    verbose: int
    run_id: str | None


Trained = tuple[list[torch.Tensor], list[dict[str, float]]]


def train(order: Order) -> Trained | None:
    """Train on a rank; return variables and metrics by epoch on rank 0."""
    hvd.init()
    is_first = hvd.rank() == 0
    keras.utils.set_random_seed(order.seed + hvd.rank())
    model = _compiled(order)
    training = _batches(order, model, order.batch_size, shuffle=order.shuffle, seed=order.seed)
    validation = None
    if order.dataset.schema.validation is not None:
        validation = _batches(
            order, model, order.val_batch_size, shuffle=False, subset="validation"
        )
        validation = validation if len(validation) else None
    model.optimizer.build(model.trainable_variables)
    progress = None if order.run_id is None else Progress(order.dataset.store, order.run_id)
    restored = progress.restore(model) if progress is not None and is_first else []
    records = hvd.broadcast_object(restored, root_rank=0)
    rows = _Rows(training, validation)
    callbacks = [BroadcastGlobalVariablesCallback(0), rows, *order.callbacks]
    with tempfile.TemporaryDirectory(prefix="sparkhvd-keras-") as folder:
        best = ""
        if is_first and order.checkpoint is not None:
            suffix = ".weights.h5" if order.checkpoint.save_weights_only else ".keras"
            best = order.checkpoint.filepath = f"{folder}/best{suffix}"
            callbacks.append(order.checkpoint)
        if is_first:
            callbacks.append(_Records(records, progress))
        if len(records) < order.epochs:
            model.fit(
                training.for_keras(),
                validation_data=None if validation is None else validation.for_keras(),
                epochs=order.epochs,
                initial_epoch=len(records),
                shuffle=False,  # the batches are
                callbacks=callbacks,
                verbose=order.verbose if is_first else 0,
            )
        for each in (training, validation):
            if each is not None:
                each.close()
        if not is_first:
            return None
        if best and os.path.exists(best):
            model.load_weights(best)
    return [variable.value.detach().cpu() for variable in model.variables], records


def _compiled(order: Order) -> Any:
    model = order.network.model
    if order.compiled is None:
        model.compile(**order.compiling)
    else:
        with keras.saving.custom_object_scope(vars(order.network)["custom_objects"]):
            model.compile_from_config(order.compiled)
    # Around the optimizer that scales losses, where `compile` has put one.
    model.optimizer = DistributedOptimizer(model.optimizer, **order.distributing)
    for variable in model.variables:
        if variable.name == SEED_NAME:  # each rank drops other units
            variable.assign(variable + hvd.rank())
    return model


def _batches(order: Order, model: Any, batch_size: int, **options: Any) -> Batches:
    return Batches(model, order.dataset, order.columns, batch_size, **options)


class _Rows(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Callback that makes epochs of ranks one epoch of all rows: of the last step, of metrics.

    In the last step ranks have more and less rows, or none: losses are weighted so that the gradient is the mean of all rows of the step, and a
    step without rows leaves metrics as they are. At the end of an epoch metrics become means of all ranks' weighted by their rows.
    """

    def __init__(self, training: Batches, validation: Batches | None) -> None:
        super().__init__()
        self._training, self._validation = training, validation
        self._rows = {"train": 0, "val": 0}
        self._kept: list[Any] | None = None

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
        if batch == len(self._training) - 1:
            mean = hvd.allreduce(torch.tensor(float(rows)), name="KerasEstimator.rows")
            optimizer.loss_share = rows / float(mean)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End a step."""
        self._end()

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
        self._end()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace metrics by those of all ranks."""
        if not logs or hvd.size() == 1:
            return
        names = sorted(logs)
        weights = torch.tensor(
            [float(self._rows[_kind(name)]) for name in names], dtype=torch.float64
        )
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        # A rank without rows has no metrics.
        sums = torch.where(weights == 0, 0.0, values * weights)
        total = hvd.allreduce(
            torch.stack([sums, weights]), op=hvd.Sum, name="KerasEstimator.metrics"
        )
        logs.update(zip(names, (total[0] / total[1]).tolist(), strict=True))

    def _begin(self, kind: str, rows: int) -> None:
        self._rows[kind] += rows
        if not rows:
            self._kept = [v.value.detach().clone() for v in self.model.metrics_variables]

    def _end(self) -> None:
        if self._kept is not None:
            for variable, value in zip(self.model.metrics_variables, self._kept, strict=True):
                variable.assign(value)
            self._kept = None


def _kind(name: str) -> str:
    return "val" if name.startswith("val_") else "train"


class _Records(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback of rank 0 that keeps the metrics of each epoch, and the state behind it."""

    def __init__(self, records: list[dict[str, float]], progress: Progress | None) -> None:
        super().__init__()
        self._records, self._progress = records, progress

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Keep them."""
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        self._records.append({"epoch": epoch, **numbers})
        if self._progress is not None:
            self._progress.save(self.model, self._records)
