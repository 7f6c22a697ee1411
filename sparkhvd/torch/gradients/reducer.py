"""Reduction of gradients in buckets, started by autograd's hooks while backward still runs.

A bucket is reduced as one operation (modules `dense`, `sparse`, `powersgd`). `plan` decides which parameters share a
bucket, and this file decides when a bucket is submitted. `Cycle` holds the state of the reduction. In the first cycle
the ranks agree on the gradients (`negotiation`).

**Threads.** Hooks run on autograd's threads: for CPU parameters on the thread that called `backward`, for GPU
parameters on another thread. With both kinds two threads run hooks at a time, each with its own buckets. Everything
else runs on the thread that calls the optimizer, and never at the same time as hooks. All of it runs under the GIL.

**Ownership.** From its submission until `wait` the engine reads and writes the memory of a gradient. The operation
keeps that memory alive, also if the user drops the tensor or replaces its memory. Hooks refer to the reducer weakly,
and the reducer has no reference to the optimizer, so a dropped optimizer removes its hooks.

**One cycle** has `passes` backward passes. In the last pass every complete bucket is submitted by the hook that
completes it, if cores are idle or the ranks are on several hosts. When backward ends, the other buckets are submitted,
with zeros for parameters without a gradient. Then `wait` ends the cycle, before `backward()` returns. A rank without a
gradient of these parameters, or without a last pass, takes part in the cycle in the optimizer's `step`. So all ranks
submit the same operations, even if they used different parts of the model. With `Sum` and `Average` one flag per
parameter is reduced too. A parameter that no rank used then ends without a gradient, exactly as in one process.

**Several reducers** may have gradients in one backward pass. First all submit, then all wait, in the order in which
they were built. This order is the same on every rank.

**The first cycle** submits nothing from hooks. The ranks first agree on their sparse gradients. Each rank also records
the parameters with several gradients in one pass (a module in several reentrant checkpoints). Later cycles submit these
parameters only after the pass has ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.utils.hooks import RemovableHandle

from sparkhvd import cpus
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import leave_untraced
from sparkhvd.torch.context import Context, ContextPart
from sparkhvd.torch.gradients.buckets import Buckets
from sparkhvd.torch.gradients.cuda import DeviceBucket
from sparkhvd.torch.gradients.dense import Bucket, GradientSlot, ReduceOptions, UnusedParameters
from sparkhvd.torch.gradients.negotiation import GradientNegotiation, ReadyOrder
from sparkhvd.torch.gradients.plan import BucketPlanner, make_entries

# ----------------------------------------------------------------------------------------------------
# Detection of the end of a backward pass, and the decision whether reductions overlap with the pass.


def in_backward() -> bool:
    """Check whether this thread runs a node of a backward pass or its hooks.

    The result is False in callbacks after a pass.
    """
    return torch._C._current_autograd_node() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Register a function to call when the running backward pass has ended, after earlier callbacks.

    The thread that ends the pass calls it. On a GPU the current streams are then those of the caller of `backward()`.
    `backward()` raises the function's exceptions.
    """
    Variable._execution_engine.queue_callback(callback)


class BackwardEnd:
    """Calls a function when the outermost backward pass ends. Create it on the thread of the pass.

    Reentrant checkpoints, and the user's autograd functions, run a pass inside a node of another pass. torch reports
    the end of the inner pass. A hook on the outer pass's node then waits for the end of the outer pass. Only autograd
    refers to this object, so it is freed when a pass ends in an exception.

    Args:
        callback: called with this object.
    """

    def __init__(self, callback: Callable[[BackwardEnd], None]) -> None:
        self._callback = callback
        self._handle: Any = None
        after_backward(self._leave)

    def _leave(self) -> None:
        node: Any = torch._C._current_autograd_node()  # None outside of a node
        if node is None:
            self._callback(self)
        else:
            self._handle = node.register_hook(self._enter_outer)

    def _enter_outer(self, *_: object) -> None:
        self._handle.remove()
        after_backward(self._leave)


