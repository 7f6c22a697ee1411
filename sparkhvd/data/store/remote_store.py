"""A store that the process of a Spark Connect session cannot reach; each access runs as a Spark task.

A `RemoteStore` pickles as the store that executors use. Files come in rows of 4 MiB and jobs of 64 MiB, so
neither the server's heap nor a message bounds their size; large files go as artifacts of the session.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from sparkhvd.data.store import remote_calls
from sparkhvd.data.store.atomic import COPY_BYTES, Sink, staged_output
from sparkhvd.data.store.listing import Paths, StoredFile
from sparkhvd.data.store.remote_calls import PIECE_BYTES, Call
from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError
from sparkhvd.runner.admission import is_launched
from sparkhvd.settings import CONF_PREFIX, Settings
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RemoteStore"]

# One job: the server holds its rows until the client has them.
JOB_BYTES = 64 << 20
# Larger content goes as an artifact; a plan of more than 128 MiB is refused.
CLOSURE_BYTES = 16 << 20


class RemoteStore(Store):
    """A store that this process reaches through tasks of its Spark Connect session."""

    def __init__(self, direct: Store, spark: SparkSession, limit_s: float | None = None) -> None:
        """Prepare access; no task runs yet.

        Args:
            direct: the store as executors use it.
            spark: the Connect session.
            limit_s: longest wait for one access in seconds; None means the session's `start_timeout`. Time in which a job
                that this process has launched holds the slots does not count.
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
        """False: this process has no path to the store."""
        return False

    @property
    def direct(self) -> Store:
        """The store as executors use it."""
        return self._direct

    @property
    def is_seen(self) -> bool:
        """False: only executors read and write the store."""
        return False

    def exists(self, path: str) -> bool:
        """Return True if a file or folder exists."""
        return bool(self.ask(remote_calls.invoke, "exists", path)[0])

    def num_bytes(self, path: str) -> int:
        """Return the size of a file."""
        return int(self.ask(remote_calls.read, path, 0, 0)[0])

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a file, 64 MiB per job."""
        size, first = self.ask(remote_calls.read, path, 0, JOB_BYTES)
        parts = [first]
        for start in range(JOB_BYTES, int(size), JOB_BYTES):
            parts.append(self.ask(remote_calls.read, path, start, JOB_BYTES)[1])
        content = b"".join(parts)
        if len(content) != size:
            raise StoreError(f"{self.full_url(path)} changed while it was read. Read it again.")
        return content

    def collect(self, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
        """Delete files, then return paths and contents of the others of a folder."""
        sizes, content = self.ask(remote_calls.collect, folder, list(done))
        found, at = [], 0
        for path, size in sizes:
            found.append((path, content[at : at + size]))
            at += size
        return found

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access; a job brings 4 MiB around the bytes that are read."""
        size, first = self.ask(remote_calls.read, path, 0, PIECE_BYTES)
        file = _RemoteFile(
            lambda start, length: self.ask(remote_calls.read, path, start, length)[1],
            int(size),
            first,
        )
        return pa.PythonFile(file, mode="r")

    def list(self, path: str = "", *, recursive: bool = False) -> Paths:
        """List a folder, sorted; empty if it does not exist."""
        paths: Paths = self.ask(remote_calls.list_paths, path, recursive)[0]
        return paths

    def files(self) -> tuple[StoredFile, ...]:
        """List every file below the root with size and time, sorted by path."""
        return tuple(StoredFile(*file) for file in self.ask(remote_calls.list_files)[0])

    def list_above(self, names: Sequence[str]) -> Paths:
        """List the files directly in folders of these names beside and above the root, as "../name/file"."""
        paths: Paths = self.ask(remote_calls.invoke, "list_above", list(names))[0]
        return paths

    def below(self, path: str) -> Store:
        """Return a folder or file of this store as a store with the same options."""
        return RemoteStore(self._direct.below(path), self._spark, self._limit_s)

    def waiting(self, limit_s: float) -> Store:
        """Return this store with another longest wait for one access."""
        return RemoteStore(self._direct, self._spark, limit_s)

    def data_directories(self) -> Paths:
        """List the folders `data/<key>/<owner>`."""
        directories: Paths = self.ask(remote_calls.invoke, "data_directories")[0]
        return directories

    def last_change(self, path: str) -> float | None:
        """Return the time of the last change in a folder, in s since 1970."""
        seconds: float | None = self.ask(remote_calls.invoke, "last_change", path)[0]
        return seconds

    def local_path(self, path: str) -> str | None:
        """Return None: this process has no path to the store."""
        return None

    @contextlib.contextmanager
    def open_output(self, path: str) -> Iterator[Sink]:
        """Open a file for sequential writing: collected here, then sent as a whole."""
        with staged_output(lambda file: self._send(path, file)) as sink:
            yield sink

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content; does nothing if there is none."""
        self.ask(remote_calls.invoke, "delete", path)

    def delete_if_empty(self, path: str) -> None:
        """Delete an empty folder."""
        self.ask(remote_calls.invoke, "delete_if_empty", path)

    def delete_unfinished(self, path: str) -> None:
        """Delete unfinished files of killed writers directly in a folder."""
        self.ask(remote_calls.invoke, "delete_unfinished", path)

    def prove_writable(self) -> None:
        """Make the folder where executors see it, and write and delete a file in it."""
        self.ask(remote_calls.prove, "", b"", True)

    def _send(self, path: str, file: IO[bytes]) -> None:
        size = os.fstat(file.fileno()).st_size
        if size <= CLOSURE_BYTES:
            self.ask(remote_calls.invoke, "write_bytes", path, file.read())
            return
        name = f"sparkhvd-{uuid.uuid4().hex}"
        with tempfile.TemporaryDirectory(prefix="sparkhvd-file-") as folder:
            with open(f"{folder}/{name}", "wb") as copy:
                shutil.copyfileobj(file, copy, COPY_BYTES)
            # Artifacts are known by their names, and stay until the session ends.
            self._spark.addArtifacts(f"{folder}/{name}", file=True)
        self.ask(remote_calls.write_artifact, path, name)

    def ask(self, call: Call, *arguments: object) -> tuple[Any, bytes]:
        """Make a call on the store in a task; return its answer and its content.

        Args:
            call: a function of a module, called with the store and the arguments; it yields the answer, which JSON can
                hold, then pieces of content as bytes.
            *arguments: of the call; they travel in the task's closure.

        Raises:
            StoreError: the task could not run, or had no slot or no answer for too long.
        """
        task = functools.partial(remote_calls.answer, self._direct, call, arguments)
        df = self._spark.range(0, 1, 1, 1).mapInArrow(task, remote_calls.SCHEMA)
        shim = SparkShim(self._spark)
        limit_s = _start_timeout(shim) if self._limit_s is None else self._limit_s
        is_held = functools.partial(is_launched, shim.application())
        how = f"The store {self.url}, which this client does not see, was asked through a Spark task, and the task "
        try:
            rows = shim.collect_within(df, limit_s, is_held)
        except TimeoutError as e:
            raise StoreError(
                f"{how}had not answered after {limit_s:g} s. Look whether a task slot is free and whether the store "
                "answers, or wait longer with start_timeout or SPARKHVD_START_TIMEOUT_S."
            ) from self._place.cause(e)
        except Exception as e:  # noqa: BLE001 - classic and Connect raise their own
            first = self.hide(str(e)).strip().partition("\n")[0]
            raise StoreError(
                f"{how}failed: {type(e).__name__}: {first}. Look whether the session and its executors are alive."
            ) from self._place.cause(e)
        return remote_calls.parse(rows, self.hide)


def _identity(store: Store) -> Store:
    return store


def _start_timeout(shim: SparkShim) -> float:
    """Return the session's longest wait for task slots, in s; a fit reports an invalid value."""
    key = f"{CONF_PREFIX}start_timeout"
    conf = shim.conf((key, f"{key}_s"))
    try:
        return float(conf.get(key) or Settings.resolve(conf=conf).start_timeout_s)
    except ValueError:
        return Settings().start_timeout_s


class _RemoteFile(io.RawIOBase):
    """A file that is read in blocks of 4 MiB; one block is kept."""

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
                # Whole blocks, so that what lies beside it is there for the next call.
                self._start = self._position - self._position % PIECE_BYTES
                self._block = self._fetch(self._start, PIECE_BYTES)
                if self._position - self._start >= len(self._block):
                    break  # the file is shorter than it was
                continue
            part = self._block[offset : offset + wanted]
            parts.append(part)
            self._position += len(part)
            wanted -= len(part)
        return b"".join(parts)
