"""Write a DataFrame as packed Parquet files with a manifest, in one Spark job."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkhvd.data.arrow import InvalidRowCounts, column_to_numpy, numbered, problems, usable_rows
from sparkhvd.data.arrow_limits import bounded_batches
from sparkhvd.data.arrow_types import (
    join_vectors,
    numpy_to_array,
    plain_names,
    split_vectors,
    text_to_array,
    vector_columns,
)
from sparkhvd.data.columns.ragged import Values, num_bytes, row_shape, value_range
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import DataFile, Manifest, Range, TableVersion, joined_ranges
from sparkhvd.data.packed import ROW_GROUP_BYTES, PackedWriter
from sparkhvd.data.store.remote import raised_by_tasks, telling_the_driver
from sparkhvd.data.store.store import Store
from sparkhvd.data.tables import has_small_partitions
from sparkhvd.errors import InvalidArgumentError, PreflightError, StoreError, listed
from sparkhvd.spark import SparkShim
from sparkhvd.wire import read_json

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql import DataFrame


_RESULT = pa.schema([("partition", pa.int64()), ("outcome", pa.string())])
_RESULT_DDL = "partition bigint, outcome string"
# Marker file in the folder while data are written. Spark cancels a task without waiting for it; a task that finds the
# marker gone deletes its own file. Readers of Parquet skip names that begin with "_".
_WRITING = "_writing"


def materialize(
    df: DataFrame,
    schema: DataSchema,
    store: Store,
    data_dir: str,
    *,
    num_partitions: int | None = None,
    row_group_bytes: int = ROW_GROUP_BYTES,
    on_task_start: Callable[[TaskContext], None] | None = None,
    tables: tuple[TableVersion, ...] = (),
) -> Manifest:
    """Write the columns of `schema` as packed Parquet files and return their manifest.

    One Spark job, one pass, which includes every check of values. Rows are ordered by partition index and position in
    the partition. Every task writes one file named after its attempt and reports it. Only attempts counted by Spark
    enter the manifest, so retries and speculation cannot duplicate rows, and other files are deleted. The manifest is
    written last; if anything fails, the job is cancelled and the folder removed. Arrow batches are bounded in bytes,
    see `bounded_batches`.

    Nulls, NaN, infinity and numbers that the tensor cannot hold are errors unless a column's `invalid` says otherwise.

    Args:
        df: the DataFrame, classic or Connect.
        schema: as `check_schema` returned it.
        store: where to write; the executors must see it.
        data_dir: folder in the store.
        num_partitions: coalesce to at most this many partitions first; None does not. Training works with few
            partitions: rows, not files, are distributed to ranks.
        row_group_bytes: size of a row group, the memory of a task.
        on_task_start: called in every task before it writes; returns at once.
        tables: versions of the tables that the rows come from, for the manifest.

    Raises:
        InvalidArgumentError: the data hold nulls, NaN, rows of different lengths or numbers that the stored type
            cannot hold (each column is named with its count), or there are no rows.
        PreflightError: this process and the executors do not see each other's files.
    """
    marker = f"{data_dir}/{_WRITING}"
    store.write_bytes(marker, b"")
    is_done = False
    try:
        selected = _select(df, schema, num_partitions)
        if num_partitions is not None:
            selected = selected.coalesce(num_partitions)
        is_vector = vector_columns(selected.schema)
        task = _WriteTask(store, schema, data_dir, row_group_bytes, is_vector, on_task_start)
        stage = split_vectors(selected, is_vector).mapInArrow(task, _RESULT_DDL)
        with raised_by_tasks(store), bounded_batches(selected):
            tag, description = f"sparkhvd-{uuid.uuid4().hex}", f"sparkhvd: materialize {data_dir}"
            rows = SparkShim(df.sparkSession).collect(stage, tag, description)
        outcomes = [
            read_json(r["outcome"]) for r in sorted(rows, key=lambda r: int(r["partition"]))
        ]
        manifest = replace(_merge(outcomes, schema), tables=tables)
        _settle(store, data_dir, manifest)
        manifest.save(store, data_dir)
        is_done = True
        return manifest
    finally:
        # The marker is deleted before the folder: a task that is still writing then either finds the marker missing and
        # deletes its file, or has finished the file before the folder is deleted.
        with suppress(StoreError):  # the original error is more useful
            store.delete(marker)
            if not is_done:
                store.delete(data_dir)


# Column of a row's position, with a dot that no plain name has.
_PLACE = "`row.place`"


def _select(df: DataFrame, schema: DataSchema, num_partitions: int | None) -> DataFrame:
    """Select the columns of the schema, under plain names.

    Rows of a group become neighbours in their original order.
    """
    names = df.columns
    plain = plain_names(names, vector_columns(df.schema))
    rows = df if plain == names else df.toDF(*plain)
    by_name = dict(reversed([*zip(names, plain, strict=True)]))
    if schema.group is not None:
        group = by_name[schema.group.name]
        by = [group] if num_partitions is None else [num_partitions, group]
        # Without a position column, the order of rows in a group would change with each computation.
        placed = rows.selectExpr("*", f"monotonically_increasing_id() AS {_PLACE}")
        rows = placed.repartition(*by).sortWithinPartitions(group, _PLACE)
    elif num_partitions is None and has_small_partitions(df):
        # Spark may join partitions in any order, so the position restores the order of the rows.
        placed = rows.selectExpr("*", f"monotonically_increasing_id() AS {_PLACE}")
        rows = placed.coalesce(1).sortWithinPartitions(_PLACE)
    # Column names as text cost the driver a tenth of the time of Column objects.
    return rows.selectExpr(*[f"`{by_name[c.name]}`" for c in schema.columns])


@dataclass(frozen=True)
class _WriteTask:
    """Spark task to write one packed file from Arrow batches. It returns one row about the file."""

    store: Store
    schema: DataSchema
    data_dir: str
    row_group_bytes: int
    is_vector: tuple[bool, ...]
    on_task_start: Callable[[TaskContext], None] | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        if self.on_task_start is not None:
            self.on_task_start(context)
        partition, attempt = context.partitionId(), context.taskAttemptId()
        path = f"{self.data_dir}/part-{partition:05d}-{attempt}.parquet"
        joined: Iterator[pa.RecordBatch] = (join_vectors(b, self.is_vector) for b in batches)
        if self.schema.group is not None:
            joined = numbered(joined, self.schema.columns.index(self.schema.group), partition << 32)
        with telling_the_driver():
            self.check_wanted()
            outcome = self.write(joined, path)
            try:
                self.check_wanted()
            except BaseException:
                self.store.delete(path)
                raise
        yield pa.RecordBatch.from_arrays(
            [numpy_to_array(np.array([partition])), text_to_array(json.dumps(outcome))],
            schema=_RESULT,
        )

    def check_wanted(self) -> None:
        """Check that the driver still waits for this folder, or raise PreflightError.

        It looks for the driver's marker in the folder.
        """
        marker = f"{self.data_dir}/{_WRITING}"
        if not self.store.exists(marker):
            raise PreflightError(
                f"Host {socket.gethostname()} does not see {self.store.full_url(marker)}, which the driver wrote before "
                "this task began: the driver has cancelled the materialization, or the store is not on a file system that "
                "the driver and all executors share."
            )

    def write(self, batches: Iterator[pa.RecordBatch], path: str) -> dict[str, Any]:
        """Write one file from Arrow batches.

        After the first unusable row, only the remaining rows are counted.
        """
        columns = self.schema.columns
        flag = self.schema.validation
        invalid_rows = {c.name: InvalidRowCounts() for c in columns}
        rows = marked = skipped = negative = weighty = 0
        sizes = dict.fromkeys((c.name for c in columns), 0)
        with_range = [c.name for c in (*self.schema.features, *self.schema.labels) if c.has_range]
        ranges: dict[str, Range] = {}
        groups: tuple[int, ...] = ()
        writer: PackedWriter | None = None
        with ExitStack() as stack:
            for batch in batches:
                if not batch.num_rows:
                    continue
                batch, left_out = _without_skipped(batch, columns)
                skipped += left_out
                if not batch.num_rows:
                    continue
                rows += batch.num_rows
                values: list[Values | None] = []
                for i, column in enumerate(columns):
                    array, more = column_to_numpy(batch.column(i), column, is_flag=column is flag)
                    invalid_rows[column.name].add(more)
                    values.append(array)
                    if column is flag and isinstance(array, np.ndarray):
                        marked += int(np.count_nonzero(array))
                    if column is self.schema.sample_weight and isinstance(array, np.ndarray):
                        negative += int(np.count_nonzero(array < 0))
                        weighty += int(np.count_nonzero(array))
                if not all(f.is_clean for f in invalid_rows.values()):
                    continue
                arrays = [v for v in values if v is not None]
                if writer is None:
                    shaped = [
                        c.with_shape(row_shape(v)) for c, v in zip(columns, arrays, strict=True)
                    ]
                    sink = stack.enter_context(self.store.open_output(path))
                    writer = PackedWriter(sink, shaped, row_group_bytes=self.row_group_bytes)
                writer.append(arrays)
                for column, array in zip(columns, arrays, strict=True):
                    if not isinstance(array, np.ndarray):
                        sizes[column.name] += num_bytes(array)
                    if column.name in with_range and (found := value_range(array)):
                        ranges = joined_ranges((ranges, {column.name: found}))
            groups = writer.close() if writer is not None else ()
        return {
            "path": path,
            "rows": rows,
            "marked": marked,
            "skipped": skipped,
            "negative": negative,
            "weighty": weighty,
            "ranges": ranges,
            "bytes": {name: size for name, size in sizes.items() if size},
            "row_groups": groups,
            "footer_crc": writer.footer_crc if writer is not None else None,
            "values_crc": writer.values_crc if writer is not None else None,
            "columns": {name: f.to_dict() for name, f in invalid_rows.items()},
        }


def _without_skipped(
    batch: pa.RecordBatch, columns: Sequence[Column]
) -> tuple[pa.RecordBatch, int]:
    """Drop the rows that `handle_invalid="skip"` skips and return the other rows and the number of dropped rows."""
    usable: np.ndarray[Any, Any] | None = None
    for i, column in enumerate(columns):
        if column.invalid[0] == "skip":
            mask = usable_rows(batch.column(i), column)
            if mask is not None:
                usable = mask if usable is None else usable & mask
    if usable is None:
        return batch, 0
    return batch.filter(pa.array(usable)), int(len(usable) - np.count_nonzero(usable))


def _merge(outcomes: list[dict[str, Any]], schema: DataSchema) -> Manifest:
    """Join the tasks' outcomes into one manifest.

    Raises:
        InvalidArgumentError: the data cannot be used; the message lists every reason.
    """
    num_rows = sum(o["rows"] for o in outcomes)
    num_skipped = sum(o["skipped"] for o in outcomes)
    if num_rows == 0 and num_skipped:
        raise InvalidArgumentError(
            f"All {num_skipped:,} rows of the DataFrame hold a null or an invalid number, and handle_invalid='skip' leaves "
            "them out, so there is nothing to train on. Fill them instead: handle_invalid={'<column>': 0}."
        )
    if num_rows == 0:
        raise InvalidArgumentError(
            "The DataFrame has no rows, so there is nothing to train on. Check df.count(), and the filters and joins of the "
            "DataFrame."
        )
    invalid_rows = {c.name: InvalidRowCounts() for c in schema.columns}
    for outcome in outcomes:
        for name, values in outcome["columns"].items():
            invalid_rows[name].add(InvalidRowCounts.from_dict(values))
    wrong = [
        line
        for c in schema.columns
        for line in problems(c, invalid_rows[c.name], num_rows, is_flag=c is schema.validation)
    ]
    if (negative := sum(o["negative"] for o in outcomes)) and schema.sample_weight is not None:
        wrong.append(
            f"column {schema.sample_weight.name!r} ({schema.sample_weight.source}): {negative:,} of {num_rows:,} rows hold a "
            "sample weight below 0. A weight is at least 0."
        )
    elif not wrong and schema.sample_weight and not sum(o["weighty"] for o in outcomes):
        wrong.append(
            f"column {schema.sample_weight.name!r} ({schema.sample_weight.source}): all {num_rows:,} rows hold the sample "
            "weight 0, so a weighted mean of the loss does not exist."
        )
    if wrong:
        reasons = listed((f"  {p}" for p in wrong), "\n")
        raise InvalidArgumentError(f"The data cannot be used for training:\n{reasons}")
    shapes = {c.name: _shape_of(c, invalid_rows[c.name]) for c in schema.columns}
    files = tuple(
        DataFile(
            o["path"],
            o["rows"],
            tuple(o["row_groups"]),
            footer_crc=o["footer_crc"],
            values_crc=o["values_crc"],
        )
        for o in outcomes
        if o["rows"]
    )
    marked = sum(o["marked"] for o in outcomes) if schema.validation is not None else None
    sizes = {c.name: sum(o["bytes"].get(c.name, 0) for o in outcomes) for c in schema.columns}
    return Manifest(
        files,
        schema.with_shapes(shapes),
        num_rows,
        marked,
        variable_bytes={name: size for name, size in sizes.items() if size},
        num_skipped=num_skipped,
        ranges=joined_ranges(o["ranges"] for o in outcomes),
    )


def _shape_of(column: Column, invalid_rows: InvalidRowCounts) -> tuple[int, ...]:
    if column.kind == "scalar":
        return ()
    shape = next(iter(invalid_rows.shapes), ())
    return shape if column.kind in ("array", "vector", "sparse") else (-1, *shape)


def _settle(store: Store, data_dir: str, manifest: Manifest) -> None:
    """Check that this process sees every file of the manifest, and delete the files of other attempts."""
    listed = set(store.list(data_dir))
    missing = [f.path for f in manifest.files if f.path not in listed]
    if missing:
        raise PreflightError(
            f"The executors wrote {len(manifest.files)} files to {store.full_url(data_dir)}, but this process does "
            f"not see {len(missing)} of them, for example {missing[0]!r}. The store must be on a file system that "
            "the driver and all executors share."
        )
    counted = {f.path for f in manifest.files}
    for path in listed:
        if path.endswith(".parquet") and path not in counted:
            store.delete(path)
    store.delete_unfinished(data_dir)
