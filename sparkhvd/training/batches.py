"""A rank's batches of an epoch, grouped into optimizer steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

import sparkhvd.torch as hvd
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.ragged import Flags, Rows
from sparkhvd.data.manifest import PARQUET, Manifest
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.reading.reader import Batch, Reader
from sparkhvd.data.reading.subset import is_flagged
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.timeline import Spans
from sparkhvd.training.host_memory import HostRows, read_flags_once, read_groups_once
from sparkhvd.training.spec import TrainSpec


@dataclass(frozen=True)
class StepPlan:
    """Plan of an optimizer step. Every rank computes the same plan without communication.

    Attributes:
        number: number of the step, from 0 in each epoch.
        num_batches: number of batches on every rank whose gradients are accumulated.
        num_rows: rows of all ranks in these batches.
    """

    number: int
    num_batches: int
    num_rows: int


@dataclass(frozen=True)
class Done:
    """Part of an epoch completed before the ranks of an elastic job changed.

    Attributes:
        rows: number of rows done by all ranks, the first rows in the epoch's order.
        steps: number of optimizer steps done.
    """

    rows: int = 0
    steps: int = 0


class Data:
    """Context manager with the readers of this rank's training and validation rows.

    Attributes:
        num_steps: optimizer steps of an epoch.
        schema: schema of the columns for model and loss.
        skipped: for "training" and "validation" the number of skipped rows and the total number of rows.
        skips: whether decoders may skip rows of batches.
        waited_s: seconds that the loop has waited for training batches since `steps` began.
    """

    def __init__(
        self,
        spec: TrainSpec,
        functions: RowFunctions | None = None,
        *,
        pin_memory: bool = False,
        spans: Spans | None = None,
    ) -> None:
        """Open the data without reading most of it. All ranks must call it, because they may share work.

        Args:
            spec: spec of the run.
            functions: the user's decoders and collate functions.
            pin_memory: put batches into page-locked memory, for copies that overlap with the GPU's work.
            spans: records of this rank for a timeline.
        """
        self._spec = spec
        self._spans = spans or Spans()
        self.waited_s = 0.0
        self.skips = functions is not None and functions.skips
        self.skipped: dict[str, tuple[int, int]] = {}
        manifest = Manifest.load(spec.store, spec.data_dir)
        self.schema = spec.transformed or manifest.schema
        files = spec.data_store or spec.store
        usable = self._usable("training", files, manifest)
        open_reader = functools.partial(_reader, spec, functions=functions, pin_memory=pin_memory)
        flags: Flags | None = None
        if is_flagged(manifest, spec.training_subset):
            flags = read_flags_once(files, manifest, usable)
        groups = _groups(files, manifest)
        self.training = open_reader(
            files,
            manifest,
            spec.training_subset,
            usable=usable,
            flags=flags,
            groups=groups,
        )
        self.validation: Reader | None = None
        held_out = manifest
        if spec.validation_dir is not None:
            held_out = Manifest.load(spec.store, spec.validation_dir)
            held_out_files = spec.validation_store or spec.store
            rows = self._usable("validation", held_out_files, held_out)
            self.validation = open_reader(
                held_out_files,
                held_out,
                "all",
                usable=rows,
                groups=_groups(held_out_files, held_out),
                is_training=False,
            )
        elif spec.has_validation:
            self.validation = open_reader(
                files,
                manifest,
                "validation",
                usable=usable,
                flags=flags,
                groups=groups,
                is_training=False,
            )
        self.num_steps = len(step_plans(spec, self.training, 0))
        self._check_steps("training", self.training, self.num_steps, manifest)
        if self.validation is not None:
            self._check_steps("validation", self.validation, self.validation.num_steps, held_out)

    def _check_steps(self, name: str, reader: Reader, num_steps: int, manifest: Manifest) -> None:
        if num_steps:
            return
        cause = ", and drop_last leaves out a step that is not full" if self._spec.drop_last else ""
        raise InvalidArgumentError(
            f"There are no {name} steps, because {reader.num_rows} of {manifest.num_rows} rows are {name} rows{cause}."
        )

    @property
    def num_scheduled(self) -> int:
        """Number of steps per epoch for the scheduler.

        In an elastic job this is the number of steps with the fewest allowed ranks.
        """
        spec = self._spec
        if not spec.least_ranks or spec.keeps_global_batch:
            return self.num_steps
        rows = spec.least_ranks * spec.batch_size * spec.accumulate
        steps = max(1, math.ceil(self.training.num_rows / rows))
        return min(steps, spec.train_steps_per_epoch or steps)

    def prepare(self, epoch: int, start_step: int) -> None:
        """Start reading the first training batches, while model and optimizer are built.

        Args:
            epoch: counts from 0.
            start_step: the first optimizer step to read.
        """
        if epoch < self._spec.epochs:
            self.training.prepare(epoch, start_step * self._spec.accumulate)

    def _usable(self, name: str, files: Store, manifest: Manifest) -> Rows | None:
        rows = usable_rows(files, manifest)
        if rows is not None:
            self.skipped[name] = (manifest.num_rows - len(rows), manifest.num_rows)
        return rows

    def steps(
        self, epoch: int, start_step: int = 0, done: Done = Done()
    ) -> Iterator[tuple[StepPlan, Iterator[Batch]]]:
        """Yield the steps of an epoch, each with its batches on this rank.

        Consume all batches of a step before the next step.

        Args:
            epoch: counts from 0.
            start_step: the first step to yield.
            done: part of the epoch to skip.
        """
        first_batch = start_step * self._spec.accumulate
        plans = step_plans(self._spec, self.training, epoch, done)[start_step:]
        self.waited_s = 0.0
        if not plans:
            return
        following = epoch + 1 if epoch + 1 < self._spec.epochs else None
        rest = self.training.epoch(epoch, first_batch, following=following, first_row=done.rows)
        with _closing(rest) as batches:
            timed = self._timed(batches)
            for plan in plans:
                yield plan, itertools.islice(timed, plan.num_batches)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            with self._spans.span("data"):
                batch = next(batches, None)
            self.waited_s += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def planned_rows(self, epoch: int, done: Done = Done()) -> int:
        """The number of training rows of all ranks in an epoch, including rows skipped by decoders."""
        plans = step_plans(self._spec, self.training, epoch, done)
        return done.rows + sum(plan.num_rows for plan in plans)

    def steps_in_all(self, epoch: int, done: Done) -> int:
        """The number of steps of an epoch, including steps done before the ranks changed."""
        if not done.rows:
            return self.num_steps
        return done.steps + len(step_plans(self._spec, self.training, epoch, done))

    @property
    def planned_validation_rows(self) -> int:
        """The number of validation rows of all ranks, including rows skipped by decoders."""
        if self.validation is None:
            return 0
        plan = self.validation.plan(0)
        steps = range(plan.num_steps)[: self._spec.validation_steps_per_epoch]
        return sum(sum(plan.rows_per_rank(step)) for step in steps)

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this rank's validation batches, if there is validation."""
        if self.validation is not None:
            with _closing(self.validation.epoch(0)) as batches:
                yield from itertools.islice(batches, self._spec.validation_steps_per_epoch)

    def first_batch(self) -> Batch | None:
        """Read this rank's first nonempty training batch, or return None if it has no rows."""
        with _closing(self.training.epoch(0)) as batches:
            return next((batch for batch in batches if batch.num_rows), None)

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *error: object) -> None:
        self.training.close()
        if self.validation is not None:
            self.validation.close()


