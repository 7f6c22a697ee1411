from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import DataFile, Manifest
from sparkhvd.data.packed import PackedWriter, RowSource, read_packed, write_packed
from sparkhvd.data.packed.rows import together
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError

pytestmark = pytest.mark.pure

X = Column("a.x", "array", "float32", (3,), "array<float>", "float32")
Y = Column("y", "scalar", "int64", (), "bigint", "int64")
ROW_BYTES = 3 * 4 + 8


def data(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    return {"a.x": rng.random((rows, 3), dtype=np.float32), "y": np.arange(rows)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def make(
    store: Store, rows_per_file: list[int], group_rows: int = 100
) -> tuple[Manifest, dict[str, np.ndarray]]:
    values = data(sum(rows_per_file))
    files, at = [], 0
    for i, rows in enumerate(rows_per_file):
        part = {n: v[at : at + rows] for n, v in values.items()}
        path = f"data/k/app/part-{i:05d}-0.parquet"
        files.append(
            write_packed(store, path, [X, Y], part, row_group_bytes=group_rows * ROW_BYTES)
        )
        at += rows
    manifest = Manifest(tuple(files), DataSchema((X,), (Y,)), at)
    manifest.save(store, "data/k/app")
    return manifest, values


def test_rows_are_read_back_from_several_files_and_row_groups(store: Store, tmp_path: Path) -> None:
    manifest, values = make(store, [250, 0, 1, 100])
    assert [f.row_groups for f in manifest.files] == [(100, 100, 50), (), (1,), (100,)]
    assert Manifest.load(store, "data/k/app") == manifest
    for path in (tmp_path / "store/data/k/app", store.full_url("data/k/app")):
        found = read_packed(path)
        for name, expected in values.items():
            np.testing.assert_array_equal(found[name], expected)
            assert found[name].dtype == expected.dtype


def test_read_packed_reads_a_single_file(store: Store, tmp_path: Path) -> None:
    make(store, [250])
    found = read_packed(tmp_path / "store/data/k/app/part-00000-0.parquet")
    np.testing.assert_array_equal(found["a.x"], data(250)["a.x"])


def test_read_packed_refuses_other_files_with_a_clear_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"neither a folder with a _manifest\.json"):
        read_packed(tmp_path)
    manifest, _ = make(store, [5])
    path = tmp_path / "store" / manifest.files[0].path
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({}), path, store_schema=False)
    with pytest.raises(InvalidArgumentError, match="is Parquet, but not packed"):
        read_packed(path)


@pytest.mark.parametrize("seed", range(5))
def test_any_ascending_rows_can_be_read(store: Store, seed: int) -> None:
    manifest, values = make(store, [250, 0, 33, 1])
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(manifest.num_rows) < rng.random())
    with RowSource(store, manifest) as source:
        found = source.read(["y", "a.x"], rows)
        np.testing.assert_array_equal(found["y"], values["y"][rows])
        np.testing.assert_array_equal(found["a.x"], values["a.x"][rows])


def test_distant_rows_are_read_in_separate_reads(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, values = make(store, [250])
    rows = np.array([0, 1, 2, 90, 99, 100, 249])
    monkeypatch.setattr("sparkhvd.data.packed.rows._GAP_BYTES", 5 * 12)
    with RowSource(store, manifest) as source:
        runs = source._runs(rows, 5)
        assert runs == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
        np.testing.assert_array_equal(source.read(["a.x"], rows)["a.x"], values["a.x"][rows])


@pytest.mark.parametrize(
    "options", [{"compression": "snappy"}, {"data_page_size": 64, "compression": "NONE"}]
)
def test_file_rewritten_by_another_program_is_decoded(
    store: Store, tmp_path: Path, options: dict[str, object]
) -> None:
    manifest, values = make(store, [250])
    path = tmp_path / "store" / manifest.files[0].path
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=100, write_batch_size=8, **options)
    with pytest.raises(StoreError, match="its end is not"), RowSource(store, manifest) as source:
        source.read(["y"])
    unknown = replace(manifest, files=(replace(manifest.files[0], footer_crc=None),))
    with RowSource(store, unknown) as source:
        np.testing.assert_array_equal(source.read(["a.x"])["a.x"], values["a.x"])
        rows = np.array([3, 5, 101, 249])
        np.testing.assert_array_equal(source.read(["y"], rows)["y"], rows)


