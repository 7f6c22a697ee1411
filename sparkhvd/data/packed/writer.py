"""Write packed files."""

from __future__ import annotations

import inspect
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.columns.ragged import Array, Values
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.manifest import FORMAT_VERSION, DataFile
from sparkhvd.data.packed.checksums import SummingSink
from sparkhvd.data.packed.file import (
    MAGIC,
    METADATA_KEY,
    PAGE_BYTES,
    PREFIX_BYTES,
    Description,
    little_endian,
    parquet_fields,
    payload_types,
    payloads,
)
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

ROW_GROUP_BYTES = 64 << 20
_ARGUMENTS = inspect.signature(pq.ParquetWriter).parameters


class PackedWriter:
    """Writer of one packed file, with at most one row group in memory."""

    def __init__(
        self,
        sink: IO[bytes] | io.RawIOBase,
        columns: Sequence[Column],
        *,
        row_group_bytes: int = ROW_GROUP_BYTES,
    ) -> None:
        self._columns = tuple(columns)
        described = asdict(Description(self._columns, FORMAT_VERSION, block_checksums=True))
        fields = [parquet_fields(c) for c in columns]
        self._schema = pa.schema(
            [f for group in fields for f in group],
            metadata={METADATA_KEY: json.dumps(described).encode()},
        )
        # Indices of the Parquet columns with row ends.
        firsts = np.cumsum([0, *(len(group) for group in fields)])
        self._ends = [int(i) for i, c in zip(firsts, columns, strict=False) if not c.is_fixed]
        options: dict[str, object] = {
            "compression": "NONE",
            "use_dictionary": False,
            "write_statistics": False,
            "data_page_size": PAGE_BYTES,
        }
        # Newer versions of pyarrow end a page after 20,000 rows by default.
        if "max_rows_per_page" in _ARGUMENTS:
            options["max_rows_per_page"] = 2**31 - 1
        self._written: list[pq.FileMetaData] = []
        self._sink = SummingSink(sink)
        self._writer = pq.ParquetWriter(
            self._sink, self._schema, metadata_collector=self._written, **options
        )
        self._fixed_bytes = sum(c.row_bytes for c in columns)
        self._group_bytes = max(row_group_bytes, 1)
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self.row_groups: list[int] = []

    def append(self, values: Sequence[Values]) -> None:
        """Add rows: for each column a C-contiguous array (rows, ...) or rows of any length, in the column's dtype."""
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
        """Write pending rows, the checksums and the footer, and return the number of rows of each row group."""
        self._flush()
        self._sink.write_table()
        self._writer.close()
        return tuple(self.row_groups)

    @property
    def footer_crc(self) -> int:
        """CRC-32 of the file from its footer to its end, available once closed."""
        footer = io.BytesIO()
        self._written[0].write_metadata_file(footer)
        return zlib.crc32(footer.getbuffer()[len(MAGIC) :])

    @property
    def values_crc(self) -> int:
        """CRC-32 of the checksums of all data before the footer, available once closed."""
        return self._sink.table_crc

    def _variable_bytes(self, values: Sequence[Values], rows: int) -> Array:
        """Bytes (rows,) of each row in the columns of variable size."""
        total = np.zeros(rows, np.int64)
        for column, value in zip(self._columns, values, strict=True):
            if isinstance(value, np.ndarray):
                continue
            sizes = sum(p.lengths * p.values.itemsize + PREFIX_BYTES for p in payloads(value))
            if len(value) and int(np.max(sizes)) >= PAGE_BYTES:
                self._writer.close()  # pyarrow's writer must be closed while the file is still open
                raise InvalidArgumentError(
                    f"Column {column.name!r} has a row of {int(np.max(sizes)):,} bytes; at most {PAGE_BYTES:,} fit. "
                    "Split or shrink it."
                )
            total += sizes
        return total

    def _fitting(self, sizes: Array | None) -> int:
        """Count the next rows (`sizes` bytes each) that fit the row group, at least 1 if empty."""
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
            parts = [
                v[at : at + b.num_rows]
                for v, at, b in zip(lengths, offsets, self._pending, strict=True)
            ]
            ends = np.cumsum(np.concatenate(parts), dtype=np.int64)
            field = self._schema.field(index)
            column = _fixed_array(field.type, ends)
            table = table.set_column(index, field, column)
        self._writer.write_table(table, row_group_size=self._pending_rows)
        self.row_groups.append(self._pending_rows)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0


def _fixed_array(kind: pa.DataType, values: Array) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _arrays(column: Column, values: Values) -> list[pa.Array]:
    """Make the Arrow arrays of a column, with row lengths first for variable rows.

    `_flush` converts these lengths to ends.
    """
    if isinstance(values, np.ndarray):
        return [_fixed_array(pa.binary(column.row_bytes), values)]
    parts = payloads(values)
    arrays = [_fixed_array(pa.binary(8), np.ascontiguousarray(parts[0].lengths, np.int64))]
    for part, dtype in zip(parts, payload_types(column), strict=True):
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


def write_packed(
    store: Store,
    path: str,
    columns: Sequence[Column],
    values: Mapping[str, Values],
    *,
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> DataFile:
    """Write arrays, or rows of any length, as one packed file."""
    with store.open_output(path) as sink:
        writer = PackedWriter(sink, columns, row_group_bytes=row_group_bytes)
        ordered = [values[c.name] for c in columns]
        stored: list[Values] = [
            np.ascontiguousarray(v, little_endian(c.dtype)) if isinstance(v, np.ndarray) else v
            for c, v in zip(columns, ordered, strict=True)
        ]
        if len(stored[0]):
            writer.append(stored)
        groups = writer.close()
    return DataFile(
        path, sum(groups), groups, footer_crc=writer.footer_crc, values_crc=writer.values_crc
    )
