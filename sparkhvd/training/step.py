"""Training step of a rank: forward and backward of its batches, then the optimizer's step.

**One formula for every kind of loss.** A rank's loss is a mean with a weight: its rows, the sum of sample weights, or a
number returned by the loss. Before `backward` it is multiplied by its weight and divided by the rows of all ranks and
batches of the step. All ranks know this number beforehand. Gradients add up over batches and ranks. If the weights are
not numbers of rows, their sum is allreduced once per step, beside the gradients, and the gradients are multiplied by
the number of rows divided by this sum. Several labels with different weights need another method, see `losses`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.data.columns.labels import SIGMOID, link_of, outputs_of
from sparkhvd.data.reading.reader import Batch
from sparkhvd.errors import CollectiveError, InvalidArgumentError, listed
from sparkhvd.training.batches import StepPlan
from sparkhvd.training.checkpoints.resume import TrainingState
from sparkhvd.training.losses import Counts, counts_apart, counts_of, mean_loss, weighted_loss
from sparkhvd.training.metrics import AnyMetric, Forward, Logs, Totals, no_broadcast
from sparkhvd.training.modules.lookups import naming_lookups
from sparkhvd.training.optimizer import looks_twice, needs_closure
from sparkhvd.training.precision import autocast, widened
from sparkhvd.training.program import Program
from sparkhvd.training.rank_sync import BufferSync, raise_on_all_ranks
from sparkhvd.training.row_pairs import unpaired
from sparkhvd.training.spec import TrainSpec
from sparkhvd.training.to_device import Mover
from sparkhvd.training.types import Columns
from sparkhvd.training.user_step import UserStep, sample_weights


class Step:
    """Training steps of a run on this rank."""

    def __init__(
        self,
        spec: TrainSpec,
        program: Program,
        state: TrainingState,
        call: nn.Module,
        user: UserStep,
    ) -> None:
        """Set up the steps of a run.

        Args:
            spec: spec of the run.
            program: the user's objects.
            state: state with the distributed optimizer.
            call: the model, compiled or not.
            user: calls the user's functions that replace the call of model and loss.
        """
        assert state.optimizer is not None

        self.spec = spec
        self.program = program
        self.state = state
        self.model = state.model
        self.call = call
        self.optimizer = state.optimizer
        self.scaler = state.scaler
        self.spans = state.profile.spans
        self.device = next(state.model.parameters()).device
        self.move = Mover(self.device)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.looks_twice = looks_twice(self.optimizer)
        self.buffers = BufferSync(self.model)
        self.needs_closure = needs_closure(self.optimizer)
        self.user = user
        self.is_sum = program.user.train_step is None and all(program.is_sum)
        self.is_loss_called = False
        self.warning = ""  # warning about loss or metrics, on rank 0
        # In the last step this rank's sum of losses times their weights, and its sum of weights.
        self.last_loss: tuple[Tensor | float, float] = (0.0, 0.0)
        self.waited_s = 0.0  # seconds spent waiting for reduced gradients in this epoch
        # Whether the weights of a step are known only after `forward`; None before the first batch.
        self.is_weighted: bool | None = None
        self.counts_apart = counts_apart(program) and not user.takes(is_training=True)
        self.counts: Counts | None = None  # of the current step, if `counts_apart`

    def run(self, batches: Iterable[Batch], plan: StepPlan, totals: Totals, where: str) -> bool:
        """Run forward and backward of this rank's batches, and one step of the optimizer.

        Args:
            batches: the `plan.num_batches` batches of this rank.
            plan: plan of the step, the same on all ranks.
            totals: totals of the epoch, to which the batches are added.
            where: description of the step, for errors.

        Returns:
            True if the optimizer stepped. It does not step after an overflow of float16 gradients, or if all weights
            are 0.
        """
        self.buffers.before_step()
        has_stepped = self.run_batches(batches, plan, totals, where)
        self.buffers.after_step()
        return has_stepped

    def run_batches(
        self, batches: Iterable[Batch], plan: StepPlan, totals: Totals, where: str
    ) -> bool:
        """Run a step after the buffers are synchronized. Arguments and result are as for `run`."""
        prepared = self.prepared(batches, plan)
        if self.needs_closure:
            return self.run_closure(list(prepared), plan, totals, where)
        factor = self.compute_gradients(prepared, plan, totals, where)
        with self.spans.span("optimizer"):
            return self.apply(factor)

    def run_closure(
        self,
        batches: Sequence[tuple[Batch, Columns | None]],
        plan: StepPlan,
        totals: Totals,
        where: str,
    ) -> bool:
        """Step an optimizer with several loss evaluations, such as LBFGS.

        The arguments are as for `run`.
        """
        counted: list[tuple[Tensor | float, float]] = []

        def closure() -> float:
            factor = self.compute_gradients(batches, plan, None if counted else totals, where)
            counted.append(self.last_loss)
            self.scale_and_clip(factor)
            # Sum the loss over ranks, because the optimizer decides by it and every rank must decide alike.
            loss = torch.as_tensor(self.last_loss[0], dtype=torch.float64).cpu()
            total = hvd.allreduce(loss, name="step.loss", op=hvd.Sum)
            return float(total) * factor / (1 if self.is_sum else plan.num_rows)

        if self.looks_twice:
            closure()
        self.optimizer.step(closure)
        self.last_loss = counted[0]
        return True

    def compute_gradients(
        self,
        batches: Iterable[tuple[Batch, Columns | None]],
        plan: StepPlan,
        totals: Totals | None,
        where: str,
    ) -> float:
        """Run forward and backward, and reduce the gradients, and return the factor that `apply` needs."""
        self.optimizer.zero_grad()
        weight, problem = 0.0, ""
        loss: Tensor | None = None
        for batch, columns in batches:
            with self.spans.span("forward"):
                result = self.result(batch, columns)
            if result is None:
                continue
            if result.weight:  # skip a mean over no rows, which may be NaN
                with self.spans.span("backward"):
                    self.backward(result, plan)
                problem = problem or self.check_loss(result)
                loss = result.loss_sum if loss is None else loss + result.loss_sum
            weight += result.weight
            if totals is not None:
                totals.add(result)
        self.last_loss = (0.0 if loss is None else loss, weight)
        # Runs at the same time as the reduction of gradients.
        sums = self.send_weight(weight, problem)
        began = time.perf_counter()
        with self.spans.span("wait for gradients"):
            self.optimizer.wait_for_gradients()
        self.waited_s += time.perf_counter() - began
        return self.factor(sums, plan, problem, where)

    def prepared(
        self, batches: Iterable[Batch], plan: StepPlan
    ) -> Iterator[tuple[Batch, Columns | None]]:
        """Yield the batches of a step, with their columns if they are already made.

        If labels have separate weights, the allreduce of the weights starts before the first batch is yielded.
        """
        if not self.counts_apart:
            yield from ((batch, None) for batch in batches)
            return
        made: list[tuple[Batch, Columns | None]] = []
        weights = torch.zeros(len(self.program.losses), dtype=torch.float64)
        for batch in batches:
            columns = self.early_columns(batch)
            made.append((batch, columns))
            if columns is not None:
                labels = self.spec.labels.apply(columns)
                weights += torch.tensor(counts_of(self.spec, self.program, labels))
        sums = hvd.allreduce_async(weights, name="step.counts", op=hvd.Sum)
        self.counts = Counts(plan.num_rows, sums)
        yield from made
        sums.wait()

    def early_columns(self, batch: Batch) -> Columns | None:
        """Make the columns of a training batch, or return None without rows, or if `first_forward` will report an error."""
        if not batch.num_rows:
            return None
        try:
            return self.columns(batch, is_training=True)
        except Exception:
            if self.is_weighted is not None:
                raise
            return None

    def result(self, batch: Batch, columns: Columns | None) -> Forward | None:
        """Run `forward` on this rank's rows and return None without rows."""
        if self.is_weighted is None:
            return self.first_forward(batch, columns)
        with naming_lookups(self.model, batch.columns):
            return self.forward(batch, columns) if batch.num_rows else None

    def forward(self, batch: Batch, columns: Columns | None = None) -> Forward:
        """Run the model and the loss on this rank's rows.

        `columns` are the batch's columns if already made.
        """
        is_training = torch.is_grad_enabled()
        if columns is None:
            columns = self.columns(batch, is_training=is_training)
        if self.user.takes(is_training=is_training):
            with autocast(self.spec.precision, self.device):
                return self.user.forward(
                    self.call, columns, batch.num_rows, is_training=is_training
                )
        arguments, keywords = self.move(self.spec.inputs.apply(columns))
        with autocast(self.spec.precision, self.device):
            result = self.call(*arguments, **keywords)
        outputs = widened(outputs_of(result, skips_numbers=False))
        # Compute weights from the labels on the CPU, to avoid waiting for the device.
        on_cpu = self.spec.labels.apply(columns)
        labels = self.spec.labels.match(outputs, self.move(on_cpu))
        weights = sample_weights(self.spec, columns)
        counts = self.counts if is_training else None
        with contextlib.nullcontext() if self.is_loss_called else no_broadcast("loss"):
            if weights is None:
                result = mean_loss(self.spec, self.program, outputs, labels, counts, on_cpu)
            else:
                result = weighted_loss(self.spec, self.program, outputs, labels, weights)
        if not self.is_loss_called:
            self.is_loss_called = True
            self.check_pairs(result)
        return result

    def check_pairs(self, result: Forward) -> None:
        """Warn about losses and metrics with unpaired rows, if the driver cannot try the model."""
        if self.spec.checks_pairs and hvd.rank() == 0:
            program, labels = self.program, result.labels
            self.warning = unpaired(program.losses, program.metrics, result.outputs, labels)
            if self.warning:
                warnings.warn(self.warning, stacklevel=2)

    def columns(self, batch: Batch, *, is_training: bool) -> Columns:
        """Apply the user's transformations to the columns of a batch."""
        if self.spec.transformed is None:
            return batch.columns
        functions, expected = self.program.user.transformations, self.spec.transformed.columns
        return functions.apply(batch.columns, expected, is_training=is_training)

    def metrics(self, *, is_training: bool) -> Sequence[AnyMetric]:
        """Return the metrics of a pass, or () if the user's function computes the outputs."""
        return () if self.user.takes(is_training=is_training) else self.program.metrics

    def totals(self, logs: Logs | None, *, is_training: bool) -> Totals:
        """Create empty totals for a pass over the data."""
        is_users = self.user.takes(is_training=is_training)
        num_parts = len(self.program.losses) if counts_apart(self.program) and not is_users else 0
        return Totals(self.metrics(is_training=is_training), logs, num_parts, self.device)

    def backward(self, result: Forward, plan: StepPlan) -> None:
        """Add the gradients of a batch to the step's gradients."""
        share = result.weight if self.is_sum else result.weight / plan.num_rows
        loss = result.loss if share == 1.0 else result.loss * share
        try:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        except RuntimeError as e:
            if hint := self.spec.labels.dtype_hint(e):
                raise InvalidArgumentError(
                    f"backward() of the loss raised {type(e).__name__}: {e}{hint}"
                ) from e
            raise

    def send_weight(self, weight: float, problem: str) -> hvd.Handle[Tensor] | None:
        """Start summing the weights of all ranks, or return None if no rank needs the sum."""
        if not (self.is_weighted or self.spec.terminate_on_nan):
            return None
        values = torch.tensor([weight, float(bool(problem))], dtype=torch.float64)
        return hvd.allreduce_async(values, name="step.weight", op=hvd.Sum)

    def factor(
        self, sums: hvd.Handle[Tensor] | None, plan: StepPlan, problem: str, where: str
    ) -> float:
        """Compute the factor for the reduced gradients. It is the same on all ranks.

        Args:
            sums: result of `send_weight`.
            plan: plan of the step.
            problem: problem of this rank's loss, or "".
            where: description of the step.
        """
        if self.counts_apart and self.counts is not None and not self.counts.sums.wait().any():
            return 0.0  # no rank has a row with weight
        if sums is None:
            return 1.0
        total, num_problems = sums.wait().tolist()
        if num_problems:
            for rank, text in enumerate(hvd.allgather_object(problem, name="step.problem")):
                if text:
                    raise_on_all_ranks(f"{text} on rank {rank}, {where}. {_NAN_HINT}")
        if not self.is_weighted or self.is_sum:
            return 1.0
        return plan.num_rows / total if total else 0.0

    def check_loss(self, result: Forward) -> str:
        """Describe a non-finite loss under `terminate_on_nan`, or return ""."""
        if not self.spec.terminate_on_nan or result.loss.isfinite():
            return ""
        return f"terminate_on_nan: the loss is {float(result.loss.detach())}"

    def apply(self, factor: float) -> bool:
        """Step with the reduced gradients times `factor` and return True if the optimizer stepped."""
        if not factor:
            return False
        self.scale_and_clip(factor)
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def scale_and_clip(self, factor: float) -> None:
        """Scale the reduced gradients, then clip them."""
        if factor != 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self.scaler is not None:
            # Unscale the reduced gradients, which are equal on all ranks, so that all ranks skip the same steps.
            self.scaler.unscale_(self.optimizer)
        if self.spec.gradient_clip_value is not None:
            nn.utils.clip_grad_value_(self.parameters, self.spec.gradient_clip_value)
        if self.spec.gradient_clip_norm is not None:
            self.optimizer.clip_grad_norm_(self.spec.gradient_clip_norm)

    def first_forward(self, batch: Batch, columns: Columns | None) -> Forward | None:
        """Run the first batch of a run.

        If it fails on some rank, every rank raises the error before any step.
        """
        result, problem = None, ""
        cause: Exception | None = None
        if batch.num_rows:
            try:
                with naming_lookups(self.model, batch.columns):
                    result = self.forward(batch, columns)
                _check_first(self.spec, self.program, result)
            except CollectiveError:
                raise
            except InvalidArgumentError as e:
                problem, cause = str(e), e
            except Exception as e:  # noqa: BLE001 - raised again below, on every rank
                shapes = (f"{n} {v.shape} {v.dtype}" for n, v in batch.columns.items())
                problem = (
                    f"model or loss raised {type(e).__name__}: {e} (columns: {listed(shapes)})"
                    + self.spec.labels.dtype_hint(e)
                )
                cause = e
        is_weighted = result is not None and result.is_weighted
        outcomes = hvd.allgather_object((problem, is_weighted), name="first batch")
        for rank, (text, _) in enumerate(outcomes):
            if text:
                here = cause if rank == hvd.rank() else None
                raise_on_all_ranks(f"The first batch, on rank {rank}: {text}", here)
        # If decoders skip rows, the ranks know the number of rows only after reading.
        skips = self.program.functions.skips
        self.is_weighted = skips or any(weighted for _, weighted in outcomes)
        return result


