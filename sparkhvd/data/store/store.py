"""Data, checkpoints and logs in one folder: one interface over local paths, object stores and HDFS.

Layout below the store's root:

    data/<key>/<owner>/          materialized data of one process of one application, with a lease file
    runs/<run_id>/               checkpoints/, logs/, attempts/, metrics.jsonl of one fit
    elastic/<id>/                files for the client of a running `run_elastic` over Spark Connect
    tables/<uuid>/               footers of a table's files, of fits with `incremental=True`
    models/<sha256>              immutable files; no cleanup of data or runs touches them

A file appears complete or not at all (`atomic.py`). An operation refused by the file system is a `StoreError` that
names the store; no message and no `repr` holds a password, key or token (`addresses.py`). Spark Connect clients
without access to the store: `connect.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import shutil
import threading
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from sparkhvd.data.store import addresses, atomic
from sparkhvd.data.store.locks import (
    HOLDER_NAME,
    Lease,
    acquire,
    is_abandoned,
    is_owners,
    is_running,
    lease_of,
    lock_owner,
    position_of,
)
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, StoreError
from sparkhvd.observe.report.page import HTML_NAME, JSON_NAME
from sparkhvd.spark import connect_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Bound on the bytes that one call of `collect` returns; the next call returns the rest.
_COLLECT_BYTES = 8 << 20


class Store:
    """Folder, local or remote, that the driver and every executor can read and write.

    Paths in all methods are relative to the store and use "/". A store pickles as its URL and
    options, without open file systems and files.
    """

    # Function (session, store) -> store that opens a new store as the client of a Connect session reaches it. The
    # package sets it, because modules that import this module define it.
    _opened_through: ClassVar[Callable[[SparkSession, Store], Store]]

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        """Use `Store.create` instead. It also checks that the folder can be written."""
        self._place = StoreFilesystem(url, storage_options or {})
        self._writer = StoreWriter(self._place)
        self.url = self._place.url  # this URL has no secrets
        # Topmost folder made by `create`, if any.
        self._made = ""
        # True if `create` made the folder here. With a Connect session that begins later, an executor makes the folder.
        self._is_created = False

    @classmethod
    def create(cls, path_or_url: str | os.PathLike[str], **storage_options: Any) -> Store:
        """Open the store at a path or URL, create its folder, and check write access.

        Args:
            path_or_url: an absolute path ("/data/store", "/Volumes/main/default/store", "dbfs:/store") or a URL
                ("file:///...", "s3://bucket/prefix", "gs://", "hdfs://", "abfss://", or any scheme of fsspec).
            **storage_options: credentials and other options of the file system (pyarrow.fs if it knows the scheme, else
                fsspec). They are sent to the executors with the program, and never appear in `repr`, in an error or in
                a saved model.

        With an active Spark Connect session the folder is on the executors' file system. If this process does not see
        that file system, no folder is made on this machine, and every access becomes a small Spark task.

        Raises:
            InvalidArgumentError: the path is relative, the scheme is unknown, or the folder cannot be written.
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
                f"{', '.join(sorted(storage_options))} is given. Leave them out, or give the URL that needs them."
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
        """True if this process sees the store as a local folder."""
        return self._place.is_local

    @property
    def direct(self) -> Store:
        """Store as reached by executors, or this store if this process reaches it directly."""
        return self

    @property
    def is_seen(self) -> bool:
        """True if this process reads and writes the store directly."""
        return True

    @property
    def shares_files(self) -> bool:
        """True if threads should read one open file at once, because each read waits for a server.

        False for file systems of fsspec, whose Python file objects have one position.
        """
        return self.is_seen and not self.is_local and self._place.address.root is not None

    # -- reading -------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Check whether a file or folder exists."""
        return bool(self._place.info(path).type != pafs.FileType.NotFound)

    def num_bytes(self, path: str) -> int:
        """Read the size of a file in bytes.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        info = self._place.info(path)
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(f"{self.full_url(path)} does not exist.")
        return int(info.size)

    def read_bytes(self, path: str) -> bytes:
        """Read a whole file.

        Raises:
            FileNotFoundError: the file does not exist.
            StoreError: the file cannot be read.
        """
        with self._place.explained("read", path):
            if self.is_local:
                return Path(self._place.full(path)).read_bytes()
            with self.open_input(path) as source:
                return bytes(source.read())

    def collect(self, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
        """Delete the files `done`, then return paths and contents of the other files in a folder, sorted, up to 8 MiB.

        Both happen in one access, which may be a Spark task.
        """
        return _collect(self, folder, done)

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access. The caller closes it."""
        with self._place.explained("read", path):
            return self._place.fs.open_input_file(self._place.full(path))

    def list(self, path: str = "", *, recursive: bool = False) -> Paths:
        """List the files and folders directly in a folder, or all files below it, sorted, or return [] if it does not exist."""
        return list_paths(self._place, path, recursive=recursive)

    def files(self) -> tuple[StoredFile, ...]:
        """List every file below the root with size and time, sorted by path. A file as root is ".".

        Raises:
            FileNotFoundError: the root does not exist.
        """
        return list_files(self._place)

    def list_above(self, names: Sequence[str]) -> Paths:
        """List files directly in folders of these names beside or above the root.

        The paths have the form "../name/file".
        """
        return list_above(self._place, names)

    def last_change(self, path: str) -> float | None:
        """Find the time of the last change in a folder, in s since 1970, or None if unknown."""
        return last_change(self._place, path)

    def data_directories(self) -> Paths:
        """List the folders `data/<key>/<owner>`, or `data/<key>` if this user may not list it."""
        return data_directories(self._place)

    def local_path(self, path: str) -> str | None:
        """Find a file's path on this host, or None if the store is not a local folder."""
        return self._place.full(path) if self.is_local else None

    def full_url(self, path: str) -> str:
        """Make the full URL of a path in the store, for messages and for Spark."""
        if not path:
            return self.url
        url, mark, query = self.url.partition("?")
        return f"{url.rstrip('/')}/{path}{mark}{query}"

    def seen_by(self, spark: SparkSession) -> Store:
        """Open this store as a session's client reaches it: directly, or by Connect tasks."""
        return Store._opened_through(spark, self)

    def waiting(self, limit_s: float) -> Store:
        """Return this store with another limit on the wait for a task slot, in s."""
        return self

    def below(self, path: str) -> Store:
        """Open a folder or file of this store as a store with the same options."""
        address = self._place.address
        self._place.full(path)
        if address.root is not None:
            path = quote(path)
        elif "?" in path or "#" in path:
            raise InvalidArgumentError(
                f"{path!r} holds '?' or '#', which a URL of {address.scheme} cannot hold. Rename it."
            )
        url, mark, query = address.full.partition("?")
        return Store(f"{url.rstrip('/')}/{path}{mark}{query}", self._place.options)

    # -- writing -------------------------------------------------------------------------------------

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file atomically: readers see the old or the new content."""
        with self.open_output(path) as sink:
            sink.write(data)

    @contextmanager
    def open_output(self, path: str) -> Iterator[atomic.AtomicFile]:
        """Open a file for sequential writing. It appears under its name when the block ends without error.

        Raises:
            StoreError: the store is full, missing or unreachable, or this user may not write it.
        """
        with self._writer.open(path) as sink:
            yield sink

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content. A missing path is ignored."""
        if all(part in ("", ".") for part in path.split("/")):
            raise InvalidArgumentError(
                f"Store.delete({path!r}) would delete the whole store. Give a path inside the store."
            )
        self._writer.delete(path)

    def delete_if_empty(self, path: str) -> None:
        """Delete a folder atomically if it is empty. A file just added by another process is kept.

        Does nothing on file systems without this operation, such as HDFS and object stores, whose folders are only
        names.
        """
        self._writer.delete_if_empty(path)

    def delete_unfinished(self, path: str) -> None:
        """Delete killed writers' unfinished files directly in a folder. It must have no writers."""
        for unfinished in unfinished_files(self._place, path):
            self.delete(unfinished)

    def prove_writable(self) -> None:
        """Make the folder, and write and delete a file in it.

        Raises:
            InvalidArgumentError: the folder cannot be made or written.
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
        except Exception as error:  # noqa: BLE001 - fsspec drivers raise any exception
            raise _unwritable(self, error) from self._place.cause(error)

    def hide(self, text: str) -> str:
        """Mask passwords, keys and tokens of this store in a text."""
        return self._place.hide(text)

    # -- runs and data -------------------------------------------------------------------------------

    def runs(self) -> tuple[StoredRun, ...]:
        """List the runs in the store by name: state, epochs, bytes, last change."""
        return list_runs(self)

    def data(self) -> tuple[StoredData, ...]:
        """List the store's materialized data by path: state, bytes, last change, application."""
        return list_data(self)

    def delete_run(self, run_id: str) -> None:
        """Delete a run: its program, checkpoints, metrics and outcomes. Its models stay usable.

        Raises:
            InvalidArgumentError: there is no such run, or a fit owns its lock: the message names host, process and
                start. A fit on another machine counts as alive if it renews its lock within 40 s.
            StoreError: it cannot be deleted.
        """
        delete_run(self, run_id)

    def delete_data(self, path: str) -> None:
        """Delete kept or abandoned materialized data at a path from `data()`.

        Raises:
            InvalidArgumentError: there are no such data, or their application may use them.
            StoreError: they cannot be deleted.
        """
        delete_data(self, path)

    def clean(self, *, runs: bool = False, now: float | None = None) -> Paths:
        """Delete all kept and abandoned data, and with `runs` all runs without a lock.

        Other data stay until the lease of their owner expires. Kept data are always deleted, so call this when no fit
        trains on them. Models stay. Folders that this user may not list, read or delete stay, too, with a warning.

        Args:
            runs: also delete finished and interrupted runs (checkpoints, metrics, outcomes), which then cannot be
                continued.
            now: time to compare the leases of data with, in s since 1970; None means now.

        Returns:
            The deleted paths.
        """
        cleaning = StoreCleaner(self, time.time() if now is None else now)
        cleaning.clean_data()
        if runs:
            cleaning.clean_runs()
        cleaning.warn(stacklevel=2)
        return cleaning.deleted


