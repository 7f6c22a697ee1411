"""Every Spark ML Param of the estimator and its model: one row each.

To add one that the ranks get as it is: a row here with `to_ranks=True`, and a field of `TrainSpec`.
"""

from __future__ import annotations

import warnings
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.param_table import (
    NOT_SEEN,
    OF_THE_OPTIMIZER,
    TorchParams,
    above,
    accessors,
    at_least,
    one_of,
    param,
)
from sparkhvd.estimator.param_types import (
    any_value,
    to_columns,
    to_dtypes,
    to_function,
    to_inputs,
    to_mapping,
    to_shapes,
    to_store,
    to_whole,
)

__all__ = ["HorovodParams", "PredictParams", "TrainParams"]


@accessors
class PredictParams(TorchParams):
    """What decides how columns enter the model and how its outputs leave."""

    feature_cols = param(
        to_columns,
        "columns that become the model's input",
        group="data",
        aliases=("featuresCol",),
        accessors=("FeatureColumns",),
    )
    label_cols = param(
        to_columns,
        "columns with the labels, one per output of the model",
        group="data",
        aliases=("labelCol",),
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
        "null, NaN, infinity, out of range: 'error', 'skip', or a dict from column to a number",
        default="error",
        group="data",
        annotation="str | Mapping[str, str | float]",
    )
    outputCols = param(to_columns, "output columns; default <label>__output", group="data")
    predictionCol = param(
        TypeConverters.toString,
        "column for the class or value as a double; '' = none",
        default="",
        group="data",
    )
    probabilityCol = param(
        TypeConverters.toString,
        "column for a vector of probabilities; '' = none",
        default="",
        group="data",
    )
    rawPredictionCol = param(
        TypeConverters.toString,
        "column for the model's output as a vector; '' = none",
        default="",
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
    store = param(
        to_store,
        "Store where data, checkpoints and weights live",
        group="data",
        annotation="Store | str | PathLike[str]",
    )


@accessors
class HorovodParams(TorchParams):
    """Params of Horovod that have no effect here; setting one warns, once per estimator and its copies."""

    backend = param(
        any_value,
        "no effect",
        no_effect="give num_proc, and variables as spark.executorEnv.NAME in Spark's configuration",
    )
    partitions_per_process = param(
        any_value,
        "no effect",
        no_effect="rows are shared out evenly whatever the partitions are; repartition the DataFrame to write with more tasks",
    )
    reader_pool_type = param(any_value, "no effect", no_effect="data are read by threads")
    mp_start_method = param(
        any_value,
        "no effect",
        no_effect="ranks are always processes of their own",
    )
    tensorflow_dataset_prefetch_buffer_size = param(
        any_value,
        "no effect",
        no_effect="batches are always read ahead",
    )
    shuffle_buffer_size = param(
        any_value,
        "no effect",
        accessors=("ShufflingBufferSize",),
        no_effect="give shuffle_bytes",
    )
    continuous_cols = param(
        any_value,
        "no effect",
        no_effect="give feature_cols, and inputs={...} to pass columns by name",
    )
    categorical_cols = param(
        any_value,
        "no effect",
        no_effect="give feature_cols, and inputs={...} to pass columns by name",
    )
    data_module = param(
        any_value,
        "no effect",
        no_effect="batches come from the materialized data; read them yourself in a function for sparkhvd.runner.run",
    )
    compress_sparse_cols = param(
        any_value,
        "no effect",
        no_effect="how a sparse vector is stored follows from the column",
    )
    transformation_edit_fields = param(
        any_value,
        "no effect",
        no_effect="shapes follow from the data",
    )
    transformation_removed_fields = param(
        any_value,
        "no effect",
        no_effect="only the columns that the model needs are read",
    )

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()  # a copy of the estimator has the same set

    def _set(self, **values: Any) -> Any:
        """Set Params; warns about those without effect."""
        for name, value in values.items():
            instead = self._row(name).no_effect
            if instead and value is not None and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{name} has no effect in sparkhvd: {instead}.", stacklevel=4)
        return super()._set(**values)


@accessors
class TrainParams(HorovodParams, PredictParams):
    """What a fit takes besides."""

    model = param(
        any_value,
        "torch.nn.Module to train, or a function that makes one",
        group="model",
        annotation="nn.Module | Callable[..., nn.Module]",
    )
    optimizer = param(
        any_value,
        "optimizer over the model's parameters, or a function of parameters",
        group="model",
        annotation="Optimizer | Callable[..., Any]",
    )
    loss = param(
        any_value,
        "(output, label) -> scalar mean or (scalar mean, weight); or one per label",
        group="model",
        annotation="Callable[..., Any] | Sequence[Callable[..., Any]]",
    )
    loss_constructors = param(
        any_value,
        "functions that return the loss; instead of loss",
        group="model",
        annotation="Callable[..., Any] | Sequence[Callable[..., Any]]",
    )
    learning_rate = param(
        TypeConverters.toFloat,
        "of all groups of the optimizer; default theirs",
        group="model",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
        aliases=("stepSize",),
    )
    weight_decay = param(
        TypeConverters.toFloat,
        "of all groups of the optimizer; default theirs",
        group="model",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
    )
    lr_scaling = param(
        TypeConverters.toString,
        "'linear' multiplies learning rates by num_proc",
        group="model",
        fingerprint=True,
        train_fn=OF_THE_OPTIMIZER,
    )
    gradient_compression = param(
        any_value,
        "of hvd.Compression: how gradients travel",
        group="model",
        train_fn=OF_THE_OPTIMIZER,
    )
    loss_weights = param(
        TypeConverters.toListFloat,
        "factor of each label's loss",
        group="model",
        fingerprint=True,
        train_fn=NOT_SEEN,
    )
    sample_weight_col = param(
        TypeConverters.toString,
        "column with a weight per row",
        group="data",
        aliases=("weightCol",),
    )
    label_shapes = param(
        to_shapes,
        "shape of one row of each label column",
        group="data",
        fingerprint=True,
    )
    label_dtypes = param(to_dtypes, "torch dtype by label column", group="data")
    metrics = param(
        any_value,
        "'accuracy', 'mse', 'mae', functions of (output, label) or torchmetrics; or a dict",
        default=[],
        group="model",
        annotation="Any",
        train_fn=NOT_SEEN,
    )
    batch_size = param(
        to_whole,
        "rows per rank and step",
        default=32,
        group="training",
        check=at_least(1),
        fingerprint=True,
    )
    val_batch_size = param(
        to_whole,
        "rows per rank and step of validation",
        group="training",
        check=at_least(1),
    )
    epochs = param(
        to_whole,
        "passes over the data",
        default=1,
        group="training",
        check=at_least(1),
        aliases=("maxIter",),
    )
    num_proc = param(
        to_whole,
        "number of ranks; default every GPU or task slot",
        group="cluster",
        aliases=("numTrainWorkers",),
    )
    validation = param(
        any_value,
        "fraction of the rows, column that is true for validation rows, or DataFrame",
        group="data",
        annotation="float | str | DataFrame",
        fingerprint=True,
        aliases=("validationIndicatorCol",),
    )
    reader = param(
        TypeConverters.toString,
        "of fit_on_parquet: 'pyarrow', or 'petastorm' for data sets that it encoded",
        default="pyarrow",
        group="data",
    )
    num_workers = param(
        to_whole,
        "threads per rank that run decoders",
        default=1,
        group="data",
        check=at_least(1),
        aliases=("train_reader_num_workers",),
        accessors=("TrainReaderNumWorker",),
    )
    val_reader_num_workers = param(
        to_whole,
        "the same for validation; default num_workers",
        group="data",
        check=at_least(1),
        accessors=("ValReaderNumWorker",),
    )
    shuffle = param(
        TypeConverters.toBoolean,
        "a new order of the rows each epoch",
        default=True,
        group="data",
        fingerprint=True,
    )
    shuffle_bytes = param(
        to_whole,
        "data up to this many bytes are held in memory and permuted uniformly",
        default=1 << 30,
        group="data",
        check=at_least(1),
    )
    inmemory_cache_all = param(
        TypeConverters.toBoolean,
        "keep all data in memory, whatever they take",
        default=False,
        group="data",
        accessors=("InMemoryCacheAll",),
    )
    drop_last = param(
        TypeConverters.toBoolean,
        "leave out the last step if it is not full",
        default=False,
        group="data",
        fingerprint=True,
    )
    random_seed = param(
        to_whole,
        "decides split, order and dropout; default random",
        group="training",
        aliases=("seed",),
    )
    gradient_clip_norm = param(
        TypeConverters.toFloat,
        "largest norm of all gradients together",
        group="training",
        check=above(0),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    gradient_clip_value = param(
        TypeConverters.toFloat,
        "largest absolute value in a gradient",
        group="training",
        check=above(0),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    accumulate = param(
        to_whole,
        "batches per rank whose gradients make one step",
        default=1,
        group="training",
        check=at_least(1),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
        aliases=("backward_passes_per_step",),
    )
    precision = param(
        TypeConverters.toString,
        "'32', 'bf16-mixed' or '16-mixed'",
        default="32",
        group="model",
        check=one_of("32", "bf16-mixed", "16-mixed"),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    lr_scheduler = param(
        to_function,
        "(optimizer) or (optimizer, total_steps) -> scheduler",
        group="training",
        train_fn=OF_THE_OPTIMIZER,
    )
    lr_scheduler_interval = param(
        TypeConverters.toString,
        "it moves after each 'epoch' or 'step'",
        default="epoch",
        group="training",
        check=one_of("epoch", "step"),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    train_steps_per_epoch = param(
        to_whole,
        "at most so many steps per epoch; default all rows",
        group="training",
        check=at_least(1),
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    validation_steps_per_epoch = param(
        to_whole,
        "the same for batches of validation",
        group="training",
        check=at_least(1),
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    monitor = param(
        TypeConverters.toString,
        "key of the history that tells the best epoch; default val_loss, else loss",
        group="training",
    )
    monitor_mode = param(
        TypeConverters.toString,
        "'min' or 'max' of it is best",
        default="min",
        group="training",
    )
    return_model = param(
        TypeConverters.toString,
        "weights of the 'last' or the 'best' epoch",
        group="training",
    )
    restore_best = param(
        TypeConverters.toBoolean,
        "the same as return_model='best'",
        default=False,
        group="training",
    )
    early_stopping = param(
        to_mapping,
        "dict with patience, min_delta, monitor, mode: end when it stops improving",
        group="training",
        annotation="Mapping[str, Any]",
        train_fn=NOT_SEEN,
    )
    terminate_on_nan = param(
        TypeConverters.toBoolean,
        "end with an error at a loss that is no number",
        default=False,
        group="training",
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    compile = param(
        TypeConverters.toBoolean,
        "run the model through torch.compile",
        default=False,
        group="model",
        fingerprint=True,
        to_ranks=True,
        train_fn=NOT_SEEN,
    )
    train_step = param(
        any_value,
        "(model, batch, ctx) -> loss of a batch; instead of forward and loss",
        group="model",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    validation_step = param(
        any_value,
        "(model, batch, ctx) -> loss of a validation batch",
        group="model",
        annotation="Callable[..., Any]",
        train_fn=NOT_SEEN,
    )
    train_fn = param(
        any_value,
        "(ctx): the whole training loop",
        group="model",
        annotation="Callable[..., Any]",
    )
    train_minibatch_fn = param(any_value, "Horovod's: give train_step", group="model")
    callbacks = param(
        any_value,
        "sparkhvd.estimator.Callback objects",
        group="model",
        annotation="Sequence[Callback]",
        train_fn=NOT_SEEN,
    )
    transformation_fn = param(
        any_value,
        "a dict of one row's values in and out, before training",
        group="data",
        annotation="Callable[..., Any]",
    )
    batch_transform_fn = param(
        any_value,
        "a dict of arrays of a batch in and out, before training",
        group="data",
        annotation="Callable[..., Any]",
    )
    verbose = param(
        to_whole,
        "0 prints nothing; 1 prints a line per epoch",
        default=1,
        group="cluster",
    )
    progress = param(to_function, "called on the driver with each epoch's record", group="cluster")
    run_id = param(
        TypeConverters.toString,
        "name of the run in the store; an unfinished one resumes",
        group="training",
    )
    warm_start = param(
        TypeConverters.toBoolean,
        "a finished run_id trains `epochs` more epochs from its weights",
        default=False,
        group="training",
    )
    checkpoint_interval_s = param(
        TypeConverters.toFloat,
        "at most so many seconds of steps are repeated after a loss; also saved after each epoch",
        default=300.0,
        group="training",
        check=above(0),
    )
    keep_checkpoints = param(
        to_whole,
        "epochs whose checkpoints stay after the fit; 0: nothing of the run; not given: 1 with a run_id, else 0",
        group="training",
        check=at_least(0),
    )
    settings = param(
        any_value,
        "sparkhvd.Settings of the engine",
        group="cluster",
        annotation="Settings",
    )
    max_retries = param(
        to_whole,
        "relaunches after a lost process, executor or host",
        default=2,
        group="cluster",
    )
    start_timeout = param(
        TypeConverters.toFloat,
        "longest wait for task slots in seconds",
        group="cluster",
    )
    data_key = param(
        TypeConverters.toString,
        "equal keys mean equal data: reuse what was materialized",
        group="data",
    )
    keep_data = param(
        TypeConverters.toBoolean,
        "keep materialized data until Store.clean()",
        default=False,
        group="data",
    )
