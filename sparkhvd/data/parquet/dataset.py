"""Find files, `column=value` folders and schema of an ordinary Parquet data set.

It reads one footer.

`Store` lists the files. `pyarrow.dataset` is not used, because it lacks three things: sizes and times of change (which
later reveal a replaced file), folders named by floating numbers, and file systems that a Connect client reaches only
through Spark tasks. Schemas are compared by their Spark types, so that numbers of any width match.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkhvd.data.arrow_types import spark_type
from sparkhvd.data.columns.schema import Field, Schema
from sparkhvd.data.manifest import TableVersion
from sparkhvd.data.packed import METADATA_KEY
from sparkhvd.data.store.store import Store, StoredFile
from sparkhvd.errors import InvalidArgumentError, listed


@dataclass(frozen=True)
class TableFiles:
    """Facts about one table version beyond the content of its files.

    Attributes:
        version: table and version.
        locate: function of a file's path and Arrow schema that returns the stored name of each column of the table, and
            the value of each column that the file lacks.
        deleted: path of a file with deletes -> function that returns a mask (rows,) of the rows that are not deleted.
        where: filter of the rows, or None.
        layout: text that is equal for versions with the same columns, stored under the same names or ids.
    """

    version: TableVersion
    locate: Callable[[str, pa.Schema], tuple[dict[str, str], dict[str, Any]]]
    deleted: Mapping[str, Callable[[], npt.NDArray[np.bool_]]] = field(default_factory=dict)
    where: RowFilter | None = None
    layout: str = ""


@dataclass(frozen=True)
class RowFilter:
    """Filter of rows with SQL's meaning: a comparison with null or NaN selects no row.

    Attributes:
        columns: names of the columns that it reads.
        expression: the filter as an expression of pyarrow.
        text: the filter as text for messages.
    """

    columns: tuple[str, ...]
    expression: pc.Expression
    text: str


@dataclass(frozen=True)
class ParquetDataset:
    """Ordinary Parquet data set at a path or URL, known by the names of its files and one footer.

    Attributes:
        url: URL for messages.
        store: store whose root is the data set.
        files: files in the order of their rows.
        partitions: path -> values of the folders `column=value`.
        arrow_schema: schema of the first file with rows.
        schema_path: path of that file.
        metadata: key-value metadata of `_common_metadata`, if that file exists.
        table: facts of the table version that has these files; None for plain files.
    """

    url: str
    store: Store
    files: tuple[StoredFile, ...]
    partitions: Mapping[str, Mapping[str, PartitionValue]]
    arrow_schema: pa.Schema
    schema_path: str
    metadata: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    table: TableFiles | None = None

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """Columns held by the names of folders."""
        return tuple(self.partitions[self.files[0].path]) if self.partitions else ()

    @property
    def name(self) -> str:
        """Name of the data in messages."""
        return f"fit_on_parquet({self.url!r})" if self.table is None else self.table.version.text

    @cached_property
    def schema(self) -> Schema:
        """Columns with their Spark types. Folder columns come last, as in Spark."""
        names = self.partition_columns
        fields = [
            Field(f.name, spark_type(f.type)) for f in self.arrow_schema if f.name not in names
        ]
        kinds = {int: pa.int64(), float: pa.float64(), str: pa.string()}
        for name in names:
            values = (of[name] for of in self.partitions.values())
            first = next((v for v in values if v is not None), None)
            fields.append(Field(name, spark_type(kinds.get(type(first), pa.float64()))))
        return Schema(tuple(fields))


def open_dataset(
    path: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None
) -> ParquetDataset:
    """Find a data set's files and read the schema of the first file with rows, without a Spark job.

    Files and folders whose names begin with "_" or "." are skipped, and so are empty files; all other files must be
    Parquet.

    Args:
        path: a file, or a folder that is searched recursively, as a path or URL for `Store`; or a `Store` of it.
        storage_options: passed to the file system.

    Raises:
        InvalidArgumentError: there are no files, or they are not ordinary Parquet: for example the files of a table
            whose log decides its rows, or a part of such a table.
    """
    store = path if isinstance(path, Store) else store_of(path, storage_options)
    url = store.url
    try:
        listed = store.files()
    except FileNotFoundError as e:
        raise InvalidArgumentError(
            f"fit_on_parquet({url!r}): there is no such file or folder for this process. Give a path or URL of Parquet "
            "files that the driver and all executors can read."
        ) from e
    refuse_tables(url, [*(f.path for f in listed), *store.list_above(TABLE_FOLDERS)])
    files = tuple(f for f in listed if f.size and not is_hidden(f.path))
    if not files:
        others = f" besides {len(listed)} that are empty or hidden" if listed else ""
        raise InvalidArgumentError(
            f"fit_on_parquet({url!r}): there are no files{others}. Give a Parquet file, or a folder with some in it."
        )
    schema_path, schema = _first_schema(store, files)
    if METADATA_KEY in (schema.metadata or {}):
        raise InvalidArgumentError(
            f"fit_on_parquet({url!r}): these are packed files that a fit wrote for itself, not ordinary Parquet. fit(df) "
            "uses them again by itself; read_packed(path) shows what they hold."
        )
    common: Mapping[bytes, bytes] = {}
    if any(f.path == "_common_metadata" and f.size for f in listed):
        with store.open_input("_common_metadata") as source:
            common = pq.read_metadata(source).metadata or {}
    return ParquetDataset(
        url, store, files, partition_values(url, files), schema, schema_path, common
    )


def store_of(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """Make a data set's store without accessing it.

    A relative path refers to this process's working directory.
    """
    text = os.fspath(path)
    return Store(text if ":" in text.partition("/")[0] else os.path.abspath(text), storage_options)


def read_footer(store: Store, file: StoredFile) -> tuple[pq.FileMetaData, pa.Schema]:
    """Read the metadata and the Arrow schema of a file.

    Raises:
        InvalidArgumentError: the file is not Parquet, or its footer cannot be read.
    """
    try:
        with store.open_input(file.path) as source:
            opened = pq.ParquetFile(source)
            return opened.metadata, opened.schema_arrow
    except pa.ArrowInvalid as e:
        raise InvalidArgumentError(
            f"{store.full_url(file.path)!r} is not a Parquet file: {e}. Move it away, or give it a name that begins with '_' "
            "or '.': such files are skipped."
        ) from e
    except OSError as e:  # also pyarrow's error for an invalid footer
        raise InvalidArgumentError(
            f"The footer of {store.full_url(file.path)!r} cannot be read: {e}. If the file is damaged, write it again or move "
            "it away; else check that this process can reach the file and that this user may read it."
        ) from e


def _first_schema(store: Store, files: Sequence[StoredFile]) -> tuple[str, pa.Schema]:
    """Find path and Arrow schema of the first file with rows, or of the last if all are empty."""
    for file in files:
        metadata, schema = read_footer(store, file)
        if metadata.num_rows:
            break
    return file.path, schema


# ----------------------------------------------------------------------------------------------------
# Names of files and folders: hidden files, logs of tables, and columns in folders `column=value`.

# Folders of tables' logs. A log decides which files hold the table's rows, and which rows are deleted.
_LOGS = {
    "_delta_log": ("a Delta table", "spark.read.format('delta').load"),
    ".hoodie": ("a Hudi table", "spark.read.format('hudi').load"),
    "_spark_metadata": ("what a streaming query of Spark wrote", "spark.read.parquet"),
}
# Iceberg's folder has a common name, so it is recognized by its files: v3.metadata.json, 00003-<uuid>.gz.metadata.json.
_ICEBERG = "metadata"
_ICEBERG_TABLE = ("an Iceberg table", "spark.read.format('iceberg').load")
_ICEBERG_FILE = re.compile(r"v?\d+\b.*\.metadata\.json(\.gz)?")
TABLE_FOLDERS = (*_LOGS, _ICEBERG)
_IN_PLACE = dict.fromkeys(
    ("a Delta table", "an Iceberg table"), "fit_on_table(...) reads a version of it in place. Or: "
)
# Hive's name for the folder of rows with a null in the partition column.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

PartitionValue = int | float | str | None


def is_hidden(path: str) -> bool:
    """Whether Spark skips a path: a part starts with "." or "_", except folders `_column=value`."""
    return path != "." and any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in path.split("/")
    )


@dataclass(frozen=True)
class Table:
    """Table of a file: its format, log and reader.

    Attributes:
        kind: name of the format with its article, such as "a Delta table".
        log: folder of the log; its parent is the table's folder.
        reader: Spark call that reads the table from its folder.
    """

    kind: str
    log: str
    reader: str


def table_of(path: str) -> Table | None:
    """Find the table with the file at this path in its log, or None for other files."""
    *folders, name = path.split("/")
    for at, folder in enumerate(folders):
        if folder in _LOGS:
            kind, reader = _LOGS[folder]
            return Table(kind, "/".join(folders[: at + 1]), reader)
    if folders and folders[-1] == _ICEBERG and _ICEBERG_FILE.fullmatch(name):
        kind, reader = _ICEBERG_TABLE
        return Table(kind, "/".join(folders), reader)
    return None


def refuse_tables(url: str, paths: Iterable[str]) -> None:
    """Reject tables whose rows differ from the rows of their files, and parts of such tables.

    Args:
        url: URL of the data, for the message.
        paths: paths of files in the data's folder, and in log folders beside and above it.
    """
    for table in filter(None, map(table_of, paths)):
        is_part = table.log.startswith("../")
        raise InvalidArgumentError(
            f"fit_on_parquet({url!r}): {table.log!r} {'above' if is_part else 'in'} it shows that this is "
            f"{'a part of ' if is_part else ''}{table.kind}. Only the table's log tells which files hold its rows; other files may hold "
            f"deleted or earlier rows. {_IN_PLACE.get(table.kind, '')}Read the table's folder with {table.reader}(...), and give fit(df) the DataFrame."
        )


def partition_values(url: str, files: Sequence[StoredFile]) -> dict[str, dict[str, PartitionValue]]:
    """Parse the values of folders `column=value` by path, as int, float or text. A column has one type.

    Raises:
        InvalidArgumentError: files are in folders of different columns.
    """
    texts = {}
    for file in files:
        pairs = [part.partition("=") for part in file.path.split("/")[:-1] if "=" in part]
        texts[file.path] = {unquote(name): unquote(value) for name, _, value in pairs}
    first = texts[files[0].path]
    for path, values in texts.items():
        if list(values) != list(first):
            raise InvalidArgumentError(
                f"fit_on_parquet({url!r}): {files[0].path!r} lies in folders of {_named(first)}, and {path!r} in folders of "
                f"{_named(values)}. All files must have the same partition columns; give the folder of one kind."
            )
    of_type = {
        name: _common_type([of[name] for of in texts.values() if of[name] != _NO_VALUE])
        for name in first
    }
    return {
        path: {n: None if v == _NO_VALUE else of_type[n](v) for n, v in values.items()}
        for path, values in texts.items()
    }


def _common_type(texts: Sequence[str]) -> Callable[[str], int | float | str]:
    for kind in (int, float):
        try:
            for text in texts:
                if "_" in text or not -(2**63) <= kind(text) < 2**63:
                    raise ValueError(text)
        except ValueError:
            continue
        return kind
    return str


def _named(names: Iterable[str]) -> str:
    return listed(map(repr, names)) or "no column"
