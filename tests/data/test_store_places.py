"""Stores in difficult places: mounts that allow one sequential pass, full and lost mounts, and secrets."""

from __future__ import annotations

import errno
import json
import os
import pickle
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sparkhvd import TorchEstimator
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.packed import read_packed, write_packed
from sparkhvd.data.store import addresses
from sparkhvd.data.store.remote import RemoteStore
from sparkhvd.data.store.store import Store
from sparkhvd.data.store.temporary import default_store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.estimator.saving.encoding import Archive
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.harness.mounts import tmpfs, unmount
from tests.harness.sequential_mount import sequential_mount

pytestmark = pytest.mark.pure

SECRET = "sw0rdfish/+="
QUOTED = "sw0rdfish%2F%2B%3D"


# --- mounts that take one sequential pass --------------------------------------------------------------------------


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.usefixtures("mounts")
def test_store_works_on_a_mount_without_append_or_seek(tmp_path: Path, renames: bool) -> None:
    with sequential_mount(tmp_path / "folder", tmp_path / "mount", renames=renames) as mount:
        for mode in ("ab", "r+b"):
            (mount / "probe").write_bytes(b"x")
            with pytest.raises(OSError, match="not supported"):
                open(mount / "probe", mode).close()
        store = Store.create(mount / "store")
        store.write_bytes("runs/r/a", b"one" * 1000)
        store.write_bytes("runs/r/a", b"two")
        assert store.read_bytes("runs/r/a") == b"two"
        with pytest.raises(RuntimeError), store.open_output("runs/r/a") as sink:  # noqa: PT012
            sink.write(b"half")
            raise RuntimeError("midway")
        assert store.read_bytes("runs/r/a") == b"two"
        column = Column("x", "scalar", "float32", (), "float", "float32")
        values = {"x": np.arange(100_000, dtype=np.float32)}
        write_packed(store, "data/k/a/part.parquet", [column], values)
        assert np.array_equal(read_packed(f"{mount}/store/data/k/a/part.parquet")["x"], values["x"])
        checkpoints = Checkpoints(store, "runs/r")
        for epoch in range(4):
            checkpoints.save(Checkpoint(epoch, {}, {}, None, [], "{}"))
        assert checkpoints.latest_position() == (3, 0)
        found = sorted(p.name for p in (tmp_path / "folder" / "store").rglob("*") if p.is_file())
        assert found == [
            "a",
            "epoch-2.pt",
            "epoch-3.pt",
            "latest.json",
            "metrics.jsonl",
            "part.parquet",
            "writer",
        ]


def test_databricks_folders_are_recognized_as_sequential_only() -> None:
    assert addresses.is_sequential("/Volumes/main/default/volume/store")
    assert addresses.is_sequential("/dbfs/store")
    assert not addresses.is_sequential("/")


@pytest.mark.parametrize(
    "given", ["/Volumes/no/such/volume/store", "dbfs:/Volumes/no/such/volume/store"]
)
def test_store_create_does_not_create_a_databricks_volume(given: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create(given)
    assert str(caught.value) == (
        "Store.create('file:///Volumes/no/such/volume/store'): there is no Volume /Volumes/no/such/volume here. Give "
        "a folder in an existing one, /Volumes/<catalog>/<schema>/<volume>/<folder>, on a Databricks cluster that "
        "may use it."
    )
    assert not os.path.exists("/Volumes")


# --- full, and gone ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mounts")
def test_error_names_a_full_store_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    import torch

    with tmpfs(tmp_path / "small", 1 << 20) as place:
        store = Store.create(place / "store")
        checkpoints = Checkpoints(store, "runs/r")

        def save(epoch: int, elements: int) -> None:
            model = {"w": torch.full((elements,), float(epoch))}
            checkpoints.save(Checkpoint(epoch, model, {}, None, [], "{}"))

        save(1, 1000)
        with pytest.raises(StoreError) as caught:
            save(2, 1 << 19)
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value) == (
            f"The store {store.url} cannot be written (runs/r/checkpoints/epoch-2.pt): OSError: [Errno 28] No space "
            "left on device. No space is left: free space in the store; a fit with the same run_id resumes from the last "
            "checkpoint."
        )
        with pytest.raises(
            StoreError, match="No space is left: free space in the store, and try again.$"
        ):
            store.write_bytes("data/k/a/part.parquet", bytes(2 << 20))
        found = Checkpoints(store, "runs/r").latest()
        assert found is not None
        assert found.epoch == 1
        # Incomplete files are deleted, so that there is room again.
        save(2, 2000)
        assert os.listdir(place / "store" / "runs/r/checkpoints") != []
        assert checkpoints.latest_position() == (2, 0)


