"""Rows that are read before their reader is there."""

from __future__ import annotations

import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import RowSource, write_packed
from sparkhvd.data.reading.preload import Loading, begin, begun
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError

ROWS = 500
DATA_DIR = "data/k/app"
X = Column("x", "vector", "float32", (3,), "vector", "float32")
ID = Column("id", "scalar", "int64", (), "bigint", "int64")
HELD_OUT = Column("held_out", "scalar", "uint8", (), "boolean", "bool")


@pytest.fixture(params=[False, True], ids=["fraction", "column"])
def has_column(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def store(tmp_path: Path, has_column: bool) -> Store:
    store = Store.create(tmp_path / "store")
    schema = DataSchema((X,), (ID,), None, HELD_OUT if has_column else None)
    numbers = np.arange(ROWS)
    values = {
        "x": np.random.default_rng().standard_normal((ROWS, 3), dtype=np.float32),
        "id": numbers,
        "held_out": (numbers % 7 == 0).astype(np.uint8),
    }
    files = []
    for i, (low, high) in enumerate(((0, 123), (123, ROWS))):
        part = {c.name: values[c.name][low:high] for c in schema.columns}
        path = f"{DATA_DIR}/part-{i:05d}-0.parquet"
        files.append(write_packed(store, path, schema.columns, part, row_group_bytes=4000))
    Manifest(tuple(files), schema, ROWS).save(store, DATA_DIR)
    return store


def options_of(has_column: bool, subset: str = "train") -> dict[str, Any]:
    fraction = None if has_column or subset == "all" else 0.2
    return {
        "subset": subset,
        "validation": fraction,
        "seed": 3,
        "shuffle": True,
        "shuffle_bytes": 1 << 20,
    }


def batches_of(store: Store, manifest: Manifest, loading: Loading | None, **options: Any) -> Any:
    with Reader(
        store, manifest, rank=1, size=2, batch_size=16, loading=loading, **options
    ) as reader:
        return [(b.columns["id"].tolist(), b.columns["x"].tolist()) for b in reader.epoch(0)]


@pytest.mark.parametrize("subset", ["train", "all"])
def test_a_reader_takes_the_rows_that_were_read_before(
    store: Store, has_column: bool, subset: str
) -> None:
    manifest, options = Manifest.load(store, DATA_DIR), options_of(has_column, subset)
    expected = batches_of(store, manifest, None, **options)
    loading = Loading(store, DATA_DIR, **options)
    with Reader(
        store, manifest, rank=1, size=2, batch_size=16, loading=loading, **options
    ) as reader:
        loading._thread.join(20)
        for file in manifest.files:  # so nothing can be read again
            store.delete(file.path)
        batches = [(b.columns["id"].tolist(), b.columns["x"].tolist()) for b in reader.epoch(0)]
        again = [b.columns["id"].tolist() for b in reader.epoch(1)]
    assert batches == expected
    assert len(again) == len(batches)
    assert not [t for t in threading.enumerate() if t.name == "sparkhvd-loading"]


@pytest.mark.parametrize(
    "other",
    [
        {"subset": "all", "validation": None},
        {"seed": 4},
        {"shuffle": False},
        {"shuffle_bytes": 100},
    ],
)
def test_rows_of_another_subset_are_not_taken(
    store: Store, has_column: bool, other: dict[str, Any]
) -> None:
    manifest, options = Manifest.load(store, DATA_DIR), options_of(has_column)
    loading = Loading(store, DATA_DIR, **{**options, **other})
    expected = batches_of(store, manifest, None, **options)
    assert batches_of(store, manifest, loading, **options) == expected
    only = Loading(store, DATA_DIR, **options)
    assert batches_of(store, manifest, only, columns=["id", "x"], **options) == expected


def test_the_processes_of_a_host_read_a_part_each(store: Store, has_column: bool) -> None:
    options = options_of(has_column)
    whole = Loading(store, DATA_DIR, **options)
    whole._thread.join(20)
    rows = whole._rows
    expected = whole.take(["x", "id"], rows, 20)
    assert expected is not None
    parts = []
    for number in range(3):
        loading = Loading(store, DATA_DIR, part=(number, 3), **options)
        found = loading.take(["x", "id"], rows, 20)
        assert found is not None
        parts.append(found)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), values)
    sizes = [len(p["id"]) for p in parts]
    assert max(sizes) - min(sizes) <= 1


