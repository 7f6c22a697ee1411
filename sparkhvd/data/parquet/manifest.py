"""Make the manifest of a Parquet data set from all footers and the first rows.

No Spark job reads the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.arrow import InvalidRowCounts, column_to_numpy, problems, usable_rows
from sparkhvd.data.arrow_types import VERIFIED, num_leaves, spark_type
from sparkhvd.data.columns.ragged import Ragged, num_bytes, row_shape
from sparkhvd.data.columns.schema import Column, DataSchema, SparkType
from sparkhvd.data.manifest import (
    FORMAT_VERSION,
    PARQUET,
    TABLE_VERSION,
    DataFile,
    Manifest,
    Range,
    joined_ranges,
    packed_rows,
)
from sparkhvd.data.parquet.dataset import (
    ParquetDataset,
    PartitionValue,
    RowFilter,
    TableFiles,
    read_footer,
)
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.store.locks import dump_sealed, load_sealed
from sparkhvd.data.store.remote import RemoteStore
from sparkhvd.data.store.store import Store, StoredFile
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.wire import rebuild

# The driver learns shapes, and the mean size of variable rows, from this many rows.
_EXAMPLES = 256
# Above this number of files a fingerprint is one digest, because every checkpoint holds the fingerprint.
_LISTED_FILES = 1000
# Characters of a table's id that are replaced in the name of a folder.
_SAFE = re.compile(r"[^A-Za-z0-9-]")


def read_manifest(
    dataset: ParquetDataset, schema: DataSchema, known: KnownFooters | None = None
) -> Manifest:
    """Read all footers and the first rows, and return the manifest.

    Args:
        dataset: as `open_dataset` returned it.
        schema: the columns, as `check_schema` returned them.
        known: footers of a table's files that earlier fits have read; the other footers are added. None reads all.

    Raises:
        InvalidArgumentError: a file lacks a column or has it in another type, footers count nulls that
            `handle_invalid` neither allows nor skips, the first rows cannot be used, or there are no rows.
    """
    footers = read_footers(dataset, schema.columns, known)
    files = tuple(
        DataFile(
            stat.path,
            footer.rows,
            footer.row_groups,
            stat.size,
            stat.modified_ns,
            tuple(footer.constants.items()),
            kept=footer.kept,
            names=tuple(footer.names.items()),
        )
        for stat, footer in zip(dataset.files, footers, strict=True)
        if footer.rows or dataset.table is None
    )
    num_rows = sum(f.rows for f in files)
    if not num_rows:
        where = (
            f" where {dataset.table.where.text}" if dataset.table and dataset.table.where else ""
        )
        raise InvalidArgumentError(
            f"{dataset.name}: the {len(footers)} files have no rows{where}, so there is nothing to train on."
        )
    _check_nulls(schema, footers)
    variable = {
        c.name: sum(f.num_bytes.get(c.name, 0) for f in footers)
        for c in schema.columns
        if c.name not in dataset.partition_columns and (not c.is_fixed or c.kind == "vector")
    }
    ranges = joined_ranges([*(f.ranges for f in footers), *_of_folders(schema, files)])
    if any(c.invalid[0] == "skip" for c in schema.columns):
        ranges = {}  # the smallest or largest value may be in a skipped row
    manifest = Manifest(
        files,
        schema,
        num_rows,
        variable_bytes=variable,
        ranges=ranges,
        format_version=FORMAT_VERSION if dataset.table is None else TABLE_VERSION,
        layout=PARQUET,
        tables=() if dataset.table is None else (dataset.table.version,),
    )
    return _with_shapes(dataset.store, manifest)


def _of_folders(schema: DataSchema, files: tuple[DataFile, ...]) -> Iterator[dict[str, Range]]:
    """Yield the value ranges of integer folder columns, file by file."""
    names = {c.name for c in (*schema.features, *schema.labels) if c.has_range}
    for file in files:
        yield {
            name: (value, value)
            for name, value in file.partition
            if name in names and isinstance(value, int) and file.rows
        }


def _check_nulls(schema: DataSchema, footers: Sequence[Footer]) -> None:
    """Reject nulls counted by footers or held by folder names."""
    nulls = dict.fromkeys((c.name for c in schema.columns), 0)
    for footer in footers:
        for name in nulls:
            if name in footer.constants:
                nulls[name] += footer.rows if footer.constants[name] is None else 0
            # If the file has deleted rows, a counted null may be in one of them, and only reading the rows can tell.
            elif not footer.kept:
                nulls[name] += footer.nulls.get(name, 0)
    # A counted null may be in a row that another column's "skip" skips, and only reading the rows can tell.
    if any(c.invalid[0] == "skip" for c in schema.columns):
        return
    num_rows = sum(f.rows for f in footers)
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
                f"All {manifest.num_rows:,} rows of {store.full_url('')!r} hold a null or an invalid number, and handle_invalid='skip' "
                "skips them, so there is nothing to train on. Fill them instead: handle_invalid={'<column>': 0}."
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
            # The footer may count dictionary-encoded bytes, but values need their full size in memory.
            mean = bytes_seen[column.name] * manifest.num_rows // len(rows)
            sizes[column.name] = max(sizes.get(column.name, 0), mean)
    return replace(manifest, schema=shaped, variable_bytes=sizes)


def _is_nested(column: Column) -> bool:
    """Whether the rows of a variable column are arrays of arrays."""
    return column.kind == "ragged" and column.source.startswith("array<array")


def _entry_shape(source: ParquetSource, column: Column) -> tuple[int, ...] | None:
    """Find the shape of an entry from the first row with entries, or None if all rows are empty."""
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
    """Collect size and time of change by path, to detect replaced files.

    Very many files give one digest instead.
    """
    facts = {f.path: f"{f.size} bytes of {f.modified_ns}" for f in manifest.files}
    if len(facts) <= _LISTED_FILES:
        return facts
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return {f"all {len(facts)} files": digest}


# ----------------------------------------------------------------------------------------------------
# Read facts from the footers of a data set: row groups, nulls and sizes; check that types are compatible.

# Threads that read footers. Most of the time they wait: an object store answers in tens of milliseconds.
_THREADS = 16


@dataclass(frozen=True)
class Footer:
    """Facts about one file from its footer and its table.

    Attributes:
        row_groups: rows of each row group.
        nulls: column -> number of null rows, if the footer has it.
        num_bytes: column -> bytes before compression.
        ranges: integer column -> smallest and largest value, if the footer has them.
        rows: number of rows, without deleted rows.
        constants: column that the file lacks -> its value.
        kept: mask of the rows that remain, see `DataFile`.
        names: column -> name in the file, if it differs.
    """

    row_groups: tuple[int, ...]
    nulls: Mapping[str, int]
    num_bytes: Mapping[str, int]
    ranges: Mapping[str, Range]
    rows: int
    constants: Mapping[str, PartitionValue]
    kept: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


class KnownFooters:
    """Cache of a table's footers in a store, so that a fit reads only the footers of new files.

    Files of a table never change. Footers of files with deleted rows are read by each fit, because deletes belong to
    one version. One file of the store holds all footers and is written atomically, so a killed fit leaves the earlier
    file.

    Attributes:
        num_read: number of footers that this fit has read.
        num_known: number of footers that were known before.
    """

    def __init__(self, store: Store, dataset: ParquetDataset, schema: DataSchema) -> None:
        """Read the known footers of the table for these columns and this filter from the store."""
        table = dataset.table
        assert table is not None
        facts = [schema.to_dict(), table.layout, table.version.where, TABLE_VERSION]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        self._store, self._root = store, dataset.store.url
        self._path = f"tables/{_SAFE.sub('_', table.version.uuid)}/{digest}.json"
        self.num_read = self.num_known = 0
        self._footers: dict[str, tuple[int, Footer]] = {}
        with contextlib.suppress(
            OSError, ValueError
        ):  # if the file is missing, damaged or of another version, all footers are read again
            values = load_sealed(store.read_bytes(self._path)) or {}
            self._footers = rebuild(dict[str, tuple[int, Footer]], values.get("footers", {}))

    def get(self, file: StoredFile) -> Footer | None:
        """Look up a file's footer, or None if the file is unknown or has another size."""
        size, footer = self._footers.get(self._name(file), (-1, None))
        return footer if size == file.size else None

    def put(self, files: Sequence[StoredFile], footers: Sequence[Footer]) -> None:
        """Keep the footers of only these files, and write them if any is new."""
        found = zip(files, footers, strict=True)
        self._footers = {self._name(file): (file.size, footer) for file, footer in found}
        if self.num_read:
            footers_ = {n: (size, asdict(footer)) for n, (size, footer) in self._footers.items()}
            self._store.write_bytes(self._path, dump_sealed({"footers": footers_}))

    def _name(self, file: StoredFile) -> str:
        return f"{self._root}/{file.path}"


