"""Stores of `horovod.spark.common.store`: their paths and files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd.data.store.store import Store as OwnStore
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.horovod.spark.common.estimator import checked_for_fit
from sparkhvd.horovod.spark.common.store import (
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
)

pytestmark = pytest.mark.pure


def test_store_paths_are_urls_below_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    root = f"file://{tmp_path}/store"
    assert store.prefix_path == root
    assert store.get_train_data_path() == f"{root}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{root}/intermediate_val_data.3"
    assert store.get_run_path("mine") == f"{root}/runs/mine"
    assert store.to_remote("mine").logs_path == f"{root}/runs/mine/logs"
    assert store.saving_runs()


def test_store_accepts_any_form_of_a_file_path(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    assert isinstance(store, LocalStore)
    assert isinstance(store, Store)
    store.write_text(f"{store.get_run_path('mine')}/notes.txt", "a")
    for path in ("runs/mine/notes.txt", str(tmp_path / "runs/mine/notes.txt"), f"file://{tmp_path}/runs/mine/notes.txt"):  # fmt: skip
        assert store.exists(path)
        assert store.read(path) == b"a"
    assert not store.exists("runs/other")
    assert not store.is_parquet_dataset(store.get_train_data_path())
    assert not store.exists("/somewhere/else")


def test_files_of_a_local_folder_are_copied_on_driver_and_ranks(tmp_path: Path) -> None:
    store = FilesystemStore(str(tmp_path / "store"))
    remote = pickle.loads(pickle.dumps(store.to_remote("mine")))
    with remote.get_local_output_dir() as folder:
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "logs" / "x").write_text("a")
        remote.sync(folder)
        store.copy(f"{folder}/logs/x", str(tmp_path / "beside" / "y"))
    assert not Path(folder).exists()
    assert store.read(f"{remote.logs_path}/x") == b"a"
    assert (tmp_path / "beside" / "y").read_text() == "a"
    full = pickle.loads(pickle.dumps(store.get_full_path_fn()))
    assert full("runs/mine") == full(f"{tmp_path}/store/runs/mine") == remote.run_path


@pytest.mark.parametrize("scheme", ["file", "local"])  # of pyarrow, and of fsspec alone
def test_store_file_system_accepts_localized_paths(scheme: str, tmp_path: Path) -> None:
    store = FilesystemStore(f"{scheme}://{tmp_path}/store")
    store.write_text("a b", "1")
    path = store.get_localized_path(f"{store.prefix_path}/a b")
    assert path == f"{tmp_path}/store/a b"
    assert store.fs.exists(path)
    with store.fs.open(path, "rb") as file:
        assert file.read() == b"1"


def test_store_opens_its_parquet_dataset(tmp_path: Path) -> None:
    store = FilesystemStore(str(tmp_path))
    folder = tmp_path / "intermediate_train_data"
    folder.mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), folder / "0.parquet")
    data = store.get_parquet_dataset(store.get_train_data_path())
    assert data.read().column("x").to_pylist() == [1, 2]
    with pytest.raises(NotImplementedError, match=r"Take get_parquet_dataset\(path\)\.schema\.$"):
        store.get_data_metadata_path()


def test_pickled_horovod_store_becomes_a_plain_store(tmp_path: Path) -> None:
    store = FilesystemStore(str(tmp_path))
    assert type(pickle.loads(pickle.dumps(store))) is OwnStore
    assert pickle.loads(pickle.dumps(store)) == store


def test_data_and_runs_folders_may_be_outside_the_store(tmp_path: Path) -> None:
    store = Store.create(
        str(tmp_path / "store"),
        train_path=str(tmp_path / "rows"),
        runs_path=f"file://{tmp_path}/all/of them",
        save_runs=False,
    )
    assert store.get_train_data_path() == f"file://{tmp_path}/rows"
    assert store.get_train_data_path(2) == f"file://{tmp_path}/rows.2"
    assert store.get_val_data_path() == f"file://{tmp_path}/store/intermediate_val_data"
    assert store.get_run_path("mine") == f"file://{tmp_path}/all/of%20them/mine"
    assert not store.saving_runs()
    assert store.get_checkpoint_path("mine") is None
    assert store.to_remote("mine").logs_path is None
    store.write_text(f"{store.get_run_path('mine')}/notes.txt", "a")
    store.write_text(f"{store.get_train_data_path()}/x.parquet", "")
    assert (tmp_path / "all" / "of them" / "mine" / "notes.txt").read_text() == "a"
    assert store.is_parquet_dataset(store.get_train_data_path())
    assert not (tmp_path / "store" / "runs").exists()

    on_rank = pickle.loads(pickle.dumps(store))
    assert on_rank == store
    assert on_rank != OwnStore(str(tmp_path / "store"))
    assert on_rank.list("runs") == ["runs/mine"]
    assert on_rank.list("runs", recursive=True) == ["runs/mine/notes.txt"]
    assert [file.path for file in on_rank.below("runs/mine").files()] == ["notes.txt"]
    assert on_rank.local_path("runs/mine/logs") == str(tmp_path / "all" / "of them" / "mine/logs")
    on_rank.delete("runs/mine")
    assert list((tmp_path / "all" / "of them").iterdir()) == []


def test_runs_of_an_object_store_may_be_elsewhere_in_its_bucket() -> None:
    from sparkhvd.data.store.moved import StoreWithRuns

    store = StoreWithRuns("s3://bucket/a?region=x", None, "s3://bucket/b/c")
    assert store.full_url("runs/mine") == "s3://bucket/b/c/mine"
    assert store.full_url("data") == "s3://bucket/a/data?region=x"
    assert store._place.full("runs/mine/x") == "bucket/b/c/mine/x"
    assert store._place.relative("bucket/b/c/mine") == "runs/mine"
    assert store._place.full("runs2") == "bucket/a/runs2"
    with pytest.raises(InvalidArgumentError, match="in another file system than the store"):
        StoreWithRuns("s3://bucket/a", None, "s3://other/b")


class Own(LocalStore):
    def get_runs_path(self) -> str:
        return f"{self.prefix_path}/of-mine"


def test_overridden_path_methods_are_used(tmp_path: Path) -> None:
    store = checked_for_fit(Own(str(tmp_path)))
    assert store.get_logs_path("a") == f"file://{tmp_path}/of-mine/a/logs"
    store.write_bytes("runs/a/x", b"1")
    assert (tmp_path / "of-mine" / "a" / "x").exists()
    assert store.get_checkpoints("a") == []
    plain = LocalStore(str(tmp_path))
    assert checked_for_fit(plain) is plain
    assert type(pickle.loads(pickle.dumps(plain))) is OwnStore


def test_overridden_run_paths_that_a_fit_cannot_use_raise(tmp_path: Path) -> None:
    class Checkpoints(LocalStore):
        def get_checkpoint_path(self, run_id: str) -> str:
            return f"/elsewhere/{run_id}"

    with pytest.raises(
        InvalidArgumentError,
        match=r"Checkpoints.get_checkpoint_path\('a-run'\) is '/elsewhere/a-run', which a fit would not use: it writes to file:",
    ):
        checked_for_fit(Checkpoints(str(tmp_path)))

    class Dated(LocalStore):
        def get_run_path(self, run_id: str) -> str:
            return f"{self.prefix_path}/{run_id}/today"

    with pytest.raises(InvalidArgumentError, match="and a run is a folder with the name of its"):
        checked_for_fit(Dated(str(tmp_path)))

    class Placeless(Store):
        def __init__(self) -> None:
            pass

    with pytest.raises(InvalidArgumentError, match="store is a Placeless, whose __init__ has not"):
        checked_for_fit(Placeless())


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("dbfs:/a/b", "file:///dbfs/a/b"),
        ("dbfs:///a", "file:///dbfs/a"),
        ("/dbfs/a", "file:///dbfs/a"),
        ("/dbfs", "file:///dbfs"),
        ("file:/dbfs/a", "file:///dbfs/a"),
        ("file:///dbfs/a b", "file:///dbfs/a b"),
        ("/dbfsx/a", None),
        ("/a/dbfs/b", None),
        ("hdfs:///dbfs/a", None),
    ],
)
def test_all_forms_of_a_dbfs_path_give_the_same_url(path: str, url: str | None) -> None:
    assert DBFSLocalStore.matches_dbfs(path) == (url is not None)
    if url is not None:
        assert DBFSLocalStore.normalize_path(path) == url
        return
    with pytest.raises(ValueError, match=f"{path!r} is not in DBFS. Give a path such as '/dbfs/"):
        DBFSLocalStore.normalize_path(path)


@pytest.mark.parametrize("url", ["file:///tmp/a", "file:/tmp/a", "s3://bucket/a", "dbfs:/a"])
def test_hdfs_store_refuses_other_file_systems(url: str) -> None:
    with pytest.raises(
        ValueError, match=f"HDFSStore: '{url}' is not in HDFS. Give a path or a URL"
    ):
        HDFSStore(url)
