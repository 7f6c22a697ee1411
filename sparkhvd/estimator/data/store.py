"""Where data, checkpoints and logs live: one interface over local paths, object stores and HDFS.

Layout below the store's root:

    data/<key>/<app>/            materialized data of one application, with a lease file
    runs/<run_id>/               checkpoints/, logs/, attempts/, metrics.jsonl of one fit
    models/<sha256>              immutable files; no cleanup of data or runs touches them

A file appears whole or not at all: local files and HDFS are written under a temporary name and renamed, an
object store shows an object only when its upload has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from sparkhvd.errors import InvalidArgumentError

__all__ = ["LEASE_NAME", "LEASE_S", "Lease", "Store", "StoredFile"]

LEASE_NAME = "_lease.json"
# An owner that has not renewed its lease for a day is gone: a fit renews it every hour.
LEASE_S = 24 * 3600.0
Paths = list[str]  # inside Store, `list` is a method
# Names that begin so are files being written; nobody lists or reads them.
TEMPORARY = ".sparkhvd-tmp-"

# Schemes that pyarrow.fs opens itself; all others go through fsspec.
_PYARROW_SCHEMES = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}


@dataclass(frozen=True)
class Lease:
    """Who owns a data directory, and until when nobody else may delete it."""

    app_id: str
    renewed: float
    keep: bool = False

    def is_expired(self, now: float) -> bool:
        """Whether the owner has been silent for so long that it must be gone."""
        return not self.keep and now - self.renewed > LEASE_S


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

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Use `Store.create`, which also checks that the place can be written."""
        self._options = dict(storage_options or {})
        self.url, self._root, self._scheme = _parse(url)
        self._filesystem: pafs.FileSystem | None = None

    @classmethod
    def create(cls, path_or_url: str | os.PathLike[str], **storage_options: Any) -> Store:
        """Open the store at a path or URL, creating the folder, and prove that it can be written.

        Args:
            path_or_url: an absolute path ("/data/store", "/Volumes/main/default/store", "dbfs:/store") or a URL
                ("file:///...", "s3://bucket/prefix", "gs://", "hdfs://", "abfss://", or any scheme of fsspec).
            **storage_options: credentials and such, handed to the file system (pyarrow.fs where it knows the
                scheme, else fsspec). They never appear in `repr` or in an error.

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
        store._prove_writable(given)
        return store

    def __repr__(self) -> str:
        hidden = ", storage_options=<hidden>" if self._options else ""
        return f"Store({self.url!r}{hidden})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Store):
            return NotImplemented
        return (self.url, self._options) == (other.url, other._options)

    def __hash__(self) -> int:
        return hash(self.url)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], state["options"])  # type: ignore[misc]  # rebuilds lazily opened parts

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder that this process sees as a path."""
        return self._scheme == "file"

    # -- reading -------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        info = self._fs.get_file_info(self._full(path))
        return bool(info.type != pafs.FileType.NotFound)

    def read_bytes(self, path: str) -> bytes:
        """The whole content of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        if self.is_local:
            return Path(self._full(path)).read_bytes()
        with self.open_input(path) as source:
            return bytes(source.read())

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for random access; the caller closes it."""
        return self._fs.open_input_file(self._full(path))

    def list(self, path: str = "", *, recursive: bool = False) -> Paths:
        """Paths in a folder, sorted; empty if it does not exist.

        Args:
            path: the folder.
            recursive: all files below it, instead of the files and folders directly in it.
        """
        selector = pafs.FileSelector(self._full(path), recursive=recursive, allow_not_found=True)
        found = []
        for info in self._fs.get_file_info(selector):
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

    def local_path(self, path: str) -> str | None:
        """The path of a file on this host, or None if the store is not a local folder."""
        return self._full(path) if self.is_local else None

    def full_url(self, path: str) -> str:
        """The URL of a path in the store, for messages and for Spark."""
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    def below(self, path: str) -> Store:
        """A folder of this store, or a file, as a store of its own with the same options."""
        self._full(path)
        url, mark, query = self.url.partition("?")
        return Store(f"{url.rstrip('/')}/{path}{mark}{query}", self._options)

    # -- writing -------------------------------------------------------------------------------------

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole file; readers see the old content or all of the new one."""
        with self.open_output(path) as sink:
            sink.write(data)

    @contextlib.contextmanager
    def open_output(self, path: str) -> Iterator[Any]:
        """Open a file for sequential writing; it appears under its name when the block ends without error."""
        full = self._full(path)
        parent, name = posixpath.split(full)
        if self.is_local:
            Path(parent).mkdir(parents=True, exist_ok=True)
        elif self._has_folders:
            self._fs.create_dir(parent, recursive=True)
        temporary = posixpath.join(parent, f"{TEMPORARY}{uuid.uuid4().hex}-{name}")
        target = temporary if self._has_rename else full
        # Nothing is flushed to the device: a store outlives processes, and a lost machine loses the run anyway.
        sink = open(target, "wb") if self.is_local else self._fs.open_output_stream(target)  # noqa: SIM115
        try:
            yield sink
        except BaseException:
            with contextlib.suppress(OSError):
                sink.close()
            with contextlib.suppress(OSError):
                self._fs.delete_file(target)
            raise
        sink.close()
        if self.is_local:
            os.replace(target, full)
        elif self._has_rename:
            self._fs.move(target, full)

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all it holds; nothing happens if there is none."""
        if not path.strip("/"):
            raise InvalidArgumentError(
                "Store.delete('') would delete the whole store. Name a path in it."
            )
        full = self._full(path)
        if self.is_local:
            if os.path.isdir(full) and not os.path.islink(full):
                # Another process may delete or still write in it; what stays is swept later.
                shutil.rmtree(full, ignore_errors=True)
            else:
                Path(full).unlink(missing_ok=True)
            return
        kind = self._fs.get_file_info(full).type
        if kind == pafs.FileType.Directory:
            self._fs.delete_dir(full)
        elif kind != pafs.FileType.NotFound:
            self._fs.delete_file(full)

    def delete_unfinished(self, path: str) -> None:
        """Delete what writers that were killed left directly in a folder; only for a folder with no writer now."""
        selector = pafs.FileSelector(self._full(path), allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            if info.base_name.startswith(TEMPORARY) and info.type == pafs.FileType.File:
                self.delete(posixpath.relpath(info.path, self._root))

    def clean(self, *, runs: bool = False, now: float | None = None) -> Paths:
        """Delete materialized data that nobody uses: kept data, and data whose owner is gone.

        Data of an application whose lease is alive stay. Models are never touched.

        Args:
            runs: also delete the folders of all runs (checkpoints, logs, outcomes).
            now: the moment to compare leases with; None means now.

        Returns:
            The paths that were deleted.
        """
        now = time.time() if now is None else now
        deleted = []
        for directory in self.data_directories():
            lease = self.lease(directory)
            if lease is not None and (lease.keep or lease.is_expired(now)):
                self.delete(directory)
                deleted.append(directory)
        if runs:
            for run in self.list("runs"):
                self.delete(run)
                deleted.append(run)
        return deleted

    # -- leases --------------------------------------------------------------------------------------

    def data_directories(self) -> Paths:
        """Every `data/<key>/<app>` in the store."""
        return [owner for key in self.list("data") for owner in self.list(key)]

    def lease(self, data_dir: str) -> Lease | None:
        """The lease of a data directory, or None if it has none (yet)."""
        try:
            return Lease(**json.loads(self.read_bytes(f"{data_dir}/{LEASE_NAME}")))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_lease(self, data_dir: str, lease: Lease) -> None:
        """Say who owns a data directory."""
        self.write_bytes(f"{data_dir}/{LEASE_NAME}", json.dumps(asdict(lease)).encode())

    # -- inside --------------------------------------------------------------------------------------

    @property
    def _fs(self) -> pafs.FileSystem:
        if self._filesystem is None:
            self._filesystem = _open_filesystem(self._scheme, self.url, self._options)
        return self._filesystem

    @property
    def _has_rename(self) -> bool:
        """Whether a rename is one atomic step; in object stores it is a copy."""
        return self._scheme in ("file", "hdfs", "viewfs")

    @property
    def _has_folders(self) -> bool:
        return self._scheme not in ("s3", "gs", "abfs", "abfss")

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

    def _prove_writable(self, given: str) -> None:
        probe = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
        try:
            self.write_bytes(probe, b"sparkhvd")
            self.delete(probe)
        except (OSError, pa.ArrowException, ImportError) as error:
            raise InvalidArgumentError(
                f"Store.create({_without_secret(given)!r}): the place cannot be written: "
                f"{type(error).__name__}: {error}. Give a folder that this user may write, on a file system "
                "that the driver and all executors share."
            ) from error


def _parse(url: str) -> tuple[str, str, str]:
    """(url without secrets or trailing slash, root path for the file system, scheme)."""
    scheme, colon, rest = url.partition(":")
    if url.startswith("/") or not colon or "/" in scheme:
        return _parse_local(url, url)
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise InvalidArgumentError(
                f"Store.create({url!r}): {parts.netloc!r} stands where a host would. Give three slashes: "
                f"'file:///{parts.netloc}{parts.path}'."
            )
        return _parse_local(unquote(parts.path), url)
    if scheme == "dbfs":
        path = "/" + rest.lstrip("/")
        # Databricks shows its file system as a folder; Volumes are folders of their own.
        return _parse_local(path if path.startswith("/Volumes/") else f"/dbfs{path}", url)
    if not rest.startswith("//"):
        raise InvalidArgumentError(
            f"Store.create({_without_secret(url)!r}): this is neither an absolute path nor a URL like "
            "'s3://bucket/prefix'."
        )
    parts = urlsplit(url)
    if scheme not in _PYARROW_SCHEMES and not _fsspec_knows(scheme):
        raise InvalidArgumentError(
            f"Store.create({_without_secret(url)!r}): unknown scheme {scheme!r}. Known are absolute paths, "
            f"file, dbfs, {', '.join(sorted(_PYARROW_SCHEMES))} and the schemes of fsspec (pip install fsspec "
            "and its driver for yours)."
        )
    query = f"?{parts.query}" if parts.query else ""
    path = unquote(parts.path).rstrip("/")
    if scheme in ("hdfs", "viewfs"):
        root = path or "/"
    elif "@" in parts.netloc and scheme in ("abfs", "abfss"):
        root = parts.netloc.split("@")[0] + path
    elif scheme == "memory":
        root = f"/{parts.netloc}{path}"
    else:
        root = parts.netloc.split("@")[-1] + path
    return f"{scheme}://{parts.netloc}{path}{query}", root, scheme


def _parse_local(path: str, given: str) -> tuple[str, str, str]:
    if not path.startswith("/"):
        raise InvalidArgumentError(
            f"Store.create({given!r}): the path is relative, so each process would see another folder. Give an "
            f"absolute path, for example {os.path.abspath(path)!r}."
        )
    root = posixpath.normpath(path)
    if root == "/":
        raise InvalidArgumentError(
            f"Store.create({given!r}): this is the root of the file system. Give a folder for the store."
        )
    if root.startswith("/dbfs/") and not os.path.isdir("/dbfs"):
        raise InvalidArgumentError(
            f"Store.create({given!r}): there is no /dbfs here, so this is not a Databricks cluster with the "
            "DBFS folder. Give a path or URL that this machine can reach."
        )
    return Path(root).as_uri(), root, "file"


def _open_filesystem(scheme: str, url: str, options: Mapping[str, Any]) -> pafs.FileSystem:
    if scheme == "file":
        return pafs.LocalFileSystem()
    if scheme in _PYARROW_SCHEMES:
        if scheme == "s3" and options:
            return pafs.S3FileSystem(**options)
        if scheme == "gs" and options:
            return pafs.GcsFileSystem(**options)
        if scheme in ("hdfs", "viewfs") and options:
            parts = urlsplit(url)
            return pafs.HadoopFileSystem(parts.hostname or "default", parts.port or 8020, **options)
        if scheme in ("abfs", "abfss") and options:
            return pafs.AzureFileSystem(**options)
        return pafs.FileSystem.from_uri(url)[0]
    import fsspec

    return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem(scheme, **options)))


def _fsspec_knows(scheme: str) -> bool:
    try:
        import fsspec
    except ImportError:
        return False
    return scheme in fsspec.available_protocols()


def _without_secret(url: str) -> str:
    """The URL with "user:password@" and the query removed: both may hold a key."""
    parts = urlsplit(url)
    if not parts.scheme or ("@" not in parts.netloc and not parts.query):
        return url
    host = (
        parts.netloc.rpartition("@")[2] if ":" in parts.netloc.rpartition("@")[0] else parts.netloc
    )
    return f"{parts.scheme}://{host}{parts.path}"
