"""Checksums of blocks: of files during their writing, and of all bytes that are read."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import RowSource, checksums, write_packed
from sparkhvd.data.packed.checksums import BLOCK_BYTES, SummingSink, add_blocks
from sparkhvd.data.packed.file import PackedFile
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError

pytestmark = pytest.mark.pure

X = Column("x", "vector", "float32", (32,), "vector", "float32")
Y = Column("y", "scalar", "int64", (), "bigint", "int64")
ROWS = 40_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def make(store: Store) -> Manifest:
    features = np.random.default_rng(1).random((ROWS, 32), dtype=np.float32)
    values = {"x": features, "y": np.arange(ROWS)}
    schema = DataSchema((X,), (Y,))
    file = write_packed(store, "data/k/app/part-0.parquet", [X, Y], values, row_group_bytes=2 << 20)
    return Manifest((file,), schema, ROWS)


@pytest.mark.parametrize("add", [add_blocks, checksums._with_zlib])
def test_checksums_of_blocks_do_not_depend_on_write_sizes(add: Any) -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, 5 * BLOCK_BYTES + 123, np.uint8)
    expected = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    for _ in range(20):
        cuts = np.sort(rng.integers(0, len(data), 4)).tolist()
        found = np.zeros(len(expected), np.uint32)
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            number, at = divmod(start, BLOCK_BYTES)
            add(found[number : -(-stop // BLOCK_BYTES)], data[start:stop], at)
        assert found.tolist() == expected


def test_a_checksum_table_matches_the_content_or_is_detected_as_damaged() -> None:
    file = io.BytesIO()
    sink = SummingSink(file)
    for size in (0, 1, BLOCK_BYTES, 70_000, 5):
        sink.write(bytes(size))
    written = sink.tell()
    sink.write_table()
    table = bytearray(file.getvalue()[written:])
    assert checksums.table_bytes(bytes(table[-checksums.TRAILER_BYTES :])) == len(table)
    decoded = checksums.decode(bytes(table))
    assert decoded is not None
    size, crcs = decoded
    content = bytes(written)
    assert size == written == 1 + BLOCK_BYTES + 70_000 + 5
    assert crcs.tolist() == [
        zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, written, BLOCK_BYTES)
    ]
    for at in range(len(table) - 4):  # not of the mark
        table[at] ^= 16
        assert checksums.decode(bytes(table)) is None
        table[at] ^= 16


def test_pyarrow_reads_a_file_with_checksums(store: Store, tmp_path: Path) -> None:
    manifest = make(store)
    table = pq.read_table(tmp_path / "store" / manifest.files[0].path)
    assert table["y"].chunk(0)[7].as_py() == (7).to_bytes(8, "little")
    assert len(table) == ROWS


@pytest.mark.parametrize("url", ["", "memory://blocks-test/store"], ids=["local", "remote"])
def test_only_reads_of_the_block_with_a_flipped_bit_raise(tmp_path: Path, url: str) -> None:
    store = Store.create(url or tmp_path / "store")
    manifest = make(store)
    path = manifest.files[0].path
    content = bytearray(store.read_bytes(path))
    row = 20_000
    content[content.index(np.int64(row).tobytes() + np.int64(row + 1).tobytes()) + 1] ^= 64
    store.write_bytes(path, bytes(content))
    with RowSource(store, manifest) as source:
        far = np.array([0, 1, 12_000, ROWS - 1])
        np.testing.assert_array_equal(source.read(["y"], far)["y"], far)
        for near in (row, row + 50, row - 50):
            with pytest.raises(StoreError, match="column 'y' of row group .* has the checksum"):
                source.read(["y"], np.array([near]))
    store.delete("data")


@pytest.mark.parametrize("damage", ["table", "trailer"])
def test_damaged_checksums_raise_an_error(store: Store, tmp_path: Path, damage: str) -> None:
    manifest = make(store)
    path = tmp_path / "store" / manifest.files[0].path
    content = bytearray(path.read_bytes())
    trailer = content.index(checksums._MARK) - 12
    content[trailer - 40 if damage == "table" else trailer + 13] ^= 1
    path.write_bytes(content)
    with (
        RowSource(store, manifest) as source,
        pytest.raises(StoreError, match="its checksums are not what was written"),
    ):
        source.read(["y"], np.array([1]))


def test_first_epoch_of_data_beyond_memory_reads_each_byte_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is read by one of the ranks, and the second epoch reads no more bytes than the first."""
    manifest = make(store)
    read = []
    fill = PackedFile._fill

    def counted(self: PackedFile, out: Any, offset: int) -> None:
        read.append(out.nbytes)
        fill(self, out, offset)

    monkeypatch.setattr(PackedFile, "_fill", counted)
    epochs = []
    readers = [
        Reader(store, manifest, rank=r, size=2, batch_size=100, shuffle_bytes=4 << 20)
        for r in (0, 1)
    ]
    for epoch in range(2):
        read.clear()
        rows = [b.columns["y"] for reader in readers for b in reader.epoch(epoch)]
        assert sorted(np.concatenate(rows).tolist()) == list(range(ROWS))
        epochs.append(sum(read) / manifest.num_bytes)
    for reader in readers:
        reader.close()
    assert (
        epochs[1] <= epochs[0] < 1.5
    )  # such blocks are several times larger than the blocks of checksums
