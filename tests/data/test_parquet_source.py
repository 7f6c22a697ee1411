"""Ordinary Parquet by row number: the same rows as pyarrow's, each row once over the ranks, bounded work."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkhvd.data.arrow_types import VERIFIED, plain
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.parquet import source as parquet
from sparkhvd.data.parquet import source as passes
from sparkhvd.data.parquet.dataset import open_dataset
from sparkhvd.data.parquet.manifest import read_manifest
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.reading.reader import Reader
from sparkhvd.errors import InvalidArgumentError, StoreError
from tests.harness.soak import amount

pytestmark = pytest.mark.pure

ROW_BYTES = 8 + 3 * 4
# pyarrow 14 reads half-precision numbers and null lists of a fixed length, and cannot write them.
WRITES_ALL = int(pa.__version__.split(".")[0]) >= 15


def table(first: int, rows: int) -> pa.Table:
    """Make rows that follow from their id: a list of three, a list of any length, text."""
    ids = np.arange(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids),
            "x": pa.array([[i, 2.0 * i, 3.0 * i] for i in ids], pa.list_(pa.float32())),
            "any": pa.array([list(range(i % 4)) for i in ids], pa.list_(pa.int64())),
            "text": pa.array([f"<{i}>" for i in ids], pa.string()),
        }
    )


def write(folder: Path, rows_per_file: list[int], group_rows: int, **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, rows in enumerate(rows_per_file):
        path = folder / f"part-{number:03d}.parquet"
        pq.write_table(table(first, rows), path, row_group_size=group_rows, **options)
        first += rows


def manifest_of(folder: Path, **options: Any) -> tuple[Any, Manifest]:
    """(store of the files, manifest) with `id` as the label."""
    given = {"feature_cols": ["x"], "label_cols": ["id"], **options}
    dataset = open_dataset(folder)
    return dataset.store, read_manifest(dataset, check_schema(dataset.schema, **given))


def everything(folder: Path) -> tuple[Any, Manifest]:
    columns = ["x", "any", "text"]
    return manifest_of(folder, feature_cols=columns, collated=["any"], decoders=["text"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("parquet")
    yield root
    shutil.rmtree(root)


@dataclass(frozen=True)
class Case:
    rows_per_file: list[int]
    group_rows: int
    size: int
    batch_size: int
    seed: int
    shuffle: bool
    shuffle_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    total = draw(st.integers(1, 600) | st.integers(1, 20))
    edges = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=4))), total]
    return Case(
        rows_per_file=[b - a for a, b in itertools.pairwise(edges)],
        group_rows=draw(st.integers(1, 20) if total < 60 else st.integers(9, 700)),
        size=draw(st.integers(1, 8)),
        batch_size=draw(st.integers(1, 90)),
        seed=draw(st.integers(0, 2**32)),
        shuffle=draw(st.booleans()),
        shuffle_bytes=draw(st.sampled_from([1 << 30, 40 * ROW_BYTES, 200 * ROW_BYTES])),
    )


@given(case=cases())
@settings(
    max_examples=amount(30, 2_000), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_every_row_is_read_once_for_any_files_and_ranks(folder: Path, case: Case) -> None:
    place = folder / "sharded"
    shutil.rmtree(place, ignore_errors=True)
    write(place, case.rows_per_file, case.group_rows)
    store, manifest = manifest_of(place)
    num_steps = set()
    seen: list[int] = []
    for rank in range(case.size):
        with Reader(
            store,
            manifest,
            rank=rank,
            size=case.size,
            batch_size=case.batch_size,
            seed=case.seed,
            shuffle=case.shuffle,
            shuffle_bytes=case.shuffle_bytes,
        ) as reader:
            num_steps.add(reader.num_steps)
            batches = list(reader.epoch(1))
            middle = reader.num_steps // 2
            resumed = list(reader.epoch(1, middle))
        for batch, again in zip(batches[middle:], resumed, strict=True):
            np.testing.assert_array_equal(batch.columns["id"], again.columns["id"])
        for batch in batches:
            ids = batch.columns["id"]
            np.testing.assert_array_equal(batch.columns["x"], ids[:, None] * np.float32([1, 2, 3]))
            seen.extend(ids.tolist())
    assert len(num_steps) == 1
    assert sorted(seen) == list(range(sum(case.rows_per_file)))


@given(data=st.data())
@settings(max_examples=amount(20, 1_000), deadline=None)
def test_reads_of_any_rows_in_any_sequence_equal_the_files(
    folder: Path, data: st.DataObject
) -> None:
    place = folder / "any"
    if not place.exists():
        write(place, [70, 0, 55, 5], 16)
    store, manifest = everything(place)
    with ParquetSource(store, manifest) as source, pytest.MonkeyPatch.context() as patch:
        # Small pieces, so that reads end inside them.
        patch.setattr(parquet, "_PIECE_ROWS", data.draw(st.sampled_from([5, 16, 1000])))
        patch.setattr(passes, "_SPAN_BYTES", data.draw(st.sampled_from([0, 1 << 30])))
        for _ in range(3):
            wanted = data.draw(
                st.none() | st.lists(st.integers(0, 129), unique=True, max_size=40).map(sorted)
            )
            rows = np.arange(130) if wanted is None else np.array(wanted, np.int64)
            found = source.read(["id", "x", "any", "text"], None if wanted is None else rows)
            np.testing.assert_array_equal(found["id"], rows)
            np.testing.assert_array_equal(found["x"], rows[:, None] * np.float32([1, 2, 3]))
            assert len(found["any"]) == len(found["text"]) == len(rows)
            for at, row in enumerate(rows):
                assert found["any"].row(at).tolist() == list(range(row % 4))
                assert found["text"].row(at).tobytes() == f"<{row}>".encode()


def test_every_column_type_gives_the_values_that_arrow_gives(tmp_path: Path) -> None:
    rows = 50
    numbers = np.arange(rows)
    tensor = pa.fixed_shape_tensor(pa.float64(), [2, 3])
    matrices = np.arange(rows * 6, dtype=np.float64)
    columns = {
        "byte": pa.array(numbers, pa.uint8()),
        "wide": pa.array(numbers, pa.uint64()),
        "half": pa.array(numbers.astype(np.float16 if WRITES_ALL else np.float32)),
        "exact": pa.array(numbers).cast(pa.decimal128(24, 2)),
        "yes": pa.array(numbers % 2 == 0),
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 2) / 2), 2),
        "large": pa.array([[i, i + 1] for i in numbers], pa.large_list(pa.int32())),
        "nested": pa.array([[[i, 0], [1, i]] for i in numbers], pa.list_(pa.list_(pa.int16()))),
        "matrix": pa.ExtensionArray.from_storage(
            tensor, pa.FixedSizeListArray.from_arrays(pa.array(matrices), 6)
        ),
        "words": pa.array(["a", "b"] * (rows // 2)).dictionary_encode(),
        "raw": pa.array([bytes([i, 1]) for i in numbers], pa.binary(2)),
        "long": pa.array([f"{i}" for i in numbers], pa.large_string()),
        "vector": pa.array(
            [
                {"type": 1, "size": None, "indices": None, "values": [i, 1.0]}
                if i % 2
                else {"type": 0, "size": 2, "indices": [1], "values": [float(i)]}
                for i in numbers
            ],
            pa.struct(
                [
                    ("type", pa.int8()),
                    ("size", pa.int32()),
                    ("indices", pa.list_(pa.int32())),
                    ("values", pa.list_(pa.float64())),
                ]
            ),
        ),
    }
    pq.write_table(pa.table(columns), tmp_path / "one.parquet", row_group_size=7)
    text = ["words", "raw", "long"]
    store, manifest = manifest_of(
        tmp_path / "one.parquet", feature_cols=list(columns), label_cols=[], decoders=text
    )
    wanted = np.array([0, 3, 4, 20, 21, 22, 49])
    with ParquetSource(store, manifest) as source:
        found = source.read(list(columns), wanted)
    for name in ("byte", "wide"):
        assert found[name].dtype == np.int64
        np.testing.assert_array_equal(found[name], wanted)
    for name in ("half", "exact"):
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], wanted)
    np.testing.assert_array_equal(found["yes"], wanted % 2 == 0)
    np.testing.assert_array_equal(found["fixed"], np.arange(rows * 2).reshape(-1, 2)[wanted] / 2)
    np.testing.assert_array_equal(found["large"], np.stack([wanted, wanted + 1], 1))
    np.testing.assert_array_equal(found["nested"][:, 1], np.stack([wanted * 0 + 1, wanted], 1))
    np.testing.assert_array_equal(found["matrix"], matrices.reshape(-1, 2, 3)[wanted])
    expected = np.stack([wanted * (wanted % 2), np.where(wanted % 2, 1, wanted)], 1)
    np.testing.assert_array_equal(found["vector"], expected)
    for name, of in (
        ("words", lambda i: b"ab"[i % 2 : i % 2 + 1]),
        ("raw", lambda i: bytes([i, 1])),
        ("long", lambda i: f"{i}".encode()),
    ):
        assert [found[name].row(k).tobytes() for k in range(len(wanted))] == [of(i) for i in wanted]


def test_slices_of_fixed_size_binary_with_nulls_become_plain_binary() -> None:
    values = pa.array([b"ab", None, b"cd", b"ef", None], pa.binary(2))
    for part in (values, values.slice(2), values.slice(1, 3), values.slice(0, 0)):
        found = plain(part)
        assert found.type == pa.binary()
        assert found.to_pylist() == part.to_pylist()


@pytest.mark.parametrize("order", [None, [0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_tensor_axes_follow_the_permutation_of_the_arrow_type(order: list[int] | None) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3, 4], permutation=order)
    rows = [list(range(24)), None, list(range(24, 48))]
    whole = pa.ExtensionArray.from_storage(kind, pa.array(rows, pa.list_(pa.int32(), 24)))
    for array in (whole, whole[1:]):
        found = plain(array)
        assert found.is_null().to_pylist() == array.is_null().to_pylist()
        # As Arrow's specification has it: of (100, 200, 500) and [2, 0, 1] comes (500, 100, 200). What pyarrow's own
        # to_numpy_ndarray makes of such a cycle repeats some elements and lacks others.
        stored = np.array(array.drop_null().storage.to_pylist()).reshape(-1, 2, 3, 4)
        expected = stored.transpose(0, *(axis + 1 for axis in order or [0, 1, 2]))
        np.testing.assert_array_equal(np.array(found.drop_null().to_pylist()), expected)


@pytest.mark.skipif(not hasattr(pa, "list_view"), reason="this pyarrow has no views")
def test_arrow_view_types_written_by_polars_are_read(tmp_path: Path) -> None:
    words, lists = ["a", "", "a longer word than fits"], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    columns = {
        "words": pa.array(words).cast(pa.string_view()),
        "raw": pa.array([w.encode() for w in words]).cast(pa.binary_view()),
        "x": pa.array(lists, pa.list_view(pa.float32())),
        "deep": pa.array([[x, x] for x in lists], pa.large_list(pa.list_view(pa.float32()))),
    }
    pq.write_table(pa.table(columns), tmp_path / "one.parquet")
    store, manifest = manifest_of(
        tmp_path, feature_cols=list(columns), label_cols=[], decoders=["words", "raw"]
    )
    with ParquetSource(store, manifest) as source:
        found = source.read(list(columns))
    for name in ("words", "raw"):
        assert [found[name].row(i).tobytes().decode() for i in range(3)] == words
    np.testing.assert_array_equal(found["x"], lists)
    np.testing.assert_array_equal(found["deep"], [[x, x] for x in lists])


@pytest.mark.skipif(not WRITES_ALL, reason="this pyarrow cannot write them")
def test_null_rows_of_fixed_size_lists_are_counted(tmp_path: Path) -> None:
    values = pa.array([[1.0, 2.0]] * 300 + [None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    store, manifest = manifest_of(tmp_path, label_cols=[])
    with ParquetSource(store, manifest) as source, pytest.raises(InvalidArgumentError) as raised:
        source.read(["x"])
    assert "column 'x' (array<float>): 1 of 302 rows are null or hold a null." in str(raised.value)


def test_row_groups_are_shuffled_whole_if_data_exceed_memory(tmp_path: Path) -> None:
    write(tmp_path, [400, 250], 50)
    store, manifest = manifest_of(tmp_path)
    with Reader(
        store, manifest, rank=0, size=1, batch_size=10, seed=2, shuffle_bytes=150 * ROW_BYTES
    ) as reader:
        ids = np.concatenate([b.columns["id"] for b in reader.epoch(0)])
    # Windows of three row groups of 50.
    for start in range(0, 600, 150):
        groups = np.unique(ids[start : start + 150] // 50)
        assert len(groups) == 3
    assert sorted(ids) == list(range(650))
    assert not np.array_equal(ids, np.sort(ids))


def test_reading_in_order_decodes_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [500], 500)
    store, manifest = manifest_of(tmp_path)
    decoded: list[int] = []
    original = passes.OpenFile.batches

    def counted(self: Any, groups: list[int], names: list[str], rows: int) -> Any:
        for batch in original(self, groups, names, rows):
            decoded.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(passes.OpenFile, "batches", counted)
    with ParquetSource(store, manifest) as source:
        for start in range(0, 500, 20):
            source.read(["x", "id"], np.arange(start, start + 20))
    assert sum(decoded) == 500


def test_a_same_size_change_of_a_file_during_the_fit_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0], "id": [1, 2]}), path)
    store, manifest = manifest_of(tmp_path)
    before = path.stat()
    pq.write_table(pa.table({"x": [7.0, 9.0], "id": [3, 4]}), path)
    # A file system may count time in steps of some milliseconds.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert path.stat().st_size == before.st_size
    with ParquetSource(store, manifest) as source, pytest.raises(InvalidArgumentError) as raised:
        source.read(["id"])
    assert "a.parquet' was written again since the fit began" in str(raised.value)


@pytest.mark.parametrize("is_flipped", [False, True])
def test_a_damaged_page_raises_a_store_error_with_its_location(
    tmp_path: Path, is_flipped: bool
) -> None:
    path = tmp_path / "a.parquet"
    if is_flipped and not VERIFIED:
        pytest.skip("this pyarrow does not verify checksums")
    options = {"write_page_checksum": True, "use_dictionary": False} if is_flipped else {}
    pq.write_table(pa.table({"x": [1.0, 2.0], "id": [1, 2]}), path, compression="NONE", **options)
    dataset = open_dataset(tmp_path)
    manifest = read_manifest(
        dataset, check_schema(dataset.schema, feature_cols=["x"], label_cols=["id"])
    )
    before = path.stat()
    data = bytearray(path.read_bytes())
    if is_flipped:
        data[data.index(np.array([1.0, 2.0]).tobytes()) + 3] ^= 1
    else:
        data[4:40] = b"\xff" * 36
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with (
        pytest.raises(
            StoreError, match=r"the Parquet files in file://.* failed at rank 0.*'a.parquet'"
        ),
        Reader(dataset.store, manifest, rank=0, size=1, batch_size=2) as reader,
    ):
        list(reader.epoch(0))


def test_a_file_changed_or_deleted_during_the_fit_raises(tmp_path: Path) -> None:
    write(tmp_path, [100, 100], 50)
    store, manifest = manifest_of(tmp_path)
    pq.write_table(table(100, 120), tmp_path / "part-001.parquet", row_group_size=50)
    with ParquetSource(store, manifest) as source, pytest.raises(InvalidArgumentError) as raised:
        source.read(["id"])
    assert "part-001.parquet" in str(raised.value)
    assert "has changed since the fit began" in str(raised.value)
    (tmp_path / "part-000.parquet").unlink()
    with (
        ParquetSource(store, manifest) as source,
        pytest.raises(InvalidArgumentError, match="does not find"),
    ):
        source.read(["id"])


def bad(folder: Path, **columns: Any) -> tuple[Any, Manifest]:
    """Write a good file of 300 rows, then one with these columns."""
    folder.mkdir(exist_ok=True)
    good = {"x": pa.array([[1.0, 2.0]] * 300), "y": pa.array([1.0] * 300)}
    pq.write_table(pa.table(good), folder / "a.parquet", write_statistics=False)
    rest = {
        "x": pa.array(columns.get("x", [[1.0, 2.0]] * 4), pa.list_(pa.float64())),
        "y": pa.array(columns.get("y", [1.0] * 4), pa.float64()),
    }
    pq.write_table(pa.table(rest), folder / "b.parquet", write_statistics=False)
    return manifest_of(folder, label_cols=[], sample_weight_col="y")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"y": [1, None, 2, None]}, "column 'y' (double): 2 of 4 rows are null or hold a null."),
        ({"y": [1, np.nan, 2, 3]}, "column 'y' (double): 1 of 4 rows hold NaN."),
        ({"y": [1, 1e300, 2, 3]}, "column 'y' (double): 1 of 4 rows hold a number that float32"),
        ({"y": [1, -1, 2, -3]}, "column 'y' (double): 2 of 4 rows hold a sample weight below 0."),
        ({"x": [[1, 2], [1], [1, 2], [1, 2]]}, "3 rows of 2 elements, but 1 of 1"),
        ({"x": [[1, 2, 3]] * 4}, "rows differ in length from the first rows of the data: 4 of 3"),
        ({"x": [[1, 2], [1, None], None, [1, 2]]}, "(array<double>): 2 of 4 rows are null"),
    ],
)
def test_error_counts_invalid_values_per_file(
    tmp_path: Path, columns: dict[str, Any], expected: str
) -> None:
    store, manifest = bad(tmp_path, **columns)
    with ParquetSource(store, manifest) as source:
        assert len(source.read(["x"], np.arange(300))["x"]) == 300
        with pytest.raises(InvalidArgumentError) as raised:
            source.read(["x", "y"])
    assert "b.parquet" in str(raised.value)
    assert expected in str(raised.value)


def test_handle_invalid_skips_or_fills_rows_of_parquet_files(tmp_path: Path) -> None:
    values = {"id": list(range(6)), "y": [0.0, None, 2.0, np.nan, 4.0, 5.0]}
    x = [[None, 1.0], [1.0, 1.0], [2.0, np.nan], [3.0, 1.0], None, [5.0, 1.0]]
    arrays = {"x": pa.array(x, pa.list_(pa.float64())), **values}
    pq.write_table(pa.table(arrays), tmp_path / "a.parquet", row_group_size=2)
    policy = {"x": "skip", "y": -1}
    options: dict[str, Any] = {"feature_cols": ["x", "y"], "handle_invalid": policy}
    store, manifest = manifest_of(tmp_path, **options)
    assert manifest.schema.column("x").shape == (2,)
    with ParquetSource(store, manifest) as source:
        skipping = [manifest.schema.column("x")]
        assert source.usable(skipping, [0])[0].tolist() == [False, True, False, True, False, True]
        rows = np.array([1, 3, 5])
        np.testing.assert_array_equal(source.examples(2), rows[:2])
        found = source.read(["id", "x", "y"], rows)
    np.testing.assert_array_equal(found["id"], rows)
    np.testing.assert_array_equal(found["x"], [[1, 1], [3, 1], [5, 1]])
    np.testing.assert_array_equal(found["y"], [-1, -1, 5])
    with Reader(
        store, manifest, rank=0, size=1, batch_size=2, validation=0.3, subset="train", usable=rows
    ) as reader:
        trained = [i for b in reader.epoch(0) for i in b.columns["id"].tolist()]
    assert len(trained) == 2
    assert set(trained) < {1, 3, 5}


def test_nan_is_kept_in_files_read_in_place(tmp_path: Path) -> None:
    values = {
        "id": [0, 1, 2],
        "y": [1.0, np.nan, None],
        "k": [[np.nan, 1.0], [2.0, None], [3.0, np.inf]],
    }
    pq.write_table(pa.table(values), tmp_path / "a.parquet")
    policy = {"y": "keep", "k": "keep"}
    store, manifest = manifest_of(tmp_path, feature_cols=["k", "y"], handle_invalid=policy)
    with ParquetSource(store, manifest) as source:
        found = source.read(["k", "y"])
    np.testing.assert_array_equal(found["y"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(found["k"], [[np.nan, 1], [2, np.nan], [3, np.inf]])


def test_parquet_manifest_survives_json(tmp_path: Path) -> None:
    write(tmp_path / "k=1" / "name=a b", [10], 4)
    _, manifest = manifest_of(tmp_path, feature_cols=["x", "k"])
    again = Manifest.from_json(manifest.to_json())
    assert again == replace(manifest, variable_bytes=dict(manifest.variable_bytes))
    assert again.files[0].partition == (("k", 1), ("name", "a b"))


_ONE_LARGE_ROW_GROUP = """
import sys
from pathlib import Path
from sparkhvd.data.parquet.dataset import open_dataset
from sparkhvd.data.parquet.manifest import read_manifest
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.columns.check import (check_schema)

