"""Source of `TorchEstimator.fit_on_table(table)`: check options, find the table's files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from sparkhvd.data.source import ParquetFiles
from sparkhvd.data.table_formats.table import open_table
from sparkhvd.data.table_formats.version import requested
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.inputs import FitSources
from sparkhvd.estimator.fitting.on_parquet import check_options
from sparkhvd.spark import is_dataframe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkhvd.data.table_formats.where import Where
    from sparkhvd.estimator.params.generated import FitOptions


@dataclass(frozen=True)
class TableChoice:
    """Arguments of `fit_on_table` that choose rows. Other attributes are described there.

    Attributes:
        schema_id: id of the columns with which to read an Iceberg snapshot again as an earlier fit did.
        uuid: id that the table must have; "" accepts any table.
    """

    table: str | os.PathLike[str]
    version: int | None = None
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: str | date | datetime | None = None
    where: Where | None = None
    catalog: object = None
    storage_options: Mapping[str, Any] | None = None
    incremental: bool = False
    schema_id: int | None = None
    uuid: str = ""


def open_table_source(options: FitOptions, choice: TableChoice, spark: SparkSession) -> FitSources:
    """Find the files of a version of a table, without a Spark job.

    Args:
        options: options of the fit.
        choice: choice of the rows.
        spark: the session whose tasks become ranks.

    Raises:
        InvalidArgumentError: a Param applies only to materialized data, or the table cannot be read exactly.
    """
    check_options(options, "fit_on_table")
    if options.reader != "pyarrow":
        raise InvalidArgumentError(
            f"reader is {options.reader!r}, but fit_on_table reads tables only with pyarrow. Leave reader out."
        )
    request = requested(choice.version, choice.snapshot_id, choice.ref, choice.as_of)
    dataset = open_table(
        choice.table,
        replace(request, schema_id=choice.schema_id),
        spark,
        where=choice.where,
        catalog=choice.catalog,
        storage_options=choice.storage_options,
    )
    assert dataset.table is not None
    found = dataset.table.version
    if choice.uuid not in ("", found.uuid):
        raise InvalidArgumentError(
            f"{found.name!r} now holds another table: its id is {found.uuid}, but the run was trained on {choice.uuid}. Restore the table."
        )
    split = options.validation
    assert not is_dataframe(split)  # refused above
    return FitSources(ParquetFiles(dataset, spark, choice.incremental), None, split)
