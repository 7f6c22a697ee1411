"""Read the batches of one rank from the files of a manifest.

Threads: the caller iterates an epoch; one background thread reads and gathers ahead of it. When it has read the whole
epoch, another thread starts the following epoch, so that its order and first rows are ready in time.
Ownership: the thread owns the open files and the rows in memory; batches belong to the caller once returned.
Shutdown: an epoch that ends, is dropped or is closed stops its thread and waits for it; `close` stops both threads.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from sparkhvd.data.columns.decoders import Decoded, RowFunctions
from sparkhvd.data.columns.ragged import Array, Flags, Ragged, Rows, SparseRows, Values, take
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.files import Buffers
from sparkhvd.data.manifest import PACKED, Manifest
from sparkhvd.data.reading.order import CHUNK_BYTES, RowOrder
from sparkhvd.data.reading.sampler import SamplingPlan, Stage, Window, permutation
from sparkhvd.data.reading.source import Source, open_source
from sparkhvd.data.reading.subset import (
    SUBSETS,
    RowDivision,
    column_names,
    count_of,
    group_edges,
    read_groups,
    read_rows,
    select_rows,
)
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InternalError, InvalidArgumentError, SparkhvdError, StoreError


class Reader:
    """Reader of one rank's batches, epoch by epoch. It is a context manager.

    Every rank yields the same number of steps, and every row of the subset is used exactly once per epoch over
    all ranks. Equal arguments give equal batches on every machine.

    Attributes:
        columns: columns to read, with shape and dtype after their decoders.
        num_rows: rows of the subset, over all ranks.
        is_divisible: True if the rest of an epoch can be divided among other ranks: its rows are in memory, without
            groups.
        num_steps: steps of an epoch.
        description: order of the rows in words, for the report.
        windows: see `RowOrder.windows`.
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
        flags: Flags | None = None,
        groups: Rows | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """Open the data for one rank.

        Only the validation column is read, and one row if there are decoders.

        Args:
            store: of the data.
            manifest: names the files.
            rank: this rank.
            size: number of ranks.
            batch_size: rows per rank and step.
            seed: decides the split and, with the epoch, the order.
            shuffle: a new permutation each epoch; False keeps file order.
            subset: "all", "train" or "validation".
            validation: the validation fraction; None if the manifest has a validation column (or there is no
                validation).
            drop_last: drop the final global batch if it is not full.
            columns: names to read; None means features, labels and sample weight.
            shuffle_bytes: data up to this many bytes are held in memory, and a global batch equals that of one process
                with batch size * batch_size. Beyond it each rank reads its own part, about 1/size of the data: a
                contiguous shard, or (shuffled) blocks in random order with rows permuted inside windows of this size.
            prefetch_bytes: bound on the batches prepared ahead by the background thread; half as much more at the end
                of an epoch if another follows.
            functions: the user's decoders and collate functions.
            num_workers: threads that run decoders; 1 is the background thread itself.
            pin_memory: put batches into page-locked memory, for copies that overlap with the GPU's work. Needs CUDA.
                Columns made by a decoder or collate function stay where it makes them.
            usable: ascending numbers of the usable rows; None means all.
            flags: the validation flags of the usable rows; None reads the manifest's validation column, if needed.
            groups: the number of the group of each row of the manifest; None reads the manifest's column of groups, if
                it has one.
            sharing: the ranks of this host, which read rows that fit in memory together and hold them once. All ranks
                must then begin their first epoch, or `prepare` it.

        Raises:
            InvalidArgumentError: an argument is out of range, a decoder fails on the first row, or there are no
                validation rows.
        """
        _check(rank, size, batch_size, subset, shuffle_bytes, prefetch_bytes)
        self._manifest = manifest
        self._rank, self._batch_size = rank, batch_size
        self._names = list(columns) if columns is not None else column_names(manifest)
        self._store = store
        self._source = open_source(store, manifest)
        self._functions = functions or RowFunctions()
        self.columns = self._decoded_columns()
        self._empty = pinned if pin_memory else np.empty
        self._decoding = Decoding(self._functions, self.columns, num_workers)
        if groups is None and manifest.schema.group is not None:
            groups = read_groups(self._source, manifest)
        rows = select_rows(
            self._source,
            manifest,
            subset,
            validation=validation,
            seed=seed,
            usable=usable,
            flags=flags,
            groups=groups,
        )
        self._order = RowOrder(
            rows,
            manifest.row_bytes(self._names),
            size=size,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            shuffle_bytes=shuffle_bytes,
            edges=self._source.block_edges,
            groups=None if groups is None else group_edges(groups, rows),
        )
        self._resident: ResidentRows | None = None
        if self._order.is_resident:
            division = RowDivision(self._source.block_edges)
            self._resident = ResidentRows(
                self._source, self._names, rows, division, sharing=sharing
            )
        self.num_rows = self._order.num_rows
        self.is_divisible = self._order.is_resident and groups is None
        self._prefetch_bytes = prefetch_bytes
        self._chunk_bytes = min(CHUNK_BYTES, prefetch_bytes // 4)
        self._batch_row_bytes = max(self._order.row_bytes, sum(map(row_bytes, self.columns)))
        # Memory for windows. Batches do not refer to it, because they are copies.
        self._buffers = Buffers()
        self._running: Prefetch[Chunk] | None = None
        # Prepared epoch and step, and their thread.
        self._prepared: tuple[int, int, Prefetch[Chunk]] | None = None
        self.num_steps = self._order.held_plan(0).num_steps
        self.description, self.windows = self._order.describe(), self._order.windows

    def prepare(self, epoch: int = 0, start_step: int = 0) -> None:
        """Start reading an epoch in advance, but only if its rows are held in memory.

        Otherwise the first windows may be large, and useless if another epoch is read.
        """
        if self._resident is not None and self._running is None and self._prepared is None:
            self._prepare(epoch, start_step)

    def epoch(
        self,
        epoch: int,
        start_step: int = 0,
        *,
        following: int | None = None,
        first_row: int = 0,
        before: Sequence[Stage] = (),
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch in order. Only one epoch can be read at a time.

        Args:
            epoch: counts from 0.
            start_step: the first step to yield. Rows of earlier steps are not read, unless the data fit in memory and
                are read once as a whole.
            following: next epoch, prepared towards the end of this epoch, or None.
            first_row: rows over all ranks before step 0; for data that fit in memory.
            before: alternative to `first_row` for any data: the stages of the epoch before step 0.

        Raises:
            StoreError: a file could not be read; the message names rank and step.
        """
        permute = _permutation(self._order, self._resident, epoch)
        plan = self._order.held_plan(epoch, permute, first_row, before)
        if not 0 <= start_step <= plan.num_steps:
            raise InvalidArgumentError(
                f"Step {start_step} does not exist: the epoch has {plan.num_steps} steps."
            )
        running: Prefetch[Chunk] | None = None
        is_whole = not first_row and not before
        if self._prepared is not None and is_whole and (epoch, start_step) == self._prepared[:2]:
            running, self._prepared = self._prepared[2], None
        if not self._stop(READ_S):
            raise StoreError(
                f"Rank {self._rank}: a read of {self._store.url} has not returned within {READ_S:g} s after it was to stop. "
                "Check whether the store responds."
            )
        if running is None:
            running = Prefetch(self._chunks(plan, start_step), self._queue_length())
        self._running = running
        if permute is not None and self._resident is not None and self._resident.is_unread:
            permute()  # compute the order while the other thread reads
        try:
            yield from self._batches(plan, running, epoch, start_step, following)
        finally:
            if running.stop(STOP_S) and self._running is running:
                self._running = None

    def plan(self, epoch: int, first_row: int = 0) -> SamplingPlan:
        """Manifest rows of each rank at each step of an epoch, or of its rest."""
        return self._order.plan(epoch, first_row)

    def close(self) -> None:
        """Stop the threads and release files and memory.

        A thread that hangs in a read is abandoned after a minute.
        """
        if self._stop(STOP_S):
            self._decoding.close()
            self._source.close()
        if self._resident is not None:
            self._resident.clear()
        self._buffers.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _decoded_columns(self) -> list[Column]:
        """Columns to read, with shape and dtype after their decoders."""
        schema = self._manifest.schema
        decoded = [n for n in self._names if schema.column(n).has_decoder]
        if decoded and self._manifest.num_rows:
            first = self._source.read(decoded, self._source.examples(1))
            schema = self._functions.with_decoded(schema, first)
        return [schema.column(n) for n in self._names]

    # -- the background thread's side ----------------------------------------------------------------

    def _chunks(self, plan: SamplingPlan, start_step: int) -> Iterator[Chunk]:
        steps = max(1, self._chunk_bytes // max(1, self._batch_row_bytes * self._batch_size))
        first = plan.rows_before(self._rank, start_step)
        if self._resident is not None:
            # Read the rows even if this rank has none in this epoch, because reading is collective among sharing ranks.
            self._resident.values()
        # To keep decoders busy, the next chunk is submitted while they work on the current chunk.
        begun: deque[Callable[[], Chunk]] = deque()
        for window in plan.windows(self._rank, start_step):
            values, order = self._load(window)
            for start, stop in plan.cuts(self._rank, first, len(order), steps * self._batch_size):
                taken = _taken(values, order[start:stop], self._empty)
                # Queued chunks must not refer to a window, because its memory is reused for the next window.
                begun.append(self._decoding.begin(taken, stop - start, packs=not self._resident))
                if len(begun) > self._decoding.num_ahead:
                    yield begun.popleft()()
            while begun:
                yield begun.popleft()()
            first += len(order)
            # The next window is loaded into this window's memory, so no reference to it may be left.
            del values, order, window

    def _load(self, window: Window) -> tuple[dict[str, Values], Rows]:
        """Load arrays with the window's rows, and the order to take them in."""
        if self._resident is not None:
            return self._resident.values(), window.row_numbers()
        assert window.rows is not None
        values = self._source.read(self._names, window.rows, self._buffers.empty)
        order = window.order if window.order is not None else np.arange(len(window.rows))
        return values, order

    def _queue_length(self) -> int:
        chunk = max(self._chunk_bytes, self._batch_row_bytes * self._batch_size, 1)
        # Chunks outside the queue: in use, and in preparation.
        in_hand = 2 + self._decoding.num_ahead
        return max(1, self._prefetch_bytes // chunk - in_hand)

    # -- the caller's side ---------------------------------------------------------------------------

    def _batches(
        self,
        plan: SamplingPlan,
        running: Prefetch[Chunk],
        epoch: int,
        step: int,
        following: int | None,
    ) -> Iterator[Batch]:
        while step < plan.num_steps:
            if plan.rows_per_rank(step)[self._rank] == 0:
                yield self._empty_batch(plan, step)
                step += 1
                continue
            chunk = running.get()
            if following is not None and self._prepared is None and running.is_nearly_empty:
                self._prepare(following)
            if isinstance(chunk, BaseException):
                where = f"rank {self._rank}, epoch {epoch}, step {step}"
                raise _explained(chunk, self._store, self._manifest, where) from chunk
            start = 0
            while start < chunk.num_rows:
                counts = plan.rows_per_rank(step)
                stop = start + counts[self._rank]
                if stop == start:
                    yield self._empty_batch(plan, step)
                    step += 1
                    continue
                columns, num_rows = chunk.cut(start, stop)
                if not num_rows:
                    yield replace(self._empty_batch(plan, step), num_broken=stop - start)
                else:
                    if self._functions.collate:
                        columns = self._functions.collate_batch(columns)
                    yield Batch(columns, num_rows, counts, step, stop - start - num_rows)
                start = stop
                step += 1

    def _empty_batch(self, plan: SamplingPlan, step: int) -> Batch:
        return Batch({c.name: no_rows(c) for c in self.columns}, 0, plan.rows_per_rank(step), step)

    def _prepare(self, epoch: int, start_step: int = 0) -> None:
        plan = self._order.held_plan(epoch, _permutation(self._order, self._resident, epoch))
        chunks = self._chunks(plan, start_step)
        self._prepared = epoch, start_step, Prefetch(chunks, self._queue_length())

    def _stop(self, limit_s: float) -> bool:
        """Stop the background threads and return True if all have ended."""
        if self._running is not None and self._running.stop(limit_s):
            self._running = None
        if self._prepared is not None and self._prepared[2].stop(limit_s):
            self._prepared = None
        return self._running is None and self._prepared is None


def _taken(values: dict[str, Values], rows: Rows, empty: Callable[..., Any]) -> dict[str, Any]:
    return {name: take(column, rows, empty) for name, column in values.items()}


def _permutation(
    order: RowOrder, resident: ResidentRows | None, epoch: int
) -> Callable[[], Rows] | None:
    if resident is None or not order.shuffle or order.groups is not None:
        return None
    return resident.permutation(order.seed, epoch)


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


def _explained(error: BaseException, store: Store, manifest: Manifest, where: str) -> BaseException:
    """Add rank and step to an error of the reading thread."""
    if isinstance(error, SparkhvdError):
        return error
    if isinstance(error, OSError):
        reason = store.hide(f"{type(error).__name__}: {error}")
        kind = "materialized data in the store" if manifest.layout == PACKED else "Parquet files in"
        return StoreError(f"Reading the {kind} {store.url} failed at {where}: {reason}")
    return InternalError(f"Reading the data failed at {where}: {type(error).__name__}: {error}")


# ----------------------------------------------------------------------------------------------------
# Prefetch in a thread, for a consumer that waits with a deadline.

# READ_S: longest wait for one chunk, which may be all rows of a slow store. STOP_S: longest wait at the end of an epoch
# for a thread in a read, which may hang forever (a mount whose server is gone).
READ_S = 3600.0
STOP_S = 60.0

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Thread that runs an iterator at most `length` items ahead of the consumer."""

    def __init__(self, items: Iterator[Item], length: int) -> None:
        self._items = items
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(maxsize=length)
        self._length = length
        self._has_all = False  # reading has finished
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkhvd-reader", daemon=True)
        self._thread.start()

    @property
    def is_nearly_empty(self) -> bool:
        """True if reading has finished, and at most half of the queue's places are used."""
        return self._has_all and 2 * self._queue.qsize() <= self._length + 1

    def get(self) -> Item | BaseException:
        """Get the next item, or an error: from the thread, after `READ_S`, or after `stop`."""
        deadline = time.monotonic() + READ_S
        while not self._stopping.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return TimeoutError(f"neither the store nor a decoder gave rows for {READ_S:g} s")
            try:
                return self._queue.get(timeout=min(left, 1.0))
            except queue.Empty:
                continue
        return InvalidArgumentError(
            "This epoch of the data has ended, because another epoch was begun or the data were closed. Iterate over one "
            "epoch at a time."
        )

    def stop(self, limit_s: float) -> bool:
        """End the thread and wait for it up to a limit, and return True if it has ended."""
        self._stopping.set()
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Taking an item wakes a thread that waits for space in the queue.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.05)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failure: BaseException
        try:
            for item in self._items:
                if self._stopping.is_set():
                    return
                self._queue.put(item)
                if self._stopping.is_set():
                    return
            self._has_all = True
            failure = InternalError("The reader ran out of rows before the epoch's end.")
        except BaseException as error:  # noqa: BLE001 - a thread boundary: the consumer raises it
            failure = error
        while not self._stopping.is_set():
            try:
                self._queue.put(failure, timeout=0.05)
            except queue.Full:
                continue
            return


# ----------------------------------------------------------------------------------------------------
# Rows of a subset held in memory, read once by a rank or jointly by the ranks of a host.


class Sharing(Protocol):
    """Ranks of a host that share rows in memory.

    Attributes:
        part: (number, count) of this rank's part of the rows.
    """

    part: tuple[int, int]

    def gather(
        self, values: Mapping[str, Values] | None, error: BaseException | None = None
    ) -> dict[str, Values] | None:
        """Collect the parts of all ranks in order, on all ranks, or return None if the ranks cannot share memory.

        Raises `error`, or another rank's.
        """


class ResidentRows:
    """Rows in memory, read on first use. One thread may use them at a time."""

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        rows: Rows | int,
        division: RowDivision,
        *,
        sharing: Sharing | None,
    ) -> None:
        """Prepare without reading.

        Args:
            source: source of the rows; closed when the rows are in memory.
            names: columns to read.
            rows: row numbers, or a count for all rows from 0.
            division: division of the rows into parts.
            sharing: ranks of this host, each of which reads a part; None reads all rows.
        """
        self._source = source
        self._names = list(names)
        self._rows = rows
        self._division = division
        self._sharing = sharing
        self._values: dict[str, Values] | None = None

    @property
    def is_shared(self) -> bool:
        """True if the ranks of this host read together. Each of them must then call `values`."""
        return self._sharing is not None

    def values(self) -> dict[str, Values]:
        """Return all rows by column, after reading them at the first call.

        The first call is collective on the host if the rows are shared.
        """
        if self._values is None:
            self._values = self._read_all()
            self._source.close()
        return self._values

    @property
    def is_unread(self) -> bool:
        """True if the rows are not yet read."""
        return self._values is None

    def permutation(self, seed: int, epoch: int) -> Callable[[], Rows]:
        """Make a thread-safe function to compute the rows' order in an epoch once."""
        lock, made = threading.Lock(), list[Rows]()

        def permute() -> Rows:
            with lock:
                if not made:
                    made.append(permutation(count_of(self._rows), seed, epoch))
            return made[0]

        return permute

    def clear(self) -> None:
        """Release the rows."""
        self._values = None

    def _read_all(self) -> dict[str, Values]:
        if self._sharing is None:
            return self._read_part((0, 1))
        part: dict[str, Values] | None = None
        error: BaseException | None = None
        try:
            part = self._read_part(self._sharing.part)
        except BaseException as e:  # noqa: BLE001 - raised after the waiting ranks are notified
            error = e
        values = self._sharing.gather(part, error)
        return self._read_part((0, 1)) if values is None else values

    def _read_part(self, part: tuple[int, int]) -> dict[str, Values]:
        return read_rows(self._source, self._names, self._rows, part, self._division)


# ----------------------------------------------------------------------------------------------------
# Batches of a rank.


@dataclass(frozen=True)
class Batch:
    """Rows of one rank at one step.

    Attributes:
        columns: name -> array (rows, *shape of the column), writable and not shared with other batches; `SparseRows`
            for sparse vectors; for a column with a collate function, the result of the function.
        num_rows: rows of this rank, possibly 0.
        rows_per_rank: rows of every rank at this step, known without communication.
        step: counts from 0 in each epoch.
        num_broken: rows of this rank skipped by a decoder; `rows_per_rank` counts them.
    """

    columns: dict[str, Any]
    num_rows: int
    rows_per_rank: tuple[int, ...]
    step: int
    num_broken: int = 0


def no_rows(column: Column) -> Values:
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements)
    return np.empty((0, *(column.row_shape or ())), column.row_dtype)


