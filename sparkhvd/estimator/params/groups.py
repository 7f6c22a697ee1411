"""Params of the estimator and its model, by subject: launch, data, training, Horovod's other names, columns and outputs."""

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
    """Check `num_proc`."""
    least, most = value if isinstance(value, tuple) else (value, value)
    if least < 1:
        return "it must be at least 1"
    return "" if least <= most else "the first is the least number of ranks, the second the most"


@accessors
class ClusterParams(TorchParams):
    """Params of the launch."""

    num_proc = cluster_param(
        to_ranks,
        "number of ranks; default every GPU or task slot; (least, most) for elastic training",
        annotation="int | tuple[int, int]",
        aliases=("numTrainWorkers",),
        check=is_number_of_ranks,
        in_conf=True,
    )
    elastic_batch = cluster_param(
        TypeConverters.toString,
        "'global': a batch of all ranks keeps least * batch_size rows when the number of ranks changes",
        check=one_of("global"),
        fingerprint=True,
    )
    verbose = cluster_param(
        to_whole,
        "0 prints nothing; 1 prints a line per epoch; 2 also shows Spark's log of a failed rank",
        default=1,
        check=at_least(0),
        in_conf=True,
    )
    progress = cluster_param(to_function, "called on the driver with each epoch's record")
    loggers = cluster_param(
        to_loggers,
        "list of loggers, such as sparkhvd.MLflowLogger() or sparkhvd.TensorBoardLogger(), fed on the driver",
    )
    timeline = cluster_param(
        to_timeline,
        "True, or a number of steps: write their timeline, for ui.perfetto.dev, into the run's folder",
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
        "relaunches after a lost process, executor or host",
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
        "column with a weight per row",
        aliases=("weightCol",),
    )
    group_col = data_param(
        TypeConverters.toString,
        "column whose equal values make a group: its rows stay together, on one rank",
    )
    label_shapes = data_param(
        to_shapes,
        "shape of one row of each label column",
        fingerprint=True,
    )
    label_dtypes = data_param(to_dtypes, "torch dtype by label column")
    validation = data_param(
        any_value,
        "fraction of the rows, column that is true for validation rows, or DataFrame",
        annotation="float | str | DataFrame",
        fingerprint=True,
        aliases=("validationIndicatorCol",),
    )
    reader = data_param(
        TypeConverters.toString,
        "of fit_on_parquet: 'pyarrow', or 'petastorm' for data sets that it encoded",
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
        "the same for validation; default num_workers",
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
        "data up to this many bytes are held in memory and permuted uniformly",
        default=1 << 30,
        check=at_least(1),
        to_ranks=True,
    )
    drop_last = data_param(
        TypeConverters.toBoolean,
        "leave out the last step if it is not full",
        default=False,
        fingerprint=True,
        to_ranks=True,
    )
    transformation_fn = data_param(
        any_value,
        "a dict of one row's values in and out, before training",
        annotation="Callable[..., Any]",
    )
    batch_transform_fn = data_param(
        any_value,
        "a dict of arrays of a batch in and out, before training",
        annotation="Callable[..., Any]",
    )
    data_key = data_param(
        TypeConverters.toString,
        "equal keys mean equal data: reuse what was materialized",
    )
    keep_data = data_param(
        TypeConverters.toBoolean,
        "keep materialized data until Store.clean()",
        default=False,
    )
    num_partitions = data_param(
        to_whole,
        "largest number of partitions to write, each one task and one file; default: the DataFrame's",
        check=at_least(1),
    )


# ----------------------------------------------------------------------------------------------------
# Params of the model, the optimizer and the loss.


def not_negative(value: float) -> str:
    """Check a number that may be 0."""
    return "" if 0 <= value < float("inf") else "it must be 0 or more"


