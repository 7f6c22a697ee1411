"""Store accessed by Spark tasks, for a Spark Connect client without direct access.

A `RemoteStore` pickles as the store that executors use. Files are read in rows of 4 MiB and jobs of 64 MiB, so that
neither the server's heap nor the size of a message limits them; large files are written as artifacts of the session.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from sparkhvd.arrow_buffers import binary_array, int32_array
from sparkhvd.data.store.atomic import COPY_BYTES, AtomicFile, staged_output
from sparkhvd.data.store.store import Paths, Store, StoredFile
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, StoreError
from sparkhvd.runner.slots import is_launched
from sparkhvd.settings import CONF_PREFIX, Settings
from sparkhvd.spark import SparkShim
from sparkhvd.wire import read_json, rebuild

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


# Bytes that one job returns. The server holds them in memory until the client has received them.
JOB_BYTES = 64 << 20
# Larger content is sent as an artifact, because the server refuses a plan of more than 128 MiB.
CLOSURE_BYTES = 16 << 20


class RemoteStore(Store):
    """Store accessed through tasks of this process's Spark Connect session."""

    def __init__(self, direct: Store, spark: SparkSession, limit_s: float | None = None) -> None:
        """Prepare access. No task runs yet.

        Args:
            direct: the store as executors use it.
            spark: the Connect session.
            limit_s: longest wait for one access in seconds; None means the session's `start_timeout`. Time does not
                count while ranks of this process hold the task slots.
        """
        super().__init__(direct._place.address.full, direct._place.options)
        self._direct = direct
        self._spark = spark
        self._limit_s = limit_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self._direct,)

    def __copy__(self) -> RemoteStore:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteStore:
        return self

    @property
    def is_local(self) -> bool:
        """Always False, because this process has no path to the store."""
        return False

    @property
    def direct(self) -> Store:
        """Store as executors use it."""
        return self._direct

    @property
    def is_seen(self) -> bool:
        """Always False, because only executors read and write the store."""
        return False

    def exists(self, path: str) -> bool:
        return bool(self.ask(invoke, "exists", path)[0])

    def num_bytes(self, path: str) -> int:
        return int(self.ask(read, path, 0, 0)[0])

    def read_bytes(self, path: str) -> bytes:
        """Read a file, 64 MiB per job."""
        size, first = self.ask(read, path, 0, JOB_BYTES)
        parts = [first]
        for start in range(JOB_BYTES, int(size), JOB_BYTES):
            parts.append(self.ask(read, path, start, JOB_BYTES)[1])
        content = b"".join(parts)
        if len(content) != size:
            raise StoreError(f"{self.full_url(path)} changed while it was read. Read it again.")
        return content

    def collect(self, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
        """Delete the files `done`, then return paths and contents of the other files in a folder."""
        sizes, content = self.ask(collect, folder, list(done))
        found, at = [], 0
        for path, size in sizes:
            found.append((path, content[at : at + size]))
            at += size
        return found

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access. A job fetches 4 MiB around the requested bytes."""
        size, first = self.ask(read, path, 0, PIECE_BYTES)
        file = _RemoteFile(
            lambda start, length: self.ask(read, path, start, length)[1],
            int(size),
            first,
        )
        return pa.PythonFile(file, mode="r")

    def list(self, path: str = "", *, recursive: bool = False) -> Paths:
        """List a folder, sorted. A missing folder is empty."""
        paths: Paths = self.ask(list_paths, path, recursive)[0]
        return paths

    def files(self) -> tuple[StoredFile, ...]:
        """List every file below the root with size and time, sorted by path."""
        return tuple(StoredFile(*file) for file in self.ask(list_files)[0])

    def list_above(self, names: Sequence[str]) -> Paths:
        """List the files directly in folders of these names beside and above the root, as "../name/file"."""
        paths: Paths = self.ask(invoke, "list_above", list(names))[0]
        return paths

    def below(self, path: str) -> Store:
        return RemoteStore(self._direct.below(path), self._spark, self._limit_s)

    def waiting(self, limit_s: float) -> Store:
        return RemoteStore(self._direct, self._spark, limit_s)

    def data_directories(self) -> Paths:
        """List the folders `data/<key>/<owner>`."""
        directories: Paths = self.ask(invoke, "data_directories")[0]
        return directories

    def last_change(self, path: str) -> float | None:
        seconds: float | None = self.ask(invoke, "last_change", path)[0]
        return seconds

    def local_path(self, path: str) -> str | None:
        """Always None, because this process has no path to the store."""
        return None

    @contextlib.contextmanager
    def open_output(self, path: str) -> Iterator[AtomicFile]:
        """Open a file for sequential writing. It is staged on this host and sent as a whole."""
        with staged_output(lambda file: self._send(path, file)) as sink:
            yield sink

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content. A missing path is ignored."""
        self.ask(invoke, "delete", path)

    def delete_if_empty(self, path: str) -> None:
        self.ask(invoke, "delete_if_empty", path)

    def delete_unfinished(self, path: str) -> None:
        """Delete unfinished files of killed writers directly in a folder."""
        self.ask(invoke, "delete_unfinished", path)

    def prove_writable(self) -> None:
        """Make the folder on the executors' file system, and write and delete a file in it."""
        self.ask(prove, "", b"", True)

    def _send(self, path: str, file: IO[bytes]) -> None:
        size = os.fstat(file.fileno()).st_size
        if size <= CLOSURE_BYTES:
            self.ask(invoke, "write_bytes", path, file.read())
            return
        name = f"sparkhvd-{uuid.uuid4().hex}"
        with tempfile.TemporaryDirectory(prefix="sparkhvd-file-") as folder:
            with open(f"{folder}/{name}", "wb") as copy:
                shutil.copyfileobj(file, copy, COPY_BYTES)
            # The name must be unique, because artifacts stay until the session ends.
            self._spark.addArtifacts(f"{folder}/{name}", file=True)
        self.ask(write_artifact, path, name)

    def ask(self, call: Call, *arguments: object) -> tuple[Any, bytes]:
        """Run a call on the store in a task and return its answer and its content.

        Args:
            call: module-level function, called with the store and the arguments; it yields the answer as JSON data,
                then pieces of content as bytes.
            *arguments: arguments of the call, which are part of the task's closure.

        Raises:
            StoreError: the task could not run, or had no slot or no answer for too long.
        """
        task = functools.partial(answer, self._direct, call, arguments)
        df = self._spark.range(0, 1, 1, 1).mapInArrow(task, SCHEMA)
        shim = SparkShim(self._spark)
        limit_s = _start_timeout(shim) if self._limit_s is None else self._limit_s
        is_held = functools.partial(is_launched, shim.application())
        how = f"This client does not see the store {self.url} and uses it through a Spark task, and the task "
        try:
            rows = shim.collect_within(df, limit_s, is_held)
        except TimeoutError as e:
            raise StoreError(
                f"{how}had not answered after {limit_s:g} s. Check whether a task slot is free and whether the store "
                "responds, or wait longer with start_timeout or SPARKHVD_START_TIMEOUT_S."
            ) from self._place.cause(e)
        except Exception as e:  # noqa: BLE001 - classic and Connect raise their own
            first = self.hide(str(e)).strip().partition("\n")[0]
            raise StoreError(
                f"{how}failed: {type(e).__name__}: {first}. Check whether the session and its executors are alive."
            ) from self._place.cause(e)
        return parse(rows, self.hide)


def _identity(store: Store) -> Store:
    return store


def _start_timeout(shim: SparkShim) -> float:
    """Read the session's longest wait for task slots in s, or the default if the value is invalid.

    A fit reports an invalid value.
    """
    key = f"{CONF_PREFIX}start_timeout"
    conf = shim.conf((key, f"{key}_s"))
    try:
        return float(conf.get(key) or Settings.resolve(conf=conf).start_timeout_s)
    except ValueError:
        return Settings().start_timeout_s


class _RemoteFile(io.RawIOBase):
    """File read in blocks of 4 MiB, with a cache of one block."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, first: bytes) -> None:
        self._fetch = fetch
        self._size = size
        self._start, self._block = 0, first
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._size - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        parts = []
        while wanted:
            offset = self._position - self._start
            if not 0 <= offset < len(self._block):
                # Fetch a whole block, so that the next call finds neighbouring bytes in the cache.
                self._start = self._position - self._position % PIECE_BYTES
                self._block = self._fetch(self._start, PIECE_BYTES)
                if self._position - self._start >= len(self._block):
                    break  # the file has become shorter
                continue
            part = self._block[offset : offset + wanted]
            parts.append(part)
            self._position += len(part)
            wanted -= len(part)
        return b"".join(parts)


# ----------------------------------------------------------------------------------------------------
# Calls on a store in a Spark task, and the rows that they return.
# Each call yields its answer first, then pieces of content. The answer is one row of JSON, the content is in the
# following rows, and an error is a row of its own.

# Bytes of one row, because Spark Connect fills messages up to about this size.
PIECE_BYTES = 4 << 20
SCHEMA = "part int, data binary"
_SCHEMA = pa.schema([("part", pa.int32()), ("data", pa.binary())])
# Part number of the row with the answer; parts 0, 1, ... are content.
_ANSWER = -1
# Part number of the row with the error of a failed call.
_FAILED = -2
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (FileNotFoundError, NotADirectoryError, InvalidArgumentError, StoreError)
}

# A JSON value, then pieces of content as bytes.
Answer = Iterator[Any]
Call = Callable[..., Answer]


def invoke(store: Store, method: str, *arguments: object) -> Answer:
    """Call a method of the store with a JSON result, or None."""
    yield getattr(store, method)(*arguments)


def list_paths(store: Store, path: str, recursive: bool) -> Answer:
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
    """Delete the files `done`, and read the other files in a folder."""
    found = store.collect(folder, done)
    yield [(path, len(data)) for path, data in found]
    yield from (data for _, data in found)


def write_artifact(store: Store, path: str, name: str) -> Answer:
    """Write a file from an artifact of the client's session."""
    from pyspark import SparkFiles

    with open(SparkFiles.get(name), "rb") as source, store.open_output(path) as sink:
        shutil.copyfileobj(source, sink, COPY_BYTES)
    yield None


def make_private(store: Store) -> Answer:
    """Make the store's folder private to this user."""
    folder = store.local_path("")
    assert folder is not None
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    yield None


def prove(store: Store, token: str, content: bytes, make: bool) -> Answer:
    """Make the folder if `make` is True, and write the token, if any, into it."""
    if make:
        store.prove_writable()
    if token:
        store.write_bytes(token, content)
    yield None


# --- rows of an answer ----------------------------------------------------------------------------------------------


def answer(
    store: Store, call: Call, arguments: tuple[object, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run a call in a task. An error becomes a row."""
    for _ in batches:  # if a task leaves input unread, Spark ends its Python worker
        pass
    part = _ANSWER
    try:
        for value in call(store, *arguments):
            data = json.dumps({"value": value}).encode() if part == _ANSWER else bytes(value)
            yield _row(part, data)
            part += 1
    except Exception as e:  # noqa: BLE001 - raised again by the client
        known = next((k.__name__ for k in type(e).__mro__ if k.__name__ in _ERRORS), "StoreError")
        text = (
            str(e) if isinstance(e, SparkhvdError) else f"{type(e).__name__}: {e} (on an executor)"
        )
        yield _row(_FAILED, json.dumps({"error": known, "text": text}).encode())


def _row(part: int, data: bytes) -> pa.RecordBatch:
    columns = [int32_array(part), binary_array(data)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def parse(rows: Iterable[Row], hide: Callable[[str], str]) -> tuple[Any, bytes]:
    """Split a call's rows into its answer and its content.

    Args:
        rows: rows that the task returned.
        hide: masks secrets in the text of an error.

    Raises:
        Exception: the error that the call raised: `StoreError`, or another class in `_ERRORS`.
    """
    parts = {row["part"]: bytes(row["data"]) for row in rows}
    if _FAILED in parts:
        failure = read_json(parts[_FAILED])
        raise _ERRORS[failure["error"]](hide(failure["text"]))
    value = read_json(parts.pop(_ANSWER))["value"]
    return value, b"".join(parts[part] for part in sorted(parts))


# ----------------------------------------------------------------------------------------------------
# Transport a `StoreError` from a Spark task to the driver, because Spark keeps only the text of an error.

_EMBEDDED = re.compile(r"\[sparkhvd-store:([0-9a-f]+)\]")


@contextlib.contextmanager
def telling_the_driver() -> Iterator[None]:
    """Append the encoded message to a task's `StoreError`, so that it survives in Spark's text."""
    try:
        yield
    except StoreError as e:
        code = json.dumps([str(e), e.errno]).encode().hex()
        raise StoreError(f"{e}\n[sparkhvd-store:{code}]") from e.__cause__


@contextlib.contextmanager
def raised_by_tasks(store: Store) -> Iterator[None]:
    """On the driver, raise the `StoreError` of a task instead of Spark's error about the failed job."""
    try:
        yield
    except Exception as e:
        embedded = _EMBEDDED.search(str(e))
        if embedded is None:
            raise
        try:
            text, number = rebuild(tuple[str, int | None], read_json(bytes.fromhex(embedded[1])))
        except ValueError:  # Spark has cut the text
            raise e from None
        error = StoreError(store.hide(text))
        error.errno = number
        # "from None", because Spark's own text would add thousands of lines.
        raise error from None
