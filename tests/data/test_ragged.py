"""Rows of variable length: in memory, through packed files, and in any order, compared with Python lists."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkhvd.data.arrow import column_to_numpy, usable_rows
from sparkhvd.data.columns.ragged import Ragged, SparseRows, num_bytes
from sparkhvd.data.columns.schema import DENSE_WIDTH, Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import RowSource, read_packed, write_packed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from tests.data.test_arrow import VECTOR, dense, sparse
from tests.harness.soak import amount

pytestmark = pytest.mark.pure

WIDTH = 10_000_000
DTYPES = ("uint8", "float16", "float32", "int64", "float64")


def ragged_column(dtype: str, inner: tuple[int, ...] = (), name: str = "v") -> Column:
    return Column(name, "ragged", dtype, (-1, *inner), "array", dtype, is_collated=True)


def ragged(rows: list[list[float]], dtype: str, inner: tuple[int, ...] = ()) -> Ragged:
    size = int(np.prod(inner)) if inner else 1
    lengths = np.array([len(r) * size for r in rows], np.int64)
    flat = np.array([x for r in rows for x in r for _ in range(size)], dtype)
    return Ragged.from_lengths(flat, lengths, inner)


def listed(values: Any) -> list[Any]:
    return [values.row(i).tolist() for i in range(len(values))]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("values")
    yield Store.create(folder)
    shutil.rmtree(folder)


# -- in memory ---------------------------------------------------------------------------------------


def test_ragged_rows_are_taken_sliced_and_padded_like_lists() -> None:
    rows = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0]]
    values = ragged(rows, "float32")
    assert listed(values) == rows
    order = np.array([3, 1, 0])
    taken = values.take(order)
    assert listed(taken) == [rows[i] for i in order]
    assert listed(taken[1:]) == [rows[1], rows[0]]
    assert taken.gathered().tolist() == [4, 5, 6, 1, 2]
    assert listed(taken.packed()) == listed(taken)
    assert num_bytes(taken) == 5 * 4
    np.testing.assert_array_equal(taken.padded(-1), [[4, 5, 6], [-1, -1, -1], [1, 2, -1]])
    np.testing.assert_array_equal(taken.padded(0, 2), [[4, 5], [0, 0], [1, 2]])
    assert Ragged.empty("float32", 2).padded(0).shape == (2, 0)
    pairs = ragged([[1.0], [], [2.0, 3.0]], "int64", inner=(2,))
    np.testing.assert_array_equal(
        pairs.padded(9), [[[1, 1], [9, 9]], [[9, 9], [9, 9]], [[2, 2], [3, 3]]]
    )


# -- from Arrow --------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.lists(st.integers(-100, 100), max_size=4), max_size=8),
    start=st.integers(0, 8),
    large=st.booleans(),
)
@settings(max_examples=amount(50, 2000), deadline=None)
def test_lists_of_any_length_survive_conversion_from_arrow(
    rows: list[list[int]], start: int, large: bool
) -> None:
    kind = pa.large_list(pa.int32()) if large else pa.list_(pa.int32())
    values, found = column_to_numpy(pa.array(rows, kind)[start:], ragged_column("int64"))
    assert found.is_clean
    assert isinstance(values, Ragged)
    assert listed(values) == rows[start:]


@given(rows=st.lists(st.binary(max_size=5), max_size=8), start=st.integers(0, 8))
@settings(max_examples=amount(50, 2000), deadline=None)
def test_binary_values_survive_conversion_from_arrow(rows: list[bytes], start: int) -> None:
    for kind in (pa.binary(), pa.large_binary()):
        column = Column("b", "binary", "uint8", (-1,), "binary", "float32", has_decoder=True)
        values, found = column_to_numpy(pa.array(rows, kind)[start:], column)
        assert found.is_clean
        assert isinstance(values, Ragged)
        assert [values.row(i).tobytes() for i in range(len(values))] == rows[start:]


def test_nested_lists_of_different_shapes_are_counted() -> None:
    kind = pa.list_(pa.list_(pa.float64()))
    fixed = Column("n", "array", "float32", None, "array<array<double>>", "float32")
    good = pa.array([[[9.0]], [[1, 2], [3, 4], [5, 6]], [[6, 5], [4, 3], [2, 1]]], kind)[1:]
    values, found = column_to_numpy(good, fixed)
    assert found.shapes == {(3, 2): 2}
    np.testing.assert_array_equal(values, [[[1, 2], [3, 4], [5, 6]], [[6, 5], [4, 3], [2, 1]]])
    uneven = pa.array([[[1, 2], [3, 4]], [[1, 2], [3]], [[1, 2]]], kind)
    values, found = column_to_numpy(uneven, fixed)
    assert values is None
    assert not found.is_clean
    outer = pa.array([[[1, 2], [3, 4]], [], [[1, 2]]], kind)
    values, found = column_to_numpy(outer, fixed)
    assert values is None
    assert found.shapes == {(2, 2): 1, (0, 2): 1, (1, 2): 1}
    values, found = column_to_numpy(outer, ragged_column("float32", (2,)))
    assert isinstance(values, Ragged)
    assert listed(values) == [[[1, 2], [3, 4]], [], [[1, 2]]]
    holes = pa.array([[[1, None]], [None], [[1, 2]], None], kind)
    values, found = column_to_numpy(holes, fixed)
    assert values is None
    assert found.nulls == 3
    deep = pa.array([[[[1.0], [2.0]]], [[[3.0], [4.0]]]])
    values, found = column_to_numpy(deep, fixed)
    assert isinstance(values, np.ndarray)
    assert values.shape == (2, 1, 2, 1)


def test_decimals_are_stored_as_floats() -> None:
    from decimal import Decimal

    column = Column("d", "scalar", "float32", (), "decimal(5,2)", "float32")
    source = pa.array([Decimal("1.25"), Decimal("-3.50")], pa.decimal128(5, 2))
    values, found = column_to_numpy(source, column)
    assert found.is_clean
    np.testing.assert_array_equal(values, np.float32([1.25, -3.5]))


def test_wide_vectors_stay_sparse_and_narrow_vectors_become_dense() -> None:
    narrow = [dense(0, 2, 0), sparse(3, {0: 5.0, 2: 0.0}), sparse(3, {}), dense(1, 2, 3)]
    column = Column("x", "vector", "float32", None, "vector", "float32", is_sparse=True)
    for start in (0, 1):
        values, found = column_to_numpy(pa.array(narrow, VECTOR)[start:], column)
        assert found.is_clean
        assert isinstance(values, SparseRows)
        expected = [[0, 2, 0], [5, 0, 0], [0, 0, 0], [1, 2, 3]][start:]
        np.testing.assert_array_equal(values.dense(), expected)
    by_width = Column("x", "vector", "float32", None, "vector", "float32")
    for size, kind in ((DENSE_WIDTH, np.ndarray), (DENSE_WIDTH + 1, SparseRows)):
        values, _ = column_to_numpy(pa.array([sparse(size, {7: 1.0})], VECTOR), by_width)
        assert isinstance(values, kind)
    label = Column("x", "vector", "float32", None, "vector", "float32", is_sparse=False)
    values, _ = column_to_numpy(pa.array([sparse(DENSE_WIDTH + 1, {7: 1.0})], VECTOR), label)
    assert isinstance(values, np.ndarray)


def test_bad_values_of_long_rows_are_counted_by_row() -> None:
    nan = float("nan")
    rows = pa.array([sparse(WIDTH, {1: nan, 2: nan}), sparse(WIDTH, {3: 1e300}), None], VECTOR)
    column = Column("x", "vector", "float32", None, "vector", "float32")
    values, found = column_to_numpy(rows, column)
    assert values is None
    assert (found.nans, found.overflows, found.nulls) == (1, 1, 1)
    lists = pa.array([[1.5, 2.5], [1.0], []])
    _, found = column_to_numpy(lists, ragged_column("int64"))
    assert found.fractions == 1


def test_fill_value_replaces_nulls_and_nan() -> None:
    nan = float("nan")

    def filled(array: pa.Array, kind: str, dtype: str, value: float) -> Any:
        shape = () if kind == "scalar" else None
        column = Column("c", kind, dtype, shape, "", dtype, invalid=("fill", value))
        values, found = column_to_numpy(array, column)
        assert found.is_clean
        return values.tolist() if isinstance(values, np.ndarray) else listed(values)

    assert filled(pa.array([1.0, None, nan]), "scalar", "float32", 7) == [1, 7, 7]
    assert filled(pa.array([1, None], pa.int32()), "scalar", "float32", 0.5) == [1, 0.5]
    assert filled(pa.array([True, None]), "scalar", "uint8", 0) == [1, 0]
    assert filled(pa.array([[1.0, None], [nan, 2.0]]), "array", "float32", 7) == [[1, 7], [7, 2]]
    assert filled(pa.array([[1.0, None], [nan]]), "ragged", "float32", 7) == [[1, 7], [7]]
    assert filled(pa.array([dense(1, nan)], VECTOR), "vector", "float32", 7) == [[1, 7]]
    # A row without an array has no shape to fill.
    column = Column("c", "array", "float32", None, "", "float32", invalid=("fill", 7))
    values, found = column_to_numpy(pa.array([[1.0], None]), column)
    assert values is None
    assert found.nulls == 1


def test_rows_with_null_or_nan_are_not_usable() -> None:
    nan = float("nan")
    column = Column("c", "array", "float32", None, "", "float32")
    lists = pa.array([[1.0], [1.0, None], None, [nan], [], [2.0, 3.0]])
    usable = usable_rows(lists, column)
    assert usable is not None
    assert usable.tolist() == [True, False, False, False, True, True]
    assert usable_rows(lists.take(pa.array([0, 5])), column) is None
    nested = pa.array([[[1.0], [2.0]], [[1.0], [None]], [None], [[nan]]])
    found = usable_rows(nested, column)
    assert found is not None
    assert found.tolist() == [True, False, False, False]
    scalar = Column("c", "scalar", "float32", (), "", "float32")
    found = usable_rows(pa.array([1.0, None, nan]), scalar)
    assert found is not None
    assert found.tolist() == [True, False, False]
    vectors = usable_rows(pa.array([dense(1.0), None, sparse(1, {0: nan})], VECTOR), column)
    assert vectors is not None
    assert vectors.tolist() == [True, False, False]


# -- through files -----------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(0, 30))
    lengths = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    return {
        "count": count,
        "dtype": draw(st.sampled_from(DTYPES)),
        "inner": draw(st.sampled_from([(), (3,), (2, 2)])),
        "ragged": draw(lengths),
        "bytes": draw(st.lists(st.binary(max_size=6), min_size=count, max_size=count)),
        "sparse": draw(lengths),
        "group_bytes": draw(st.sampled_from([1, 100, 1 << 20])),
        "cuts": sorted(draw(st.lists(st.integers(0, count), max_size=2))),
        "kept": draw(st.lists(st.booleans(), min_size=count, max_size=count)),
    }


def make(store: Store, table: dict[str, Any]) -> tuple[Manifest, dict[str, list[Any]]]:
    """Write the rows of a drawn table as files, and return them as Python lists too."""
    count, inner = table["count"], table["inner"]
    columns = [
        Column("id", "scalar", "int64", (), "bigint", "int64"),
        ragged_column(table["dtype"], inner),
        Column("b", "binary", "uint8", (-1,), "binary", "float32", has_decoder=True),
        Column("s", "sparse", table["dtype"], (WIDTH,), "vector", table["dtype"]),
    ]
    rng = np.random.default_rng(count)
    rows = {
        "id": list(range(count)),
        "v": [rng.integers(0, 99, (n, *inner)).astype(table["dtype"]) for n in table["ragged"]],
        "b": table["bytes"],
        "s": [
            (
                np.sort(rng.choice(WIDTH, n, replace=False)).astype(np.int32),
                rng.integers(1, 99, n).astype(table["dtype"]),
            )
            for n in table["sparse"]
        ],
    }

    def joined(parts: list[Any], dtype: str, shape: tuple[int, ...] = ()) -> Ragged:
        flat = [np.asarray(p, dtype).reshape(-1) for p in parts]
        lengths = np.array([len(f) for f in flat], np.int64)
        values = np.concatenate(flat) if flat else np.empty(0, dtype)
        return Ragged.from_lengths(values, lengths, shape)

    files = []
    edges = [0, *table["cuts"], count]
    for i, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        values = {
            "id": np.arange(low, high),
            "v": joined(rows["v"][low:high], table["dtype"], inner),
            "b": joined([np.frombuffer(b, np.uint8) for b in rows["b"][low:high]], "uint8"),
            "s": SparseRows(
                joined([p[0] for p in rows["s"][low:high]], "int32"),
                joined([p[1] for p in rows["s"][low:high]], table["dtype"]),
                WIDTH,
            ),
        }
        path = f"data/k/app/part-{i}.parquet"
        files.append(
            write_packed(store, path, columns, values, row_group_bytes=table["group_bytes"])
        )
    sizes = {"v": sum(a.nbytes for a in rows["v"]), "b": sum(map(len, rows["b"]))}
    manifest = Manifest(tuple(files), DataSchema(tuple(columns), ()), count, variable_bytes=sizes)
    manifest.save(store, "data/k/app")
    return manifest, rows


def check(found: dict[str, Any], rows: dict[str, list[Any]], numbers: list[int]) -> None:
    assert found["id"].tolist() == numbers
    for at, number in enumerate(numbers):
        np.testing.assert_array_equal(found["v"].row(at), rows["v"][number])
        assert found["b"].row(at).tobytes() == rows["b"][number]
        indices, values = rows["s"][number]
        np.testing.assert_array_equal(found["s"].indices.row(at), indices)
        np.testing.assert_array_equal(found["s"].values.row(at), values)


@given(table=tables())
@settings(
    max_examples=amount(50, 3000), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_rows_of_every_type_are_read_back_from_files(
    shared_store: Store, table: dict[str, Any]
) -> None:
    manifest, rows = make(shared_store, table)
    assert Manifest.load(shared_store, "data/k/app") == manifest
    numbers = list(range(table["count"]))
    kept = np.flatnonzero(np.array(table["kept"], bool)).astype(np.int64)
    with RowSource(shared_store, manifest) as source:
        check(source.read(["s", "id", "b", "v"]), rows, numbers)
        check(source.read(["id", "v", "b", "s"], kept), rows, kept.tolist())
    people = read_packed(shared_store.full_url("data/k/app"))
    for number in numbers:
        np.testing.assert_array_equal(people["v"][number], rows["v"][number])
        assert people["b"][number] == rows["b"][number]
        np.testing.assert_array_equal(people["s"][number][1], rows["s"][number][1])


TABLE = {
    "count": 6,
    "dtype": "float64",
    "inner": (),
    "ragged": [3, 0, 1, 2, 0, 5],
    "bytes": [b"abc", b"", b"x" * 100, b"0", b"12", b""],
    "sparse": [0, 2, 1, 0, 3, 1],
    "group_bytes": 150,
    "cuts": [3],
    "kept": [True] * 6,
}


@pytest.mark.parametrize(
    "options", [{"compression": "snappy"}, {"data_page_size": 16, "write_batch_size": 1}, {}]
)
def test_file_rewritten_by_another_program_is_decoded(
    shared_store: Store, options: dict[str, Any], tmp_path: Path
) -> None:
    store = Store.create(tmp_path / "store")
    manifest, rows = make(store, TABLE)
    for file in manifest.files:
        path = tmp_path / "store" / file.path
        table = pq.read_table(path)
        nullable = pa.schema([f.with_nullable(True) for f in table.schema], table.schema.metadata)
        with pq.ParquetWriter(path, nullable, **options) as writer:
            at = 0
            for size in file.row_groups:
                writer.write_table(table.slice(at, size).cast(nullable))
                at += size
    files = tuple(replace(f, footer_crc=None) for f in manifest.files)
    with RowSource(store, replace(manifest, files=files)) as source:
        check(source.read(["s", "id", "b", "v"]), rows, list(range(6)))
        check(source.read(["s", "id", "b", "v"], np.array([1, 2, 5])), rows, [1, 2, 5])


def test_files_written_by_sparkhvd_are_read_without_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    store = Store.create(tmp_path / "store")
    many = {k: v * 5000 if isinstance(v, list) and k != "cuts" else v for k, v in TABLE.items()}
    manifest, rows = make(store, {**many, "count": 30_000, "cuts": [], "group_bytes": 64 << 20})
    assert manifest.files[0].row_groups == (30_000,)
    monkeypatch.setattr("sparkhvd.data.packed.file.PackedFile._decoded_column", refuse)
    with RowSource(store, manifest) as source:
        picked = np.array([0, 20_001, 29_999])
        check(source.read(["s", "id", "b", "v"], picked), rows, picked.tolist())
        assert len(source.read(["v"])["v"]) == 30_000


def test_flipped_bit_is_detected_or_changes_no_value(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    manifest, rows = make(store, TABLE)
    path = tmp_path / "store" / manifest.files[0].path
    content = path.read_bytes()
    names = ["s", "id", "b", "v"]
    num_found = 0
    for bit in np.random.default_rng(7).choice(8 * len(content), 300, replace=False).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            with RowSource(store, manifest) as source:
                values = source.read(names)
        except (StoreError, OSError, ValueError):
            num_found += 1
        else:
            check(values, rows, list(range(6)))
    assert num_found > 30  # most of such a small file is names and numbers that nothing reads


def test_row_larger_than_a_page_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkhvd.data.packed.writer.PAGE_BYTES", 100)
    store = Store.create(tmp_path / "store")
    with pytest.raises(
        InvalidArgumentError, match="Column 'b' has a row of 104 bytes; at most 100 fit"
    ):
        make(store, TABLE)


def test_data_of_the_first_format_version_are_read(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    manifest, _ = make(store, TABLE)
    import json

    old = json.loads(manifest.to_json())
    old["format_version"] = 1
    for name in ("variable_bytes", "num_skipped", "sha256"):
        del old[name]
    for column in old["schema"]["features"]:
        for name in ("has_decoder", "is_collated", "decoded", "is_sparse", "invalid"):
            del column[name]
    read = Manifest.from_json(json.dumps(old))
    assert read.format_version == 1
    assert [c.name for c in read.schema.columns] == ["id", "v", "b", "s"]
