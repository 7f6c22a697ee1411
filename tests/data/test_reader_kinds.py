"""All kinds of columns over all ranks and all kinds of files: each row once, with its own values."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkhvd.data.columns.decoders import RowFunctions, pad
from sparkhvd.data.columns.ragged import Ragged, SparseRows, num_bytes
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.reading.reader import Batch, Reader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from tests.harness.ranks import run_threads

pytestmark = pytest.mark.pure

WIDTH = 50
COLUMNS = (
    Column("id", "scalar", "int64", (), "bigint", "int64"),
    Column("vector", "vector", "float32", (3,), "vector", "float32"),
    Column("tokens", "ragged", "int32", (-1,), "array<int>", "int32", is_collated=True),
    Column("image", "binary", "uint8", (-1,), "binary", "float32", has_decoder=True),
    Column("word", "string", "uint8", (-1,), "string", "int64", has_decoder=True),
    Column("wide", "sparse", "float32", (WIDTH,), "vector", "float32"),
)


def pixels(data: bytes) -> np.ndarray:
    """(2, 2) from four bytes, of which the first is the row's number and the last its complement."""
    return np.frombuffer(data, np.uint8)[:4].reshape(2, 2)


FUNCTIONS = RowFunctions({"image": pixels, "word": len}, {"tokens": pad(-1)})


def ragged(rows: list[Any], dtype: str) -> Ragged:
    flat = [np.asarray(row, dtype) for row in rows]
    lengths = np.array([len(row) for row in flat], np.int64)
    return Ragged.from_lengths(np.concatenate([np.empty(0, dtype), *flat]), lengths)


def values_of(ids: np.ndarray) -> dict[str, Any]:
    """Make values that encode their row's number, which is below 250."""
    bytes_of = [bytes([i, 1, 2, 255 - i]) + b"." * (i % 7) for i in ids]
    return {
        "id": ids,
        "vector": (ids[:, None] * [1, 2, 3]).astype(np.float32),
        "tokens": ragged([np.full(i % 5, i) for i in ids], "int32"),
        "image": ragged([np.frombuffer(b, np.uint8) for b in bytes_of], "uint8"),
        "word": ragged([np.frombuffer(b"w" * (i % 9), np.uint8) for i in ids], "uint8"),
        "wide": SparseRows(
            ragged([np.arange(i % 4) * 3 for i in ids], "int32"),
            ragged([np.full(i % 4, i) for i in ids], "float32"),
            WIDTH,
        ),
    }


def make(store: Store, rows_per_file: list[int], group_rows: int) -> Manifest:
    files, at, sizes = [], 0, dict.fromkeys(("tokens", "image", "word", "wide"), 0)
    for number, rows in enumerate(rows_per_file):
        values = values_of(np.arange(at, at + rows))
        for name in sizes:
            sizes[name] += num_bytes(values[name])
        path = f"data/k/app/part-{number}.parquet"
        group_bytes = group_rows * 100  # a row has about that many
        files.append(write_packed(store, path, COLUMNS, values, row_group_bytes=group_bytes))
        at += rows
    return Manifest(tuple(files), DataSchema(COLUMNS, ()), at, variable_bytes=sizes)


def check(batch: Batch) -> list[int]:
    ids = batch.columns["id"]
    if not batch.num_rows:
        return []
    np.testing.assert_array_equal(batch.columns["vector"], ids[:, None] * [1, 2, 3])
    np.testing.assert_array_equal(batch.columns["word"], ids % 9)
    np.testing.assert_array_equal(batch.columns["image"][:, 0, 0], ids)
    np.testing.assert_array_equal(batch.columns["image"][:, 1, 1], 255 - ids)
    longest = int((ids % 5).max())
    expected = np.where(np.arange(longest) < (ids % 5)[:, None], ids[:, None], -1)
    np.testing.assert_array_equal(batch.columns["tokens"], expected)
    dense = np.zeros((len(ids), WIDTH), np.float32)
    for at, number in enumerate(ids):
        dense[at, : 3 * (number % 4) : 3] = number
    np.testing.assert_array_equal(batch.columns["wide"].dense(), dense)
    numbers: list[int] = ids.tolist()
    return numbers


@pytest.mark.parametrize(
    ("rows_per_file", "group_rows", "size"),
    [([200], 1000, 8), ([200], 7, 3), ([90, 0, 1, 109], 50, 4), ([13], 1000, 8)],
)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("shuffle_bytes", [1 << 20, 3000])
def test_ranks_divide_rows_of_every_column_kind(
    tmp_path: Path,
    rows_per_file: list[int],
    group_rows: int,
    size: int,
    shuffle: bool,
    shuffle_bytes: int,
) -> None:
    store = Store.create(tmp_path)
    manifest = make(store, rows_per_file, group_rows)
    if rows_per_file == [200] and group_rows == 1000:
        assert manifest.files[0].row_groups == (200,)  # one row group feeds all ranks

    def rank(number: int) -> list[list[int]]:
        with Reader(
            store,
            manifest,
            rank=number,
            size=size,
            batch_size=6,
            shuffle=shuffle,
            shuffle_bytes=shuffle_bytes,
            functions=FUNCTIONS,
            num_workers=1 + number % 2,
        ) as reader:
            return [[i for batch in reader.epoch(e) for i in check(batch)] for e in range(2)]

    by_rank: list[Any] = run_threads([lambda r=r: rank(r) for r in range(size)])
    for outcome in by_rank:
        if isinstance(outcome, BaseException):
            raise outcome
    for epoch in range(2):
        seen = sorted(i for of_rank in by_rank for i in of_rank[epoch])
        assert seen == list(range(manifest.num_rows))


def test_num_workers_threads_decode_concurrently(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    manifest = make(store, [12], 100)
    together = threading.Barrier(3)
    alone = [True]  # the first row is decoded by itself, for its shape

    def decode(data: bytes) -> np.ndarray:
        if alone:
            alone.clear()
        else:
            together.wait(20)
        return pixels(data)

    functions = RowFunctions({"image": decode}, {})
    options: dict[str, Any] = {"rank": 0, "size": 1, "batch_size": 12, "columns": ["id", "image"]}
    with Reader(store, manifest, **options, functions=functions, num_workers=3) as reader:
        (batch,) = reader.epoch(0)
        np.testing.assert_array_equal(batch.columns["image"][:, 0, 0], batch.columns["id"])
    assert [t.name for t in threading.enumerate() if t.name.startswith("sparkhvd")] == []


def test_exceptions_of_a_decoder_in_a_worker_reach_the_caller(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    manifest = make(store, [30], 100)

    def broken(data: bytes) -> np.ndarray:
        if data[0] == 20:
            raise ValueError("no image")
        return pixels(data)

    functions = RowFunctions({"image": broken}, {})
    options: dict[str, Any] = {"rank": 0, "size": 1, "batch_size": 5, "columns": ["image"]}
    with (
        Reader(store, manifest, **options, functions=functions, num_workers=2) as reader,
        pytest.raises(InvalidArgumentError, match=r"decoders\['image'\] failed for a value of 10"),
    ):
        list(reader.epoch(0))
