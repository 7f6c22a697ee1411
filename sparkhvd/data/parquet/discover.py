"""Parquet that others wrote, as the driver sees it: files, folders `column=value`, schema and footers.

No Spark job reads the data: the driver looks at the list of files, at footers and at the first rows; the rest is read
by the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.arrow import Findings, column_to_numpy, problems, usable_rows
from sparkhvd.data.arrow_types import num_leaves, spark_type
from sparkhvd.data.columns.ragged import Ragged, num_bytes, row_shape
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import PARQUET, DataFile, Manifest
from sparkhvd.data.packed import METADATA_KEY
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.store.connect import RemoteStore
from sparkhvd.data.store.store import Store, StoredFile
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["ParquetDataset", "fingerprint", "open_dataset", "read_manifest", "store_of"]

# Footers are read by so many threads: an object store answers in some ten milliseconds.
_THREADS = 16
# Rows from which the driver learns shapes, and how long rows of variable length are.
_EXAMPLES = 256
# A fingerprint is part of every checkpoint.
_LISTED_FILES = 1000
# Folders that tell a table's log: which of the files beside them hold its rows, and which of these are deleted.
_LOGS = {
    "_delta_log": "a Delta table",
    ".hoodie": "a Hudi table",
    "_spark_metadata": "what a streaming query of Spark wrote",
}
# How Hive names the folder of rows without a value.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

PartitionValue = int | float | str | None


@dataclass(frozen=True)
class ParquetDataset:
    """Ordinary Parquet at a path or URL; nothing but names and one footer has been read.

    Attributes:
        url: for messages.
        store: rooted there.
        files: in the order of their rows.
        partitions: by path, the values of folders `column=value`.
        arrow_schema: of the first file that has rows.
        schema_path: of that file.
        metadata: key-value metadata of `_common_metadata`, where there is such a file.
    """

    url: str
    store: Store
    files: tuple[StoredFile, ...]
    partitions: Mapping[str, Mapping[str, PartitionValue]]
    arrow_schema: Any
    schema_path: str
    metadata: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """Columns that the names of folders hold."""
        return tuple(self.partitions[self.files[0].path])

    @cached_property
    def schema(self) -> StructType:
        """The columns as a Spark StructType; those of folders last, as in Spark."""
        from pyspark.sql import types as T  # noqa: N812 - everyone's name

        names = self.partition_columns
        fields = [
            T.StructField(f.name, spark_type(f.type))
            for f in self.arrow_schema
            if f.name not in names
        ]
        kinds = {int: T.LongType, float: T.DoubleType, str: T.StringType}
        for name in names:
            values = (of[name] for of in self.partitions.values())
            first = next((v for v in values if v is not None), None)
            fields.append(T.StructField(name, kinds.get(type(first), T.DoubleType)()))
        return T.StructType(fields)


def open_dataset(
    path: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None
) -> ParquetDataset:
    """Find the files of a data set and read the first one's schema; starts no Spark job.

    Names that begin with "_" or "." are passed over, with all they hold, and so are empty files; every other file must
    be Parquet.

    Args:
        path: a file or a folder, also with folders in it, as a path or URL that `Store` takes; or a `Store` of it.
        storage_options: handed to the file system.

    Raises:
        InvalidArgumentError: there is nothing, or something else: also a table whose log, not its files, tells its rows.
    """
    store = path if isinstance(path, Store) else store_of(path, storage_options)
    text = store.url
    try:
        found = store.files()
    except FileNotFoundError as e:
        raise InvalidArgumentError(
            f"fit_on_parquet({text!r}): there is no such file or folder for this process. Give a path or URL of Parquet "
            "files that the driver and all executors can read."
        ) from e
    _refuse_tables(text, found)
    files = tuple(f for f in found if f.size and not _is_hidden(f.path))
    if not files:
        others = f" besides {len(found)} that are empty or hidden" if found else ""
        raise InvalidArgumentError(
            f"fit_on_parquet({text!r}): there are no files{others}. Give a Parquet file, or a folder with some in it."
        )
    path, schema = _first_schema(store, files)
    if METADATA_KEY in (schema.metadata or {}):
        raise InvalidArgumentError(
            f"fit_on_parquet({text!r}): these are packed files that a fit wrote for itself, not ordinary Parquet. fit(df) "
            "uses them again by itself; read_packed(path) shows what they hold."
        )
    common: Mapping[bytes, bytes] = {}
    if any(f.path == "_common_metadata" and f.size for f in found):
        with store.open_input("_common_metadata") as source:
            common = pq.read_metadata(source).metadata or {}
    return ParquetDataset(text, store, files, _partitions(text, files), schema, path, common)


def store_of(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """The place of a data set; a relative path is below this process's folder. Nothing is looked at."""
    text = os.fspath(path)
    return Store(text if ":" in text.partition("/")[0] else os.path.abspath(text), storage_options)


