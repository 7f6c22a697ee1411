"""Manifest of a Parquet data set, from all footers and the first rows; no Spark job reads the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.arrow import InvalidRowCounts, column_to_numpy, problems, usable_rows
from sparkhvd.data.arrow_types import num_leaves, spark_type
from sparkhvd.data.columns.ragged import Ragged, num_bytes, row_shape
from sparkhvd.data.columns.schema import Column, DataSchema, SparkType
from sparkhvd.data.manifest import PARQUET, DataFile, Manifest, Range, joined_ranges
from sparkhvd.data.parquet.dataset import ParquetDataset, read_footer
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.store.remote import RemoteStore
from sparkhvd.data.store.store import Store, StoredFile
from sparkhvd.errors import InvalidArgumentError

# Rows from which the driver learns shapes, and the length of variable rows.
_EXAMPLES = 256
# Limit, because a fingerprint is part of every checkpoint.
_LISTED_FILES = 1000


def read_manifest(dataset: ParquetDataset, schema: DataSchema) -> Manifest:
    """Read all footers and the first rows, and return the manifest.

    Args:
        dataset: as `open_dataset` returned it.
        schema: the columns, as `check_schema` returned them.

    Raises:
        InvalidArgumentError: a file lacks a column or has it in another type, footers count nulls that
            `handle_invalid` neither allows nor skips, the first rows cannot be used, or there are no rows.
    """
    stored = [c for c in schema.columns if c.name not in dataset.partition_columns]
    footers = read_footers(dataset, stored)
    files = tuple(
        DataFile(
            stat.path,
            sum(footer.row_groups),
            footer.row_groups,
            stat.size,
            stat.modified_ns,
            tuple(dataset.partitions[stat.path].items()),
        )
        for stat, footer in zip(dataset.files, footers, strict=True)
    )
    num_rows = sum(f.rows for f in files)
    if not num_rows:
        raise InvalidArgumentError(
            f"fit_on_parquet({dataset.url!r}): the {len(files)} files have no rows, so there is nothing to train on."
        )
    _check_nulls(dataset, schema, stored, files, footers)
    variable = {
        c.name: sum(f.num_bytes.get(c.name, 0) for f in footers)
        for c in stored
        if not c.is_fixed or c.kind == "vector"
    }
    ranges = joined_ranges([*(f.ranges for f in footers), *_of_folders(schema, files)])
    if any(c.invalid[0] == "skip" for c in schema.columns):
        ranges = {}  # a skipped row may hold the value
    manifest = Manifest(
        files, schema, num_rows, variable_bytes=variable, ranges=ranges, layout=PARQUET
    )
    return _with_shapes(dataset.store, manifest)


def _of_folders(schema: DataSchema, files: tuple[DataFile, ...]) -> Iterator[dict[str, Range]]:
    """Yield the values of integers in the names of folders."""
    names = {c.name for c in (*schema.features, *schema.labels) if c.has_range}
    for file in files:
        yield {
            name: (value, value)
            for name, value in file.partition
            if name in names and isinstance(value, int) and file.rows
        }


def _check_nulls(
    dataset: ParquetDataset,
    schema: DataSchema,
    stored: list[Column],
    files: tuple[DataFile, ...],
    footers: list[Footer],
) -> None:
    """Reject nulls counted by footers or held by folder names."""
    nulls = {c.name: sum(f.nulls.get(c.name, 0) for f in footers) for c in stored}
    for name in dataset.partition_columns:
        nulls[name] = sum(f.rows for f in files if dict(f.partition)[name] is None)
    # A skipped row may hold the null: then only the rows can tell.
    if any(c.invalid[0] == "skip" for c in schema.columns):
        return
    num_rows = sum(f.rows for f in files)
    _refuse(
        line
        for c in schema.columns
        if c.invalid[0] == "error"
        for line in problems(
            c, InvalidRowCounts(nulls=nulls[c.name]), num_rows, is_flag=c is schema.validation
        )
    )


def _with_shapes(store: Store, manifest: Manifest) -> Manifest:
    """Add the shapes of the first rows, and the bytes of variable rows."""
    schema = manifest.schema
    shapes: dict[str, tuple[int, ...]] = {}
    sizes = dict(manifest.variable_bytes)
    with ParquetSource(store, manifest) as source:
        rows = source.examples(_EXAMPLES)
        if not len(rows):
            raise InvalidArgumentError(
                f"All {manifest.num_rows:,} rows of {store.full_url('')!r} hold a null or NaN, and handle_invalid='skip' "
                "leaves them out, so there is nothing to train on. Fill them instead: handle_invalid={'<column>': 0}."
            )
        pieces = list(source.arrays([c.name for c in schema.columns], rows))
        entries = {c.name: _entry_shape(source, c) for c in schema.columns if _is_nested(c)}
    findings = {c.name: InvalidRowCounts() for c in schema.columns}
    bytes_seen = dict.fromkeys(findings, 0)
    for arrays in pieces:
        for column in schema.columns:
            is_flag = column is schema.validation
            values, more = column_to_numpy(arrays[column.name], column, is_flag=is_flag)
            findings[column.name].add(more)
            if values is not None:
                shapes[column.name] = entries.get(column.name) or row_shape(values)
                bytes_seen[column.name] += num_bytes(values)
    _refuse(
        (
            line
            for c in schema.columns
            for line in problems(c, findings[c.name], len(rows), is_flag=c is schema.validation)
        ),
        " Of the first rows:",
    )
    shaped = schema.with_shapes(shapes)
    for column in shaped.columns:
        if column.is_fixed:
            sizes.pop(column.name, None)
        else:
            # Values compressed by a dictionary use their full size in memory.
            mean = bytes_seen[column.name] * manifest.num_rows // len(rows)
            sizes[column.name] = max(sizes.get(column.name, 0), mean)
    return replace(manifest, schema=shaped, variable_bytes=sizes)


def _is_nested(column: Column) -> bool:
    """Return True if variable rows have entries that are arrays."""
    return column.kind == "ragged" and column.source.startswith("array<array")


def _entry_shape(source: ParquetSource, column: Column) -> tuple[int, ...] | None:
    """Return the shape of the first row with entries, or None. Rows without entries fit every shape."""
    for arrays in source.arrays([column.name]):
        array = arrays[column.name]
        if column.invalid[0] == "skip" and (mask := usable_rows(array, column)) is not None:
            array = array.filter(pa.array(mask))
        values, _ = column_to_numpy(array, column)
        if isinstance(values, Ragged) and values.lengths.any():
            return row_shape(values)
    return None


def _refuse(lines: Iterable[str], where: str = "") -> None:
    listed = "\n".join(f"  {line}" for line in lines)
    if listed:
        raise InvalidArgumentError(f"The data cannot be used for training.{where}\n{listed}")


def fingerprint(manifest: Manifest) -> dict[str, str]:
    """Return size and time of change by path, which reveal a replaced file; for very many files one digest."""
    facts = {f.path: f"{f.size} bytes of {f.modified_ns}" for f in manifest.files}
    if len(facts) <= _LISTED_FILES:
        return facts
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return {f"all {len(facts)} files": digest}


# ----------------------------------------------------------------------------------------------------
# Facts in the footers of a data set: row groups, nulls, sizes, and incompatible types.

# Threads that read footers: an object store answers in tens of milliseconds.
_THREADS = 16


@dataclass(frozen=True)
class Footer:
    """Facts in the footer of one file.

    Attributes:
        row_groups: rows of each.
        nulls: by column, rows that are null, if in the footer.
        num_bytes: by column, bytes before compression.
        ranges: smallest and largest value of columns of integers, if in the footer.
    """

    row_groups: tuple[int, ...]
    nulls: Mapping[str, int]
    num_bytes: Mapping[str, int]
    ranges: Mapping[str, Range] = field(default_factory=dict)


def read_footers(dataset: ParquetDataset, columns: Sequence[Column]) -> list[Footer]:
    """Read all footers, by threads, or in one Spark task if this process cannot see the files.

    Raises:
        InvalidArgumentError: a file lacks a column or has it in another type than the first file.
    """
    if isinstance(dataset.store, RemoteStore):
        answers, _ = dataset.store.ask(_read_in_task, dataset, columns)
        return [
            Footer(tuple(f["row_groups"]), f["nulls"], f["num_bytes"], joined_ranges([f["ranges"]]))
            for f in answers
        ]
    with ThreadPoolExecutor(_THREADS, "sparkhvd-footers") as pool:
        return list(pool.map(lambda f: _read(dataset, f, columns), dataset.files))


def _read_in_task(
    store: Store, dataset: ParquetDataset, columns: Sequence[Column]
) -> Iterator[list[dict[str, Any]]]:
    yield [asdict(f) for f in read_footers(replace(dataset, store=store), columns)]


def _read(dataset: ParquetDataset, file: StoredFile, columns: Sequence[Column]) -> Footer:
    metadata, schema = read_footer(dataset.store, file)
    # pyarrow creates a new object per call, in time proportional to the number of columns.
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    if not sum(rows):  # without values, a writer may have chosen any type
        return Footer(rows, {}, {})
    _check_types(dataset, file, schema, columns)
    leaves_of, first_leaf = {}, 0
    for each in schema:
        leaves_of[each.name] = range(first_leaf, first_leaf + num_leaves(each.type))
        first_leaf += num_leaves(each.type)
    nulls, sizes, ranges = {}, {}, {}
    for column in columns:
        leaves = leaves_of[column.name]
        chunks = [group.column(leaf) for group in groups for leaf in leaves]
        sizes[column.name] = sum(chunk.total_uncompressed_size for chunk in chunks)
        if column.has_range and len(leaves) == 1 and (found := _range(chunks, column)):
            ranges[column.name] = found
        # Inside lists and structs a null of the leaf may be an empty list.
        if len(leaves) == 1 and metadata.schema.column(leaves[0]).max_definition_level == 1:
            statistics = [chunk.statistics for chunk in chunks]
            counts = [s.null_count for s in statistics if s is not None and s.has_null_count]
            nulls[column.name] = 0 if column.source.startswith("array") else sum(counts)
    return Footer(rows, nulls, sizes, ranges)


def _range(chunks: Sequence[pq.ColumnChunkMetaData], column: Column) -> Range | None:
    """Return the range of a column of integers by its statistics, if these are whole numbers that it can hold."""
    known = [c.statistics for c in chunks if c.statistics is not None and c.statistics.has_min_max]
    ends = [end for s in known for end in (s.min, s.max)]
    limits = np.iinfo(column.dtype)
    # Not a comparison with infinity or NaN, which no file should have.
    if not ends or not all(limits.min <= end <= limits.max and end == int(end) for end in ends):
        return None
    return int(min(ends)), int(max(ends))


def _check_types(
    dataset: ParquetDataset, file: StoredFile, schema: pa.Schema, columns: Sequence[Column]
) -> None:
    """Reject a file whose columns differ in meaning from the first file's; numbers may be wider or narrower."""
    if schema.equals(dataset.arrow_schema):
        return
    where = f"fit_on_parquet({dataset.url!r})"
    first = dataset.schema_path
    for column in columns:
        fields = [f for f in schema if f.name == column.name]
        if len(fields) != 1:
            raise InvalidArgumentError(
                f"{where}: {file.path!r} has column {column.name!r} {len(fields)} times, and {first!r} once. All files must "
                "have the columns of the fit."
            )
        theirs, ours = fields[0].type, dataset.arrow_schema.field(column.name).type
        if _family(spark_type(theirs)) != _family(spark_type(ours)):
            raise InvalidArgumentError(
                f"{where}: column {column.name!r} is {theirs} in {file.path!r} and {ours} in {first!r}. Write the files with "
                "one type."
            )


_FAMILIES = {
    **dict.fromkeys(("ByteType", "ShortType", "IntegerType", "LongType"), "integer"),
    **dict.fromkeys(("FloatType", "DoubleType", "DecimalType"), "floating"),
}


def _family(kind: SparkType) -> str:
    """Return the name of the types whose values mean the same."""
    name = type(kind).__name__
    element = getattr(kind, "elementType", None)
    return _FAMILIES.get(name, name) if element is None else f"array of {_family(element)}"
