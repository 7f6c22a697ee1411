"""Warning for DataFrames that read the files of a table past the log that tells its rows."""

from __future__ import annotations

import contextlib
import posixpath
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

from sparkhvd import connect
from sparkhvd.data.parquet.folders import TABLE_FOLDERS, table_of
from sparkhvd.data.spark_plan import file_roots
from sparkhvd.data.store.remote_store import RemoteStore
from sparkhvd.data.store.store import Store
from sparkhvd.sessions import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["warn_of_tables"]

# Folders of a plan that are looked at: a remote one costs some round trips, and one that only executors see a task.
_FOLDERS = 8
_UNSEEN_FOLDERS = 1
# Longest wait for a task of Spark Connect, which a fit could do without.
_LIMIT_S = 10.0
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*:(?://[^/]*)?)?(.*)", re.DOTALL)


def warn_of_tables(df: DataFrame, store: Store) -> None:
    """Warn if a DataFrame reads files of a table without the table's log, so that deleted rows come back.

    Looks into folders that this process, or over Spark Connect an executor, opens as it opens the store: paths, and the
    store's own kind of file system with its options. Starts no job but that task, and never fails.
    """
    found: dict[str, str] = {}
    # Whatever pyspark, file systems or the plan of another version raise: the DataFrame is good without an answer.
    with contextlib.suppress(Exception):
        found.update(_found(df, store))
    for text in found.values():
        warnings.warn(text, stacklevel=2)


def _found(df: DataFrame, store: Store) -> Iterator[tuple[str, str]]:
    """Yield folders of tables with the text for the user."""
    spark = df.sparkSession
    roots = connect.file_roots(df) if is_connect(spark) else file_roots(df)
    limit = _FOLDERS if store.is_seen else _UNSEEN_FOLDERS
    for root in list(dict.fromkeys(roots))[:limit]:
        beginning, path = _parts(root)
        # In the folder itself, too: what stands beside a name in it.
        url = f"{beginning}{quote(path) if beginning else path}/_"
        place = Store(url)
        if not place.is_local:
            if place._place.address.scheme != store.direct._place.address.scheme:
                continue
            place = Store(url, store.direct._place.options)
        if not store.is_seen:
            place = RemoteStore(place, spark, _LIMIT_S)
        for table in filter(None, map(table_of, place.list_above(TABLE_FOLDERS))):
            folder, log = posixpath.split(posixpath.normpath(f"{path}/_/{table.log}"))
            if log == "_spark_metadata" and folder == path:
                continue  # Spark itself reads this log
            folder = beginning + folder
            yield (
                folder,
                f"The DataFrame reads files in {folder!r} without the {log!r} there, which shows that this is {table.kind}. The log tells "
                "which files have its rows; others may be there that hold deleted or earlier ones, and all are trained on. Read "
                f"the table: {table.reader}({folder!r}).",
            )
            break


def _parts(url: str) -> tuple[str, str]:
    """Divide a path or URL of Hadoop, which quotes nothing, into scheme and host, and the path."""
    match = _URL.fullmatch(url)
    assert match is not None
    return match[1] or "", posixpath.normpath(match[2]) if match[2] else ""
