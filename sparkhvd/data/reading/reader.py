"""Read the batches of one rank from the files of a manifest.

Threads: the caller iterates an epoch; one background thread reads and gathers ahead of it. When it has read all of the
epoch, another begins with the epoch that follows, so that this one's order and first rows are there in time.
Ownership: the thread owns the open files and the rows in memory; batches belong to the caller once handed over.
Shutdown: an epoch that ends, is dropped or is closed stops its thread and waits for it; `close` stops both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparkhvd.data.buffers import Buffers
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.ragged import Flags, Rows, Values, take
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.manifest import PACKED, Manifest
from sparkhvd.data.reading import prefetch
from sparkhvd.data.reading.batch import Batch, no_rows, pinned, row_bytes
from sparkhvd.data.reading.decoding import Chunk, Decoding
from sparkhvd.data.reading.groups import group_edges
from sparkhvd.data.reading.order import CHUNK_BYTES, RowOrder
from sparkhvd.data.reading.resident import ResidentRows, Sharing
from sparkhvd.data.reading.sampler import Plan, Window
from sparkhvd.data.reading.source import open_source
from sparkhvd.data.reading.subset import SUBSETS, Division, column_names, read_groups, select_rows
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InternalError, InvalidArgumentError, SparkhvdError, StoreError

__all__ = ["Reader"]


class Reader:
    """Yields the batches of one rank, epoch by epoch; a context manager.

    Every rank yields the same number of steps, and every row of the subset appears exactly once per epoch over
    all ranks. Equal arguments give equal batches on every machine.

    Attributes:
        columns: those to read, with shape and dtype after their decoders.
        num_rows: rows of the subset, over all ranks.
        is_divisible: whether the rest of an epoch can be divided anew: rows in memory, without groups.
        num_steps: steps of an epoch.
        description: in which order rows come, for the report; `windows` has the numbers (`RowOrder.windows`).
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
        """Open the data for one rank; reads only the validation column, and one row if there are decoders.

        Args:
            store: of the data.
            manifest: names the files.
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
            usable: ascending numbers of the rows that count; None means all.
            flags: the validation flags of the usable rows; None reads the manifest's validation column, if needed.
            groups: the number of the group of each row of the manifest; None reads the manifest's column of groups, if it has
                one.
            sharing: the ranks of this host, which read rows that fit in memory together and hold them once. All ranks
                must begin their first epoch then, or `prepare` it.

        Raises:
            InvalidArgumentError: an argument is out of range, a decoder fails on the first row, or there are no validation
                rows.
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
            division = Division(self._source.block_edges)
            self._resident = ResidentRows(
                self._source, self._names, rows, division, sharing=sharing
            )
        self.num_rows = self._order.num_rows
        self.is_divisible = self._order.is_resident and groups is None
        self._prefetch_bytes = prefetch_bytes
        self._chunk_bytes = min(CHUNK_BYTES, prefetch_bytes // 4)
        self._batch_row_bytes = max(self._order.row_bytes, sum(map(row_bytes, self.columns)))
        # Memory of windows; batches are copies.
        self._buffers = Buffers()
        self._running: prefetch.Prefetch[Chunk] | None = None
        # The epoch and step that are prepared, and their thread.
        self._prepared: tuple[int, int, prefetch.Prefetch[Chunk]] | None = None
        self.num_steps = self._order.held_plan(0).num_steps
        self.description, self.windows = self._order.describe(), self._order.windows

    def prepare(self, epoch: int = 0, start_step: int = 0) -> None:
        """Begin to read an epoch before it is asked for; not of data beyond memory, whose first windows may be large and useless."""
        if self._resident is not None and self._running is None and self._prepared is None:
            self._prepare(epoch, start_step)

    def epoch(
        self,
        epoch: int,
        start_step: int = 0,
        *,
        following: int | None = None,
        first_row: int = 0,
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch in order; one epoch at a time.

        Args:
            epoch: counts from 0.
            start_step: the first step to yield. Rows of earlier steps are not read, unless the data fit in memory, where
                all rows are read once.
            following: the next epoch, prepared towards the end of this one; None if there is none.
            first_row: rows over all ranks that come before step 0; of data that fit in memory.

        Raises:
            StoreError: a file could not be read; the message says which rank and step.
        """
        permute = _permutation(self._order, self._resident, epoch)
        plan = self._order.held_plan(epoch, permute, first_row)
        if not 0 <= start_step <= plan.num_steps:
            raise InvalidArgumentError(
                f"Step {start_step} does not exist: the epoch has {plan.num_steps} steps."
            )
        running: prefetch.Prefetch[Chunk] | None = None
        if self._prepared is not None and (epoch, start_step, first_row) == (
            *self._prepared[:2],
            0,
        ):
            running, self._prepared = self._prepared[2], None
        if not self._stop(prefetch.READ_S):
            raise StoreError(
                f"Rank {self._rank}: a read of {self._store.url} that was to end {prefetch.READ_S:g} s ago has not returned. "
                "Look at the store."
            )
        if running is None:
            running = prefetch.Prefetch(self._chunks(plan, start_step), self._queue_length())
        self._running = running
        if permute is not None and self._resident is not None and self._resident.is_unread:
            permute()  # while the other thread reads
        try:
            yield from self._batches(plan, running, epoch, start_step, following)
        finally:
            if running.stop(prefetch.STOP_S) and self._running is running:
                self._running = None

    def plan(self, epoch: int, first_row: int = 0) -> Plan:
        """Return the rows of the manifest that each rank has at each step of an epoch, or of its rest."""
        return self._order.plan(epoch, first_row)

    def close(self) -> None:
        """Stop the background threads and release files and memory; a thread stuck in a read is left behind after a minute."""
        if self._stop(prefetch.STOP_S):
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
        """Return the columns to read, with shape and dtype after their decoders."""
        schema = self._manifest.schema
        decoded = [n for n in self._names if schema.column(n).has_decoder]
        if decoded and self._manifest.num_rows:
            first = self._source.read(decoded, self._source.examples(1))
            schema = self._functions.with_decoded(schema, first)
        return [schema.column(n) for n in self._names]

    # -- the background thread's side ----------------------------------------------------------------

    def _chunks(self, plan: Plan, start_step: int) -> Iterator[Chunk]:
        steps = max(1, self._chunk_bytes // max(1, self._batch_row_bytes * self._batch_size))
        first = plan.rows_before(self._rank, start_step)
        if self._resident is not None:
            # With the ranks that share them, also where this rank has no rows of this epoch.
            self._resident.values()
        # While decoders work on one chunk the next one is handed to them, or they would wait for this thread after each.
        begun: deque[Callable[[], Chunk]] = deque()
        for window in plan.windows(self._rank, start_step):
            values, order = self._load(window)
            for start, stop in plan.cuts(self._rank, first, len(order), steps * self._batch_size):
                taken = _taken(values, order[start:stop], self._empty)
                # A window goes when the next is loaded, so what waits in the queue must not hold on to it.
                begun.append(self._decoding.begin(taken, stop - start, packs=not self._resident))
                if len(begun) > self._decoding.num_ahead:
                    yield begun.popleft()()
            while begun:
                yield begun.popleft()()
            first += len(order)
            # The next window is loaded when this one has gone, into its memory.
            del values, order, window

    def _load(self, window: Window) -> tuple[dict[str, Values], Rows]:
        """Return arrays that hold the window's rows, and the order in which to take them."""
        if self._resident is not None:
            return self._resident.values(), window.row_numbers()
        assert window.rows is not None
        values = self._source.read(self._names, window.rows, self._buffers.empty)
        order = window.order if window.order is not None else np.arange(len(window.rows))
        return values, order

    def _queue_length(self) -> int:
        chunk = max(self._chunk_bytes, self._batch_row_bytes * self._batch_size, 1)
        in_hand = 2 + self._decoding.num_ahead  # being made, and used
        return max(1, self._prefetch_bytes // chunk - in_hand)

    # -- the caller's side ---------------------------------------------------------------------------

    def _batches(
        self,
        plan: Plan,
        running: prefetch.Prefetch[Chunk],
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

    def _empty_batch(self, plan: Plan, step: int) -> Batch:
        return Batch({c.name: no_rows(c) for c in self.columns}, 0, plan.rows_per_rank(step), step)

    def _prepare(self, epoch: int, start_step: int = 0) -> None:
        plan = self._order.held_plan(epoch, _permutation(self._order, self._resident, epoch))
        chunks = self._chunks(plan, start_step)
        self._prepared = epoch, start_step, prefetch.Prefetch(chunks, self._queue_length())

    def _stop(self, limit_s: float) -> bool:
        """Stop the background threads; return True if none is left."""
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
    """Return an error of the reading thread as one that says where it was."""
    if isinstance(error, SparkhvdError):
        return error
    if isinstance(error, OSError):
        reason = store.hide(f"{type(error).__name__}: {error}")
        kind = "materialized data in the store" if manifest.layout == PACKED else "Parquet files in"
        return StoreError(f"Reading the {kind} {store.url} failed at {where}: {reason}")
    return InternalError(f"Reading the data failed at {where}: {type(error).__name__}: {error}")
