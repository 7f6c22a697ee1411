"""Packed Parquet: one FIXED_LEN_BYTE_ARRAY column per DataFrame column, a row's little-endian values each.

A column whose rows take as many bytes as they need is a BYTE_ARRAY column with a row's values (of sparse vectors two:
`<name>.indices` and the values), behind a fixed column `<name>.ends`: elements of the row group up to the row's end.
With it a reader knows where any row lies without looking at the rows before.

Columns are required, uncompressed, PLAIN and one page per row group, so a row group's values lie in the file as
one array: a reader asks the footer where, and reads exactly the rows it wants. Files that another writer has
rewritten (several pages, compression) are decoded by pyarrow instead.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.errors import InternalError, InvalidArgumentError
from sparkhvd.estimator.data import addresses
from sparkhvd.estimator.data.manifest import FORMAT_VERSION, MANIFEST_NAME, DataFile, Manifest
from sparkhvd.estimator.data.open_files import OpenFiles
from sparkhvd.estimator.data.sampler import Rows
from sparkhvd.estimator.data.schema import Column
from sparkhvd.estimator.data.store import Store
from sparkhvd.estimator.data.values import Ragged, SparseRows, Values, keep_mask

__all__ = ["ROW_GROUP_BYTES", "PackedWriter", "RowSource", "read_packed"]

Array = npt.NDArray[Any]

ROW_GROUP_BYTES = 64 << 20
METADATA_KEY = b"sparkhvd"
# A page's size is an int32 in Parquet; one row group must stay below it in every column.
_PAGE_BYTES = 1 << 30
# A gap of this size costs about as much to read over as another call to read.
_GAP_BYTES = 128 << 10
# A BYTE_ARRAY value stands behind its length.
_PREFIX_BYTES = 4
# Reads of a remote file at a time: each column of a row group is a request of its own, which mostly waits.
_THREADS = 12
# The longest wait for all of them.
_REQUESTS_S = 3600.0


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _payloads(column: Column) -> list[np.dtype[Any]]:
    """Types of the BYTE_ARRAY columns of a column whose rows differ: of sparse vectors indices and values."""
    if column.is_fixed:
        return []
    values = _little_endian(column.dtype)
    return [np.dtype("<i4"), values] if column.kind == "sparse" else [values]


def _parts(values: Ragged | SparseRows) -> list[Ragged]:
    return [values.indices, values.values] if isinstance(values, SparseRows) else [values]


def _fields(column: Column) -> list[pa.Field]:
    """The Parquet columns of a column. Required fields: no definition levels stand before the values."""
    if column.is_fixed:
        return [pa.field(column.name, pa.binary(column.row_bytes), nullable=False)]
    names = [f"{column.name}.indices", column.name] if column.kind == "sparse" else [column.name]
    ends = pa.field(f"{column.name}.ends", pa.binary(8), nullable=False)
    return [ends, *(pa.field(n, pa.binary(), nullable=False) for n in names)]


class PackedWriter:
    """Writes one packed file; holds at most one row group in memory."""

    def __init__(
        self, sink: Any, columns: Sequence[Column], *, row_group_bytes: int = ROW_GROUP_BYTES
    ) -> None:
        self._columns = tuple(columns)
        described = {"format_version": FORMAT_VERSION, "columns": [asdict(c) for c in columns]}
        fields = [_fields(c) for c in columns]
        self._schema = pa.schema(
            [f for group in fields for f in group],
            metadata={METADATA_KEY: json.dumps(described).encode()},
        )
        # Positions of the columns of row ends.
        firsts = np.cumsum([0, *(len(group) for group in fields)])
        self._ends = [int(i) for i, c in zip(firsts, columns, strict=False) if not c.is_fixed]
        options: dict[str, Any] = {
            "compression": "NONE",
            "use_dictionary": False,
            "write_statistics": False,
            "data_page_size": _PAGE_BYTES,
        }
        # Newer pyarrow ends a page after 20,000 rows unless told otherwise.
        if "max_rows_per_page" in inspect.signature(pq.ParquetWriter).parameters:
            options["max_rows_per_page"] = 2**31 - 1
        self._writer = pq.ParquetWriter(sink, self._schema, **options)
        self._fixed_bytes = sum(c.row_bytes for c in columns)
        self._group_bytes = max(row_group_bytes, 1)
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self.row_groups: list[int] = []

    def append(self, values: Sequence[Values]) -> None:
        """Add rows: per column a C-contiguous array (rows, ...) or rows of any length, of the column's dtype."""
        rows = len(values[0])
        sizes = self._variable_bytes(values, rows) if self._ends else None
        arrays = [a for c, v in zip(self._columns, values, strict=True) for a in _arrays(c, v)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        while batch.num_rows:
            fitting = self._fitting(sizes)
            part = batch.slice(0, fitting)
            self._pending.append(part)
            self._pending_rows += part.num_rows
            if sizes is not None:
                self._pending_bytes += int(sizes[: part.num_rows].sum())
                sizes = sizes[part.num_rows :]
            batch = batch.slice(part.num_rows)
            if batch.num_rows or self._fitting(None) == 0:
                self._flush()

    def close(self) -> tuple[int, ...]:
        """Write what is pending and the footer; return the rows of each row group."""
        self._flush()
        self._writer.close()
        return tuple(self.row_groups)

    def _variable_bytes(self, values: Sequence[Values], rows: int) -> Array:
        """(rows,) bytes that each row takes besides those of fixed columns."""
        total = np.zeros(rows, np.int64)
        for column, value in zip(self._columns, values, strict=True):
            if isinstance(value, np.ndarray):
                continue
            sizes = sum(p.lengths * p.values.itemsize + _PREFIX_BYTES for p in _parts(value))
            if len(value) and int(np.max(sizes)) >= _PAGE_BYTES:
                self._writer.close()  # while the file is still open
                raise InvalidArgumentError(
                    f"Column {column.name!r} has a row of {int(np.max(sizes)):,} bytes; at most {_PAGE_BYTES:,} fit. "
                    "Split or shrink it."
                )
            total += sizes
        return total

    def _fitting(self, sizes: Array | None) -> int:
        """How many of the next rows the row group still takes; a first row always fits."""
        room = self._group_bytes - self._pending_bytes - self._pending_rows * self._fixed_bytes
        if sizes is None:
            fitting = max(room, 0) // max(self._fixed_bytes, 1)
        else:
            fitting = int(np.searchsorted(np.cumsum(sizes + self._fixed_bytes), room, side="right"))
        return fitting if fitting or self._pending_rows else 1

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        table = pa.Table.from_batches(self._pending, schema=self._schema)
        for index in self._ends:
            lengths = [np.frombuffer(b.column(index).buffers()[1], np.int64) for b in self._pending]
            offsets = [b.column(index).offset for b in self._pending]
            mine = [
                v[at : at + b.num_rows]
                for v, at, b in zip(lengths, offsets, self._pending, strict=True)
            ]
            ends = np.cumsum(np.concatenate(mine), dtype=np.int64)
            field = self._schema.field(index)
            column = _fixed_array(field.type, ends)
            table = table.set_column(index, field, column)
        self._writer.write_table(table, row_group_size=self._pending_rows)
        self.row_groups.append(self._pending_rows)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0


def _fixed_array(kind: pa.DataType, values: Array) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _arrays(column: Column, values: Values) -> list[pa.Array]:
    """The Arrow arrays of a column; of rows that differ, first their lengths, which become ends row group by row group."""
    if isinstance(values, np.ndarray):
        return [_fixed_array(pa.binary(column.row_bytes), values)]
    parts = _parts(values)
    arrays = [_fixed_array(pa.binary(8), np.ascontiguousarray(parts[0].lengths, np.int64))]
    for part, dtype in zip(parts, _payloads(column), strict=True):
        data = np.ascontiguousarray(part.gathered(), dtype)
        offsets = np.zeros(len(part) + 1, np.int64)
        np.cumsum(part.lengths * dtype.itemsize, out=offsets[1:])
        if offsets[-1] >= 2**31:
            raise InvalidArgumentError(
                f"Column {column.name!r}: one Arrow batch has {int(offsets[-1]):,} bytes, 2 GiB or more. Lower "
                "spark.sql.execution.arrow.maxRecordsPerBatch."
            )
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
        arrays.append(pa.Array.from_buffers(pa.binary(), len(part), buffers))
    return arrays


@dataclass(frozen=True)
class _Chunk:
    """Where a column's values of one row group start in the file; None if they must be decoded."""

    offset: int | None
    rows: int


class _PackedFile:
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
        prefixes = np.arange(rows, dtype=np.int64) * _PREFIX_BYTES + _PREFIX_BYTES
        first, last = int(offsets[0]), int(offsets[-1])
        page = np.zeros(last - first + _PREFIX_BYTES * rows, np.uint8)
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


def _together(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls that wait for a remote store, a few at a time; the first error is raised when all have ended.

    Raises:
        TimeoutError: the store has not answered some of them for an hour.
    """
    waiting = iter(calls)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                call = next(waiting, None)
            if call is None:
                return
            try:
                call()
            except BaseException as e:  # noqa: BLE001 - it is raised below
                errors.append(e)

    # Daemons, because a read may never return.
    threads = [
        threading.Thread(target=work, name="sparkhvd-read", daemon=True)
        for _ in range(min(_THREADS, len(calls)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    deadline = time.monotonic() + _REQUESTS_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"requests to the store have not been answered for {_REQUESTS_S:g} s")
    if errors:
        raise errors[0]


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


@dataclass(frozen=True)
class _Span:
    """Neighbouring rows of a row group that one read serves.

    Attributes:
        group: the row group.
        low: its first row.
        ends: (rows + 1,) elements of the row group before the first row, and up to each row's end.
        wanted: which of the rows are asked for; None means all.
    """

    group: int
    low: int
    ends: Array
    wanted: Array | None

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of the rows in the page, with the length before each."""
        elements = int(self.ends[-1] - self.ends[0])
        return elements * itemsize + (len(self.ends) - 1) * _PREFIX_BYTES

    def row_begins(self, itemsize: int) -> Array:
        """(rows,) where each row's values begin, in bytes from the first row's length."""
        rows = np.arange(1, len(self.ends), dtype=np.int64)
        begins: Array = (self.ends[:-1] - self.ends[0]) * itemsize + rows * _PREFIX_BYTES
        return begins

    def stays(self, itemsize: int) -> bool:
        """Whether values can stay as they lie in the page."""
        return self.wanted is None and itemsize <= _PREFIX_BYTES

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of memory that the rows take."""
        if self.stays(itemsize):
            return self.page_bytes(itemsize)
        counts = np.diff(self.ends)
        return int((counts if self.wanted is None else counts[self.wanted]).sum()) * itemsize


class RowSource:
    """Reads rows by number from the packed files of a manifest; not for several threads at once."""

    # Any row can be read alone.
    block_edges: Rows | None = None

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        # The first Parquet column of each column, and their number.
        self._index = {}
        self._num_parquet_columns = 0
        for c in manifest.schema.columns:
            self._index[c.name] = self._num_parquet_columns
            self._num_parquet_columns += len(_payloads(c)) + 1
        self._columns = {c.name: c for c in manifest.schema.columns}
        # Every row group of every file, in row order.
        self._groups = [(f, g) for f in manifest.files for g in range(len(f.row_groups))]
        rows = [f.row_groups[g] for f, g in self._groups]
        self._ends = np.cumsum(rows, dtype=np.int64) if rows else np.empty(0, dtype=np.int64)
        self._files = {f.path: f for f in manifest.files}
        self._open: OpenFiles[str, _PackedFile] = OpenFiles(self._open_file)

    def close(self) -> None:
        """Close every file."""
        self._open.close()

    def __enter__(self) -> RowSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, names: Sequence[str], rows: Rows | None = None) -> dict[str, Any]:
        """Arrays (rows, *shape) of the named columns; `Ragged` or `SparseRows` where rows differ in length.

        Args:
            names: columns to read.
            rows: ascending row numbers; None means all.
        """
        count = self._manifest.num_rows if rows is None else len(rows)
        asked = [self._columns[name] for name in names]
        columns = [c for c in asked if c.is_fixed]
        out: dict[str, Any] = {
            c.name: np.empty((count, *(c.shape or ())), _little_endian(c.dtype)) for c in columns
        }
        for column in asked:
            if not column.is_fixed:
                out[column.name] = self._read_variable(column, rows)
        widest = max((c.row_bytes for c in columns), default=1)
        runs = self._runs(rows, max(1, _GAP_BYTES // widest)) if columns else []
        for start, stop in runs:
            first = start if rows is None else int(rows[start])
            last = stop - 1 if rows is None else int(rows[stop - 1])
            group = int(np.searchsorted(self._ends, first, side="right"))
            base = int(self._ends[group - 1]) if group else 0
            opened = self._open.get(self._groups[group][0].path)
            wanted = None
            if rows is not None and last - first + 1 != stop - start:
                wanted = rows[start:stop] - first
            fills = [
                functools.partial(
                    self._fill, opened, out[c.name][start:stop], group, c.name, first - base, wanted
                )
                for c in columns
                if c.row_bytes
            ]
            if opened.is_shared:
                _together(fills)
            else:
                for fill in fills:
                    fill()
        return out

    def examples(self, count: int) -> Rows:
        """Numbers of the first `count` rows, or of all if there are fewer."""
        return np.arange(min(count, self._manifest.num_rows), dtype=np.int64)

    # -- rows of any length --------------------------------------------------------------------------

    def _read_variable(self, column: Column, rows: Rows | None) -> Ragged | SparseRows:
        row_bytes = 8 + self._manifest.variable_bytes.get(column.name, 0) / max(
            self._manifest.num_rows, 1
        )
        spans = [
            self._span(column, rows, start, stop)
            for start, stop in self._runs(rows, max(1, int(_GAP_BYTES / row_bytes)))
        ]
        parts = [
            self._payload(spans, column, 1 + i, dtype) for i, dtype in enumerate(_payloads(column))
        ]
        if column.kind == "sparse":
            return SparseRows(parts[0], parts[1], column.num_elements)
        return parts[0]

    def _span(self, column: Column, rows: Rows | None, start: int, stop: int) -> _Span:
        """Where neighbouring rows lie, learned from the column of their ends."""
        first = start if rows is None else int(rows[start])
        last = stop - 1 if rows is None else int(rows[stop - 1])
        group = int(np.searchsorted(self._ends, first, side="right"))
        low = first - (int(self._ends[group - 1]) if group else 0)
        ends = np.zeros(last - first + 2, "<i8")
        file, row_group = self._groups[group]
        opened, index = self._open.get(file.path), self._index[column.name]
        if low:
            opened.read_into(ends, row_group, index, low - 1)
        else:
            opened.read_into(ends[1:], row_group, index, 0)
        is_whole = last - first + 1 == stop - start
        wanted = None if is_whole or rows is None else rows[start:stop] - first
        return _Span(group, low, ends.astype(np.int64), wanted)

    def _payload(
        self, spans: Sequence[_Span], column: Column, part: int, dtype: np.dtype[Any]
    ) -> Ragged:
        """One BYTE_ARRAY column of the spans' rows.

        Where all rows of a span are wanted they stay as they lie in the page, with their lengths between them, if the
        values are aligned then; else the wanted ones are moved together.
        """
        unit = min(dtype.itemsize, _PREFIX_BYTES)
        total = sum(span.num_bytes(dtype.itemsize) for span in spans)
        buffer = np.empty(total // dtype.itemsize, dtype)
        flat = buffer.view(np.uint8)
        starts, lengths = [], []
        at = 0
        for span in spans:
            file, row_group = self._groups[span.group]
            opened, index = self._open.get(file.path), self._index[column.name] + part
            begins = span.row_begins(dtype.itemsize)
            offset = int(span.ends[0]) * dtype.itemsize + span.low * _PREFIX_BYTES
            size = span.page_bytes(dtype.itemsize)
            counts = np.diff(span.ends)
            if span.stays(dtype.itemsize):
                opened.read_page(flat[at : at + size], row_group, index, offset)
                starts.append((at + begins) // dtype.itemsize)
                lengths.append(counts)
                at += size
                continue
            page = np.empty(size, np.uint8)
            opened.read_page(page, row_group, index, offset)
            if span.wanted is not None:
                begins, counts = begins[span.wanted], counts[span.wanted]
            stops = begins + counts * dtype.itemsize
            words = page.view(np.dtype(f"u{unit}"))
            moved = words[keep_mask(len(words), begins // unit, stops // unit)].view(np.uint8)
            flat[at : at + len(moved)] = moved
            starts.append(at // dtype.itemsize + np.cumsum(counts) - counts)
            lengths.append(counts)
            at += len(moved)
        if not spans:
            return Ragged.empty(dtype, inner=column.inner)
        return Ragged(buffer, np.concatenate(starts), np.concatenate(lengths), column.inner)

    def _runs(self, rows: Rows | None, gap_rows: int) -> list[tuple[int, int]]:
        """Index ranges of `rows` that one read serves: inside one row group, without long gaps."""
        if rows is None:
            cuts = self._ends
            total = int(cuts[-1]) if len(cuts) else 0
        else:
            total = len(rows)
            gaps = np.flatnonzero(np.diff(rows) > gap_rows) + 1
            cuts = np.union1d(gaps, np.searchsorted(rows, self._ends, side="left"))
        edges = [0, *(int(c) for c in cuts if 0 < c < total), total]
        return [(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]

    def _fill(
        self,
        opened: _PackedFile,
        target: Array,
        group: int,
        name: str,
        start: int,
        wanted: Rows | None,
    ) -> None:
        """Fill `target` with rows of a column from `start` in a row group: all, or of a span the wanted ones."""
        row_group, index = self._groups[group][1], self._index[name]
        if wanted is None:
            opened.read_into(target, row_group, index, start)
            return
        span = np.empty((int(wanted[-1]) + 1, *target.shape[1:]), target.dtype)
        opened.read_into(span, row_group, index, start)
        np.take(span, wanted, axis=0, out=target, mode="clip")

    def _open_file(self, path: str) -> _PackedFile:
        file = self._files[path]
        opened = _PackedFile(self._store, file.path)
        found = tuple(
            opened.metadata.row_group(g).num_rows for g in range(opened.metadata.num_row_groups)
        )
        if found != file.row_groups or opened.metadata.num_columns != self._num_parquet_columns:
            opened.close()
            raise InternalError(
                f"{file.path!r} is not what the manifest lists: row groups {found} with "
                f"{opened.metadata.num_columns} columns, expected {file.row_groups} with {self._num_parquet_columns}. "
                "Something rewrote it; run the fit again with another data_key, or clean the store."
            )
        return opened


def read_packed(path: str | os.PathLike[str], **storage_options: Any) -> dict[str, Any]:
    """Read a packed Parquet file, or a data directory with its manifest, into numpy arrays by column name.

    Args:
        path: a path or URL, as `Store.create` takes it, of a `.parquet` file or of a folder `data/<key>/<app>`.
        **storage_options: as for `Store.create`.

    Returns:
        For every column an array of shape (rows, *shape of a row's value); where rows differ in length, an object array
        of arrays, bytes or strings; of sparse vectors an object array of pairs (indices, values).
    """
    text = os.fspath(path)
    folder, name = addresses.split(text)
    store = Store(folder, storage_options)
    text = addresses.without_secrets(text)
    if name.endswith(".parquet"):
        file = _PackedFile(store, name)
        try:
            columns = file.columns()
            meta = file.metadata
            groups = tuple(meta.row_group(g).num_rows for g in range(meta.num_row_groups))
        finally:
            file.close()
        files = (DataFile(name, sum(groups), groups),)
        manifest = Manifest(files, _features_only(columns), sum(groups))
    else:
        if not store.exists(f"{name}/{MANIFEST_NAME}"):
            raise InvalidArgumentError(
                f"read_packed({text!r}): there is no {MANIFEST_NAME} in that folder, and it is no .parquet file. "
                "Give a folder data/<key>/<app> of a store, or one of its files."
            )
        stored = Manifest.load(store, name)
        moved = tuple(
            DataFile(f"{name}/{PurePosixPath(f.path).name}", f.rows, f.row_groups)
            for f in stored.files
        )
        manifest = replace(stored, files=moved)
    with RowSource(store, manifest) as source:
        values = source.read([c.name for c in manifest.schema.columns])
    return {c.name: _for_people(c, values[c.name]) for c in manifest.schema.columns}


def _for_people(column: Column, values: Values) -> Array:
    """Rows of any length as an object array."""
    if isinstance(values, np.ndarray):
        return values
    out = np.empty(len(values), object)
    for i in range(len(values)):
        if isinstance(values, SparseRows):
            out[i] = values.indices.row(i), values.values.row(i)
        elif column.kind == "ragged":
            out[i] = values.row(i)
        else:
            data = values.row(i).tobytes()
            out[i] = data if column.kind == "binary" else data.decode()
    return out


def _features_only(columns: Sequence[Column]) -> Any:
    from sparkhvd.estimator.data.schema import DataSchema

    return DataSchema(tuple(columns), ())


def write_packed(
    store: Store, path: str, columns: Sequence[Column], values: Mapping[str, Values], **options: Any
) -> DataFile:
    """Write arrays, or rows of any length, as one packed file."""
    with store.open_output(path) as sink:
        writer = PackedWriter(sink, columns, **options)
        given = [values[c.name] for c in columns]
        stored: list[Values] = [
            np.ascontiguousarray(v, _little_endian(c.dtype)) if isinstance(v, np.ndarray) else v
            for c, v in zip(columns, given, strict=True)
        ]
        if len(stored[0]):
            writer.append(stored)
        groups = writer.close()
    return DataFile(path, sum(groups), groups)
