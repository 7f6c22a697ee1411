"""Stores on servers at loopback: S3 through pyarrow, FTP through fsspec, and servers that stop."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import RowSource, write_packed
from sparkhvd.data.parquet.dataset import open_dataset
from sparkhvd.data.parquet.manifest import read_manifest
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.store.atomic import upload
from sparkhvd.data.store.locks import acquire
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.harness.servers import S3, SECRET, cable

pytestmark = [pytest.mark.processes, pytest.mark.leaks("file systems keep their connections open")]


@pytest.fixture(params=["s3", "ftp", "fsspec"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    if request.param == "s3":
        server: S3 = request.getfixturevalue("s3")
        yield Store.create(f"s3://bucket/unit-{time.monotonic_ns()}", **server.options())
    elif request.param == "ftp":
        yield Store.create(f"{request.getfixturevalue('ftp')}/deep/store")
    else:
        yield Store.create(f"local://{tmp_path_factory.mktemp('fsspec')}/deep/store")


def test_remote_store_reads_writes_lists_and_deletes(served: Store) -> None:
    assert SECRET not in served.url
    assert served.list("runs") == []
    assert not served.exists("runs/1/a")
    for path in ("runs/1/a", "runs/1/deep/b", "runs/2/c"):
        served.write_bytes(path, b"one")
    served.write_bytes("runs/1/a", b"two")
    assert served.read_bytes("runs/1/a") == b"two"
    assert served.list("runs") == ["runs/1", "runs/2"]
    assert served.list("runs", recursive=True) == ["runs/1/a", "runs/1/deep/b", "runs/2/c"]
    with pytest.raises(FileNotFoundError):
        served.read_bytes("runs/none")
    with pytest.raises(RuntimeError), served.open_output("runs/1/a") as sink:  # noqa: PT012
        sink.write(b"half")
        raise RuntimeError("midway")
    assert served.read_bytes("runs/1/a") == b"two"
    served.delete("runs/1")
    served.delete("runs/never")
    served.delete("runs/2/c")
    assert served.list("runs", recursive=True) == []


def test_aborted_writer_neither_publishes_nor_deletes_files(
    served: Store,
) -> None:
    with pytest.raises(KeyboardInterrupt), served.open_output("models/a") as sink:  # noqa: PT012
        sink.write(b"half")
        served.write_bytes("models/a", b"whole")
        raise KeyboardInterrupt
    assert served.read_bytes("models/a") == b"whole"
    seen = []
    with pytest.raises(RuntimeError), served.open_output("models/b") as sink:  # noqa: PT012
        sink.write(b"half")
        finish = sink.finish

        def looking() -> None:
            finish()
            seen.append(served.exists("models/b"))

        sink.finish = looking
        raise RuntimeError("midway")
    assert True not in seen
    assert served.list("models", recursive=True) == ["models/a"]


def test_interrupted_upload_is_completed(s3: S3) -> None:
    """pyarrow cannot abort the upload of an object, so an interrupted upload is completed."""

    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() == 2 << 20 and not self.is_interrupted:
                self.is_interrupted = True
                raise KeyboardInterrupt
            return super().read(1 << 20)

        is_interrupted = False

    store = Store.create("s3://bucket/interrupted", **s3.options())
    data = bytes(range(256)) * (16 << 10)
    with pytest.raises(KeyboardInterrupt):
        upload(Interrupted(data), store._place.fs, "bucket/interrupted/a")
    assert store.read_bytes("a") == data


def test_store_options_and_url_parameters_combine(s3: S3) -> None:
    given = {name: quote(str(value), safe="") for name, value in s3.options().items()}
    query = f"endpoint_override={given['endpoint_override']}&scheme={given['scheme']}"
    url = f"s3://{given['access_key']}:{given['secret_key']}@bucket/url?{query}"
    Store.create(url, region="us-east-1").write_bytes("a", b"x")
    assert Store.create("s3://bucket/url", **s3.options()).read_bytes("a") == b"x"


def test_ordinary_parquet_is_read_from_a_remote_store(served: Store) -> None:
    for day in range(2):
        table = pa.table({"id": np.arange(day * 1000, (day + 1) * 1000)})
        with served.open_output(f"table/day={day}/part.parquet") as sink:
            pq.write_table(table, sink, row_group_size=300)
    dataset = open_dataset(served.below("table"))
    schema = check_schema(dataset.schema, feature_cols=["id", "day"], label_cols=[])
    rows = np.array([3, 299, 300, 999, 1000, 1999])
    with ParquetSource(dataset.store, read_manifest(dataset, schema)) as source:
        found = source.read(["id", "day"], rows)
    np.testing.assert_array_equal(found["id"], rows)
    np.testing.assert_array_equal(found["day"], rows // 1000)


def test_rows_and_checkpoints_are_read_back_from_a_remote_store(served: Store) -> None:
    column = Column("x", "scalar", "float32", (), "float", "float32")
    values = np.arange(200_000, dtype=np.float32)
    file = write_packed(
        served, "data/k/a/part.parquet", [column], {"x": values}, row_group_bytes=1 << 18
    )
    manifest = Manifest((file,), DataSchema((column,), ()), len(values))
    with RowSource(served, manifest) as source:
        rows = np.array([0, 77_777, 199_999], np.int64)
        assert np.array_equal(source.read(["x"], rows)["x"], values[rows])
        assert np.array_equal(source.read(["x"])["x"], values)
    checkpoints = Checkpoints(served, "runs/r")
    for epoch in range(4):
        checkpoints.save(Checkpoint(epoch, {}, {}, None, [{"epoch": 1}], "{}"))
    found = Checkpoints(served, "runs/r").latest()
    assert found is not None
    assert found.epoch == 3
    assert checkpoints.history() == [{"epoch": 1}]
    with acquire(served, "r"):
        with pytest.raises(InvalidArgumentError, match="held by another fit"):
            acquire(served, "r")
        (run,) = served.runs()
        assert (run.run_id, run.state, run.epochs) == ("r", "running", 3)
    (run,) = served.runs()
    assert run.state == "interrupted"
    assert run.num_bytes > 0
    served.delete_run("r")
    assert served.runs() == ()


def test_error_names_a_stopped_server_without_its_key(s3: S3) -> None:
    with cable(s3.port) as line:
        store = Store.create("s3://bucket/gone", **s3.options(line.port))
        store.write_bytes("runs/r/a", b"x")
        line.cut()
        with pytest.raises(StoreError) as caught:
            store.write_bytes("runs/r/checkpoints/b", b"y")
        assert str(caught.value).startswith(
            "The store s3://bucket/gone cannot be written (runs/r/checkpoints/b): "
        )
        assert "a fit with the same run_id resumes from the last checkpoint" in str(caught.value)
        with pytest.raises(StoreError, match="The store s3://bucket/gone cannot be read"):
            store.read_bytes("runs/r/a")
        with pytest.raises(InvalidArgumentError, match="the folder cannot be written"):
            Store.create("s3://bucket/gone", **s3.options(line.port))


def test_a_missing_bucket_and_unknown_options_raise_a_clear_error(s3: S3) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"Store\.create\('s3://none/p'\): the folder cannot be written"
    ):
        Store.create("s3://none/p", **s3.options())
    with pytest.raises(InvalidArgumentError) as caught:
        Store.create("s3://bucket/p", secret=SECRET, key="AKIA")
    assert "the folder cannot be written: TypeError" in str(caught.value)
    assert SECRET not in str(caught.value)
