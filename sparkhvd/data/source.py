"""Sources of rows: a Spark DataFrame, written into the store before it is read, or Parquet files, read in place.

`fit` chooses the sources once at its start; later code uses only the protocol `DataSource`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sparkhvd.data.parquet.dataset import ParquetDataset
from sparkhvd.data.parquet.manifest import KnownFooters, read_manifest
from sparkhvd.data.reuse import PreparedData, ReuseScope, prepare

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql import DataFrame, SparkSession

    from sparkhvd.data.columns.schema import AnySchema, DataSchema
    from sparkhvd.data.store.store import Store


@dataclass(frozen=True)
class Target:
    """Place and lifetime of prepared data.

    Attributes:
        store: shared by the driver and all executors.
        run_dir: the run's folder in the store.
        scope: fits that share materialized data without a plan key or a user key.
        data_key: the user's name for the data of a fit, or None.
        keep_data: keep materialized data in the store until `Store.clean()`.
        role: "data", or "validation" for a source that only validates.
        num_partitions: maximum number of partitions, and so of files, of written data; None does not coalesce.
        on_task_start: called in every task before it writes data; returns at once.
    """

    store: Store
    run_dir: str
    scope: ReuseScope | None = None
    data_key: str | None = None
    keep_data: bool = False
    role: str = "data"
    num_partitions: int | None = None
    on_task_start: Callable[[TaskContext], None] | None = None

    @property
    def manifest_dir(self) -> str:
        """Folder for the manifest of files read in place."""
        return f"{self.run_dir}/{self.role}"

    @property
    def key(self) -> str | None:
        """User's name for the data of this source."""
        if self.data_key is None or self.role == "data":
            return self.data_key
        return f"{self.data_key}/{self.role}"


class DataSource(Protocol):
    """Source of rows for the ranks. On the driver, `prepare` may start a Spark job.

    `schema` starts no Spark job.
    """

    @property
    def name(self) -> str:
        """Name of the source in messages."""

    @property
    def spark(self) -> SparkSession:
        """Session whose tasks become ranks."""

    @property
    def schema(self) -> AnySchema:
        """Columns and their Spark types."""

    def prepare(self, schema: DataSchema, target: Target) -> PreparedData:
        """Make the columns of `schema` readable for ranks.

        Raises:
            InvalidArgumentError: the values cannot be used.
        """


@dataclass(frozen=True)
class DataFrameSource:
    """Classic or Connect DataFrame, written as packed files unless the store has equal data.

    One Spark job writes the files.
    """

    df: DataFrame

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        return "DataFrame"

    @property
    def spark(self) -> SparkSession:
        return self.df.sparkSession

    @property
    def schema(self) -> AnySchema:
        return self.df.schema

    def prepare(self, schema: DataSchema, target: Target) -> PreparedData:
        """Materialize the columns, or reuse data in the store. See `reuse.prepare`."""
        return prepare(
            self.df,
            schema,
            target.store,
            data_key=target.key,
            keep_data=target.keep_data,
            num_partitions=target.num_partitions,
            scope=target.scope,
            on_task_start=target.on_task_start,
        )


@dataclass(frozen=True)
class ParquetFiles:
    """Parquet files read in place by ranks. The driver reads footers and the first rows, without a Spark job.

    Attributes:
        dataset: the files.
        spark: session whose tasks become ranks.
        is_incremental: keep the footers of a table's files in the store, and read only those of new files.
    """

    dataset: ParquetDataset
    spark: SparkSession
    is_incremental: bool = False

    @property
    def name(self) -> str:
        """Name of the source in messages: the URL of the files, or the version of their table."""
        if self.dataset.table is not None:
            return self.dataset.table.version.text
        return f"Parquet at {self.dataset.url!r}"

    @property
    def schema(self) -> AnySchema:
        """Columns of the files, then those of folders `column=value`."""
        return self.dataset.schema

    def prepare(self, schema: DataSchema, target: Target) -> PreparedData:
        """Write only the manifest of the files."""
        began = time.monotonic()
        reason, known = "read as it is", None
        if self.is_incremental:
            known = KnownFooters(target.store, self.dataset, schema)
        manifest = read_manifest(self.dataset, schema, known)
        manifest.save(target.store, target.manifest_dir)
        if known is not None:
            reason = f"read as it is; new files: {known.num_read}, known files: {known.num_known}"
        return PreparedData(
            manifest,
            target.manifest_dir,
            reused=True,
            seconds=time.monotonic() - began,
            reason=reason,
            files=self.dataset.store,
        )
