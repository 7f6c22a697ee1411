"""Gradients in buckets, submitted from autograd's hooks while backward still runs.

A bucket is reduced as one operation: `dense` (a gather list over the gradients' own memory),
`sparse`, `powersgd`. `plan` decides which parameters are together, this file when a bucket is submitted.

**Threads.** Hooks run on autograd's threads (for CPU parameters the thread that called `backward`, for those on a GPU
a thread of autograd's own, so with both there are two at a time, each with buckets of its own), everything else on the
thread that calls the optimizer, never at the same time; all under the GIL.

**Ownership.** From its submission until `wait` the engine reads and writes the memory of a gradient; the
operation keeps that memory alive, also if the user drops the tensor or gives it other memory. Hooks hold the reducer
weakly, and the reducer knows nothing of the optimizer, so a dropped optimizer takes its hooks with it.

**One cycle** is: `passes` backward passes; in the last one every complete bucket is submitted by the hook that
completes it (if cores are left over, or hosts wait for each other), and when backward ends the others follow, with
zeros for parameters that got no gradient; then `wait` ends the cycle, before `backward()` returns. A rank without a
gradient of these parameters, or without a last pass, comes to it in the optimizer's `step`. All ranks therefore submit the same operations
whatever part of the model each of them used. With `Sum` and `Average` one flag per parameter travels along, so that a
parameter that no rank used ends without gradient, exactly as in one process.

**Several reducers** may have gradients in one backward pass: first all submit, then all wait, in the order in which
they were built, which is the same on every rank.

**The first cycle** submits nothing from hooks: the ranks agree first which of their gradients are sparse, and it shows which
parameters get several gradients in one pass (a module in several reentrant checkpoints); those are never submitted
before the pass has ended.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine.engine import ReduceOp
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.torch.collectives.broadcasts import start_broadcast
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.collectives.tensors import engine_dtype
from sparkhvd.torch.compressors import BUILT_IN, Compressor, NoneCompressor
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device, opened
from sparkhvd.torch.gradients.agreement import Agreement
from sparkhvd.torch.gradients.backward_end import BackwardEnd, after_backward
from sparkhvd.torch.gradients.cuda import DeviceBucket
from sparkhvd.torch.gradients.entry import Bucket, Entry, Parked, ReduceOptions
from sparkhvd.torch.gradients.plan import BucketPlanner
from sparkhvd.torch.gradients.powersgd import LowRankBucket, PowerSGD
from sparkhvd.torch.gradients.registered_views import GradientMemory, needed_bytes
from sparkhvd.torch.gradients.sparse import LayoutVote, Votes

__all__ = ["ReduceOptions", "Reducer", "wait_for_all"]


class Reducer:
    """Reduces the gradients of some parameters over all ranks, one cycle after the other."""

    def __init__(
        self, context: Context, named: Sequence[tuple[str, Tensor]], options: ReduceOptions
    ) -> None:
        self.context = context
        self.options = options
        self.passes = options.passes
        number = context.number("DistributedOptimizer", options.process_set)
        self.label = f"DistributedOptimizer.{number}"
        self.order = context.number("reducer")  # in which reducers were built
        self.in_flight = False
        # A gradient has arrived since the last wait.
        self.dirty = False
        # `.grad` holds this cycle's reduced gradients, which the optimizer has not used yet.
        self.is_reduced = False
        self.cycles = 0  # that have ended
        # Gives all reducers of the optimizer: their cycles end together, or ranks that use different parts of a model
        # would wait for different ones.
        self.siblings: Callable[[], Sequence[Reducer]] = tuple
        self._passes_left = options.passes
        # Of the backward pass that runs; the reference is dead if that ended in an exception.
        self._end: weakref.ref[BackwardEnd] | None = None
        self._entering = threading.Lock()
        # Of the reduced gradients, where a change or a further pass would give wrong results.
        self._results: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # The name of a parameter whose gradient was added to one of the last step; a step with the sum would be wrong.
        self.added_to_kept = ""
        self._entries = [
            Entry(index, name, param, self._wire_dtype(name, param))
            for index, (name, param) in enumerate(named)
        ]
        flagging = (ReduceOp.AVERAGE, ReduceOp.SUM)
        self._flagged = (
            options.op in flagging
            and (isinstance(options.compression, PowerSGD) or options.compression in BUILT_IN)
            and not options.as_views  # every gradient is there
        )
        # Not known yet: whether their gradients are sparse.
        self._undecided: list[Entry] = []
        if not (options.as_views or options.sparse_as_dense or options.sharded):
            self._undecided = list(self._entries)
        self._vote: LayoutVote | None = None
        self._device = self._open_device()
        self._low_rank = self._claim(options.compression)
        self._joins = context.joins
        self._agreement: Agreement | None = self._offer_agreement()
        if options.as_views:
            self._check_agreement()  # first: what is allocated follows from the parameters and their strides
        self._memory = self._allocate() if options.as_views else None
        # Whether hooks may submit: all ranks have agreed on what there is to reduce.
        self._is_settled = options.as_views
        self._is_submitted = False  # all that belongs to this cycle
        self._overlaps = self._device is not None or _is_worth_overlapping(context, options.ranks)
        self._planner = BucketPlanner(
            context,
            self._entries,
            options,
            label=self.label,
            flagged=self._flagged,
            device=self._device,
            low_rank=self._low_rank,
            memory=self._memory,
        )
        self._buckets: list[Bucket] = []
        self._two_rounds: list[LowRankBucket] = []
        order = list(reversed(range(len(self._entries))))
        self._plan(order)
        # The order in which gradients became ready in the first cycle; None once the plan is final.
        self._order: list[int] | None = (
            [] if len(self._buckets) > 1 and not options.groups else None
        )
        self._agreed_order: tuple[Tensor, Operation] | None = None
        self._hooks = [
            entry.param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), entry))
            for entry in self._entries
        ]
        self._finalizer = weakref.finalize(self, _remove, self._hooks)
        self._finalizer.atexit = False

    def _open_device(self) -> Device | None:
        """This rank's GPU, if it has parameters there."""
        device: Device | None = None
        for entry in self._entries:
            if entry.param.is_cpu:
                continue
            device = opened(self.context, f"DistributedOptimizer, {entry.name!r}", entry.param)
        return device

    def _claim(self, compression: type[Compressor] | Compressor) -> PowerSGD | None:
        if not isinstance(compression, PowerSGD):
            return None
        if not self._flagged:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {compression!r} is for sums of gradients, and op is "
                f"{self.options.op.name.title()}. Use Average or Sum."
            )
        compression.claim(self._entries)
        return compression

    def _allocate(self) -> GradientMemory | None:
        """Memory of the CPU for gradients; on a GPU each bucket has its own."""
        needed = needed_bytes([entry for entry in self._entries if entry.param.is_cpu])
        if needed == 0:
            return None
        buffer = self.context.engine.allocate(
            needed, name=f"{self.label}.memory", process_set=self.options.process_set
        )
        return GradientMemory(buffer)

    def zero(self) -> None:
        """Set gradients that live in registered memory to zero."""
        if self._memory is not None:
            self._memory.zero([entry for entry in self._entries if entry.param.is_cpu])
        if self.options.as_views:
            for bucket in self._buckets:
                if isinstance(bucket, DeviceBucket):
                    bucket.zero()

    def detach(self) -> None:
        """Stop listening to gradients: the engine was shut down, or another optimizer took them over."""
        self._finalizer()
        self._reset()

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes a cycle has; only between cycles."""
        self.passes = self._passes_left = passes

    @property
    def is_detached(self) -> bool:
        """Whether `detach` was called."""
        return not self._finalizer.alive

    # --- From the hooks. ---

    def on_gradient(self, entry: Entry) -> None:
        """A gradient of this pass is complete."""
        if self._end is None or self._end() is None:
            with self._entering:
                if self._end is None or self._end() is None:
                    self._enter(entry)
        if entry.grad is not None:
            self._note_repeat(entry)
            return
        if self._passes_left > 1:
            return
        entry.grad = entry.param.grad
        if self._device is not None and not entry.param.is_cpu:
            entry.stream = self._device.stream()
        if self._order is not None:
            self._order.append(entry.index)
        if entry.repeats:
            return
        bucket = entry.bucket
        bucket.pending -= 1
        if bucket.pending == 0 and self._is_settled and self._overlaps and self.cycles > 0:
            assert not isinstance(bucket, Parked)
            self._submit(bucket)

    def _enter(self, entry: Entry) -> None:
        """The first gradient of a backward pass."""
        if self._end is not None:  # the last pass ended in an exception
            self.discard()
        elif self.in_flight or (self.is_reduced and self._results):
            self._begin_anew(entry)
        elif self._results and self._is_kept(entry):
            self.added_to_kept = entry.name
        self._begin()
        self.dirty = True
        self.is_reduced = False
        end = BackwardEnd(_leave(weakref.ref(self)))
        self._end = weakref.ref(end)

    @property
    def _can_reduce_again(self) -> bool:
        """Whether gradients of a further pass may be added to reduced ones, and the sums reduced: a mean of equal
        values is that value.
        """
        return self.options.op is ReduceOp.AVERAGE and not self.options.sharded

    @property
    def takes_part(self) -> bool:
        """Whether the cycle ends with that of another reducer of the optimizer."""
        return not self.is_reduced or self._can_reduce_again

    def _begin(self) -> None:
        if self._low_rank is not None and not self.in_flight:
            self._after_joins(self._low_rank)

    def leave(self, end: BackwardEnd) -> None:
        """The end of a backward pass, also of those that it lies in."""
        if self._end is None or self._end() is not end:
            return  # a step inside the pass, in the backward of a function, has ended the cycle
        self._end = None
        if self._passes_left > 1:
            self._passes_left -= 1
            return
        if self._is_settled:
            self.submit_all()
        else:
            self._begin_to_settle()
        if self.options.wait_in_backward:
            # Behind the ends of all other reducers, which so have submitted.
            self.context.ended.reducers.append(self)
            after_backward(_finish_all(self.context))

    def _begin_anew(self, entry: Entry) -> None:
        """A gradient that is complete in this cycle changed, or was dropped and made anew."""
        if self._was_dropped(entry) and not torch.is_grad_enabled():
            # Dropped (`module.zero_grad()`), as a GAN does with the gradients that the other network's
            # loss left in this one. The same happens on every rank.
            self.discard()
            return
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} got a gradient more than backward_passes_per_step="
            f"{self.passes} times before step(). Call step() or zero_grad() of this optimizer between the "
            "backward passes, or give backward_passes_per_step the number of passes per step."
        )

    def _is_kept(self, entry: Entry) -> bool:
        """Whether the gradient was added to that of the last step, of which this rank has a part."""
        reference, version = self._results.get(entry.index, (None, 0))
        grad = entry.param.grad
        if reference is None or grad is None or grad is not reference():
            return False
        return grad._version == version + 1  # else it was set to zero in place before

    def _was_dropped(self, entry: Entry) -> bool:
        """Whether a gradient of this cycle is no parameter's any more."""
        known = self._known(entry)
        if known is not None:
            return entry.param.grad is not known
        # It is the first of a parameter that had none in this cycle.
        others = [(e, self._known(e)) for e in self._entries]
        return any([grad is not None and e.param.grad is not grad for e, grad in others]) or any(
            [reference() is None for reference, _ in self._results.values()]
        )

    def _known(self, entry: Entry) -> Tensor | None:
        """The gradient of this cycle, in flight or reduced."""
        if entry.grad is not None:
            return entry.grad
        reference, _ = self._results.get(entry.index, (None, 0))
        return None if reference is None else reference()

    def _note_repeat(self, entry: Entry) -> None:
        """A parameter got several gradients in one pass, as one of a module in several reentrant checkpoints."""
        bucket = entry.bucket
        if not isinstance(bucket, Parked) and bucket.work is not None:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {entry.name!r} got another gradient in the same backward pass, after the "
                "first one was sent; in the first step it got one. Use the module in as many reentrant checkpoints "
                "in every step, or give checkpoint(..., use_reentrant=False)."
            )
        entry.grad = entry.param.grad
        entry.repeats = True

    # --- From the optimizer. ---

    def submit_all(self) -> None:
        """Submit every bucket that has not been, with zeros for parameters that have no gradient."""
        if self._is_submitted:
            return
        self._begin()
        if not self._is_settled:
            self._settle()
        elif self._undecided:
            self._vote = self._start_vote()
        self._planner.give_memory(self._buckets, is_registered=self._is_settled)
        for bucket in self._buckets:
            if bucket.work is None:
                self._submit(bucket)
        if self._order is not None and self._agreed_order is None:
            self._offer_order(self._order)
        self._is_submitted = self.in_flight = True

    def wait(self) -> None:
        """End the cycle: all gradients are reduced and lie in `.grad`.

        Raises:
            InvalidArgumentError: a gradient was replaced in flight. It would be this rank's own, and the others'
                another. Everything that was submitted has ended, so the next cycle works.
        """
        self.submit_all()
        changed = [e for b in self._buckets for e in b.entries if e.is_changed]
        try:
            for first in self._two_rounds:
                first.start_second_round(self.context.engine)
            for bucket in self._buckets:
                bucket.wait()
            if self._vote is not None:
                self._settle_late(self._vote)
            self._follow_order()
            self._count_step()
        finally:
            self._reset()
        if changed:
            raise _changed_in_flight(changed[0])
        self.cycles += 1
        self.is_reduced = True
        if not self._can_reduce_again:
            self.remember()

    def use(self) -> None:
        """The optimizer steps with the reduced gradients; the next pass begins a new cycle."""
        self.is_reduced = False
        self._results = {}

    def remember(self) -> None:
        """Note the reduced gradients as they are now."""
        grads = [(e.index, e.param.grad) for e in self._entries]
        self._results = {i: (weakref.ref(g), g._version) for i, g in grads if g is not None}

    def find_changed(self) -> str | None:
        """The name of a parameter whose gradient was changed or replaced since `remember`."""
        for index, (reference, version) in self._results.items():
            entry = self._entries[index]
            grad = entry.param.grad
            if grad is None or grad is not reference() or grad._version != version:
                return entry.name
        return None

    def discard(self) -> None:
        """Forget the cycle; what is in flight is waited for, because the engine still writes it."""
        self.is_reduced = False
        self._results = {}
        self.added_to_kept = ""
        if not (self.dirty or self.in_flight):
            return
        try:
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
            if self._vote is not None:
                self._vote.wait()
            self._follow_order()
        finally:
            self._reset()

    def _reset(self) -> None:
        self.in_flight = False
        self.dirty = False
        self._passes_left = self.passes
        self._end = None
        if self._order is not None:
            self._order = []
        self._is_submitted = False
        self._vote = None
        for bucket in self._buckets:
            bucket.reset()
        for entry in self._undecided:
            entry.grad = None

    def _submit(self, bucket: Bucket) -> None:
        """Submit the gradients that are there now, and what stands in for those that have not come."""
        for entry in bucket.entries:
            # One that came may have been replaced: by a hook behind the reducer's own, or in the first cycle.
            if entry.grad is None or entry.param.grad is not entry.grad:
                bucket.take(entry)
        bucket.start(self.context.engine)
        for entry in bucket.entries:
            if entry.grad is not None:
                entry.version = entry.grad._version
        self.in_flight = True

    # --- That all ranks have the same parameters, and gradients of the same layout. ---

    def _begin_to_settle(self) -> None:
        """At the end of the first backward, without waiting for what another rank may submit only in its `wait`."""
        agreement = self._agreement
        if agreement is not None:
            agreement.check()  # every rank has sent its part when it built the optimizer
        if not self._undecided and self._device is None:
            self.submit_all()
            return
        # On a GPU the memory is made first, for which all ranks wait.
        if self._undecided and self._vote is None:
            self._vote = self._start_vote()
        self.in_flight = True

    def _settle(self) -> None:
        """Before anything is submitted for the first time."""
        self._check_agreement()
        if self._undecided:
            vote, self._vote = self._vote or self._start_vote(), None
            votes = vote.wait()
            if not votes.is_complete:
                return  # a rank has joined and does not learn of it; all vote again in the next cycle
            decided = self._decide(votes.layouts)
            self._is_settled = True
            if self._undecided or any([entry.sparse_dim for entry in decided]):
                self._plan(self._planned)
        self._is_settled = True

    def _settle_late(self, vote: LayoutVote) -> None:
        """Reduce what got its first gradient in this cycle, in buckets of its own that stay."""
        votes = vote.wait()
        if not votes.is_complete:
            self._reduce_undecided(votes)
            return
        late = self._decide(votes.layouts)
        if not late:
            return
        buckets = self._planner.divide([entry.index for entry in late])
        self._planner.give_memory(buckets, is_registered=True)
        for bucket in buckets:
            self._submit(bucket)
        self._buckets += buckets
        self._two_rounds += (low := [b for b in buckets if isinstance(b, LowRankBucket)])
        for first in low:
            first.start_second_round(self.context.engine)
        for bucket in buckets:
            bucket.wait()

    def _reduce_undecided(self, votes: Votes) -> None:
        """A rank has joined and does not learn what the others have, so this holds for this cycle only."""
        late = [
            e for e, found in zip(self._undecided, votes.layouts, strict=True) if found is not None
        ]
        buckets = [
            self._planner.bucket(f"{self.label}.late.{entry.index}", [entry]) for entry in late
        ]
        self._planner.give_memory(buckets, is_registered=False)
        for bucket in buckets:
            self._submit(bucket)
        for bucket in buckets:
            if isinstance(bucket, LowRankBucket):
                bucket.start_second_round(self.context.engine)
        for bucket in buckets:
            bucket.wait()
            bucket.reset()
        for entry in late:
            entry.bucket = Parked()

    def _start_vote(self) -> LayoutVote:
        return LayoutVote(self.context, self.label, self.options, self._undecided)

    def _decide(self, layouts: Sequence[int | None]) -> list[Entry]:
        """Take over what all ranks have found; the parameters that are decided now."""
        found = list(zip(self._undecided, layouts, strict=True))
        if not self._flagged:  # whoever has no gradient gets zeros
            found = [(entry, layout or 0) for entry, layout in found]
        self._undecided = [entry for entry, layout in found if layout is None]
        decided = [entry for entry, layout in found if layout is not None]
        for entry, layout in found:
            entry.sparse_dim = layout or 0
        return decided

    def _check_agreement(self) -> None:
        if self._agreement is not None:
            self._agreement.check()
            if not self._agreement.has_equal_strides:
                self._unlike_strides(self._agreement)
            self._agreement = None

    def _unlike_strides(self, agreement: Agreement) -> None:
        if self.options.sharded:
            name = self._entries[agreement.differing_strides()[0]].name
            raise MismatchError(
                f"{self.label}: ranks disagree on the memory layout (strides) of {name!r}, and sharded=True divides "
                "memory. Use the same memory format on every rank, or leave sharded out."
            )
        # Of all parameters, so that nobody has to ask which: a rank that has joined would not answer.
        for entry in self._entries:
            entry.forget_stride()

    def _offer_agreement(self) -> Agreement:
        """Start to compare this rank's parameters with the others'; looked at when the first backward ends."""
        options = self.options
        groups = f"groups {options.groups}" if options.groups else "no groups"
        states = [""] * len(self._entries)
        if self._low_rank is not None:
            states = self._low_rank.fingerprint(self._entries)
        description = [
            f"op {options.op.name.title()}, predivide factor {options.predivide}, "
            f"{_in_words(options.compression)}, bucket_bytes {options.bucket_bytes}, {groups}"
            f"{', gradients as views' if options.as_views else ''}"
            f"{', sharded' if options.sharded else ''}"
            f"{', sparse as dense' if options.sparse_as_dense else ''}"
            f"{self._tuning()}"
            f"{self._device_options()}",
            *[
                f"{entry.name!r} with shape {entry.shape}, {entry.dtype}{_place(entry)}{state}"
                for entry, state in zip(self._entries, states, strict=True)
            ],
        ]
        strides = [entry.stride for entry in self._entries]
        return Agreement(
            self.context, self.label, options.process_set, options.ranks, description, strides
        )

    def _device_options(self) -> str:
        return f", device_bucket_bytes {self.options.device_bucket_bytes}" if self._device else ""

    def _tuning(self) -> str:
        tuning = self.context.engine.settings.tuning
        return f", autotune {tuning}" if tuning else ""

    # --- The plan. ---

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        """Divide the gradients anew, into buckets of another size; between cycles and on every rank alike."""
        self.options = self._planner.options = replace(self.options, bucket_bytes=bucket_bytes)
        if self._order is None:  # else the end of the first cycle does it
            self._plan(self._planned)

    def _plan(self, order: Sequence[int]) -> None:
        self._planned = order
        # Before the ranks have settled what there is, every parameter counts as dense.
        waiting = {entry.index for entry in self._undecided} if self._is_settled else set()
        for index in waiting:
            self._entries[index].bucket = Parked()
        self._buckets = self._planner.divide([index for index in order if index not in waiting])
        self._two_rounds = [b for b in self._buckets if isinstance(b, LowRankBucket)]
        if self._is_settled:
            self._planner.give_memory(self._buckets, is_registered=True)

    def _count_step(self) -> None:
        """After the last step of the warm-up gradients go into other buckets."""
        if self._low_rank is not None and self._low_rank.count_step(self._entries):
            self._reset()
            self._plan(self._planned)

    def _after_joins(self, compression: PowerSGD) -> None:
        """Ranks that had joined have missed steps, so what all must have alike begins anew."""
        if self._joins != self.context.joins:
            self._joins = self.context.joins
            compression.restart(self._entries)
            # The others may have had more plans than this rank.
            self._planner.restart(f"{self.label}.joined.{self._joins}")
            self._plan(self._planned)

    def _offer_order(self, seen: list[int]) -> None:
        """Start to send the first rank's order of gradients to every rank."""
        late = set(range(len(self._entries))).difference(seen)
        order = torch.tensor([*dict.fromkeys(seen), *sorted(late, reverse=True)], dtype=torch.int64)
        name, options = f"{self.label}.order", self.options
        work = start_broadcast(
            self.context, name, order, order, options.ranks[0], options.process_set
        )
        self._agreed_order = (order, work)

    def _follow_order(self) -> None:
        """Divide the gradients anew, in the order in which the first rank saw them become ready."""
        if self._agreed_order is None:
            return
        order, work = self._agreed_order
        self._agreed_order = None
        try:
            work.wait()
        except MismatchError:
            return  # a rank has joined and missed this cycle; all try again in the next
        self._order = None
        self._reset()
        self._plan(order.tolist())

    def _wire_dtype(self, name: str, param: Tensor) -> torch.dtype:
        compression = self.options.compression
        if compression is NoneCompressor or isinstance(compression, PowerSGD):
            wire = param.detach()
        else:
            wire = compression.compress(torch.zeros_like(param))[0]
        engine_dtype(f"DistributedOptimizer, {name!r}", wire)
        if wire.shape != param.shape:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {_in_words(compression)} turns {name!r} of shape {tuple(param.shape)} "
                f"into {tuple(wire.shape)}. A compressor must keep the shape."
            )
        return wire.dtype


