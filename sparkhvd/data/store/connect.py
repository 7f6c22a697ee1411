"""A store as a Spark Connect client uses it that cannot see it: every access is one small Spark task.

Executors and ranks see the store; only the process that calls `fit` does not, for example a notebook whose Spark is
elsewhere. `as_seen_by` finds out: a task writes a token, and the client looks for it. A folder of the same name on
the client's own disk holds none.

A `RemoteStore` pickles as the plain store that it stands for. Files come in rows of 4 MiB and jobs of 64 MiB, so
neither the server's heap nor a message bounds their size; large files go as artifacts of the session.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from sparkhvd.data.store.atomic import COPY_BYTES, Sink, staged_output
from sparkhvd.data.store.store import TEMPORARY, Paths, Store, StoredFile
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, StoreError
from sparkhvd.runner.admission import is_launched
from sparkhvd.sessions import is_connect
from sparkhvd.settings import CONF_PREFIX, Settings
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RemoteStore", "as_seen_by", "make_private", "open_through"]

# One row: Spark Connect fills messages up to about this size.
PIECE_BYTES = 4 << 20
# One job: the server holds its rows until the client has them.
JOB_BYTES = 64 << 20
# Larger content goes as an artifact; a plan of more than 128 MiB is refused.
CLOSURE_BYTES = 16 << 20
_ROWS = "part int, data binary"
_SCHEMA = pa.schema([("part", pa.int32()), ("data", pa.binary())])
# The row with this part number holds the answer; parts 0, 1, ... are content.
_ANSWER = -1
# And with this one what was raised instead.
_FAILED = -2
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (FileNotFoundError, NotADirectoryError, InvalidArgumentError, StoreError)
}


class RemoteStore(Store):
    """A store that this process reaches through tasks of its Spark Connect session."""

    def __init__(self, direct: Store, spark: Any, limit_s: float | None = None) -> None:
        """Nothing runs yet.

        Args:
            direct: the store as executors use it.
            spark: the Connect session.
            limit_s: longest wait for one access in seconds; None means the session's `start_timeout`. Time in which a job
                that this process has launched holds the slots does not count.
        """
        super().__init__(direct._address.full, direct._options)
        self._direct = direct
        self._spark = spark
        self._limit_s = limit_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self._direct,)

    def __copy__(self) -> RemoteStore:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteStore:
        return self

    @property
    def is_local(self) -> bool:
        """Never: this process has no path to it."""
        return False

    @property
    def direct(self) -> Store:
        """The store as executors use it."""
        return self._direct

    @property
    def is_seen(self) -> bool:
        """Not by this process."""
        return False

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return bool(self.ask(_exists, path)[0])

    def num_bytes(self, path: str) -> int:
        """The size of a file."""
        return int(self.ask(_read, path, 0, 0)[0])

    def read_bytes(self, path: str) -> bytes:
        """The whole content of a file, 64 MiB per job."""
        size, first = self.ask(_read, path, 0, JOB_BYTES)
        parts = [first]
        for start in range(JOB_BYTES, int(size), JOB_BYTES):
            parts.append(self.ask(_read, path, start, JOB_BYTES)[1])
        content = b"".join(parts)
        if len(content) != size:
            raise StoreError(f"{self.full_url(path)} changed while it was read. Read it again.")
        return content

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access; a job brings 4 MiB around what is asked for."""
        size, first = self.ask(_read, path, 0, PIECE_BYTES)
        file = _RemoteFile(
            lambda start, length: self.ask(_read, path, start, length)[1], int(size), first
        )
        return pa.PythonFile(file, mode="r")

    def list(self, path: str = "", *, recursive: bool = False) -> Paths:
        """Paths in a folder, sorted; empty if it does not exist."""
        found: Paths = self.ask(_list, path, recursive)[0]
        return found

    def files(self) -> tuple[StoredFile, ...]:
        """Every file below the root, sorted by path."""
        return tuple(StoredFile(*file) for file in self.ask(_files)[0])

    def below(self, path: str) -> Store:
        """A folder of this store, or a file, as a store of its own with the same options."""
        return RemoteStore(self._direct.below(path), self._spark, self._limit_s)

    def waiting(self, limit_s: float) -> Store:
        """This store with another longest wait for one access."""
        return RemoteStore(self._direct, self._spark, limit_s)

    def data_directories(self) -> Paths:
        """Every folder `data/<key>/<owner>` in the store."""
        found: Paths = self.ask(_data_directories)[0]
        return found

    def last_change(self, path: str) -> float | None:
        """When a folder or something in it changed last, in s since 1970."""
        found: float | None = self.ask(_last_change, path)[0]
        return found

    def local_path(self, path: str) -> str | None:
        """None: this process has no path to it."""
        return None

    @contextlib.contextmanager
    def open_output(self, path: str) -> Iterator[Sink]:
        """Open a file for sequential writing: collected here, then sent as a whole."""
        with staged_output(lambda file: self._send(path, file)) as sink:
            yield sink

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all it holds; nothing happens if there is none."""
        self.ask(_delete, path)

    def delete_if_empty(self, path: str) -> None:
        """Delete a folder unless something is in it."""
        self.ask(_delete_if_empty, path)

    def delete_unfinished(self, path: str) -> None:
        """Delete what writers that were killed left directly in a folder."""
        self.ask(_delete_unfinished, path)

    def prove_writable(self) -> None:
        """Make the folder where executors see it, and write and delete a file in it."""
        self.ask(_prove, "", b"", True)

    def _send(self, path: str, file: IO[bytes]) -> None:
        size = os.fstat(file.fileno()).st_size
        if size <= CLOSURE_BYTES:
            self.ask(_write, path, file.read())
            return
        name = f"sparkhvd-{uuid.uuid4().hex}"
        with tempfile.TemporaryDirectory(prefix="sparkhvd-file-") as folder:
            with open(f"{folder}/{name}", "wb") as copy:
                shutil.copyfileobj(file, copy, COPY_BYTES)
            # Artifacts are known by their names, and stay until the session ends.
            self._spark.addArtifacts(f"{folder}/{name}", file=True)
        self.ask(_write_artifact, path, name)

    def ask(self, call: Callable[..., Iterator[Any]], *arguments: Any) -> tuple[Any, bytes]:
        """The answer and the content that a call on the store gives in a task.

        Args:
            call: a function of a module, called with the store and the arguments; it yields the answer, which JSON can
                hold, then pieces of content as bytes.
            *arguments: of the call; they travel in the task's closure.

        Raises:
            StoreError: the task could not run, or had no slot or no answer for too long.
        """
        task = functools.partial(_answer, self._direct, call, arguments)
        df = self._spark.range(0, 1, 1, 1).mapInArrow(task, _ROWS)
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
            ) from self._cause(e)
        except Exception as e:  # noqa: BLE001 - classic and Connect raise their own
            first = self.hide(str(e)).strip().partition("\n")[0]
            raise StoreError(
                f"{how}failed: {type(e).__name__}: {first}. Look whether the session and its executors are alive."
            ) from self._cause(e)
        parts = {row["part"]: bytes(row["data"]) for row in rows}
        if _FAILED in parts:
            failed = json.loads(parts[_FAILED])
            raise _ERRORS[failed["error"]](self.hide(failed["text"]))
        answer = json.loads(parts.pop(_ANSWER))
        return answer["value"], b"".join(parts[part] for part in sorted(parts))


def _start_timeout(shim: SparkShim) -> float:
    """How long the session waits for task slots, in s; a fit says what is wrong with its conf."""
    key = f"{CONF_PREFIX}start_timeout"
    conf = shim.conf((key, f"{key}_s"))
    try:
        return float(conf.get(key) or Settings.resolve(conf=conf).start_timeout_s)
    except ValueError:
        return Settings().start_timeout_s


def as_seen_by(spark: Any, store: Store, *, make: bool = False) -> Store:
    """The store as the process of this session reaches it: itself, or through tasks of a Connect session.

    A Connect session is asked once per store: an executor writes a token into it.

    Args:
        spark: the session.
        store: the store.
        make: whether the executor makes the folder. It also does if `Store.create` ran before there was a session.

    Raises:
        InvalidArgumentError: the folder cannot be made, or not be written.
        StoreError: it is not there, or cannot be written.
    """
    plain = store.direct
    if not is_connect(spark):
        return plain
    key = (spark.session_id, plain)
    with _sights.lock:
        if key not in _sights.known:
            _sights.known[key] = _is_seen(spark, plain, make or plain._is_created)
        return plain if _sights.known[key] else RemoteStore(plain, spark)


def open_through(spark: Any, store: Store) -> Store:
    """Open a new store through a Connect session; an executor makes its folder."""
    return as_seen_by(spark, store, make=True)


def make_private(spark: Any, folder: str) -> None:
    """Make a folder where executors see it that no other user can look into."""
    RemoteStore(Store(folder), spark).ask(_make_private)


class _Sights:
    """What this process has found out: (session, store) -> whether it sees the store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[tuple[str, Store], bool] = {}