def test_the_processes_of_a_host_read_a_part_of_the_validation_column_each(
    store: Store, has_column: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    read = RowSource.read

    def counted(source: RowSource, names: list[str], rows: Any = None, *empty: Any) -> Any:
        if names == ["held_out"]:
            counts.append(ROWS if rows is None else len(rows))
        return read(source, names, rows, *empty)

    monkeypatch.setattr(RowSource, "read", counted)
    parts = [Loading(store, DATA_DIR, part=(n, 3), **options_of(has_column)) for n in range(3)]
    flags = [loading.flags(20) for loading in parts]
    for loading in parts:
        loading._thread.join(20)
    if has_column:
        assert sum(counts) == ROWS
        assert np.flatnonzero(np.concatenate(flags)).tolist() == list(range(0, ROWS, 7))
    else:
        assert flags == [None] * 3


def test_a_reader_takes_its_part_of_the_rows_that_a_column_divides(
    store: Store, has_column: bool
) -> None:
    class Parts:
        """The other ranks of a host, whose parts are read here."""

        part = (1, 3)

        def gather(self, values: Any, error: BaseException | None = None) -> Any:
            assert error is None
            parts = [Loading(store, DATA_DIR, part=(n, 3), **options) for n in range(3)]
            for loading in parts:
                loading._thread.join(20)
            parts_values = [loading._values or {} for loading in parts]
            for name, value in values.items():
                np.testing.assert_array_equal(value, parts_values[1][name])
            return {n: np.concatenate([v[n] for v in parts_values]) for n in values}

    manifest, options = Manifest.load(store, DATA_DIR), options_of(has_column)
    expected = batches_of(store, manifest, None, **options)
    assert batches_of(store, manifest, None, sharing=Parts(), **options) == expected
    loading = Loading(store, DATA_DIR, part=(1, 3), **options)
    assert batches_of(store, manifest, loading, sharing=Parts(), **options) == expected


def test_unreadable_files_are_the_readers_error(store: Store, has_column: bool) -> None:
    manifest, options = Manifest.load(store, DATA_DIR), options_of(has_column)
    options["subset"] = "all"
    shutil.rmtree(Path(store.url.removeprefix("file://")) / "data")
    loading = Loading(store, DATA_DIR, **options)
    with pytest.raises(StoreError, match="failed at rank 1, epoch 0, step 0"):
        batches_of(store, manifest, loading, **options)


def test_a_process_finds_what_it_began_once(store: Store, has_column: bool) -> None:
    elsewhere = pickle.loads(pickle.dumps(store))
    options = options_of(has_column)
    begin(elsewhere, DATA_DIR, 0, 1, **options)
    loading = begun(store, DATA_DIR)
    assert loading is not None
    assert begun(store, DATA_DIR) is None
    manifest = Manifest.load(store, DATA_DIR)
    assert batches_of(store, manifest, loading, **options) == batches_of(
        store, manifest, None, **options
    )
    begin(store, "data/other/app", 0, 1, **options)
    assert begun(store, DATA_DIR) is None


def test_rows_that_do_not_come_are_waited_for_so_long(store: Store, has_column: bool) -> None:
    loading = Loading(store, DATA_DIR, **options_of(has_column))
    loading._thread.join(20)
    forever = threading.Event()
    loading._thread = threading.Thread(target=forever.wait, daemon=True)
    loading._thread.start()
    with pytest.raises(TimeoutError, match=r"not in memory after 0\.1 s"):
        loading.take(["id"], 3, 0.1)
    forever.set()
    loading._thread.join()