def _is_worth_overlapping(context: Context, ranks: Sequence[int]) -> bool:
    """Whether reducing while backward runs saves time: where somebody waits for a network, or cores are left over.

    Where the ranks of one host compute on all of its cores, the engine's threads would take these from them, in turns
    that make every rank wait for every other: a step of ResNet-50 with 2 ranks on 2 cores took 5 % longer.
    """
    topology = context.engine.topology
    if len({topology.hosts[rank] for rank in ranks}) > 1:
        return True
    return len(ranks) * torch.get_num_threads() < len(os.sched_getaffinity(0))


def _place(entry: Entry) -> str:
    return "" if entry.param.is_cpu else " on a GPU"


def _in_words(compression: type[Compressor] | Compressor) -> str:
    if isinstance(compression, PowerSGD):
        return repr(compression)
    # An object's own `repr` may hold its address, which is no difference between ranks.
    return (compression if isinstance(compression, type) else type(compression)).__name__


def _leave(reducer: weakref.ref[Reducer]) -> Callable[[BackwardEnd], None]:
    def leave(end: BackwardEnd) -> None:
        target = reducer()
        if target is not None:
            target.leave(end)

    return leave


def _finish_all(context: Context) -> Callable[[], None]:
    def finish() -> None:
        ended: list[Reducer] = context.ended.reducers
        # An earlier pass may have ended in an exception before these were waited for.
        waiting = {reducer for reducer in ended if reducer.dirty or reducer.in_flight}
        ended.clear()
        for reducer in tuple(waiting):
            waiting.update(each for each in reducer.siblings() if each.takes_part)
        wait_for_all(sorted(waiting, key=lambda reducer: reducer.order))

    return finish


def wait_for_all(reducers: Sequence[Reducer]) -> None:
    """Reduce the gradients of several reducers, in the order in which they were built."""
    for reducer in reducers:
        reducer.submit_all()
    for reducer in reducers:
        reducer.wait()


def _changed_in_flight(entry: Entry) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"DistributedOptimizer: the gradient of {entry.name!r} was changed, replaced or dropped while it was being "
        "reduced (p.grad.mul_(...), p.grad = ..., p.grad.data = ...), so the result is lost. Call "
        "optimizer.synchronize() before you change gradients; step() then does not reduce again. Register "
        "hooks that change them before the optimizer is built."
    )


def _hook(reducer: weakref.ref[Reducer], entry: Entry) -> Callable[[Tensor], None]:
    def on_gradient(_: Tensor) -> None:
        target = reducer()
        if target is not None:
            target.on_gradient(entry)

    return on_gradient


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