_sights = _Sights()


def _is_seen(spark: Any, store: Store, make: bool) -> bool:
    remote = RemoteStore(store, spark)
    token = f"{TEMPORARY}sight-{uuid.uuid4().hex}"
    content = token.encode()
    remote.ask(_prove, token, content, make)
    try:
        found = store.read_bytes(token)
    except Exception:  # noqa: BLE001 - whatever a client without credentials or network meets
        found = b""
    if found == content:
        store.delete(token)
        return True
    remote.delete(token)
    _forget_own_folder(store)
    return False


def _forget_own_folder(store: Store) -> None:
    """Remove the empty folder that `Store.create` made here before there was a session, and say so."""
    made, store._made = store._made, ""
    if not made or store.local_path("") is None:
        return
    folder = store.local_path("") or made
    with contextlib.suppress(OSError):  # somebody put something there
        os.rmdir(folder)
        while folder != made:
            folder = os.path.dirname(folder)
            os.rmdir(folder)
    if store.local_path("x") and not made.startswith(tempfile.gettempdir() + "/sparkhvd-store-"):
        warnings.warn(
            f"Store.create was called before the Spark Connect session, and made {made} on this machine, which Spark's "
            f"executors do not see. {store.url} of the executors is used, and the empty folder here is removed.",
            stacklevel=3,
        )


