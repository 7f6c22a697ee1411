"""Horovod's `horovod.spark.common.store`: sparkhvd's store with Horovod's path methods.

The store opens every kind of place by its URL. The path methods return URLs; arguments are these URLs or paths
relative to the store.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pyarrow.fs as pafs
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper

from sparkhvd import as_horovod
from sparkhvd.data.store import addresses
from sparkhvd.data.store import store as own
from sparkhvd.data.store.moved import StoreWithRuns
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.horovod.spark.common.util import host_hash, is_databricks
from sparkhvd.spark import connect_session

# Arguments of `FilesystemStore` besides the place and storage options.
_ARGUMENTS = (
    *("train_path", "val_path", "test_path", "runs_path", "save_runs"),
    *("storage_options", "checkpoint_filename"),
)

# Prefixes of DBFS paths.
_DBFS = re.compile(r"(dbfs:/+|(file:(//)?)?/dbfs(/+|$))")

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
    "bare_url",
    "host_hash",
    "is_databricks",
]


class Store(StoreWithRuns):
    """Store with Horovod's methods. `Store.create(path_or_url, **storage_options)` opens it."""

    # Data folders passed to the constructor.
    _folders: Mapping[str, str] = MappingProxyType({})
    _save_runs = True

    @classmethod
    def create(cls, path_or_url: str | os.PathLike[str], *names: Any, **options: Any) -> Any:
        """Open the store at a path or URL. The address determines its class.

        Args:
            path_or_url: absolute path or URL; the folder is made.
            *names: further arguments of `FilesystemStore`.
            **options: the same by name; all others are storage options, see `sparkhvd.Store.create`.
        """
        named = {name: options.pop(name) for name in _ARGUMENTS if name in options}
        if connect_session() is not None and not names and not named:
            return own.Store.create(path_or_url, **options)
        if options:
            named["storage_options"] = {**(named.get("storage_options") or {}), **options}
        address = os.fspath(path_or_url)
        if DBFSLocalStore.matches_dbfs(address):
            return DBFSLocalStore(address, *names, **named)
        kind = HDFSStore if address.startswith("hdfs://") else FilesystemStore
        return kind(address, *names, **named)

    # --- saved files

    def described(self) -> dict[str, Any]:
        """Describe the store for a saved estimator or model: the folders of its methods, in place of its subclass."""
        folders = {r: getattr(self, f"get_{r}_data_path")(None) for r in ("train", "val", "test")}
        runs = bare_url(self._absolute(self.get_run_path("a-run"))).rpartition("/")[0]
        moved = None if runs == bare_url(own.Store.full_url(self, "runs")) else runs
        return {"folders": folders, "runs": moved, "save_runs": self.saving_runs()}

    @classmethod
    def from_description(cls, store: str, runs: str | None = None, **places: Any) -> own.Store:
        """Open the store at a URL, as `described`."""
        made = Store(store, runs=runs)
        made._folders, made._save_runs = places.get("folders", {}), places.get("save_runs", True)
        return made

    # --- paths

    @property
    def prefix_path(self) -> str:
        """URL of the store."""
        return self.url

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Folder of training data for `fit_on_parquet`. `idx` is the index of a data set."""
        return self._data("train", idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Folder of validation data for `fit_on_parquet`. `idx` is the index of a data set."""
        return self._data("val", idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        return self._data("test", idx)

    def _data(self, role: str, idx: int | None) -> str:
        folder = self._folders.get(role) or self.full_url(f"intermediate_{role}_data")
        return folder if idx is None else _appended(folder, f".{idx}")

    def saving_runs(self) -> bool:
        """Whether runs are kept after their fit."""
        return self._save_runs

    def get_runs_path(self) -> str:
        return self.full_url("runs")

    def get_run_path(self, run_id: str) -> str:
        return _appended(self.get_runs_path(), f"/{run_id}")

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Folder of a run's checkpoints, or None if runs are not kept."""
        run = self.get_run_path(run_id)
        return _appended(run, "/checkpoints") if self.saving_runs() else None

    def get_checkpoint_filename(self) -> str:
        """Name of the file with a pointer to a run's newest checkpoint."""
        return "latest.json"

    def get_checkpoints(self, run_id: str, suffix: str = ".pt") -> list[str]:
        """List the files of a run's checkpoints."""
        found = self.list(f"runs/{run_id}/checkpoints")
        return [self.full_url(path) for path in found if path.endswith(suffix)]

    def get_logs_path(self, run_id: str) -> str | None:
        """Folder of a run's logs, or None if runs are not kept."""
        run = self.get_run_path(run_id)
        return _appended(run, f"/{self.get_logs_subdir()}") if self.saving_runs() else None

    def get_logs_subdir(self) -> str:
        """Name of the folder of logs in a run's folder."""
        return "logs"

    def get_full_path(self, path: str) -> str:
        """URL of a path."""
        place, relative = Store._located(self, path)
        return place.full_url(relative)

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Make a function for ranks that computes `get_full_path`."""
        return functools.partial(Store.get_full_path, self)

    def get_localized_path(self, path: str) -> str:
        """Path of a file or folder in `fs`."""
        place, relative = self._located(path)
        return place._place.full(relative)

    def _located(self, path: str) -> tuple[own.Store, str]:
        """Find the store of a path, and the path in it.

        A path elsewhere is in the store of its folder.
        """
        root = own.Store.local_path(self, "") or ""
        for prefix in (self.url, root, f"file://{root}", f"file:{root}"):
            if prefix and (path == prefix or path.startswith(f"{prefix.rstrip('/')}/")):
                return self, path.removeprefix(prefix.rstrip("/")).strip("/")
        runs = self.full_url("runs")
        if (url := Store._absolute(self, path)) == runs or url.startswith(f"{runs}/"):
            return self, f"runs{url.removeprefix(runs)}"
        if "://" in path or os.path.isabs(path):
            folder, name = addresses.split(url)
            return own.Store(folder, self._place.options), name
        return self, path

    def _absolute(self, path: str) -> str:
        """Make an absolute path a URL in the store's file system. A relative path stays."""
        if os.path.isabs(path) and not self.is_local:
            path = urlsplit(self.url)._replace(path=path, query="").geturl()
        return own.Store(path).url if os.path.isabs(path) or "://" in path else path

    # --- files

    @property
    def fs(self) -> Any:
        """The file system, with fsspec's methods."""
        opened = self._place.fs
        is_fsspec = isinstance(opened, pafs.PyFileSystem)
        return opened.handler.fs if is_fsspec else ArrowFSWrapper(opened)

    def exists(self, path: str) -> bool:
        """Whether a file or folder exists."""
        place, relative = self._located(path)
        return own.Store.exists(place, relative)

    def read(self, path: str) -> bytes:
        place, relative = self._located(path)
        return place.read_bytes(relative)

    def write_text(self, path: str, text: str) -> None:
        """Write a text file in UTF-8."""
        place, relative = self._writable(path)
        place.write_bytes(relative, text.encode())

    def copy(self, lpath: str | os.PathLike[str], rpath: str, recursive: bool = False) -> None:
        """Copy a local file to a path, or with `recursive` the content of a local folder."""
        source = Path(lpath)
        for file in [source, *source.rglob("*")] if recursive else [source]:
            if file.is_dir() and recursive:
                continue
            below = "" if file == source else f"/{file.relative_to(source).as_posix()}"
            place, relative = Store._writable(self, _appended(rpath, below))
            with file.open("rb") as content, place.open_output(relative) as sink:
                shutil.copyfileobj(content, sink)

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Make a function, also for ranks, to copy the content of a local folder to a run's folder."""
        return functools.partial(Store.copy, self, rpath=self.get_run_path(run_id), recursive=True)

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """Make a function to make a local folder, deleted at the end of its `with`."""
        del run_id
        return tempfile.TemporaryDirectory

    def _writable(self, path: str) -> tuple[own.Store, str]:
        """Locate a path like `_located`, and make the folder of a path outside of the store."""
        place, relative = Store._located(self, path)
        if place is not self:
            place.prove_writable()
        return place, relative

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether a folder holds Parquet files, at any depth."""
        place, relative = self._located(path)
        files = place.list(relative, recursive=True)
        return any(name.endswith((".parquet", ".pq")) for name in files)

    def get_parquet_dataset(self, path: str) -> pq.ParquetDataset:
        """Open a folder of Parquet files."""
        place, relative = self._located(path)
        return pq.ParquetDataset(place._place.full(relative), filesystem=place._place.fs)

    get_data_metadata_path = as_horovod.stub(
        "horovod.spark.common.store.Store.get_data_metadata_path",
        "no metadata are kept beside the data. Take get_parquet_dataset(path).schema",
    )
    read_serialized_keras_model = as_horovod.stub(
        "horovod.spark.common.store.Store.read_serialized_keras_model",
        "read a KerasModel by its load()",
    )

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> SimpleNamespace:
        """Paths of a run as plain attributes, for functions on ranks."""
        return SimpleNamespace(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )


class FilesystemStore(Store):
    """Store at a path or URL of any file system.

    Args:
        prefix_path: absolute path or URL; the folder is made.
        train_path: folder of training data for `fit_on_parquet` and data modules; a data set's index is appended after a dot.
        val_path: folder of validation data.
        test_path: folder of test data.
        runs_path: folder of the runs, in the store's file system.
        save_runs: whether runs are kept after their fit, with checkpoints and logs.
        storage_options: credentials and other options.
        checkpoint_filename: of Horovod; without effect.

    Raises:
        InvalidArgumentError: the place cannot be written, or `runs_path` is in another file system.
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, object] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        del checkpoint_filename
        super().__init__(os.fspath(prefix_path), storage_options)
        given = {"train": train_path, "val": val_path, "test": test_path}
        self._folders = {
            role: self._absolute(path) for role, path in given.items() if path is not None
        }
        self._save_runs = save_runs
        if runs_path is not None:
            self._move_runs(self._absolute(runs_path))
        self.prove_writable()


