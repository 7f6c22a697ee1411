"""Elastic training: the training loop with a changing set of ranks.

Ranks join and leave at the end of a step. If the rest of an epoch cannot be divided again (data beyond memory, groups, and
metrics whose states do not add up), ranks join and leave at the end of an epoch. When a rank is lost, the other ranks
return to the beginning of the epoch, or to the last step at which they kept a copy of the state: when ranks joined, or
when `checkpoint_interval_s` had passed. Every rank has this copy in memory, so the store is not read. A joining rank
receives the copy from rank 0. If no rank has a copy, the store's newest checkpoint is used.

`_train` does all collective work. It runs once for each set of ranks, so a joining rank makes the same collective calls
as the other ranks.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.observe.system import LoadMonitor
from sparkhvd.runner import context
from sparkhvd.torch.elastic import HostsUpdatedInterrupt, State, run
from sparkhvd.torch.elastic.state import rendezvous
from sparkhvd.training.batches import Data, Done, StepPlan
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import (
    ResumePoint,
    TrainingState,
    capture,
    find_start,
    load_weights,
    resume,
)
from sparkhvd.training.checkpoints.saver import Cadence, RecordCopies, Saver, snapshot
from sparkhvd.training.device import agree, choose_device, compile_model, gpu_of
from sparkhvd.training.metrics import Totals, TotalsState
from sparkhvd.training.model import build_model, uncompiled
from sparkhvd.training.profile import Profile
from sparkhvd.training.program import load_program
from sparkhvd.training.schedule import Schedule
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.step import Step
from sparkhvd.training.to_device import move_losses
from sparkhvd.training.torch_settings import held
from sparkhvd.training.train import LoopHooks, build, returned_epoch, train_epochs, tried_widths
from sparkhvd.training.types import History
from sparkhvd.training.user_code.callbacks import CallbackContext, Callbacks, TrainingClock
from sparkhvd.training.user_step import StepContext, UserStep


@held
def train_elastically(spec: TrainSpec) -> TrainResult:
    """Train on every rank of an elastic job. All ranks must call it with the same spec. See `train`."""
    hvd.init()
    training = _Training(spec)
    training.profile.sampler.start()
    with contextlib.closing(training.profile.sampler):
        result = run(_train)(training)
    hvd.shutdown()
    return result


@dataclass(frozen=True)
class _Within:
    """Position inside an epoch: the completed part, the sums of all ranks, and the seconds spent."""

    done: Done
    sums: TotalsState
    seconds: float


class _Training(State, LoopHooks):
    """State kept by a rank when the ranks change."""

    def __init__(self, spec: TrainSpec) -> None:
        super().__init__()
        self.spec = spec
        place = context()
        if place is not None:
            torch.set_num_threads(place.num_threads)
        self.device, self.problem = choose_device(place, looks=spec.looks_for_gpu)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.profile = Profile()
        self.profile.sampler = LoadMonitor(gpu_of(self.device))
        program = load_program(spec.store, spec.run_dir, spec.program_sha256, spec.program_weights)
        model = uncompiled(build_model(program.model, spec.seed))
        assert isinstance(model, nn.Module)
        model.to(self.device)
        self.program = replace(program, model=model)
        move_losses(program.losses, self.device)
        self.others = self.program.others()
        self.others.to(self.device)
        self.call = compile_model(model) if spec.compile else model
        self.checkpoints = Checkpoints(spec.store, spec.run_dir)
        self.moment = TrainingClock()
        self.state: TrainingState | None = None
        self.schedule: Schedule | None = None
        # The copy of the state to restore after a loss, its position in the epoch, and the number of ranks by which its
        # learning rates are scaled.
        self._held: Checkpoint | None = None
        self._within: _Within | None = None
        self._scaled_by = 0
        self._records = RecordCopies()
        self._rows = 0  # rows of this epoch done so far
        self._is_divisible = False
        self._cadence = Cadence(spec.checkpoint_interval_s, time.monotonic())
        self._until_asked = 1

    def keep(self, history: History, within: _Within | None = None) -> None:
        """Keep a copy of the state after these epochs and, with `within`, after a part of the next epoch."""
        assert self.state is not None
        weights = self.program.model.state_dict()
        own = self.state.changes.own_attributes(self.state.watch)
        kept = capture(self.spec, self.state, history, weights=weights, kept={}, attributes=[own])
        values = snapshot({**vars(kept), "history": []})
        self._held = Checkpoint(**{**values, "history": self._records.of(history)})
        self._within = within
        self._cadence.taken(time.monotonic())
        self._scaled_by = hvd.size()
        self._rows, steps = (0, 0) if within is None else (within.done.rows, within.done.steps)
        self._version = (len(history) << 32) + steps + 1

    def end_step(self, history: History, plan: StepPlan, totals: Totals, seconds: float) -> None:
        """Let ranks join and leave if the rest of the epoch can be divided again."""
        self._rows += plan.num_rows
        if not (self._is_divisible and totals.adds_up):
            return
        interrupt: HostsUpdatedInterrupt | None = None
        try:
            self.check_host_updates()
        except HostsUpdatedInterrupt as e:
            interrupt = e
        if interrupt is not None or self._is_due():
            sums = _added(hvd.allgather_object(totals.state_dict(), name="elastic.sums"))
            done = Done(self._rows, plan.number + 1)
            self.keep(history, _Within(done, sums, seconds))
        if interrupt is not None:
            raise interrupt

    def _is_due(self) -> bool:
        """Decide on rank 0, for all ranks, whether to keep a copy of the state now."""
        self._until_asked -= 1
        if self._until_asked:
            return False
        answer = torch.zeros(2, dtype=torch.int64)
        now = time.monotonic()
        if hvd.rank() == 0:
            answer = torch.tensor(self._cadence.ask(now, is_writing=False))
        is_due, self._until_asked = hvd.broadcast(answer, 0, name="elastic.due").tolist()
        return bool(is_due)

    def end_epoch(self, history: History) -> None:
        """Keep a copy of the state after a finished epoch."""
        again = [e for e in self.profile.generations if e["epoch"] == len(history)]
        history[-1]["ranks"] = hvd.size()
        history[-1]["repeated_rows"] = sum(each["repeated_rows"] for each in again)
        self.keep(history)

    def after_checkpoint(self) -> None:
        """Let ranks join and leave between epochs."""
        self.check_host_updates()

    def begin(self, data: Data) -> ResumePoint:
        """Send rank 0's state to every rank after a change of the ranks and return the position to continue from."""
        model, held = self.program.model, self._held
        start = find_start(self.spec, self.checkpoints, model, held, self.others)
        if self.state is None:
            self.state, self.schedule = build(
                self.spec, self.program, data, self.profile, self.others
            )
            self._scaled_by = hvd.size()
        elif held is not None and self.state.optimizer is not None:
            load_weights(model, held.model, "The state in memory does")
            self.state.changes.regroup(held.changes.get("groups"))
            self.state.optimizer.load_state_dict(held.optimizer)
        # Select the callbacks again, because this process may have become rank 0, and some callbacks run on rank 0
        # only.
        ctx = CallbackContext(self.spec, self.state, self.moment)
        self.state.callbacks = Callbacks(self.program.user.callbacks, ctx, self.others)
        assert self.schedule is not None
        self.schedule.spread(data.num_steps)
        position = resume(start, self.state)
        before: Any = self._scaled_by
        if held is None and position.history:
            before = position.history[-1].get("ranks", before)
        profile = self._profile(len(position.history)) if hvd.rank() == 0 else None
        place = (before, self._within, profile)
        before, within, profile = hvd.broadcast_object(place, 0, name="elastic.place")
        self.profile.resume(profile, len(position.history))
        self._scale(before)
        self._cadence = Cadence(self.spec.checkpoint_interval_s, time.monotonic())
        self._until_asked = 1
        self._records = RecordCopies()  # epochs may be repeated
        self.keep(position.history, within)
        self._is_divisible = data.training.is_divisible
        if within is not None:
            position.done, position.seconds = within.done, within.seconds
            position.sums = within.sums if hvd.rank() == 0 else None
        return position

    def _profile(self, epochs_done: int) -> dict[str, Any]:
        """Collect rank 0's times of the training so far, with the start position of these ranks."""
        found = self.profile.state() if self._held is not None else self.checkpoints.profile()
        place, member, within = context(), rendezvous(), self._within
        generation = {
            "attempt": 0 if place is None else place.attempt,
            "generation": 0 if member is None else member.generation,
            "epoch": epochs_done + 1,
            "repeated_rows": self._rows - (0 if within is None else within.done.rows),
        }
        return {**found, "generations": [*found.get("generations", ()), generation]}

    def _scale(self, before: int) -> None:
        """Scale learning rates with the number of ranks, if requested."""
        assert self.state is not None
        if self.spec.overrides.lr_scaling != "linear" or before == hvd.size():
            return
        factor = hvd.size() / before
        for group in [] if self.state.optimizer is None else self.state.optimizer.param_groups:
            for name in {"lr", "initial_lr", "max_lr", "min_lr"} & group.keys():
                group[name] *= factor
        scheduler = self.state.scheduler
        if scheduler is not None and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]

    def save(self) -> None:
        """Do nothing, because `keep` copies the state."""

    def restore(self) -> None:
        """Do nothing, because `begin` restores the state together with the other ranks."""

    def sync(self) -> None:
        """Do nothing, because `begin` sends rank 0's state to all ranks."""


