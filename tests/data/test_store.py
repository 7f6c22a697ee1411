from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow.fs as pafs
import pytest

from sparkhvd.data import ownership
from sparkhvd.data.ownership import remove as remove_directory
from sparkhvd.data.ownership import sweep
from sparkhvd.data.store import connect, remote
from sparkhvd.data.store.atomic import remote_output
from sparkhvd.data.store.locks import LEASE_S, Lease, lease_of, write_lease
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.pure


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def memory_store() -> Store:
    return Store.create(f"memory://bucket-{os.urandom(4).hex()}/prefix")


@pytest.fixture(params=["local", "memory"])
def any_store(request: pytest.FixtureRequest) -> Store:
    name = {"local": "store", "memory": "memory_store"}[request.param]
    found: Store = request.getfixturevalue(name)
    return found


def test_store_create_makes_an_empty_folder(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert os.listdir(tmp_path / "a" / "b") == []
    assert store.url == f"file://{tmp_path}/a/b"
    assert store.local_path("runs/1/x") == f"{tmp_path}/a/b/runs/1/x"


def test_store_create_accepts_path_and_file_url_as_the_same_store(tmp_path: Path) -> None:
    by_path = Store.create(tmp_path / "with space")
    by_url = Store.create(f"file://{tmp_path}/with%20space/")
    assert by_path == by_url
    assert hash(by_path) == hash(by_url)


def test_store_create_refuses_a_relative_path() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create("some/where")
    assert str(caught.value) == (
        "Store.create('some/where'): the path is relative, so each process would use another folder. "
        f"Give an absolute path, for example '{os.getcwd()}/some/where'."
    )


def test_store_create_refuses_an_unknown_scheme() -> None:
    with pytest.raises(InvalidArgumentError, match=r"unknown scheme 'gopher'\. Known are absolute"):
        Store.create("gopher://host/path")


@pytest.mark.parametrize("given", ["", "  ", "/", "file://host/path", "s3:bucket"])
def test_store_create_refuses_paths_that_name_no_folder(given: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Store\.create"):
        Store.create(given)


def test_store_create_refuses_dbfs_outside_databricks() -> None:
    with pytest.raises(InvalidArgumentError, match="there is no /dbfs here"):
        Store.create("dbfs:/store")


def test_store_create_refuses_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create(tmp_path / "file" / "store")
    assert "the folder cannot be written: NotADirectoryError" in str(caught.value)
    assert "Give a folder that this user may write" in str(caught.value)


def test_store_errors_and_repr_hide_secrets() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create("gopher://user:secret@host/path?key=secret")
    assert "secret" not in str(caught.value)
    store = Store("s3://bucket/prefix", {"secret_key": "secret"})
    assert repr(store) == "Store('s3://bucket/prefix', storage_options=<hidden>)"


def test_store_reads_back_written_bytes(any_store: Store) -> None:
    assert not any_store.exists("runs/1/a")
    any_store.write_bytes("runs/1/a", b"one")
    any_store.write_bytes("runs/1/a", b"two")
    assert any_store.exists("runs/1/a")
    assert any_store.read_bytes("runs/1/a") == b"two"
    with any_store.open_input("runs/1/a") as source:
        source.seek(1)
        assert source.read() == b"wo"


def test_reading_a_missing_file_raises(any_store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        any_store.read_bytes("runs/none")


def test_store_lists_and_deletes_paths(any_store: Store) -> None:
    assert any_store.list("runs") == []
    for path in ("runs/1/a", "runs/1/deep/b", "runs/2/c"):
        any_store.write_bytes(path, b"x")
    assert any_store.list("runs") == ["runs/1", "runs/2"]
    assert any_store.list("runs", recursive=True) == ["runs/1/a", "runs/1/deep/b", "runs/2/c"]
    any_store.delete("runs/1")
    any_store.delete("runs/never")
    any_store.delete("runs/2/c")
    assert any_store.list("runs", recursive=True) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "a\\b"])
def test_paths_outside_the_store_are_refused(store: Store, path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a path inside a store"):
        store.read_bytes(path)


@pytest.mark.parametrize("path", ["", "/", "//", ".", "./", ".//."])
def test_deleting_the_whole_store_is_refused(store: Store, path: str) -> None:
    store.write_bytes("runs/a", b"kept")
    with pytest.raises(InvalidArgumentError, match="would delete the whole store"):
        store.delete(path)
    assert store.read_bytes("runs/a") == b"kept"


def test_file_is_visible_only_after_a_complete_write(store: Store, tmp_path: Path) -> None:
    store.write_bytes("runs/a", b"old")
    with pytest.raises(RuntimeError, match="midway"), store.open_output("runs/a") as sink:  # noqa: PT012
        sink.write(b"half")
        assert store.read_bytes("runs/a") == b"old"
        assert store.list("runs") == ["runs/a"]
        raise RuntimeError("midway")
    assert store.read_bytes("runs/a") == b"old"
    assert os.listdir(tmp_path / "store" / "runs") == ["a"]


class Moves(pafs.FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """fsspec's local driver behind a connection or a server that refuses some renames."""

    def __init__(self, refused: list[bool]) -> None:
        super().__init__(fsspec.filesystem("file"))
        self.refused = refused

    def move(self, src: str, dest: str) -> None:
        """Rename, or refuse if the plan says so."""
        if self.refused.pop(0) if self.refused else False:
            raise OSError("Failure")
        super().move(src, dest)


@pytest.mark.parametrize(
    ("refused", "content", "files"),
    [
        ([True], b"new", ["a"]),  # a server that does not rename over a file
        ([True, True], b"old", ["a"]),  # a line that is lost
        ([True, False, True], b"old", ["a"]),
    ],
)
def test_a_failed_rename_loses_no_file(
    tmp_path: Path, refused: list[bool], content: bytes, files: list[str]
) -> None:
    (tmp_path / "a").write_bytes(b"old")
    filesystem = pafs.PyFileSystem(Moves(refused))
    with (
        contextlib.suppress(OSError),
        remote_output(filesystem, f"{tmp_path}/a", f"{tmp_path}/temporary") as sink,
    ):
        sink.write(b"new")
    assert (tmp_path / "a").read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == files


def test_error_names_a_file_that_could_not_be_moved_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    filesystem = pafs.PyFileSystem(Moves([True, False, True, True]))
    with (
        pytest.raises(OSError, match="the earlier file is now .*/temporary-older"),
        remote_output(filesystem, f"{tmp_path}/a", f"{tmp_path}/temporary") as sink,
    ):
        sink.write(b"new")
    assert (tmp_path / "temporary-older").read_bytes() == b"old"


def test_concurrent_writers_never_show_readers_mixed_content(store: Store) -> None:
    size = 1 << 16
    stop = threading.Event()
    store.write_bytes("runs/a", b"0" * size)

    def write(letter: bytes) -> None:
        while not stop.is_set():
            store.write_bytes("runs/a", letter * size)

    writers = [threading.Thread(target=write, args=(c,)) for c in (b"1", b"2")]
    for thread in writers:
        thread.start()
    try:
        for _ in range(200):
            seen = store.read_bytes("runs/a")
            assert len(seen) == size
            assert len(set(seen)) == 1
    finally:
        stop.set()
        for thread in writers:
            thread.join()


def test_a_store_pickles_without_its_open_files(store: Store) -> None:
    store.write_bytes("models/x", b"m")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.read_bytes("models/x") == b"m"


def test_deleting_a_missing_path_succeeds(any_store: Store) -> None:
    any_store.write_bytes("runs/1/a", b"x")
    any_store.delete("runs/1/a/below a file")
    any_store.delete("runs/none/at/all")
    assert any_store.list("runs", recursive=True) == ["runs/1/a"]


def test_delete_if_empty_keeps_a_folder_with_files(any_store: Store) -> None:
    any_store.write_bytes("data/k/a", b"x")
    any_store.delete_if_empty("data/k")
    any_store.delete_if_empty("data/none")
    assert any_store.read_bytes("data/k/a") == b"x"
    any_store.delete("data/k/a")
    any_store.delete_if_empty("data/k")
    assert any_store.list("data") == []


def test_concurrent_owners_of_one_data_key_lose_no_lease(store: Store) -> None:
    """An owner deletes its folder, and the key's folder if it is empty, while another owner begins there."""
    rounds, ended, lost = 300, threading.Event(), []

    def comes_and_goes(name: str, times: int) -> None:
        try:
            for _ in range(times):
                write_lease(store, f"data/k/{name}", Lease(name, 1.0))
                if lease_of(store, f"data/k/{name}") is None:
                    lost.append(f"{name}'s lease")
                remove_directory(store, f"data/k/{name}")
                if ended.is_set():
                    return
        except Exception as e:  # noqa: BLE001 - the thread's outcome
            lost.append(repr(e))
        finally:
            ended.set()

    threads = [
        threading.Thread(target=comes_and_goes, args=("a", rounds)),
        threading.Thread(target=comes_and_goes, args=("b", 1 << 30)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []


def test_unknown_files_in_the_data_folder_are_ignored(any_store: Store) -> None:
    any_store.write_bytes("data/.DS_Store", b"x")
    any_store.write_bytes("data/k/README", b"x")
    any_store.write_bytes(
        "data/k/a/_lease.json", b'{"app_id": "a", "renewed": 5, "host": "of a later version"}'
    )
    any_store.write_bytes("data/k/b/_lease.json", b"[]")
    any_store.write_bytes("data/k/c/_lease.json", b'{"renewed": {}}')
    assert any_store.data_directories() == ["data/k/a", "data/k/b", "data/k/c"]
    assert lease_of(any_store, "data/k/a") == Lease("a", 5.0)
    assert lease_of(any_store, "data/k/b") is lease_of(any_store, "data/k/c") is None
    assert sweep(any_store, now=6.0 + LEASE_S) == ["data/k/a"]


def test_data_without_a_lease_expire_after_a_day_without_changes(store: Store) -> None:
    store.write_bytes("data/k/cut off/part-0.parquet", b"x")
    now = time.time()
    assert store.clean(now=now + LEASE_S - 60) == sweep(store, now=now + LEASE_S - 60) == []
    assert sweep(store, now=now + LEASE_S + 60) == ["data/k/cut off"]
    store.write_bytes("data/k/cut off/part-0.parquet", b"x")
    assert store.clean(now=now + LEASE_S + 60) == ["data/k/cut off"]


def test_failing_store_does_not_prevent_release_of_other_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Store):
        def delete(self, path: str) -> None:
            raise RuntimeError(path)

    monkeypatch.setattr(ownership, "_owned", ownership._Owned())
    stores = [
        Store.create(tmp_path / "a"),
        Store.create(tmp_path / "b"),
        Store.create(tmp_path / "c"),
    ]
    stores[1] = Failing(stores[1].url)
    for store in stores:
        ownership.own(store, "data/k/a", Lease("a", time.time()))
    ownership.release()
    assert [store.data_directories() for store in stores] == [[], ["data/k/a"], []]


def test_leases_are_renewed_while_data_are_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_owned", ownership._Owned())
    monkeypatch.setattr(ownership, "_RETRY_S", 0.01)
    ownership.own(store, "data/k/a", Lease("a", 1.0))
    with ownership.renewing(store):
        wait_until(
            lambda: lease_of(store, "data/k/a") != Lease("a", 1.0),
            "the lease is renewed",
            within_s=10,
        )


@pytest.mark.parametrize("name", ["a b", "x#y", "100%", "what?", "%41"])
def test_folder_with_any_name_can_be_a_store(store: Store, name: str) -> None:
    store.write_bytes(f"{name}/deep/file", b"x")
    below = store.below(name).below("deep")
    assert below.read_bytes("file") == b"x"
    assert below.local_path("") == store.local_path(f"{name}/deep")
    assert Store("s3://bucket/p?region=r").below(name)._place.address.root == f"bucket/p/{name}"


def test_fsspec_store_refuses_folder_names_with_url_delimiters(memory_store: Store) -> None:
    with pytest.raises(InvalidArgumentError, match="a URL of memory cannot"):
        memory_store.below("x#y")


def test_options_of_a_local_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create(tmp_path / "a", acess_key="secret")
    assert "takes no storage options, and acess_key is given" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_only_empty_folders_created_by_this_store_are_removed(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "a" / "b" / "c")
    (tmp_path / "a" / "of another").mkdir()
    with pytest.warns(UserWarning, match="the empty folder on this machine is removed"):
        connect._forget_own_folder(store)
    assert os.listdir(tmp_path / "a") == ["of another"]


def test_default_store_is_readable_only_by_its_user(tmp_path: Path) -> None:
    for _ in range(2):
        list(remote.make_private(Store(str(tmp_path / "a" / "b"))))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@contextlib.contextmanager
def as_user(number: int) -> Iterator[None]:
    """Access files in this thread as another user, whose new files others cannot read."""
    mask = os.umask(0o077)
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.umask(mask)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_unreadable_data_of_other_users_cause_no_error() -> None:
    old = time.time() - 2 * LEASE_S
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = f"{folder}/store"
        os.mkdir(root)
        os.chmod(root, 0o755)  # shared by its users
        store = Store.create(root)
        for made in ("data", "data/common", "runs"):
            os.mkdir(f"{root}/{made}")
            os.chmod(f"{root}/{made}", 0o777)
        write_lease(store, "data/open/app", Lease("root", old))  # all may read it
        os.chmod(f"{root}/data/open", 0o755)
        os.chmod(f"{root}/data/open/app", 0o755)
        with as_user(1001):
            write_lease(store, "data/hidden/app", Lease("hidden", old))
            write_lease(store, "data/common/hidden", Lease("hidden", old))
            store.write_bytes("runs/hidden/metrics.jsonl", b"x")
        with as_user(1002):
            store = Store(root)
            write_lease(store, "data/common/own", Lease("own", old))
            assert sweep(store, now=time.time()) == ["data/common/own"]
            write_lease(store, "data/common/own", Lease("own", old))
            with pytest.warns(UserWarning, match="Store.clean: 4 folders of") as warned:
                assert store.clean(runs=True) == ["data/common/own"]
            stay = "data/common/hidden, data/hidden, data/open/app, runs/hidden. Ask their owners"
            assert stay in str(warned[0].message)
        # Nothing keeps root from it.
        assert set(Store(root).clean(runs=True)) == {
            "data/common/hidden",
            "data/hidden/app",
            "data/open/app",
            "runs/hidden",
        }


def test_clean_deletes_kept_and_abandoned_data_only(store: Store) -> None:
    now = time.time()
    write_lease(store, "data/k/alive", Lease("alive", now))
    write_lease(store, "data/k/kept", Lease("kept", now - 9 * LEASE_S, keep=True))
    write_lease(store, "data/k/gone", Lease("gone", now - 2 * LEASE_S))
    store.write_bytes("data/k/unknown/part-0.parquet", b"x")
    store.write_bytes("models/abc", b"m")
    store.write_bytes("runs/1/metrics.jsonl", b"{}")
    store.write_bytes("keras_runs/2/state", b"s")

    assert store.clean(now=now) == ["data/k/gone", "data/k/kept"]
    assert store.data_directories() == ["data/k/alive", "data/k/unknown"]
    assert store.exists("runs/1/metrics.jsonl")

    assert store.clean(runs=True, now=now) == ["runs/1", "keras_runs/2"]
    assert store.exists("models/abc")


def test_new_store_is_private_and_existing_store_keeps_permissions(tmp_path: Path) -> None:
    Store.create(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    Store.create(tmp_path / "shared").write_bytes("x", b"")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
