"""One open packed file: where a row group's values lie, and reading them in place."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.data.packed.layout import METADATA_KEY, PREFIX_BYTES, Array
from sparkhvd.estimator.data.schema import Column
from sparkhvd.estimator.data.store import Store
from sparkhvd.estimator.data.values import keep_mask

__all__ = ["PackedFile"]


@dataclass(frozen=True)
class _Chunk:
    """Where a column's values of one row group start in the file; None if they must be decoded."""

    offset: int | None
    rows: int


class PackedFile:
    """One open file."""

    def __init__(self, store: Store, path: str) -> None:
        self.path = path
        local = store.local_path(path)
        # Whether several threads may read from it at a time.
        self.is_shared = store.shares_files
        self._source = pa.OSFile(local) if local is not None else store.open_input(path)
        # Of what must be decoded.
        self._decoding = threading.Lock()
        try:
            self.metadata = pq.read_metadata(self._source)
        except BaseException:
            self._source.close()
            raise
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._decoded: tuple[int, pa.Table] | None = None
        self._page: tuple[tuple[int, int], Array] | None = None

    def close(self) -> None:
        """Close it and forget what was decoded."""
        self._source.close()
        self._decoded = None

    def columns(self) -> list[Column]:
        """The columns as the file's own metadata describe them."""
        described = (self.metadata.metadata or {}).get(METADATA_KEY)
        if described is None:
            raise InvalidArgumentError(
                f"{self.path!r} is Parquet, but not packed: it has no {METADATA_KEY.decode()!r} metadata. Only "
                "files that a fit materialized can be read this way."
            )
        return [Column.from_dict(c) for c in json.loads(described)["columns"]]

    def read_into(self, out: Array, row_group: int, index: int, start: int) -> None:
        """Fill the contiguous `out` with the rows from `start` of a column in a row group."""
        chunk = self._chunks.get((row_group, index)) or self._locate(out, row_group, index)
        row_bytes = out.nbytes // len(out)
        if chunk.offset is None:
            with self._decoding:
                out.view(np.uint8).reshape(len(out), row_bytes)[:] = self._decode(row_group, index)[
                    start : start + len(out)
                ]
            return
        self._read_at(out.reshape(-1).view(np.uint8), chunk.offset + start * row_bytes)

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
            raise OSError(f"{self.path!r} ended early: {got} of {out.nbytes} bytes were there.")

    def read_page(self, out: Array, row_group: int, index: int, offset: int) -> None:
        """Fill `out` (bytes) with a BYTE_ARRAY column's page from `offset`: lengths and values, as they lie there."""
        chunk = self._chunks.get((row_group, index)) or self._locate_page(row_group, index)
        if chunk.offset is None:
            if self._page is None or self._page[0] != (row_group, index):
                self._page = ((row_group, index), self._decode_page(row_group, index))
            out[:] = self._page[1][offset : offset + len(out)]
            return
        self._read_at(out, chunk.offset + offset)

    def _locate_page(self, row_group: int, index: int) -> _Chunk:
        group = self.metadata.row_group(row_group)
        column = group.column(index)
        offset: int | None = None
        is_plain = set(column.encodings) <= {"PLAIN", "RLE"} and not column.has_dictionary_page
        is_required = self.metadata.schema.column(index).max_definition_level == 0
        if column.compression == "UNCOMPRESSED" and is_plain and is_required:
            self._source.seek(column.data_page_offset)
            header_bytes = column.total_compressed_size - _page_bytes(self._source.read(16))
            if 0 < header_bytes <= 256:
                offset = column.data_page_offset + header_bytes
        chunk = _Chunk(offset, group.num_rows)
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

    def _locate(self, out: Array, row_group: int, index: int) -> _Chunk:
        group = self.metadata.row_group(row_group)
        column = group.column(index)
        row_bytes = out.nbytes // len(out)
        size = group.num_rows * row_bytes
        header_bytes = column.total_compressed_size - size
        offset: int | None = None
        if column.compression == "UNCOMPRESSED" and 0 < header_bytes <= 256:
            header = self._source.read_at(16, column.data_page_offset)
            if _page_bytes(header) == size:
                offset = column.data_page_offset + header_bytes
        chunk = _Chunk(offset, group.num_rows)
        self._chunks[row_group, index] = chunk
        return chunk

    def _decoded_column(self, row_group: int, index: int) -> Any:
        if self._decoded is None or self._decoded[0] != row_group:
            self._source.seek(0)
            self._decoded = (row_group, pq.ParquetFile(self._source).read_row_group(row_group))
        column: Any = self._decoded[1].column(index).combine_chunks()
        return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column

    def _decode(self, row_group: int, index: int) -> Array:
        column = self._decoded_column(row_group, index)
        width = column.type.byte_width
        flat: Array = np.frombuffer(column.buffers()[1], dtype=np.uint8)
        return flat[column.offset * width :][: len(column) * width].reshape(len(column), width)


def _page_bytes(header: bytes) -> int:
    """Uncompressed size that a Parquet page header states, or -1 if it is no plain data page.

    The header is Thrift compact: field 1 (int32 type, 0 = DATA_PAGE), then field 2 (int32 size), zigzag varints.
    """
    if header[:3] != b"\x15\x00\x15":
        return -1
    value = shift = 0
    for byte in header[3:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value >> 1
    return -1