_NAN_HINT = (
    "Look for NaN in the data and for division by zero in the model, scale features and labels with large values "
    "(StandardScaler), lower the learning rate or set gradient_clip_norm."
)


def _broadcast(output: Tensor, label: Tensor) -> bool:
    try:
        torch.broadcast_shapes(output.shape, label.shape)
    except RuntimeError:
        return False
    return True


def _check_logits(spec: TrainSpec, program: Program, index: int, label: Tensor) -> None:
    """Raise an error for labels outside 0 to 1 with one logit.

    BCE-with-logits would silently accept these labels.
    """
    is_logit = link_of(program.losses[index]) == SIGMOID
    if is_logit and ((label < 0) | (label > 1)).any():  # NaN is not refused
        raise InvalidArgumentError(
            f"Label {spec.labels.columns[index]!r} is from {float(label.min()):g} to {float(label.max()):g} in the first "
            "batch, but BCE-with-logits needs labels from 0 to 1. For classes 0, 1, 2, ... give loss='cross_entropy' and a "
            "model with one output per class."
        )


def _check_first(spec: TrainSpec, program: Program, result: Forward) -> None:
    """Raise an error for a loss without a gradient, or with a label broadcast to its output."""
    if not result.loss.requires_grad:
        raise InvalidArgumentError(
            "loss returned a number that does not depend on the model's trainable parameters, so there is no "
            "gradient. Compute it from the output, without detach(), item() or torch.no_grad()."
        )
    for i, (output, label) in enumerate(zip(result.outputs, result.labels, strict=True)):
        _check_logits(spec, program, i, label)
        if output.numel() == label.numel() or not _broadcast(output, label):
            continue
        # With as many rows as classes, labels (3,) broadcast over outputs (3, 3). Try a number of rows that differs
        # from all other axes: then a loss that broadcasts raises an error, and a loss of class indices does not.
        rows = max(output.shape + label.shape) + 1
        index = torch.arange(rows) % len(output)
        try:
            with torch.no_grad():
                program.losses[i](output[index], label[index])
        except RuntimeError as e:
            raise InvalidArgumentError(
                f"Label {spec.labels.columns[i]!r} has shape {tuple(label.shape)}, but the model's output has shape "
                f"{tuple(output.shape)}, and the loss broadcasts them. Change the last layer or the "
                "label so that both have the same number of elements per row."
            ) from e
