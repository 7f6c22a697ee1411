"""`train_fn` of the estimator: Lightning's `Trainer` on the batches of a rank."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.data.store.store import Store
from sparkhvd.lightning.batches import Batches, RowFunction
from sparkhvd.lightning.bridge import RunState, bridge, finite_losses
from sparkhvd.lightning.checkpoints import IN_MEMORY, RunFiles, checkpoint_io
from sparkhvd.lightning.packages import package_of
from sparkhvd.lightning.strategy import register
from sparkhvd.training.train_fn import Loader, TrainFnContext

__all__ = ["LightningLoop"]


@dataclass(frozen=True, kw_only=True)
class LightningLoop:
    """Trains a LightningModule; picklable if what it holds is.

    Attributes:
        callbacks: of Lightning.
        logger: of Lightning, True for its default, or False.
        profiler: of Lightning, or None.
        log_every_n_steps: of Lightning's trainer.
        trainer_args: further arguments of the trainer.
        columns: of the tuple that a batch is; None for a dict.
        rows: function on rows; None: batches are as the data have them.
        data_module: makes a LightningDataModule of Horovod's arguments; None: batches are those of the fit.
        loading: values of Params that it gets as they are.
        strategy: arguments of the strategy.
        moves_files: loggers and `ModelCheckpoint` write into the run's folder, whatever folder they were given.
        ends_on_nan: a loss that is not finite ends the fit with an error.
        wrap: makes the LightningModule of the run's module, which it holds; None: it is one.
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
        """True if the columns need not fit the module's `forward`: `training_step` gets them, or others."""
        return self.wrap is None or self.changes_columns

    @property
    def changes_columns(self) -> bool:
        """True if batches are not those that the data have."""
        return self.rows is not None or self.data_module is not None

    @property
    def takes_rows(self) -> bool:
        """True if a function gets the values of each row before the module."""
        return self.rows is not None

    def __call__(self, ctx: TrainFnContext) -> None:
        """Train on a rank; every rank must call it."""
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
                # A data module gets the rank's share of the rows to read: a sampler would divide that again.
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
        """Keep Lightning from asking a data module without validation rows for their loader, which may be None as in Horovod's."""
        has_none = self.data_module is not None and ctx.val_loader is None
        return {"limit_val_batches": 0} if has_none else {}

    def _data(self, ctx: TrainFnContext) -> dict[str, Any]:
        """Return the arguments of `Trainer.fit` that give the batches."""
        if self.data_module is not None:
            return {"datamodule": self.data_module(**self._horovod_arguments(ctx))}
        loaders = {"train_dataloaders": self._batches(ctx, ctx.train_loader)}
        if ctx.val_loader is not None:
            loaders["val_dataloaders"] = self._batches(ctx, ctx.val_loader)
        return loaders

    def _batches(self, ctx: TrainFnContext, loader: Loader) -> Batches:
        return Batches(loader, ctx, self.columns, self.rows)

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
    """Return the URL of files that are read where they are, or of a folder of packed ones."""
    return store.full_url(folder) if files is None else files.url


def _move(loggers: Any, folder: str) -> None:
    """Let loggers that have a folder write into another one."""
    for logger in loggers if isinstance(loggers, (list, tuple)) else [loggers]:
        for name in ("_root_dir", "_save_dir"):  # of Lightning's TensorBoardLogger and CSVLogger
            if hasattr(logger, name):
                setattr(logger, name, folder)


@contextlib.contextmanager
def _log_folder(ctx: TrainFnContext) -> Iterator[str]:
    """Give the folder of the run's logs; where the store is no local folder, one that is deleted at the end."""
    path = ctx.store.local_path(f"{ctx.run_dir}/logs")
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="sparkhvd-logs-") as folder:
        yield folder


def _return_best(
    package: Any, module: Any, ctx: TrainFnContext, trainer: Any, files: RunFiles
) -> None:
    """Load the weights that a `ModelCheckpoint` calls the best, and let the run return them; every rank must call it."""
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
