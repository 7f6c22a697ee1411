"""Types of keyword arguments, for type checkers. Written by `python -m tools.keywords` from the table of Params."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from pyspark.sql import DataFrame
from torch import nn
from torch.optim import Optimizer

from sparkhvd.data.store.store import Store
from sparkhvd.observe.loggers.logger import Logger
from sparkhvd.settings import Settings
from sparkhvd.training.user_code.callbacks import Callback

__all__ = ["EstimatorKeywords", "ModelKeywords"]


class ModelKeywords(TypedDict, total=False):
    """Keyword arguments of `PredictParams`, by group."""

    # model
    output_fn: Callable[..., Any] | None
    precision: str | None

    # data
    feature_cols: str | Sequence[str] | None
    label_cols: str | Sequence[str] | None
    input_shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None
    inputs: Mapping[str, str | Sequence[str]] | None
    feature_dtypes: Sequence[Any] | Mapping[str, Any] | None
    decoders: Mapping[str, Any] | None
    collate_fn: Mapping[str, Any] | None
    sparse_cols: str | Sequence[str] | None
    handle_invalid: str | Mapping[str, str | float] | None
    outputCols: str | Sequence[str] | None
    predictionCol: str | None
    probabilityCol: str | None
    rawPredictionCol: str | None
    thresholds: Sequence[float] | None
    store: Store | str | PathLike[str] | None

    # cluster
    use_gpu: bool | None

    # other names
    featuresCol: str | Sequence[str] | None
    feature_columns: str | Sequence[str] | None
    labelCol: str | Sequence[str] | None
    label_columns: str | Sequence[str] | None


class EstimatorKeywords(TypedDict, total=False):
    """Keyword arguments of `TrainParams`, by group."""

    # model
    output_fn: Callable[..., Any] | None
    precision: str | None
    model: nn.Module | Callable[..., nn.Module] | None
    optimizer: Optimizer | Callable[..., Any] | str | None
    loss: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None
    loss_constructors: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    learning_rate: float | None
    weight_decay: float | None
    lr_scaling: str | None
    gradient_compression: Any | None
    loss_weights: Sequence[float] | None
    metrics: Any | None
    pairs_rows: bool | None
    compile: bool | None
    train_step: Callable[..., Any] | None
    validation_step: Callable[..., Any] | None
    train_fn: Callable[..., Any] | None
    callbacks: Sequence[Callback] | None

    # data
    feature_cols: str | Sequence[str] | None
    label_cols: str | Sequence[str] | None
    input_shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None
    inputs: Mapping[str, str | Sequence[str]] | None
    feature_dtypes: Sequence[Any] | Mapping[str, Any] | None
    decoders: Mapping[str, Any] | None
    collate_fn: Mapping[str, Any] | None
    sparse_cols: str | Sequence[str] | None
    handle_invalid: str | Mapping[str, str | float] | None
    outputCols: str | Sequence[str] | None
    predictionCol: str | None
    probabilityCol: str | None
    rawPredictionCol: str | None
    thresholds: Sequence[float] | None
    store: Store | str | PathLike[str] | None
    sample_weight_col: str | None
    group_col: str | None
    label_shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None
    label_dtypes: Sequence[Any] | Mapping[str, Any] | None
    validation: float | str | DataFrame | None
    reader: str | None
    num_workers: int | None
    val_reader_num_workers: int | None
    shuffle: bool | None
    shuffle_bytes: int | None
    drop_last: bool | None
    transformation_fn: Callable[..., Any] | None
    batch_transform_fn: Callable[..., Any] | None
    data_key: str | None
    keep_data: bool | None
    num_partitions: int | None

    # training
    batch_size: int | None
    val_batch_size: int | None
    epochs: int | None
    random_seed: int | None
    gradient_clip_norm: float | None
    gradient_clip_value: float | None
    accumulate: int | None
    lr_scheduler: Callable[..., Any] | None
    lr_scheduler_interval: str | None
    train_steps_per_epoch: int | None
    validation_steps_per_epoch: int | None
    monitor: str | None
    monitor_mode: str | None
    return_model: str | None
    early_stopping: Mapping[str, Any] | None
    terminate_on_nan: bool | None
    run_id: str | None
    warm_start: bool | None
    checkpoint_interval_s: float | None
    keep_checkpoints: int | None

    # cluster
    use_gpu: bool | None
    num_proc: int | tuple[int, int] | None
    elastic_batch: str | None
    verbose: int | None
    progress: Callable[..., Any] | None
    loggers: Logger | Sequence[Logger] | None
    timeline: bool | int | None
    settings: Settings | None
    max_retries: int | None
    start_timeout: float | None

    # other names
    restore_best: bool | None
    inmemory_cache_all: bool | None
    featuresCol: str | Sequence[str] | None
    feature_columns: str | Sequence[str] | None
    labelCol: str | Sequence[str] | None
    label_columns: str | Sequence[str] | None
    stepSize: float | None
    weightCol: str | None
    validationIndicatorCol: float | str | DataFrame | None
    train_reader_num_workers: int | None
    maxIter: int | None
    seed: int | None
    backward_passes_per_step: int | None
    numTrainWorkers: int | tuple[int, int] | None
