"""`TorchEstimator` for a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pyspark.ml.param import TypeConverters

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import estimator
from sparkhvd.estimator.params.base import TorchParams, accessors, with_signature
from sparkhvd.estimator.params.converters import any_value, to_whole
from sparkhvd.estimator.params.generated import FitOptions
from sparkhvd.estimator.params.table import at_least, one_of, param
from sparkhvd.lightning.loop import LightningLoop, RowFunction
from sparkhvd.lightning.strategy import package_of
from sparkhvd.training.precision import PRECISIONS

if TYPE_CHECKING:
    from sparkhvd.training.train_fn import TrainFnContext


# ----------------------------------------------------------------------------------------------------
# Params of the Lightning estimator, in addition to those of `sparkhvd.estimator.TorchEstimator`.

# Params passed by the loop to Lightning's trainer or strategy.
OF_THE_LOOP = (
    *("train_steps_per_epoch", "validation_steps_per_epoch", "terminate_on_nan"),
    *("gradient_compression", "lr_scaling"),
)

# Arguments of `Trainer` that the fit decides, and the Params to give instead.
LIGHTNING_ALONE = {
    "max_epochs": "epochs",
    "devices": "num_proc",
    "num_nodes": "num_proc",
    "strategy": "gradient_compression or lr_scaling",
    "accelerator": "use_gpu",
    "callbacks": "the Param callbacks",
    "logger": "the Param logger",
    "profiler": "the Param profiler",
    "log_every_n_steps": "the Param log_every_n_steps",
    "enable_checkpointing": "keep_checkpoints",
    "fast_dev_run": "epochs=1 and few rows",
}
# Params that have no effect on a LightningModule, and what to do instead.
MODULE_OR_TRAINER = {
    **dict.fromkeys(
        ("optimizer", "learning_rate", "weight_decay", "lr_scheduler", "lr_scheduler_interval"),
        "configure_optimizers of the module decides it",
    ),
    **dict.fromkeys(
        ("loss", "loss_constructors", "loss_weights", "pairs_rows"),
        "training_step of the module returns the loss",
    ),
    **dict.fromkeys(
        ("train_step", "validation_step", "train_fn"), "training_step of the module is that"
    ),
    "metrics": "call self.log in training_step and validation_step",
    "precision": "give trainer_args={'precision': ...}",
    "compile": "compile the module's parts in configure_model",
    "accumulate": "give trainer_args={'accumulate_grad_batches': ...}",
    "gradient_clip_norm": "give trainer_args={'gradient_clip_val': ...}",
    "gradient_clip_value": "give trainer_args={'gradient_clip_val': ..., 'gradient_clip_algorithm': 'value'}",
    "early_stopping": "give callbacks=[EarlyStopping(...)]",
}


def _plain_args(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"trainer_args is {value!r:.100}; give a dict of arguments of Trainer.")
    return dict(value)


@accessors
class LightningParams(TorchParams):
    """Params of Lightning's trainer and its data."""

    callbacks = param(
        any_value, "callbacks of Lightning; copies run on the ranks", group="training"
    )
    logger = param(
        any_value,
        "logger of Lightning, or True for Lightning's default in the run's folder of logs; default none",
        group="training",
    )
    profiler = param(any_value, "profiler of Lightning", group="training")
    log_every_n_steps = param(
        to_whole,
        "steps between two entries of the logger",
        default=50,
        check=at_least(1),
        group="training",
    )
    trainer_args = param(
        _plain_args,
        "further arguments of Lightning's Trainer",
        annotation="Mapping[str, Any]",
        group="training",
    )
    batch_format = param(
        TypeConverters.toString,
        "'dict' of tensors by column, or 'tuple' in the order of feature_cols and label_cols",
        default="dict",
        check=one_of("dict", "tuple"),
        group="data",
    )
    data_module = param(
        any_value,
        "class or function that makes the LightningDataModule of a rank, of Horovod's keyword arguments; default: batches of the fit",
        group="data",
    )


# ----------------------------------------------------------------------------------------------------
# The estimator.


