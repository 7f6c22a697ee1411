"""Params of the Lightning estimator, beside those of `sparkhvd.estimator.TorchEstimator`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import any_value, to_whole
from sparkhvd.estimator.params.table import at_least, one_of, param

__all__ = ["LIGHTNING_ALONE", "MODULE_OR_TRAINER", "OF_THE_LOOP", "LightningParams"]

# Params that the loop gives to Lightning's trainer or strategy.
OF_THE_LOOP = (
    *("train_steps_per_epoch", "validation_steps_per_epoch", "terminate_on_nan"),
    *("gradient_compression", "lr_scaling"),
)

# Arguments of `Trainer` that the fit decides, and the Params for them.
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
# Params of a plain module's fit that a LightningModule or Lightning's trainer has: what to do instead.
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