def is_scaling(value: str) -> str:
    """Check `lr_scaling`."""
    if value == "linear":
        return ""
    return "it must be 'linear', or not given: then learning rates are used as given"


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
        "optimizer over the model's parameters, or several in a list; a function of parameters; or 'adam', 'adamw', 'sgd', ...",
        annotation="Optimizer | Sequence[Optimizer] | Callable[..., Any] | str",
    )
    loss = model_param(
        to_losses,
        "(output, label) -> mean or (mean, weight), or 'mse', ...; or one per label; a scalar label is (rows, 1) if its output is",
        annotation="Callable[..., Any] | str | Sequence[Callable[..., Any] | str]",
    )
    loss_constructors = model_param(
        any_value,
        "functions that return the loss; instead of loss",
        annotation="Callable[..., Any] | Sequence[Callable[..., Any]]",
    )
    learning_rate = model_param(
        to_float,
        "learning rate of all groups of the optimizer; default theirs",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        aliases=("stepSize",),
        check=not_negative,
    )
    weight_decay = model_param(
        to_float,
        "weight decay of all groups of the optimizer; default theirs",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        check=not_negative,
    )
    lr_scaling = model_param(
        TypeConverters.toString,
        "'linear' multiplies learning rates by num_proc",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        check=is_scaling,
    )
    gradient_compression = model_param(
        any_value,
        "member of hvd.Compression for gradients on their way",
        train_fn=OF_THE_OPTIMIZER,
    )
    loss_weights = model_param(
        TypeConverters.toListFloat,
        "factor of each label's loss",
        fingerprint=True,
        train_fn=NOT_SEEN,
    )
    metrics = model_param(
        any_value,
        "'accuracy', 'f1', 'auc', 'mse', 'mae', functions of (output, label) as for loss, or torchmetrics, which get (rows,); or a dict",
        default=[],
        annotation="Any",
        train_fn=NOT_SEEN,
    )
    pairs_rows = model_param(
        TypeConverters.toBoolean,
        "False: no warning where loss or metrics do not compare each row's output with its label",
        default=True,
        train_fn=NOT_SEEN,
    )
    compile = model_param(
        TypeConverters.toBoolean,
        "run the model through torch.compile",
        default=False,
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    train_step = model_param(
        any_value,
        "(model, batch, ctx) -> loss of a batch; instead of forward and loss; a scalar label is (rows,)",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    validation_step = model_param(
        any_value,
        "(model, batch, ctx) -> loss of a validation batch",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    train_fn = model_param(
        any_value,
        "(ctx): the whole training loop",
        annotation="Callable[..., Any]",
    )
    callbacks = model_param(
        any_value,
        "sparkhvd.estimator.Callback objects",
        annotation="Sequence[Callback]",
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
        "at most so many seconds of steps are repeated after a loss; also saved after each epoch of a second or more",
        default=300.0,
        check=above(0),
        to_ranks=True,
    )
    keep_checkpoints = training_param(
        to_whole,
        "epochs whose checkpoints stay after the fit; 0: nothing of the run, nor its report; not given: 1 with a run_id, else 0",
        check=at_least(0),
    )


# ----------------------------------------------------------------------------------------------------
# Names accepted for compatibility: values of other Params under a second name, and Params of Horovod without effect.
# Other names of a whole Param (`maxIter` for `epochs`) are in its own row.


def _switch(target: str, value: object, doc: str, *, accessors: Sequence[str] = ()) -> TableParam:
    """Declare a Param whose True sets another Param to a value."""
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
    """Params of Horovod without effect; setting one warns once per estimator and its copies."""

    backend = _no_effect(
        "give num_proc, and variables as spark.executorEnv.NAME in Spark's configuration"
    )
    partitions_per_process = _no_effect(
        "rows are shared out evenly whatever the partitions are; give num_partitions to write fewer files, or repartition the DataFrame"
    )
    reader_pool_type = _no_effect("data are read by threads")
    mp_start_method = _no_effect("ranks are always processes of their own")
    tensorflow_dataset_prefetch_buffer_size = _no_effect("batches are always read ahead")
    shuffle_buffer_size = _no_effect("give shuffle_bytes", accessors=("ShufflingBufferSize",))
    continuous_cols = _no_effect("give feature_cols, and inputs={...} to pass columns by name")
    categorical_cols = _no_effect("give feature_cols, and inputs={...} to pass columns by name")
    data_module = _no_effect(
        "batches come from the materialized data; read them yourself in a function for sparkhvd.runner.run"
    )
    compress_sparse_cols = _no_effect("how a sparse vector is stored follows from the column")
    transformation_edit_fields = _no_effect("shapes follow from the data")
    transformation_removed_fields = _no_effect("only the columns that the model needs are read")

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()  # shared by copies of the estimator

    def _set(self, **values: object) -> Any:
        """Set Params; warn about Params without effect."""
        for name, value in values.items():
            instead = self._row(name).no_effect
            if instead and value is not None and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{name} has no effect in sparkhvd: {instead}.", stacklevel=4)
        return super()._set(**values)


@accessors
class CompatibilityParams(IgnoredParams):
    """Params that are second names of values, are rejected, or have no effect."""

    restore_best = _switch("return_model", "best", "the same as return_model='best'")
    inmemory_cache_all = _switch(
        "shuffle_bytes",
        1 << 62,  # more rows than any data set
        "keep all data in memory, whatever they take",
        accessors=("InMemoryCacheAll",),
    )

    train_minibatch_fn = param(
        any_value,
        "Horovod's: give train_step",
        refused="is Horovod's. Give train_step instead, a function of (model, batch, ctx) that returns the loss: the loop calls backward() "
        "and steps",
    )


# ----------------------------------------------------------------------------------------------------
# Params of the estimator and its model: columns into the model, and outputs out of it.


@accessors
class PredictParams(TorchParams):
    """Params that an estimator shares with its model."""

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
        "shape of one row of each column, each an argument of forward",
        group="data",
        fingerprint=True,
    )
    inputs = param(
        to_inputs,
        "argument name of forward -> column or list of columns",
        group="data",
        fingerprint=True,
    )
    feature_dtypes = param(to_dtypes, "torch dtype by feature column", group="data")
    decoders = param(
        to_mapping,
        "column -> function of a bytes, str or array (or dict) -> number or array",
        group="data",
    )
    collate_fn = param(
        to_mapping,
        "column -> function of a batch's rows -> model's input",
        group="data",
    )
    sparse_cols = param(
        to_columns,
        "vector columns kept sparse; default those above 65,536 dimensions",
        group="data",
        annotation="str | Sequence[str]",
    )
    handle_invalid = param(
        any_value,
        "null, NaN, infinity, out of range: 'error', 'skip', 'keep' (NaN), or a dict from column to these or a number",
        default="error",
        group="data",
        annotation="str | Mapping[str, str | float]",
    )
    outputCols = param(to_columns, "output columns; default <label>__output", group="data")
    predictionCol = param(
        TypeConverters.toString,
        "column for the class or value as a double; '' = none; by default where the loss tells it",
        default="prediction",
        group="data",
    )
    probabilityCol = param(
        TypeConverters.toString,
        "column for a vector of probabilities; '' = none; by default where the loss tells them",
        default="probability",
        group="data",
    )
    rawPredictionCol = param(
        TypeConverters.toString,
        "column for the model's output as a vector; '' = none; by default with probabilityCol",
        default="rawPrediction",
        group="data",
    )
    thresholds = param(
        to_thresholds,
        "one per class: that with the largest probability / threshold is predicted",
        group="data",
    )
    use_gpu = param(
        TypeConverters.toBoolean,
        "a GPU per rank, and in transform; default where Spark gives tasks GPUs",
        group="cluster",
    )
    output_fn = param(
        to_function,
        "the model's output -> (rows, classes) probabilities",
        group="model",
    )
    precision = param(
        TypeConverters.toString,
        "'32', 'bf16-mixed' or '16-mixed', in transform too",
        default="32",
        group="model",
        check=one_of("32", "bf16-mixed", "16-mixed"),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    store = param(
        to_store,
        "Store where data, checkpoints and weights live",
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
        """Check the values and read them.

        Raises:
            InvalidArgumentError: one is out of range, cannot be used here, or contradicts another.
        """
        self._check_values()
        # The columns in `inputs` are the features where nothing else says so.
        options = self._read_options(FitOptions)
        functions = (options.transformation_fn, options.batch_transform_fn)
        is_transformed = any(function is not None for function in functions)
        if "feature_cols" in options.explicit or not options.inputs or is_transformed:
            return options
        return replace(options, feature_cols=columns_in(options.inputs))


def rank_options(options: FitOptions) -> dict[str, Any]:
    """Select the Params that are fields of `TrainSpec` unchanged."""
    return {n: getattr(options, n) for n, row in rows_of(TrainParams).items() if row.to_ranks}


def fingerprint_options(options: FitOptions) -> dict[str, object]:
    """Select the values that two fits must share so that one can resume the other."""
    return {n: getattr(options, n) for n, row in rows_of(TrainParams).items() if row.fingerprint}


def changed_options(options: FitOptions) -> dict[str, object]:
    """Select the values that differ from the defaults."""
    rows = {n: row for n, row in rows_of(TrainParams).items() if row.is_option}
    values = {n: getattr(options, n) for n in options.explicit & rows.keys()}
    return {n: value for n, value in values.items() if value != rows[n].default}


def train_fn_effects() -> dict[str, str]:
    """List the Params that a `train_fn` does not see, or sees through the optimizer."""
    return {name: row.train_fn for name, row in rows_of(TrainParams).items() if row.train_fn}
