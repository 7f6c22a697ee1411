"""The estimator's `train_fn`: Lightning's `Trainer` on the batches of a rank."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.data.columns.binding import model_dtype
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.lightning.strategy import package_of, register
from sparkhvd.training.modules.weights import HashingWriter, sha256_of
from sparkhvd.training.profile import StepReporter
from sparkhvd.training.train_fn import Loader, TrainFnContext
from sparkhvd.training.types import TensorBatch


@dataclass(frozen=True, kw_only=True)
class LightningLoop:
    """Trains a LightningModule with Lightning's `Trainer`.

    Attributes:
        callbacks: Lightning's callbacks.
        logger: a logger of Lightning, True for Lightning's default logger, or False.
        profiler: a profiler of Lightning, or None.
        log_every_n_steps: argument of Lightning's trainer.
        trainer_args: further arguments of the trainer.
        columns: order of tuple batches; None for a dict.
        rows: function on rows; None leaves batches unchanged.
        data_module: makes a LightningDataModule from Horovod's arguments; None uses the fit's batches.
        loading: values of Params passed to it unchanged.
        strategy: arguments of the strategy.
        moves_files: loggers and `ModelCheckpoint` write into the run's folder instead of their configured folder.
        ends_on_nan: fail when a loss is not finite.
        wrap: makes the LightningModule around the run's module; None if that is a LightningModule.
    """

    callbacks: Sequence[Any] = ()
    logger: Any = False
    profiler: Any = None
    log_every_n_steps: int = 50
    trainer_args: Mapping[str, Any]
    columns: Sequence[str] | None = None
    rows: RowFunction | None = None
    data_module: Callable[..., Any] | None = None
    loading: Mapping[str, Any]
    strategy: Mapping[str, Any]
    moves_files: bool = False
    ends_on_nan: bool = False
    wrap: Callable[[TrainFnContext], Any] | None = None

    @property
    def feeds_model(self) -> bool:
        """Whether `training_step` receives the columns, so that they need not fit the module's `forward`."""
        return self.wrap is None or self.changes_columns

    @property
    def changes_columns(self) -> bool:
        """True if batches differ from the data's columns."""
        return self.rows is not None or self.data_module is not None

    @property
    def takes_rows(self) -> bool:
        """True if a row function runs before the module."""
        return self.rows is not None

    def __call__(self, ctx: TrainFnContext) -> None:
        """Train on a rank. Every rank must call it."""
        module = ctx.model if self.wrap is None else self.wrap(ctx)
        package = package_of(module)
        files = RunFiles(ctx.store, ctx.run_dir)
        io = checkpoint_io(package, files)
        state = RunState(module, ctx, io, files)
        ctx.keep("lightning", state)
        for each in self.callbacks:
            if isinstance(each, package.callbacks.ModelCheckpoint) and (
                each.dirpath is None or self.moves_files
            ):
                each.dirpath = files.folder
        with _log_folder(ctx) as folder:
            if self.moves_files:
                _move(self.logger, folder)
            callbacks = list(self.callbacks)
            if self.ends_on_nan:
                callbacks.append(finite_losses(package, ctx))
            arguments: dict[str, Any] = {
                "accelerator": "gpu" if ctx.device.type == "cuda" else "cpu",
                "logger": self.logger,
                "profiler": self.profiler,
                "log_every_n_steps": self.log_every_n_steps,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "num_sanity_val_steps": 0,
                "default_root_dir": folder,
                # A data module already reads only this rank's share of the rows, which a sampler would divide again.
                "use_distributed_sampler": self.data_module is None,
                **self._limits(ctx),
                **self.trainer_args,
                "max_epochs": ctx.epochs,
                "callbacks": [*callbacks, bridge(package, ctx, state)],
                "enable_checkpointing": True,
            }
            strategy = register(package)(checkpoint_io=io, **self.strategy)
            if self.data_module is None:
                strategy.loss_weight = lambda: ctx.loss_weight
            trainer = package.Trainer(strategy=strategy, **arguments)
            trainer.fit(
                module,
                **self._data(ctx),
                ckpt_path=IN_MEMORY if state.is_resumed else None,
            )
        state.trainer = None
        _return_best(package, module, ctx, trainer, files)

    def _limits(self, ctx: TrainFnContext) -> dict[str, Any]:
        """Make arguments that disable validation for a data module without validation rows.

        Otherwise, Lightning would ask the data module for a loader. Such a data module may return None as in Horovod,
        which Lightning does not accept.
        """
        has_none = self.data_module is not None and ctx.val_loader is None
        return {"limit_val_batches": 0} if has_none else {}

    def _data(self, ctx: TrainFnContext) -> dict[str, Any]:
        """Make the arguments of `Trainer.fit` for the batches."""
        if self.data_module is not None:
            return {"datamodule": self.data_module(**self._horovod_arguments(ctx))}
        loaders = {"train_dataloaders": self._batches(ctx, ctx.train_loader)}
        if ctx.val_loader is not None:
            loaders["val_dataloaders"] = self._batches(ctx, ctx.val_loader)
        return loaders

    def _batches(self, ctx: TrainFnContext, loader: Loader) -> LightningBatches:
        return LightningBatches(loader, ctx, self.columns, self.rows)

    def _horovod_arguments(self, ctx: TrainFnContext) -> dict[str, Any]:
        spec, rows = ctx._spec, self.rows
        data = _url(spec.data_store, spec.store, spec.data_dir)
        held_out = data
        if spec.validation_dir is not None:
            held_out = _url(spec.validation_store, spec.store, spec.validation_dir)
        steps = len(ctx.train_loader)
        return {
            "train_dir": data,
            "val_dir": held_out,
            "num_train_epochs": ctx.epochs,
            "has_val": ctx.val_loader is not None,
            "train_batch_size": spec.batch_size,
            "val_batch_size": spec.val_batch_size,
            "shuffle": spec.shuffle,
            "cur_shard": ctx.rank,
            "shard_count": ctx.size,
            "schema_fields": [
                *(n for a in spec.inputs.arguments for n in a.columns),
                *spec.labels.columns,
                *([spec.sample_weight] if spec.sample_weight else []),
            ],
            "storage_options": (spec.data_store or spec.store)._place.options or None,
            "steps_per_epoch_train": steps,
            "steps_per_epoch_val": 0 if ctx.val_loader is None else len(ctx.val_loader),
            "transformation": None if rows is None else rows.function,
            "transformation_edit_fields": None if rows is None else list(rows.fields),
            "transformation_removed_fields": None if rows is None else list(rows.removed),
            "seed": spec.seed,
            **self.loading,
        }


