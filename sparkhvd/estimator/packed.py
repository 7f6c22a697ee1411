"""Packed Parquet: one FIXED_LEN_BYTE_ARRAY column per DataFrame column, a row's little-endian values each.

Columns are required, uncompressed, PLAIN and one page per row group, so a row group's values lie in the file as
one array: a reader asks the footer where, and reads exactly the rows it wants. Files that another writer has
rewritten (several pages, compression) are decoded by pyarrow instead.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.errors import InternalError, InvalidArgumentError
from sparkhvd.estimator.manifest import FORMAT_VERSION, MANIFEST_NAME, DataFile, Manifest
from sparkhvd.estimator.sampler import Rows
from sparkhvd.estimator.schema import Column
from sparkhvd.estimator.store import Store

__all__ = ["ROW_GROUP_BYTES", "PackedWriter", "RowSource", "read_packed"]

Array = npt.NDArray[Any]

ROW_GROUP_BYTES = 64 << 20
METADATA_KEY = b"sparkhvd"
# A page's size is an int32 in Parquet; one row group must stay below it in every column.
_PAGE_BYTES = 1 << 30
# A gap of this size costs about as much to read over as another call to read.
_GAP_BYTES = 128 << 10
_OPEN_FILES = 16


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


class PackedWriter:
    """Writes one packed file; holds at most one row group in memory."""

    def __init__(
        self, sink: Any, columns: Sequence[Column], *, row_group_bytes: int = ROW_GROUP_BYTES
    ) -> None:
        self._columns = tuple(columns)
        described = {"format_version": FORMAT_VERSION, "columns": [asdict(c) for c in columns]}
        # Required fields: no definition levels stand between the page header and the values.
        self._schema = pa.schema(
            [pa.field(c.name, pa.binary(c.row_bytes), nullable=False) for c in columns],
            metadata={METADATA_KEY: json.dumps(described).encode()},
        )
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
        row_bytes = sum(c.row_bytes for c in columns)
        self._rows_per_group = max(1, row_group_bytes // row_bytes)
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self.row_groups: list[int] = []

    def append(self, values: Sequence[Array]) -> None:
        """Add rows: one C-contiguous array (rows, ...) per column, of the column's dtype."""
        rows = len(values[0])
        arrays = [
            pa.FixedSizeBinaryArray.from_buffers(field.type, rows, [None, pa.py_buffer(v)])
            for field, v in zip(self._schema, values, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        while batch.num_rows:
            part = batch.slice(0, self._rows_per_group - self._pending_rows)
            self._pending.append(part)
            self._pending_rows += part.num_rows
            if self._pending_rows == self._rows_per_group:
                self._flush()
            batch = batch.slice(part.num_rows)

    def close(self) -> tuple[int, ...]:
        """Write what is pending and the footer; return the rows of each row group."""
        self._flush()
        self._writer.close()
        return tuple(self.row_groups)

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        table = pa.Table.from_batches(self._pending, schema=self._schema)
        self._writer.write_table(table, row_group_size=self._pending_rows)
        self.row_groups.append(self._pending_rows)
        self._pending, self._pending_rows = [], 0


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
        self._source = pa.OSFile(local) if local is not None else store.open_input(path)
        try:
            self.metadata = pq.read_metadata(self._source)
        except BaseException:
            self._source.close()
            raise
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._decoded: tuple[int, pa.Table] | None = None

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
        return [
            Column(**{**c, "shape": tuple(c["shape"])}) for c in json.loads(described)["columns"]
        ]

    def read_into(self, out: Array, row_group: int, index: int, start: int) -> None:
        """Fill the contiguous `out` with the rows from `start` of a column in a row group."""
        chunk = self._chunks.get((row_group, index)) or self._locate(out, row_group, index)
        row_bytes = out.nbytes // len(out)
        if chunk.offset is None:
            out.view(np.uint8).reshape(len(out), row_bytes)[:] = self._decode(row_group, index)[
                start : start + len(out)
            ]
            return
        self._source.seek(chunk.offset + start * row_bytes)
        got = self._source.readinto(out.reshape(-1).view(np.uint8).data)
        if got != out.nbytes:
            raise OSError(f"{self.path!r} ended early: {got} of {out.nbytes} bytes were there.")

    def _locate(self, out: Array, row_group: int, index: int) -> _Chunk:
        group = self.metadata.row_group(row_group)
        column = group.column(index)
        row_bytes = out.nbytes // len(out)
        size = group.num_rows * row_bytes
        header_bytes = column.total_compressed_size - size
        offset: int | None = None
        if column.compression == "UNCOMPRESSED" and 0 < header_bytes <= 256:
            self._source.seek(column.data_page_offset)
            if _page_bytes(self._source.read(16)) == size:
                offset = column.data_page_offset + header_bytes
        chunk = _Chunk(offset, group.num_rows)
        self._chunks[row_group, index] = chunk
        return chunk

    def _decode(self, row_group: int, index: int) -> Array:
        if self._decoded is None or self._decoded[0] != row_group:
            self._source.seek(0)
            self._decoded = (row_group, pq.ParquetFile(self._source).read_row_group(row_group))
        column = self._decoded[1].column(index).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        width = column.type.byte_width
        flat = np.frombuffer(column.buffers()[1], dtype=np.uint8)
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


class RowSource:
    """Reads rows by number from the files of a manifest; not for several threads at once."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._index = {c.name: i for i, c in enumerate(manifest.schema.columns)}
        self._columns = {c.name: c for c in manifest.schema.columns}
        # Every row group of every file, in row order.
        self._groups = [(f, g) for f in manifest.files for g in range(len(f.row_groups))]
        rows = [f.row_groups[g] for f, g in self._groups]
        self._ends = np.cumsum(rows, dtype=np.int64) if rows else np.empty(0, dtype=np.int64)
        self._open: OrderedDict[str, _PackedFile] = OrderedDict()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> RowSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read(self, names: Sequence[str], rows: Rows | None = None) -> dict[str, Array]:
        """Arrays (rows, *shape) of the named columns.

        Args:
            names: columns to read.
            rows: ascending row numbers; None means all.
        """
        count = self._manifest.num_rows if rows is None else len(rows)
        columns = [self._columns[name] for name in names]
        out = {
            c.name: np.empty((count, *(c.shape or ())), _little_endian(c.dtype)) for c in columns
        }
        widest = max((c.row_bytes for c in columns), default=1)
        for start, stop in self._runs(rows, max(1, _GAP_BYTES // widest)):
            first = start if rows is None else int(rows[start])
            last = stop - 1 if rows is None else int(rows[stop - 1])
            group = int(np.searchsorted(self._ends, first, side="right"))
            base = int(self._ends[group - 1]) if group else 0
            for column in columns:
                target = out[column.name][start:stop]
                if column.row_bytes == 0:
                    continue
                if last - first + 1 == stop - start:
                    self._fill(target, group, column.name, first - base)
                    continue
                assert rows is not None
                span = np.empty((last - first + 1, *target.shape[1:]), target.dtype)
                self._fill(span, group, column.name, first - base)
                np.take(span, rows[start:stop] - first, axis=0, out=target, mode="clip")
        return out

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

    def _fill(self, out: Array, group: int, name: str, start: int) -> None:
        file, row_group = self._groups[group]
        self._file(file).read_into(out, row_group, self._index[name], start)

    def _file(self, file: DataFile) -> _PackedFile:
        opened = self._open.get(file.path)
        if opened is not None:
            self._open.move_to_end(file.path)
            return opened
        opened = _PackedFile(self._store, file.path)
        found = tuple(
            opened.metadata.row_group(g).num_rows for g in range(opened.metadata.num_row_groups)
        )
        if found != file.row_groups or opened.metadata.num_columns != len(self._index):
            opened.close()
            raise InternalError(
                f"{file.path!r} is not what the manifest lists: row groups {found} with "
                f"{opened.metadata.num_columns} columns, expected {file.row_groups} with {len(self._index)}. "
                "Something rewrote it; run the fit again with another data_key, or clean the store."
            )
        self._open[file.path] = opened
        while len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return opened


def read_packed(path: str | os.PathLike[str], **storage_options: Any) -> dict[str, Array]:
    """Read a packed Parquet file, or a data directory with its manifest, into numpy arrays by column name.

    Args:
        path: an absolute path or URL of a `.parquet` file, or of a folder `data/<key>/<app>`.
        **storage_options: as for `Store.create`.

    Returns:
        For every column an array of shape (rows, *shape of a row's value).
    """
    text = os.fspath(path).rstrip("/")
    folder, _, name = (text if "://" in text else os.path.abspath(text)).rpartition("/")
    store = Store(folder or "/", storage_options)
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
        manifest = Manifest(moved, stored.schema, stored.num_rows, stored.num_validation)
    with RowSource(store, manifest) as source:
        return source.read([c.name for c in manifest.schema.columns])


def _features_only(columns: Sequence[Column]) -> Any:
    from sparkhvd.estimator.schema import DataSchema

    return DataSchema(tuple(columns), ())


def write_packed(
    store: Store, path: str, columns: Sequence[Column], values: Mapping[str, Array], **options: Any
) -> DataFile:
    """Write arrays as one packed file."""
    with store.open_output(path) as sink:
        writer = PackedWriter(sink, columns, **options)
        arrays = [np.ascontiguousarray(values[c.name], _little_endian(c.dtype)) for c in columns]
        if len(arrays[0]):
            writer.append(arrays)
        groups = writer.close()
    return DataFile(path, sum(groups), groups)