def read_manifest(dataset: ParquetDataset, schema: DataSchema) -> Manifest:
    """The manifest of a data set, from all footers and the first rows.

    Args:
        dataset: what `open_dataset` found.
        schema: what `check_schema` made of its columns.

    Raises:
        InvalidArgumentError: a file lacks a column or has it in another type, footers count nulls where
            `handle_invalid` allows none and leaves no rows out, the first rows cannot be used, or there are no rows.
    """
    stored = [c for c in schema.columns if c.name not in dataset.partition_columns]
    footers = _all_facts(dataset, stored)
    files = tuple(
        DataFile(
            stat.path,
            sum(facts.row_groups),
            facts.row_groups,
            stat.size,
            stat.modified_ns,
            tuple(dataset.partitions[stat.path].items()),
        )
        for stat, facts in zip(dataset.files, footers, strict=True)
    )
    num_rows = sum(f.rows for f in files)
    if not num_rows:
        raise InvalidArgumentError(
            f"fit_on_parquet({dataset.url!r}): the {len(files)} files have no rows, so there is nothing to train on."
        )
    nulls = {c.name: sum(f.nulls.get(c.name, 0) for f in footers) for c in stored}
    for name in dataset.partition_columns:
        nulls[name] = sum(f.rows for f in files if dict(f.partition)[name] is None)
    # Where rows are left out, a null may be in one of these: then only the rows tell.
    if all(c.invalid[0] != "skip" for c in schema.columns):
        _refuse(
            line
            for c in schema.columns
            if c.invalid[0] == "error"
            for line in problems(
                c, Findings(nulls=nulls[c.name]), num_rows, is_flag=c is schema.validation
            )
        )
    variable = {
        c.name: sum(f.num_bytes.get(c.name, 0) for f in footers)
        for c in stored
        if not c.is_fixed or c.kind == "vector"
    }
    manifest = Manifest(files, schema, num_rows, variable_bytes=variable, layout=PARQUET)
    return _with_shapes(dataset.store, manifest)


# -- names -------------------------------------------------------------------------------------------


def _is_hidden(path: str) -> bool:
    """As for Spark: a name with "_" in front is a folder of rows if it is `_column=value`."""
    return path != "." and any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in path.split("/")
    )


def _refuse_tables(url: str, files: Sequence[StoredFile]) -> None:
    """Refuse tables whose rows are not all rows of their files."""
    for file in files:
        *folders, name = file.path.split("/")
        at = next((i for i, part in enumerate(folders) if part in _LOGS), -1)
        kind, log = (_LOGS[folders[at]], "/".join(folders[: at + 1])) if at >= 0 else ("", "")
        if folders and folders[-1] == "metadata" and name.endswith(".metadata.json"):
            kind, log = "an Iceberg table", "/".join(folders)
        if kind:
            raise InvalidArgumentError(
                f"fit_on_parquet({url!r}): {log!r} in it shows that this is {kind}. Its log tells which files have its rows; "
                "others may be there that hold deleted or earlier ones. Read it with spark.read and give fit(df) the DataFrame."
            )