def _url(files: Store | None, store: Store, folder: str) -> str:
    """Make the URL of files read in place, or of a folder of packed files."""
    return store.full_url(folder) if files is None else files.url


def _move(loggers: Any, folder: str) -> None:
    """Move loggers with a folder to another folder."""
    for logger in loggers if isinstance(loggers, (list, tuple)) else [loggers]:
        for name in ("_root_dir", "_save_dir"):  # of Lightning's TensorBoardLogger and CSVLogger
            if hasattr(logger, name):
                setattr(logger, name, folder)


@contextlib.contextmanager
def _log_folder(ctx: TrainFnContext) -> Iterator[str]:
    """Provide the folder for the run's logs. A temporary folder if the store is not a local folder."""
    path = ctx.store.local_path(f"{ctx.run_dir}/logs")
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="sparkhvd-logs-") as folder:
        yield folder


def _return_best(
    package: Any, module: Any, ctx: TrainFnContext, trainer: Any, files: RunFiles
) -> None:
    """Load the weights of a `ModelCheckpoint`'s best checkpoint, and make the run return them. Every rank must call it."""
    paths = [
        os.fspath(each.best_model_path)
        for each in trainer.checkpoint_callbacks
        if isinstance(each, package.callbacks.ModelCheckpoint)
    ]
    name = ""
    if paths and not ctx._spec.return_best:
        name = files.name_of(paths[0]) or (paths[0] if paths[0] in files.sums else "")
    if not hvd.broadcast_object(name, 0, name="lightning.best"):
        return
    if ctx.rank == 0:
        module.load_state_dict(files.load(name)["state_dict"])
    hvd.broadcast_parameters(ctx.model.state_dict(), 0)
    ctx.save_checkpoint()


# ----------------------------------------------------------------------------------------------------
# Lightning's checkpoints in a run: Lightning's state in memory, for the run's own checkpoint, and the files of a
# `ModelCheckpoint` in the run's folder.
# Checkpoints of a run are read without trust, so the states of Lightning and of callbacks must be plain: tensors,
# numbers, texts, and dicts and lists of them.

