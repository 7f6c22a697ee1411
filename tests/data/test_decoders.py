"""Decoders and collate functions, alone and in the reader."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkhvd.data.columns.decoders import RowFunctions, pad
from sparkhvd.data.columns.ragged import Ragged, SparseRows
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from tests.harness.pages import named

pytestmark = pytest.mark.pure

ROWS = 50
WIDTH = 10_000_000
ID = Column("id", "scalar", "int64", (), "bigint", "int64")
TEXT = Column("t", "string", "uint8", (-1,), "string", "float32", has_decoder=True)
TOKENS = Column("v", "ragged", "int64", (-1,), "array<int>", "int64", is_collated=True)
SPARSE = Column("s", "sparse", "float32", (WIDTH,), "vector", "float32")


def make(tmp_path: Path, rows: int = ROWS) -> tuple[Store, Manifest]:
    """Row i: the text of i, i % 4 tokens i, and i at index i of a sparse vector."""
    store = Store.create(tmp_path / "store")
    numbers = np.arange(rows)
    texts = [np.frombuffer(str(i).encode(), np.uint8) for i in numbers]
    one = np.ones(rows, np.int64)
    values: dict[str, Any] = {
        "id": numbers,
        "t": Ragged.from_lengths(np.concatenate(texts), np.array([len(t) for t in texts])),
        "v": Ragged.from_lengths(np.repeat(numbers, numbers % 4), numbers % 4),
        "s": SparseRows(
            Ragged.from_lengths(numbers.astype(np.int32), one),
            Ragged.from_lengths(numbers.astype(np.float32), one),
            WIDTH,
        ),
    }
    schema = DataSchema((ID, TEXT, TOKENS, SPARSE), ())
    file = write_packed(store, "data/k/app/p.parquet", schema.columns, values, row_group_bytes=500)
    return store, Manifest((file,), schema, rows, variable_bytes={"t": 90, "v": 600, "s": 400})


def functions(**decoders: Any) -> RowFunctions:
    return RowFunctions({"t": lambda text: [float(text), 1.0], **decoders}, {"v": pad(-1)})


@pytest.mark.parametrize("shuffle_bytes", [1 << 30, 400])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_batches_contain_the_results_of_decoders_and_collate_functions(
    tmp_path: Path, shuffle_bytes: int, num_workers: int
) -> None:
    store, manifest = make(tmp_path)
    seen: list[int] = []
    for rank in range(3):
        with Reader(
            store,
            manifest,
            rank=rank,
            size=3,
            batch_size=4,
            shuffle_bytes=shuffle_bytes,
            functions=functions(),
            num_workers=num_workers,
        ) as reader:
            for batch in reader.epoch(0):
                ids = batch.columns["id"].tolist()
                seen += ids
                if not ids:
                    continue
                np.testing.assert_array_equal(batch.columns["t"], np.float32([[i, 1] for i in ids]))
                assert batch.columns["t"].dtype == np.float32
                longest = max(i % 4 for i in ids)
                expected = [[i] * (i % 4) + [-1] * (longest - i % 4) for i in ids]
                assert batch.columns["v"].tolist() == expected
                sparse = batch.columns["s"]
                assert sparse.coordinates().tolist() == [list(range(len(ids))), ids]
                assert sparse.values.gathered().tolist() == ids
    assert sorted(seen) == list(range(ROWS))
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkhvd-")]


@pytest.mark.parametrize("rows", [1, 2])
def test_ranks_without_rows_get_empty_columns(tmp_path: Path, rows: int) -> None:
    store, manifest = make(tmp_path, rows)
    for rank in range(3):
        options: dict[str, Any] = {"rank": rank, "size": 3, "batch_size": 4}
        with Reader(store, manifest, functions=functions(), **options) as reader:
            (batch,) = list(reader.epoch(0))
            assert len(batch.columns["s"]) == batch.num_rows
            assert batch.columns["t"].shape == (batch.num_rows, 2)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            lambda text: 1 / int(text),
            "decoders['t'] failed for '0': ZeroDivisionError: division by zero",
        ),
        ({"0": 1}, "decoders['t'] is a dict of 1 values without '1', which a row has. Add it"),
        (
            lambda text: text,
            "decoders['t'] returned '0'; it must return a number or a numpy array of numbers.",
        ),
        (
            lambda text: np.zeros(int(text) // 10),
            "decoders['t'] returned float64 of shape (1,) for a row; for the first row it returned "
            "shape (0,), stored as float32. Return one shape and dtype, or give collate_fn={'t': "
            "...} for rows that differ.",
        ),
        (
            lambda text: int(text) if text == "0" else 0.5,
            "decoders['t'] returned float64 of shape () for a row; for the first row it returned shape (), stored as int64.",
        ),
    ],
)
def test_error_names_decoder_and_value_that_failed(
    tmp_path: Path, decoder: Any, message: str
) -> None:
    store, manifest = make(tmp_path)

    def read() -> None:
        options: dict[str, Any] = {"rank": 0, "size": 1, "batch_size": 8, "shuffle": False}
        with Reader(store, manifest, functions=functions(t=decoder), **options) as reader:
            list(reader.epoch(0))

    with pytest.raises(InvalidArgumentError) as failed:
        read()
    assert str(failed.value).startswith(message)


def test_error_names_collate_function_that_failed() -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        RowFunctions({}, {"v": lambda rows: rows[9]}).collate_batch({"v": [np.zeros(1)]})
    assert str(failed.value) == (
        "collate_fn['v'] failed for a batch of 1 rows: IndexError: list index out of range"
    )
    with pytest.raises(InvalidArgumentError, match=r"decoders\['t'\] is 3; it must be a function"):
        RowFunctions({"t": 3})


def test_padding_a_list_of_rows_equals_padding_ragged_values() -> None:
    rows = [np.array([1.0, 2.0]), np.array([]), np.array([3.0])]
    values = Ragged.from_lengths(np.concatenate(rows), np.array([2, 0, 1]))
    for length in (None, 1, 4):
        function = pad(7, length)
        np.testing.assert_array_equal(
            function(rows), values.padded(function.value, function.length)
        )


def test_examples_of_the_inputs_page_run() -> None:
    found_names: list[dict[str, Any]] = []
    for name in ("decoders", "images", "collate"):
        found_names.append({})
        exec(named("docs/inputs.md", name).text, found_names[-1])
    plain, images, collated = found_names
    assert images["decoders"]["path"].std == (0.229, 0.224, 0.225)
    made = RowFunctions(plain["decoders"], collated["collate_fn"])
    assert made.decoders["image"](b"\x00\xff\x00\x00").tolist() == [[[0, 1], [0, 0]]]
    batch = {
        "tokens": [np.array([1]), np.array([1, 2])],
        "words": [np.array([5, 6]), np.array([7])],
    }
    found = made.collate_batch(batch)
    assert found["tokens"].tolist() == [[1, 0], [1, 2]]
    assert [v.tolist() for v in found["words"]] == [[5, 6, 7], [0, 2]]