def peak_bytes():
    # Not getrusage's, which begins with what the parent had.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

dataset = open_dataset(sys.argv[1])
names = dataset.arrow_schema.names
manifest = read_manifest(dataset, check_schema(dataset.schema, feature_cols=names, label_cols=[]))
before = peak_bytes()
for shuffle in (False, True):
    with Reader(dataset.store, manifest, rank=0, size=1, batch_size=1024, shuffle=shuffle, shuffle_bytes=8 << 20) as reader:
        assert sum(b.num_rows for b in reader.epoch(0)) == manifest.num_rows
print(peak_bytes() - before)
"""


def test_memory_is_bounded_for_any_row_group_size(tmp_path: Path) -> None:
    rows, columns = 2_000_000, 16
    values = np.random.default_rng(0).random(rows, np.float32)
    pq.write_table(
        pa.table({f"x{i}": values for i in range(columns)}),
        tmp_path / "one.parquet",
        row_group_size=rows,
        compression="NONE",
        use_dictionary=False,
    )
    done = subprocess.run(
        [sys.executable, "-c", _ONE_LARGE_ROW_GROUP, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The row group takes 128 MB. Windows of 8 MiB are read, from pieces and buffers of some megabytes per column.
    assert 0 < int(done.stdout) < 80 << 20
