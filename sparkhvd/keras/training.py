"""A rank of `KerasEstimator.fit`: Keras' own `fit` over this rank's rows."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import sparkhvd.torch as hvd
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import Dataset
from sparkhvd.data.store.store import Store
from sparkhvd.data.store.temporary import is_temporary_store, keep_temporary_store
from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.keras.backend import keras
from sparkhvd.keras.callbacks import BroadcastGlobalVariablesCallback
from sparkhvd.keras.network import Network, arranged
from sparkhvd.keras.optimizer import DistributedOptimizer, follows_schedule
from sparkhvd.keras.variables import SEED_NAME
from sparkhvd.observe.loggers.base import Metric
from sparkhvd.observe.loggers.fanout import LoggerFanout
from sparkhvd.observe.timeline import Spans
from sparkhvd.rank_messages import log_metrics
from sparkhvd.training.modules import weights
from sparkhvd.training.profile import RunTimeline
from sparkhvd.training.torch_settings import TorchSettings, held
from sparkhvd.training.user_code.transformations import Transformations
from sparkhvd.wire import read_json


@dataclass(frozen=True, kw_only=True)
class KerasTrainSpec:
    """Training of a rank.

    Attributes:
        network: around the user's model.
        compiling: arguments of `compile`.
        compiled: configuration of a model that the user has compiled, or None.
        distributing: options of `DistributedOptimizer`.
        dataset: rows.
        held_out: rows that only validate, or None.
        split: fraction of validation rows, or None.
        columns: features, labels, and weights.
        transformed: the user's functions on rows and the columns that they return, or None.
        reading: options of `Loader`.
        val_num_workers: threads that run decoders of validation rows.
        learning_rate: of the optimizer, or None.
        scales_rate: multiply the learning rate by the number of ranks.
        batch_size: rows per rank and step.
        val_batch_size: likewise, in validation.
        drop_last: drop the last step if it is not full.
        max_steps: of an epoch of training and of validation, or None.
        shuffle: a new order in each epoch.
        seed: of the order, and of random numbers.
        epochs: passes over the rows.
        callbacks: of Keras.
        checkpoint: callback of rank 0 that keeps the best model, or None.
        verbose: of Keras' `fit`, on rank 0.
        run_id: name of a run to resume, or None.
        run_dir: folder of this fit, relative to the store.
        timeline: steps of a timeline; 0 for no timeline.
        logs_epochs: whether rank 0 sends the metrics of epochs to the driver's loggers.
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
def train(order: KerasTrainSpec) -> Trained | None:
    """Train on a rank and return variables and metrics by epoch on rank 0."""
    hvd.init()
    with RunTimeline(order.dataset.store, order.run_dir, order.timeline) as timeline:
        timeline.begin()
        return _train(order, timeline)


def _train(order: KerasTrainSpec, timeline: RunTimeline) -> Trained | None:
    is_first = hvd.rank() == 0
    keras.utils.set_random_seed(order.seed + hvd.rank())
    model = _compiled(order)
    training, validation = _batches(order, model)
    model.optimizer.build(model.trainable_variables)
    progress = None if order.run_id is None else ProgressFile(order.dataset.store, order.run_id)
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
            # Deleted once the driver has the model; a store error now costs no result.
            with contextlib.suppress(OSError, SparkhvdError):
                ProgressFile.of(order.dataset.store, order.run_dir).save(model, records)
    return [variable.value.detach().cpu() for variable in model.variables], records


def _compiled(order: KerasTrainSpec) -> Any:
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
    # Inside the loss-scaling optimizer, if `compile` has added one.
    model.optimizer = DistributedOptimizer(model.optimizer, **order.distributing)
    for variable in model.variables:
        if variable.name == SEED_NAME:  # different dropout masks per rank
            variable.assign(variable + hvd.rank())
    return model


