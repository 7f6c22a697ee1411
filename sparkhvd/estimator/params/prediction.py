"""Params of the estimator and its model: columns into the model, and outputs out of it."""

from __future__ import annotations

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import (
    any_value,
    to_columns,
    to_dtypes,
    to_function,
    to_inputs,
    to_mapping,
    to_shapes,
    to_store,
    to_thresholds,
)
from sparkhvd.estimator.params.table import NOT_SEEN, one_of, param

__all__ = ["PredictParams"]


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
        "null, NaN, infinity, out of range: 'error', 'skip', or a dict from column to a number",
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