def is_worth_overlapping(engine: Engine, ranks: Sequence[int]) -> bool:
    """Whether reducing while backward runs saves time: with several hosts, or with idle cores.

    If the ranks of one host compute on all of its cores, the engine's threads slow down each rank in turn, and every
    rank waits for the slowest. A step of ResNet-50 with 2 ranks on 2 cores took 5 % longer.
    """
    topology = engine.topology
    if len({topology.hosts[rank] for rank in ranks}) > 1:
        return True
    return len(ranks) * torch.get_num_threads() < cpus.allowed()


# ----------------------------------------------------------------------------------------------------
# States of a reduction cycle, from the first gradient of a backward pass to the step that uses the reduced gradients.
#     IDLE -> COLLECTING -> SENDING -> SENT -> REDUCED -> IDLE
#
# | state | meaning |
# |---|---|
# | IDLE | no gradient has arrived since the last step |
# | COLLECTING | gradients of this cycle arrive; nothing has been submitted |
# | SENDING | a bucket, or the vote on layouts, has been submitted |
# | SENT | all operations of the cycle have been submitted |
# | REDUCED | `.grad` holds the reduced gradients, and the optimizer has not stepped with them |
#
# A rank without a gradient changes from IDLE to SENT. COLLECTING follows REDUCED if a further pass adds to reduced
# gradients, and SENT follows REDUCED if another reducer of the optimizer reduces again. `reset` changes from every
# state to IDLE: after an error, when the cycle is discarded, and at the end of a cycle before REDUCED.
#
# The reducer uses one `Cycle` for all its cycles; `reset` prepares it for the next. `results` outlive a cycle, to
# recognize gradients that the user keeps after the step.


class CycleState(Enum):
    """State of a cycle."""

    IDLE = auto()
    COLLECTING = auto()
    SENDING = auto()
    SENT = auto()
    REDUCED = auto()