def _batches(order: KerasTrainSpec, model: Any) -> tuple[KerasBatches, KerasBatches | None]:
    """Make the batches of training, and of validation if any row validates.

    Raises:
        InvalidArgumentError: no training step is full, and only full steps are allowed.
    """

    def read(
        dataset: Dataset, batch_size: int, max_steps: int | None, **options: Any
    ) -> KerasBatches:
        given = {**order.reading, "seed": order.seed, "max_steps": max_steps, **options}
        return KerasBatches(model, dataset, order.columns, batch_size, order.transformed, **given)

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
    """Callback of rank 0 to keep the metrics of each epoch, and the state after it."""

    def __init__(
        self, records: list[dict[str, float]], progress: ProgressFile | None, *, logs: bool
    ) -> None:
        super().__init__()
        self._records, self._progress, self._logs = records, progress, logs

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        self._records.append({"epoch": epoch, **numbers})
        if self._logs:
            log_metrics(numbers, epoch + 1)
        if self._progress is not None:
            self._progress.save(self.model, self._records)


# ----------------------------------------------------------------------------------------------------
# Batches of a prepared data set in Keras' form: tuples of inputs, labels and weights.


class KerasBatches(IterableDataset[Any]):
    """Batches of one rank. Every iteration restarts the epoch `epoch`.

    The restart is necessary because Keras inspects a first batch before it trains. If the last step of an epoch has no
    row for this rank, rows of another batch are used, and `rows` is 0.

    Attributes:
        epoch: of the next iteration.
        rows: of this rank in the last batch.
        spans: of a timeline, for the waits.
        spare: columns of a batch with rows.
        skips: decoders skip rows.
        is_uneven: ranks may have unequal numbers of rows in any step, because decoders skip some, or groups stay together.
    """

    def __init__(
        self,
        model: Any,
        dataset: Dataset,
        columns: tuple[Sequence[str], Sequence[str], str | None],
        batch_size: int,
        transformed: tuple[Transformations, DataSchema] | None = None,
        *,
        is_training: bool = True,
        max_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Describe the batches.

        Args:
            model: of Keras, which consumes them.
            dataset: the rows.
            columns: features, labels, and weights.
            batch_size: rows per rank and step.
            transformed: the user's functions, and the columns that they return; None without functions.
            is_training: passed to functions with such an argument.
            max_steps: of an epoch; None for all.
            **options: of `Loader`.
        """
        super().__init__()
        self._model = model
        self._features, self._labels, self._weight = columns
        self._transformed, self._is_training = transformed, is_training
        self._loader = dataset.loader(batch_size=batch_size, **options)
        self._loader.as_stored = transformed is not None
        self._max_steps = max_steps
        self.skips = RowFunctions(options.get("decoders") or {}).skips
        self.is_uneven = self.skips or dataset.schema.group is not None
        self.epoch = 0
        self.rows = 0
        self.spans = Spans()
        self.spare: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        """The number of steps of an epoch, equal on every rank."""
        steps = len(self._loader)
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of the epoch."""
        self._loader.set_epoch(self.epoch)
        batches = itertools.islice(self._loader, len(self))
        for columns in self.spans.timed(batches, "data"):
            self.rows = len(next(iter(columns.values())))
            if self.rows:
                self.spare = columns
            elif self.spare is None and self.is_uneven:
                # Rows of zeros, without effect on loss and metrics.
                self.spare = {n: each.new_zeros(1, *each.shape[1:]) for n, each in columns.items()}
            elif self.spare is None:
                raise InvalidArgumentError(
                    f"KerasEstimator: rank {self._loader.rank} of {self._loader.size} has no rows to train on. Fit with fewer ranks (num_proc)."
                )
            yield self._arranged(columns if self.rows else self.spare)

    def _arranged(self, columns: dict[str, Tensor]) -> tuple[Any, ...]:
        if self._transformed is not None:
            functions, schema = self._transformed
            arrays = {name: each.numpy() for name, each in columns.items()}
            made = functions.apply(arrays, schema.columns, is_training=self._is_training)
            columns = {name: torch.from_numpy(each) for name, each in made.items()}
        inputs = arranged(self._model, [columns[name] for name in self._features])
        labels = [columns[name] for name in self._labels]
        weights = () if self._weight is None else (columns[self._weight],)
        return (inputs, labels[0] if len(labels) == 1 else labels, *weights)

    @property
    def num_broken(self) -> int:
        """Rows of this rank skipped by decoders since the epoch began."""
        return self._loader.num_broken

    def for_keras(self) -> DataLoader[Any]:
        return DataLoader(self, batch_size=None, collate_fn=_same)

    def close(self) -> None:
        """Stop reading."""
        self._loader.close()


def _same(batch: Any) -> Any:
    return batch


# ----------------------------------------------------------------------------------------------------
# Combination of the ranks' epochs to an epoch of all rows: weights for the last step, and metrics of all ranks.

# Whether Keras lets metrics choose the aggregation of a variable. Older versions always set "mean", even for sums.
_TELLS = "aggregation" in inspect.signature(keras.metrics.Metric.add_variable).parameters


def merge_states(model: Any) -> None:
    """Merge the states of metrics over ranks, as if one process had seen all batches. Every rank must call it.

    States of Keras' metrics are totals and counts, which add up: AUC holds counts by threshold. A metric variable with
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
    """The factor of this rank's state in the sum."""
    kind = getattr(variable, "aggregation", "sum") if _TELLS else "sum"
    if kind == "mean":
        return 1 / hvd.size()
    return float(hvd.rank() == 0) if kind == "only_first_replica" else 1.0


class EpochRows(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Callback to make the ranks' epochs equal to an epoch of one process over all rows.

    In the last step, or in any step with skipped images or groups, ranks may have different numbers of rows, or no
    rows. The callback weights the losses so that the gradient is the mean over all rows of the step, and a step without
    rows does not change metrics. After the last step it merges the states of metrics over all ranks, and Keras computes
    its results from them. Other values that the user's `train_step` returns become the mean over all ranks, weighted by
    rows.
    """

    def __init__(self, training: KerasBatches, validation: KerasBatches | None) -> None:
        super().__init__()
        self._training, self._validation = training, validation
        self._rows = {"train": 0, "val": 0}
        self._kept: list[Any] | None = None
        self._are_merged = {"train": False, "val": False}

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Set the order of the epoch's rows."""
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
        self._end("train", batch == len(self._training) - 1, logs)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Provide rows for a last step without rows."""
        assert self._validation is not None
        self._validation.spare = self._validation.spare or self._training.spare

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        assert self._validation is not None
        self._begin("val", self._validation.rows)

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        assert self._validation is not None
        self._end("val", batch == len(self._validation) - 1, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace unmerged values by means over all ranks, and count rows skipped by decoders."""
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
        # Ignore the values of a rank without rows.
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
            # True if Keras returns results of metrics instead of the step's results.
            self._are_merged[kind] = set(logs or ()) == set(self.model.get_metrics_result())
            merge_states(self.model)


def _kind(name: str) -> str:
    return "val" if name.startswith("val_") else "train"


# ----------------------------------------------------------------------------------------------------
# State of a fit between epochs, in the store, from which a fit with the same `run_id` resumes.

_RECORDS = "records"


@dataclass(frozen=True)
class ProgressFile:
    """File of a run, written by rank 0.

    Attributes:
        store: visible to all executors.
        run_id: name of the run.
    """

    store: Store
    run_id: str

    @classmethod
    def of(cls, store: Store, run_dir: str) -> ProgressFile:
        return cls(store, run_dir.removeprefix("keras_runs/"))

    @property
    def path(self) -> str:
        """The file in the store."""
        return f"keras_runs/{self.run_id}/state"

    def save(self, model: Any, records: list[dict[str, float]]) -> None:
        """Write the variables of the model and of its optimizer, after as many epochs as there are records."""
        tensors = {str(number): each.detach() for number, each in enumerate(_values(model))}
        text = bytearray(json.dumps(records).encode())
        buffer = io.BytesIO()
        weights.dump({**tensors, _RECORDS: torch.frombuffer(text, dtype=torch.uint8)}, buffer)
        self.store.write_bytes(self.path, buffer.getvalue())

    def num_epochs(self) -> int:
        """Count the completed epochs: 0 for a new run."""
        if not self.store.exists(self.path):
            return 0
        found = weights.Weights("", self.store.read_bytes(self.path)).load()
        return len(read_json(bytes(found[_RECORDS].tolist())))

    def explain_failure(self, error: BaseException, epochs: int) -> bool:
        """Add a note to an error on how to resume the run and return False if the run certainly has no saved state.

        Before Python 3.11 the note is written to stderr. A temporary store with the state of a finished training is
        kept.
        """
        if not self.store.is_seen:
            return True
        with contextlib.suppress(OSError, SparkhvdError):  # the error itself says more
            if not (done := self.num_epochs()):
                return False
            stays = "stays"
            if is_temporary_store(self.store):
                stays = "stays while this process lives"
                if done >= epochs:
                    keep_temporary_store(self.store)
                    stays = f"stays until you delete {urlsplit(self.store.url).path}"
            note = (
                f"The state after epoch {done} of {epochs} {stays}: a fit with run_id={self.run_id!r} and store={self.store.url!r} resumes "
                "from there."
            )
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:
                sys.stderr.write(f"sparkhvd: {note}\n")
        return True

    def restore(self, model: Any) -> list[dict[str, float]]:
        """Load the state of the run into the model and return the records of its epochs, empty for a new run.

        Raises:
            InvalidArgumentError: the run has another model.
        """
        if not self.store.exists(self.path):
            return []
        found = weights.Weights("", self.store.read_bytes(self.path)).load()
        text = found.pop(_RECORDS)
        values = _values(model)
        if [each.shape for each in found.values()] != [each.shape for each in values]:
            raise InvalidArgumentError(
                f"KerasEstimator: run_id={self.run_id!r} is a run of another model or optimizer: it has {len(found)} variables and this fit has "
                f"{len(values)}, or their shapes differ. Give another run_id."
            )
        with torch.no_grad():
            for value, each in zip(values, found.values(), strict=True):
                value.copy_(each)
        records: list[dict[str, float]] = read_json(bytes(text.tolist()))
        return records


def _values(model: Any) -> list[torch.Tensor]:
    return [each.value for each in (*model.variables, *model.optimizer.variables)]


# ----------------------------------------------------------------------------------------------------
# Loggers and timeline of a Keras fit: the driver's parser of the ranks' lines, and a callback that records the parts of steps.
# Threads: the driver's stream is written by one thread at a time. Failure: see `observe.loggers` and `training.profile`.


class LoggerBridge:
    """Bridge from the ranks to the loggers of a fit."""

    def __init__(self, fanout: LoggerFanout, epochs_done: int) -> None:
        """Begin without epochs.

        Args:
            fanout: the loggers.
            epochs_done: completed epochs of a resumed run.
        """
        self.fanout = fanout
        self._done = epochs_done
        self._seen: set[int] = set()

    def take(self, metrics: Sequence[Metric]) -> None:
        """Pass on numbers of the ranks."""
        self._seen |= {m.step for m in metrics if not m.name.startswith("system/")}
        self.fanout.put(metrics)

    def ended(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Log the epochs not received while the ranks ran, such as those of a user's backend."""
        for record in history:
            epoch = record["epoch"] + 1
            if epoch > self._done and epoch not in self._seen:
                self.fanout.epoch({**record, "epoch": epoch})


class StepSpans(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Callback to record the parts of each step, until the timeline ends.

    Every rank must have it, as the first of its callbacks.
    """

    def __init__(self, timeline: RunTimeline) -> None:
        super().__init__()
        self._timeline = timeline
        self._part_ns = self._step_ns = time.monotonic_ns()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin the first step of an epoch."""
        self._step_ns = time.monotonic_ns()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin the computation of a step."""
        self._part_ns = time.monotonic_ns()
        self.model.optimizer.watch_parts(self._end_part)

    def _end_part(self, name: str) -> None:
        now = time.monotonic_ns()
        self._timeline.spans.add(name, self._part_ns, now)
        self._part_ns = now

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Add the step to the timeline."""
        now = time.monotonic_ns()
        self._timeline.spans.add("step", self._step_ns, now)
        self._step_ns = now
        self._timeline.step()