def read_footers(
    dataset: ParquetDataset, columns: Sequence[Column], known: KnownFooters | None = None
) -> list[Footer]:
    """Read all footers in threads, or in one Spark task if this process cannot see the files.

    Args:
        dataset: the files.
        columns: columns of the fit.
        known: footers that earlier fits have read, or None.

    Raises:
        InvalidArgumentError: a file lacks a column or has it in another type than the first file.
    """
    if isinstance(dataset.store, RemoteStore):
        answers, _ = dataset.store.ask(_read_in_task, dataset, columns)
        return [
            Footer(
                **{
                    **f,
                    "row_groups": tuple(f["row_groups"]),
                    "ranges": joined_ranges([f["ranges"]]),
                }
            )
            for f in answers
        ]
    deleted = dataset.table.deleted if dataset.table is not None else {}
    found = {
        file.path: footer
        for file in (dataset.files if known is not None else ())
        if known is not None
        and file.path not in deleted
        and (footer := known.get(file)) is not None
    }
    with ThreadPoolExecutor(_THREADS, "sparkhvd-footers") as pool:
        there = [file for file in dataset.files if file.path in found]
        for file, size in zip(there, pool.map(lambda f: _size(dataset, f), there), strict=True):
            if size is None:
                raise _gone(dataset, file)
            if size != file.size:
                del found[file.path]
        new = [file for file in dataset.files if file.path not in found]
        read = pool.map(lambda f: _read(dataset, f, columns), new)
        found |= {file.path: footer for file, footer in zip(new, read, strict=True)}
    footers = [found[file.path] for file in dataset.files]
    if known is not None:
        known.num_read, known.num_known = len(new), len(footers) - len(new)
        kept = [file for file in dataset.files if file.path not in deleted]
        known.put(kept, [found[file.path] for file in kept])
    return footers