# --- what a task does -----------------------------------------------------------------------------------------------
# Each function gives the answer first, then pieces of content.


def _exists(store: Store, path: str) -> Iterator[Any]:
    yield store.exists(path)


def _list(store: Store, path: str, recursive: bool) -> Iterator[Any]:
    yield store.list(path, recursive=recursive)


def _data_directories(store: Store) -> Iterator[Any]:
    yield store.data_directories()


def _last_change(store: Store, path: str) -> Iterator[Any]:
    yield store.last_change(path)


def _files(store: Store) -> Iterator[Any]:
    yield [(f.path, f.size, f.modified_ns) for f in store.files()]


def _read(store: Store, path: str, start: int, length: int) -> Iterator[Any]:
    """The size of the file, and `length` of its bytes from `start`."""
    with store.open_input(path) as source:
        yield source.size()
        source.seek(start)
        while length > 0 and (piece := source.read(min(length, PIECE_BYTES))):
            yield piece
            length -= len(piece)


def _write(store: Store, path: str, data: bytes) -> Iterator[Any]:
    store.write_bytes(path, data)
    yield None


def _write_artifact(store: Store, path: str, name: str) -> Iterator[Any]:
    from pyspark import SparkFiles

    with open(SparkFiles.get(name), "rb") as source, store.open_output(path) as sink:
        shutil.copyfileobj(source, sink, COPY_BYTES)
    yield None


def _delete(store: Store, path: str) -> Iterator[Any]:
    store.delete(path)
    yield None


def _delete_if_empty(store: Store, path: str) -> Iterator[Any]:
    store.delete_if_empty(path)
    yield None


def _delete_unfinished(store: Store, path: str) -> Iterator[Any]:
    store.delete_unfinished(path)
    yield None


def _make_private(store: Store) -> Iterator[Any]:
    folder = store.local_path("")
    assert folder is not None
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    yield None


def _prove(store: Store, token: str, content: bytes, make: bool) -> Iterator[Any]:
    """Make the folder if that is wanted, and leave a token in it if there is one."""
    if make:
        store.prove_writable()
    if token:
        store.write_bytes(token, content)
    yield None


def _answer(
    store: Store,
    call: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """In a task: make the call; what it raises is data, too."""
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
    columns = [pa.array([part], pa.int32()), pa.array([data], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _identity(store: Store) -> Store:
    return store


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