# Path that stands for the state in the run's own checkpoint.
IN_MEMORY = "sparkhvd:run"
# Parts of Lightning's state to omit, because the run has them or they describe the module and not its training.
_LEFT_OUT = (
    "state_dict",
    *("hyper_parameters", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_type"),
)
_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class RunFiles:
    """Lightning's files in a run's folder of the store, written by the user's `ModelCheckpoint`.

    The files may hold code, so a file is read only if it has not changed since this run wrote it.

    Attributes:
        folder: path of the folder for Lightning; a made-up path if the store is not a local folder.
        sums: SHA-256 of each file by name, or by path for files that the user's callback wrote elsewhere on this host.
    """

    def __init__(self, store: Store, run_dir: str) -> None:
        self._store, self._prefix = store, f"{run_dir}/lightning"
        self.folder = store.local_path(self._prefix) or f"/sparkhvd/{self._prefix}"
        self.sums: dict[str, str] = {}

    def name_of(self, path: str) -> str:
        """Extract the file name from a path, or return "" for a file outside of the folder."""
        folder, _, name = os.fspath(path).rpartition("/")
        return name if folder == self.folder else ""

    def note(self, path: str) -> None:
        """Record the hash of a file written elsewhere on this host."""
        if os.path.isfile(path):
            with open(path, "rb") as file:
                self.sums[os.fspath(path)] = sha256_of(file, os.path.getsize(path))

    def save(self, name: str, checkpoint: Mapping[str, Any]) -> None:
        """Write a checkpoint file, and record its hash."""
        with self._store.open_output(f"{self._prefix}/{name}") as sink:
            hashing = HashingWriter(sink)
            torch.save(checkpoint, hashing)  # type: ignore[arg-type]  # torch only calls write
            self.sums[name] = hashing.sha256

    def load(self, name: str) -> dict[str, Any]:
        """Read a checkpoint file, and compare its hash with the recorded hash.

        Raises:
            StoreError: it has changed since this run wrote it.
        """
        if os.path.isabs(name):
            where, data = name, Path(name).read_bytes()
        else:
            path = f"{self._prefix}/{name}"
            where, data = self._store.full_url(path), self._store.read_bytes(path)
        if hashlib.sha256(data).hexdigest() != self.sums.get(name):
            raise StoreError(
                f"{where} has changed since this run wrote it. The file is damaged, or another program writes to its folder."
            )
        loaded: dict[str, Any] = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False
        )
        return loaded

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        self._store.delete(f"{self._prefix}/{name}")
        self.sums.pop(name, None)


def checkpoint_io(package: Any, files: RunFiles) -> Any:
    """Make a `CheckpointIO` for a package of Lightning.

    The path `IN_MEMORY` stands for the attribute `state`. The run's files are read and written by `files`, other files
    by Lightning's default.
    """

    class RunCheckpointIO(package.plugins.io.TorchCheckpointIO):  # type: ignore[misc]  # of either package
        state: dict[str, Any] | None = None

        def save_checkpoint(
            self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
        ) -> None:
            if path == IN_MEMORY:
                self.state = {n: part for n, part in checkpoint.items() if n not in _LEFT_OUT}
            elif name := files.name_of(path):
                files.save(name, checkpoint)
            else:
                super().save_checkpoint(checkpoint, path, storage_options)
                files.note(path)

        def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
            if path == IN_MEMORY:
                return dict(self.state or {})
            if name := files.name_of(path):
                return files.load(name)
            loaded: dict[str, Any] = super().load_checkpoint(path, *args, **options)
            return loaded

        def remove_checkpoint(self, path: Any) -> None:
            if name := files.name_of(path):
                files.delete(name)
            else:
                super().remove_checkpoint(path)

    return RunCheckpointIO()