def _added(states: Sequence[TotalsState]) -> TotalsState:
    """Add up the sums of all ranks."""
    logs: dict[str, tuple[float, float]] = {}
    for state in states:
        for name, (total, weight) in state["logs"].items():
            before = logs.get(name, (0.0, 0.0))
            logs[name] = (before[0] + total, before[1] + weight)
    values = torch.stack([state["values"] for state in states]).sum(0)
    parts = torch.stack([state["parts"] for state in states]).sum(0)
    return {"values": values, "parts": parts, "metrics": [], "logs": logs}


def _train(training: _Training) -> TrainResult:
    """Train on one set of ranks."""
    spec = training.spec
    if spec.keeps_global_batch:
        of_all = spec.least_ranks * spec.batch_size
        spec = replace(spec, batch_size=math.ceil(of_all / hvd.size()))
    program, device = training.program, training.device
    agree(device, training.problem)
    profile, is_cuda = training.profile, device.type == "cuda"
    profile.meet_others()
    with Data(spec, program.functions, pin_memory=is_cuda, spans=profile.spans) as data:
        position = training.begin(data)
        state, schedule = training.state, training.schedule
        assert state is not None
        assert schedule is not None
        assert state.callbacks is not None
        history = position.history
        with Saver(spec, training.checkpoints, state) as saver:
            user = UserStep(
                spec, data.schema, program.user, StepContext(spec, state, training.moment)
            )
            step = Step(spec, program, state, training.call, user)
            stopped = train_epochs(
                step,
                data,
                schedule,
                state.callbacks,
                saver,
                position,
                training,
            )
            training.checkpoints.note(step.warning)
        epoch = returned_epoch(spec, history, training.checkpoints)
        order, skipped = data.training.description, data.skipped
        widths = tried_widths(spec, program, data, device)
    buckets = [] if state.optimizer is None else state.optimizer.describe_buckets()
    gathered = profile.gather(device, buckets)
    hvd.barrier()  # wait until rank 0 has written the last checkpoint
    warning = training.checkpoints.warning
    return TrainResult(history, epoch, order, stopped, skipped, warning, widths, gathered)
