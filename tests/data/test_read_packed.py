"""`read_packed` for users: folders, files, URLs, and its errors."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd import InvalidArgumentError, Store, read_packed
from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.store import addresses
from tests.harness.servers import S3

pytestmark = pytest.mark.pure

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
def test_folder_returns_all_rows_in_order(tmp_path: Path, kind: str) -> None:
    url = {"path": str(tmp_path), "url": tmp_path.as_uri(), "memory": "memory://packed"}[kind]
    folder = make(Store(url))
    found = read_packed(f"{url}/{folder}/")
    np.testing.assert_array_equal(found["x"], np.arange(8).reshape(4, 2))
    assert found["text"].tolist() == WORDS


def test_single_file_returns_its_rows(tmp_path: Path) -> None:
    folder = make(Store(str(tmp_path)))
    found = read_packed(tmp_path / folder / "part-1.parquet")
    np.testing.assert_array_equal(found["x"], np.arange(2, 8).reshape(3, 2))
    assert found["text"].tolist() == WORDS[1:]


def test_files_other_than_packed_files_raise_a_clear_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "plain.parquet")
    with pytest.raises(InvalidArgumentError, match="is Parquet, but not packed"):
        read_packed(tmp_path / "plain.parquet")
    with pytest.raises(InvalidArgumentError, match=r"neither a folder with a _manifest\.json"):
        read_packed(tmp_path)


@pytest.mark.parametrize(
    ("given", "folder", "name"),
    [
        ("/a/b c/", "/a/b c", ""),
        ("/a/x.parquet", "/a", "x.parquet"),
        ("dbfs:/store/data/k/app", "dbfs:/store/data/k", "app"),
        ("dbfs:/store/50%25/app", "dbfs:/store/50%25", "app"),
        ("file:/a/b%20c/d%20e/", "file:/a/b%20c", "d e"),
        ("s3://bucket/st/k/app?region=r&endpoint_override=http://h:1", "s3://bucket/st/k", "app"),
        ("s3a://u:p@bucket/st/k/a%20b/?region=r", "s3a://u:p@bucket/st/k", "a b"),
        ("memory://b/k/100%25", "memory://b/k", "100%25"),
    ],
)
def test_address_is_split_into_folder_and_file_name(given: str, folder: str, name: str) -> None:
    _, mark, query = given.partition("?")
    if not name:  # as os.path.abspath does
        folder, _, name = folder.rpartition("/")
    assert addresses.split(given) == (f"{folder}{mark}{query}", name)


def test_folder_with_blanks_in_its_name_is_read_by_url(tmp_path: Path) -> None:
    folder = make(Store.create(tmp_path / "a b"))
    os.rename(tmp_path / "a b" / folder, tmp_path / "a b" / "c d")
    assert read_packed((tmp_path / "a b" / "c d").as_uri())["text"].tolist() == WORDS


def test_dbfs_url_reads_the_local_dbfs_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make(Store(str(tmp_path)))
    local = addresses._local
    monkeypatch.setattr(addresses, "_local", lambda path, _: local(f"{tmp_path}{path[5:]}", path))
    assert read_packed("dbfs:/data/k/app")["text"].tolist() == WORDS


@pytest.mark.leaks("file systems keep their connections open")
def test_folder_url_keeps_the_query_of_its_store(s3: S3) -> None:
    options = s3.options()
    query = "?" + "&".join(f"{k}={options[k]}" for k in ("endpoint_override", "region", "scheme"))
    user = f"{options['access_key']}:{quote(options['secret_key'], safe='')}@"
    store = Store.create(f"s3://{user}bucket/packed{query}")
    folder = make(store)
    assert store.full_url(str(folder)) == f"s3://bucket/packed/{folder}{query}"
    for url, given in (
        (f"s3://{user}bucket/packed/{folder}{query}", {}),
        (store.full_url(str(folder)), {k: options[k] for k in ("access_key", "secret_key")}),
    ):
        assert read_packed(url, **given)["text"].tolist() == WORDS
