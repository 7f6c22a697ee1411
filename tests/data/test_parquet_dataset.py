"""Discovery of ordinary Parquet on the driver: files, footers, the manifest, errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.parquet import manifest as parquet_manifest
from sparkhvd.data.parquet.dataset import open_dataset
from sparkhvd.data.parquet.manifest import fingerprint, read_manifest
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

pytestmark = pytest.mark.pure


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"x": [1.0, 2.0]}), path)


def manifest_of(path: Any, *features: str, **options: Any) -> Any:
    dataset = open_dataset(path)
    schema = check_schema(dataset.schema, feature_cols=list(features), label_cols=[], **options)
    return read_manifest(dataset, schema)


def test_hidden_and_empty_files_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet")
    write(tmp_path / "deep" / "er" / "a.parquet")
    for hidden in ("_SUCCESS", ".b.parquet.crc", "_temporary/0/a.parquet", ".git/x", "deep/_x"):
        (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hidden).write_text("no Parquet")
    (tmp_path / "empty").touch()
    dataset = open_dataset(tmp_path)
    assert [f.path for f in dataset.files] == ["b.parquet", "deep/er/a.parquet"]
    assert [f.path for f in open_dataset(tmp_path / "b.parquet").files] == ["."]
    assert manifest_of(tmp_path / "b.parquet", "x").num_rows == 2


def test_partition_columns_come_from_the_names_of_folders(tmp_path: Path) -> None:
    for day, part, name in ((2, "0.5", "a%2Fb"), (1, "2", "__HIVE_DEFAULT_PARTITION__")):
        write(tmp_path / f"day={day}" / f"part={part}" / f"name={name}" / "x.parquet")
    dataset = open_dataset(tmp_path)
    kinds = {f.name: f.dataType.simpleString() for f in dataset.schema}
    assert kinds == {"x": "double", "day": "bigint", "part": "double", "name": "string"}
    manifest = manifest_of(tmp_path, "x", "day", "part")
    with ParquetSource(dataset.store, manifest) as source:
        found = source.read(["day", "part", "x"], np.arange(1, 4))
        alone = source.read(["day"])
    np.testing.assert_array_equal(found["day"], [1, 2, 2])
    np.testing.assert_array_equal(found["part"], np.float32([2, 0.5, 0.5]))
    np.testing.assert_array_equal(found["x"], [2, 1, 2])
    np.testing.assert_array_equal(alone["day"], [1, 1, 2, 2])
    with pytest.raises(
        InvalidArgumentError, match=r"column 'name' \(string\): 2 of 4 rows are null"
    ):
        manifest_of(tmp_path, "x", "name", decoders=["name"])


def test_folders_with_different_partition_columns_raise(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "x.parquet")
    write(tmp_path / "month=1" / "x.parquet")
    with pytest.raises(InvalidArgumentError) as raised:
        open_dataset(tmp_path)
    assert "folders of 'day', and 'month=1/x.parquet' in folders of 'month'" in str(raised.value)


def test_path_without_parquet_files_raises(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no such file or folder"):
        open_dataset(tmp_path / "missing")
    with pytest.raises(InvalidArgumentError, match="there are no files"):
        open_dataset(tmp_path)
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(InvalidArgumentError, match=r"a\.csv' is not a Parquet file"):
        open_dataset(tmp_path)
    with pytest.raises(InvalidArgumentError, match="unknown scheme"):
        open_dataset("nosuch://bucket/data")


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "a Delta table"),
        ("deep/.hoodie/hoodie.properties", "a Hudi table"),
        ("_spark_metadata/0", "a streaming query of Spark"),
        ("metadata/v1.metadata.json", "an Iceberg table"),
    ],
)
def test_folder_of_a_table_with_a_log_is_refused(tmp_path: Path, log: str, kind: str) -> None:
    write(tmp_path / "data" / "deleted.parquet")
    assert open_dataset(tmp_path).files
    (tmp_path / log).parent.mkdir(parents=True)
    (tmp_path / log).write_text("{}")
    with pytest.raises(InvalidArgumentError) as raised:
        open_dataset(tmp_path)
    assert f"{log.rpartition('/')[0]!r} in it shows" in str(raised.value)
    assert kind in str(raised.value)
    assert "Read the table's folder with spark.read." in str(raised.value)


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "a Delta table"),
        (".hoodie/hoodie.properties", "a Hudi table"),
        ("_spark_metadata/0", "what a streaming query of Spark wrote"),
        ("metadata/00003-0f1e2d3c.gz.metadata.json", "an Iceberg table"),
    ],
)
def test_subfolder_of_a_table_with_a_log_is_refused(tmp_path: Path, log: str, kind: str) -> None:
    table, link = tmp_path / "table", tmp_path / "link"
    write(table / "data" / "day=0" / "deleted.parquet")
    link.symlink_to(table / "data" / "day=0")
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "images.metadata.json").write_text("{}")
    parts = [table / "data", table / "data" / "day=0", link]
    parts.append(table / "data" / "day=0" / "deleted.parquet")
    assert all(open_dataset(part).files for part in parts)
    (table / log).parent.mkdir(parents=True)
    (table / log).write_text("{}")
    folder = log.rpartition("/")[0]
    for part, above in zip(parts, ("..", "../..", "../table", "../../.."), strict=True):
        with pytest.raises(InvalidArgumentError) as raised:
            open_dataset(part)
        assert f"'{above}/{folder}' above it shows that this is a part of {kind}" in str(
            raised.value
        )


def test_unreadable_parent_folders_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.parquet")
    memory = fsspec.filesystem("memory")
    memory.pipe("/lake/team/t/day=0/a.parquet", (tmp_path / "a.parquet").read_bytes())
    memory.pipe("/lake/team/t/_delta_log/0.json", b"{}")
    with pytest.raises(InvalidArgumentError, match=r"'\.\./_delta_log' above it"):
        open_dataset("memory://lake/team/t/day=0")
    info = type(memory).info

    def limited(self: Any, path: str, **options: Any) -> Any:
        if "/day=0" not in path:
            raise PermissionError(f"{path} may not be read")
        return info(self, path, **options)

    monkeypatch.setattr(type(memory), "info", limited)
    assert open_dataset("memory://lake/team/t/day=0").files


def test_error_names_a_file_with_a_damaged_footer(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    length = int.from_bytes(data[-8:-4], "little")
    data[-8 - length : -8] = b"\xff" * length
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=r"The footer of '.*a\.parquet' cannot be read"):
        open_dataset(tmp_path)


def test_column_types_of_a_file_without_rows_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=pa.nulls(0), y=pa.nulls(0))
    write(tmp_path / "b.parquet", x=[1.0, 2.0], y=[1.0, 2.0])
    write(tmp_path / "c.parquet", x=pa.array([], pa.string()))
    write(tmp_path / "d.parquet", x=[3.0], y=[3.0])
    manifest = manifest_of(tmp_path, "x", "y")
    assert [f.rows for f in manifest.files] == [0, 2, 0, 1]
    with ParquetSource(Store(str(tmp_path)), manifest) as source:
        np.testing.assert_array_equal(source.read(["x"])["x"], [1, 2, 3])
        assert source.usable(manifest.schema.columns, [0])[0].shape == (0,)
    write(tmp_path / "e.parquet", x=["3"], y=[1.0])
    with pytest.raises(
        InvalidArgumentError, match=r"string in 'e\.parquet' and double in 'b\.parquet'"
    ):
        manifest_of(tmp_path, "x")


def test_error_names_files_with_incompatible_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=pa.array([1, 2], pa.int32()), y=[1.0, 2.0])
    write(tmp_path / "b.parquet", x=pa.array([3, 4], pa.int64()), y=[1.0, 2.0], more=[1, 2])
    assert manifest_of(tmp_path, "x", "y").num_rows == 4
    write(tmp_path / "c.parquet", x=["3", "4"], y=[1.0, 2.0])
    with pytest.raises(InvalidArgumentError) as raised:
        manifest_of(tmp_path, "x")
    assert "column 'x' is string in 'c.parquet' and int32 in 'a.parquet'" in str(raised.value)
    write(tmp_path / "c.parquet", x=[1, 2])
    with pytest.raises(InvalidArgumentError) as raised:
        manifest_of(tmp_path, "x", "y")
    assert "'c.parquet' has column 'y' 0 times" in str(raised.value)


def test_footers_reveal_nulls_before_any_row_is_read(tmp_path: Path) -> None:
    for number in range(3):
        values = [1.0] * 1000 + [None] * number
        write(tmp_path / f"{number}.parquet", x=values, y=[[1.0]] * len(values))
    with pytest.raises(
        InvalidArgumentError, match=r"column 'x' \(double\): 3 of 3,003 rows are null"
    ):
        manifest_of(tmp_path, "x", "y")
    assert manifest_of(tmp_path, "x", handle_invalid={"x": 0}).num_rows == 3003
    with pytest.raises(InvalidArgumentError) as raised:
        manifest_of(tmp_path, "y", validation="x")
    assert "column 'x' (double): 3 of 3,003 rows are null. Every" in str(raised.value)
    assert "handle_invalid" not in str(raised.value)
    write(tmp_path / "t" / "a.parquet", t=pa.array([1], pa.timestamp("us")))
    with pytest.raises(InvalidArgumentError, match="type timestamp, which cannot become a tensor"):
        manifest_of(tmp_path / "t", "t")


def test_footers_give_the_ranges_of_integers(tmp_path: Path) -> None:
    schema = {"k": pa.int32(), "words": pa.list_(pa.int64()), "y": pa.float64()}
    parts = [
        {
            "k": [3, None, 7],
            "words": [[1, 2], [9, -4], [0, 0]],
            "y": [0.0, 2.0, 1.0],
        },
        {
            "k": [5, 12, 6],
            "words": [[1, 2], [3, 3], [0, 0]],
            "y": [1.0, 1.0, 4.0],
        },
    ]
    for day, values in enumerate(parts):
        path = tmp_path / f"day={day + 30}" / "a.parquet"
        path.parent.mkdir()
        table = pa.table({n: pa.array(v, schema[n]) for n, v in values.items()})
        pq.write_table(table, path, row_group_size=2)
    dataset = open_dataset(tmp_path)

    def ranges(**options: Any) -> Any:
        names = ["words", "day", "k"]
        decided = {"feature_cols": names, "label_cols": ["y"], "class_labels": ["y"], **options}
        return read_manifest(dataset, check_schema(dataset.schema, **decided)).ranges

    expected = {"k": (3, 12), "words": (-4, 9), "y": (0, 4), "day": (30, 31)}
    assert ranges(handle_invalid={"k": 0}) == expected
    # The row with the largest value may be excluded, and floats have no range.
    assert ranges(handle_invalid={"k": "skip"}) == {}
    floats = ranges(handle_invalid={"k": 0}, class_labels=[])
    assert floats == {name: expected[name] for name in ("k", "words", "day")}


def test_nulls_in_footers_are_allowed_if_invalid_rows_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", a=[1.0, None, 3.0], b=[1.0, None, 3.0])
    manifest = manifest_of(tmp_path, "a", "b", handle_invalid={"a": "skip"})
    with ParquetSource(Store(str(tmp_path)), manifest) as source:
        (mask,) = source.usable([manifest.schema.column("a")], [0]).values()
        found = source.read(["a", "b"], np.flatnonzero(mask))
        np.testing.assert_array_equal(found["b"], [1, 3])
        with pytest.raises(InvalidArgumentError, match="column 'b' .*1 of 3 rows"):
            source.read(["b"])


@pytest.mark.parametrize("empty", [2, 400])  # 400: beyond the rows that the driver learns from
def test_empty_rows_do_not_determine_the_shape_of_entries(tmp_path: Path, empty: int) -> None:
    kind = pa.list_(pa.list_(pa.float32()))
    write(tmp_path / "a.parquet", x=pa.array([[]] * empty, kind))
    write(tmp_path / "b.parquet", x=pa.array([[[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]], kind))
    write(tmp_path / "c.parquet", x=pa.array([[]] * 2, kind))
    manifest = manifest_of(tmp_path, "x", collated=["x"])
    assert manifest.schema.column("x").shape == (-1, 2)
    with ParquetSource(Store(str(tmp_path)), manifest) as source:
        rows = source.read(["x"])["x"]
    assert [len(rows.row(i)) for i in range(len(rows))] == [0] * empty + [1, 2, 0, 0]
    assert rows.inner == (2,)


def test_data_without_rows_raise_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=pa.array([], pa.float64()))
    with pytest.raises(InvalidArgumentError, match="have no rows"):
        manifest_of(tmp_path, "x")
    write(tmp_path / "b.parquet", x=pa.array([None, np.nan], pa.float64()))
    with pytest.raises(InvalidArgumentError, match="All 2 rows"):
        manifest_of(tmp_path, "x", handle_invalid="skip")


def test_fingerprint_changes_with_file_size_or_time(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    before = fingerprint(manifest_of(tmp_path, "x"))
    time_ns = (tmp_path / "a.parquet").stat().st_mtime_ns
    assert before == fingerprint(manifest_of(tmp_path, "x"))
    write(tmp_path / "a.parquet", x=[3.0, 4.0])
    # A file system may count time in steps of some milliseconds.
    os.utime(tmp_path / "a.parquet", ns=(time_ns + 1, time_ns + 1))
    assert fingerprint(manifest_of(tmp_path, "x")) != before


def test_fingerprint_of_very_many_files_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_manifest, "_LISTED_FILES", 2)
    for number in range(3):
        write(tmp_path / f"{number}.parquet")
    before = fingerprint(manifest_of(tmp_path, "x"))
    assert list(before) == ["all 3 files"]
    write(tmp_path / "1.parquet", x=[3.0, 4.0])
    assert fingerprint(manifest_of(tmp_path, "x")) != before


def test_parquet_is_read_from_any_fsspec_file_system(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=[1.0, 2.0, 3.0])
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/data/k=7/a.parquet", (tmp_path / "a.parquet").read_bytes())
    dataset = open_dataset("memory://bucket/data")
    manifest = manifest_of("memory://bucket/data", "x", "k")
    with ParquetSource(dataset.store, manifest) as source:
        found = source.read(["x", "k"])
    np.testing.assert_array_equal(found["x"], [1, 2, 3])
    np.testing.assert_array_equal(found["k"], [7, 7, 7])
    below = Store("memory://bucket").below("data")
    assert [f.path for f in below.files()] == ["k=7/a.parquet"]


def test_packed_files_are_refused_as_ordinary_parquet(tmp_path: Path) -> None:
    from sparkhvd.data.columns.schema import Column
    from sparkhvd.data.packed import write_packed

    column = Column("x", "scalar", "float32", (), "float", "float32")
    write_packed(Store(str(tmp_path)), "a.parquet", [column], {"x": np.zeros(3, np.float32)})
    with pytest.raises(InvalidArgumentError, match="packed files that a fit wrote"):
        open_dataset(tmp_path)