def plain(value: Any, name: str = "") -> Any:
    """Convert a state to plain containers and numbers.

    Raises:
        InvalidArgumentError: a checkpoint cannot hold a part of the state.
    """
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.from_numpy(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = type(value) if type(value) in (list, tuple, set) else list
        return kind(plain(part, f"{name}[{i}]") for i, part in enumerate(value))
    raise InvalidArgumentError(
        f"Lightning's state holds {type(value).__name__} in {name}, but checkpoints of a run can hold only tensors, numbers, texts, and dicts "
        "and lists of them. Let state_dict() of this callback or scheduler return only such values."
    )


# ----------------------------------------------------------------------------------------------------
# Connection of Lightning's trainer to the run of a fit: history, progress, and checkpoints inside and after epochs.


class RunState:
    """State of Lightning, for `ctx.keep`.

    Attributes:
        trainer: trainer whose state is saved; None keeps the last trainer's state.
        rows: rows of the epoch so far on all ranks.
    """

    def __init__(
        self, module: Any, ctx: TrainFnContext, checkpoint_io: Any, files: RunFiles
    ) -> None:
        """Set the module of the trainer, the `CheckpointIO` of its strategy, and Lightning's files in the run's folder."""
        self.trainer: Any = None
        self.rows = 0
        self._module, self._ctx = module, ctx
        self._io, self._files = checkpoint_io, files
        self._logged: dict[str, Any] = {}

    @property
    def is_resumed(self) -> bool:
        """Whether a trainer can resume from `IN_MEMORY`."""
        return self._io.state is not None

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state. Every rank must call it."""
        logged: dict[str, Any] = {}
        if self.trainer is not None:
            self.trainer.save_checkpoint(IN_MEMORY, weights_only=False)
            logged = {name: sums_of(each) for name, each in results_of(self.trainer).items()}
        kept = dict(self._io.state or {})
        if self._ctx.optimizer is not None:
            kept.pop("optimizer_states", None)  # the run's checkpoint has it
        return {
            "lightning": plain(kept),
            "files": dict(self._files.sums),
            "rows": self.rows,
            "logged": hvd.allgather_object(logged, name="lightning.logged"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the initial state of the next trainer."""
        self._io.state = {**state["lightning"], "state_dict": self._module.state_dict()}
        if self._ctx.optimizer is not None:
            self._io.state["optimizer_states"] = [self._ctx.optimizer.state_dict()]
        self._files.sums.update(state["files"])
        self._logged = state["logged"][self._ctx.rank]
        self.rows = state["rows"]

    def add_logged(self) -> None:
        """Add the logged sums of an interrupted epoch to the trainer's new results, after its first batch."""
        logged, self._logged = self._logged, {}
        if self._ctx.start_step:
            for name, each in results_of(self.trainer).items():
                if name in logged:
                    add_sums(each, logged[name])


def results_of(trainer: Any) -> dict[str, Any]:
    """Select Lightning's running results of `self.log(on_epoch=True)` by name.

    Torchmetrics of the module are left out.
    """
    found = getattr(trainer, "_results", None) or {}
    return {name: each for name, each in found.items() if each.is_tensor and each.meta.on_epoch}


def sums_of(result: Any) -> tuple[Any, Any]:
    """Read a result's sum and number of rows."""
    return result.value.cpu(), getattr(result, "cumulated_batch_size", None)


def add_sums(result: Any, sums: tuple[Any, Any]) -> None:
    """Add earlier sums to a result's sums."""
    value, rows = sums[0].to(result.value.device), sums[1]
    if result.meta.is_max_reduction or result.meta.is_min_reduction:
        result.value = result.meta.reduce_fx(result.value, value)
    else:
        result.value = result.value + value
    if rows is not None:
        result.cumulated_batch_size = result.cumulated_batch_size + rows


class EmptyBatches:
    """Excludes the values of a padding batch, in a step without rows on this rank, from logged means."""

    def __init__(self, ctx: TrainFnContext) -> None:
        self._ctx = ctx
        self._before: dict[str, tuple[Any, Any]] | None = None

    def note(self, trainer: Any) -> None:
        """Snapshot logged sums before a padding batch."""
        self._before = None
        if self._ctx._has_batch and not self._ctx.num_rows:
            self._before = {name: sums_of(each) for name, each in results_of(trainer).items()}

    def leave_out(self, trainer: Any) -> None:
        """Remove the values logged in a padding batch."""
        before, self._before = self._before, None
        if before is not None:
            for name, each in results_of(trainer).items():
                # `reset()` would remove the name itself from this rank's metrics.
                for sum_name, empty in each._defaults.items():
                    setattr(each, sum_name, empty.clone().to(each.value.device))
                if name in before:
                    add_sums(each, before[name])


def finite_losses(package: Any, ctx: TrainFnContext) -> Any:
    """Make a Lightning callback that fails a fit when a loss is not finite."""

    class FiniteLosses(package.Callback):  # type: ignore[misc]  # of either package
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = _loss_of(outputs)
            if loss is not None and not math.isfinite(float(loss)):
                raise InvalidArgumentError(
                    f"The loss is {float(loss)} in step {batch_idx + 1} of epoch {len(ctx.history) + 1}, but terminate_on_nan is set. Lower "
                    "the learning rate, or clip gradients: trainer_args={'gradient_clip_val': 1.0}."
                )

    return FiniteLosses()


def _loss_of(outputs: Any) -> Any:
    """Find the loss in the `outputs` of `on_train_batch_end`, or return None without a loss."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _shown(trainer: Any, outputs: Any) -> dict[str, float]:
    """Collect the loss of a step and the module's values for the progress bar."""
    shown = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    loss = _loss_of(outputs)
    return shown if loss is None else {"loss": float(loss), **shown}


def bridge(package: Any, ctx: TrainFnContext, state: RunState) -> Any:
    """Make a callback of a Lightning package for writing the run's history and checkpoints."""
    empty = EmptyBatches(ctx)

    class Bridge(package.callbacks.Checkpoint):  # type: ignore[misc]  # of either package; runs after all other callbacks
        def __init__(self) -> None:
            self._progress: StepReporter | None = None
            self._rows = 0
            self._began = 0.0

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            state.trainer = trainer

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # Start the epoch here, because Lightning does not call `on_train_epoch_start` when it resumes inside an
            # epoch.
            rows = state.rows if ctx.start_step else 0
            self.on_train_epoch_start(trainer, pl_module)
            state.rows = rows

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            steps = trainer.num_training_batches
            self._progress = StepReporter(
                len(ctx._history) + 1, ctx.epochs, steps if math.isfinite(steps) else 0
            )
            self._rows, state.rows, self._began = 0, 0, time.monotonic()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            empty.leave_out(trainer)
            state.add_logged()
            self._rows += ctx.num_global_rows
            state.rows += ctx.num_global_rows
            assert self._progress is not None
            self._progress.step(
                batch_idx + 1, ctx.num_global_rows, lambda: _shown(trainer, outputs)
            )
            # Take checkpoints only after an optimizer step, because they do not hold accumulated gradients.
            if not trainer.is_last_batch and not (batch_idx + 1) % trainer.accumulate_grad_batches:
                ctx.after_step()

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            empty.note(trainer)

        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            empty.note(trainer)

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            empty.leave_out(trainer)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            record: dict[str, Any] = {n: float(v) for n, v in trainer.callback_metrics.items()}
            if self._rows:  # 0 if the user's data module provides the batches
                seconds = max(time.monotonic() - self._began, 1e-9)
                record |= {"rows": state.rows, "rows_per_s": self._rows / seconds}
            ctx.log(record)
            ctx.save_checkpoint()

    return Bridge()


# ----------------------------------------------------------------------------------------------------
# Batches of a rank in the form of Lightning's trainer.

# Number of batches that a row function processes ahead.
_AHEAD = 2


def encoded(value: str | bytes) -> Any:
    """Encode a text or binary value as an array of bytes, for the input of a row function."""
    data = value.encode() if isinstance(value, str) else value
    return np.frombuffer(data, np.uint8)


@dataclass(frozen=True, kw_only=True)
class RowFunction:
    """User's function on a row's values by column, run in threads ahead of the training.

    Attributes:
        function: function from a dict of a row's values to such a dict; numbers are numpy numbers with the columns'
            types.
        fields: name, numpy type, shape, and whether it may be missing, of each field that the function changes or adds.
        removed: fields of the result to drop from batches.
        texts: text columns.
        binaries: binary columns.
        num_workers: threads.
    """

    function: Callable[[dict[str, Any]], Mapping[str, Any]]
    fields: Sequence[tuple[str, Any, Any, bool]] = ()
    removed: Sequence[str] = ()
    texts: frozenset[str] = frozenset()
    binaries: frozenset[str] = frozenset()
    num_workers: int = field(default=1)

    def row(self, batch: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Call the function on a row of a batch, and convert the result to the types in `fields`."""
        given = {name: self._value(name, column[number]) for name, column in batch.items()}
        result = dict(self.function(given))
        for name in self.removed:
            result.pop(name, None)
        for name, dtype, *_ in self.fields:
            if result.get(name) is not None and not isinstance(dtype, str):
                result[name] = np.asarray(result[name], dtype)
        return result

    def _value(self, name: str, value: Any) -> Any:
        array = value.numpy() if isinstance(value, Tensor) else value
        if name in self.texts:
            return array.tobytes().decode()
        if name in self.binaries:
            return array.tobytes()
        return array[()] if isinstance(array, np.ndarray) and array.ndim == 0 else array

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Stack rows to a batch: tensors if all values are arrays or numbers of equal shape, otherwise lists."""
        return {name: _stacked([row[name] for row in rows]) for name in rows[0]}

    def cast(
        self, made: Mapping[str, Any], given: Mapping[str, Any], wanted: Mapping[str, torch.dtype]
    ) -> dict[str, Any]:
        """Cast numbers to the types of the model's inputs, except those of `fields`.

        Args:
            made: fields of a batch, as the function returned them.
            given: fields as the function received them.
            wanted: types of the columns' tensors by name; that of other fields of float64 is under "".

        Raises:
            InvalidArgumentError: a number is out of the range of its type, or not whole.
        """
        kept = {name for name, dtype, *_ in self.fields if not isinstance(dtype, str)}
        result = dict(made)
        for name, value in made.items():
            if not isinstance(value, Tensor) or name in kept:
                continue
            column = given.get(name)
            if isinstance(column, Tensor) and value.dtype == column.dtype:
                result[name] = _cast(name, value, wanted.get(name, value.dtype))
            elif value.dtype == torch.float64:
                result[name] = _cast(name, value, wanted[""])
        return result


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    if isinstance(values[0], (str, bytes)) or values[0] is None:
        return values
    return torch.from_numpy(np.stack(values))


def _cast(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    made = value.to(dtype)
    if dtype.is_floating_point:
        fits = int(made.isinf().sum()) == int(value.isinf().sum())
    else:
        fits = not value.is_floating_point() or torch.equal(made.to(value.dtype), value)
    if not fits:
        shown = str(dtype).removeprefix("torch.")
        raise InvalidArgumentError(
            f"transformation_fn returned {name!r} with numbers that {shown}, the type of the model's input, cannot hold. Return other numbers, "
            "or give the field and its type in transformation_edit_fields."
        )
    return made


class LightningBatches:
    """Batches of a loader for Lightning, as dicts by column or tuples.

    Every rank has the same number of batches. A rank without rows in a step repeats one of its rows, or gets a row of
    zeros, with a `TrainFnContext.loss_weight` of 0.
    """

    def __init__(
        self,
        loader: Loader,
        ctx: TrainFnContext,
        columns: Sequence[str] | None,
        function: RowFunction | None,
    ) -> None:
        """Wrap the batches of a loader.

        Args:
            loader: of the rank.
            ctx: of the run.
            columns: order of tuple batches; None for a dict.
            function: on rows; None leaves batches unchanged.
        """
        self._loader, self._ctx = loader, ctx
        self._columns, self._function = columns, function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        last: dict[str, Any] | None = None
        for begin, batch in self._through_function():
            begin()
            if self._ctx.num_rows:
                last = batch
            else:
                batch = _first_row(last or batch)
            yield batch if self._columns is None else tuple(batch[n] for n in self._columns)

    def _through_function(self) -> Iterator[tuple[Callable[[], None], TensorBatch]]:
        function = self._function
        if function is None:
            yield from self._loader.ahead()
            return
        floating: torch.dtype = getattr(torch, model_dtype(self._ctx.model))
        wanted = {**self._loader.dtypes, "": floating}
        running: deque[tuple[Callable[[], None], TensorBatch, list[Future[Any]]]] = deque()
        with ThreadPoolExecutor(function.num_workers, "sparkhvd-rows") as pool:
            try:
                for begin, batch in self._loader.ahead(as_stored=True):
                    count = len(next(iter(batch.values())))
                    rows = [pool.submit(function.row, batch, number) for number in range(count)]
                    running.append((begin, batch, rows))
                    if len(running) > _AHEAD:
                        yield self._finished(function, wanted, *running.popleft())
                while running:
                    yield self._finished(function, wanted, *running.popleft())
            finally:
                pool.shutdown(cancel_futures=True)

    def _finished(
        self,
        function: RowFunction,
        wanted: Mapping[str, torch.dtype],
        begin: Callable[[], None],
        batch: TensorBatch,
        rows: list[Future[Any]],
    ) -> tuple[Callable[[], None], TensorBatch]:
        results = [each.result() for each in rows]
        made = function.batch(results) if results else batch
        made = function.cast(made, batch, wanted)
        return begin, {n: _moved(value, self._ctx.device) for n, value in made.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _first_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of one row, or of zeros without rows. Other collated values are unchanged."""
    return {name: _first(value) for name, value in batch.items()}


def _first(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value[:1] if len(value) else value.new_zeros((1, *value.shape[1:]))
    return value[:1] if isinstance(value, list) else value
