"""Stores of `horovod.spark.common.store`: their paths and files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from sparkhvd.data.store.store import Store as OwnStore
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.horovod.spark.common.store import FilesystemStore, LocalStore, Store


def test_paths_are_urls_below_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    root = f"file://{tmp_path}/store"
    assert store.prefix_path == root
    assert store.get_train_data_path() == f"{root}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{root}/intermediate_val_data.3"
    assert store.get_run_path("mine") == f"{root}/runs/mine"
    assert store.to_remote("mine").logs_path == f"{root}/runs/mine/logs"
    assert store.saving_runs()


def test_files_go_by_any_form_of_their_path(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    assert isinstance(store, LocalStore)
    assert isinstance(store, Store)
    store.write_text(f"{store.get_run_path('mine')}/notes.txt", "a")
    for path in ("runs/mine/notes.txt", str(tmp_path / "runs/mine/notes.txt"), f"file://{tmp_path}/runs/mine/notes.txt"):  # fmt: skip
        assert store.exists(path)
        assert store.read(path) == b"a"
    assert not store.exists("runs/other")
    assert not store.is_parquet_dataset(store.get_train_data_path())
    with pytest.raises(InvalidArgumentError, match="is not in the store"):
        store.exists("/somewhere/else")


def test_ranks_get_a_store_without_horovods_names(tmp_path: Path) -> None:
    store = FilesystemStore(str(tmp_path))
    assert type(pickle.loads(pickle.dumps(store))) is OwnStore
    assert pickle.loads(pickle.dumps(store)) == store


def test_other_folders_for_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="FilesystemStore: data and runs of a store are"):
        FilesystemStore(str(tmp_path), runs_path="/elsewhere")
