"""Open Parquet files and passes over their row groups.

Such files cannot be read from the middle of a row group: rows before it are decoded too. So a pass keeps the place where the last
read ended, and the next read goes on from there unless a row group begins nearer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.arrow_types import VERIFIED, plain
from sparkhvd.data.manifest import DataFile
from sparkhvd.data.parquet.folders import PartitionValue
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

__all__ = ["Arrays", "OpenFile", "Pass"]

# Compressed bytes of row groups that one pass over a file takes together: small ones are not worth a call each.
_SPAN_BYTES = 64 << 20
# Row groups above this are not fetched as a whole before they are decoded.
_WHOLE_BYTES = 256 << 20
# Buffer through which larger ones are read; each column has its own.
_BUFFER_BYTES = 32 << 20

Arrays = dict[str, pa.Array]


class OpenFile:
    """An open file, checked to be the one that the manifest lists.

    Raises:
        InvalidArgumentError: it is not there, or has changed since the fit began.
    """

    def __init__(self, store: Store, file: DataFile) -> None:
        self.file = file
        local = store.local_path(file.path)
        where = store.full_url(file.path)
        try:
            self._source = pa.OSFile(local) if local is not None else store.open_input(file.path)
        except FileNotFoundError as e:
            raise InvalidArgumentError(
                f"{where!r} is not there for {socket.gethostname()}. The driver saw it when the fit began: give a path or URL that "
                "all hosts reach, and let nobody change the data during a fit."
            ) from e
        try:
            self.metadata = pq.read_metadata(self._source)
            row_groups = tuple(
                self.metadata.row_group(g).num_rows for g in range(self.metadata.num_row_groups)
            )
            if row_groups != file.row_groups or self._source.size() != file.size:
                raise InvalidArgumentError(
                    f"{where!r} has changed since the fit began: it has {self._source.size():,} bytes and {sum(row_groups):,} rows, "
                    f"and had {file.size:,} and {file.rows:,}. Let nobody change the data during a fit; run it again."
                )
            modified_ns = os.stat(local).st_mtime_ns if local is not None else 0
            if modified_ns and file.modified_ns and modified_ns != file.modified_ns:
                raise InvalidArgumentError(
                    f"{where!r} was written again since the fit began, or its time of change differs between the driver and "
                    f"{socket.gethostname()}. Let nobody change the data during a fit; run it again."
                )
        except BaseException:
            self._source.close()
            raise
        self._is_local = local is not None

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def span(self, groups: Sequence[int]) -> list[int]:
        """Return the first of these row groups, and those after it that are decoded in the same pass."""
        total = 0
        for count, number in enumerate(groups):
            total += self.metadata.row_group(number).total_byte_size
            if count and total > _SPAN_BYTES:
                return list(groups[:count])
        return list(groups)

    def batches(self, groups: list[int], names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Decode the columns of row groups in pieces of some rows."""
        size = sum(self.metadata.row_group(g).total_byte_size for g in groups)
        # A remote file is fetched in few large reads, unless that would take too much memory.
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
    """Pass over some row groups of a file, front to back; keeps the piece it came to.

    Args:
        file: that is read.
        number: of the file in the manifest.
        names: columns to decode.
        wanted: row groups that have wanted rows, in order.
        begin: the first row of the first of them.
        rows: of a piece.
    """

    def __init__(
        self,
        file: OpenFile,
        number: int,
        names: tuple[str, ...],
        wanted: Sequence[int],
        begin: int,
        rows: int,
    ) -> None:
        self._number, self._names = number, names
        self._path, self._group = file.file.path, wanted[0]
        self._partition = dict(file.file.partition)
        stored = [name for name in names if name not in self._partition]
        groups = file.span(wanted)
        self._end = begin + sum(file.file.row_groups[g] for g in groups)
        self._rows = rows
        self._batches = file.batches(groups, stored, rows) if stored else iter(())
        self._has_stored = bool(stored)
        self._start = self._stop = begin
        self._arrays: Arrays = {}

    def serves(self, number: int, names: tuple[str, ...], row: int, group_begin: int) -> bool:
        """Return True if a row is in the current piece, or in one after it that is nearer than any row group's begin."""
        is_same = (number, names) == (self._number, self._names)
        return is_same and self._start <= row < self._end and group_begin <= self._stop

    def piece(self, row: int) -> tuple[int, Arrays]:
        """Decode on to the piece with a row; return its first row's number in the file, and its columns."""
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
            return _repeated(self._partition[name], count)
        assert batch is not None
        return plain(batch.column(batch.schema.get_field_index(name)))


def _repeated(value: PartitionValue, count: int) -> pa.Array:
    """Repeat a partition's value for each row."""
    return pa.nulls(count, pa.float64()) if value is None else pa.repeat(value, count)