def _partitions(url: str, files: Sequence[StoredFile]) -> dict[str, dict[str, PartitionValue]]:
    """By path, the values of its folders `column=value`: whole numbers, numbers or text, one type per column."""
    texts = {}
    for file in files:
        pairs = [part.partition("=") for part in file.path.split("/")[:-1] if "=" in part]
        texts[file.path] = {unquote(name): unquote(value) for name, _, value in pairs}
    first = texts[files[0].path]
    for path, found in texts.items():
        if list(found) != list(first):
            raise InvalidArgumentError(
                f"fit_on_parquet({url!r}): {files[0].path!r} lies in folders of {_named(first)}, and {path!r} in folders of "
                f"{_named(found)}. All files must have the same partition columns; give the folder of one kind."
            )
    of_type = {
        name: _one_type([of[name] for of in texts.values() if of[name] != _NO_VALUE])
        for name in first
    }
    return {
        path: {n: None if v == _NO_VALUE else of_type[n](v) for n, v in found.items()}
        for path, found in texts.items()
    }


def _one_type(texts: Sequence[str]) -> Callable[[str], int | float | str]:
    for kind in (int, float):
        try:
            for text in texts:
                if "_" in text or not -(2**63) <= kind(text) < 2**63:
                    raise ValueError(text)
        except ValueError:
            continue
        return kind
    return str


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in values) or "no column"


# -- footers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """What a footer tells.

    Attributes:
        row_groups: rows of each.
        nulls: by column, rows that are null, where the footer tells.
        num_bytes: by column, bytes before compression.
    """

    row_groups: tuple[int, ...]
    nulls: Mapping[str, int]
    num_bytes: Mapping[str, int]


def _all_facts(dataset: ParquetDataset, columns: Sequence[Column]) -> list[_Facts]:
    """What all footers tell: read by threads, or in one Spark task where this process does not see the files."""
    if isinstance(dataset.store, RemoteStore):
        found, _ = dataset.store.ask(_facts_in_task, dataset, columns)
        return [_Facts(tuple(f["row_groups"]), f["nulls"], f["num_bytes"]) for f in found]
    with ThreadPoolExecutor(_THREADS, "sparkhvd-footers") as pool:
        return list(pool.map(lambda f: _facts(dataset, f, columns), dataset.files))


def _facts_in_task(
    store: Store, dataset: ParquetDataset, columns: Sequence[Column]
) -> Iterator[list[dict[str, Any]]]:
    yield [asdict(f) for f in _all_facts(replace(dataset, store=store), columns)]


def _footer(store: Store, file: StoredFile) -> tuple[Any, Any]:
    """(metadata, Arrow schema) of a file."""
    try:
        with store.open_input(file.path) as source:
            opened = pq.ParquetFile(source)
            return opened.metadata, opened.schema_arrow
    except pa.ArrowInvalid as e:
        raise InvalidArgumentError(
            f"{store.full_url(file.path)!r} is no Parquet file: {e}. Move it away, or give it a name that begins with '_' "
            "or '.', which is passed over."
        ) from e
    except OSError as e:  # also what pyarrow says of a footer that it cannot parse
        raise InvalidArgumentError(
            f"The footer of {store.full_url(file.path)!r} cannot be read: {e}. If the file is damaged, write it again, or move "
            "it away; if the place cannot be reached or read by this user, mend that."
        ) from e


def _first_schema(store: Store, files: Sequence[StoredFile]) -> tuple[str, Any]:
    """(path, Arrow schema) of the first file with rows, or of the last file if none has any."""
    for file in files:
        metadata, schema = _footer(store, file)
        if metadata.num_rows:
            break
    return file.path, schema


def _facts(dataset: ParquetDataset, file: StoredFile, columns: Sequence[Column]) -> _Facts:
    metadata, schema = _footer(dataset.store, file)
    # pyarrow makes a new object at every call, in time that follows the number of columns.
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    if not sum(rows):  # a writer that saw no value may have given a column any type
        return _Facts(rows, {}, {})
    _check_types(dataset, file, schema, columns)
    leaves, at = {}, 0
    for one in schema:
        leaves[one.name] = range(at, at + num_leaves(one.type))
        at += num_leaves(one.type)
    nulls, sizes = {}, {}
    for column in columns:
        mine = leaves[column.name]
        chunks = [group.column(leaf) for group in groups for leaf in mine]
        sizes[column.name] = sum(chunk.total_uncompressed_size for chunk in chunks)
        # Inside lists and structs a null of the leaf may be an empty list.
        if len(mine) == 1 and metadata.schema.column(mine[0]).max_definition_level == 1:
            statistics = [chunk.statistics for chunk in chunks]
            counts = [s.null_count for s in statistics if s is not None and s.has_null_count]
            nulls[column.name] = 0 if column.source.startswith("array") else sum(counts)
    return _Facts(rows, nulls, sizes)


def _check_types(
    dataset: ParquetDataset, file: StoredFile, schema: Any, columns: Sequence[Column]
) -> None:
    """Refuse a file whose columns mean something else than the first file's; numbers may be wider or narrower."""
    if schema.equals(dataset.arrow_schema):
        return
    where = f"fit_on_parquet({dataset.url!r})"
    first = dataset.schema_path
    for column in columns:
        found = [f for f in schema if f.name == column.name]
        if len(found) != 1:
            raise InvalidArgumentError(
                f"{where}: {file.path!r} has column {column.name!r} {len(found)} times, and {first!r} once. All files must "
                "have the columns of the fit."
            )
        theirs, ours = found[0].type, dataset.arrow_schema.field(column.name).type
        if _family(spark_type(theirs)) != _family(spark_type(ours)):
            raise InvalidArgumentError(
                f"{where}: column {column.name!r} is {theirs} in {file.path!r} and {ours} in {first!r}. Write the files with "
                "one type."
            )


