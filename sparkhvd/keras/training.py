"""A rank of `KerasEstimator.fit`: Keras' own `fit` over this rank's rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import Dataset
from sparkhvd.keras.backend import keras
from sparkhvd.keras.batches import Batches
from sparkhvd.keras.callbacks import BroadcastGlobalVariablesCallback
from sparkhvd.keras.epoch_rows import EpochRows
from sparkhvd.keras.network import Network
from sparkhvd.keras.optimizer import DistributedOptimizer
from sparkhvd.keras.progress import Progress
from sparkhvd.keras.variables import SEED_NAME
from sparkhvd.training.user_code.transformations import Transformations

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
        transformed: the user's functions on rows and the columns that they return, or None.
        reading: options of `Loader`.
        val_num_workers: threads that run decoders of rows of validation.
        learning_rate: of the optimizer, or None.
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
    transformed: tuple[Transformations, DataSchema] | None
    reading: Mapping[str, Any]
    val_num_workers: int
    learning_rate: float | None
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
            order,
            model,
            order.val_batch_size,
            is_training=False,
            shuffle=False,
            subset="validation",
            num_workers=order.val_num_workers,
        )
        validation = validation if len(validation) else None
    model.optimizer.build(model.trainable_variables)
    progress = None if order.run_id is None else Progress(order.dataset.store, order.run_id)
    restored = progress.restore(model) if progress is not None and is_first else []
    records = hvd.broadcast_object(restored, root_rank=0)
    rows = EpochRows(training, validation)
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
    if order.learning_rate is not None:
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        inner.learning_rate = order.learning_rate
    # Around the optimizer that scales losses, where `compile` has put one.
    model.optimizer = DistributedOptimizer(model.optimizer, **order.distributing)
    for variable in model.variables:
        if variable.name == SEED_NAME:  # each rank drops other units
            variable.assign(variable + hvd.rank())
    return model


def _batches(order: Order, model: Any, batch_size: int, **options: Any) -> Batches:
    return Batches(
        model,
        order.dataset,
        order.columns,
        batch_size,
        order.transformed,
        **{**order.reading, **options},
    )


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
