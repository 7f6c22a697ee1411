"""Names of files and folders: hidden ones, logs of tables, and columns in folders `column=value`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from sparkhvd.data.store.listing import StoredFile
from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "TABLE_FOLDERS",
    "PartitionValue",
    "Table",
    "is_hidden",
    "partition_values",
    "refuse_tables",
    "table_of",
]

# Folders of a table's log: it tells which of the files beside them hold its rows, and which of these are deleted.
_LOGS = {
    "_delta_log": ("a Delta table", "spark.read.format('delta').load"),
    ".hoodie": ("a Hudi table", "spark.read.format('hudi').load"),
    "_spark_metadata": ("what a streaming query of Spark wrote", "spark.read.parquet"),
}
# Iceberg's folder has a common name, so its files tell: v3.metadata.json, 00003-<uuid>.gz.metadata.json.
_ICEBERG = "metadata"
_ICEBERG_TABLE = ("an Iceberg table", "spark.read.format('iceberg').load")
_ICEBERG_FILE = re.compile(r"v?\d+\b.*\.metadata\.json(\.gz)?")
TABLE_FOLDERS = (*_LOGS, _ICEBERG)
# Hive's name for the folder of rows without a value.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

PartitionValue = int | float | str | None


def is_hidden(path: str) -> bool:
    """Return True for paths that Spark passes over; a name with "_" in front is a folder of rows if it is `_column=value`."""
    return path != "." and any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in path.split("/")
    )


@dataclass(frozen=True)
class Table:
    """Table of which a file was found.

    Attributes:
        kind: with its article.
        log: folder of its log; its parent is the table's.
        reader: call that reads the table by its folder.
    """

    kind: str
    log: str
    reader: str


def table_of(path: str) -> Table | None:
    """Return the table to whose log a file belongs, by its path."""
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
    """Refuse tables whose rows are not all rows of their files, and parts of them.

    Args:
        url: of the data, for the message.
        paths: of files in it, and beside and above it.
    """
    for table in filter(None, map(table_of, paths)):
        is_part = table.log.startswith("../")
        raise InvalidArgumentError(
            f"fit_on_parquet({url!r}): {table.log!r} {'above' if is_part else 'in'} it shows that this is "
            f"{'a part of ' if is_part else ''}{table.kind}. Its log tells which files have its rows; others may be there that "
            f"hold deleted or earlier ones. Read the table's folder with {table.reader}(...), and give fit(df) the DataFrame."
        )


def partition_values(url: str, files: Sequence[StoredFile]) -> dict[str, dict[str, PartitionValue]]:
    """Return by path the values of its folders `column=value`: whole numbers, numbers or text, one type per column.

    Raises:
        InvalidArgumentError: files lie in folders of different columns.
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
    return ", ".join(repr(name) for name in names) or "no column"
