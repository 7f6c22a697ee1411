"""From a manifest to the batches of one rank.

Threads: the caller iterates an epoch; one background thread reads and gathers ahead of it. When it has read all of the
epoch, another begins with the epoch that follows, so that this one's order and first rows are there in time.
Ownership: the thread owns the open files and the rows in memory; batches belong to the caller once handed over.
Shutdown: an epoch that ends, is dropped or is closed stops its thread and waits for it; `close` stops both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkhvd.data.buffers import Buffers
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.ragged import Ragged, Rows, SparseRows, take
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.manifest import PACKED, Manifest
from sparkhvd.data.reading import prefetch
from sparkhvd.data.reading.preload import Loading, Sharing
from sparkhvd.data.reading.sampler import Plan, Window, cuts, epoch_plan, permutation
from sparkhvd.data.reading.source import open_source
from sparkhvd.data.reading.subset import (
    SUBSETS,
    column_names,
    count_of,
    fits_in_memory,
    read_rows,
    select_rows,
)
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InternalError, InvalidArgumentError, SparkhvdError, StoreError

__all__ = ["Batch", "Reader"]

# Rows are gathered for several steps at once: the cost of a step in Python is then a few views.
_CHUNK_BYTES = 1 << 20
# Blocks of a shuffle beyond memory: long enough to read at the speed of the disk.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Batch:
    """The rows of one rank at one step.

    Attributes:
        columns: by name, arrays of shape (rows, *shape of the column); writable, not shared with other batches. Of sparse
            vectors `SparseRows`; of a column with a collate function what that returned.
        num_rows: rows of this rank, possibly 0.
        rows_per_rank: rows of every rank at this step, known without communication.
        step: counts from 0 in each epoch.
    """

    columns: dict[str, Any]
    num_rows: int
    rows_per_rank: tuple[int, ...]
    step: int


class Reader:
    """Yields the batches of one rank, epoch by epoch; a context manager.

    Every rank yields the same number of steps, and every row of the subset appears exactly once per epoch over
    all ranks. Equal arguments give equal batches on every machine.

    Attributes:
        num_rows: rows of the subset, over all ranks.
        num_steps: steps of an epoch.
        description: in which order rows come, for the report.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        rank: int,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        subset: str = "all",
        validation: float | None = None,
        drop_last: bool = False,
        columns: Sequence[str] | None = None,
        shuffle_bytes: int = 1 << 30,
        prefetch_bytes: int = 16 << 20,
        functions: RowFunctions | None = None,
        num_workers: int = 1,
        pin_memory: bool = False,
        usable: Rows | None = None,
        loading: Loading | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """Open the data for one rank; reads nothing but what decides the subset.

        Args:
            store: where the data are.
            manifest: which files make them.
            rank: this rank.
            size: number of ranks.
            batch_size: rows per rank and step.
            seed: decides the split and, with the epoch, the order.
            shuffle: a new permutation each epoch; False keeps file order.
            subset: "all", "train" or "validation".
            validation: the validation fraction; None if the manifest has a validation column (or there is none).
            drop_last: leave out the final global batch if it is not full.
            columns: names to read; None means features, labels and sample weight.
            shuffle_bytes: data up to this many bytes are held in memory, and a global batch is what one process with
                batch size * batch_size would see. Beyond it each rank reads its own part, about 1/size of the data:
                a contiguous shard, or (shuffled) blocks in random order with rows permuted inside windows of this
                size.
            prefetch_bytes: bound on the batches that the background thread prepares ahead; at the end of an epoch that
                another follows, half as much again.
            functions: the user's decoders and collate functions.
            num_workers: threads that run decoders; 1 is the background thread itself.
            pin_memory: put batches into page-locked memory, from which a GPU copies beside its work. Needs CUDA. Columns
                that a decoder or collate function makes are where it makes them.
            usable: ascending numbers of the rows that count, see `usable_rows`; None means all.
            loading: rows that are being read already; those of another subset or part are not used.
            sharing: the ranks of this host, which read rows that fit in memory together and hold them once. All ranks
                then begin their first epoch, or `prepare` it.

        Raises:
            InvalidArgumentError: an argument is out of range, a decoder fails on the first row, or the subset cannot be told apart.
        """
        _check(rank, size, batch_size, subset, shuffle_bytes, prefetch_bytes)
        self._manifest = manifest
        self._rank, self._size, self._batch_size = rank, size, batch_size
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._names = list(columns) if columns is not None else column_names(manifest)
        self._row_bytes = manifest.row_bytes(self._names)
        self._store = store
        self._source = open_source(store, manifest)
        self._loading = loading
        self._sharing = sharing
        self._functions = functions or RowFunctions()
        self._columns = self._seen_columns()
        self._batch_row_bytes = max(self._row_bytes, sum(map(_batch_bytes, self._columns)))
        self._empty = _pinned if pin_memory else np.empty
        self._pool: ThreadPoolExecutor | None = None
        if num_workers > 1 and any(c.has_decoder for c in self._columns):
            self._pool = ThreadPoolExecutor(num_workers, "sparkhvd-decoder")
        self._rows = select_rows(
            self._source, manifest, subset, validation=validation, seed=seed, usable=usable
        )
        self.num_rows = count_of(self._rows)
        self._is_resident = fits_in_memory(self._rows, self._row_bytes, shuffle_bytes)
        self._window_rows = max(1, shuffle_bytes // max(1, self._row_bytes))
        self._prefetch_bytes = prefetch_bytes
        self._chunk_bytes = min(_CHUNK_BYTES, prefetch_bytes // 4)
        self._resident: dict[str, Any] | None = None
        # Of the window; what is handed out are copies.
        self._buffers = Buffers()
        self._running: prefetch.Prefetch | None = None
        # The epoch and step that are prepared, and their thread.
        self._prepared: tuple[int, int, prefetch.Prefetch] | None = None
        self.num_steps = self._plan(0).num_steps
        self.description = self._describe()

    def prepare(self, epoch: int = 0, start_step: int = 0) -> None:
        """Begin to read what an epoch needs first, before it is asked for.

        Nothing happens where data are beyond memory: the windows that an epoch needs first may be large, and for nothing
        if it begins at another step.
        """
        if self._is_resident and self._running is None and self._prepared is None:
            self._prepare(epoch, start_step)

    def epoch(
        self, epoch: int, start_step: int = 0, *, following: int | None = None
    ) -> Iterator[Batch]:
        """The batches of an epoch in order; one epoch at a time.

        Args:
            epoch: counts from 0.
            start_step: the first step to yield. What the steps before it hold is not read, unless the data fit in
                memory, where all of them are read once.
            following: the epoch that will be asked for next, prepared towards the end of this one; None if there is
                none.

        Raises:
            StoreError: a file could not be read; the message says which rank and step.
        """
        plan = self._plan(epoch)
        if not 0 <= start_step <= plan.num_steps:
            raise InvalidArgumentError(
                f"Step {start_step} does not exist: the epoch has {plan.num_steps} steps."
            )
        running: prefetch.Prefetch | None = None
        if self._prepared is not None and (epoch, start_step) == self._prepared[:2]:
            running, self._prepared = self._prepared[2], None
        if not self._stop(prefetch.READ_S):
            raise StoreError(
                f"Rank {self._rank}: a read of {self._store.url} that was to end {prefetch.READ_S:g} s ago has not returned. "
                "Look at the store."
            )
        if running is None:
            running = prefetch.Prefetch(self._chunks(plan, start_step), self._queue_length())
        self._running = running
        try:
            yield from self._batches(plan, running, epoch, start_step, following)
        finally:
            if running.stop(prefetch.STOP_S) and self._running is running:
                self._running = None

    def plan(self, epoch: int) -> Plan:
        """Which rows of the manifest each rank has at each step of an epoch; for reports and tests."""
        return self._plan(epoch, self._rows)

    def close(self) -> None:
        """Stop the background threads and release files and memory.

        A thread that is stuck in a read is left behind after a minute, with its files.
        """
        if self._stop(prefetch.STOP_S):
            if self._pool is not None:
                self._pool.shutdown()
            self._source.close()
        self._resident = None
        self._buffers.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _seen_columns(self) -> list[Column]:
        """The columns to read, with shape and dtype after their decoders."""
        schema, names = self._manifest.schema, self._names
        decoded = [n for n in names if schema.column(n).has_decoder]
        if decoded and self._manifest.num_rows:
            first = self._source.read(decoded, self._source.examples(1))
            schema = self._functions.with_decoded(schema, first)
        return [schema.column(n) for n in names]

    # -- which rows ----------------------------------------------------------------------------------

    def _plan(self, epoch: int, rows: Rows | int | None = None) -> Plan:
        resident = self._is_resident
        if rows is None:
            # In memory the subset is numbered from 0.
            rows = self.num_rows if resident else self._rows
        block_rows = min(
            max(1, _BLOCK_BYTES // max(1, self._row_bytes)), max(1, self._window_rows // 16)
        )
        return epoch_plan(
            rows,
            size=self._size,
            batch_size=self._batch_size,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
            drop_last=self._drop_last,
            window_rows=None if resident else self._file_window(),
            block_rows=block_rows,
            block_edges=None if resident else self._block_edges(block_rows),
            permute=functools.partial(self._permute, epoch),
        )

    def _permute(self, epoch: int) -> Rows:
        order: Rows | None = None
        if self._loading is not None and epoch == 0 and self._is_resident:
            order = self._loading.order(self.num_rows, self._seed, prefetch.READ_S)
        return permutation(self.num_rows, self._seed, epoch) if order is None else order

    def _block_edges(self, block_rows: int) -> Rows | None:
        """Where the source wants blocks to begin, as positions in the subset; small ones are read together."""
        edges = self._source.block_edges
        if edges is None:
            return None
        if not isinstance(self._rows, int):
            edges = np.searchsorted(self._rows, edges)
        kept = [0]
        for edge in edges[:-1]:
            if edge - kept[-1] >= block_rows:
                kept.append(int(edge))
        return np.array([*kept, self.num_rows], np.int64)

    def _file_window(self) -> int:
        """Rows to hold at once beyond memory: all the bound allows to shuffle, a few chunks to just read."""
        chunk = 8 * _CHUNK_BYTES // max(1, self._row_bytes)
        return self._window_rows if self._shuffle else max(1, min(chunk, self._window_rows))

    def _describe(self) -> str:
        if self._is_resident:
            return "uniform permutation in memory" if self._shuffle else "file order in memory"
        if not self._shuffle:
            return "file order, one contiguous shard per rank"
        return (
            f"blocks in random order, rows permuted inside windows of {self._window_rows:,} "
            f"of {self.num_rows:,} rows (raise shuffle_bytes for a uniform permutation)"
        )

    # -- the background thread's side ----------------------------------------------------------------

    def _chunks(self, plan: Plan, start_step: int) -> Iterator[dict[str, Any]]:
        steps = max(1, self._chunk_bytes // max(1, self._batch_row_bytes * self._batch_size))
        chunk_rows = steps * self._batch_size
        last = plan.last_counts[self._rank] if plan.last_counts else 0
        if self._is_resident and self._sharing is not None:
            self._hold()  # with the others, also where this rank has no rows of this epoch
        for window in plan.windows(self._rank, start_step):
            values, order = self._load(window)
            for start, stop in cuts(len(order), chunk_rows, last):
                part = order[start:stop]
                chunk = {n: take(v, part, self._empty) for n, v in values.items()}
                if self._functions.decoders or self._functions.collate:
                    chunk = self._functions.decode(self._columns, chunk, self._pool)
                # A window goes when the next is loaded, so what waits in the queue must not hold on to it.
                yield chunk if self._is_resident else {n: _own(v) for n, v in chunk.items()}
            # The next window is loaded when this one has gone, into its memory.
            del values, order, window

    def _load(self, window: Window) -> tuple[dict[str, Any], Rows]:
        """Arrays that hold the window's rows, and the order in which to take them."""
        if self._is_resident:
            return self._hold(), window.row_numbers()
        assert window.rows is not None
        values = self._source.read(self._names, window.rows, self._buffers.empty)
        order = window.order if window.order is not None else np.arange(len(window.rows))
        return values, order

    def _hold(self) -> dict[str, Any]:
        """All rows, read once."""
        if self._resident is None:
            self._resident = self._read_all()
            self._source.close()
        return self._resident

    def _read_all(self) -> dict[str, Any]:
        if self._sharing is None:
            return self._read_part((0, 1))
        mine: dict[str, Any] | None = None
        error: BaseException | None = None
        try:
            mine = self._read_part(self._sharing.part)
        except BaseException as e:  # noqa: BLE001 - the others wait: it is raised when they know
            error = e
        values = self._sharing.gather(mine, error)
        return self._read_part((0, 1)) if values is None else values

    def _read_part(self, part: tuple[int, int]) -> dict[str, Any]:
        loading, self._loading = self._loading, None
        values = None
        if loading is not None and loading.part == part:
            values = loading.take(self._names, self._rows, prefetch.READ_S)
        if values is None:
            values = read_rows(self._source, self._names, self._rows, part)
        return values

    def _queue_length(self) -> int:
        chunk = max(self._chunk_bytes, self._batch_row_bytes * self._batch_size, 1)
        return max(1, self._prefetch_bytes // chunk - 2)  # one more is being made, one being used

    # -- the caller's side ---------------------------------------------------------------------------

    def _batches(
        self, plan: Plan, running: prefetch.Prefetch, epoch: int, step: int, following: int | None
    ) -> Iterator[Batch]:
        while step < plan.num_steps:
            if plan.rows_per_rank(step)[self._rank] == 0:
                yield Batch(self._no_rows(), 0, plan.rows_per_rank(step), step)
                step += 1
                continue
            chunk = running.get()
            if following is not None and self._prepared is None and running.is_nearly_empty:
                self._prepare(following)
            if isinstance(chunk, BaseException):
                raise self._explain(chunk, epoch, step) from chunk
            length = len(chunk[self._names[0]])
            start = 0
            while start < length:
                counts = plan.rows_per_rank(step)
                stop = start + counts[self._rank]
                columns = {n: v[start:stop] for n, v in chunk.items()}
                if self._functions.collate:
                    columns = self._functions.collate_batch(columns)
                yield Batch(columns, stop - start, counts, step)
                start = stop
                step += 1

    def _no_rows(self) -> dict[str, Any]:
        return {c.name: _empty(c) for c in self._columns}

    def _explain(self, error: BaseException, epoch: int, step: int) -> BaseException:
        where = f"rank {self._rank}, epoch {epoch}, step {step}"
        if isinstance(error, SparkhvdError):
            return error
        if isinstance(error, OSError):
            what = self._store.hide(f"{type(error).__name__}: {error}")
            is_ours = self._manifest.layout == PACKED
            kind = "materialized data in the store" if is_ours else "Parquet files in"
            return StoreError(f"Reading the {kind} {self._store.url} failed at {where}: {what}")
        return InternalError(f"Reading the data failed at {where}: {type(error).__name__}: {error}")

    def _prepare(self, epoch: int, start_step: int = 0) -> None:
        chunks = self._chunks(self._plan(epoch), start_step)
        self._prepared = epoch, start_step, prefetch.Prefetch(chunks, self._queue_length())

    def _stop(self, limit_s: float) -> bool:
        """Whether no thread is left."""
        if self._running is not None and self._running.stop(limit_s):
            self._running = None
        if self._prepared is not None and self._prepared[2].stop(limit_s):
            self._prepared = None
        return self._running is None and self._prepared is None


def _batch_bytes(column: Column) -> int:
    """Bytes of a row as the trainer gets it; 0 if only its stored form tells."""
    if column.is_fixed or not column.row_shape:
        return column.row_bytes if column.is_fixed else 0
    if column.kind == "sparse" or -1 in column.row_shape:
        return 0
    return math.prod(column.row_shape) * column.row_dtype.itemsize


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array in page-locked memory; torch keeps what is freed for the next."""
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return flat.view(dtype).reshape(shape)


def _own(values: Any) -> Any:
    return values.packed() if isinstance(values, (Ragged, SparseRows)) else values


def _empty(column: Column) -> Any:
    """No rows of a column."""
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements)
    return np.empty((0, *(column.row_shape or ())), column.row_dtype)


def _check(
    rank: int, size: int, batch_size: int, subset: str, shuffle_bytes: int, prefetch_bytes: int
) -> None:
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"Reader: rank is {rank} and size {size}; expected 0 <= rank < size."
        )
    if batch_size < 1:
        raise InvalidArgumentError(f"Reader: batch_size is {batch_size}; it must be at least 1.")
    if subset not in SUBSETS:
        raise InvalidArgumentError(
            f"Reader: subset is {subset!r}; expected one of {', '.join(SUBSETS)}."
        )
    if shuffle_bytes < 1 or prefetch_bytes < 1:
        raise InvalidArgumentError(
            f"Reader: shuffle_bytes is {shuffle_bytes} and prefetch_bytes {prefetch_bytes}; both must be positive."
        )
