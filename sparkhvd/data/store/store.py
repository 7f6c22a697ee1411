"""Data, checkpoints and logs in one folder: one interface over local paths, object stores and HDFS.

Layout below the store's root:

    data/<key>/<owner>/          materialized data of one process of one application, with a lease file
    runs/<run_id>/               checkpoints/, logs/, attempts/, metrics.jsonl of one fit
    elastic/<id>/                what a running `run_elastic` over Spark Connect leaves for its client
    models/<sha256>              immutable files; no cleanup of data or runs touches them

A file appears whole or not at all (`atomic.py`). An operation that the file system refuses is a `StoreError` that
names the store; no message and no `repr` holds a password, key or token (`addresses.py`). Spark Connect clients that
cannot reach the store: `connect.py`.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from sparkhvd.data.store import addresses, atomic, listing
from sparkhvd.data.store.cleaning import Cleaning
from sparkhvd.data.store.contents import (
    StoredData,
    StoredRun,
    delete_data,
    delete_run,
    list_data,
    list_runs,
)
from sparkhvd.data.store.listing import Paths, StoredFile
from sparkhvd.data.store.place import TEMPORARY, Place
from sparkhvd.data.store.writer import Writer
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.sessions import connect_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Store"]

# Most that one call of `collect` returns; the rest comes with the next one.
_COLLECT_BYTES = 8 << 20


class Store:
    """A folder, local or remote, that the driver and every executor can read and write.

    Every path that a method takes is relative to the store and uses "/". A store pickles as its URL and
    options; open file systems and files stay behind.
    """

    # Gives a new store as the process of a Connect session reaches it: (session, store) -> store. The package sets it,
    # because its stores stand above this class.
    _opened_through: ClassVar[Callable[[SparkSession, Store], Store]]

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        """Use `Store.create`, which also checks that the folder can be written."""
        self._place = Place(url, storage_options or {})
        self._writer = Writer(self._place)
        self.url = self._place.url  # without secrets
        # The topmost folder that `create` has made, if any.
        self._made = ""
        # True if `create` made the folder for this very object: a Connect session that comes later makes its own.
        self._is_created = False

    @classmethod
    def create(cls, path_or_url: str | os.PathLike[str], **storage_options: Any) -> Store:
        """Open the store at a path or URL, creating the folder, and prove that it can be written.

        Args:
            path_or_url: an absolute path ("/data/store", "/Volumes/main/default/store", "dbfs:/store") or a URL
                ("file:///...", "s3://bucket/prefix", "gs://", "hdfs://", "abfss://", or any scheme of fsspec).
            **storage_options: credentials and such, handed to the file system (pyarrow.fs where it knows the
                scheme, else fsspec). They travel to the executors with the program. They never appear in `repr`,
                in an error or in a saved model.

        With an active Spark Connect session the folder is the one that the executors see. If this process does not
        see the same one, nothing is made here, and every access becomes a small Spark task.

        Raises:
            InvalidArgumentError: the path is relative, the scheme unknown, or the place cannot be written.
        """
        url = os.fspath(path_or_url)
        if not isinstance(url, str) or not url.strip():
            raise InvalidArgumentError(
                f"Store.create({url!r}): give an absolute path or a URL, for example '/data/store' or "
                "'s3://bucket/prefix'."
            )
        store = cls(url, storage_options)
        if store.is_local and storage_options:
            raise InvalidArgumentError(
                f"Store.create({store.url!r}): a local folder takes no storage options, and "
                f"{', '.join(sorted(storage_options))} is given. Leave them out, or give the URL that they are for."
            )
        if (session := connect_session()) is not None:
            return cls._opened_through(session, store)
        store.prove_writable()
        return store

    def __repr__(self) -> str:
        hidden = ", storage_options=<hidden>" if self._place.options else ""
        return f"Store({self.url!r}{hidden})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Store):
            return NotImplemented
        return self._place == other._place

    def __hash__(self) -> int:
        return hash(self.url)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._place.address.full, "options": self._place.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], state["options"])  # type: ignore[misc]  # rebuilds lazily opened parts

    @property
    def is_local(self) -> bool:
        """True if this process sees the store as a path."""
        return self._place.is_local

    @property
    def direct(self) -> Store:
        """This store, or the store as executors reach it if this process does not."""
        return self

    @property
    def is_seen(self) -> bool:
        """True if this process reads and writes the store itself."""
        return True

    @property
    def shares_files(self) -> bool:
        """True if threads gain by reading one open file at the same time, because each read waits for a server.

        False for drivers written in Python, whose files have one position.
        """
        return self.is_seen and not self.is_local and self._place.address.root is not None

    # -- reading -------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Return True if a file or folder exists."""
        return bool(self._place.info(path).type != pafs.FileType.NotFound)

    def num_bytes(self, path: str) -> int:
        """Return the size of a file.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        info = self._place.info(path)
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(f"{self.full_url(path)} is not there.")
        return int(info.size)

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: the file does not exist.
            StoreError: it cannot be read.
        """
        with self._place.explained("read", path):
            if self.is_local:
                return Path(self._place.full(path)).read_bytes()
            with self.open_input(path) as source:
                return bytes(source.read())

    def collect(self, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
        """Delete files, then return paths and contents of others of a folder, sorted, as 8 MiB hold; one step, which may be a Spark task."""
        return _collect(self, folder, done)

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access; the caller closes it."""
        with self._place.explained("read", path):
            return self._place.fs.open_input_file(self._place.full(path))

    def list(self, path: str = "", *, recursive: bool = False) -> Paths:
        """List a folder, sorted; empty if it does not exist: files and folders directly in it, or all files below it."""
        return listing.list_paths(self._place, path, recursive=recursive)

    def files(self) -> tuple[StoredFile, ...]:
        """List every file below the root with size and time, sorted by path; a root that is a file is ".".

        Raises:
            FileNotFoundError: the root does not exist.
        """
        return listing.list_files(self._place)

    def list_above(self, names: Sequence[str]) -> Paths:
        """List the files directly in folders of these names beside and above the root, as "../name/file"."""
        return listing.list_above(self._place, names)

    def last_change(self, path: str) -> float | None:
        """Return the time of the last change in a folder, in s since 1970; None if it is unknown."""
        return listing.last_change(self._place, path)

    def data_directories(self) -> Paths:
        """List the folders `data/<key>/<owner>`; a key that may not be listed stands for its owners."""
        return listing.data_directories(self._place)

    def local_path(self, path: str) -> str | None:
        """Return the path of a file on this host, or None if the store is not a local folder."""
        return self._place.full(path) if self.is_local else None

    def full_url(self, path: str) -> str:
        """Return the URL of a path in the store, for messages and for Spark."""
        if not path:
            return self.url
        url, mark, query = self.url.partition("?")
        return f"{url.rstrip('/')}/{path}{mark}{query}"

    def seen_by(self, spark: SparkSession) -> Store:
        """Return this store as the process of a session reaches it: itself, or through tasks of a Connect session."""
        return Store._opened_through(spark, self)

    def waiting(self, limit_s: float) -> Store:
        """Return this store with another longest wait for an access that needs a task slot."""
        return self

    def below(self, path: str) -> Store:
        """Return a folder or file of this store as a store with the same options."""
        address = self._place.address
        self._place.full(path)
        if address.root is not None:
            path = quote(path)
        elif "?" in path or "#" in path:
            raise InvalidArgumentError(
                f"{path!r} holds '?' or '#', which a URL of {address.scheme} cannot. Rename it."
            )
        url, mark, query = address.full.partition("?")
        return Store(f"{url.rstrip('/')}/{path}{mark}{query}", self._place.options)

    # -- writing -------------------------------------------------------------------------------------

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole file; readers see the old content or all of the new one."""
        with self.open_output(path) as sink:
            sink.write(data)

    @contextmanager
    def open_output(self, path: str) -> Iterator[atomic.Sink]:
        """Open a file for sequential writing; it appears under its name when the block ends without error.

        Raises:
            StoreError: the store refuses it: it is full, gone, unreachable or closed to this user.
        """
        with self._writer.open(path) as sink:
            yield sink

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content; does nothing if there is none."""
        if not path.strip("/"):
            raise InvalidArgumentError(
                "Store.delete('') would delete the whole store. Name a path in it."
            )
        self._writer.delete(path)

    def delete_if_empty(self, path: str) -> None:
        """Delete an empty folder, in one step: a file that another process just put there stays.

        Does nothing where no such step exists, as on object stores, whose folders are names only, and on HDFS.
        """
        self._writer.delete_if_empty(path)

    def delete_unfinished(self, path: str) -> None:
        """Delete unfinished files of killed writers directly in a folder; no writer may use it now."""
        for unfinished in listing.unfinished(self._place, path):
            self.delete(unfinished)

    def prove_writable(self) -> None:
        """Make the folder, and write and delete a file in it.

        Raises:
            InvalidArgumentError: that is not possible.
        """
        probe = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
        try:
            if self.is_local:
                addresses.check_databricks(self._place.root, self.url)
                self._made = atomic.make_root(self._place.root)
            self._is_created = True
            self.write_bytes(probe, b"sparkhvd")
            self.delete(probe)
        except InvalidArgumentError:
            raise
        except Exception as error:  # noqa: BLE001 - drivers of fsspec raise what they like
            raise _unwritable(self, error) from self._place.cause(error)

    def hide(self, text: str) -> str:
        """Mask passwords, keys and tokens of this store in a text."""
        return self._place.hide(text)

    # -- runs and data -------------------------------------------------------------------------------

    def runs(self) -> tuple[StoredRun, ...]:
        """Return the runs in the store by name: state, epochs, bytes, last change."""
        return list_runs(self)

    def data(self) -> tuple[StoredData, ...]:
        """Return the materialized data in the store by path: state, bytes, last change, application."""
        return list_data(self)

    def delete_run(self, run_id: str) -> None:
        """Delete a run: its program, checkpoints, metrics and outcomes. Its models stay usable.

        Raises:
            InvalidArgumentError: there is no such run, or a fit holds it: the message names host, process and start. A fit
                on another machine counts as alive if it renews its file within 40 s.
            StoreError: it cannot be deleted.
        """
        delete_run(self, run_id)

    def delete_data(self, path: str) -> None:
        """Delete materialized data that are kept or abandoned, `path` as `data()` gives it.

        Raises:
            InvalidArgumentError: there are none, or the application that made them may use them.
            StoreError: they cannot be deleted.
        """
        delete_data(self, path)

    def clean(self, *, runs: bool = False, now: float | None = None) -> Paths:
        """Delete all kept and abandoned data, and with `runs` all runs that no fit holds.

        Data that are not kept stay while the lease of their owner is alive. Kept data go in any case: call it when no fit
        trains on them. Models stay. So do folders that this user may not list, read or delete; a warning names them.

        Args:
            runs: also delete finished and interrupted runs (checkpoints, metrics, outcomes); those cannot be continued.
            now: the moment to compare the leases of data with; None means now.

        Returns:
            The paths that were deleted.
        """
        cleaning = Cleaning(self, time.time() if now is None else now)
        cleaning.clean_data()
        if runs:
            cleaning.clean_runs()
        cleaning.warn(stacklevel=2)
        return cleaning.deleted


def _unwritable(store: Store, error: Exception) -> InvalidArgumentError:
    cause = error.__cause__ if isinstance(error, StoreError) and error.__cause__ else error
    return InvalidArgumentError(
        f"Store.create({store.url!r}): the place cannot be written: {type(cause).__name__}: "
        f"{store.hide(str(cause))}. Give a folder that this user may write, on a file system "
        "that the driver and all executors share."
    )


def _collect(store: Store, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
    for path in done:
        store.delete(path)
    found: list[tuple[str, bytes]] = []
    num_bytes = 0
    for path in store.list(folder):
        data = store.read_bytes(path)
        num_bytes += len(data)
        found.append((path, data))
        if num_bytes >= _COLLECT_BYTES:
            break
    if done and not found:
        with suppress(Exception):  # a rank has just written another one
            store.delete_if_empty(folder)
    return found