def _closing(batches: Iterator[Batch]) -> contextlib.closing[Any]:
    """Close the iterator at the end of the block to stop the reader's background thread."""
    return contextlib.closing(cast("Any", batches))


def step_plans(spec: TrainSpec, reader: Reader, epoch: int, done: Done = Done()) -> list[StepPlan]:
    """Group the batches of an epoch into optimizer steps of `accumulate` batches.

    A step has the same rows as a step of one process with the batch size ranks * batch_size * accumulate. The last step
    may be smaller: `drop_last` drops it, or with `short_steps` drops only its partial batches.
    """
    plan = reader.plan(epoch, done.rows)
    starts = range(0, plan.num_steps, spec.accumulate)
    if spec.train_steps_per_epoch is not None:
        starts = starts[: max(0, spec.train_steps_per_epoch - done.steps)]
    plans = []
    for number, start in enumerate(starts, done.steps):
        stop = min(start + spec.accumulate, plan.num_steps)
        if stop - start < spec.accumulate and spec.drop_last and not spec.short_steps:
            break
        rows = sum(sum(plan.rows_per_rank(step)) for step in range(start, stop))
        plans.append(StepPlan(number, stop - start, rows))
    return plans


def usable_rows(store: Store, manifest: Manifest) -> Rows | None:
    """Find the numbers of the rows kept by `handle_invalid="skip"`, or return None for all rows.

    All ranks must call it. Materialized data hold only usable rows. For external files each rank checks its share of
    the files, and all ranks get the same numbers.
    """
    skipping = [c for c in manifest.schema.columns if c.invalid[0] == "skip"]
    if manifest.layout != PARQUET or not skipping:
        return None
    numbers = range(hvd.rank(), len(manifest.files), hvd.size())
    with ParquetSource(store, manifest) as source:
        masks = source.usable(skipping, numbers)
    shares = hvd.allgather_object(
        {number: np.packbits(mask) for number, mask in masks.items()}, name="usable_rows"
    )
    bits = {number: packed for share in shares for number, packed in share.items()}
    parts = [
        np.unpackbits(bits[number], count=file.rows) for number, file in enumerate(manifest.files)
    ]
    return np.flatnonzero(np.concatenate(parts)).astype(np.int64)


def _groups(files: Store, manifest: Manifest) -> Rows | None:
    return None if manifest.schema.group is None else read_groups_once(files, manifest)


def _reader(
    spec: TrainSpec,
    store: Store,
    manifest: Manifest,
    subset: str,
    *,
    functions: RowFunctions | None,
    usable: Rows | None,
    is_training: bool = True,
    flags: Flags | None = None,
    groups: Rows | None = None,
    pin_memory: bool = False,
) -> Reader:
    sharing = HostRows("training rows" if is_training else "validation rows")
    return Reader(
        store,
        manifest,
        rank=hvd.rank(),
        size=hvd.size(),
        batch_size=spec.batch_size if is_training else spec.val_batch_size,
        seed=spec.seed,
        shuffle=spec.shuffle and is_training,
        subset=subset,
        validation=spec.validation,
        drop_last=spec.drop_last and is_training,
        shuffle_bytes=spec.shuffle_bytes,
        functions=functions,
        num_workers=spec.num_workers if is_training else spec.val_num_workers,
        pin_memory=pin_memory,
        usable=usable,
        flags=flags,
        groups=groups,
        sharing=sharing if sharing.is_shared else None,
    )
