"""One open packed file: where a row group's values lie, and reading them in place."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.arrow_types import VERIFIED
from sparkhvd.data.columns.ragged import keep_mask
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.manifest import DAMAGED_NAME
from sparkhvd.data.packed.layout import (
    CHECKSUMS_KEY,
    MAGIC,
    METADATA_KEY,
    PREFIX_BYTES,
    Array,
)
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError

__all__ = ["Checked", "PackedFile"]

# Pages whose checksums were right: (path, row group, Parquet column).
Checked = set[tuple[str, int, int]]
# What is read only for its checksum comes in pieces of this size.
_PIECE_BYTES = 1 << 20
# Most footers are shorter, so that one request gets them.
_END_BYTES = 64 << 10
# More than a page header takes up to its checksum.
_HEADER_BYTES = 32


@dataclass(frozen=True)
class _Chunk:
    """A column of one row group.

    Attributes:
        offset: where its values start in the file; None if they must be decoded.
        size: their bytes.
        crc: of them, as the page's header has it; None if it has none.
    """

    offset: int | None
    size: int = 0
    crc: int | None = None


class PackedFile:
    """One open file. A read of most of a page verifies its checksum, once."""

    def __init__(
        self,
        store: Store,
        path: str,
        checked: Checked | None = None,
        footer_crc: int | None = None,
    ) -> None:
        """Open a file and read its footer.

        Args:
            store: where it is.
            path: in the store.
            checked: pages that need not be verified, to which others are added.
            footer_crc: CRC-32 of its end, see `DataFile`; None if it is not known.

        Raises:
            StoreError: it is damaged.
        """
        self.path = path
        self._store = store
        self._checked: Checked = set() if checked is None else checked
        local = store.local_path(path)
        # Whether several threads may read from it at a time.
        self.is_shared = store.shares_files
        self._source = pa.OSFile(local) if local is not None else store.open_input(path)
        # Of what must be decoded.
        self._decoding = threading.Lock()
        try:
            end = self._read_end()
            # First: from a damaged footer pyarrow may take the whole process down.
            if footer_crc is not None and zlib.crc32(end) != footer_crc:
                raise self.damaged("its end is not what was written")
            self.metadata = pq.read_metadata(pa.BufferReader(MAGIC + end))
        except BaseException as e:
            self._source.close()
            if isinstance(e, pa.ArrowInvalid) or "thrift" in str(e):
                raise self.damaged(f"its footer cannot be read ({e})") from e
            raise
        self._description = json.loads((self.metadata.metadata or {}).get(METADATA_KEY, b"null"))
        is_own = footer_crc is not None and self._description is not None
        self._has_checksums = is_own and self._description.get(CHECKSUMS_KEY, False)
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._decoded: tuple[int, pa.Table] | None = None
        self._page: tuple[tuple[int, int], Array] | None = None

    def damaged(self, what: str) -> StoreError:
        """The error that says so; the data are marked, so that no fit uses them again."""
        with suppress(Exception):  # a store that only lets itself be read
            self._store.write_bytes(f"{self.path.rpartition('/')[0]}/{DAMAGED_NAME}", what.encode())
        return StoreError(
            f"{self._store.full_url(self.path)!r} of the materialized data is damaged: {what}. Look at the storage; fit "
            "again, which materializes the data anew."
        )

    def _read_end(self) -> bytes:
        """The end of the file from its footer on, if it looks like Parquet."""
        size = self._source.size()

        def last(count: int) -> bytes:
            self._source.seek(max(0, size - count))
            content: bytes = self._source.read(count)
            return content

        end = last(_END_BYTES)
        if end[-len(MAGIC) :] != MAGIC:
            return end
        count = int.from_bytes(end[-len(MAGIC) - 4 : -len(MAGIC)], "little") + 4 + len(MAGIC)
        return (end if count <= len(end) else last(count))[-count:]

    def close(self) -> None:
        """Close it and forget what was decoded."""
        self._source.close()
        self._decoded = None

    def columns(self) -> list[Column]:
        """The columns as the file's own metadata describe them."""
        if self._description is None:
            raise InvalidArgumentError(
                f"{self.path!r} is Parquet, but not packed: it has no {METADATA_KEY.decode()!r} metadata. Only "
                "files that a fit materialized can be read this way."
            )
        return [Column.from_dict(c) for c in self._description["columns"]]

    def read_into(self, out: Array, row_group: int, index: int, start: int) -> None:
        """Fill the contiguous `out` with the rows from `start` of a column in a row group."""
        row_bytes = out.nbytes // len(out)
        chunk = self._chunks.get((row_group, index)) or self._locate(row_group, index, row_bytes)
        if chunk.offset is None:
            with self._decoding:
                out.view(np.uint8).reshape(len(out), row_bytes)[:] = self._decode(row_group, index)[
                    start : start + len(out)
                ]
            return
        flat = out.reshape(-1).view(np.uint8)
        self._read_part(flat, (row_group, index), chunk, start * row_bytes)

    def read_page(self, out: Array, row_group: int, index: int, offset: int) -> None:
        """Fill `out` (bytes) with a BYTE_ARRAY column's page from `offset`: lengths and values, as they lie there."""
        chunk = self._chunks.get((row_group, index)) or self._locate(row_group, index)
        if chunk.offset is None:
            if self._page is None or self._page[0] != (row_group, index):
                self._page = ((row_group, index), self._decode_page(row_group, index))
            out[:] = self._page[1][offset : offset + len(out)]
            return
        self._read_part(out, (row_group, index), chunk, offset)

    def check(self, row_group: int, index: int, row_bytes: int | None) -> Iterator[None]:
        """Verify a page's checksum if it has one and no read has, one piece at each step of the iterator.

        Args:
            row_group: of the file.
            index: of the Parquet column.
            row_bytes: bytes of each row; None of a BYTE_ARRAY column.

        Raises:
            StoreError: the page is damaged.
        """
        key = row_group, index
        chunk = self._chunks.get(key) or self._locate(row_group, index, row_bytes)
        if chunk.offset is not None and chunk.crc is not None and not self._is_checked(key):
            crc = 0
            for piece in self._pieces(chunk, 0, chunk.size):
                crc = zlib.crc32(piece, crc)
                yield
            self._compare(key, chunk, crc)

    def _is_checked(self, key: tuple[int, int]) -> bool:
        return (self.path, *key) in self._checked

    def _read_part(self, out: Array, key: tuple[int, int], chunk: _Chunk, start: int) -> None:
        """Fill `out` from a byte of a page; where that is most of the page, its rest is read for the checksum."""
        assert chunk.offset is not None
        is_most = 2 * len(out) >= chunk.size and chunk.crc is not None
        if not is_most or self._is_checked(key):
            self._read_at(out, chunk.offset + start)
            return
        crc = 0
        for piece in self._pieces(chunk, 0, start):
            crc = zlib.crc32(piece, crc)
        self._read_at(out, chunk.offset + start)
        crc = zlib.crc32(out.data, crc)
        for piece in self._pieces(chunk, start + len(out), chunk.size):
            crc = zlib.crc32(piece, crc)
        self._compare(key, chunk, crc)

    def _pieces(self, chunk: _Chunk, start: int, stop: int) -> Iterator[memoryview]:
        """Some bytes of a page, piece by piece."""
        assert chunk.offset is not None
        for at in range(start, stop, _PIECE_BYTES):
            piece = np.empty(min(_PIECE_BYTES, stop - at), np.uint8)
            self._read_at(piece, chunk.offset + at)
            yield piece.data

    def _compare(self, key: tuple[int, int], chunk: _Chunk, crc: int) -> None:
        if crc != chunk.crc:
            name = self.metadata.schema.column(key[1]).name
            raise self.damaged(
                f"column {name!r} of row group {key[0]} has the checksum {crc:08x}, and had {chunk.crc:08x} when it was "
                "written"
            )
        self._checked.add((self.path, *key))

    def _read_at(self, out: Array, offset: int) -> None:
        """Fill `out` (bytes) from `offset`; of a remote file, beside other threads that do so."""
        if self.is_shared:
            content = self._source.read_at(out.nbytes, offset)
            got = len(content)
            if got == out.nbytes:
                out[:] = np.frombuffer(content, np.uint8)
        else:
            self._source.seek(offset)
            got = self._source.readinto(out.data)
        if got != out.nbytes:
            raise self.damaged(f"it ended early: {got} of {out.nbytes} bytes were there")

    def _locate(self, row_group: int, index: int, row_bytes: int | None = None) -> _Chunk:
        """Find a page; its rows have `row_bytes` each, or lengths of their own."""
        group = self.metadata.row_group(row_group)
        column = group.column(index)
        chunk = _Chunk(None)
        is_plain = set(column.encodings) <= {"PLAIN", "RLE"} and not column.has_dictionary_page
        is_required = self.metadata.schema.column(index).max_definition_level == 0
        if column.compression == "UNCOMPRESSED" and is_plain and is_required:
            header = self._source.read_at(_HEADER_BYTES, column.data_page_offset)
            size, crc = _page_header(header)
            header_bytes = column.total_compressed_size - size
            if 0 < header_bytes <= 256 and row_bytes in (None, size // max(group.num_rows, 1)):
                chunk = _Chunk(column.data_page_offset + header_bytes, size, crc)
        if self._has_checksums and chunk.crc is None:
            raise self.damaged(f"the header of column {index} of row group {row_group} is none")
        self._chunks[row_group, index] = chunk
        return chunk

    def _decode_page(self, row_group: int, index: int) -> Array:
        """A page as we would have written it; the lengths before the values are left out."""
        column = self._decoded_column(row_group, index)
        rows = len(column)
        offsets = np.frombuffer(column.buffers()[1], np.int32, rows + 1, column.offset * 4)
        offsets = offsets.astype(np.int64)
        prefixes = np.arange(rows, dtype=np.int64) * PREFIX_BYTES + PREFIX_BYTES
        first, last = int(offsets[0]), int(offsets[-1])
        page = np.zeros(last - first + PREFIX_BYTES * rows, np.uint8)
        kept = keep_mask(len(page), offsets[:-1] - first + prefixes, offsets[1:] - first + prefixes)
        if last > first:
            page[kept] = np.frombuffer(column.buffers()[2], np.uint8)[first:last]
        return page

    def _decoded_column(self, row_group: int, index: int) -> Any:
        if self._decoded is None or self._decoded[0] != row_group:
            self._source.seek(0)
            file = pq.ParquetFile(self._source, **VERIFIED)
            try:
                self._decoded = (row_group, file.read_row_group(row_group))
            except (pa.ArrowInvalid, OSError) as e:
                if isinstance(e, pa.ArrowInvalid) or "CRC" in str(e):
                    raise self.damaged(f"row group {row_group} cannot be decoded ({e})") from e
                raise
        column: Any = self._decoded[1].column(index).combine_chunks()
        return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column

    def _decode(self, row_group: int, index: int) -> Array:
        column = self._decoded_column(row_group, index)
        width = column.type.byte_width
        flat: Array = np.frombuffer(column.buffers()[1], dtype=np.uint8)
        return flat[column.offset * width :][: len(column) * width].reshape(len(column), width)


def _page_header(header: bytes) -> tuple[int, int | None]:
    """Bytes and CRC-32 of a page's values as its header has them: -1 if it is no plain data page, None without a CRC.

    The header is Thrift compact: field 1 (int32 type, 0 = DATA_PAGE), 2 and 3 (int32 sizes, without and with
    compression), perhaps 4 (int32 CRC), zigzag varints.
    """
    if header[:3] != b"\x15\x00\x15":
        return -1, None
    size, at = _varint(header, 3)
    if header[at : at + 1] == b"\x15":
        at = _varint(header, at + 1)[1]
        if header[at : at + 1] == b"\x15":
            return size, _varint(header, at + 1)[0] & 0xFFFFFFFF
    return size, None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The zigzag varint at a place, and where it ends."""
    value = shift = 0
    for byte in data[at:]:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            break
    return (value >> 1) ^ -(value & 1), at
