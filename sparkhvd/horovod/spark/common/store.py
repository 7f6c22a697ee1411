"""Horovod's `horovod.spark.common.store`: sparkhvd's store, which opens every kind of place by its URL, with Horovod's names of paths.

Paths that these methods give are URLs; methods that take a path take one of these, or one relative to the store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sparkhvd.data.store import store as own
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.sessions import connect_session

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
]


class Store(own.Store):
    """Store with Horovod's methods; `Store.create(path_or_url, **storage_options)` opens one."""

    @classmethod
    def create(cls, path_or_url: str | os.PathLike[str], **storage_options: Any) -> Any:
        """Open the store at a path or URL, of the kind that it needs; see `sparkhvd.Store.create`."""
        if connect_session() is not None:
            return own.Store.create(path_or_url, **storage_options)
        address = os.fspath(path_or_url)
        if address.startswith(("dbfs:/", "/dbfs/", "file:/dbfs/")):
            return DBFSLocalStore(address, storage_options=storage_options)
        kind = HDFSStore if address.startswith("hdfs://") else FilesystemStore
        return kind(address, storage_options=storage_options)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks need none of Horovod's names, nor the class of a program's own store.
        state = own.Store.__getstate__(self)
        return own.Store, (state["url"], state["options"])

    # --- paths

    @property
    def prefix_path(self) -> str:
        """URL of the store."""
        return self.url

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of training data for `fit_on_parquet`, of a data set by its index."""
        return self._data("train", idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of validation data for `fit_on_parquet`."""
        return self._data("val", idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the folder of test data."""
        return self._data("test", idx)

    def _data(self, role: str, idx: int | None) -> str:
        name = f"intermediate_{role}_data"
        return self.full_url(name if idx is None else f"{name}.{idx}")

    def saving_runs(self) -> bool:
        """Return True: runs have a folder each."""
        return True

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return self.full_url("runs")

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run."""
        return self.full_url(f"runs/{run_id}")

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the folder of a run's checkpoints."""
        return self.full_url(f"runs/{run_id}/checkpoints")

    def get_checkpoint_filename(self) -> str:
        """Return the name of the file that points to a run's newest checkpoint."""
        return "latest.json"

    def get_checkpoints(self, run_id: str, suffix: str = ".pt") -> list[str]:
        """List the files of a run's checkpoints."""
        found = self.list(f"runs/{run_id}/checkpoints")
        return [self.full_url(path) for path in found if path.endswith(suffix)]

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's logs."""
        return self.full_url(f"runs/{run_id}/logs")

    def get_logs_subdir(self) -> str:
        """Return the name of the folder of logs in a run's."""
        return "logs"

    def get_full_path(self, path: str) -> str:
        """Return the URL of a path."""
        return self.full_url(self._relative(path))

    def _relative(self, path: str) -> str:
        """Return a path relative to the store.

        Raises:
            InvalidArgumentError: it is a place outside the store.
        """
        root = own.Store.local_path(self, "") or ""
        for prefix in (self.url, root, f"file://{root}", f"file:{root}"):
            if prefix and (path == prefix or path.startswith(f"{prefix.rstrip('/')}/")):
                return path.removeprefix(prefix.rstrip("/")).strip("/")
        if "://" in path or os.path.isabs(path):
            raise InvalidArgumentError(
                f"{path!r} is not in the store {self.url}. Give a path below it."
            )
        return path

    # --- files

    def exists(self, path: str) -> bool:
        """Return True if a file or folder exists."""
        return super().exists(self._relative(path))

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return self.read_bytes(self._relative(path))

    def write_text(self, path: str, text: str) -> None:
        """Write a file."""
        self.write_bytes(self._relative(path), text.encode())

    def is_parquet_dataset(self, path: str) -> bool:
        """Return True if a folder holds Parquet files."""
        files = self.list(self._relative(path), recursive=True)
        return any(name.endswith((".parquet", ".pq")) for name in files)

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> SimpleNamespace:
        """Return the paths of a run as plain attributes, for a function that runs on ranks."""
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
        )


class FilesystemStore(Store):
    """Store at a path or URL of any file system.

    Args:
        prefix_path: absolute path or URL; the folder is made.
        *paths: `train_path`, `val_path`, `test_path`, `runs_path` of Horovod's: only None is possible.
        save_runs: only True is possible.
        storage_options: credentials and such.

    Raises:
        InvalidArgumentError: the place cannot be written, or another folder for data or runs is given.
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        *paths: str | None,
        save_runs: bool = True,
        storage_options: Mapping[str, object] | None = None,
        **names: object,
    ) -> None:
        if not save_runs or any(value is not None for value in (*paths, *names.values())):
            raise InvalidArgumentError(
                f"{type(self).__name__}: data and runs of a store are in its folders intermediate_*_data and runs, and runs are always "
                "saved. Give prefix_path and storage_options alone."
            )
        super().__init__(os.fspath(prefix_path), storage_options)
        self.prove_writable()


AbstractFilesystemStore = FilesystemStore
LocalStore = FilesystemStore


class DBFSLocalStore(FilesystemStore):
    """Store in DBFS: "/dbfs/..." or "dbfs:/..."."""


class HDFSStore(FilesystemStore):
    """Store in HDFS.

    Args:
        prefix_path: path, or URL with its host.
        host: of the name node; None: that of Hadoop's configuration.
        port: its port.
        user: as who it is written.
        kerb_ticket: path of a ticket's cache.
        **names: `save_runs` and `storage_options` as of `FilesystemStore`; `driver` and `extra_conf` have no effect.
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
        address = prefix_path
        if "://" not in prefix_path:
            place = "" if host is None else host if port is None else f"{host}:{port}"
            address = f"hdfs://{place}/{prefix_path.lstrip('/')}"
        words = {"user": user, "kerb_ticket": kerb_ticket}
        query = "&".join(f"{name}={value}" for name, value in words.items() if value)
        super().__init__(f"{address}?{query}" if query else address, **names)
