"""Values of the Params of one fit or transform. Written by `python -m tools.keywords` from the table of Params."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from torch import nn
    from torch.optim import Optimizer

    from sparkhvd.data.store.store import Store
    from sparkhvd.observe.loggers.logger import Logger
    from sparkhvd.settings import Settings
    from sparkhvd.training.user_code.callbacks import Callback

__all__ = ["FitOptions", "PredictOptions"]


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Values of `PredictParams`, by group; None where there is none."""

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
    """Values of `TrainParams`, by group; None where there is none."""

    # model
    model: nn.Module | Callable[..., nn.Module] | None = None
    optimizer: Optimizer | Callable[..., Any] | None = None
    loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    loss_constructors: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    lr_scaling: str | None = None
    gradient_compression: Any | None = None
    loss_weights: list[float] | None = None
    metrics: Any = field(default_factory=list)
    pairs_rows: bool = True
    compile: bool = False
    train_step: Callable[..., Any] | None = None
    validation_step: Callable[..., Any] | None = None
    train_fn: Callable[..., Any] | None = None
    callbacks: Sequence[Callback] | None = None

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
    lr_scheduler: Callable[..., Any] | None = None
    lr_scheduler_interval: str = "epoch"
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    monitor: str | None = None
    monitor_mode: str = "min"
    return_model: str | None = None
    early_stopping: dict[str, Any] | None = None
    terminate_on_nan: bool = False
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