class Cycle:
    """State of the running cycle, with a method for each transition.

    Args:
        passes: backward passes per cycle.

    Attributes:
        state: state of the cycle.
        passes: backward passes per cycle.
        passes_left: backward passes until the gradients are complete, including the running pass.
        is_held: True inside `no_sync()`: passes only add to this rank's gradients, and no pass is the last of the
            cycle.
        count: number of cycles that ended with reduced gradients.
        results: record of the reduced gradients, kept if a change or a further pass would give wrong results.
        added_to_kept: name of a parameter whose gradient was added to a reduced gradient of the last step. A step with
            the sum would be wrong.
    """

    __slots__ = (
        "_end",
        "added_to_kept",
        "count",
        "is_held",
        "passes",
        "passes_left",
        "results",
        "state",
    )

    def __init__(self, passes: int) -> None:
        self.state = CycleState.IDLE
        self.passes = self.passes_left = passes
        self.is_held = False
        self.count = 0
        self.results = ReducedGradients()
        self.added_to_kept = ""
        # End of the running backward pass; the reference is dead if the pass ended in an exception.
        self._end: weakref.ref[BackwardEnd] | None = None

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass runs and has given this reducer a gradient."""
        return self._end is not None and self._end() is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether the last backward pass ended in an exception."""
        return self._end is not None and self._end() is None

    @property
    def is_in_flight(self) -> bool:
        """Whether an operation of this cycle has been submitted."""
        return self.state in (CycleState.SENDING, CycleState.SENT)

    @property
    def is_last_pass(self) -> bool:
        """Whether the gradients are complete after the running or next pass."""
        return self.passes_left == 1 and not self.is_held

    @property
    def is_open(self) -> bool:
        """Whether the cycle has begun and must be waited for."""
        return self.state not in (CycleState.IDLE, CycleState.REDUCED)

    # --- Transitions. ---

    def enter(self, end: BackwardEnd) -> None:
        """Enter COLLECTING, with the first gradient of a backward pass."""
        assert not self.is_in_flight
        self.state = CycleState.COLLECTING
        self._end = weakref.ref(end)

    def leave(self, end: BackwardEnd) -> bool:
        """Count an ended backward pass and return True if it was the last of the cycle."""
        if self._end is None or self._end() is not end:
            return (
                # A step() inside the pass, in the backward of a function, has ended the cycle.
                False
            )
        self._end = None
        is_last = self.is_last_pass
        if not is_last and not self.is_held:
            self.passes_left -= 1
        return is_last

    def send(self) -> None:
        """Enter SENDING, because an operation has been submitted and others will follow."""
        if self.state is not CycleState.SENT:
            self.state = CycleState.SENDING

    def complete(self) -> None:
        """Enter SENT, because every operation has been submitted."""
        self.state = CycleState.SENT

    def reset(self) -> None:
        """Enter IDLE. No operation of the cycle may be in flight."""
        self.state = CycleState.IDLE
        self.passes_left = self.passes
        self._end = None

    def finish(self) -> None:
        """Change from IDLE to REDUCED, because the results of the operations are in `.grad`."""
        assert self.state is CycleState.IDLE
        self.state = CycleState.REDUCED
        self.count += 1

    def use(self) -> None:
        """Change from REDUCED to IDLE, because the optimizer steps with the reduced gradients."""
        if self.state is CycleState.REDUCED:
            self.state = CycleState.IDLE
        self.results.clear()

    def drop(self) -> None:
        """Forget the reduced gradients, because the user drops them or sets them to zero."""
        self.use()
        self.added_to_kept = ""

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per cycle. Call it between cycles only."""
        self.passes = self.passes_left = passes


class ReducedGradients:
    """Record of a reducer's reduced gradients and their versions, by parameter number."""

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __bool__(self) -> bool:
        return bool(self._noted)

    def clear(self) -> None:
        """Forget all gradients."""
        self._noted = {}

    def note(self, entries: Sequence[GradientSlot]) -> None:
        """Record the current gradients, and forget earlier ones."""
        grads = [(e.index, e.param.grad) for e in entries]
        self._noted = {i: (weakref.ref(g), g._version) for i, g in grads if g is not None}

    def find_changed(self, entries: Sequence[GradientSlot]) -> str | None:
        """Find the name of a parameter with a gradient changed after the record, or return None."""
        for index, (reference, version) in self._noted.items():
            entry = entries[index]
            grad = entry.param.grad
            if grad is None or grad is not reference() or grad._version != version:
                return entry.name
        return None

    def is_added_to(self, entry: GradientSlot) -> bool:
        """Whether backward added to the recorded gradient of this parameter."""
        reference, version = self._noted.get(entry.index, (None, 0))
        grad = entry.param.grad
        if reference is None or grad is None or grad is not reference():
            return False
        return grad._version == version + 1  # a larger version: it was set to zero in place before

    def was_dropped(self, entry: GradientSlot, entries: Sequence[GradientSlot]) -> bool:
        """Whether a gradient of this cycle, in flight or reduced, is no longer `.grad`.

        Args:
            entry: the parameter with another gradient.
            entries: all parameters of the reducer.
        """
        known = self._known(entry)
        if known is not None:
            return entry.param.grad is not known
        # The parameter has no earlier gradient in this cycle, so check the others.
        others = [(e, self._known(e)) for e in entries]
        return any([grad is not None and e.param.grad is not grad for e, grad in others]) or any(
            [reference() is None for reference, _ in self._noted.values()]
        )

    def _known(self, entry: GradientSlot) -> Tensor | None:
        """Find the parameter's gradient of this cycle, in flight or reduced, or return None."""
        if entry.grad is not None:
            return entry.grad
        reference, _ = self._noted.get(entry.index, (None, 0))
        return None if reference is None else reference()


# ----------------------------------------------------------------------------------------------------
# The reducer itself.