def row_bytes(column: Column) -> int:
    """Compute the bytes per row of a column in a batch, or 0 if unknown."""
    if column.is_fixed or not column.row_shape:
        return column.row_bytes if column.is_fixed else 0
    if column.kind == "sparse" or -1 in column.row_shape:
        return 0
    return math.prod(column.row_shape) * column.row_dtype.itemsize


def pinned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Allocate an array in page-locked memory. Torch reuses the memory after it is freed."""
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return flat.view(dtype).reshape(shape)


def packed(values: Values) -> Values:
    """Copy rows of any length to their own memory and return an array unchanged."""
    return values.packed() if isinstance(values, (Ragged, SparseRows)) else values


# ----------------------------------------------------------------------------------------------------
# Decode a reader's rows in threads, one chunk of several batches at a time.
# Threads: the reading thread submits and collects chunks; the pool's threads decode rows, and share only the chunk's
# memory.

# Switch interval of the GIL while threads decode. With Python's default of 5 ms, a thread that returns from a decoder
# in C waits that long for the GIL again and again, because other threads release it only for a read. Two threads are
# then as slow as one.
_SWITCH_S = 0.0005
# Number of skipped values to print; further values are only counted.
_SHOWN = 5


@dataclass(frozen=True)
class Chunk:
    """Decoded rows of several batches.

    Attributes:
        columns: name -> decoded rows.
        num_rows: number of rows, including skipped rows.
        kept: ascending numbers of the kept rows; None means all.
    """

    columns: dict[str, Any]
    num_rows: int
    kept: Rows | None = None

    def cut(self, start: int, stop: int) -> tuple[dict[str, Any], int]:
        """Cut out the rows [start, stop) by column without skipped rows, and count them."""
        if self.kept is not None:
            start, stop = (int(n) for n in np.searchsorted(self.kept, (start, stop)))
        return {name: rows[start:stop] for name, rows in self.columns.items()}, stop - start


class Decoding:
    """Threads for the user's functions on a reader's columns.

    Attributes:
        num_ahead: chunks to submit before the first chunk is collected, to keep the threads busy.
    """

    def __init__(
        self, functions: RowFunctions, columns: Sequence[Column], num_workers: int
    ) -> None:
        """Start the threads, if several are requested and a column has a decoder.

        Args:
            functions: the user's decoders and collate functions.
            columns: columns to read, as `with_decoded` described them.
            num_workers: threads; 1 is the reading thread itself.
        """
        self._functions, self._columns = functions, columns
        self._pool: ThreadPoolExecutor | None = None
        if num_workers > 1 and any(column.has_decoder for column in columns):
            self._pool = ThreadPoolExecutor(num_workers, "sparkhvd-decoder")
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self.num_ahead = int(self._pool is not None)
        self._shown: set[str] = set()

    def begin(self, taken: dict[str, Any], num_rows: int, *, packs: bool) -> Callable[[], Chunk]:
        """Start decoding rows and return a function that waits for them.

        Args:
            taken: columns as they are stored; their memory must stay valid until the rows are decoded.
            num_rows: number of rows.
            packs: copy the chunk to its own memory.
        """
        has_functions = self._functions.decoders or self._functions.collate
        begin = self._functions.begin if has_functions else _as_they_are
        decoded = begin(self._columns, taken, self._pool)

        def finish() -> Chunk:
            found = decoded()
            self._show(found.broken)
            columns = found.columns
            if packs:
                columns = {name: packed(rows) for name, rows in columns.items()}
            return Chunk(columns, num_rows, found.kept)

        return finish

    def _show(self, broken: Sequence[str]) -> None:
        """Print skipped values, up to `_SHOWN` in all."""
        room = max(0, _SHOWN - len(self._shown))
        for text in [each for each in broken if each not in self._shown][:room]:
            self._shown.add(text)
            more = "; further skipped rows are only counted" if len(self._shown) == _SHOWN else ""
            sys.stderr.write(
                f"sparkhvd: a row is skipped because of image(broken='skip'): {text}{more}\n"
            )

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _as_they_are(
    columns: Sequence[Column], values: dict[str, Any], pool: object
) -> Callable[[], Decoded]:
    return lambda: Decoded(values)