def classic_session() -> object:
    """Make an object that is treated as a classic session."""
    kind = type("SparkSession", (), {"range": None, "__module__": "pyspark.sql.session"})
    return kind()


@pytest.mark.parametrize("below", ["", "store"])
@pytest.mark.usefixtures("mounts")
def test_an_unmounted_store_is_not_recreated(tmp_path: Path, below: str) -> None:
    with tmpfs(tmp_path / "mount", 1 << 20) as place:
        store = Store.create(place / below)
        store.write_bytes("runs/r/a", b"x")
        unmount(place)
        with pytest.raises(
            StoreError, match=f"The store {store.url} (does not exist|is not mounted any more)"
        ):
            store.write_bytes("runs/r/b", b"y")
        assert os.listdir(place) == []
        # A later process checks that the store's files exist.
        late = pickle.loads(pickle.dumps(store))
        # (An empty mount point may also be an empty store.)
        for given in (store, late) if below else (store,):
            with pytest.raises(StoreError, match="does not exist|is not mounted any more"):
                default_store(classic_session(), given).write_bytes("runs/r/b", b"y")
        assert os.listdir(place) == []
        with pytest.raises(FileNotFoundError):
            late.read_bytes("runs/r/a")


def test_writing_to_a_store_that_was_not_created_raises(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not on this host\. If its file system was unmounted"):
        Store(str(tmp_path / "no")).write_bytes("a", b"x")
    assert os.listdir(tmp_path) == []


def test_hdfs_without_hadoops_library_names_variables_to_set() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create("hdfs://namenode:8020/store")
    text = str(caught.value)
    assert text.startswith(
        "Store.create('hdfs://namenode:8020/store'): the folder cannot be written: OSError: "
    )
    for name in ("HADOOP_HOME", "libhdfs.so", "JAVA_HOME", "CLASSPATH", "hadoop classpath --glob"):
        assert name in text
    assert len(text.splitlines()) == 1


# --- secrets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "shown"),
    [
        (f"s3://AKIA:{QUOTED}@bucket/p", {}, "s3://bucket/p"),
        (
            f"s3://bucket/p?secret_key={SECRET}&region=us-east-1&endpoint_override=localhost:1",
            {},
            "s3://bucket/p?region=us-east-1&endpoint_override=localhost:1",
        ),
        ("s3://bucket/p/", {"access_key": "AKIA", "secret_key": SECRET}, "s3://bucket/p"),
        (f"ftp://user:{QUOTED}@host:21/p", {}, "ftp://host:21/p"),
        ("ftp://user@host:21/p", {"client": {"password": SECRET}}, "ftp://user@host:21/p"),
        ("abfss://container@account.dfs.core.windows.net/p", {"sas_token": SECRET}, None),
    ],
)
def test_url_repr_and_errors_contain_no_secret(
    url: str, options: dict[str, object], shown: str | None
) -> None:
    store = Store(url, options)
    assert store.url == (shown or url)
    assert SECRET not in repr(store) + store.full_url("runs/r")
    assert store.hide(f"403 for {SECRET}, {url}").count("sw0rdfish") == 0
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.hide(SECRET) == "***"


