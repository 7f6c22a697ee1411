"""Between Lightning's trainer and the run of a fit: history, progress, and checkpoints inside and after epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.lightning.checkpoints import IN_MEMORY, RunFiles, plain
from sparkhvd.training.progress import Progress
from sparkhvd.training.train_fn import TrainFnContext

__all__ = ["RunState", "bridge", "finite_losses"]


class RunState:
    """State of Lightning, for `ctx.keep`.

    Attributes:
        trainer: whose state it is; None: the last one's.
        rows: of the epoch so far, over all ranks.
    """

    def __init__(
        self, module: Any, ctx: TrainFnContext, checkpoint_io: Any, files: RunFiles
    ) -> None:
        """Take the module of the trainer, the `CheckpointIO` of its strategy, and Lightning's files in the run's folder."""
        self.trainer: Any = None
        self.rows = 0
        self._module, self._ctx = module, ctx
        self._io, self._files = checkpoint_io, files
        self._logged: dict[str, Any] = {}

    @property
    def is_resumed(self) -> bool:
        """True if a trainer can go on from `IN_MEMORY`."""
        return self._io.state is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state; every rank must call it."""
        logged: dict[str, Any] = {}
        if self.trainer is not None:
            self.trainer.save_checkpoint(IN_MEMORY, weights_only=False)
            logged = {name: sums_of(each) for name, each in results_of(self.trainer).items()}
        kept = dict(self._io.state or {})
        if self._ctx.optimizer is not None:
            kept.pop("optimizer_states", None)  # the run's checkpoint has it
        return {
            "lightning": plain(kept),
            "files": dict(self._files.sums),
            "rows": self.rows,
            "logged": hvd.allgather_object(logged, name="lightning.logged"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next trainer begin with a state."""
        self._io.state = {**state["lightning"], "state_dict": self._module.state_dict()}
        if self._ctx.optimizer is not None:
            self._io.state["optimizer_states"] = [self._ctx.optimizer.state_dict()]
        self._files.sums.update(state["files"])
        self._logged = state["logged"][self._ctx.rank]
        self.rows = state["rows"]

    def add_logged(self) -> None:
        """Add what an interrupted epoch had logged to the results of the trainer, which begin anew, after its first batch."""
        logged, self._logged = self._logged, {}
        if self._ctx.start_step:
            for name, each in results_of(self.trainer).items():
                if name in logged:
                    add_sums(each, logged[name])


def results_of(trainer: Any) -> dict[str, Any]:
    """Return Lightning's running results of `self.log(on_epoch=True)` by name; metrics of torchmetrics are the module's."""
    found = getattr(trainer, "_results", None) or {}
    return {name: each for name, each in found.items() if each.is_tensor and each.meta.on_epoch}


def sums_of(result: Any) -> tuple[Any, Any]:
    """Return what a result has summed up, and over how many rows."""
    return result.value.cpu(), getattr(result, "cumulated_batch_size", None)


def add_sums(result: Any, sums: tuple[Any, Any]) -> None:
    """Add earlier sums to those of a result."""
    value, rows = sums[0].to(result.value.device), sums[1]
    if result.meta.is_max_reduction or result.meta.is_min_reduction:
        result.value = result.meta.reduce_fx(result.value, value)
    else:
        result.value = result.value + value
    if rows is not None:
        result.cumulated_batch_size = result.cumulated_batch_size + rows


class EmptyBatches:
    """Keeps out of the logged means what a rank logs in a step in which it has no rows of its own."""

    def __init__(self, ctx: TrainFnContext) -> None:
        self._ctx = ctx
        self._before: dict[str, tuple[Any, Any]] | None = None

    def note(self, trainer: Any) -> None:
        """Keep what was logged before a batch, if its row is none of the step's."""
        self._before = None
        if self._ctx._has_batch and not self._ctx.num_rows:
            self._before = {name: sums_of(each) for name, each in results_of(trainer).items()}

    def leave_out(self, trainer: Any) -> None:
        """Take out again what such a batch has logged."""
        before, self._before = self._before, None
        if before is not None:
            for name, each in results_of(trainer).items():
                # `reset()` would take the name itself out of this rank's metrics.
                for sum_name, empty in each._defaults.items():
                    setattr(each, sum_name, empty.clone().to(each.value.device))
                if name in before:
                    add_sums(each, before[name])


def finite_losses(package: Any, ctx: TrainFnContext) -> Any:
    """Return the callback that ends a fit with an error when a loss is not finite."""

    class FiniteLosses(package.Callback):  # type: ignore[misc]  # of either package
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = _loss_of(outputs)
            if loss is not None and not math.isfinite(float(loss)):
                raise InvalidArgumentError(
                    f"The loss is {float(loss)} in step {batch_idx + 1} of epoch {len(ctx.history) + 1}, and terminate_on_nan is set. Lower "
                    "the learning rate, or clip gradients: trainer_args={'gradient_clip_val': 1.0}."
                )

    return FiniteLosses()


def _loss_of(outputs: Any) -> Any:
    """Return the loss of what Lightning gives to `on_train_batch_end`; None where a step has none."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _shown(trainer: Any, outputs: Any) -> dict[str, float]:
    """Return the loss of a step and what the module logs for the progress bar."""
    shown = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    loss = _loss_of(outputs)
    return shown if loss is None else {"loss": float(loss), **shown}


def bridge(package: Any, ctx: TrainFnContext, state: RunState) -> Any:
    """Return the callback that writes history and checkpoints of a run, of a package of Lightning."""
    empty = EmptyBatches(ctx)

    class Bridge(package.callbacks.Checkpoint):  # type: ignore[misc]  # of either package; comes behind all other callbacks
        def __init__(self) -> None:
            self._progress: Progress | None = None
            self._rows = 0
            self._began = 0.0

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            state.trainer = trainer

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # Where a run goes on inside an epoch, that epoch does not start.
            rows = state.rows if ctx.start_step else 0
            self.on_train_epoch_start(trainer, pl_module)
            state.rows = rows

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            steps = trainer.num_training_batches
            self._progress = Progress(
                len(ctx.history) + 1, ctx.epochs, steps if math.isfinite(steps) else 0
            )
            self._rows, state.rows, self._began = 0, 0, time.monotonic()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            empty.leave_out(trainer)
            state.add_logged()
            self._rows += ctx.num_global_rows
            state.rows += ctx.num_global_rows
            assert self._progress is not None
            self._progress.step(
                batch_idx + 1, ctx.num_global_rows, lambda: _shown(trainer, outputs)
            )
            # Between two steps of the optimizer there are gradients, which no checkpoint has.
            if not trainer.is_last_batch and not (batch_idx + 1) % trainer.accumulate_grad_batches:
                ctx.after_step()

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            empty.note(trainer)

        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            empty.note(trainer)

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            empty.leave_out(trainer)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            record: dict[str, Any] = {n: float(v) for n, v in trainer.callback_metrics.items()}
            if self._rows:  # else the batches are the user's
                seconds = max(time.monotonic() - self._began, 1e-9)
                record |= {"rows": state.rows, "rows_per_s": self._rows / seconds}
            ctx.log(record)
            ctx.save_checkpoint()

    return Bridge()