AbstractFilesystemStore = FilesystemStore
LocalStore = FilesystemStore


class DBFSLocalStore(FilesystemStore):
    """Store in DBFS: "/dbfs/..." or "dbfs:/..."."""

    @staticmethod
    def matches_dbfs(path: str) -> bool:
        """Whether a path or URL is in DBFS."""
        return re.match(_DBFS, path) is not None

    @staticmethod
    def normalize_path(path: str) -> str:
        """File URL of a path in DBFS: "file:///dbfs/...".

        Raises:
            InvalidArgumentError: it is not in DBFS.
        """
        if not DBFSLocalStore.matches_dbfs(path):
            raise InvalidArgumentError(
                f"DBFSLocalStore: {path!r:.200} is not in DBFS. Give a path such as '/dbfs/...' or 'dbfs:/...'."
            )
        return f"file:///dbfs/{re.sub(_DBFS, '', path)}".rstrip("/")


class HDFSStore(FilesystemStore):
    """Store in HDFS.

    Args:
        prefix_path: path, or URL with its host.
        host: of the name node; None: that of Hadoop's configuration.
        port: its port.
        user: user for access.
        kerb_ticket: path of a ticket's cache.
        **names: others as of `FilesystemStore`; `driver` and `extra_conf` have no effect.

    Raises:
        InvalidArgumentError: the URL is of another file system.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        **names: Any,
    ) -> None:
        for name in ("driver", "extra_conf"):
            names.pop(name, None)
        address, scheme = prefix_path, urlsplit(prefix_path).scheme
        if scheme not in ("", "hdfs", "viewfs"):
            raise InvalidArgumentError(
                f"HDFSStore: {prefix_path!r:.200} is not in HDFS. Give a path or a URL of hdfs://, or open it by Store.create()."
            )
        if not scheme:
            place = "" if host is None else host if port is None else f"{host}:{port}"
            address = f"hdfs://{place}/{prefix_path.lstrip('/')}"
        words = {"user": user, "kerb_ticket": kerb_ticket}
        query = "&".join(f"{name}={value}" for name, value in words.items() if value)
        super().__init__(f"{address}?{query}" if query else address, **names)


def _appended(url: str, text: str) -> str:
    """Append a text to the path of a URL."""
    path, mark, query = url.partition("?")
    return f"{path}{text}{mark}{query}"


def bare_url(url: str) -> str:
    """Remove the query and final slashes."""
    return url.partition("?")[0].rstrip("/")
