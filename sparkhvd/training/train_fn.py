"""`train_fn(ctx)`: a custom training loop with our data, optimizer and checkpoints.

    def train_fn(ctx):
        for epoch in range(ctx.start_epoch, ctx.epochs):
            ctx.model.train()
            for batch in ctx.train_loader:
                ctx.optimizer.zero_grad()
                loss = F.mse_loss(ctx.model(batch["x"]), batch["y"])
                ctx.backward(loss)
                ctx.optimizer.step()
            ctx.log({"loss": loss.item()})
            ctx.save_checkpoint()

Every rank runs it. Collectives of `sparkhvd.torch` may be called from it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.reading.reader import Batch, Reader
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.training.batches import Data
from sparkhvd.training.check_user_code import UserCode
from sparkhvd.training.checkpoints.checkpoint import broadcast_module_state, load_rng
from sparkhvd.training.checkpoints.frozen import Sums, weight_sums
from sparkhvd.training.checkpoints.resume import ResumePoint, TrainingState
from sparkhvd.training.checkpoints.saver import Saver
from sparkhvd.training.rank_sync import seed_everything
from sparkhvd.training.spec import TrainSpec
from sparkhvd.training.types import Record, State, Stateful, TensorBatch, Value
from sparkhvd.training.user_code.callbacks import Context, TrainingClock
from sparkhvd.training.user_code.transformations import Transformations
from sparkhvd.training.user_step import batch_dtypes, batch_tensors


class Loader:
    """This rank's batches of an epoch, as dicts of tensors. Iterate over it once per epoch.

    Every rank has the same number of steps, and over all ranks every row is used exactly once (with `drop_last` a partial last
    step is dropped). Each iteration is the next epoch, in its own order; `set_epoch` selects another epoch. In the last step a
    rank may have no rows: then the tensors have length 0, and `ctx.backward` adds nothing.

    Attributes:
        num_rows: rows of an epoch over all ranks.
    """

    def __init__(
        self,
        reader: Reader,
        schema: DataSchema,
        functions: Transformations,
        ctx: TrainFnContext,
        *,
        is_training: bool,
    ) -> None:
        """Read batches from `reader` and apply the user's `functions`."""
        self._reader = reader
        self._schema = schema
        self._functions = functions
        self._ctx = ctx
        self._is_training = is_training
        self._epoch = ctx.start_epoch
        self._start_step = ctx.start_step if is_training else 0
        self.num_rows = reader.num_rows

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        return self._reader.num_steps

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counted from 0.

        Later iterations continue from it.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(
                f"set_epoch: epoch is {epoch!r}; it must be a whole number of at least 0."
            )
        if epoch != self._epoch:
            self._epoch, self._start_step = epoch, 0

    def __iter__(self) -> Iterator[TensorBatch]:
        """Yield the batches of an epoch.

        A training epoch seeds torch, numpy and random from (seed, epoch, rank). The first iteration of a run
        interrupted inside an epoch yields the rest of that epoch.
        """
        profile = self._ctx._profile
        profile.begin_epoch()
        for begin, tensors in self.ahead():
            begin()
            yield tensors
            if self._is_training:
                profile.step()

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor of a batch."""
        return batch_dtypes(self._ctx._spec, self._schema)

    def ahead(self, *, as_stored: bool = False) -> Iterator[tuple[Callable[[], None], TensorBatch]]:
        """Yield the batches of an epoch for a prefetching loop.

        Each batch comes with a function that makes it the current batch.

        Args:
            as_stored: leave batches on the CPU, and numbers in their stored types.
        """
        epoch, self._epoch = self._epoch, self._epoch + 1
        start, self._start_step = self._start_step, 0
        spec = self._ctx._spec
        if self._is_training:
            seed_everything(spec.seed, epoch, hvd.rank())
        if start:
            self._ctx._restore()
        batches = self._reader.epoch(epoch if self._is_training else 0, start)
        for batch in self._ctx._profile.spans.timed(batches, "data"):
            columns = batch.columns
            if spec.transformed is not None:
                expected = spec.transformed.columns
                columns = self._functions.apply(columns, expected, is_training=self._is_training)
            begin = functools.partial(self._ctx._begin, batch, epoch if self._is_training else None)
            device = torch.device("cpu") if as_stored else self._ctx.device
            yield begin, batch_tensors(spec, self._schema, columns, device, as_stored=as_stored)


class TrainFnContext(Context):
    """The `ctx` of `train_fn`: a `Context` with the data and the checkpoints.

    `optimizer` averages gradients over ranks in its `step()`, as DistributedDataParallel does; it is None if the
    estimator has no optimizer.

    Attributes:
        train_loader: this rank's training batches.
        val_loader: this rank's validation batches, or None.
        start_epoch: completed epochs of an interrupted run with this run_id; 0 for a new run.
        start_step: completed steps of the next epoch of the interrupted run, after which `train_loader` starts;
            otherwise 0.
        num_rows: rows of the loaders' last batch on this rank.
        num_global_rows: rows of the loaders' last batch on all ranks.
        seed: seed of the run.
    """

    train_loader: Loader
    val_loader: Loader | None

    def __init__(
        self,
        spec: TrainSpec,
        state: TrainingState,
        moment: TrainingClock,
        saver: Saver,
        position: ResumePoint,
        kept: State,
    ) -> None:
        """Begin at a position. `kept` holds the states of objects kept by an interrupted run."""
        super().__init__(spec, state, moment)
        history = position.history
        moment.epoch = len(history)
        self._spec = spec
        self._checkpoints = saver.checkpoints
        self._saver = saver
        self._kept, self._known = state.kept, kept
        self._profile = state.profile
        self._rows = 0  # rows of this rank since the last record
        self._rank_state = position.rank_state
        self._is_saved = False
        self._saved_sums: Sums = {}  # checksums at the last checkpoint, on rank 0
        self._began = time.monotonic()
        self._share = 1.0
        self._has_batch = False  # whether a loader has yielded a batch
        self._skips = False  # whether decoders may skip rows of batches
        self.val_loader = None
        self._history = history
        self._views = [MappingProxyType(record) for record in history]
        self.start_epoch, self.start_step = len(history), position.step
        self._steps_done = position.step
        self.num_rows = self.num_global_rows = 0
        self.seed = spec.seed

    def _begin(self, batch: Batch, epoch: int | None) -> None:
        """Record the current batch of a loader.

        `epoch` counts from 0 and is None for a validation batch.
        """
        self._has_batch = True
        self.num_rows, self.num_global_rows = batch.num_rows, sum(batch.rows_per_rank)
        if self._skips:  # each rank knows only its own number of rows
            rows = torch.tensor(self.num_rows)
            self.num_global_rows = int(hvd.allreduce(rows, name="train_fn.rows", op=hvd.Sum))
        if epoch is not None:
            self._profile.timeline.step()
            steps = len(self.train_loader)
            self.moment.epoch, self.moment.step = epoch + 1, epoch * steps + batch.step + 1
            self._steps_done = batch.step + 1
            self._rows += batch.num_rows
            self._is_saved = False
            # The optimizer averages over ranks. With this factor the result is the average over rows.
            self._share = self.num_rows * self.size / max(1, self.num_global_rows)

    def _restore(self) -> None:
        """Restore the random numbers of a run interrupted inside an epoch."""
        if self._rank_state is not None:
            load_rng(self._rank_state["rng"])
            self._began = time.monotonic() - self._rank_state["seconds"]

    @property
    def history(self) -> tuple[Mapping[str, Value], ...]:
        """The records so far, starting with the records of an interrupted run.

        A change raises TypeError: give all numbers of an epoch to `log`.
        """
        return tuple(self._views)

    @property
    def loss_weight(self) -> float:
        """Factor for the mean loss of this rank's last batch.

        With it, the ranks' average is the mean over all rows.
        """
        return self._share

    def backward(self, loss: Tensor) -> None:
        """Run backward of this rank's mean loss, weighted so that the step equals a step on the global batch.

        Plain `loss.backward()` gives another result only in the last step, in which ranks may have different numbers of
        rows, or no rows. In this method a rank without rows adds nothing, even if its loss is NaN.
        """
        if self.num_rows:
            with self._profile.spans.span("backward"):
                (loss * self._share).backward()

    def log(self, record: Mapping[str, object]) -> None:
        """Add the record of an epoch to the history: numbers and texts by name. Every rank must call it.

        Rank 0's record is used. "epoch" is added, counted from 1, and "seconds" if missing. A "val_loss" allows selection of
        the best epoch.

        Raises:
            InvalidArgumentError: the record is not a dict of numbers and texts.
        """
        now = time.monotonic()
        checked: Record | str = ""
        if self.rank == 0:
            checked = _checked_record(record, len(self._history) + 1, now - self._began)
        checked = hvd.broadcast_object(checked, 0, name="train_fn.log")
        if isinstance(checked, str):
            raise InvalidArgumentError(checked)
        self._history.append(checked)
        self._views.append(MappingProxyType(checked))
        self._profile.end_epoch(len(self._history), rows=self._rows, seconds=now - self._began)
        self._began, self._rows = now, 0
        self._is_saved = False
        if self.rank == 0:
            self._saver.wait()  # its thread writes the same file
            self._checkpoints.write_history(self._history)

    def keep(self, name: str, part: Stateful) -> None:
        """Save an object's state in checkpoints, and load the state of an interrupted run.

        The object may be your own optimizer, for example. Every rank must call it, before the first checkpoint. Each
        checkpoint calls `state_dict()` on every rank, and holds the result of rank 0. A state may hold tensors,
        numbers, texts, and dicts and lists of them.
        """
        self._kept[name] = part
        if name in self._known:
            part.load_state_dict(cast("State", self._known[name]))

    def after_step(self) -> None:
        """Write a checkpoint inside the epoch if it is due (`checkpoint_interval_s`).

        Every rank must call it after each step. An interrupted run resumes from the last checkpoint: `train_loader`
        begins there, with the same random numbers.
        """
        if self._steps_done < len(self.train_loader):
            seconds = time.monotonic() - self._began
            self._saver.after_step(self._history, self._steps_done, None, seconds)

    def save_checkpoint(self) -> None:
        """Write the current model, optimizer, scheduler and history. Every rank must call it.

        An interrupted run resumes from the last checkpoint with `start_epoch` = its number of records. The checkpoint is named by
        the number of records, so a second one without a new record replaces the first.
        """
        broadcast_module_state(self.model)
        self._saver.save(self._history)
        self._is_saved = True
        if self.rank == 0:
            self._saved_sums = weight_sums(self.model)

    def _must_save(self) -> bool:
        """Whether this rank has trained, or rank 0's model has changed, since the last checkpoint."""
        is_best = self._spec.return_best  # then the result is an epoch that was saved
        is_changed = not is_best and self.rank == 0 and weight_sums(self.model) != self._saved_sums
        return not self._is_saved or is_changed