@with_signature
class TorchEstimator(LightningParams, estimator.TorchEstimator):
    """Estimator of a LightningModule: Lightning's `Trainer` on one rank per Spark task, over a DataFrame's rows.

        estimator = TorchEstimator(
            model=module, feature_cols=["features"], label_cols=["label"], batch_size=32, epochs=10, num_proc=2,
            callbacks=[EarlyStopping("val_loss")], validation=0.1, trainer_args={"gradient_clip_val": 1.0})
        model = estimator.fit(df)  # TorchModel

    Data, checkpoints, relaunches and the returned model work as in `sparkhvd.TorchEstimator`; optimizers, losses and logged
    metrics belong to the module. `training_step` receives a dict of tensors by column. The module is not modified.
    `explainParams()` describes all arguments.
    """

    # Whether loggers and `ModelCheckpoint` write into the folder of the run instead of their configured folder.
    _moves_files: ClassVar[bool] = False

    def _options(self) -> FitOptions:
        """Check the values and read them.

        Raises:
            InvalidArgumentError: a value is out of range, has no effect here, or contradicts another value.
        """
        options = super()._options()
        wrap = self._wrap(options)
        self._refuse(options)
        # Leave out Params that the loop handles itself, so that they are not rejected as unused.
        explicit = options.explicit - {"callbacks", *MODULE_OR_TRAINER, *OF_THE_LOOP} | {"train_fn"}
        loop = replace(self._loop(options), wrap=wrap)
        # Pass the trainer's precision on, because the trial of the model and `transform` have no trainer.
        given = str((self._get("trainer_args") or {}).get("precision"))
        precision = {"16": "16-mixed", "bf16": "bf16-mixed"}.get(given, given)
        return replace(
            options,
            train_fn=loop,
            callbacks=None,
            precision=precision if precision in PRECISIONS else "32",
            explicit=explicit,
        )

    def _wrap(self, options: FitOptions) -> Callable[[TrainFnContext], Any] | None:
        """Make the function for wrapping the module in a LightningModule on a rank.

        Returns None for a LightningModule.

        Raises:
            InvalidArgumentError: the model is not a LightningModule.
        """
        if isinstance(options.model, torch.nn.Module):
            package_of(options.model)  # raises an error for other modules
        return None

    def _refused(self) -> Mapping[str, str]:
        """Map each Param without effect to what to do instead."""
        return MODULE_OR_TRAINER

    def _refuse(self, options: FitOptions) -> None:
        for name, instead in self._refused().items():
            if name in options.explicit and getattr(options, name) not in (None, []):
                raise InvalidArgumentError(
                    f"{name} has no effect on a LightningModule. Leave it out; instead: {instead}."
                )
        for name in self._get("trainer_args") or {}:
            if name in LIGHTNING_ALONE:
                raise InvalidArgumentError(
                    f"trainer_args has {name!r}, but the fit sets this argument. Give {LIGHTNING_ALONE[name]} instead."
                )

    def _loop(self, options: FitOptions) -> LightningLoop:
        columns = [*(options.feature_cols or []), *(options.label_cols or [])]
        strategy = {
            "compression": options.gradient_compression,
            "lr_scaling": options.lr_scaling,
        }
        limits = {
            "limit_train_batches": options.train_steps_per_epoch,
            "limit_val_batches": options.validation_steps_per_epoch,
        }
        return LightningLoop(
            callbacks=tuple(self._get("callbacks") or ()),
            logger=self._get("logger") or False,
            profiler=self._get("profiler"),
            log_every_n_steps=self._get("log_every_n_steps"),
            trainer_args={
                **{name: value for name, value in limits.items() if value is not None},
                **(self._get("trainer_args") or {}),
            },
            moves_files=self._moves_files,
            ends_on_nan=bool(options.terminate_on_nan),
            columns=columns if self._get("batch_format") == "tuple" else None,
            rows=self._row_function(options),
            data_module=self._get("data_module"),
            loading=self._loading(options),
            strategy={name: value for name, value in strategy.items() if value is not None},
        )

    def _loading(self, options: FitOptions) -> dict[str, Any]:
        """Make data module arguments used only by Horovod's own readers."""
        return {
            "num_reader_epochs": None,
            "reader_pool_type": "thread",
            "reader_worker_count": options.num_workers,
            "inmemory_cache_all": False,
            "verbose": bool(options.verbose),
            "debug_data_loader": False,
            "train_async_data_loader_queue_size": None,
            "val_async_data_loader_queue_size": None,
        }

    def _row_function(self, options: FitOptions) -> RowFunction | None:
        """Choose the function on rows to run on ranks instead of `transformation_fn`."""
        del options
        return None