def _read_in_task(
    store: Store, dataset: ParquetDataset, columns: Sequence[Column]
) -> Iterator[list[dict[str, Any]]]:
    yield [asdict(f) for f in read_footers(replace(dataset, store=store), columns)]


def _read(dataset: ParquetDataset, file: StoredFile, columns: Sequence[Column]) -> Footer:
    metadata, schema = _footer_of(dataset, file)
    table, given = dataset.table, dataset.partitions.get(file.path, {})
    names: dict[str, str] = {}
    if table is not None:
        names, given = table.locate(file.path, schema)
    constants = {c.name: given[c.name] for c in columns if c.name in given} if table else given
    kept, live = "", metadata.num_rows
    if table is not None and live:
        kept, live = _kept_rows(dataset, table, file, metadata, names, given)
        constants = {name: _constant(value, name, table) for name, value in constants.items()}
    columns = [c for c in columns if c.name not in given]
    # Keep the objects: pyarrow makes a new object per call, in time proportional to the number of columns.
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    if not live:  # types of a file without values do not matter: its writer may have chosen any
        return Footer(rows, {}, {}, {}, 0, constants, kept)
    _check_types(dataset, file, schema, columns, names)
    leaves_of, first_leaf = {}, 0
    for each in schema:
        leaves_of[each.name] = range(first_leaf, first_leaf + num_leaves(each.type))
        first_leaf += num_leaves(each.type)
    nulls, sizes, ranges = {}, {}, {}
    for column in columns:
        leaves = leaves_of[names.get(column.name, column.name)]
        chunks = [group.column(leaf) for group in groups for leaf in leaves]
        sizes[column.name] = sum(chunk.total_uncompressed_size for chunk in chunks)
        if column.has_range and not kept and len(leaves) == 1 and (found := _range(chunks, column)):
            ranges[column.name] = found
        # A null counted for a leaf inside lists or structs may be an empty list, so only flat columns are counted.
        if len(leaves) == 1 and metadata.schema.column(leaves[0]).max_definition_level == 1:
            statistics = [chunk.statistics for chunk in chunks]
            counts = [s.null_count for s in statistics if s is not None and s.has_null_count]
            nulls[column.name] = 0 if column.source.startswith("array") else sum(counts)
    renamed = {c.name: names[c.name] for c in columns if names.get(c.name, c.name) != c.name}
    return Footer(rows, nulls, sizes, ranges, live, constants, kept, renamed)