def _checked_record(record: object, epoch: int, seconds: float) -> Record | str:
    """Make the record for the history, or return an error message."""
    if not isinstance(record, dict):
        return f"ctx.log: the record is {type(record).__name__}; it must be a dict of numbers and texts."
    values: dict[str, Value] = {}
    for name, value in record.items():
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(name, str) or not isinstance(value, (int, float, str, type(None))):
            return f"ctx.log: {name!r} is {value!r:.100}; names must be texts, values numbers or texts."
        values[name] = value
    return {"epoch": epoch, "seconds": seconds, **values} | {"epoch": epoch}


def run_train_fn(user: UserCode, ctx: TrainFnContext, data: Data) -> None:
    """Run the user's function on this rank. Then the newest checkpoint holds its final model.

    Raises:
        RuntimeError: the function raised an error, which is the cause of this error.
    """
    functions = user.transformations
    ctx._skips = data.skips
    ctx.train_loader = Loader(data.training, data.schema, functions, ctx, is_training=True)
    if data.validation is not None:
        ctx.val_loader = Loader(data.validation, data.schema, functions, ctx, is_training=False)
    assert user.train_fn is not None
    ctx._profile.timeline.watch(ctx.model, ctx.optimizer)
    try:
        user.train_fn(ctx)
    except (CollectiveError, InvalidArgumentError):
        raise
    except Exception as e:
        raise RuntimeError(f"train_fn raised {type(e).__name__}: {e}") from e
    # Also save the final model of a function that changed weights after its last checkpoint, or wrote no checkpoint.
    unsaved = torch.tensor([float(ctx._must_save())])
    if float(hvd.allreduce(unsaved, name="train_fn.unsaved", op=hvd.Max)):
        ctx.save_checkpoint()
