"""Names of files and folders: hidden ones, logs of tables, and columns in folders `column=value`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from urllib.parse import unquote

from sparkhvd.data.store.listing import StoredFile
from sparkhvd.errors import InvalidArgumentError

__all__ = ["PartitionValue", "is_hidden", "partition_values", "refuse_tables"]

# Folders that tell a table's log: which of the files beside them hold its rows, and which of these are deleted.
_LOGS = {
    "_delta_log": "a Delta table",
    ".hoodie": "a Hudi table",
    "_spark_metadata": "what a streaming query of Spark wrote",
}
# Hive's name for the folder of rows without a value.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

PartitionValue = int | float | str | None


def is_hidden(path: str) -> bool:
    """Return True for paths that Spark passes over; a name with "_" in front is a folder of rows if it is `_column=value`."""
    return path != "." and any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in path.split("/")
    )


def refuse_tables(url: str, files: Sequence[StoredFile]) -> None:
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
