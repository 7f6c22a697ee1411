"""Read rows of packed files by row number."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from sparkhvd.data.columns.ragged import Array, Ragged, Rows, SparseRows, Values, keep_mask
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.files import Empty, OpenFiles, fresh
from sparkhvd.data.manifest import MANIFEST_NAME, DataFile, Manifest
from sparkhvd.data.packed.file import (
    PREFIX_BYTES,
    Checked,
    PackedFile,
    little_endian,
    payload_types,
)
from sparkhvd.data.store import addresses
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

# A gap of this size between wanted rows is read, too, because another read would cost about as much.
_GAP_BYTES = 128 << 10


class RowSource:
    """Reader of rows by number from a manifest's packed files, not thread-safe."""

    # Any row can be read alone.
    block_edges: Rows | None = None

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        # Index of each column's first Parquet column, and the number of all Parquet columns.
        self._index = {}
        self._num_parquet_columns = 0
        for c in manifest.schema.columns:
            self._index[c.name] = self._num_parquet_columns
            self._num_parquet_columns += len(payload_types(c)) + 1
        self._columns = {c.name: c for c in manifest.schema.columns}
        # (file, number of the row group) of every row group, in row order.
        self._groups = [(f, g) for f in manifest.files for g in range(len(f.row_groups))]
        rows = [f.row_groups[g] for f, g in self._groups]
        self._ends = np.cumsum(rows, dtype=np.int64) if rows else np.empty(0, dtype=np.int64)
        self._files = {f.path: f for f in manifest.files}
        self._checked: Checked = {}
        self._open: OpenFiles[str, PackedFile] = OpenFiles(self._open_file)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> RowSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(
        self, names: Sequence[str], rows: Rows | None = None, empty: Empty = fresh
    ) -> dict[str, Values]:
        """Read columns as arrays (rows, *shape), or as `Ragged` or `SparseRows`.

        `Ragged` and `SparseRows` hold rows of different lengths.

        Args:
            names: columns to read.
            rows: ascending row numbers; None means all.
            empty: allocates the arrays.
        """
        asked = [self._columns[name] for name in names]
        out: dict[str, Values] = {}
        out.update(self._read_fixed([c for c in asked if c.is_fixed], rows, empty))
        for column in asked:
            if not column.is_fixed:
                out[column.name] = self._read_variable(column, rows, empty)
        return out

    def examples(self, count: int) -> Rows:
        """Numbers of the first `count` rows, or of all if fewer."""
        return np.arange(min(count, self._manifest.num_rows), dtype=np.int64)

    # -- rows of one length --------------------------------------------------------------------------

    def _read_fixed(
        self, columns: Sequence[Column], rows: Rows | None, empty: Empty
    ) -> dict[str, Array]:
        count = self._manifest.num_rows if rows is None else len(rows)
        out = {
            c.name: empty(c.name, (count, *(c.shape or ())), little_endian(c.dtype))
            for c in columns
        }
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
                together(fills)
            else:
                for fill in fills:
                    fill()
        return out

    def _fill(
        self,
        opened: PackedFile,
        target: Array,
        group: int,
        name: str,
        start: int,
        wanted: Rows | None,
    ) -> None:
        """Fill `target` with a column's rows from `start` in a row group, or with the rows `start + wanted`."""
        row_group, index = self._groups[group][1], self._index[name]
        if wanted is None:
            opened.read_into(target, row_group, index, start)
            return
        span = np.empty((int(wanted[-1]) + 1, *target.shape[1:]), target.dtype)
        opened.read_into(span, row_group, index, start)
        np.take(span, wanted, axis=0, out=target, mode="clip")

    # -- rows of any length --------------------------------------------------------------------------

    def _read_variable(
        self, column: Column, rows: Rows | None, empty: Empty
    ) -> Ragged | SparseRows:
        row_bytes = 8 + self._manifest.variable_bytes.get(column.name, 0) / max(
            self._manifest.num_rows, 1
        )
        spans = [
            self._span(column, rows, start, stop)
            for start, stop in self._runs(rows, max(1, int(_GAP_BYTES / row_bytes)))
        ]
        parts = [
            self._payload(spans, column, 1 + i, dtype, empty)
            for i, dtype in enumerate(payload_types(column))
        ]
        if column.kind == "sparse":
            return SparseRows(parts[0], parts[1], column.num_elements)
        return parts[0]

    def _span(self, column: Column, rows: Rows | None, start: int, stop: int) -> Span:
        """Locate neighbouring rows by reading the column of row ends."""
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
        return Span(group, low, ends.astype(np.int64), wanted)

    def _payload(
        self,
        spans: Sequence[Span],
        column: Column,
        part: int,
        dtype: np.dtype[np.generic],
        empty: Empty,
    ) -> Ragged:
        """Read one BYTE_ARRAY column of the spans' rows.

        If all rows of a span are wanted and the values are aligned, the page stays in memory as stored, with the length
        prefixes between the values. Otherwise the wanted values are copied without gaps.
        """
        unit = min(dtype.itemsize, PREFIX_BYTES)
        total = sum(span.num_bytes(dtype.itemsize) for span in spans)
        buffer = empty(f"{column.name}/{part}", (total // dtype.itemsize,), dtype)
        flat = buffer.view(np.uint8)
        starts, lengths = [], []
        at = 0
        for span in spans:
            file, row_group = self._groups[span.group]
            opened, index = self._open.get(file.path), self._index[column.name] + part
            begins = span.row_begins(dtype.itemsize)
            offset = int(span.ends[0]) * dtype.itemsize + span.low * PREFIX_BYTES
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
        """Divide `rows` into index ranges for one read each: inside one row group, without long gaps."""
        if rows is None:
            cuts = self._ends
            total = int(cuts[-1]) if len(cuts) else 0
        else:
            total = len(rows)
            gaps = np.flatnonzero(np.diff(rows) > gap_rows) + 1
            cuts = np.union1d(gaps, np.searchsorted(rows, self._ends, side="left"))
        edges = [0, *(int(c) for c in cuts if 0 < c < total), total]
        return [(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]

    def _open_file(self, path: str) -> PackedFile:
        file = self._files[path]
        opened = PackedFile(self._store, file.path, self._checked, file.footer_crc)
        row_groups = tuple(
            opened.metadata.row_group(g).num_rows for g in range(opened.metadata.num_row_groups)
        )
        if (
            row_groups != file.row_groups
            or opened.metadata.num_columns != self._num_parquet_columns
        ):
            opened.close()
            raise opened.damaged(
                f"it has row groups of {row_groups} rows and {opened.metadata.num_columns} columns, but the manifest lists "
                f"{file.row_groups} rows and {self._num_parquet_columns} columns"
            )
        return opened


# ----------------------------------------------------------------------------------------------------
# Neighbouring rows of variable length that one read returns.


@dataclass(frozen=True)
class Span:
    """Adjacent rows of a row group, returned by one read.

    Attributes:
        group: number of the row group.
        low: number of the first row in the row group.
        ends: (rows + 1,) number of the row group's elements before the first row and up to the end of each row.
        wanted: positions in the span of the rows to return; None means all.
    """

    group: int
    low: int
    ends: Array
    wanted: Array | None

    def page_bytes(self, itemsize: int) -> int:
        """Size of the rows in the page in bytes, including their length prefixes."""
        elements = int(self.ends[-1] - self.ends[0])
        return elements * itemsize + (len(self.ends) - 1) * PREFIX_BYTES

    def row_begins(self, itemsize: int) -> Array:
        """Offset (rows,) of each row's values in bytes, counted from the first row's length prefix."""
        rows = np.arange(1, len(self.ends), dtype=np.int64)
        begins: Array = (self.ends[:-1] - self.ends[0]) * itemsize + rows * PREFIX_BYTES
        return begins

    def stays(self, itemsize: int) -> bool:
        """Whether values can stay in memory as the page holds them."""
        return self.wanted is None and itemsize <= PREFIX_BYTES

    def num_bytes(self, itemsize: int) -> int:
        """Compute the rows' memory in bytes, with length prefixes if values stay as in the page."""
        if self.stays(itemsize):
            return self.page_bytes(itemsize)
        counts = np.diff(self.ends)
        return int((counts if self.wanted is None else counts[self.wanted]).sum()) * itemsize


# ----------------------------------------------------------------------------------------------------
# Concurrent reads of a remote file.

# Number of concurrent requests. Each column of a row group is a separate request, which mostly waits.
_THREADS = 12
# Longest wait for all requests of a read.
_REQUESTS_S = 3600.0


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Run remote store calls in threads. Raise the first error after all calls have ended.

    Raises:
        TimeoutError: the store has not answered some calls for an hour.
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
            except BaseException as e:  # noqa: BLE001 - raised below
                errors.append(e)

    # Daemon threads do not prevent the process from ending if a read hangs.
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


# ----------------------------------------------------------------------------------------------------
# Read a whole file or folder into numpy arrays, for interactive use.


def read_packed(path: str | os.PathLike[str], **storage_options: Any) -> dict[str, Any]:
    """Read a packed Parquet file, or a data directory with its manifest, into numpy arrays by column name.

    Args:
        path: a path or URL, as for `Store.create`, of a `.parquet` file or of a folder `data/<key>/<app>`.
        **storage_options: as for `Store.create`.

    Returns:
        For every column an array (rows, *shape of a row's value). If rows differ in length, an object array of arrays,
        bytes or strings; for sparse vectors an object array of pairs (indices, values).
    """
    text = os.fspath(path)
    folder, name = addresses.split(text)
    store = Store(folder, storage_options)
    if name.endswith(".parquet"):
        manifest = _manifest_of_file(store, name)
    elif store.exists(f"{name}/{MANIFEST_NAME}"):
        manifest = _manifest_of_folder(store, name)
    else:
        raise InvalidArgumentError(
            f"read_packed({addresses.without_secrets(text)!r}): the path is neither a folder with a {MANIFEST_NAME} nor a "
            ".parquet file. Give a folder data/<key>/<app> of a store, or a .parquet file in it."
        )
    with RowSource(store, manifest) as source:
        values = source.read([c.name for c in manifest.schema.columns])
    return {c.name: _as_objects(c, values[c.name]) for c in manifest.schema.columns}


def _manifest_of_file(store: Store, name: str) -> Manifest:
    file = PackedFile(store, name)
    try:
        columns = file.columns()
        meta = file.metadata
        groups = tuple(meta.row_group(g).num_rows for g in range(meta.num_row_groups))
    finally:
        file.close()
    files = (DataFile(name, sum(groups), groups),)
    return Manifest(files, DataSchema(tuple(columns), ()), sum(groups))


def _manifest_of_folder(store: Store, name: str) -> Manifest:
    """Load a manifest, and adapt the paths of its files to the folder's current name."""
    stored = Manifest.load(store, name)
    moved = tuple(replace(f, path=f"{name}/{PurePosixPath(f.path).name}") for f in stored.files)
    return replace(stored, files=moved)


def _as_objects(column: Column, values: Values) -> Array:
    """Convert rows of different lengths to an object array and return an array unchanged."""
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