def test_files_written_by_sparkhvd_are_read_without_decoding(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, values = make(store, [250_000], group_rows=100_000)

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("sparkhvd.data.packed.file.PackedFile._decode", refuse)
    with RowSource(store, manifest) as source:
        np.testing.assert_array_equal(source.read(["y"])["y"], values["y"])


def test_a_file_that_differs_from_the_manifest_is_refused(store: Store) -> None:
    manifest, _ = make(store, [250])
    write_packed(store, manifest.files[0].path, [X, Y], data(9))
    with (
        RowSource(store, manifest) as source,
        pytest.raises(StoreError, match="its end is not what was written"),
    ):
        source.read(["y"])


def test_remote_store_gives_the_same_rows() -> None:
    store = Store.create("memory://packed-test/prefix")
    manifest, values = make(store, [250, 20])
    with RowSource(store, manifest) as source:
        np.testing.assert_array_equal(source.read(["a.x"])["a.x"], values["a.x"])
    np.testing.assert_array_equal(
        source.read(["y"], np.array([7, 260]))["y"], values["y"][[7, 260]]
    )
    source.close()
    store.delete("data")


def test_file_does_not_depend_on_sizes_of_appended_portions(store: Store, tmp_path: Path) -> None:
    values = data(1000)
    written = []
    for name, sizes in (("one", [1000]), ("many", [1, 99, 250, 0, 650])):
        with store.open_output(f"data/{name}.parquet") as sink:
            writer = PackedWriter(sink, [X, Y], row_group_bytes=300 * ROW_BYTES)
            at = 0
            for size in sizes:
                writer.append([values["a.x"][at : at + size], values["y"][at : at + size]])
                at += size
            assert writer.close() == (300, 300, 300, 100)
        written.append((tmp_path / "store/data" / f"{name}.parquet").read_bytes())
    assert written[0] == written[1]


def test_manifest_of_another_format_version_is_refused() -> None:
    text = Manifest(
        (DataFile("p", 1, (1,)),), DataSchema((X,), (Y,)), 1, format_version=99
    ).to_json()
    with pytest.raises(
        InvalidArgumentError, match="format version 99, but this sparkhvd reads 1, 2, 3"
    ):
        Manifest.from_json(text)


class FarFile:
    """A local file whose reads by offset wait once until five run in parallel, and are counted."""

    def __init__(self, path: str) -> None:
        self.file = pa.OSFile(path)
        self.changed = threading.Condition()
        self.waiting = self.most_waiting = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        with self.changed:
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most_waiting >= 5, 20)
            self.waiting -= 1
            content: bytes = self.file.read_at(nbytes, offset)
        return content


@pytest.mark.parametrize("is_all", [True, False])
def test_reads_of_many_columns_from_a_remote_file_are_concurrent(
    tmp_path: Path, is_all: bool
) -> None:
    folder = Store.create(tmp_path)
    columns = [Column(f"c{i}", "scalar", "float32", (), "double", "float32") for i in range(50)]
    values = {c.name: np.arange(40, dtype="f4") + i for i, c in enumerate(columns)}
    file = write_packed(folder, "data/k/a/p.parquet", columns, values)
    manifest = Manifest((file,), DataSchema(tuple(columns), ()), 40)
    rows = None if is_all else np.array([3, 4, 7, 30])
    opened: list[FarFile] = []

    class Far(Store):
        shares_files = True

        def local_path(self, path: str) -> None:
            return None

        def open_input(self, path: str) -> Any:
            opened.append(FarFile(f"{tmp_path}/{path}"))
            return opened[-1]

    with RowSource(Far(str(tmp_path)), manifest) as source:
        found = source.read(list(values), rows)
    # 50 columns, each with a read of its header and one of its values.
    assert 5 <= opened[0].most_waiting <= 12
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value if rows is None else value[rows])


def test_first_error_of_concurrent_reads_is_raised() -> None:
    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        together([lambda: None, fail, *[lambda: None] * 30])
    together([])
