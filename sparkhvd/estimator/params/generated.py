"""Types of keyword arguments, and values of one fit or transform.

Written by `python -m tools.keywords` from the table of Params.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

# For type checkers only: workers of a transform load this module too, and must not load `sparkhvd.torch`.
if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from torch import nn
    from torch.optim import Optimizer

    from sparkhvd.data.store.store import Store
    from sparkhvd.observe.loggers.base import Logger
    from sparkhvd.settings import Settings
    from sparkhvd.training.user_code.callbacks import Callback


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
    optimizer: Optimizer | Sequence[Optimizer] | Callable[..., Any] | str | None
    loss: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None
    loss_constructors: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    loss_weights: Sequence[float] | None
    pairs_rows: bool | None

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
    learning_rate: float | None
    weight_decay: float | None
    lr_scaling: str | None
    lr_scheduler: Callable[..., Any] | None
    lr_scheduler_interval: str | None
    train_steps_per_epoch: int | None
    validation_steps_per_epoch: int | None
    metrics: Any | None
    monitor: str | None
    monitor_mode: str | None
    return_model: str | None
    early_stopping: Mapping[str, Any] | None
    terminate_on_nan: bool | None
    gradient_compression: Any | None
    compile: bool | None
    train_step: Callable[..., Any] | None
    validation_step: Callable[..., Any] | None
    train_fn: Callable[..., Any] | None
    callbacks: Sequence[Callback] | None
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
    weightCol: str | None
    validationIndicatorCol: float | str | DataFrame | None
    train_reader_num_workers: int | None
    maxIter: int | None
    seed: int | None
    backward_passes_per_step: int | None
    stepSize: float | None
    numTrainWorkers: int | tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Values of `PredictParams`, by group, or None if unset."""

    explicit: frozenset[str] = frozenset()  # names of those that were set

    # model
    output_fn: Callable[..., Any] | None = None
    precision: str = "32"

    # data
    feature_cols: list[str] | None = None
    label_cols: list[str] | None = None
    input_shapes: list[list[int]] | dict[str, list[int]] | None = None
    inputs: dict[str, str | list[str]] | None = None
    feature_dtypes: list[str | None] | dict[str, str | None] | None = None
    decoders: dict[str, Any] | None = None
    collate_fn: dict[str, Any] | None = None
    sparse_cols: list[str] | None = None
    handle_invalid: str | Mapping[str, str | float] = "error"
    outputCols: list[str] | None = None
    predictionCol: str = "prediction"
    probabilityCol: str = "probability"
    rawPredictionCol: str = "rawPrediction"
    thresholds: list[float] | None = None
    store: Store | str | PathLike[str] | None = None

    # cluster
    use_gpu: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FitOptions(PredictOptions):
    """Values of `TrainParams`, by group, or None if unset."""

    # model
    model: nn.Module | Callable[..., nn.Module] | None = None
    optimizer: Optimizer | Sequence[Optimizer] | Callable[..., Any] | None = None
    loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    loss_constructors: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    loss_weights: list[float] | None = None
    pairs_rows: bool = True

    # data
    sample_weight_col: str | None = None
    group_col: str | None = None
    label_shapes: list[list[int]] | dict[str, list[int]] | None = None
    label_dtypes: list[str | None] | dict[str, str | None] | None = None
    validation: float | str | DataFrame | None = None
    reader: str = "pyarrow"
    num_workers: int = 1
    val_reader_num_workers: int | None = None
    shuffle: bool = True
    shuffle_bytes: int = 1073741824
    drop_last: bool = False
    transformation_fn: Callable[..., Any] | None = None
    batch_transform_fn: Callable[..., Any] | None = None
    data_key: str | None = None
    keep_data: bool = False
    num_partitions: int | None = None

    # training
    batch_size: int = 32
    val_batch_size: int | None = None
    epochs: int = 1
    random_seed: int | None = None
    gradient_clip_norm: float | None = None
    gradient_clip_value: float | None = None
    accumulate: int = 1
    learning_rate: float | None = None
    weight_decay: float | None = None
    lr_scaling: str | None = None
    lr_scheduler: Callable[..., Any] | None = None
    lr_scheduler_interval: str = "epoch"
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    metrics: Any = field(default_factory=list)
    monitor: str | None = None
    monitor_mode: str = "min"
    return_model: str | None = None
    early_stopping: dict[str, Any] | None = None
    terminate_on_nan: bool = False
    gradient_compression: Any | None = None
    compile: bool = False
    train_step: Callable[..., Any] | None = None
    validation_step: Callable[..., Any] | None = None
    train_fn: Callable[..., Any] | None = None
    callbacks: Sequence[Callback] | None = None
    run_id: str | None = None
    warm_start: bool = False
    checkpoint_interval_s: float = 300.0
    keep_checkpoints: int | None = None

    # cluster
    num_proc: int | tuple[int, int] | None = None
    elastic_batch: str | None = None
    verbose: int = 1
    progress: Callable[..., Any] | None = None
    loggers: list[Logger] | None = None
    timeline: int = 0
    settings: Settings | None = None
    max_retries: int = 2
    start_timeout: float | None = None
