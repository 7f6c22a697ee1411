"""A rank of `KerasEstimator.fit`: Keras' own `fit` over this rank's rows."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import Dataset
from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.keras.backend import keras
from sparkhvd.keras.batches import Batches
from sparkhvd.keras.callbacks import BroadcastGlobalVariablesCallback
from sparkhvd.keras.epoch_rows import EpochRows
from sparkhvd.keras.following import StepSpans
from sparkhvd.keras.network import Network
from sparkhvd.keras.optimizer import DistributedOptimizer, follows_schedule
from sparkhvd.keras.progress import Progress
from sparkhvd.keras.variables import SEED_NAME
from sparkhvd.rank_messages import log_metrics
from sparkhvd.training.run_timeline import RunTimeline
from sparkhvd.training.torch_settings import TorchSettings, held
from sparkhvd.training.user_code.transformations import Transformations

__all__ = ["Order", "Trained", "train"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a rank trains.

    Attributes:
        network: around the user's model.
        compiling: arguments of `compile`.
        compiled: configuration of a model that the user has compiled, or None.
        distributing: options of `DistributedOptimizer`.
        dataset: rows.
        held_out: rows that only validate, or None.
        split: fraction of the rows that validate, or None.
        columns: features, labels, and that of weights.
        transformed: the user's functions on rows and the columns that they return, or None.
        reading: options of `Loader`.
        val_num_workers: threads that run decoders of rows of validation.
        learning_rate: of the optimizer, or None.
        scales_rate: multiply the learning rate by the number of ranks.
        batch_size: rows per rank and step.
        val_batch_size: likewise, in validation.
        drop_last: leave out the last step if it is not full.
        max_steps: of an epoch of training and of validation, or None.
        shuffle: a new order in each epoch.
        seed: of the order, and of random numbers.
        epochs: passes over the rows.
        callbacks: of Keras.
        checkpoint: callback of rank 0 that keeps the best model, or None.
        verbose: of Keras' `fit`, on rank 0.
        run_id: name of a run to go on with, or None.
        run_dir: folder of this fit, relative to the store.
        timeline: steps of a timeline; 0 for none.
        logs_epochs: whether rank 0 gives the metrics of epochs to the driver's loggers.
        torch_settings: of the driver.
    """

    network: Network
    compiling: Mapping[str, Any]
    compiled: dict[str, Any] | None
    distributing: Mapping[str, Any]
    dataset: Dataset
    held_out: Dataset | None
    split: float | None
    columns: tuple[Sequence[str], Sequence[str], str | None]
    transformed: tuple[Transformations, DataSchema] | None
    reading: Mapping[str, Any]
    val_num_workers: int
    learning_rate: float | None
    scales_rate: bool
    batch_size: int
    val_batch_size: int
    drop_last: bool
    max_steps: tuple[int | None, int | None]
    shuffle: bool
    seed: int
    epochs: int
    callbacks: Sequence[Any]
    checkpoint: Any
    verbose: int
    run_id: str | None
    run_dir: str
    timeline: int
    logs_epochs: bool
    torch_settings: TorchSettings

    @property
    def has_split(self) -> bool:
        """True if some rows of `dataset` validate."""
        return bool(self.split) or self.dataset.schema.validation is not None


Trained = tuple[list[torch.Tensor], list[dict[str, float]]]


@held
def train(order: Order) -> Trained | None:
    """Train on a rank; return variables and metrics by epoch on rank 0."""
    hvd.init()
    with RunTimeline(order.dataset.store, order.run_dir, order.timeline) as timeline:
        timeline.begin()
        return _train(order, timeline)


