"""Convert a DataFrame's rows to tensors on the ranks: columns, files, store, readers. Usable without the estimator.

A `source` is a DataFrame or Parquet files. On the driver `columns` decides how each column is stored; `materialize`
writes a DataFrame into the store as packed Parquet in one Spark job, unless `reuse` finds earlier data. A `manifest`
names the files, and readers ignore all other files. On a rank `reading` provides batches by row number, for any format
of the files.

Failure: a damaged, truncated or replaced file raises an error that names it; it never yields wrong rows. Temporary data
are deleted when the process that owns them ends.

Each module imports only those above it:

    store          the folder shared by driver and executors
    columns        columns: schema, decoders, features, labels
    ownership      leases of materialized data, and their deletion
    arrow_limits   bounds on Spark's Arrow batches
    arrow_types    Arrow types that only external files have
    files          open files, and reusable memory for windows of rows
    manifest       the files of a data set
    arrow          Arrow columns to numpy arrays of rows
    packed         our Parquet: one page per column and row group
    parquet        Parquet of other writers, including petastorm
    table_formats  versions of Delta and Iceberg tables, read by their own libraries
    tables         facts from a DataFrame's plan: identity, small partitions, tables read without their logs
    materialize    writes a DataFrame as packed files
    reading        a rank's batches
    reuse          reuse of materialized data
    dataset        data prepared once, for training loops outside the estimator
    source         rows of a fit: a DataFrame, or Parquet files in place
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkhvd.data.dataset import Dataset as Dataset
    from sparkhvd.data.dataset import Loader as Loader
    from sparkhvd.data.dataset import data_module as data_module
    from sparkhvd.data.dataset import load as load
    from sparkhvd.data.dataset import make_spark_converter as make_spark_converter
    from sparkhvd.data.dataset import prepare as prepare

# These names are imported on first use, because the ranks of a fit do not need them.
__all__ = ["Dataset", "Loader", "data_module", "load", "make_spark_converter", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sparkhvd.data' has no attribute {name!r}")
    return getattr(importlib.import_module("sparkhvd.data.dataset"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
