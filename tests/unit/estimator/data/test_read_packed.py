"""`read_packed` for people: folders, files, URLs, and what it says of anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd import InvalidArgumentError, Store, read_packed
from sparkhvd.estimator.data.manifest import Manifest
from sparkhvd.estimator.data.packed import write_packed
from sparkhvd.estimator.data.schema import Column, DataSchema
from sparkhvd.estimator.data.values import Ragged

X = Column("x", "array", "float32", (2,), "array<float>", "float32")
TEXT = Column("text", "string", "uint8", (-1,), "string", "float32", has_decoder=True)
WORDS = ["a", "", "ö c", "d"]


def make(store: Store) -> Path:
    """Four rows in two files and their manifest, in `data/k/app`."""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    data = [word.encode() for word in WORDS]
    files = []
    for number, rows in enumerate((slice(0, 1), slice(1, 4))):
        flat = np.frombuffer(b"".join(data[rows]), np.uint8)
        text = Ragged.from_lengths(flat, np.array([len(d) for d in data[rows]]))
        path = f"data/k/app/part-{number}.parquet"
        files.append(write_packed(store, path, [X, TEXT], {"x": x[rows], "text": text}))
    schema = DataSchema((X, TEXT), ())
    Manifest(tuple(files), schema, 4, variable_bytes={"text": 6}).save(store, "data/k/app")
    return Path("data/k/app")


@pytest.mark.parametrize("kind", ["path", "url", "memory"])
def test_a_folder_gives_all_rows_in_order(tmp_path: Path, kind: str) -> None:
    url = {"path": str(tmp_path), "url": tmp_path.as_uri(), "memory": "memory://packed"}[kind]
    folder = make(Store(url))
    found = read_packed(f"{url}/{folder}/")
    np.testing.assert_array_equal(found["x"], np.arange(8).reshape(4, 2))
    assert found["text"].tolist() == WORDS


def test_one_file_gives_its_rows(tmp_path: Path) -> None:
    folder = make(Store(str(tmp_path)))
    found = read_packed(tmp_path / folder / "part-1.parquet")
    np.testing.assert_array_equal(found["x"], np.arange(2, 8).reshape(3, 2))
    assert found["text"].tolist() == WORDS[1:]


def test_what_is_not_packed_is_said(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "plain.parquet")
    with pytest.raises(InvalidArgumentError, match="is Parquet, but not packed"):
        read_packed(tmp_path / "plain.parquet")
    with pytest.raises(InvalidArgumentError, match=r"there is no _manifest\.json in that folder"):
        read_packed(tmp_path)