def _size(dataset: ParquetDataset, file: StoredFile) -> int | None:
    """Read the size of a file, or None if it does not exist."""
    try:
        return dataset.store.num_bytes(file.path)
    except FileNotFoundError:
        return None


def _footer_of(dataset: ParquetDataset, file: StoredFile) -> tuple[pq.FileMetaData, pa.Schema]:
    try:
        return read_footer(dataset.store, file)
    except InvalidArgumentError as e:
        if dataset.table is None or not isinstance(e.__cause__, FileNotFoundError):
            raise
        raise _gone(dataset, file) from e


def _gone(dataset: ParquetDataset, file: StoredFile) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{dataset.name} has the file {dataset.store.full_url(file.path)!r}, which does not exist any more: the version was "
        "vacuumed or expired, or the table was moved without its files. Give a newer version, or restore the file."
    )


def _constant(value: object, name: str, table: TableFiles) -> PartitionValue:
    """Convert the value of a column missing in the files to its form in a manifest."""
    if isinstance(value, (bool, Decimal)):
        return int(value) if isinstance(value, bool) else float(value)
    if value is None or isinstance(value, (int, float, str)):
        return value
    raise InvalidArgumentError(
        f"{table.version.text}: column {name!r} is not in the files, and ranks cannot use its {type(value).__name__} values. "
        "Leave the column out, or give fit() the DataFrame spark.table(...)."
    )


def _kept_rows(
    dataset: ParquetDataset,
    table: TableFiles,
    file: StoredFile,
    metadata: pq.FileMetaData,
    names: Mapping[str, str],
    constants: Mapping[str, Any],
) -> tuple[str, int]:
    """Apply deletes and filter to a file, and return the mask of the remaining rows as text ("" for all), and a count."""
    kept = np.ones(metadata.num_rows, np.bool_)
    if (deleted := table.deleted.get(file.path)) is not None:
        mask = deleted()  # rows beyond the end of a shorter mask are kept
        if not mask[len(kept) :].all():
            raise InvalidArgumentError(
                f"{table.version.text}: the table deletes rows beyond the {len(kept):,} rows of {file.path!r}, so the file was replaced. "
                "Restore the table, or give fit() the DataFrame spark.table(...)."
            )
        mask = mask[: len(kept)]
        kept[: len(mask)] = mask
    if table.where is not None:
        kept &= _matching(dataset, table.where, file, metadata, names, constants)
    live = int(np.count_nonzero(kept))
    return ("" if live == len(kept) else packed_rows(kept)), live