_FAMILIES = {
    **dict.fromkeys(("ByteType", "ShortType", "IntegerType", "LongType"), "integer"),
    **dict.fromkeys(("FloatType", "DoubleType", "DecimalType"), "floating"),
}


def _family(kind: Any) -> str:
    name = type(kind).__name__
    if name == "ArrayType":
        return f"array of {_family(kind.elementType)}"
    return _FAMILIES.get(name, name)


# -- the first rows ----------------------------------------------------------------------------------


def _with_shapes(store: Store, manifest: Manifest) -> Manifest:
    """The manifest with the shapes that the first rows have, and the bytes of rows of variable length."""
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
    found = {c.name: Findings() for c in schema.columns}
    seen = dict.fromkeys(found, 0)
    for arrays in pieces:
        for column in schema.columns:
            is_flag = column is schema.validation
            values, findings = column_to_numpy(arrays[column.name], column, is_flag=is_flag)
            found[column.name].add(findings)
            if values is not None:
                shapes[column.name] = entries.get(column.name) or row_shape(values)
                seen[column.name] += num_bytes(values)
    _refuse(
        (
            line
            for c in schema.columns
            for line in problems(c, found[c.name], len(rows), is_flag=c is schema.validation)
        ),
        " Of the first rows:",
    )
    shaped = schema.with_shapes(shapes)
    for column in shaped.columns:
        if column.is_fixed:
            sizes.pop(column.name, None)
        else:
            # What a dictionary has made small takes its full size in memory.
            mean = seen[column.name] * manifest.num_rows // len(rows)
            sizes[column.name] = max(sizes.get(column.name, 0), mean)
    return replace(manifest, schema=shaped, variable_bytes=sizes)


def _is_nested(column: Column) -> bool:
    """Whether rows of any length have entries that are arrays."""
    return column.kind == "ragged" and column.source.startswith("array<array")


def _entry_shape(source: ParquetSource, column: Column) -> tuple[int, ...] | None:
    """The shape of the first row that has entries; None if no row has any. Rows without any fit every shape."""
    for arrays in source.arrays([column.name]):
        array = arrays[column.name]
        if column.invalid[0] == "skip" and (mask := usable_rows(array, column)) is not None:
            array = array.filter(pa.array(mask))
        values, _ = column_to_numpy(array, column)
        if isinstance(values, Ragged) and values.lengths.any():
            return row_shape(values)
    return None


def _refuse(lines: Iterator[str], where: str = "") -> None:
    listed = "\n".join(f"  {line}" for line in lines)
    if listed:
        raise InvalidArgumentError(f"The data cannot be used for training.{where}\n{listed}")


def fingerprint(manifest: Manifest) -> dict[str, str]:
    """By path, what tells whether a file has changed; of very many files one text for all of them."""
    facts = {f.path: f"{f.size} bytes of {f.modified_ns}" for f in manifest.files}
    if len(facts) <= _LISTED_FILES:
        return facts
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return {f"all {len(facts)} files": digest}
