"""Read rows by number from ordinary Parquet with any row groups, encodings and compression.

A source provides the edges of row groups, because the sampler shuffles whole row groups.

Threads: one at a time; pyarrow decodes columns in its own threads.
Memory: the result of a read, some megabytes of decoded rows, and the compressed bytes of a few row groups.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.arrow import InvalidRowCounts, column_to_numpy, problems, shape_text, usable_rows
from sparkhvd.data.arrow_types import VERIFIED, plain
from sparkhvd.data.columns.ragged import Ragged, Rows, SparseRows, Values, joined
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.files import Empty, OpenFiles, fresh
from sparkhvd.data.manifest import DataFile, Manifest, unpacked_rows
from sparkhvd.data.parquet.dataset import PartitionValue
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

# Decoded rows per piece: large enough to hide the cost per piece, small compared with any window.
_PIECE_BYTES = 8 << 20
_PIECE_ROWS = 64 << 10


class ParquetSource:
    """Reader of rows by number from a manifest's ordinary Parquet files, not thread-safe."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._columns = {c.name: c for c in manifest.schema.columns}
        files = manifest.files
        self._firsts = np.cumsum([0, *(f.rows for f in files)], dtype=np.int64)
        self._group_ends = [np.cumsum(f.row_groups, dtype=np.int64) for f in files]
        self._kept = [_kept_rows(f) for f in files]
        self._null_types = {c.name: _null_type(c) for c in manifest.schema.columns}
        self._open: OpenFiles[int, OpenFile] = OpenFiles(
            lambda number: OpenFile(store, manifest.files[number])
        )
        self._pass: Pass | None = None

    @property
    def block_edges(self) -> Rows:
        """First row numbers of the row groups, followed by the number of rows."""
        ends = [
            (ends if kept is None else np.searchsorted(kept, ends)) + first
            for ends, kept, first in zip(self._group_ends, self._kept, self._firsts, strict=False)
        ]
        return np.unique(np.concatenate([np.zeros(1, np.int64), *ends]))

    def close(self) -> None:
        self._pass = None
        self._open.close()

    def __enter__(self) -> ParquetSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(
        self, names: Sequence[str], rows: Rows | None = None, empty: Empty = fresh
    ) -> dict[str, Any]:
        """Read columns as arrays (rows, *shape), or as `Ragged` or `SparseRows`.

        `Ragged` and `SparseRows` hold rows of different lengths.

        Args:
            names: columns to read.
            rows: ascending row numbers; None means all.
            empty: allocates the arrays.

        Raises:
            InvalidArgumentError: values cannot be used (the message names the column and counts its rows in the file),
                or a file has changed since the fit began.
        """
        columns = [self._columns[name] for name in names]
        count = self._manifest.num_rows if rows is None else len(rows)
        out: dict[str, Any] = {
            c.name: empty(c.name, (count, *(c.shape or ())), c.dtype)
            if c.is_fixed
            else list[Values]()
            for c in columns
        }
        at = 0
        for number, arrays in self._pieces(names, rows):
            length = len(arrays[names[0]])
            for column in columns:
                values = self._values(number, column, arrays[column.name])
                target = out[column.name]
                if column.is_fixed:
                    target[at : at + length] = values
                else:
                    assert not isinstance(values, np.ndarray)
                    target.append(values.packed())
            at += length
        for column in columns:
            if not column.is_fixed:
                out[column.name] = joined(out[column.name], _empty(column))
        return out

    def arrays(self, names: Sequence[str], rows: Rows | None = None) -> Iterator[Arrays]:
        """Read the named columns as Arrow arrays in Spark's forms, piece by piece."""
        for _, arrays in self._pieces(names, rows):
            yield arrays

    def usable(
        self, columns: Sequence[Column], files: Sequence[int]
    ) -> dict[int, npt.NDArray[Any]]:
        """Find the rows without a null or an invalid number in these columns: number of the file -> mask (rows,)."""
        usable = {}
        for number in files:
            masks = [
                _usable_of(arrays, columns)
                for _, arrays in self._file_pieces(number, [c.name for c in columns], None)
            ]
            usable[number] = np.concatenate([np.zeros(0, np.bool_), *masks])
        return usable

    def examples(self, count: int) -> Rows:
        """Find the numbers of the first `count` rows (or fewer) not skipped by `handle_invalid`."""
        skipping = [c for c in self._columns.values() if c.invalid[0] == "skip"]
        if not skipping:
            return np.arange(min(count, self._manifest.num_rows), dtype=np.int64)
        usable, at = np.empty(0, np.int64), 0
        for arrays in self.arrays([c.name for c in skipping]):
            mask = _usable_of(arrays, skipping)
            usable = np.append(usable, np.flatnonzero(mask) + at)
            at += len(mask)
            if len(usable) >= count:
                break
        return usable[:count]

    # -- values --------------------------------------------------------------------------------------

    def _values(self, number: int, column: Column, array: pa.Array) -> Values:
        schema = self._manifest.schema
        values, _ = column_to_numpy(array, column, is_flag=column is schema.validation)
        if values is None or not _fits(values, column):
            self._refuse(number, column)
        if column is schema.sample_weight and isinstance(values, np.ndarray) and (values < 0).any():
            self._refuse(number, column)
        return values

    def _refuse(self, number: int, column: Column) -> NoReturn:
        """Read a column of a whole file, and raise an error with the count of its unusable rows."""
        schema, file = self._manifest.schema, self._manifest.files[number]
        findings = InvalidRowCounts()
        rows = negative = 0
        for _, arrays in self._file_pieces(number, [column.name], None):
            array = arrays[column.name]
            if column.invalid[0] == "skip" and (mask := usable_rows(array, column)) is not None:
                array = array.filter(pa.array(mask))
            values, more = column_to_numpy(array, column, is_flag=column is schema.validation)
            findings.add(more)
            rows += len(array)
            if column is schema.sample_weight and isinstance(values, np.ndarray):
                negative += int(np.count_nonzero(values < 0))
        where = f"column {column.name!r} ({column.source})"
        lines = list(problems(column, findings, rows, is_flag=column is schema.validation))
        if negative:
            lines.append(f"{where}: {negative:,} of {rows:,} rows hold a sample weight below 0.")
        if not lines:
            shapes = ", ".join(
                f"{n:,} of {shape_text(s)}" for s, n in findings.shapes.most_common(6)
            )
            expected = shape_text(tuple(n for n in column.shape or () if n >= 0))
            lines.append(
                f"{where}: rows differ in length from the first rows of the data: {shapes} elements, not {expected}. "
                f"Pad or cut them, or give collate_fn={{{column.name!r}: pad(0)}} (sparkhvd.estimator.pad)."
            )
        listed = "\n".join(f"  {line}" for line in lines)
        raise InvalidArgumentError(
            f"The data cannot be used for training. In {self._store.full_url(file.path)!r}:\n{listed}"
        )

    # -- pieces --------------------------------------------------------------------------------------

    def _pieces(self, names: Sequence[str], rows: Rows | None) -> Iterator[tuple[int, Arrays]]:
        """Decode and yield the wanted rows in order, as pairs (number of the file, columns)."""
        for number, file in enumerate(self._manifest.files):
            if not file.rows:
                continue
            wanted = None
            if rows is not None:
                first = self._firsts[number]
                low, high = np.searchsorted(rows, (first, first + file.rows))
                if low == high:
                    continue
                wanted = rows[low:high] - first
            for _, arrays in self._file_pieces(number, names, wanted):
                yield number, arrays

    def _file_pieces(
        self, number: int, names: Sequence[str], wanted: Rows | None
    ) -> Iterator[tuple[int, Arrays]]:
        """Decode and yield the wanted rows of a file, as pairs (first row, columns)."""
        kept = self._kept[number]
        if kept is not None:  # from here on, row numbers count deleted rows, too
            wanted = kept if wanted is None else kept[wanted]
        count = self._manifest.files[number].rows if wanted is None else len(wanted)
        at = 0
        while at < count:
            row = at if wanted is None else int(wanted[at])
            last = count - 1 if wanted is None else int(wanted[-1])
            start, arrays = self._piece(number, tuple(names), row, last)
            stop = start + len(arrays[names[0]])
            end = stop if wanted is None else int(np.searchsorted(wanted, stop))
            chosen = (
                np.arange(at - start, end - start) if wanted is None else wanted[at:end] - start
            )
            yield row, {name: _taken(array, chosen) for name, array in arrays.items()}
            at = end

    def _piece(
        self, number: int, names: tuple[str, ...], row: int, last: int
    ) -> tuple[int, Arrays]:
        """Decode the piece containing a row, and return the number of its first row and the piece.

        The caller will read rows up to `last` next, so the pass is prepared for their row groups.
        """
        ends = self._group_ends[number]
        group = int(np.searchsorted(ends, row, side="right"))
        begin = int(ends[group - 1]) if group else 0
        running = self._pass
        # Continue the last pass unless a row group begins between its position and the row.
        if running is None or not running.serves(number, names, row, begin):
            self._pass = running = None
            running = Pass(
                self._open.get(number),
                number,
                names,
                range(group, int(np.searchsorted(ends, last, side="right")) + 1),
                begin,
                self._piece_rows(names),
                self._null_types,
            )
            self._pass = running
        return running.piece(row)

    def _piece_rows(self, names: Sequence[str]) -> int:
        row_bytes = 0
        for name in names:
            column = self._columns[name]
            mean = self._manifest.variable_bytes.get(name, 0) / max(1, self._manifest.num_rows)
            is_known = column.is_fixed and column.shape is not None
            row_bytes += column.row_bytes if is_known else int(mean) + 8
        return int(min(max(1, _PIECE_BYTES // max(1, row_bytes)), _PIECE_ROWS))


def _kept_rows(file: DataFile) -> Rows | None:
    """Find the positions of a file's remaining rows after deletes and filter, or None for all."""
    if not file.kept:
        return None
    kept = np.flatnonzero(unpacked_rows(file.kept, sum(file.row_groups)))
    if len(kept) != file.rows:
        raise InvalidArgumentError(
            f"The list of the data's files is damaged: the mask of {file.path!r} keeps {len(kept)} rows, but the list counts "
            f"{file.rows}. Fit again."
        )
    return kept


def _taken(array: pa.Array, chosen: Rows) -> pa.Array:
    """Take rows of an array. Contiguous rows share its memory."""
    if not len(chosen) or chosen[-1] - chosen[0] + 1 == len(chosen):
        return array.slice(int(chosen[0]) if len(chosen) else 0, len(chosen))
    return array.take(pa.array(chosen))


def _usable_of(arrays: Arrays, columns: Sequence[Column]) -> npt.NDArray[Any]:
    usable = np.ones(len(next(iter(arrays.values()))), np.bool_)
    for column in columns:
        mask = usable_rows(arrays[column.name], column)
        if mask is not None:
            usable &= mask
    return usable


def _fits(values: Values, column: Column) -> bool:
    """Whether the rows of a piece have the same shape as the first rows of the data."""
    if isinstance(values, np.ndarray):
        return values.shape[1:] == column.shape
    if isinstance(values, SparseRows):
        return values.width == column.num_elements
    return values.inner == column.inner


def _empty(column: Column) -> Ragged | SparseRows:
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements)
    return Ragged.empty(column.dtype, inner=column.inner)


# ----------------------------------------------------------------------------------------------------
# Open Parquet files and passes over their row groups.
# Decoding cannot start in the middle of a row group: earlier rows are decoded too. So a pass keeps the position at
# which the last read ended, and the next read continues there, unless a row group begins between that position and the
# next row.

# Bound on the bytes of row groups in one pass. Several small row groups share a pass, because each pass costs a call.
_SPAN_BYTES = 64 << 20
# Row groups of a remote file up to this size are fetched as a whole before decoding.
_WHOLE_BYTES = 256 << 20
# Memory for the read buffers of all columns if row groups are not fetched as a whole.
_BUFFER_BYTES = 32 << 20

Arrays = dict[str, pa.Array]


class OpenFile:
    """Open file, verified against the manifest.

    Raises:
        InvalidArgumentError: the file is missing, or has changed since the fit began.
    """

    def __init__(self, store: Store, file: DataFile) -> None:
        self.file = file
        local = store.local_path(file.path)
        where = store.full_url(file.path)
        try:
            self._source = pa.OSFile(local) if local is not None else store.open_input(file.path)
        except FileNotFoundError as e:
            raise InvalidArgumentError(
                f"Host {socket.gethostname()} does not find {where!r}, which the driver saw when the fit began. Give a path or URL "
                "that all hosts reach, and do not change the data during a fit."
            ) from e
        try:
            self.metadata = pq.read_metadata(self._source)
            row_groups = tuple(
                self.metadata.row_group(g).num_rows for g in range(self.metadata.num_row_groups)
            )
            if row_groups != file.row_groups or self._source.size() != file.size:
                raise InvalidArgumentError(
                    f"{where!r} has changed since the fit began: it has {self._source.size():,} bytes and {sum(row_groups):,} rows, "
                    f"but had {file.size:,} bytes and {sum(file.row_groups):,} rows. Do not change the data during a fit; run it again."
                )
            modified_ns = os.stat(local).st_mtime_ns if local is not None else 0
            if modified_ns and file.modified_ns and modified_ns != file.modified_ns:
                raise InvalidArgumentError(
                    f"{where!r} was written again since the fit began, or its time of change differs between the driver and "
                    f"{socket.gethostname()}. Do not change the data during a fit; run it again."
                )
        except BaseException:
            self._source.close()
            raise
        self._is_local = local is not None

    def close(self) -> None:
        self._source.close()

    def span(self, groups: Sequence[int]) -> list[int]:
        """Select the row groups to decode in one pass: the first, then more up to `_SPAN_BYTES`."""
        total = 0
        for count, number in enumerate(groups):
            total += self.metadata.row_group(number).total_byte_size
            if count and total > _SPAN_BYTES:
                return list(groups[:count])
        return list(groups)

    def batches(self, groups: list[int], names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Decode the columns of row groups in pieces of `rows` rows."""
        size = sum(self.metadata.row_group(g).total_byte_size for g in groups)
        # Row groups of a remote file are fetched in few large reads, if they are small enough for memory.
        is_fetched = not self._is_local and size <= _WHOLE_BYTES
        file = pq.ParquetFile(
            self._source,
            metadata=self.metadata,
            **VERIFIED,
            pre_buffer=is_fetched,
            buffer_size=0 if is_fetched else max(16 << 10, _BUFFER_BYTES // max(8, len(names))),
        )
        batches: Iterator[pa.RecordBatch] = file.iter_batches(
            batch_size=rows, row_groups=groups, columns=names
        )
        return batches


class Pass:
    """Reads a file's row groups once, from the first to the last. It keeps the current piece.

    Args:
        file: file to read.
        number: number of the file in the manifest.
        names: columns to decode.
        wanted: row groups from the first to the last wanted row, in order.
        begin: number of the first row of the first row group.
        rows: rows of a piece.
        null_types: column -> Arrow type of its nulls, for columns that a file lacks.
    """

    def __init__(
        self,
        file: OpenFile,
        number: int,
        names: tuple[str, ...],
        wanted: Sequence[int],
        begin: int,
        rows: int,
        null_types: Mapping[str, pa.DataType],
    ) -> None:
        self._null_types = null_types
        self._number, self._names = number, names
        self._path, self._group = file.file.path, wanted[0]
        self._partition = dict(file.file.partition)
        self._renamed = dict(file.file.names)
        stored = [self._renamed.get(name, name) for name in names if name not in self._partition]
        groups = file.span(wanted)
        self._end = begin + sum(file.file.row_groups[g] for g in groups)
        self._rows = rows
        self._batches = file.batches(groups, stored, rows) if stored else iter(())
        self._has_stored = bool(stored)
        self._start = self._stop = begin
        self._arrays: Arrays = {}

    def serves(self, number: int, names: tuple[str, ...], row: int, group_begin: int) -> bool:
        """Whether this pass should continue to a row: no row group begins between the current piece and the row."""
        is_same = (number, names) == (self._number, self._names)
        return is_same and self._start <= row < self._end and group_begin <= self._stop

    def piece(self, row: int) -> tuple[int, Arrays]:
        """Decode up to the piece containing a row, and return its first row and its columns.

        The first row is a number in the file.
        """
        while self._stop <= row:
            self._start = self._stop
            try:
                batch = next(self._batches) if self._has_stored else None
            except (OSError, pa.ArrowInvalid) as e:
                raise type(e)(f"{self._path!r}, row groups from {self._group}: {e}") from e
            count = (
                batch.num_rows if batch is not None else min(self._rows, self._end - self._start)
            )
            self._stop = self._start + count
            if self._stop > row:
                self._arrays = {name: self._array(name, batch, count) for name in self._names}
        return self._start, self._arrays

    def _array(self, name: str, batch: pa.RecordBatch | None, count: int) -> pa.Array:
        if name in self._partition:
            return _repeated(self._partition[name], count, self._null_types[name])
        assert batch is not None
        return plain(batch.column(batch.schema.get_field_index(self._renamed.get(name, name))))


def _repeated(value: PartitionValue, count: int, null_type: pa.DataType) -> pa.Array:
    """Repeat the value of a partition column for each row."""
    return pa.nulls(count, null_type) if value is None else pa.repeat(value, count)


def _null_type(column: Column) -> pa.DataType:
    """Arrow type for the nulls of a column, in the form that `column_to_numpy` reads."""
    if column.kind in ("binary", "string"):
        return pa.binary()
    if column.kind in ("vector", "sparse"):
        arrays = [("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
        return pa.struct([("type", pa.int8()), ("size", pa.int32()), *arrays])
    kind = pa.float64()
    for _ in range(column.source.count("array<")):
        kind = pa.list_(kind)
    return kind
