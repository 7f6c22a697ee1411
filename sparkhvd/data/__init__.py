"""Bring a DataFrame's rows to the ranks as tensors: columns, files, store, readers. Usable without the estimator.

A `source` is a DataFrame or Parquet files. On the driver `columns` decides how each column is stored; `materialize` writes a DataFrame
into the store as packed Parquet, in one Spark job, unless `reuse` finds data that were written before. A `manifest` names the files,
and only files in it exist for a reader. On a rank `reading` gives batches by row number, whichever format the files have.

Failure: a file that is damaged, cut or replaced is an error that names it, never other rows. Temporary data go with the process that owns them.

Each module imports only those above it:

    store         the folder that driver and executors share
    columns       columns: schema, decoders, features, labels
    arrow_types   types of Arrow beyond those that Spark sends
    buffers       memory for windows of rows, filled again and again
    arrow_memory  memory of Arrow arrays as numpy arrays
    group_numbers  numbers in place of a column's values of groups
    findings      counts of unusable rows, in sentences
    narrowing     numbers in the stored type
    arrow         Arrow columns to numpy arrays of rows
    manifest      the files of a data set
    open_files    files that are open at a time
    vectors       ML vectors on their way through Arrow
    arrow_limits  bounds on Spark's Arrow batches
    packed        our Parquet: one page per column and row group
    parquet       Parquet of other writers, petastorm's included
    reading       a rank's batches
    spark_plan    a DataFrame's analyzed plan, for the key of reuse
    tables        a warning for files of tables that are read without their logs
    materialize   writes a DataFrame as packed files
    ownership     leases of materialized data, and their deletion
    reuse         materialized data found again
    source        rows of a fit: a DataFrame, or Parquet files as they are
    loader        batches of a rank, for any training loop
    dataset       data prepared once for any process of any launcher
    converter     petastorm's names for that
    lightning     Lightning's data module
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkhvd.data.converter import make_spark_converter as make_spark_converter
    from sparkhvd.data.dataset import Dataset as Dataset
    from sparkhvd.data.dataset import load as load
    from sparkhvd.data.dataset import prepare as prepare
    from sparkhvd.data.lightning import data_module as data_module
    from sparkhvd.data.loader import Loader as Loader

# Where each public name lives. Ranks of a fit need none of them.
_HOMES = {
    "Dataset": "dataset",
    "Loader": "loader",
    "data_module": "lightning",
    "load": "dataset",
    "make_spark_converter": "converter",
    "prepare": "dataset",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names are data, so that they stand once


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparkhvd.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sparkhvd.data.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
