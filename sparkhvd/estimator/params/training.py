"""Params of the training loop and of its run in the store."""

from __future__ import annotations

import functools

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import to_float, to_scheduler, to_stopping, to_whole
from sparkhvd.estimator.params.table import (
    NOT_SEEN,
    OF_THE_OPTIMIZER,
    above,
    at_least,
    one_of,
    param,
)

__all__ = ["TrainingParams"]

training_param = functools.partial(param, group="training")


@accessors
class TrainingParams(TorchParams):
    """Params of the training loop and of its run in the store."""

    batch_size = training_param(
        to_whole,
        "rows per rank and step",
        default=32,
        check=at_least(1),
        fingerprint=True,
        to_ranks=True,
    )
    val_batch_size = training_param(
        to_whole,
        "rows per rank and step of validation",
        check=at_least(1),
    )
    epochs = training_param(
        to_whole,
        "passes over the data",
        default=1,
        check=at_least(1),
        aliases=("maxIter",),
        to_ranks=True,
    )
    random_seed = training_param(
        to_whole,
        "decides split, order and dropout; default random",
        aliases=("seed",),
    )
    gradient_clip_norm = training_param(
        to_float,
        "largest norm of all gradients together",
        check=above(0),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    gradient_clip_value = training_param(
        to_float,
        "largest absolute value in a gradient",
        check=above(0),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    accumulate = training_param(
        to_whole,
        "batches per rank whose gradients make one step",
        default=1,
        check=at_least(1),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
        aliases=("backward_passes_per_step",),
    )
    lr_scheduler = training_param(
        to_scheduler,
        "(optimizer) or (optimizer, total_steps) -> scheduler",
        train_fn=OF_THE_OPTIMIZER,
    )
    lr_scheduler_interval = training_param(
        TypeConverters.toString,
        "it moves after each 'epoch' or 'step'",
        default="epoch",
        check=one_of("epoch", "step"),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    train_steps_per_epoch = training_param(
        to_whole,
        "at most so many steps per epoch; default all rows",
        check=at_least(1),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    validation_steps_per_epoch = training_param(
        to_whole,
        "the same for batches of validation",
        check=at_least(1),
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    monitor = training_param(
        TypeConverters.toString,
        "key of the history that tells the best epoch; default val_loss, else loss",
    )
    monitor_mode = training_param(
        TypeConverters.toString,
        "'min' or 'max' of it is best",
        default="min",
        check=one_of("min", "max"),
    )
    return_model = training_param(
        TypeConverters.toString,
        "weights of the 'last' or the 'best' epoch",
        check=one_of("best", "last"),
    )
    early_stopping = training_param(
        to_stopping,
        "dict with patience, min_delta, monitor, mode: end when it stops improving",
        train_fn=NOT_SEEN,
    )
    terminate_on_nan = training_param(
        TypeConverters.toBoolean,
        "end with an error at a non-finite loss",
        default=False,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    run_id = training_param(
        TypeConverters.toString,
        "name of the run in the store; an unfinished one resumes",
    )
    warm_start = training_param(
        TypeConverters.toBoolean,
        "a finished run_id trains `epochs` more epochs from its weights",
        default=False,
    )
    checkpoint_interval_s = training_param(
        to_float,
        "at most so many seconds of steps are repeated after a loss; also saved after each epoch",
        default=300.0,
        check=above(0),
        to_ranks=True,
    )
    keep_checkpoints = training_param(
        to_whole,
        "epochs whose checkpoints stay after the fit; 0: nothing of the run, nor its report; not given: 1 with a run_id, else 0",
        check=at_least(0),
    )
