"""Training loop of a rank: plain PyTorch around `sparkhvd.torch`.

`train` is one function with one dataclass in and one out. Read it from the top: connect, load, resume, then for
each epoch train, validate, save.

**N ranks with batch b train as one process with batch N * b**, or N * b * k if the gradients of k batches
are accumulated. A rank's loss is a mean over its own rows, so before `backward` it is scaled by the rank's share of
the whole step, and gradients are summed over batches and ranks. A rank without rows in a batch calls neither
`forward` nor `backward` and so adds zeros.

**A resumed run equals an uninterrupted one, bit by bit on CPU.** At the end of an epoch all ranks hold the same
state (buffers such as BatchNorm's running statistics are rank 0's), the checkpoint holds that state, the
order of rows is a function of (seed, epoch), and random numbers are seeded from (seed, epoch, rank). A checkpoint
inside an epoch also holds each rank's own state, and the reader starts at the step after it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import replace

import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.data.columns.labels import outputs_of, widths_of
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.system import LoadMonitor
from sparkhvd.runner import context
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.training.batches import Data, StepPlan
from sparkhvd.training.checkpoints.checkpoint import broadcast_module_state
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import (
    ResumePoint,
    TrainingState,
    find_start,
    load_compression,
    repeated,
    resume,
)
from sparkhvd.training.checkpoints.saver import Saver
from sparkhvd.training.device import agree, choose_device, compile_model, gpu_of
from sparkhvd.training.early_stopping import Stopper, best_epoch
from sparkhvd.training.host_memory import share_frozen
from sparkhvd.training.loss_state import LossState
from sparkhvd.training.losses import check_weights
from sparkhvd.training.metrics import Logs, Totals
from sparkhvd.training.model import build_model, uncompiled
from sparkhvd.training.modules.fitted import forward, output_widths
from sparkhvd.training.modules.lookups import naming_lookups
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.optimizer import build_optimizer, set_mode
from sparkhvd.training.precision import loss_scaler, widened
from sparkhvd.training.profile import Profile, RunTimeline, StepReporter
from sparkhvd.training.program import Program, load_program
from sparkhvd.training.rank_sync import raise_on_all_ranks, seed_everything
from sparkhvd.training.schedule import Schedule
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.step import Step
from sparkhvd.training.to_device import Mover, move_losses, move_optimizer
from sparkhvd.training.torch_settings import held
from sparkhvd.training.train_fn import TrainFnContext, run_train_fn
from sparkhvd.training.types import History, Record
from sparkhvd.training.user_code.callbacks import CallbackContext, Callbacks, TrainingClock
from sparkhvd.training.user_step import StepContext, UserStep


@held
def train(spec: TrainSpec) -> TrainResult:
    """Train on every rank of a job. All ranks must call it with the same spec.

    Raises:
        InvalidArgumentError: outputs, labels or loss do not fit each other (on all ranks, before the first step), a
            checkpoint in the run's folder belongs to another run, the model cannot be compiled here, or a loss was
            not finite under `terminate_on_nan`.
        CollectiveError: another rank was lost. The last checkpoint is complete.
    """
    profile = Profile(RunTimeline(spec.store, spec.run_dir, spec.timeline))
    device = connect(spec)
    profile.sampler = LoadMonitor(gpu_of(device))
    profile.timeline.begin()
    profile.lap("connect")
    program = load_program(spec.store, spec.run_dir, spec.program_sha256, spec.program_weights)
    model = uncompiled(build_model(program.model, spec.seed))
    assert isinstance(model, nn.Module)
    # Move the parameters in place, because the user's optimizer refers to them.
    model.to(device)
    program = replace(program, model=model)
    move_losses(program.losses, device)
    others = program.others()
    others.to(device)
    call = compile_model(program.model) if spec.compile else program.model
    checkpoints = Checkpoints(spec.store, spec.run_dir)
    is_cuda = device.type == "cuda"
    profile.sampler.start()
    with (
        contextlib.closing(profile.sampler),
        profile.timeline,
        Data(spec, program.functions, pin_memory=is_cuda, spans=profile.spans) as data,
    ):
        start = find_start(spec, checkpoints, program.model, others=others)
        data.prepare(*start.position)
        load_compression(program.compression, start.compression, device)
        state, schedule = build(spec, program, data, profile, others)
        moment = TrainingClock()
        ctx = CallbackContext(spec, state, moment)
        callbacks = Callbacks(program.user.callbacks, ctx, others)
        state.callbacks = callbacks
        position = resume(start, state)
        # The ranks of a host map the weights file of a large model.
        is_mapped = spec.program_weights is not None
        share_frozen(program.model, position.sent if is_mapped else None)
        history = position.history
        if history and hvd.rank() == 0:
            profile.resume(checkpoints.profile(), len(history))
        profile.lap("load")
        stopped = ""
        with Saver(spec, checkpoints, state) as saver:
            if program.user.train_fn is not None:
                if position.changes:
                    state.changes.set_modes(position.changes, all_of=True)
                    state.changes.load_attributes(position.changes, None)
                loop = TrainFnContext(spec, state, moment, saver, position, start.resumed["kept"])
                run_train_fn(program.user, loop, data)
            else:
                user = UserStep(spec, data.schema, program.user, StepContext(spec, state, moment))
                step = Step(spec, program, state, call, user)
                stopped = train_epochs(step, data, schedule, callbacks, saver, position)
                checkpoints.note(step.warning)
        epoch = returned_epoch(spec, history, checkpoints)
        order, skipped = data.training.description, data.skipped
        widths = tried_widths(spec, program, data, device)
    buckets = [] if state.optimizer is None else state.optimizer.describe_buckets()
    gathered = profile.gather(device, buckets)
    hvd.barrier()  # wait until rank 0 has written the last checkpoint
    hvd.shutdown()
    warning = checkpoints.warning
    return TrainResult(history, epoch, order, stopped, skipped, warning, widths, gathered)


def returned_epoch(spec: TrainSpec, history: History, checkpoints: Checkpoints) -> int:
    """Find the epoch of the weights returned by `fit`. All ranks must call it."""
    if not spec.return_best:
        return len(history)
    saved = checkpoints.saved_epochs() if hvd.rank() == 0 else None
    saved = hvd.broadcast_object(saved, 0, name="saved")
    return best_epoch(history, spec.monitor, saved)


def connect(spec: TrainSpec) -> torch.device:
    """Choose this rank's device and connect to the other ranks, and return the device."""
    if (place := context()) is not None:
        torch.set_num_threads(place.num_threads)
    device, problem = choose_device(place, looks=spec.looks_for_gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # set it before CUDA creates a context on another device
    hvd.init()
    agree(device, problem)
    return device


def tried_widths(
    spec: TrainSpec, program: Program, data: Data, device: torch.device
) -> tuple[int, ...]:
    """Find the elements per row of each output, by running the model on this rank's first batch.

    All ranks must call it, because the model may communicate.

    Returns:
        The numbers. () if not `spec.finds_widths`, or if the model fails.
    """
    if not spec.finds_widths:
        return ()
    model = in_mode(program.model, is_training=False)
    inputs = spec.inputs.without(program.user.label_arguments)
    try:
        batch = data.first_batch()
        if batch is None:
            schema = spec.transformed or data.schema
            return output_widths(model, inputs, schema.features, spec.precision) or ()
        columns = batch.columns
        if spec.transformed is not None:
            functions, expected = program.user.transformations, spec.transformed.columns
            columns = functions.apply(columns, expected, is_training=False)
        result = forward(model, inputs, columns, Mover(device), spec.precision)
        outputs = widened(outputs_of(result))
        if any(output.ndim == 0 or len(output) != batch.num_rows for output in outputs):
            shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
            raise InvalidArgumentError(
                f"forward returned the shapes {shapes} for {batch.num_rows} rows"
            )
        return widths_of(outputs)
    except Exception as e:  # noqa: BLE001 - the trained model must not be lost
        warnings.warn(
            f"transform will not work, because the trained model returned no outputs for the first batch: {type(e).__name__}: {e}. "
            "getModel() returns the trained model.",
            stacklevel=2,
        )
        return ()


class LoopHooks:
    """Hooks on every rank at the end of steps and epochs, without effect by default."""

    def end_step(self, history: History, plan: StepPlan, totals: Totals, seconds: float) -> None:
        """Run after a step of the optimizer.

        Args:
            history: records of completed epochs.
            plan: plan of the step.
            totals: totals of the epoch on this rank.
            seconds: duration of the epoch so far.
        """

    def end_epoch(self, history: History) -> None:
        """Run after an epoch, before its checkpoint."""

    def after_checkpoint(self) -> None:
        """Run after the checkpoint of an epoch was taken. It may be written later."""


def train_epochs(
    step: Step,
    data: Data,
    schedule: Schedule,
    callbacks: Callbacks,
    saver: Saver,
    position: ResumePoint,
    hooks: LoopHooks | None = None,
) -> str:
    """Train from `position`, adding records to its history, and return the reason to stop early, or ""."""
    hooks = hooks or LoopHooks()
    spec, history, moment = step.spec, position.history, callbacks.ctx.moment
    moment.epoch, moment.step = len(history), len(history) * data.num_steps + position.step
    with repeated(step.state, position, "on_train_begin"):
        callbacks.call("on_train_begin")
    stopper = Stopper(spec.early_stopping)
    stopped = callbacks.stopped or stopper.reason_to_stop(history)
    while len(history) < spec.epochs and not stopped:
        moment.epoch = len(history) + 1
        step.model.train()
        step.buffers.begin_epoch()
        set_mode(step.optimizer, is_training=True)
        # Prepare before the callbacks, which may draw random numbers, log, and change modes of modules.
        seed_everything(spec.seed, len(history), hvd.rank())
        callbacks.ctx.logs = step.user.ctx.logs = Logs()
        with repeated(step.state, position, "on_epoch_begin"):
            callbacks.call("on_epoch_begin")
        record = train_epoch(step, data, schedule, callbacks, saver, position, hooks)
        set_mode(step.optimizer, is_training=False)
        broadcast_module_state(step.model)
        with step.state.profile.phase("validate"):
            step.state.others.share()
            record |= validate(step, data)
            if data.validation is not None:
                step.state.others.share()
        asked = callbacks.epoch_end(record)
        # Use rank 0's record on all ranks, so that they decide alike even if their machines compute slightly
        # differently.
        with step.state.profile.phase("exchange"):
            record = hvd.broadcast_object(record, 0, name="record")
        schedule.after_epoch(record)
        history.append(record)
        hooks.end_epoch(history)
        stopped = asked or stopper.reason_to_stop(history)
        saver.after_epoch(history, is_last=bool(stopped) or len(history) >= spec.epochs)
        callbacks.checkpoint(saver)
        hooks.after_checkpoint()
        position = ResumePoint(history)
    callbacks.train_end(history, saver)
    return stopped if len(history) < spec.epochs else ""


def build(
    spec: TrainSpec, program: Program, data: Data, profile: Profile, others: LossState
) -> tuple[TrainingState, Schedule]:
    """Build distributed optimizer, scheduler and loss scaler, before any checkpoint is loaded."""
    model = program.model
    optimizer: Distributed | None = None
    if program.optimizer is not None:  # None if train_fn makes its own optimizer
        plain = build_optimizer(program.optimizer, model, others.trained)
        spec.overrides.apply(plain, hvd.size())
        move_optimizer(plain)
        distributed = hvd.DistributedOptimizer(
            plain,
            [*model.named_parameters(), *others.stepped_by(plain)],
            compression=program.compression,
            backward_passes_per_step=spec.accumulate,
            # A custom loop calls `backward` on means, so their gradients are averaged; our loop scales losses itself.
            op=hvd.Sum if program.user.train_fn is None else hvd.Average,
            # Our loop waits for gradients itself, together with the step's weight, and also on ranks without rows.
            synchronize_in_backward=program.user.train_fn is not None,
        )
        assert isinstance(distributed, Distributed)
        optimizer = distributed
    schedule = Schedule(
        program.lr_scheduler,
        optimizer,
        interval=spec.lr_scheduler_interval,
        monitor=spec.monitor,
        steps_per_epoch=data.num_scheduled,
        epochs=spec.epochs,
    )
    scaler = loss_scaler(spec.precision, next(model.parameters()).device)
    state = TrainingState(
        model,
        optimizer,
        schedule.scheduler,
        scaler,
        compression=program.compression,
        profile=profile,
        others=others,
    )
    return state, schedule


def train_epoch(
    step: Step,
    data: Data,
    schedule: Schedule,
    callbacks: Callbacks,
    saver: Saver,
    position: ResumePoint,
    hooks: LoopHooks,
) -> Record:
    """Train one pass over the rows, or the rest of a pass, and return the record of the epoch."""
    epoch, moment = len(position.history), callbacks.ctx.moment
    logs = callbacks.ctx.logs if step.program.user.can_log else None
    totals = step.totals(logs, is_training=True)
    step.waited_s = 0.0
    profile = step.state.profile
    profile.begin_epoch()
    progress = StepReporter(epoch + 1, step.spec.epochs, data.steps_in_all(epoch, position.done))
    began = time.monotonic() - position.begin(totals)
    for plan, batches in data.steps(epoch, position.step, position.done):
        moment.step = epoch * data.num_steps + plan.number + 1
        if step.run(batches, plan, totals, f"epoch {epoch + 1}, step {plan.number + 1}"):
            schedule.after_step()
        progress.step(plan.number + 1, plan.num_rows, totals.means_so_far, step.waited_s)
        callbacks.step_end(*step.last_loss)
        saver.after_step(position.history, plan.number + 1, totals, time.monotonic() - began)
        profile.step()
        profile.timeline.step()
        hooks.end_step(position.history, plan, totals, time.monotonic() - began)
    own_rows, own_seconds = totals.num_rows, time.monotonic() - began
    totals.combine()
    if not step.user.takes(is_training=True):
        check_weights(step.spec, totals, "training", step.spec.train_steps_per_epoch)
    seconds = time.monotonic() - began
    waited = profile.end_epoch(
        epoch + 1,
        rows=own_rows,
        seconds=own_seconds,
        data_wait_s=data.waited_s,
        gradient_wait_s=step.waited_s,
    )
    return {
        "epoch": epoch + 1,
        **totals.means(),
        "rows": totals.num_rows,
        **left_out(step, totals, data.planned_rows(epoch, position.done)),
        "seconds": seconds,
        "rows_per_s": totals.num_rows / max(seconds, 1e-9),
        "data_wait_s": data.waited_s,
        **waited,
        "lr": learning_rate(step.optimizer),
    }


def validate(step: Step, data: Data) -> dict[str, float]:
    """Compute loss and metrics over the validation rows, if any. The model does not change."""
    if data.validation is None:
        return {}
    step.model.eval()
    logs = step.user.ctx.logs = Logs()
    is_users = step.user.takes(is_training=False)
    totals = step.totals(logs if is_users else None, is_training=False)
    with torch.no_grad():
        for batch in data.validation_batches():
            if batch.num_rows:
                with naming_lookups(step.model, batch.columns):
                    totals.add(step.forward(batch))
    totals.combine()
    if not is_users:
        check_weights(step.spec, totals, "validation", step.spec.validation_steps_per_epoch)
    return {**totals.means("val_"), **left_out(step, totals, data.planned_validation_rows, "val_")}


def left_out(step: Step, totals: Totals, planned: int, prefix: str = "") -> dict[str, int]:
    """Count the rows skipped by decoders in a pass, or return {} if the program never skips rows.

    Args:
        step: steps of the run.
        totals: totals of all ranks, after the pass.
        planned: rows of all ranks in the pass, including skipped rows.
        prefix: prefix of the name in the record.

    Raises:
        InvalidArgumentError: all rows were skipped; raised on all ranks.
    """
    if not step.program.functions.skips:
        return {}
    if planned and not totals.num_rows:
        raise_on_all_ranks(
            f"The images of all {planned:,} {'validation' if prefix else 'training'} rows are missing or broken, and "
            "image(broken='skip') skips such rows, so no row is left. Look at the output of the ranks, and check that they can "
            "read the files."
        )
    return {f"{prefix}broken_rows": planned - totals.num_rows}


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Read the learning rate of the first parameter group, or None."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)