class Reducer:
    """Reduces the gradients of some parameters over all ranks, cycle by cycle.

    Args:
        context: context of the ranks.
        named: the parameters with their names.
        options: options of the reduction; the same on every rank.

    Attributes:
        options: options of the reduction.
        number: number of this reducer, in the order in which reducers are built.
        cycle: state of the running cycle.
        buckets: the current buckets.
        siblings: returns all reducers of the optimizer. Their cycles end together, because otherwise ranks that use
            different parts of a model would wait for different reducers.
    """

    def __init__(
        self, context: Context, named: Sequence[tuple[str, Tensor]], options: ReduceOptions
    ) -> None:
        label = (
            f"DistributedOptimizer.{context.number('DistributedOptimizer', options.process_set)}"
        )
        self.options = options
        self.number = context.number("reducer")
        self.cycle = Cycle(options.passes)
        self.siblings: Callable[[], Sequence[Reducer]] = tuple
        self._context = context
        self._entering = threading.Lock()
        self._entries = make_entries(named, options)
        self._planner = BucketPlanner(context, self._entries, options, label)
        self._negotiation = GradientNegotiation(context, label, self._planner)
        if options.as_views:
            self._negotiation.settle_views()
            self._planner.allocate_views()
        self._overlaps = self._planner.device is not None or is_worth_overlapping(
            context.engine, options.ranks
        )
        self.buckets = Buckets(self._planner, context.engine)
        self._gradient_order: Sequence[int] = list(reversed(range(len(self._entries))))
        self._plan()
        # Records the order of gradients; None when the order is final.
        self._ready: ReadyOrder | None = None
        if len(self.buckets) > 1 and not options.groups:
            self._ready = ReadyOrder(context, label, options, len(self._entries))
        hooks = [
            entry.param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), entry))
            for entry in self._entries
        ]
        self._finalizer = weakref.finalize(self, _remove, hooks)
        self._finalizer.atexit = False

    def zero(self) -> None:
        """Set gradient views of registered memory to zero."""
        self._planner.zero_views()
        if self.options.as_views:
            for bucket in self.buckets:
                if isinstance(bucket, DeviceBucket):
                    bucket.zero()

    def detach(self) -> None:
        """Remove the hooks, because the engine has shut down or a newer optimizer has the parameters."""
        self._finalizer()
        self._reset()

    @property
    def is_detached(self) -> bool:
        return not self._finalizer.alive

    @property
    def in_flight(self) -> bool:
        """Whether gradients of this cycle have been submitted."""
        return self.cycle.is_in_flight

    @property
    def is_reduced(self) -> bool:
        """Whether `.grad` holds reduced gradients not yet used by the optimizer."""
        return self.cycle.state is CycleState.REDUCED

    # --- From the hooks. ---

    def on_gradient(self, entry: GradientSlot) -> None:
        """Record a complete gradient, and submit its bucket if the bucket is now complete too."""
        cycle = self.cycle
        if not cycle.is_in_pass:
            with self._entering:
                if not cycle.is_in_pass:
                    self._enter(entry)
        if entry.grad is not None:
            self._take_again(entry)
            return
        if not cycle.is_last_pass:
            return
        entry.grad = entry.param.grad
        device = self._planner.device
        if device is not None and not entry.param.is_cpu:
            entry.stream = device.raw_stream()
        if self._ready is not None:
            self._ready.seen.append(entry.index)
        if entry.repeats:
            return
        bucket = entry.bucket
        bucket.pending -= 1
        if (
            bucket.pending == 0
            and self._negotiation.is_negotiated
            and self._overlaps
            and cycle.count
        ):
            assert not isinstance(bucket, UnusedParameters)
            self._submit(bucket)

    def _enter(self, entry: GradientSlot) -> None:
        """Begin a backward pass with its first gradient."""
        cycle, device = self.cycle, self._planner.device
        if device is not None and not entry.param.is_cpu:
            device.stream()  # raises an error for a stream that is being captured
        if cycle.is_interrupted:
            self.discard()
        elif cycle.is_in_flight or (cycle.state is CycleState.REDUCED and cycle.results):
            self._restart(entry)
        elif cycle.results.is_added_to(entry):
            cycle.added_to_kept = entry.name
        self._follow_joins()
        cycle.enter(BackwardEnd(_leave(weakref.ref(self))))

    @property
    def _can_reduce_again(self) -> bool:
        """Whether gradients may add to reduced gradients and be reduced again.

        This needs Average: the mean of gradients that are already equal on all ranks does not change them.
        """
        return self.options.op is ReduceOp.AVERAGE and not self.options.sharded

    @property
    def takes_part(self) -> bool:
        """Whether this reducer reduces when another reducer of the optimizer ends its cycle."""
        return not self.is_reduced or self._can_reduce_again

    def leave(self, end: BackwardEnd) -> None:
        """End the outermost backward pass."""
        if not self.cycle.leave(end):
            return
        if not self._negotiation.is_negotiated and self._negotiation.begin():
            self.cycle.send()
        else:
            self.submit_all()
        if self.options.wait_in_backward:
            # Wait in a later callback, when all other reducers have ended the pass and submitted.
            self._context.part(_EndedPasses).reducers.append(self)
            after_backward(_finish_all(self._context))

    def _restart(self, entry: GradientSlot) -> None:
        """Discard the cycle when a further gradient arrives, if the user dropped the first gradient.

        Raises:
            InvalidArgumentError: the user kept the first gradient, so this gradient is one too many.
        """
        is_dropped = self.cycle.results.was_dropped(entry, self._entries)
        if is_dropped and not torch.is_grad_enabled():
            # The user dropped the gradients (`module.zero_grad()`), as in a GAN after the other network's loss. Every
            # rank does the same.
            self.discard()
            return
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} got a gradient in more than backward_passes_per_step="
            f"{self.cycle.passes} backward passes before step(). Call step() or zero_grad() of this optimizer between the "
            "backward passes, or set backward_passes_per_step to the number of passes per step."
        )

    def _take_again(self, entry: GradientSlot) -> None:
        """Record a parameter's further gradient in the same pass, as with several reentrant checkpoints."""
        bucket = entry.bucket
        if not isinstance(bucket, UnusedParameters) and bucket.work is not None:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {entry.name!r} got a second gradient in the same backward pass, after the "
                "first was sent; in the first step it got only one. Use the module in the same number of reentrant "
                "checkpoints in every step, or give checkpoint(..., use_reentrant=False)."
            )
        entry.grad = entry.param.grad
        entry.repeats = True

    # --- From the optimizer. ---

    def submit_all(self) -> None:
        """Submit every remaining bucket, with zeros for parameters without a gradient."""
        cycle, negotiation = self.cycle, self._negotiation
        if cycle.state is CycleState.SENT:
            return
        self._follow_joins()
        if not negotiation.is_negotiated:
            if negotiation.negotiate():
                self._plan()
        elif negotiation.undecided:
            negotiation.start_vote()
        self.buckets.assign_memory(is_registered=negotiation.is_negotiated)
        for bucket in self.buckets:
            if bucket.work is None:
                self._submit(bucket)
        if self._ready is not None:
            self._ready.offer()
        cycle.complete()

    def wait(self) -> None:
        """Wait until all reduced gradients are in `.grad`, and end the cycle.

        Raises:
            InvalidArgumentError: a gradient was changed or replaced in flight, so it would differ from the other
                ranks'. All submitted operations have ended, and the next cycle works.
        """
        self.submit_all()
        changed = self.buckets.find_changed()
        try:
            self.buckets.wait()
            self._negotiation.reduce_late(self.buckets)
            self._follow_order()
            if self._planner.count_step():
                self._replan()
        finally:
            self._reset()
        if changed is not None:
            raise _changed_in_flight(changed)
        self.cycle.finish()
        if not self._can_reduce_again:
            self.remember()

    def use(self) -> None:
        """Mark the reduced gradients as used by a step. The next pass begins a new cycle."""
        self.cycle.use()

    def remember(self) -> None:
        """Record the current reduced gradients."""
        self.cycle.results.note(self._entries)

    def find_changed(self) -> str | None:
        """Find a parameter with a gradient changed or replaced after `remember`.

        Returns its name, or None.
        """
        return self.cycle.results.find_changed(self._entries)

    def discard(self) -> None:
        """Wait for the operations in flight, then forget the cycle.

        The operations still write into the gradients.
        """
        self.cycle.drop()
        if not self.cycle.is_open:
            return
        try:
            self.buckets.wait_for_engine()
            self._negotiation.wait_for_vote()
            self._follow_order()
        finally:
            self._reset()

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        """Divide the gradients into buckets of another size. Every rank must call this between the same cycles."""
        self.options = self._planner.options = replace(self.options, bucket_bytes=bucket_bytes)
        if self._ready is None:  # otherwise the end of the first cycle does it
            self._plan()

    def _submit(self, bucket: Bucket) -> None:
        self.buckets.submit(bucket)
        self.cycle.send()

    def _reset(self) -> None:
        self.cycle.reset()
        if self._ready is not None:
            self._ready.seen = []
        self.buckets.reset()
        self._negotiation.reset()

    # --- The plan. ---

    def _plan(self) -> None:
        """Divide the gradients into buckets."""
        self.buckets.divide(self._gradient_order, self._negotiation.unused)
        if self._negotiation.is_negotiated:
            self.buckets.assign_memory(is_registered=True)

    def _replan(self) -> None:
        self._reset()
        self._plan()

    def _follow_joins(self) -> None:
        if not self.cycle.is_in_flight and self._planner.follow_joins():
            self._plan()

    def _follow_order(self) -> None:
        """Divide the gradients again, in the first rank's ready order."""
        order = self._ready.agreed() if self._ready is not None else None
        if order is not None:
            self._ready, self._gradient_order = None, order
            self._replan()