@pytest.mark.parametrize(
    "password", [SECRET, "/word", "12/word", "12?word", "1#word", "wo[rd", "a@b/word"]
)
@pytest.mark.parametrize("scheme", ["s3", "ftp"])
def test_an_unquoted_password_is_refused_and_hidden(scheme: str, password: str) -> None:
    url = f"{scheme}://AKIA:{password}@bucket/p"
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create(url)
    assert str(caught.value) == (
        f"Store.create('{scheme}://<hidden>'): the user or password before the '@' holds a character that is not allowed there. "
        "Quote it with urllib.parse.quote(password, safe=''), or give it as a storage option. If the '@' belongs to the "
        "path, write it as '%40'."
    )
    assert addresses.secrets_of(url, {}) == {url}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            f"s3://AKIA:{QUOTED}@bucket/p?region=r&allow_bucket_creation=true",
            {
                "access_key": "AKIA",
                "secret_key": SECRET,
                "region": "r",
                "allow_bucket_creation": True,
            },
        ),
        ("s3://bucket/p", {}),
        (
            "gs://anonymous@bucket/p?retry_limit_seconds=2.5&project_id=x",
            {"anonymous": True, "retry_time_limit": timedelta(seconds=2.5), "project_id": "x"},
        ),
        ("hdfs://me@host:8020/p?replication=2", {"user": "me", "replication": 2}),
        (
            f"abfss://container:{QUOTED}@account.dfs.core.windows.net/p",
            {"account_name": "account", "account_key": SECRET},
        ),
    ],
)
def test_store_options_are_read_from_the_url(url: str, said: dict[str, object]) -> None:
    assert addresses.url_options(url.partition(":")[0], url) == said


def test_every_store_call_names_an_unreachable_server() -> None:
    store = Store("ftp://localhost:1/p")
    calls = (store.list, store.files, lambda: store.exists("a"), lambda: store.delete("a"))
    for call in (*calls, lambda: store.delete_unfinished("a"), store.data_directories):
        with pytest.raises(StoreError, match="The store ftp://localhost:1/p cannot be opened"):
            call()


def test_store_accepts_urls_with_port_or_at_sign() -> None:
    for url in (
        "ftp://host:21/p",
        "s3://bucket/a@b",
        "abfss://container@account.dfs.core.windows.net/p",
    ):
        assert Store(url).url == url


def test_secret_that_begins_with_another_secret_is_hidden_completely() -> None:
    options = {f"key{i}": "AKIAKEY" + "rest-of-it" * i for i in range(8)}
    assert Store("s3://bucket/p", options).hide("sent AKIAKEY" + "rest-of-it" * 7) == "sent ***"


def test_errors_of_missing_files_and_of_tasks_hide_secrets() -> None:
    store = Store("memory://place", {"password": SECRET})
    for raised in (FileNotFoundError(f"no {SECRET}"), NotADirectoryError(SECRET)):
        with pytest.raises(type(raised)) as caught, store._place.explained("read", "a"):
            raise raised
        assert SECRET not in str(caught.value)
        assert caught.value.__suppress_context__
    outer = OSError("it failed")
    outer.__cause__ = ValueError(SECRET)
    with pytest.raises(StoreError) as failed, store._place.explained("read", "a"):
        raise outer
    assert failed.value.__cause__ is None

    class Task:
        """A session and a DataFrame whose single row says that a file is missing."""

        __module__ = "pyspark.sql.connect"  # which distinguishes sessions
        conf: dict[str, str] = {}  # nothing is set
        is_stopped = False
        client = SimpleNamespace(get_config_with_defaults=lambda *pairs: tuple(None for _ in pairs))

        def __getattr__(self, name: str) -> object:
            return lambda *_: self

        def getTags(self) -> set[str]:  # noqa: N802 - Spark's name
            return set()

        def collect(self) -> list[dict[str, object]]:
            failed = {"error": "FileNotFoundError", "text": f"no {SECRET}"}
            return [{"part": -2, "data": json.dumps(failed).encode()}]

    with pytest.raises(FileNotFoundError, match=r"^no \*\*\*$"):
        RemoteStore(store, Task()).exists("a")


def test_store_param_shows_no_password() -> None:
    estimator = TorchEstimator(store=f"ftp://user:{QUOTED}@host/p")
    assert "sw0rdfish" not in estimator.explainParams() + str(
        Archive().encode("store", estimator.getStore())
    )
    assert TorchEstimator(store="/a/path").getStore() == "/a/path"


def test_error_of_unreachable_store_hides_its_password() -> None:
    url = f"ftp://user:{QUOTED}@localhost:1/p"
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create(url)
    assert "ftp://localhost:1/p" in str(caught.value)
    assert "cannot be written: ConnectionRefusedError" in str(caught.value)
    assert SECRET not in str(caught.value)
