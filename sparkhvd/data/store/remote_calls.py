"""Calls on a store that a Spark task makes, and the rows in which a task answers.

Each call yields its answer first, then pieces of content. An answer is JSON in a row of its own, content comes in the
rows behind it, and an error is a row, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkhvd.arrow_buffers import binary_array, int32_array
from sparkhvd.data.store.atomic import COPY_BYTES
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, StoreError

if TYPE_CHECKING:
    from pyspark.sql import Row

    from sparkhvd.data.store.store import Store

__all__ = [
    "PIECE_BYTES",
    "SCHEMA",
    "Call",
    "answer",
    "collect",
    "invoke",
    "list_files",
    "list_paths",
    "make_private",
    "parse",
    "prove",
    "read",
    "write_artifact",
]

# One row: Spark Connect fills messages up to about this size.
PIECE_BYTES = 4 << 20
SCHEMA = "part int, data binary"
_SCHEMA = pa.schema([("part", pa.int32()), ("data", pa.binary())])
# The row with this part number holds the answer; parts 0, 1, ... are content.
_ANSWER = -1
# The row with this part number holds the error of a call that failed.
_FAILED = -2
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (FileNotFoundError, NotADirectoryError, InvalidArgumentError, StoreError)
}

# A JSON value, then pieces of content as bytes.
Answer = Iterator[Any]
Call = Callable[..., Answer]


def invoke(store: Store, method: str, *arguments: object) -> Answer:
    """Call a method of the store that returns JSON, or None."""
    yield getattr(store, method)(*arguments)


def list_paths(store: Store, path: str, recursive: bool) -> Answer:
    """List a folder."""
    yield store.list(path, recursive=recursive)


def list_files(store: Store) -> Answer:
    """List every file as (path, bytes, time)."""
    yield [(f.path, f.size, f.modified_ns) for f in store.files()]


def read(store: Store, path: str, start: int, length: int) -> Answer:
    """Read the size of a file, and `length` of its bytes from `start`."""
    with store.open_input(path) as source:
        yield source.size()
        source.seek(start)
        while length > 0 and (piece := source.read(min(length, PIECE_BYTES))):
            yield piece
            length -= len(piece)


def collect(store: Store, folder: str, done: list[str]) -> Answer:
    """Delete files, and read the others of a folder."""
    found = store.collect(folder, done)
    yield [(path, len(data)) for path, data in found]
    yield from (data for _, data in found)


def write_artifact(store: Store, path: str, name: str) -> Answer:
    """Write a file that the client has added to its session."""
    from pyspark import SparkFiles

    with open(SparkFiles.get(name), "rb") as source, store.open_output(path) as sink:
        shutil.copyfileobj(source, sink, COPY_BYTES)
    yield None


def make_private(store: Store) -> Answer:
    """Make the store's folder so that no other user can look into it."""
    folder = store.local_path("")
    assert folder is not None
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    yield None


def prove(store: Store, token: str, content: bytes, make: bool) -> Answer:
    """Make the folder if `make` is True, and write a token into it if there is one."""
    if make:
        store.prove_writable()
    if token:
        store.write_bytes(token, content)
    yield None


# --- rows of an answer ----------------------------------------------------------------------------------------------


def answer(
    store: Store, call: Call, arguments: tuple[object, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Make a call in a task; an error becomes a row."""
    for _ in batches:  # a task that leaves input unread costs Spark the Python worker
        pass
    part = _ANSWER
    try:
        for value in call(store, *arguments):
            data = json.dumps({"value": value}).encode() if part == _ANSWER else bytes(value)
            yield _row(part, data)
            part += 1
    except Exception as e:  # noqa: BLE001 - it is raised again by the client
        known = next((k.__name__ for k in type(e).__mro__ if k.__name__ in _ERRORS), "StoreError")
        text = (
            str(e) if isinstance(e, SparkhvdError) else f"{type(e).__name__}: {e} (on an executor)"
        )
        yield _row(_FAILED, json.dumps({"error": known, "text": text}).encode())


def _row(part: int, data: bytes) -> pa.RecordBatch:
    columns = [int32_array(part), binary_array(data)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def parse(rows: Iterable[Row], hide: Callable[[str], str]) -> tuple[Any, bytes]:
    """Return the answer and the content of a call.

    Args:
        rows: of the task.
        hide: masks secrets in the text of an error.

    Raises:
        Exception: the call raised it: `StoreError`, or one of the other classes that travel by name.
    """
    parts = {row["part"]: bytes(row["data"]) for row in rows}
    if _FAILED in parts:
        failure = json.loads(parts[_FAILED])
        raise _ERRORS[failure["error"]](hide(failure["text"]))
    value = json.loads(parts.pop(_ANSWER))["value"]
    return value, b"".join(parts[part] for part in sorted(parts))