class _EndedPasses(ContextPart, threading.local):
    """Reducers on this thread after their backward pass has ended and before they wait."""

    def __init__(self) -> None:
        self.reducers: list[Reducer] = []


def _leave(reducer: weakref.ref[Reducer]) -> Callable[[BackwardEnd], None]:
    def leave(end: BackwardEnd) -> None:
        target = reducer()
        if target is not None:
            target.leave(end)

    return leave


def _finish_all(context: Context) -> Callable[[], None]:
    def finish() -> None:
        ended = context.part(_EndedPasses).reducers
        # Skip reducers of an earlier pass that ended in an exception before they waited.
        waiting = {reducer for reducer in ended if reducer.cycle.is_open}
        ended.clear()
        for reducer in tuple(waiting):
            waiting.update(each for each in reducer.siblings() if each.takes_part)
        wait_for_all(sorted(waiting, key=lambda reducer: reducer.number))

    return finish


def wait_for_all(reducers: Sequence[Reducer]) -> None:
    """Reduce the gradients of several reducers, in the order of their creation."""
    for reducer in reducers:
        reducer.submit_all()
    for reducer in reducers:
        reducer.wait()


def _changed_in_flight(entry: GradientSlot) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"DistributedOptimizer: the gradient of {entry.name!r} was changed, replaced or dropped while it was being "
        "reduced (p.grad.mul_(...), p.grad = ..., p.grad.data = ...), so the result is lost. Call "
        "optimizer.synchronize() before you change gradients; step() then does not reduce again. Register "
        "hooks that change them before the optimizer is built."
    )


def _hook(reducer: weakref.ref[Reducer], entry: GradientSlot) -> Callable[[Tensor], None]:
    def on_gradient(_: Tensor) -> None:
        target = reducer()
        if target is not None:
            target.on_gradient(entry)

    return on_gradient


# These may run inside a compiled training step.
leave_untraced(_hook, _finish_all, BackwardEnd)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
