"""Params of the training data: columns, validation rows, order and reading."""

from __future__ import annotations

import functools

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import (
    any_value,
    to_dtypes,
    to_shapes,
    to_whole,
)
from sparkhvd.estimator.params.table import at_least, param

__all__ = ["DataParams"]

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
        "partitions that data are written from, each a task and a file, at most; default: the DataFrame's",
        check=at_least(1),
    )