def _train(order: Order, timeline: RunTimeline) -> Trained | None:
    is_first = hvd.rank() == 0
    keras.utils.set_random_seed(order.seed + hvd.rank())
    model = _compiled(order)
    training, validation = _batches(order, model)
    model.optimizer.build(model.trainable_variables)
    progress = None if order.run_id is None else Progress(order.dataset.store, order.run_id)
    restored = progress.restore(model) if progress is not None and is_first else []
    records = hvd.broadcast_object(restored, root_rank=0)
    rows = EpochRows(training, validation)
    callbacks = [BroadcastGlobalVariablesCallback(0), rows, *order.callbacks]
    if order.timeline:
        training.spans = timeline.spans
        callbacks.insert(0, StepSpans(timeline))
    with tempfile.TemporaryDirectory(prefix="sparkhvd-keras-") as folder:
        best = ""
        if is_first and order.checkpoint is not None:
            suffix = ".weights.h5" if order.checkpoint.save_weights_only else ".keras"
            best = order.checkpoint.filepath = f"{folder}/best{suffix}"
            callbacks.append(order.checkpoint)
        if is_first:
            callbacks.append(_Records(records, progress, logs=order.logs_epochs))
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
        if best or progress is None:
            # Until the driver has the model; a store that fails now costs no result.
            with contextlib.suppress(OSError, SparkhvdError):
                Progress.of(order.dataset.store, order.run_dir).save(model, records)
    return [variable.value.detach().cpu() for variable in model.variables], records


def _compiled(order: Order) -> Any:
    model = order.network.model
    if order.compiled is None:
        model.compile(**order.compiling)
    else:
        with keras.saving.custom_object_scope(vars(order.network)["custom_objects"]):
            model.compile_from_config(order.compiled)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if order.learning_rate is not None:
        inner.learning_rate = order.learning_rate
    if order.scales_rate and not follows_schedule(inner):
        inner.learning_rate = float(inner.learning_rate) * hvd.size()
    # Around the optimizer that scales losses, where `compile` has put one.
    model.optimizer = DistributedOptimizer(model.optimizer, **order.distributing)
    for variable in model.variables:
        if variable.name == SEED_NAME:  # each rank drops other units
            variable.assign(variable + hvd.rank())
    return model


def _batches(order: Order, model: Any) -> tuple[Batches, Batches | None]:
    """Return the batches of training, and of validation if any row validates.

    Raises:
        InvalidArgumentError: no training step is full, and only full ones are wanted.
    """

    def read(dataset: Dataset, batch_size: int, max_steps: int | None, **options: Any) -> Batches:
        given = {**order.reading, "seed": order.seed, "max_steps": max_steps, **options}
        return Batches(model, dataset, order.columns, batch_size, order.transformed, **given)

    split: dict[str, Any] = {"validation": order.split or None}
    training = read(
        order.dataset,
        order.batch_size,
        order.max_steps[0],
        shuffle=order.shuffle,
        drop_last=order.drop_last,
        **split,
    )
    if not len(training):
        raise InvalidArgumentError(
            "KerasEstimator: drop_last leaves out a step that is not full, and the training rows fill none of num_proc * batch_size = "
            f"{hvd.size() * order.batch_size:,} rows. Lower batch_size, or set drop_last=False."
        )
    if order.held_out is None and not order.has_split:
        return training, None
    validation = read(
        order.dataset if order.held_out is None else order.held_out,
        order.val_batch_size,
        order.max_steps[1],
        is_training=False,
        shuffle=False,
        num_workers=order.val_num_workers,
        **({"subset": "validation", **split} if order.held_out is None else {}),
    )
    return training, validation if len(validation) else None


class _Records(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback of rank 0 that keeps the metrics of each epoch, and the state behind it."""

    def __init__(
        self, records: list[dict[str, float]], progress: Progress | None, *, logs: bool
    ) -> None:
        super().__init__()
        self._records, self._progress, self._logs = records, progress, logs

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Keep them."""
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        self._records.append({"epoch": epoch, **numbers})
        if self._logs:
            log_metrics(numbers, epoch + 1)
        if self._progress is not None:
            self._progress.save(self.model, self._records)