def _matching(
    dataset: ParquetDataset,
    where: RowFilter,
    file: StoredFile,
    metadata: pq.FileMetaData,
    names: Mapping[str, str],
    constants: Mapping[str, Any],
) -> npt.NDArray[np.bool_]:
    """Make the mask (rows,) of the rows selected by a filter.

    It reads only the filter's columns, one row group at a time.
    """
    types = {name: dataset.arrow_schema.field(name).type for name in where.columns}
    stored = [name for name in where.columns if name not in constants]

    def selected(rows: int, values: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
        given = {
            n: pa.repeat(pa.scalar(constants[n], types[n]), rows) for n in types if n in constants
        }
        columns = {n: values[n].cast(types[n]) for n in stored}
        found = pa.table({**given, **columns, "": np.arange(rows)}).filter(where.expression)
        mask = np.zeros(rows, np.bool_)
        mask[found.column("").to_numpy()] = True
        return mask

    if not stored:
        return np.repeat(selected(1, {}), metadata.num_rows)
    masks = [np.zeros(0, np.bool_)]
    with dataset.store.open_input(file.path) as source:
        # Timestamps of tables are in microseconds, and INT96 timestamps far in the past or future overflow nanoseconds.
        opened = pq.ParquetFile(
            source, metadata=metadata, coerce_int96_timestamp_unit="us", **VERIFIED
        )
        for group in range(metadata.num_row_groups):
            read = opened.read_row_group(group, [names.get(n, n) for n in stored])
            values = {n: read.column(names.get(n, n)) for n in stored}
            masks.append(selected(read.num_rows, values))
    return np.concatenate(masks)


def _range(chunks: Sequence[pq.ColumnChunkMetaData], column: Column) -> Range | None:
    """Find an integer column's range in its statistics, or None if missing or unusable.

    Statistics are unusable if the column's type cannot hold the ends.
    """
    known = [c.statistics for c in chunks if c.statistics is not None and c.statistics.has_min_max]
    ends = [end for s in known for end in (s.min, s.max)]
    limits = np.iinfo(column.dtype)
    # The comparisons also exclude infinity and NaN.
    if not ends or not all(limits.min <= end <= limits.max and end == int(end) for end in ends):
        return None
    return int(min(ends)), int(max(ends))


def _check_types(
    dataset: ParquetDataset,
    file: StoredFile,
    schema: pa.Schema,
    columns: Sequence[Column],
    names: Mapping[str, str],
) -> None:
    """Reject a file with a column of another kind than in the first file.

    Numbers may have another width.
    """
    if schema.equals(dataset.arrow_schema):
        return
    where, first = dataset.name, dataset.schema_path
    for column in columns:
        fields = [f for f in schema if f.name == names.get(column.name, column.name)]
        if len(fields) != 1:
            raise InvalidArgumentError(
                f"{where}: {file.path!r} has column {column.name!r} {len(fields)} times, but {first!r} has it once. All files must "
                "have the columns of the fit."
            )
        theirs, ours = fields[0].type, dataset.arrow_schema.field(column.name).type
        if _family(spark_type(theirs)) != _family(spark_type(ours)) and not (
            # The log of a table may have widened the type of a column.
            dataset.table is not None and pa.types.is_integer(theirs) and pa.types.is_floating(ours)
        ):
            remedy = (
                "Write the files with one type."
                if dataset.table is None
                else "The table's log changed the type, but ranks read the file's own type. Write the rows again (OPTIMIZE, "
                "rewrite_data_files, or an overwrite), or call fit(spark.table(...))."
            )
            raise InvalidArgumentError(
                f"{where}: column {column.name!r} is {theirs} in {file.path!r} and {ours} in {first!r}. {remedy}"
            )


_FAMILIES = {
    **dict.fromkeys(("ByteType", "ShortType", "IntegerType", "LongType"), "integer"),
    **dict.fromkeys(("FloatType", "DoubleType", "DecimalType"), "floating"),
}


def _family(kind: SparkType) -> str:
    """Name the family of a type. Types with values of the same meaning share a family."""
    name = type(kind).__name__
    element = getattr(kind, "elementType", None)
    return _FAMILIES.get(name, name) if element is None else f"array of {_family(element)}"
