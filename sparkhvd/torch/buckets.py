"""Gradients in buckets, submitted from autograd's hooks while backward still runs.

A bucket is a gather list: the gradients' own memory, reduced as one operation and in place, without a copy.

**Threads.** Hooks run on autograd's threads (for CPU parameters the thread that called `backward`), everything
else on the thread that calls the optimizer; both under the GIL, never at the same time.

**Ownership.** From its submission until `wait` the engine reads and writes the memory of a gradient; the
operation keeps the tensor alive, also if the user drops it. Hooks hold the reducer weakly, and the reducer knows
nothing of the optimizer, so a dropped optimizer takes its hooks with it.

**One cycle** is: `passes` backward passes; in the last one every complete bucket is submitted by the hook that
completes it, and when backward ends the others follow, with zeros for parameters that got no gradient; `wait`
ends it. All ranks therefore submit the same operations whatever part of the model each of them used. With
`Sum` and `Average` one flag per parameter travels along, so that a parameter that no rank used ends without
gradient, exactly as in one process.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from sparkhvd.engine import ReduceOp, Work, allreduce_call
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.torch._context import Context
from sparkhvd.torch.collectives.allgathers import gathered, start_allgather
from sparkhvd.torch.collectives.broadcasts import start_broadcast
from sparkhvd.torch.collectives.tensors import engine_dtype
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.gradient_memory import GradientMemory, needed_bytes

__all__ = ["ReduceOptions", "Reducer", "plan_buckets"]

# Counts the frames of `backward()` on a stack; see `_inside_nested_backward`.
_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def plan_buckets(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    bucket_bytes: int,
    groups: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """Divide tensors into buckets of one kind each, at most `bucket_bytes` unless one tensor alone is larger.

    Args:
        sizes: bytes of each tensor.
        kinds: what must be equal within a bucket (the element type).
        order: tensor numbers, in the order in which they are expected to become ready.
        bucket_bytes: when a bucket is full.
        groups: tensor numbers that stay together whatever their size; the rest is divided as above.

    Returns:
        Tensor numbers per bucket; buckets in the order in which they are expected to become full.
    """
    place = {index: position for position, index in enumerate(order)}
    buckets: list[tuple[int, ...]] = []
    grouped: set[int] = set()
    for group in groups:
        by_kind: dict[Hashable, list[int]] = {}
        for index in sorted(group, key=place.__getitem__):
            by_kind.setdefault(kinds[index], []).append(index)
        buckets += [tuple(part) for part in by_kind.values()]
        grouped.update(group)
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index in order:
        if index in grouped:
            continue
        kind = kinds[index]
        if kind in filling and filled[kind] + sizes[index] > bucket_bytes:
            buckets.append(tuple(filling.pop(kind)))
        if kind not in filling:
            filling[kind], filled[kind] = [], 0
        filling[kind].append(index)
        filled[kind] += sizes[index]
    buckets += [tuple(rest) for rest in filling.values()]
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are reduced.

    Attributes:
        op: the reduction.
        prescale: factor of every rank's gradient.
        postscale: factor of the result.
        compression: what is sent in place of the gradients.
        passes: backward passes per cycle; their gradients add up locally and are not divided.
        sparse_as_dense: send sparse gradients as dense ones, else they are an error.
        bucket_bytes: when a bucket is full.
        groups: parameter numbers that share a bucket.
        process_set: the engine's number of the ranks that reduce.
        ranks: their global ranks, ascending.
        as_views: gradients live in registered memory.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    compression: type[Compressor]
    passes: int
    sparse_as_dense: bool
    bucket_bytes: int
    groups: tuple[tuple[int, ...], ...] = ()
    process_set: int = 0
    ranks: tuple[int, ...] = ()
    as_views: bool = False


class _Entry:
    """One parameter."""

    __slots__ = (
        "address",
        "bucket",
        "dtype",
        "grad",
        "index",
        "missing",
        "name",
        "param",
        "shape",
        "stride",
        "wire_dtype",
    )

    def __init__(self, index: int, name: str, param: Tensor, wire_dtype: torch.dtype) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.shape = tuple(param.shape)
        self.stride: tuple[int, ...] = _memory_layout(param)
        self.dtype = param.dtype
        self.wire_dtype = wire_dtype
        self.bucket: _Bucket
        self.grad: Tensor | None = None  # this cycle's gradient, once it is complete
        self.missing = False  # this rank's gradient is a stand-in of zeros
        self.address = -1  # of what was sent last; the call is told when it changes

    @property
    def num_bytes(self) -> int:
        return self.param.numel() * self.wire_dtype.itemsize


class _Bucket:
    """Parameters that are reduced as one operation."""

    __slots__ = (
        "call",
        "entries",
        "flags",
        "flat",
        "name",
        "ones",
        "pending",
        "sent",
        "work",
    )

    def __init__(
        self,
        name: str,
        entries: list[_Entry],
        flagged: bool,
        options: ReduceOptions,
        flat: Tensor | None = None,
    ) -> None:
        self.name = name
        self.entries = entries
        dtype = engine_dtype(name, torch.empty(0, dtype=entries[0].wire_dtype))
        shapes = [entry.shape for entry in entries]
        if flat is not None:
            shapes = [(flat.numel(),)]
        if flagged:
            shapes.append((len(entries),))
        self.call = allreduce_call(
            shapes,
            dtype,
            options.op,
            options.prescale,
            options.postscale,
            options.process_set,
        )
        self.flat = flat  # the memory of all its gradients, if they are views
        if flat is not None:
            self.call.place(0, flat.data_ptr(), flat.data_ptr())
        self.pending = len(entries)
        self.work: Work | None = None
        # What was sent instead of the gradient itself: (gradient, what was sent, compression's context).
        self.sent: list[tuple[_Entry, Tensor, Any]] = []
        for entry in entries:
            entry.bucket = self
            entry.address = -1
        if flagged:
            # Who has a gradient: ones go in as they are, and are read only if a gradient is missing here.
            self.ones = torch.ones(len(entries), dtype=entries[0].wire_dtype)
            self.flags = torch.empty_like(self.ones)


def _memory_layout(param: Tensor) -> tuple[int, ...]:
    """The strides that autograd gives to the gradient of `param`: its own if its memory has no holes."""
    return tuple(torch.empty_like(param, device="meta").stride())


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
        self.in_flight = False
        # A gradient has arrived since the last wait.
        self.dirty = False
        self._passes_left = options.passes
        self._outer_task = self._nested_task = -1
        self._outer_is_running = False
        self._entries = [
            _Entry(index, name, param, self._wire_dtype(name, param))
            for index, (name, param) in enumerate(named)
        ]
        flagging = (ReduceOp.AVERAGE, ReduceOp.SUM)
        self._flagged = (
            options.op in flagging
            and options.compression in vars(Compression).values()
            and not options.as_views  # every gradient is there
        )
        self._agreement: tuple[Tensor, Work] | None = self._offer_agreement()
        self._memory = self._allocate() if options.as_views else None
        self._plan_number = 0
        self._buckets: list[_Bucket] = []
        order = list(reversed(range(len(self._entries))))
        self._plan(order)
        # The order in which gradients became ready in the first cycle; None once the plan is final.
        self._order: list[int] | None = (
            [] if len(self._buckets) > 1 and not options.groups else None
        )
        self._agreed_order: tuple[Tensor, Work] | None = None
        self._hooks = [
            entry.param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), entry))
            for entry in self._entries
        ]
        self._finalizer = weakref.finalize(self, _remove, self._hooks)
        self._finalizer.atexit = False

    def _allocate(self) -> GradientMemory:
        self._check_agreement()  # first: what is allocated follows from the parameters
        buffer = self.context.engine.allocate(
            needed_bytes(self._entries),
            name=f"{self.label}.memory",
            process_set=self.options.process_set,
        )
        return GradientMemory(buffer)

    def zero(self) -> None:
        """Set gradients that live in registered memory to zero."""
        if self._memory is not None:
            self._memory.zero(self._entries)

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

    def on_gradient(self, entry: _Entry) -> None:
        """A gradient of this pass is complete."""
        task = _graph_task()
        if task not in (self._outer_task, self._nested_task):
            self._enter(task)
        if entry.grad is not None:
            self._gradient_again(entry)
        if self._passes_left > 1:
            return
        entry.grad = entry.param.grad
        if self._order is not None:
            self._order.append(entry.index)
        bucket = entry.bucket
        bucket.pending -= 1
        if bucket.pending == 0:
            self._submit(bucket)

    def _enter(self, task: int) -> None:
        """The first gradient of a backward pass."""
        self.dirty = True
        if _inside_nested_backward():
            # Reentrant checkpointing: callbacks of the inner pass would come before the outer one ends.
            self._nested_task = task
            return
        if self._outer_is_running:  # the last pass ended in an exception
            self.discard()
            self.dirty = True
        self._outer_task = task
        self._outer_is_running = True
        Variable._execution_engine.queue_callback(self._leave)

    def _leave(self) -> None:
        """The end of a backward pass."""
        self._outer_is_running = False
        if self._passes_left > 1:
            self._passes_left -= 1
        else:
            self.submit_all()

    def _gradient_again(self, entry: _Entry) -> None:
        """A gradient that is complete in this cycle changed, or was dropped and made anew."""
        if entry.param.grad is not entry.grad and not torch.is_grad_enabled():
            # Dropped (`module.zero_grad()`), as a GAN does with the gradients that the other network's
            # loss left in this one. The same happens on every rank.
            outer_is_running = self._outer_is_running
            self.discard()
            self._outer_is_running = outer_is_running
            self.dirty = True
            return
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} got a gradient more than backward_passes_per_step="
            f"{self.passes} times before step(). Call step() or zero_grad() of this optimizer between the "
            "backward passes, or give backward_passes_per_step the number of passes per step."
        )

    # --- From the optimizer. ---

    def submit_all(self) -> None:
        """Submit every bucket that has not been, with zeros for parameters that have no gradient."""
        for bucket in self._buckets:
            if bucket.work is None:
                for entry in bucket.entries:
                    if entry.grad is None:
                        self._take_gradient(entry)
                self._submit(bucket)
        if self._order is not None and self._agreed_order is None:
            self._offer_order(self._order)

    def wait(self) -> None:
        """End the cycle: all gradients are reduced and lie in `.grad`."""
        self.submit_all()
        try:
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
                if bucket.sent:
                    self._take_back(bucket)
                if any([entry.missing for entry in bucket.entries]):
                    self._drop_unused(bucket)
            self._follow_order()
        finally:
            self._reset()

    def discard(self) -> None:
        """Forget the cycle; what is in flight is waited for, because the engine still writes it."""
        if not (self.dirty or self.in_flight):
            return
        try:
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
            self._follow_order()
        finally:
            self._reset()

    def _reset(self) -> None:
        self.in_flight = False
        self.dirty = False
        self._passes_left = self.passes
        self._outer_is_running = False
        if self._order is not None:
            self._order = []
        for bucket in self._buckets:
            bucket.work = None
            bucket.sent.clear()
            bucket.pending = len(bucket.entries)
            for entry in bucket.entries:
                entry.grad = None
                entry.missing = False

    # --- One bucket. ---

    def _take_gradient(self, entry: _Entry) -> None:
        grad = entry.param.grad
        if grad is None:
            # The optimizer's own tensor, so that a later backward pass is noticed.
            grad = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype).zero_()
            entry.param.grad = grad
            entry.missing = True
        entry.grad = grad

    def _submit(self, bucket: _Bucket) -> None:
        if self._agreement is not None:
            self._check_agreement()
        if self._memory is not None:
            for entry in bucket.entries:
                self._require_dense(entry)
                entry.grad = self._memory.take(entry)
            self.in_flight = True
            bucket.work = self.context.engine.start(bucket.call, bucket.name, bucket.flat)
            return
        tensors = bucket.call.tensors
        keep: list[Any] = []
        plain = self.options.compression is Compression.none
        for position, entry in enumerate(bucket.entries):
            tensor = entry.grad
            assert tensor is not None
            if not (
                plain
                and tensor.is_cpu
                and tensor.dtype is entry.dtype
                and tensor.layout is torch.strided
                and tensor.stride() == entry.stride
            ):
                tensor = self._send_instead(bucket, entry, tensor)
            address = tensor.data_ptr()
            if address != entry.address:
                entry.address = address
                tensors[position].input = tensors[position].output = address
            keep.append(tensor)
        if self._flagged:
            has_gradient = self._flags(bucket)
            tensors[-1].input = has_gradient.data_ptr()
            tensors[-1].output = bucket.flags.data_ptr()
            # Not the bucket itself: it holds the work, and the work the engine, which holds what is kept.
            keep += (has_gradient, bucket.flags)
        self.in_flight = True
        bucket.work = self.context.engine.start(bucket.call, bucket.name, keep)

    def _flags(self, bucket: _Bucket) -> Tensor:
        if not any([entry.missing for entry in bucket.entries]):
            return bucket.ones
        return torch.tensor(
            [not entry.missing for entry in bucket.entries], dtype=bucket.ones.dtype
        )

    def _send_instead(self, bucket: _Bucket, entry: _Entry, grad: Tensor) -> Tensor:
        """What to send for a gradient that cannot be, or shall not be, sent from where it lies."""
        if not grad.is_cpu:
            raise InvalidArgumentError(
                f"DistributedOptimizer: the gradient of {entry.name!r} is on {grad.device}, and this version "
                "of sparkhvd moves CPU tensors only. Keep the model on the CPU."
            )
        plain = self.options.compression is Compression.none
        if plain and grad.dtype is entry.dtype and grad.layout is torch.strided:
            strides = grad.stride()
            if all(
                ours == theirs or length == 1
                for ours, theirs, length in zip(strides, entry.stride, entry.shape, strict=True)
            ):
                entry.stride = (
                    strides  # the same memory: the stride of a dimension of length 1 is arbitrary
                )
                return grad
        dense = grad
        if grad.layout is not torch.strided:
            self._require_dense(entry)
            dense = grad.to_dense()
        wire, compression_context = self.options.compression.compress(dense.detach())
        if wire is grad or wire.dtype != entry.wire_dtype or wire.stride() != entry.stride:
            copy = torch.empty_strided(entry.shape, entry.stride, dtype=entry.wire_dtype)
            wire = copy.copy_(wire)
        bucket.sent.append((entry, wire, compression_context))
        return wire

    def _require_dense(self, entry: _Entry) -> None:
        grad = entry.param.grad
        if (
            grad is not None
            and grad.layout is not torch.strided
            and not self.options.sparse_as_dense
        ):
            raise InvalidArgumentError(
                f"DistributedOptimizer: the gradient of {entry.name!r} is sparse, and this version of "
                "sparkhvd sends dense gradients only. Give sparse_as_dense=True, or build the layer "
                "with sparse=False."
            )

    def _take_back(self, bucket: _Bucket) -> None:
        for entry, wire, compression_context in bucket.sent:
            result = self.options.compression.decompress(wire, compression_context)
            grad = entry.grad
            assert grad is not None
            if grad.layout is not torch.strided:
                entry.param.grad = result.to(grad.dtype).to_sparse(grad.sparse_dim())
            else:
                grad.copy_(result)

    def _drop_unused(self, bucket: _Bucket) -> None:
        if not self._flagged:
            return
        for entry, used in zip(bucket.entries, bucket.flags.tolist(), strict=True):
            if entry.missing and not used:
                entry.param.grad = None

    # --- The plan. ---

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        """Divide the gradients anew, into buckets of another size; between cycles and on every rank alike."""
        self.options = replace(self.options, bucket_bytes=bucket_bytes)
        if self._order is None:  # else the end of the first cycle does it
            self._plan(self._planned)

    def _plan(self, order: Sequence[int]) -> None:
        entries = self._entries
        self._planned = order
        plan = plan_buckets(
            [entry.num_bytes for entry in entries],
            [entry.wire_dtype for entry in entries],
            order,
            self.options.bucket_bytes,
            self.options.groups,
        )
        # A new plan has new names, because the old ones mean other shapes to the engine.
        prefix = f"{self.label}.{self._plan_number}"
        self._plan_number += 1
        divided = [[entries[index] for index in indices] for indices in plan]
        flats: Sequence[Tensor | None] = [None] * len(plan)
        if self._memory is not None:
            flats = self._memory.lay_out(divided)
        self._buckets = [
            _Bucket(f"{prefix}.{number}", bucket, self._flagged, self.options, flat)
            for number, (bucket, flat) in enumerate(zip(divided, flats, strict=True))
        ]

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
            if self.options.process_set == 0:
                return  # a rank has joined and missed this cycle; all try again in the next
            raise
        self._order = None
        self._reset()
        self._plan(order.tolist())

    def _wire_dtype(self, name: str, param: Tensor) -> torch.dtype:
        compression = self.options.compression
        if compression is Compression.none:
            wire = param.detach()
        else:
            wire = compression.compress(torch.zeros_like(param))[0]
        engine_dtype(f"DistributedOptimizer, {name!r}", wire)
        if wire.shape != param.shape:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {compression.__name__} turns {name!r} of shape {tuple(param.shape)} "
                f"into {tuple(wire.shape)}. A compressor must keep the shape."
            )
        return wire.dtype

    # --- That all ranks have the same parameters. ---

    def _description(self) -> list[str]:
        options = self.options
        groups = f"groups {options.groups}" if options.groups else "no groups"
        return [
            f"op {options.op.name.title()}, factors {options.prescale} and {options.postscale}, "
            f"{options.compression.__name__}, bucket_bytes {options.bucket_bytes}, {groups}"
            f"{', gradients as views' if options.as_views else ''}",
            *[
                f"{entry.name!r} with shape {entry.shape}, strides {entry.stride}, {entry.dtype}"
                for entry in self._entries
            ],
        ]

    def _offer_agreement(self) -> tuple[Tensor, Work]:
        """Start to compare this rank's parameters with the others'; looked at by the first bucket."""
        digest = hashlib.sha256(json.dumps(self._description()).encode()).digest()
        mine = torch.tensor(list(digest), dtype=torch.uint8)
        name = f"{self.label}.digest"
        return mine, start_allgather(self.context, name, mine, self.options.process_set)

    def _check_agreement(self) -> None:
        assert self._agreement is not None
        mine, work = self._agreement
        work.wait()
        digests = gathered(work, mine.dtype, mine.shape)[0].view(-1, len(mine))
        if bool((digests == mine).all()):
            self._agreement = None
            return
        text = torch.frombuffer(
            bytearray(json.dumps(self._description()).encode()), dtype=torch.uint8
        )
        work = start_allgather(
            self.context, f"{self.label}.description", text, self.options.process_set
        )
        work.wait()
        joined, rows = gathered(work, text.dtype, text.shape)
        parts = [json.loads(bytes(part.tolist())) for part in joined.split(list(rows))]
        raise MismatchError(_difference(self.label, self.options.ranks, parts))


def _difference(label: str, ranks: Sequence[int], descriptions: list[list[str]]) -> str:
    """Says where the first rank that differs from the set's first differs."""
    first = descriptions[0]
    place = next(place for place, found in enumerate(descriptions) if found != first)
    found, other, one = descriptions[place], ranks[place], ranks[0]
    advice = "Build the same model and the same optimizer, in the same order, on every rank."
    for number, (ours, theirs) in enumerate(zip(first, found, strict=False)):
        if ours != theirs:
            what = "the options" if number == 0 else f"parameter {number - 1}"
            return f"{label}: ranks disagree on {what}. Rank {one} has {ours}; rank {other} has {theirs}. {advice}"
    return (
        f"{label}: ranks disagree on the number of parameters. Rank {one} has {len(first) - 1}, "
        f"rank {other} has {len(found) - 1}. {advice}"
    )


def _hook(reducer: weakref.ref[Reducer], entry: _Entry) -> Callable[[Tensor], None]:
    def on_gradient(_: Tensor) -> None:
        target = reducer()
        if target is not None:
            target.on_gradient(entry)

    return on_gradient


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _inside_nested_backward() -> bool:
    """Whether a hook runs in a backward pass that another one called on this thread.

    torch offers no way to ask; each `backward()` leaves one frame of a known function on the stack.
    """
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _BACKWARD_CODE
        frame = frame.f_back
    return depth > 1
