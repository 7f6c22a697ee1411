"""Where data, checkpoints and logs live: one interface over local paths, object stores and HDFS.

Layout below the store's root:

    data/<key>/<owner>/          materialized data of one process of one application, with a lease file
    runs/<run_id>/               checkpoints/, logs/, attempts/, metrics.jsonl of one fit
    models/<sha256>              immutable files; no cleanup of data or runs touches them

A file appears whole or not at all (`writing.py`). What the store refuses is a `StoreError` that names it; no message
and no `repr` holds a password, key or token (`addresses.py`). How a Spark Connect client uses a store that it cannot
see: `connect.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from sparkhvd.data.store import addresses, atomic
from sparkhvd.data.store.cleaning import Cleaning
from sparkhvd.data.store.contents import (
    StoredData,
    StoredRun,
    delete_data,
    delete_run,
    list_data,
    list_runs,
)
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, StoreError
from sparkhvd.sessions import connect_session

__all__ = ["Store", "StoredFile"]

Paths = list[str]  # inside Store, `list` is a method
# Names that begin so are files being written; nobody lists or reads them.
TEMPORARY = ".sparkhvd-tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class StoredFile:
    """A file of a store: its path, its bytes, and when it changed in ns since 1970; 0 where nothing tells."""

    path: str
    size: int
    modified_ns: int


class Store:
    """A folder, local or remote, that the driver and every executor can read and write.

    Every path that a method takes is relative to the store and uses "/". A store pickles as its URL and
    options; what it has opened stays behind.
    """

    # Gives a new store as the process of a Connect session reaches it: (session, store) -> store. The package sets it,
    # because what it gives stands above this class.
    _opened_through: ClassVar[Callable[[Any, Store], Store]]

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Use `Store.create`, which also checks that the place can be written."""
        self._options = dict(storage_options or {})
        self._address = addresses.parse(url)
        # Without secrets: for messages, manifests and saved models.
        self.url = self._address.url
        self._filesystem: pafs.FileSystem | None = None
        self._opened = threading.local()
        self._device: int | None = None
        self._is_sequential: bool | None = None
        # The topmost folder that `create` has made, if it has.
        self._made = ""
        # Whether `create` has made the folder for this very object: a Connect session that comes later makes its own.
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
        given = os.fspath(path_or_url)
        if not isinstance(given, str) or not given.strip():
            raise InvalidArgumentError(
                f"Store.create({given!r}): give an absolute path or a URL, for example '/data/store' or "
                "'s3://bucket/prefix'."
            )
        store = cls(given, storage_options)
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
        hidden = ", storage_options=<hidden>" if self._options else ""
        return f"Store({self.url!r}{hidden})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Store):
            return NotImplemented
        return (self._address, self._options) == (other._address, other._options)

    def __hash__(self) -> int:
        return hash(self.url)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._address.full, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], state["options"])  # type: ignore[misc]  # rebuilds lazily opened parts

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder that this process sees as a path."""
        return self._address.scheme == "file"

    @property
    def direct(self) -> Store:
        """The store as a process that sees it uses it: this one, except for a client that does not."""
        return self

    @property
    def is_seen(self) -> bool:
        """Whether this process reads and writes the store itself."""
        return True

    @property
    def shares_files(self) -> bool:
        """Whether threads gain by reading one open file at the same time: each read is a request that waits for a server.

        Not so of drivers written in Python, whose files have one position.
        """
        return self.is_seen and not self.is_local and self._address.root is not None

    # -- reading -------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        with self._explained("read", path):
            info = self._fs.get_file_info(self._full(path))
        return bool(info.type != pafs.FileType.NotFound)

    def num_bytes(self, path: str) -> int:
        """The size of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._explained("read", path):
            info = self._fs.get_file_info(self._full(path))
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(f"{self.full_url(path)} is not there.")
        return int(info.size)

    def read_bytes(self, path: str) -> bytes:
        """The whole content of a file.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be read.
        """
        with self._explained("read", path):
            if self.is_local:
                return Path(self._full(path)).read_bytes()
            with self.open_input(path) as source:
                return bytes(source.read())

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access; the caller closes it."""
        with self._explained("read", path):
            return self._fs.open_input_file(self._full(path))

    def list(self, path: str = "", *, recursive: bool = False) -> Paths:
        """Paths in a folder, sorted; empty if it does not exist.

        Args:
            path: the folder.
            recursive: all files below it, instead of the files and folders directly in it.
        """
        selector = pafs.FileSelector(self._full(path), recursive=recursive, allow_not_found=True)
        found = []
        with self._explained("read", path):
            infos = self._fs.get_file_info(selector)
        for info in infos:
            if info.base_name.startswith(TEMPORARY):
                continue
            if recursive and info.type != pafs.FileType.File:
                continue
            found.append(posixpath.relpath(info.path, self._root))
        return sorted(found)

    def files(self) -> tuple[StoredFile, ...]:
        """Every file below the root, sorted by path; the root itself, as ".", if that is a file.

        Raises:
            FileNotFoundError: there is nothing.
        """
        with self._explained("read", ""):
            root = self._fs.get_file_info(self._root)
            if root.type == pafs.FileType.File:
                infos = [root]
            else:
                infos = self._fs.get_file_info(pafs.FileSelector(self._root, recursive=True))
        found = [
            StoredFile(posixpath.relpath(i.path, self._root), i.size or 0, i.mtime_ns or 0)
            for i in infos
            if i.type == pafs.FileType.File
        ]
        return tuple(sorted(found, key=lambda f: f.path))

    def last_change(self, path: str) -> float | None:
        """When a folder or something in it changed last, in s since 1970; None if it is not there, or nothing tells."""
        selector = pafs.FileSelector(self._full(path), recursive=True, allow_not_found=True)
        with self._explained("read", path):
            infos = [self._fs.get_file_info(self._full(path)), *self._fs.get_file_info(selector)]
        times = [i.mtime_ns for i in infos if i.mtime_ns]
        return max(times) / 1e9 if times else None

    def local_path(self, path: str) -> str | None:
        """The path of a file on this host, or None if the store is not a local folder."""
        return self._full(path) if self.is_local else None

    def full_url(self, path: str) -> str:
        """The URL of a path in the store, for messages and for Spark."""
        if not path:
            return self.url
        url, mark, query = self.url.partition("?")
        return f"{url.rstrip('/')}/{path}{mark}{query}"

    def waiting(self, limit_s: float) -> Store:
        """This store with another longest wait for one access, where accesses wait for task slots."""
        return self

    def below(self, path: str) -> Store:
        """A folder of this store, or a file, as a store of its own with the same options."""
        self._full(path)
        if self._address.root is not None:
            path = quote(path)
        elif "?" in path or "#" in path:
            raise InvalidArgumentError(
                f"{path!r} holds '?' or '#', which a URL of {self._address.scheme} cannot. Rename it."
            )
        url, mark, query = self._address.full.partition("?")
        return Store(f"{url.rstrip('/')}/{path}{mark}{query}", self._options)

    # -- writing -------------------------------------------------------------------------------------

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole file; readers see the old content or all of the new one."""
        with self.open_output(path) as sink:
            sink.write(data)

    @contextlib.contextmanager
    def open_output(self, path: str) -> Iterator[Any]:
        """Open a file for sequential writing; it appears under its name when the block ends without error.

        Raises:
            StoreError: the store refuses it: it is full, gone, unreachable or closed to this user.
        """
        sink: atomic.Sink | None = None
        try:
            full = self._full(path)
            self._make_folder(posixpath.dirname(full))
            with self._output(full) as sink:
                yield sink
        except SparkhvdError:
            raise
        except Exception as e:  # noqa: BLE001 - drivers of fsspec raise what they like
            cause = e if sink is None or sink.is_whole else sink.error
            if cause is None:  # the caller's own
                raise
            place = sink.place if sink is not None and not sink.is_whole else ""
            raise self._error("written", path, cause, place) from self._cause(cause)

    def _output(self, full: str) -> contextlib.AbstractContextManager[atomic.Sink]:
        parent, name = posixpath.split(full)
        temporary = posixpath.join(parent, f"{TEMPORARY}{uuid.uuid4().hex}-{name}")
        if self.is_local:
            if self._is_sequential is None:
                self._is_sequential = addresses.is_sequential(self._root)
            if self._is_sequential:
                return atomic.staged_output(lambda file: atomic.copy_in(file, full, temporary))
            return atomic.local_output(full, temporary)
        filesystem = self._fs
        if addresses.has_atomic_writes(self._address.scheme):
            return atomic.staged_output(lambda file: atomic.upload(file, filesystem, full))
        return atomic.remote_output(filesystem, full, temporary)

    def _make_folder(self, folder: str) -> None:
        if self.is_local:
            self._check_root()
            atomic.make_local_folder(folder, self._root)
        elif not addresses.has_atomic_writes(self._address.scheme):
            atomic.make_folder(self._fs, folder)

    def _check_root(self) -> None:
        """Refuse to make a folder of the store's name where the store has been: a file system that is mounted no more."""
        try:
            device = os.stat(f"{self._root}/.").st_dev  # the dot makes automounters mount
        except FileNotFoundError:
            raise StoreError(
                f"The store {self.url} is not there: {self._root} does not exist on this host. If it has vanished, mount "
                "it again; a new one is made by Store.create."
            ) from None
        if self._device is None:
            self._device = device
        elif device != self._device:
            raise StoreError(
                f"The store {self.url} has vanished: another file system is mounted at {self._root} than before. Mount "
                "it again, and try again: what is in it stays."
            )

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all it holds; nothing happens if there is none."""
        if not path.strip("/"):
            raise InvalidArgumentError(
                "Store.delete('') would delete the whole store. Name a path in it."
            )
        full = self._full(path)
        with (
            self._explained("cleaned", path),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            if not self.is_local:
                kind = self._fs.get_file_info(full).type
                if kind == pafs.FileType.Directory:
                    self._fs.delete_dir(full)
                elif kind != pafs.FileType.NotFound:
                    self._fs.delete_file(full)
            elif os.path.isdir(full) and not os.path.islink(full):
                # Another process may delete or still write in it; what stays is swept later.
                shutil.rmtree(full, ignore_errors=True)
            else:
                Path(full).unlink()

    def delete_if_empty(self, path: str) -> None:
        """Delete a folder unless something is in it, in one step: what another process just put there stays.

        Nothing happens where no such step exists, as on object stores, whose folders are names only, and on HDFS.
        """
        full = self._full(path)
        if self.is_local:
            with contextlib.suppress(OSError):
                os.rmdir(full)
        elif not addresses.has_atomic_writes(self._address.scheme):
            atomic.remove_empty_folder(self._fs, full)

    def delete_unfinished(self, path: str) -> None:
        """Delete what writers that were killed left directly in a folder; only for a folder with no writer now."""
        selector = pafs.FileSelector(self._full(path), allow_not_found=True)
        with self._explained("read", path):
            infos = self._fs.get_file_info(selector)
        for info in infos:
            if info.base_name.startswith(TEMPORARY) and info.type == pafs.FileType.File:
                self.delete(posixpath.relpath(info.path, self._root))

    # -- what is there -------------------------------------------------------------------------------

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
        trains on them. Models are never touched. What this user may not list, read or delete stays, and a warning names it.

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

    def data_directories(self) -> Paths:
        """Every folder `data/<key>/<owner>` in the store; where a key may not be listed, its folder `data/<key>`."""
        found = []
        for key in self._folders("data"):
            try:
                found += self._folders(key)
            except StoreError:  # of a user who shows it to nobody
                found.append(key)
        return found

    def _folders(self, path: str) -> Paths:
        selector = pafs.FileSelector(self._full(path), allow_not_found=True)
        with self._explained("read", path):
            infos = self._fs.get_file_info(selector)
        folders = [i.path for i in infos if i.type == pafs.FileType.Directory]
        return sorted(posixpath.relpath(folder, self._root) for folder in folders)

    # -- inside --------------------------------------------------------------------------------------

    @property
    def _fs(self) -> pafs.FileSystem:
        if self._address.root is not None:
            if self._filesystem is None:
                self._filesystem, _ = self._open()
            return self._filesystem
        # One per thread: connections of fsspec are not shared between threads.
        filesystem = getattr(self._opened, "filesystem", None)
        if filesystem is None:
            filesystem, root = self._open()
            self._opened.filesystem, self._opened.root = filesystem, root
        filesystem.handler.fs.invalidate_cache()  # other processes write, too
        return filesystem

    def _open(self) -> tuple[pafs.FileSystem, str]:
        try:
            return addresses.open_filesystem(self._address, self._options)
        except SparkhvdError:
            raise
        except Exception as e:  # noqa: BLE001 - drivers of fsspec raise what they like
            raise self._error("opened", "", e) from self._cause(e)

    @property
    def _root(self) -> str:
        if self._address.root is not None:
            return self._address.root
        self._fs  # noqa: B018 - opens it
        root: str = self._opened.root
        return root

    def _full(self, path: str) -> str:
        parts = path.split("/")
        if path.startswith("/") or "\\" in path or ".." in parts:
            raise InvalidArgumentError(
                f"{path!r} is not a path inside a store. Give a relative path without '..', for example "
                "'runs/1/metrics.jsonl'."
            )
        return (
            posixpath.join(self._root, *[p for p in parts if p and p != "."])
            if path
            else self._root
        )

    @contextlib.contextmanager
    def _explained(self, doing: str, path: str) -> Iterator[None]:
        """Turn what a file system raises into a `StoreError`; that a file is not there stays what it is."""
        try:
            yield
        except SparkhvdError:
            raise
        except (FileNotFoundError, NotADirectoryError) as e:
            if self._cause(e) is not None:
                raise
            raise type(e)(self.hide(str(e))) from None
        except Exception as e:  # noqa: BLE001 - drivers of fsspec raise what they like
            raise self._error(doing, path, e) from self._cause(e)

    def _error(self, doing: str, path: str, cause: Exception, place: str = "") -> StoreError:
        number = getattr(cause, "errno", None)
        where = f", on this host's disk in {place}, from where it would be copied" if place else ""
        remedy = (
            f"It is full: free space in {place or 'it'}"
            if number in _FULL
            else "Look whether it is there and may be written from this host"
        )
        # Before there is one, as when data are materialized, nothing of the training can be lost.
        is_checkpoint = path.startswith("runs/") and "/checkpoints" in path
        then = (
            "; a fit with the same run_id goes on from the last checkpoint"
            if is_checkpoint
            else ", and try again"
        )
        error = StoreError(
            f"The store {self.url} cannot be {doing} ({path or 'its folder'}{where}): {type(cause).__name__}: "
            f"{self.hide(str(cause))}. {remedy}{then}."
        )
        error.errno = number
        return error

    def _cause(self, error: Exception) -> Exception | None:
        """The error to show as the cause: none if it, or what it comes from, holds a secret."""
        here: BaseException | None = error
        while here is not None:
            for text in (str(here), repr(here)):
                if self.hide(text) != text:
                    return None
            here = here.__cause__ or here.__context__
        return error

    def hide(self, text: str) -> str:
        """The text without this store's passwords, keys and tokens."""
        secrets = addresses.secrets_of(self._address.full, self._options)
        for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
            text = text.replace(secret, "***")
        return text

    def prove_writable(self) -> None:
        """Make the folder, and write and delete a file in it.

        Raises:
            InvalidArgumentError: that is not possible.
        """
        root = self._address.root
        if self.is_local:
            assert root is not None
            addresses.check_databricks(root, self.url)
        probe = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
        try:
            if self.is_local:
                self._made = atomic.make_root(self._root)
            self._is_created = True
            self.write_bytes(probe, b"sparkhvd")
            self.delete(probe)
        except InvalidArgumentError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            cause = error.__cause__ if isinstance(error, StoreError) and error.__cause__ else error
            raise InvalidArgumentError(
                f"Store.create({self.url!r}): the place cannot be written: {type(cause).__name__}: "
                f"{self.hide(str(cause))}. Give a folder that this user may write, on a file system "
                "that the driver and all executors share."
            ) from self._cause(error)
