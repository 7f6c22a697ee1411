"""Declare the Params of the estimator and its model by subject."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkhvd.data.columns.binding import columns_in
from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import (
    any_value,
    to_columns,
    to_dtypes,
    to_float,
    to_function,
    to_inputs,
    to_loggers,
    to_losses,
    to_mapping,
    to_optimizer,
    to_ranks,
    to_scheduler,
    to_shapes,
    to_stopping,
    to_store,
    to_thresholds,
    to_timeline,
    to_whole,
)
from sparkhvd.estimator.params.generated import FitOptions
from sparkhvd.estimator.params.table import (
    NOT_SEEN,
    OF_THE_OPTIMIZER,
    TableParam,
    above,
    at_least,
    one_of,
    param,
    rows_of,
)

cluster_param = functools.partial(param, group="cluster")


def is_number_of_ranks(value: int | tuple[int, int]) -> str:
    """Check a number of ranks, or a pair (minimum, maximum)."""
    least, most = value if isinstance(value, tuple) else (value, value)
    if least < 1:
        return "it must be at least 1"
    return "" if least <= most else "the minimum number of ranks comes first, then the maximum"


@accessors
class ClusterParams(TorchParams):
    """Params of the launch."""

    num_proc = cluster_param(
        to_ranks,
        "number of ranks, by default one per GPU or task slot, or (least, most) for elastic training",
        annotation="int | tuple[int, int]",
        aliases=("numTrainWorkers",),
        check=is_number_of_ranks,
        in_conf=True,
    )
    elastic_batch = cluster_param(
        TypeConverters.toString,
        "'global': all ranks together use least * batch_size rows per step, for any number of ranks",
        check=one_of("global"),
        fingerprint=True,
    )
    verbose = cluster_param(
        to_whole,
        "0 prints nothing, 1 prints a line per epoch, 2 also shows Spark's log of a failed rank",
        default=1,
        check=at_least(0),
        in_conf=True,
    )
    progress = cluster_param(to_function, "function that the driver calls with each epoch's record")
    loggers = cluster_param(
        to_loggers,
        "loggers that the driver calls, such as sparkhvd.MLflowLogger() or sparkhvd.TensorBoardLogger()",
    )
    timeline = cluster_param(
        to_timeline,
        "True, or a number of steps: write a timeline of them for ui.perfetto.dev into the run's folder",
        default=0,
        check=at_least(0),
        to_ranks=True,
    )
    settings = cluster_param(
        any_value,
        "sparkhvd.Settings of the engine",
        annotation="Settings",
    )
    max_retries = cluster_param(
        to_whole,
        "maximum of relaunches after a lost process, executor or host",
        default=2,
        check=at_least(0),
        in_conf=True,
    )
    start_timeout = cluster_param(
        to_float,
        "longest wait for task slots in seconds",
        check=above(0),
        in_conf=True,
    )


# ----------------------------------------------------------------------------------------------------
# Params of the training data: columns, validation rows, order and reading.

data_param = functools.partial(param, group="data")


@accessors
class DataParams(TorchParams):
    """Params of the training data."""

    sample_weight_col = data_param(
        TypeConverters.toString,
        "column with the weight of each row",
        aliases=("weightCol",),
    )
    group_col = data_param(
        TypeConverters.toString,
        "column that groups rows: rows with an equal value stay together on one rank",
    )
    label_shapes = data_param(
        to_shapes,
        "shape of one row of each label column",
        fingerprint=True,
    )
    label_dtypes = data_param(to_dtypes, "torch dtype by label column")
    validation = data_param(
        any_value,
        "validation rows: a fraction of the rows, a column that is true for them, or a DataFrame",
        annotation="float | str | DataFrame",
        fingerprint=True,
        aliases=("validationIndicatorCol",),
    )
    reader = data_param(
        TypeConverters.toString,
        "for fit_on_parquet: 'pyarrow', or 'petastorm' for data sets that petastorm has encoded",
        default="pyarrow",
    )
    num_workers = data_param(
        to_whole,
        "threads per rank that run decoders",
        default=1,
        check=at_least(1),
        aliases=("train_reader_num_workers",),
        accessors=("TrainReaderNumWorker",),
        to_ranks=True,
    )
    val_reader_num_workers = data_param(
        to_whole,
        "threads per rank that run decoders of validation rows, by default num_workers",
        check=at_least(1),
        accessors=("ValReaderNumWorker",),
    )
    shuffle = data_param(
        TypeConverters.toBoolean,
        "a new order of the rows each epoch",
        default=True,
        fingerprint=True,
        to_ranks=True,
    )
    shuffle_bytes = data_param(
        to_whole,
        "data up to this many bytes are held in memory and shuffled uniformly",
        default=1 << 30,
        check=at_least(1),
        to_ranks=True,
    )
    drop_last = data_param(
        TypeConverters.toBoolean,
        "drop the last step of an epoch if it is not full",
        default=False,
        fingerprint=True,
        to_ranks=True,
    )
    transformation_fn = data_param(
        any_value,
        "function from the dict of one row's values to another dict, called before training on the row",
        annotation="Callable[..., Any]",
    )
    batch_transform_fn = data_param(
        any_value,
        "function from the dict of a batch's arrays to another dict, called before training on the batch",
        annotation="Callable[..., Any]",
    )
    data_key = data_param(
        TypeConverters.toString,
        "name of the data: materialized data with an equal key are reused",
    )
    keep_data = data_param(
        TypeConverters.toBoolean,
        "keep materialized data until Store.clean()",
        default=False,
    )
    num_partitions = data_param(
        to_whole,
        "maximum number of partitions to write, each with a task and a file, by default the DataFrame's number",
        check=at_least(1),
    )


# ----------------------------------------------------------------------------------------------------
# Params of the model, the optimizer and the loss.


def not_negative(value: float) -> str:
    """Check that a number is 0 or more, and finite."""
    return "" if 0 <= value < float("inf") else "it must be 0 or more"


def is_scaling(value: str) -> str:
    """Check `lr_scaling`."""
    if value == "linear":
        return ""
    return "it must be 'linear'. Leave it out to use learning rates unchanged"


model_param = functools.partial(param, group="model")


@accessors
class ModelParams(TorchParams):
    """Params of the model, the optimizer and the loss."""

    model = model_param(
        any_value,
        "torch.nn.Module to train, or a function that makes one",
        annotation="nn.Module | Callable[..., nn.Module]",
    )
    optimizer = model_param(
        to_optimizer,
        "optimizer of the model's parameters, or a list of them, or a function of parameters, or 'adam', 'adamw', 'sgd', ...",
        annotation="Optimizer | Sequence[Optimizer] | Callable[..., Any] | str",
    )
    loss = model_param(
        to_losses,
        "(output, label) -> mean or (mean, weight), or 'mse', ..., or a list per label. A scalar label is (rows, 1) if its output is",
        annotation="Callable[..., Any] | str | Sequence[Callable[..., Any] | str]",
    )
    loss_constructors = model_param(
        any_value,
        "function that makes the loss, or a list per label, instead of loss",
        annotation="Callable[..., Any] | Sequence[Callable[..., Any]]",
    )
    loss_weights = model_param(
        TypeConverters.toListFloat,
        "factor of each label's loss in the total loss",
        fingerprint=True,
        train_fn=NOT_SEEN,
    )
    pairs_rows = model_param(
        TypeConverters.toBoolean,
        "False: do not warn if loss or metrics do not compare each row's output with its label",
        default=True,
        train_fn=NOT_SEEN,
    )


# ----------------------------------------------------------------------------------------------------
# Params of the training loop and of its run in the store.

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
        "seed of the validation split, the order of rows and dropout, by default random",
        aliases=("seed",),
    )
    gradient_clip_norm = training_param(
        to_float,
        "clip gradients so that their total norm is at most this",
        check=above(0),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    gradient_clip_value = training_param(
        to_float,
        "clip each element of the gradients to at most this absolute value",
        check=above(0),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    accumulate = training_param(
        to_whole,
        "number of batches per rank whose gradients are accumulated for one optimizer step",
        default=1,
        check=at_least(1),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
        aliases=("backward_passes_per_step",),
    )
    learning_rate = training_param(
        to_float,
        "learning rate of all groups of the optimizer, by default each group keeps its own",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        aliases=("stepSize",),
        check=not_negative,
    )
    weight_decay = training_param(
        to_float,
        "weight decay of all groups of the optimizer, by default each group keeps its own",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        check=not_negative,
    )
    lr_scaling = training_param(
        TypeConverters.toString,
        "'linear' multiplies learning rates by num_proc",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        check=is_scaling,
    )
    lr_scheduler = training_param(
        to_scheduler,
        "(optimizer) or (optimizer, total_steps) -> scheduler",
        train_fn=OF_THE_OPTIMIZER,
    )
    lr_scheduler_interval = training_param(
        TypeConverters.toString,
        "call the scheduler after each 'epoch' or 'step'",
        default="epoch",
        check=one_of("epoch", "step"),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    train_steps_per_epoch = training_param(
        to_whole,
        "maximum of steps per epoch, by default all rows",
        check=at_least(1),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    validation_steps_per_epoch = training_param(
        to_whole,
        "maximum of validation batches per epoch, by default all rows",
        check=at_least(1),
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    metrics = training_param(
        any_value,
        "'accuracy', 'f1', 'auc', 'mse', 'mae', functions (output, label) as for loss, torchmetrics (labels (rows,)), or a dict of them",
        default=[],
        annotation="Any",
        train_fn=NOT_SEEN,
    )
    monitor = training_param(
        TypeConverters.toString,
        "key of the history that decides the best epoch, by default val_loss, else loss",
    )
    monitor_mode = training_param(
        TypeConverters.toString,
        "'min' or 'max': whether the smallest or the largest value of monitor is best",
        default="min",
        check=one_of("min", "max"),
    )
    return_model = training_param(
        TypeConverters.toString,
        "return the weights of the 'last' or the 'best' epoch",
        check=one_of("best", "last"),
    )
    early_stopping = training_param(
        to_stopping,
        "dict with patience, min_delta, monitor, mode: end the fit when monitor stops improving",
        train_fn=NOT_SEEN,
    )
    terminate_on_nan = training_param(
        TypeConverters.toBoolean,
        "end the fit with an error at a non-finite loss",
        default=False,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    gradient_compression = training_param(
        any_value,
        "member of hvd.Compression that compresses gradients for the network",
        train_fn=OF_THE_OPTIMIZER,
    )
    compile = training_param(
        TypeConverters.toBoolean,
        "run the model through torch.compile",
        default=False,
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    train_step = training_param(
        any_value,
        "(model, batch, ctx) -> loss of a batch, instead of forward and loss. A scalar label is (rows,)",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    validation_step = training_param(
        any_value,
        "(model, batch, ctx) -> loss of a validation batch",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    train_fn = training_param(
        any_value,
        "function of ctx that runs the whole training loop",
        annotation="Callable[..., Any]",
    )
    callbacks = training_param(
        any_value,
        "sparkhvd.estimator.Callback objects",
        annotation="Sequence[Callback]",
        train_fn=NOT_SEEN,
    )
    run_id = training_param(
        TypeConverters.toString,
        "name of the run in the store. A fit resumes an unfinished run of this name",
    )
    warm_start = training_param(
        TypeConverters.toBoolean,
        "if the run of this run_id is finished, train `epochs` more epochs from its weights",
        default=False,
    )
    checkpoint_interval_s = training_param(
        to_float,
        "seconds between checkpoints, also the most that is trained again after a failure. A checkpoint is also written after each epoch of 1 s or more",
        default=300.0,
        check=above(0),
        to_ranks=True,
    )
    keep_checkpoints = training_param(
        to_whole,
        "number of last epochs whose checkpoints stay after the fit. 0 also deletes the report. By default 1 with a run_id, else 0",
        check=at_least(0),
    )


# ----------------------------------------------------------------------------------------------------
# Params for compatibility with Horovod: some set another Param to a value, others have no effect.
# Other names of a whole Param (`maxIter` for `epochs`) are in the row of that Param.


def _switch(target: str, value: object, doc: str, *, accessors: Sequence[str] = ()) -> TableParam:
    """Declare a boolean Param for setting another Param to a value."""
    return param(
        TypeConverters.toBoolean,
        doc,
        default=False,
        stands_for=(target, value),
        accessors=accessors,
    )


def _no_effect(instead: str, *, accessors: Sequence[str] = ()) -> TableParam:
    """Declare a Param of Horovod without effect."""
    return param(any_value, "no effect", no_effect=instead, accessors=accessors)


@accessors
class IgnoredParams(TorchParams):
    """Params of Horovod without effect.

    Setting them warns once per Param and estimator (with its copies).
    """

    backend = _no_effect(
        "give num_proc, and variables as spark.executorEnv.NAME in Spark's configuration"
    )
    partitions_per_process = _no_effect(
        "rows are divided evenly among ranks for any partitions. Give num_partitions to write fewer files, or repartition the DataFrame"
    )
    reader_pool_type = _no_effect("data are read by threads")
    mp_start_method = _no_effect("ranks are always separate processes")
    tensorflow_dataset_prefetch_buffer_size = _no_effect("batches are always read ahead")
    shuffle_buffer_size = _no_effect("give shuffle_bytes", accessors=("ShufflingBufferSize",))
    continuous_cols = _no_effect("give feature_cols, and inputs={...} to pass columns by name")
    categorical_cols = _no_effect("give feature_cols, and inputs={...} to pass columns by name")
    data_module = _no_effect(
        "batches come from the materialized data. Read them yourself in a function for sparkhvd.runner.run"
    )
    compress_sparse_cols = _no_effect("the column decides how sparse vectors are stored")
    transformation_edit_fields = _no_effect("shapes are found in the data")
    transformation_removed_fields = _no_effect("only the columns that the model needs are read")

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()  # copies of the estimator share this set

    def _set(self, **values: object) -> Any:
        """Set Params, and warn about Params without effect."""
        for name, value in values.items():
            instead = self._row(name).no_effect
            if instead and value is not None and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{name} has no effect in sparkhvd: {instead}.", stacklevel=4)
        return super()._set(**values)


@accessors
class CompatibilityParams(IgnoredParams):
    """Params of Horovod that set another Param, are rejected, or have no effect."""

    restore_best = _switch("return_model", "best", "the same as return_model='best'")
    inmemory_cache_all = _switch(
        "shuffle_bytes",
        1 << 62,  # more rows than any data set
        "keep all data in memory, whatever their size",
        accessors=("InMemoryCacheAll",),
    )

    train_minibatch_fn = param(
        any_value,
        "an argument of Horovod. Give train_step instead",
        refused="is an argument of Horovod. Give train_step instead, a function (model, batch, ctx) that returns the loss: the loop calls "
        "backward() and the optimizer",
    )


# ----------------------------------------------------------------------------------------------------
# Params that the estimator shares with its model: input columns and output columns.


@accessors
class PredictParams(TorchParams):
    """Shared Params of an estimator and its model."""

    feature_cols = param(
        to_columns,
        "columns that become the model's input",
        group="data",
        aliases=("featuresCol", "feature_columns"),
        accessors=("FeatureColumns",),
    )
    label_cols = param(
        to_columns,
        "columns with the labels, one per output of the model",
        group="data",
        aliases=("labelCol", "label_columns"),
        accessors=("LabelColumns", "LabelColoumns"),
    )
    input_shapes = param(
        to_shapes,
        "shapes of one row, one per feature column, each of which becomes an argument of forward",
        group="data",
        fingerprint=True,
    )
    inputs = param(
        to_inputs,
        "argument of forward -> column, or list of columns to join",
        group="data",
        fingerprint=True,
    )
    feature_dtypes = param(to_dtypes, "torch dtype by feature column", group="data")
    decoders = param(
        to_mapping,
        "column -> function (or dict) from the value (bytes, str or array) to a number or array",
        group="data",
    )
    collate_fn = param(
        to_mapping,
        "column -> function from the list of a batch's rows to an input of the model",
        group="data",
    )
    sparse_cols = param(
        to_columns,
        "vector columns that stay sparse, by default vectors of more than 65,536 dimensions",
        group="data",
        annotation="str | Sequence[str]",
    )
    handle_invalid = param(
        any_value,
        "null, NaN, infinity or number out of range: 'error', 'skip', 'keep' (null as NaN), or a dict from columns to these or a number",
        default="error",
        group="data",
        annotation="str | Mapping[str, str | float]",
    )
    outputCols = param(to_columns, "output columns, by default <label>__output", group="data")
    predictionCol = param(
        TypeConverters.toString,
        "column for the predicted class or value as a double. '' omits it. By default added if the loss defines it",
        default="prediction",
        group="data",
    )
    probabilityCol = param(
        TypeConverters.toString,
        "column for the vector of probabilities. '' omits it. By default added if the loss defines them",
        default="probability",
        group="data",
    )
    rawPredictionCol = param(
        TypeConverters.toString,
        "column for the model's output as a vector. '' omits it. By default added with probabilityCol",
        default="rawPrediction",
        group="data",
    )
    thresholds = param(
        to_thresholds,
        "threshold of each class: the class with the largest probability / threshold is predicted",
        group="data",
    )
    use_gpu = param(
        TypeConverters.toBoolean,
        "use a GPU per rank, and in transform. By default if Spark assigns GPUs to tasks",
        group="cluster",
    )
    output_fn = param(
        to_function,
        "function from the model's output to probabilities (rows, classes)",
        group="model",
    )
    precision = param(
        TypeConverters.toString,
        "'32', 'bf16-mixed' or '16-mixed', for training and transform",
        default="32",
        group="model",
        check=one_of("32", "bf16-mixed", "16-mixed"),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    store = param(
        to_store,
        "Store (or path or URL) for data, checkpoints and weights",
        group="data",
        annotation="Store | str | PathLike[str]",
    )


# ----------------------------------------------------------------------------------------------------
# All Params of a fit, and the subsets used by the ranks, the fingerprint and a `train_fn`.


class TrainParams(
    CompatibilityParams, ClusterParams, TrainingParams, DataParams, ModelParams, PredictParams
):
    """All Params of a fit."""

    def _options(self) -> FitOptions:
        """Check and read the values of all Params.

        Raises:
            InvalidArgumentError: a value is out of range, cannot be used here, or contradicts another value.
        """
        self._check_values()
        # Without `feature_cols`, the columns in `inputs` are the features.
        options = self._read_options(FitOptions)
        functions = (options.transformation_fn, options.batch_transform_fn)
        is_transformed = any(function is not None for function in functions)
        if "feature_cols" in options.explicit or not options.inputs or is_transformed:
            return options
        return replace(options, feature_cols=columns_in(options.inputs))


def rank_options(options: FitOptions) -> dict[str, Any]:
    """Select the Params passed to `TrainSpec` unchanged."""
    return {n: getattr(options, n) for n, row in rows_of(TrainParams).items() if row.to_ranks}


def fingerprint_options(options: FitOptions) -> dict[str, object]:
    """Select the values that must not change when a fit resumes the run."""
    return {n: getattr(options, n) for n, row in rows_of(TrainParams).items() if row.fingerprint}


def changed_options(options: FitOptions) -> dict[str, object]:
    """Select the values that differ from the defaults."""
    rows = {n: row for n, row in rows_of(TrainParams).items() if row.is_option}
    values = {n: getattr(options, n) for n in options.explicit & rows.keys()}
    return {n: value for n, value in values.items() if value != rows[n].default}


def train_fn_effects() -> dict[str, str]:
    """Map Params without a direct effect on a `train_fn` to `NOT_SEEN` or `OF_THE_OPTIMIZER`."""
    return {name: row.train_fn for name, row in rows_of(TrainParams).items() if row.train_fn}