def _unwritable(store: Store, error: Exception) -> InvalidArgumentError:
    cause = error.__cause__ if isinstance(error, StoreError) and error.__cause__ else error
    return InvalidArgumentError(
        f"Store.create({store.url!r}): the folder cannot be written: {type(cause).__name__}: "
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
        with suppress(Exception):  # a rank may have just written another file
            store.delete_if_empty(folder)
    return found


# ----------------------------------------------------------------------------------------------------
# File system of a store, opened on first use, with errors that name the store.

# Prefix of unfinished files; listings omit them.
TEMPORARY = ".sparkhvd-tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreFilesystem:
    """Folder of a store in its file system. Every path is relative to the folder.

    Attributes:
        address: parsed URL.
        options: storage options, with their secrets.
        url: URL without secrets, for messages, manifests and saved models.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.address = addresses.parse(url)
        self.options = dict(options)
        self.url = self.address.url
        self._filesystem: pafs.FileSystem | None = None
        self._opened = threading.local()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoreFilesystem):
            return NotImplemented
        return (self.address, self.options) == (other.address, other.options)

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def is_local(self) -> bool:
        """True if this process sees the folder as a local path."""
        return self.address.scheme == "file"

    @property
    def fs(self) -> pafs.FileSystem:
        """File system, opened at the first access."""
        if self.address.root is not None:
            if self._filesystem is None:
                self._filesystem, _ = self._open()
            return self._filesystem
        # Each thread opens its own file system, because connections of fsspec are not shared between threads.
        filesystem = getattr(self._opened, "filesystem", None)
        if filesystem is None:
            filesystem, root = self._open()
            self._opened.filesystem, self._opened.root = filesystem, root
        filesystem.handler.fs.invalidate_cache()  # other processes may have written since
        return filesystem

    def _open(self) -> tuple[pafs.FileSystem, str]:
        try:
            return addresses.open_filesystem(self.address, self.options)
        except SparkhvdError:
            raise
        except Exception as e:  # noqa: BLE001 - fsspec drivers raise any exception
            raise self.error("opened", "", e) from self.cause(e)

    @property
    def root(self) -> str:
        """Path of the folder in the file system."""
        if self.address.root is not None:
            return self.address.root
        self.fs  # noqa: B018 - opens it
        root: str = self._opened.root
        return root

    def full(self, path: str) -> str:
        """Convert a path in the folder to a path in the file system.

        Raises:
            InvalidArgumentError: the path is absolute or outside the folder.
        """
        parts = path.split("/")
        if path.startswith("/") or "\\" in path or ".." in parts:
            raise InvalidArgumentError(
                f"{path!r} is not a path inside a store. Give a relative path without '..', for example "
                "'runs/1/metrics.jsonl'."
            )
        if not path:
            return self.root
        return posixpath.join(self.root, *[p for p in parts if p and p != "."])

    def info(self, path: str) -> pafs.FileInfo:
        """Type, size and time of a file or folder. A missing path has the type NotFound."""
        with self.explained("read", path):
            return self.fs.get_file_info(self.full(path))

    def relative(self, full: str) -> str:
        """Convert a path in the file system to a path in the folder."""
        return posixpath.relpath(full, self.root)

    @contextlib.contextmanager
    def explained(self, doing: str, path: str) -> Iterator[None]:
        """Raise errors of the file system as `StoreError`. `FileNotFoundError` keeps its class.

        Args:
            doing: participle for the message: "read", "written", "cleaned", "opened".
            path: the path for the message.
        """
        try:
            yield
        except SparkhvdError:
            raise
        except (FileNotFoundError, NotADirectoryError) as e:
            if self.cause(e) is not None:
                raise
            raise type(e)(self.hide(str(e))) from None
        except Exception as e:  # noqa: BLE001 - fsspec drivers raise any exception
            raise self.error(doing, path, e) from self.cause(e)

    def error(self, doing: str, path: str, cause: Exception, staged_in: str = "") -> StoreError:
        """Make the error for an operation refused by the file system.

        Args:
            doing: participle for the message, as for `explained`.
            path: the path for the message.
            cause: error of the file system.
            staged_in: folder on this host's disk that refused a staged file; "" if the store refused.
        """
        number = getattr(cause, "errno", None)
        where = (
            f", in {staged_in} on this host's disk, where the file is written before it is copied to the store"
            if staged_in
            else ""
        )
        remedy = (
            f"No space is left: free space in {staged_in or 'the store'}"
            if number in _FULL
            else "Check whether it exists and whether this host may write it"
        )
        # An error before the first checkpoint, for example during materialization, loses no training.
        is_checkpoint = path.startswith("runs/") and "/checkpoints" in path
        then = (
            "; a fit with the same run_id resumes from the last checkpoint"
            if is_checkpoint
            else ", and try again"
        )
        error = StoreError(
            f"The store {self.url} cannot be {doing} ({path or 'its folder'}{where}): {type(cause).__name__}: "
            f"{self.hide(str(cause))}. {remedy}{then}."
        )
        error.errno = number
        return error

    def cause(self, error: Exception) -> Exception | None:
        """Choose the cause to show: the error, or None if it or its causes hold a secret."""
        link: BaseException | None = error
        while link is not None:
            for text in (str(link), repr(link)):
                if self.hide(text) != text:
                    return None
            link = link.__cause__ or link.__context__
        return error

    def hide(self, text: str) -> str:
        """Mask passwords, keys and tokens of the store in a text, and passwords of any URL."""
        secrets = addresses.secrets_of(self.address.full, self.options)
        # Longest first: a secret may be a prefix of another.
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return addresses.without_passwords(text)


# ----------------------------------------------------------------------------------------------------
# List the files and folders of a store.

Paths = list[str]  # a class with a method `list` needs another name for the type
# Number of levels to search above a root. Deeper paths are rare, and each level costs a round trip.
_LEVELS = 16


@dataclass(frozen=True)
class StoredFile:
    """File of a store, with its path, size in bytes, and time of change in ns since 1970 (0 if unknown)."""

    path: str
    size: int
    modified_ns: int


def list_paths(place: StoreFilesystem, path: str, *, recursive: bool) -> Paths:
    """List a folder, sorted, without unfinished files. A missing folder is empty.

    Args:
        place: file system of the store.
        path: the folder.
        recursive: list all files below it, instead of the files and folders directly in it.
    """
    return sorted(
        place.relative(info.path)
        for info in _infos(place, path, recursive=recursive)
        if not info.base_name.startswith(TEMPORARY)
        and (not recursive or info.type == pafs.FileType.File)
    )


def list_files(place: StoreFilesystem) -> tuple[StoredFile, ...]:
    """List every file below the root with size and time, sorted by path. A file as root is ".".

    Raises:
        FileNotFoundError: the root does not exist.
    """
    with place.explained("read", ""):
        root = place.fs.get_file_info(place.root)
        if root.type == pafs.FileType.File:
            infos = [root]
        else:
            infos = place.fs.get_file_info(pafs.FileSelector(place.root, recursive=True))
    files = [
        StoredFile(place.relative(info.path), info.size or 0, info.mtime_ns or 0)
        for info in infos
        if info.type == pafs.FileType.File
    ]
    return tuple(sorted(files, key=lambda file: file.path))


def list_above(place: StoreFilesystem, names: Sequence[str]) -> Paths:
    """List the files directly in folders of these names beside or above the root, as "../name/file".

    It accesses only these names, because a folder above may have very many entries. An unreadable level is skipped.
    """
    with place.explained("read", ""):
        fs, root = place.fs, place.root
    found = []
    for folder in _folders_above(place, root):
        try:
            infos = fs.get_file_info([posixpath.join(folder, name) for name in names])
            for info in infos:
                if info.type == pafs.FileType.Directory:
                    found += [i.path for i in fs.get_file_info(pafs.FileSelector(info.path))]
        except Exception:  # noqa: BLE001, S112 - fsspec drivers raise any exception
            continue
    return sorted(posixpath.relpath(path, root) for path in found)


def last_change(place: StoreFilesystem, path: str) -> float | None:
    """Find the time of the last change in a folder, in s since 1970, or None if unknown."""
    infos = [place.info(path), *_infos(place, path, recursive=True)]
    times = [info.mtime_ns for info in infos if info.mtime_ns]
    return max(times) / 1e9 if times else None


def data_directories(place: StoreFilesystem) -> Paths:
    """List the folders `data/<key>/<owner>`, or `data/<key>` if this user may not list it."""
    directories = []
    for key in _folders(place, "data"):
        try:
            directories += _folders(place, key)
        except StoreError:  # another user's private folder
            directories.append(key)
    return directories


def unfinished_files(place: StoreFilesystem, path: str) -> Paths:
    """List the unfinished files directly in a folder."""
    return [
        place.relative(info.path)
        for info in _infos(place, path)
        if info.base_name.startswith(TEMPORARY) and info.type == pafs.FileType.File
    ]


def _folders_above(place: StoreFilesystem, root: str) -> Paths:
    """List the folders above a root, the nearest first.

    For a local root, the list includes the folders above its real path.
    """
    folders: dict[str, None] = {}
    for path in (root, os.path.realpath(root)) if place.is_local else (root,):
        for _ in range(_LEVELS):
            above = posixpath.dirname(path)
            if above in ("", path):
                break
            path = above
            folders[path] = None
    return list(folders)


def _folders(place: StoreFilesystem, path: str) -> Paths:
    infos = _infos(place, path)
    return sorted(place.relative(i.path) for i in infos if i.type == pafs.FileType.Directory)


def _infos(place: StoreFilesystem, path: str, *, recursive: bool = False) -> list[pafs.FileInfo]:
    selector = pafs.FileSelector(place.full(path), recursive=recursive, allow_not_found=True)
    with place.explained("read", path):
        infos: list[pafs.FileInfo] = place.fs.get_file_info(selector)
    return infos


# ----------------------------------------------------------------------------------------------------
# Write and delete files of a store, by a method for its kind of file system (see `atomic`).


class StoreWriter:
    """Writer of files below the root of a store. The root must exist."""

    def __init__(self, place: StoreFilesystem) -> None:
        self._place = place
        self._device: int | None = None
        self._is_sequential: bool | None = None

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[atomic.AtomicFile]:
        """Open a file for sequential writing. It appears when the block ends without error."""
        place = self._place
        sink: atomic.AtomicFile | None = None
        try:
            full = place.full(path)
            self._make_folder(posixpath.dirname(full))
            with self._output(full) as sink:
                yield sink
        except SparkhvdError:
            raise
        except Exception as e:  # noqa: BLE001 - fsspec drivers raise any exception
            cause = e if sink is None or sink.is_whole else sink.error
            if cause is None:  # the caller's code raised the error
                raise
            staged_in = sink.staged_in if sink is not None and not sink.is_whole else ""
            raise place.error("written", path, cause, staged_in) from place.cause(cause)

    def _output(self, full: str) -> contextlib.AbstractContextManager[atomic.AtomicFile]:
        parent, name = posixpath.split(full)
        temporary = posixpath.join(parent, f"{TEMPORARY}{uuid.uuid4().hex}-{name}")
        place = self._place
        if place.is_local:
            if self._is_sequential is None:
                self._is_sequential = addresses.is_sequential(place.root)
            if self._is_sequential:
                return atomic.staged_output(lambda file: atomic.copy_in(file, full, temporary))
            return atomic.local_output(full, temporary)
        filesystem = place.fs
        if addresses.has_atomic_writes(place.address.scheme):
            return atomic.staged_output(lambda file: atomic.upload(file, filesystem, full))
        return atomic.remote_output(filesystem, full, temporary)

    def _make_folder(self, folder: str) -> None:
        place = self._place
        if place.is_local:
            self._check_root()
            atomic.make_local_folder(folder, place.root)
        elif not addresses.has_atomic_writes(place.address.scheme):
            atomic.make_folder(place.fs, folder)

    def _check_root(self) -> None:
        """Refuse to write if the store's file system is not mounted any more: the path is then another folder."""
        place = self._place
        try:
            device = os.stat(f"{place.root}/.").st_dev  # the dot makes automounters mount
        except FileNotFoundError:
            raise StoreError(
                f"The store {place.url} does not exist: {place.root} is not on this host. If its file system was unmounted, mount "
                "it again; to make a new store, call Store.create."
            ) from None
        if self._device is None:
            self._device = device
        elif device != self._device:
            raise StoreError(
                f"The store {place.url} is not mounted any more: {place.root} is on another file system than before. Mount it again, "
                "and try again: the data in it are not lost."
            )

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content. A missing path is ignored."""
        place = self._place
        full = place.full(path)
        with (
            place.explained("cleaned", path),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            if not place.is_local:
                kind = place.fs.get_file_info(full).type
                if kind == pafs.FileType.Directory:
                    place.fs.delete_dir(full)
                elif kind != pafs.FileType.NotFound:
                    place.fs.delete_file(full)
            elif os.path.isdir(full) and not os.path.islink(full):
                # Ignore errors, because another process may delete the folder or still write in it; a later sweep
                # deletes the rest.
                shutil.rmtree(full, ignore_errors=True)
            else:
                Path(full).unlink()

    def delete_if_empty(self, path: str) -> None:
        """Delete a folder if it is empty, atomically, if the file system supports that."""
        place = self._place
        full = place.full(path)
        if place.is_local:
            with contextlib.suppress(OSError):
                os.rmdir(full)
        elif not addresses.has_atomic_writes(place.address.scheme):
            atomic.remove_empty_folder(place.fs, full)


# ----------------------------------------------------------------------------------------------------
# List runs and materialized data of a store with their sizes, and delete unused ones.

FINISHED_NAME = "finished.json"
POINTER_NAME = "checkpoints/latest.json"
TIMELINE_NAME = "timeline.json"
_WARM = re.compile(r"warm-(\d+)/")


@dataclass(frozen=True)
class StoredRun:
    """Run in a store.

    Attributes:
        run_id: its name.
        state: "finished", "interrupted", "running" (as far as this process can know), "report" if only a report is
            left, or "unreadable: <file>".
        epochs: trained epochs in its newest checkpoint.
        num_bytes: bytes of all its files.
        changed: time of the last change; None if unknown.
        holder: running fit, such as "process 12 on host a, since ..."; "" without a fit.
    """

    run_id: str
    state: str
    epochs: int
    num_bytes: int
    changed: datetime | None
    holder: str = ""


@dataclass(frozen=True)
class StoredData:
    """Materialized data in a store.

    Attributes:
        path: folder of the data, relative to the store.
        state: "kept" until the data are deleted, "in use" by their application, or "abandoned".
        num_bytes: bytes of all files.
        changed: time of the last change; None if unknown.
        application: Spark application that made the data; "" if unknown.
    """

    path: str
    state: str
    num_bytes: int
    changed: datetime | None
    application: str = ""


def list_runs(store: Store) -> tuple[StoredRun, ...]:
    """List the runs, sorted by name."""
    files = _files_by_folder(store, "runs", depth=1)
    return tuple(_run(store, run_id, group) for run_id, group in sorted(files.items()))


def _run(store: Store, run_id: str, files: list[StoredFile]) -> StoredRun:
    names = {f.path for f in files}
    # Each fit with warm_start has its own folder inside the run's folder. The last of them gives the state.
    warm = max((int(m[1]) for name in names if (m := _WARM.match(name))), default=0)
    part = f"warm-{warm}/" if warm else ""
    state = "finished" if f"{part}{FINISHED_NAME}" in names else "interrupted"
    if names <= {JSON_NAME, HTML_NAME, TIMELINE_NAME}:
        state = "report"
    holder, epochs = None, 0
    folder, pointer = f"runs/{run_id}", f"{part}{POINTER_NAME}"
    if pointer in names and (content := _content(store, f"{folder}/{pointer}")) is not None:
        if (position := position_of(content)) is None:
            state = f"unreadable: {pointer}"
        else:
            epochs = position[0]
    if (
        HOLDER_NAME in names
        and (content := _content(store, f"{folder}/{HOLDER_NAME}")) is not None
        and (holder := Lease.parse(content)) is None
    ):
        state = f"unreadable: {HOLDER_NAME}"
    is_held = holder is not None and is_running(holder)
    return StoredRun(
        run_id,
        "running" if is_held else state,
        epochs,
        sum(f.size for f in files),
        _changed(files),
        str(holder) if is_held else "",
    )


def _content(store: Store, path: str) -> bytes | None:
    """Read a listed file, or return b"" if it cannot be read, None if it was deleted meanwhile."""
    try:
        return store.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # an unreadable run must not prevent the listing of the other runs
        return b""


def delete_run(store: Store, run_id: str) -> None:
    """Delete a run with all its files.

    Raises:
        InvalidArgumentError: there is no such run, or a fit holds its lock.
        StoreError: it cannot be deleted.
    """
    known = [path.rpartition("/")[2] for path in store.list("runs")]
    if run_id not in known:
        raise InvalidArgumentError(
            f"There is no run {run_id!r} in {store.url}. It has {', '.join(map(repr, known[:20])) or 'none'}."
        )
    acquire(store, run_id).release()
    _delete(store, f"runs/{run_id}")


def list_data(store: Store) -> tuple[StoredData, ...]:
    """List the materialized data, sorted by path."""
    entries = []
    now = time.time()
    for folder, files in sorted(_files_by_folder(store, "data", depth=2).items()):
        path = f"data/{folder}"
        lease = lease_of(store, path)
        state = "in use"
        if lease is not None and lease.keep:
            state = "kept"
        elif is_abandoned(store, path, now):
            state = "abandoned"
        size = sum(f.size for f in files)
        app_id = "" if lease is None else lease.owner
        entries.append(StoredData(path, state, size, _changed(files), app_id))
    return tuple(entries)


def delete_data(store: Store, path: str) -> None:
    """Delete kept or abandoned materialized data.

    Raises:
        InvalidArgumentError: `list_data` has no such path, or their application may use them.
        StoreError: they cannot be deleted.
    """
    if not (path.startswith("data/") and is_owners(path) and store.exists(path)):
        raise InvalidArgumentError(
            f"{store.url} has no materialized data at {path!r}. Give a path that Store.data() lists."
        )
    lease = lease_of(store, path)
    if not (lease is not None and lease.keep) and not is_abandoned(store, path, time.time()):
        owner = "another process" if lease is None else f"the application {lease.owner}"
        raise InvalidArgumentError(
            f"{store.full_url(path)} belongs to {owner}, which deletes it when it ends. If the owner was killed, the data "
            "count as abandoned after a day and can be deleted then."
        )
    _delete(store, path)


def _delete(store: Store, path: str) -> None:
    store.delete(path)
    if store.exists(path) and store.list(path, recursive=True):
        raise StoreError(
            f"{store.full_url(path)} cannot be deleted completely. Ask its owner, or a user with permission, to delete it."
        )


def _files_by_folder(store: Store, root: str, *, depth: int) -> dict[str, list[StoredFile]]:
    """Group files by their folder `depth` levels below `root`, with paths relative to that folder."""
    try:
        files = store.below(root).files()
    except FileNotFoundError:
        return {}
    groups: dict[str, list[StoredFile]] = defaultdict(list)
    for file in files:
        parts = file.path.split("/")
        if len(parts) > depth:
            inside = StoredFile("/".join(parts[depth:]), file.size, file.modified_ns)
            groups["/".join(parts[:depth])].append(inside)
    return groups


def _changed(files: Iterable[StoredFile]) -> datetime | None:
    newest = max((f.modified_ns for f in files), default=0)
    return datetime.fromtimestamp(newest / 1e9, timezone.utc) if newest else None


# ----------------------------------------------------------------------------------------------------
# Delete unused data and runs, and warn about folders that could not be deleted.

# Number of folders that a warning names.
_NAMED = 20


class StoreCleaner:
    """Cleaner of data and runs in one walk over a store.

    Args:
        store: store to clean.
        now: time to compare leases with, in s since 1970.

    Attributes:
        deleted: paths that were deleted.
        failed: paths that this user may not list, read or delete.
    """

    def __init__(self, store: Store, now: float) -> None:
        self._store = store
        self._now = now
        self.deleted: list[str] = []
        self.failed: list[str] = []

    def clean_data(self) -> None:
        """Delete kept data and abandoned data."""
        for directory in self._store.data_directories():
            if is_owners(directory):
                self._delete(directory, self._is_deletable)
            else:
                self.failed.append(directory)

    def clean_runs(self) -> None:
        """Delete the folders of runs that no process has locked."""
        for folder in ("runs", "keras_runs"):
            for run in self._store.list(folder):
                self._delete(run, self._is_free)

    def warn(self, stacklevel: int) -> None:
        """Warn about remaining folders, if any.

        `stacklevel` counts from the caller, as in `warnings.warn`.
        """
        if not self.failed:
            return
        more = ", ..." if len(self.failed) > _NAMED else ""
        warnings.warn(
            f"Store.clean: {len(self.failed)} folders of {self._store.url} could not be deleted, because this user may not list, "
            f"read or delete them: {', '.join(self.failed[:_NAMED])}{more}. Ask their owners, or a user with permission, to clean them.",
            stacklevel=stacklevel + 1,
        )

    def _is_deletable(self, directory: str) -> bool:
        lease = lease_of(self._store, directory)
        return (lease is not None and lease.keep) or is_abandoned(self._store, directory, self._now)

    def _is_free(self, run: str) -> bool:
        holder = lock_owner(self._store, run.rpartition("/")[2])
        return holder is None or not is_running(holder)

    def _delete(self, path: str, is_wanted: Callable[[str], bool]) -> None:
        try:
            if not is_wanted(path):
                return
            self._store.delete(path)
            (self.failed if self._store.exists(path) else self.deleted).append(path)
        except StoreError:
            self.failed.append(path)
        except OSError:  # the owner may be deleting the folder
            pass
