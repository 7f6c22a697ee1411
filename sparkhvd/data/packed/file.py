"""Read the values of an open packed file in place, row group by row group."""

from __future__ import annotations

import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.arrow_types import VERIFIED
from sparkhvd.data.columns.ragged import Array, Flags, Ragged, SparseRows, keep_mask
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.manifest import DAMAGED_NAME
from sparkhvd.data.packed.checksums import (
    BLOCK_BYTES,
    TRAILER_BYTES,
    Crcs,
    add_blocks,
    decode,
    table_bytes,
)
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.wire import read_json, rebuild

# Path -> mask (blocks,) of the verified blocks.
Checked = dict[str, Flags]
# A file is read and verified in pieces of this size, so that the bytes are still in the CPU's cache when they are
# verified.
_PIECE_BYTES = 512 << 10
# First read at the end of a file. Most footers, with the checksums before them, are shorter and so need one request.
_END_BYTES = 64 << 10
# Upper bound on the bytes of a page header up to the fields with its sizes.
_HEADER_BYTES = 32


@dataclass(frozen=True)
class _Chunk:
    """Column of one row group.

    Attributes:
        offset: position of the values in the file; None if pyarrow must decode them.
    """

    offset: int | None


class PackedFile:
    """Open packed file. Every block is read whole and verified until its checksum matches once."""

    def __init__(
        self,
        store: Store,
        path: str,
        checked: Checked | None = None,
        footer_crc: int | None = None,
    ) -> None:
        """Open a file and read its footer.

        Args:
            store: store of the file.
            path: path in the store.
            checked: verified blocks by path; this file adds its own.
            footer_crc: CRC-32 of the file's end, see `DataFile`; None if unknown.

        Raises:
            StoreError: the file is damaged.
        """
        self.path = path
        self._store = store
        local = store.local_path(path)
        # True if several threads may read the file at once.
        self.is_shared = store.shares_files
        self._source = pa.OSFile(local) if local is not None else store.open_input(path)
        self._end = b""
        # Held while values are decoded.
        self._decoding = threading.Lock()
        try:
            end = self._read_end()
            # Checked before pyarrow reads the footer, because a damaged footer may crash the process there.
            if footer_crc is not None and zlib.crc32(end) != footer_crc:
                raise self.damaged("its end is not what was written")
            try:
                self.metadata = pq.read_metadata(pa.BufferReader(MAGIC + end))
                described = (self.metadata.metadata or {}).get(METADATA_KEY)
                self._description = (
                    None
                    if described is None
                    else rebuild(Description, read_json(described), is_strict=False)
                )
            except (ValueError, OSError) as e:
                # Errors of pyarrow's parser: the bytes are in memory already.
                raise self.damaged(f"its footer cannot be read ({e})") from e
        except BaseException:
            self._source.close()
            raise
        # If another program has rewritten the file, it has kept the description and lost the checksums.
        self._sums: Crcs | None = None
        if self._description is not None and self._description.block_checksums:
            self._read_sums(len(end), is_own=footer_crc is not None)
        self._checked = np.zeros(0 if self._sums is None else len(self._sums), np.bool_)
        if checked is not None:
            self._checked = checked.setdefault(path, self._checked)
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._decoded: tuple[int, pa.Table] | None = None
        self._page: tuple[tuple[int, int], Array] | None = None

    def damaged(self, reason: str) -> StoreError:
        """Mark the data as damaged, so that no fit reuses them, and return the error to raise."""
        with suppress(Exception):  # this user may have no permission to write
            self._store.write_bytes(
                f"{self.path.rpartition('/')[0]}/{DAMAGED_NAME}", reason.encode()
            )
        return StoreError(
            f"{self._store.full_url(self.path)!r} of the materialized data is damaged: {reason}. Check the storage, and fit "
            "again: the data are then materialized again."
        )

    def _read_end(self) -> bytes:
        """Read the end of the file starting at its footer, if it looks like Parquet."""
        end = self._last(_END_BYTES)
        if end[-len(MAGIC) :] != MAGIC:
            return end
        count = int.from_bytes(end[-len(MAGIC) - 4 : -len(MAGIC)], "little") + 4 + len(MAGIC)
        return self._last(count)

    def _last(self, count: int) -> bytes:
        """Read the end of the file, unless an earlier read covers it."""
        size = self._source.size()
        count = min(count, size)
        if count > len(self._end):
            self._source.seek(size - count)
            self._end = self._source.read(count)
        return self._end[len(self._end) - count :]

    def _read_sums(self, footer_bytes: int, *, is_own: bool) -> None:
        """Read the checksums before the footer. A file of our own must have them."""
        table = None
        size = table_bytes(self._last(footer_bytes + TRAILER_BYTES)[:TRAILER_BYTES])
        if size is not None and size + footer_bytes <= self._source.size():
            table = decode(self._last(footer_bytes + size)[:size])
        if table is not None:
            self._summed_bytes, self._sums = table
        elif is_own:
            raise self.damaged("its checksums are not what was written")
        self._end = b""

    def close(self) -> None:
        """Close the file and release decoded rows."""
        self._source.close()
        self._decoded = None

    def columns(self) -> list[Column]:
        """List the columns described in the file's own metadata."""
        if self._description is None:
            raise InvalidArgumentError(
                f"{self.path!r} is Parquet, but not packed: it has no {METADATA_KEY.decode()!r} metadata. read_packed reads "
                "only files that a fit has materialized."
            )
        return list(self._description.columns)

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
        self._read_at(flat, chunk.offset + start * row_bytes, (row_group, index))

    def read_page(self, out: Array, row_group: int, index: int, offset: int) -> None:
        """Fill `out` with the stored bytes of a BYTE_ARRAY column's page from `offset`: lengths and values."""
        chunk = self._chunks.get((row_group, index)) or self._locate(row_group, index)
        if chunk.offset is None:
            if self._page is None or self._page[0] != (row_group, index):
                self._page = ((row_group, index), self._decode_page(row_group, index))
            out[:] = self._page[1][offset : offset + len(out)]
            return
        self._read_at(out, chunk.offset + offset, (row_group, index))

    def _read_at(self, out: Array, offset: int, where: tuple[int, int]) -> None:
        """Fill `out` with verified bytes of a column chunk from `offset`.

        It is thread-safe for a remote file.
        """
        if not len(out):
            return
        end = offset + len(out)
        low, high = offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        if self._sums is None or self._checked[low:high].all():
            self._fill(out, offset)
            return
        new = np.flatnonzero(~self._checked[low:high])
        first, last = low + int(new[0]), low + int(new[-1]) + 1
        begin, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self._summed_bytes)
        before = np.empty(max(0, offset - begin), np.uint8)
        after = np.empty(max(0, stop - end), np.uint8)
        at = offset - len(before)
        whole: Array | None = None
        step = _PIECE_BYTES
        parts = [before, *(out[i : i + step] for i in range(0, len(out), step)), after]
        if self.is_shared:  # a remote file is read in one request
            whole = self._request(len(before) + len(out) + len(after), at)
            out[:] = whole[len(before) : len(before) + len(out)]
            parts = [whole]
        actual = np.zeros(last - first, np.uint32)
        for part in parts:
            if whole is None and len(part):
                self._fill(part, at)
            kept = part[max(0, begin - at) : max(0, stop - at)]
            if len(kept):
                number, within = divmod(max(at, begin) - begin, BLOCK_BYTES)
                add_blocks(actual[number:], kept, within)
            at += len(part)
        expected = self._sums[first:last]
        if actual.tobytes() != expected.tobytes():  # faster than numpy's comparison for few bytes
            wrong = int(np.flatnonzero(actual != expected)[0])
            name = self.metadata.schema.column(where[1]).name
            raise self.damaged(
                f"the block at byte {(first + wrong) * BLOCK_BYTES} with column {name!r} of row group {where[0]} has the "
                f"checksum {actual[wrong]:08x}, and had {expected[wrong]:08x} when it was written"
            )
        self._checked[first:last] = True

    def _fill(self, out: Array, offset: int) -> None:
        """Fill `out` with bytes from `offset`, without verification."""
        if self.is_shared:
            out[:] = self._request(out.nbytes, offset)
            return
        self._source.seek(offset)
        self._check_length(self._source.readinto(out.data), out.nbytes)

    def _request(self, count: int, offset: int) -> Array:
        """Read bytes from `offset`. The array is read-only. Thread-safe."""
        content = np.frombuffer(self._source.read_at(count, offset), np.uint8)
        self._check_length(len(content), count)
        return content

    def _check_length(self, got: int, expected: int) -> None:
        if got != expected:
            raise self.damaged(f"it ended early: {got} of {expected} bytes were there")

    def _locate(self, row_group: int, index: int, row_bytes: int | None = None) -> _Chunk:
        """Find the page of a column in a row group. `row_bytes=None` means variable rows."""
        group = self.metadata.row_group(row_group)
        column = group.column(index)
        chunk = _Chunk(None)
        is_plain = set(column.encodings) <= {"PLAIN", "RLE"} and not column.has_dictionary_page
        is_required = self.metadata.schema.column(index).max_definition_level == 0
        if column.compression == "UNCOMPRESSED" and is_plain and is_required:
            header = np.empty(min(_HEADER_BYTES, column.total_compressed_size), np.uint8)
            self._read_at(header, column.data_page_offset, (row_group, index))
            size = _page_bytes(header.tobytes())
            header_bytes = column.total_compressed_size - size
            if 0 < header_bytes <= 256 and row_bytes in (None, size // max(group.num_rows, 1)):
                chunk = _Chunk(column.data_page_offset + header_bytes)
        self._chunks[row_group, index] = chunk
        return chunk

    def _decode_page(self, row_group: int, index: int) -> Array:
        """Decode a page to the packed layout, with zeros in place of the length prefixes."""
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


def _page_bytes(header: bytes) -> int:
    """Read the size of a page's values from its header, or return -1 if the page is not a plain data page.

    The header is Thrift compact: field 1 (int32 type, 0 = DATA_PAGE), then 2 (int32 size before compression), zigzag
    varints.
    """
    if header[:3] != b"\x15\x00\x15":
        return -1
    value = shift = 0
    for byte in header[3:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return (value >> 1) ^ -(value & 1)


# ----------------------------------------------------------------------------------------------------
# Layout of columns in a packed file: its Parquet fields and their sizes.

METADATA_KEY = b"sparkhvd"
# First and last bytes of a Parquet file. Before the last ones are the footer and the footer's length (4 bytes).
MAGIC = b"PAR1"
# Bound on the bytes of a column in a row group, because a page's size is an int32 in Parquet.
PAGE_BYTES = 1 << 30
# Bytes of the length prefix of a BYTE_ARRAY value.
PREFIX_BYTES = 4


@dataclass(frozen=True)
class Description:
    """Metadata of a packed file.

    Attributes:
        columns: columns of the file.
        format_version: format version of manifests when the file was written.
        block_checksums: whether blocks have checksums, see `checksums`.
    """

    columns: tuple[Column, ...]
    format_version: int = 1
    block_checksums: bool = False


def little_endian(dtype: str) -> np.dtype[np.generic]:
    """Convert a dtype to little-endian, the byte order in files on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def payload_types(column: Column) -> list[np.dtype[np.generic]]:
    """List the types of a column's BYTE_ARRAY columns, or [] for fixed rows.

    The list has the values' type, preceded by the indices' type for sparse vectors.
    """
    if column.is_fixed:
        return []
    values = little_endian(column.dtype)
    return [np.dtype("<i4"), values] if column.kind == "sparse" else [values]


def payloads(values: Ragged | SparseRows) -> list[Ragged]:
    """Split a column's rows into its BYTE_ARRAY columns, in the order of `payload_types`."""
    return [values.indices, values.values] if isinstance(values, SparseRows) else [values]


def parquet_fields(column: Column) -> list[pa.Field]:
    """Make the required Parquet fields of a column.

    Pages of required fields have no definition levels.
    """
    if column.is_fixed:
        return [pa.field(column.name, pa.binary(column.row_bytes), nullable=False)]
    names = [f"{column.name}.indices", column.name] if column.kind == "sparse" else [column.name]
    ends = pa.field(f"{column.name}.ends", pa.binary(8), nullable=False)
    return [ends, *(pa.field(n, pa.binary(), nullable=False) for n in names)]
